"""The names that the command line knows without torch are those of what they name."""

import pytest
import torch

from tilewise import compile_ahead
from tilewise.bench import families, grids, plan, timing, torture_peers
from tilewise.errors import InvalidInput
from tilewise.support import names

CPU = torch.device("cpu")


def test_each_list_is_what_is_there():
    assert list(names.GRIDS) == list(grids.GRIDS)
    assert list(names.FAMILIES) == list(families.FAMILIES)
    assert list(names.REGIMES) == list(timing.REGIMES)
    assert list(names.IMPLEMENTATIONS) == torture_peers.implementation_names()
    assert list(names.GPUS) == list(compile_ahead.GPUS)
    assert {name: getattr(torch, name) for name in names.DTYPES} == grids.DTYPE_NAMES


def test_providers_are_those_that_a_run_knows():
    with pytest.raises(InvalidInput) as caught:
        plan.available_providers(["nope"], CPU)
    assert str(caught.value) == f"provider is 'nope'; allowed are {', '.join(names.PROVIDERS)}."
