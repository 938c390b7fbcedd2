"""An option that a backend has not heard of is refused, not dropped: each field of ScoreOptions, also those to come."""

from dataclasses import replace

import pytest
import torch

from tilewise.backends import cudnn
from tilewise.backends import torch as torch_backend
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPTIONS, ScoreOptions

# These come with another field alone, which is refused.
WITH_ANOTHER = {"documents_k", "tiles_q", "tiles_k"}
FIELDS = [name for name in ScoreOptions._fields if name not in WITH_ANOTHER]


def having(field):
    """Options of which one is there, whatever it is."""
    usual = getattr(NO_OPTIONS, field)
    return NO_OPTIONS._replace(**{field: object() if usual is None else 0.5 if isinstance(usual, float) else not usual})


@pytest.mark.parametrize("field", FIELDS)
def test_torchs_operators_refuse_every_option(field):
    assert torch_backend._option(NO_OPTIONS) is None
    assert torch_backend._option(having(field)) is not None


@pytest.mark.parametrize("field", [field for field in FIELDS if field not in ("bias", "sinks")])
def test_cudnn_refuses_every_option_but_bias_and_sinks(field):
    plain = AttentionProblem(b=1, hq=2, hk=2, sq=64, sk=64, d=64, dv=64, dtype=torch.bfloat16,
                             device=torch.device("cuda", 0), scale=1.0, mask=Mask())
    assert cudnn._wrong_options(plain) is None
    assert cudnn._wrong_options(replace(plain, scores=having(field))) is not None
