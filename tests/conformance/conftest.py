"""Which case meets which dtype and loss, all on a GPU, on a CPU halves where they can differ alone; and what sums."""

from importlib.util import find_spec

import pytest
import torch

from tilewise.testing.cases import CASES

_THROUGH = ("out", "out_and_lse")  # what a loss is made of
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# On a CPU the halves cost conversions and, interpreted, time: one case of each kind of arithmetic is enough there.
_HALF_ON_CPU = {"mha", "gqa_causal_odd_lengths", "causal_bottom_right_more_queries", "window_both_sides",
                "value_dim_smaller", "packed_qkv_causal", "moat_window", "scale_given",
                "bias_shared_by_batch_causal", "everything"}


@pytest.fixture
def sums_in_one_order(device, monkeypatch):
    """On a CPU, let Triton's interpreter round a product's sums once.

    In the orders of numpy's BLAS a score and its lse differ, and the processor decides how much of a budget is used:
    the slopes' gradient of random seed 14 (float32, head dim 256) was at 1.04 of it on one make, and is at 0.06 so.
    """
    if device.type == "cpu" and find_spec("triton") is not None:
        from emulation.interpreter import round_products_of_tiles_once

        round_products_of_tiles_once(monkeypatch)


def pytest_generate_tests(metafunc):
    names = set(metafunc.fixturenames)
    if not {"case", "dtype"} <= names:
        return
    on_cpu = torch.device(metafunc.config.getoption("--device")).type == "cpu"
    pairs = [(case, name) for case in CASES for name in _DTYPES
             if not on_cpu or name == "fp32" or case.name in _HALF_ON_CPU]
    if "through" not in names:
        metafunc.parametrize(("case", "dtype"), [(case, _DTYPES[name]) for case, name in pairs],
                             ids=[f"{case}-{name}" for case, name in pairs])
        return
    # A gradient through lse changes delta and nothing behind it: on a CPU the losses take turns.
    rows = [(case, name, through) for i, (case, name) in enumerate(pairs) for j, through in enumerate(_THROUGH)
            if not on_cpu or i % len(_THROUGH) == j]
    metafunc.parametrize(("case", "dtype", "through"), [(case, _DTYPES[name], through) for case, name, through in rows],
                         ids=["-".join(map(str, row)) for row in rows])


_FLOAT32_ALONE = ("cuda", "cuda_ieee")


@pytest.fixture(scope="session")
def main_dtype(device, backend):
    """What the device is mostly used with: float32 on a CPU, as Triton's interpreter wants it; or the only one."""
    return torch.float32 if device.type == "cpu" or backend.name in _FLOAT32_ALONE else torch.bfloat16
