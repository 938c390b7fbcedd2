"""Combining the splits of rows whose keys were split: the kernel against float64, in the interpreter without a GPU."""

import math

import pytest
import torch

from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec, ScoreOptions

combine = pytest.importorskip("tilewise.kernels.triton.combine", reason="Triton is not installed")


@pytest.mark.parametrize("sinks", ["none", "dense", "strided"])
@pytest.mark.parametrize(("splits", "dv", "first"), [(2, 64, 0), (4, 128, 37), (5, 40, 100), (13, 96, 0)])
def test_rows_are_combined_others_left_alone_and_what_was_not_written_is_not_read(device, splits, dv, first, sinks):
    torch.manual_seed(0)
    b, h, s, width = 2, 3, 37, {40: 64}.get(dv, dv)
    q = torch.zeros(b, s, h, dv, dtype=torch.float16, device=device).transpose(1, 2)
    logits = torch.randn(2 * h, device=device)[::2] if sinks == "strided" else torch.randn(h, device=device)
    spec = None if sinks == "none" else OperandSpec((h,), logits.stride(), torch.float32)
    problem = AttentionProblem(b=b, hq=h, hk=h, sq=s, sk=s, d=dv, dv=dv, dtype=q.dtype, device=q.device, scale=1.0,
                               scores=ScoreOptions(sinks=spec), q_strides=q.stride())
    rows = range(first, b * h * s)
    maxima, values = torch.randn(len(rows), splits) * 3.0, torch.randn(len(rows), splits, dv)
    sums = torch.rand(len(rows), splits) + 0.5
    maxima[torch.rand(maxima.shape) < 0.3] = float("-inf")
    maxima[0] = float("-inf")  # a row that sees no key
    partial = torch.full((len(rows), splits, width + 8), float("nan"))
    partial[..., width] = maxima
    partial[..., width + 1] = torch.where(maxima.isinf(), float("nan"), sums)
    partial[..., :dv] = torch.where(maxima.isinf()[..., None], float("nan"), values)
    out = torch.full_like(q, 7.0)
    lse = torch.full((b, h, s), 7.0, device=device)
    launch = combine.combine_splits_launch(problem, rows, partial.shape, overlapped=False)
    launch(partial.to(device), out, lse, None if spec is None else logits, None if sinks != "strided" else 2)

    natural = maxima.double() * math.log(2.0) + sums.double().log()
    heads = torch.tensor(rows) // s % h
    entering = natural if spec is None else torch.cat([natural, logits.cpu().double()[heads][:, None]], 1)
    want_lse = torch.logsumexp(entering, 1)
    weights = torch.exp(natural - torch.where(want_lse.isinf(), 0.0, want_lse)[:, None])
    want = (weights[..., None] * values.double()).sum(1)
    out, lse = out.cpu().double().reshape(-1, dv), lse.cpu().double().flatten()
    assert (out[:first] == 7.0).all()
    assert (lse[:first] == 7.0).all()
    torch.testing.assert_close(out[first:], want, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(lse[first:], want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("largest", [3e7, -3e7, 2.0**30, 1e38])
def test_splits_with_the_same_huge_maximum_are_weighed_by_their_sums(device, largest):
    """Their lse, one number, had no bits left for the sums: each split had the same weight."""
    q = torch.zeros(1, 1, 1, 64, dtype=torch.float16, device=device)
    partial = torch.zeros(1, 2, 72)
    partial[0, :, 64], partial[0, :, 65] = largest, torch.tensor([3.0, 1.0])
    partial[0, :, :64] = torch.tensor([1.0, 5.0])[:, None]
    out, lse = torch.empty_like(q), torch.empty(1, 1, 1, device=device)
    combine.combine_splits_launch(AttentionProblem.from_tensors(q, q, q), range(1), partial.shape, overlapped=False)(
        partial.to(device), out, lse, None, None)
    assert (out == 2.0).all()


def test_a_row_with_a_nan_keeps_it(device):
    q = torch.zeros(1, 1, 2, 64, dtype=torch.float16, device=device)
    problem = AttentionProblem.from_tensors(q, q, q)
    partial = torch.zeros(2, 3, 72)
    partial[..., 65] = 1.0
    partial[0, 1] = float("nan")
    out, lse = torch.empty_like(q), torch.empty(1, 1, 2, device=device)
    combine.combine_splits_launch(problem, range(2), partial.shape, overlapped=False)(
        partial.to(device), out, lse, None, None)
    assert out[0, 0, 0].isnan().all()
    assert lse[0, 0, 0].isnan()
    assert (out[0, 0, 1] == 0.0).all()
