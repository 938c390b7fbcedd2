"""Which case meets which dtype: every dtype on a GPU; on a CPU float32, and the halves where they can differ."""

import pytest
import torch

from tilewise.testing.cases import CASES

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# On a CPU the halves cost conversions and, interpreted, time: one case of each kind of arithmetic is enough there.
_HALF_ON_CPU = {"mha", "gqa_causal_odd_lengths", "causal_bottom_right_more_queries", "window_both_sides",
                "value_dim_smaller", "packed_qkv_causal", "moat_window", "scale_given",
                "bias_shared_by_batch_causal", "everything"}


def pytest_generate_tests(metafunc):
    if {"case", "dtype"} <= set(metafunc.fixturenames):
        on_cpu = torch.device(metafunc.config.getoption("--device")).type == "cpu"
        pairs = {f"{case}-{name}": (case, dtype) for case in CASES for name, dtype in _DTYPES.items()
                 if not on_cpu or dtype is torch.float32 or case.name in _HALF_ON_CPU}
        metafunc.parametrize(("case", "dtype"), pairs.values(), ids=pairs.keys())


_FLOAT32_ALONE = ("cuda", "cuda_ieee")


@pytest.fixture(scope="session")
def main_dtype(device, backend):
    """What the device is mostly used with: float32 on a CPU, as Triton's interpreter wants it; or the only one."""
    return torch.float32 if device.type == "cpu" or backend.name in _FLOAT32_ALONE else torch.bfloat16
