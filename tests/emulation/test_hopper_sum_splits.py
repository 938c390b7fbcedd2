"""The splits of dk and dv that the Hopper backward kernel writes come out as their sums."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from tilewise.kernels.hopper.arguments import StridedRows
from tilewise.kernels.hopper.backward.sum_splits import ROWS, hopper_sum_splits_kernel
from tilewise.problem import padded_dim


@pytest.mark.parametrize(("splits", "rows", "d", "dv"), [(2, 70, 64, 40), (7, 32, 128, 128), (3, 1, 200, 8)])
def test_dk_and_dv_are_the_sums_of_their_splits(splits, rows, d, dv, device):
    b, hk = 2, 3
    parts, sums, wanted = [], [], []
    for columns in (d, dv):
        wide = torch.randn(b, hk * splits, rows + 2, columns, device=device)
        parts.append(wide[:, :, 1:-1])
        sums.append(torch.full((b, rows, hk, columns), math.nan, dtype=torch.float16, device=device).transpose(1, 2))
        each = parts[-1].unflatten(1, (hk, splits))
        total = torch.zeros_like(each[:, :, 0])
        for split in range(splits):
            total += each[:, :, split]
        wanted.append(total.half())
    hopper_sum_splits_kernel[(-(-rows // int(ROWS)) * b * hk,)](
        *(StridedRows(tensor, *tensor.stride()[:3]) for tensor in (*parts, *sums)), rows, hk, splits, d, dv,
        padded_dim(d), padded_dim(dv))
    for got, want in zip(sums, wanted, strict=True):
        assert torch.equal(got, want)
