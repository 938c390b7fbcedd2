"""Combining the parts of keys that were cut: the kernel against float64, in the interpreter where there is no GPU."""

import math

import pytest
import torch

from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec, ScoreOptions

parts_of = pytest.importorskip("tilewise.kernels.triton.parts", reason="Triton is not installed")


@pytest.mark.parametrize("sinks", ["none", "dense", "apart"])
@pytest.mark.parametrize(("parts", "dv", "first"), [(2, 64, 0), (4, 128, 37), (5, 40, 100), (13, 96, 0)])
def test_lines_are_combined_and_others_left_and_what_was_not_written_is_not_looked_at(device, parts, dv, first, sinks):
    torch.manual_seed(0)
    b, h, s, width = 2, 3, 37, {40: 64}.get(dv, dv)
    q = torch.zeros(b, s, h, dv, dtype=torch.float16, device=device).transpose(1, 2)
    logits = torch.randn(2 * h, device=device)[::2] if sinks == "apart" else torch.randn(h, device=device)
    facts = None if sinks == "none" else OperandSpec((h,), logits.stride(), torch.float32)
    problem = AttentionProblem(b=b, hq=h, hk=h, sq=s, sk=s, d=dv, dv=dv, dtype=q.dtype, device=q.device, scale=1.0,
                               scores=ScoreOptions(sinks=facts), q_strides=q.stride())
    lines = range(first, b * h * s)
    lses, values = torch.randn(len(lines), parts) * 3.0, torch.randn(len(lines), parts, dv)
    lses[torch.rand(lses.shape) < 0.3] = float("-inf")
    lses[0] = float("-inf")  # a line that sees nothing
    records = torch.full((len(lines), parts, width + 8), float("nan"))
    records[..., width] = lses
    records[..., :dv] = torch.where(lses.isinf()[..., None], float("nan"), values)
    out = torch.full_like(q, 7.0)
    lse = torch.full((b, h, s), 7.0, device=device)
    launch = parts_of.combine_parts_launch(problem, lines, records.shape, overlapped=False)
    stride = None if sinks != "apart" else 2
    launch(records.to(device), out, lse, None if facts is None else logits, stride)

    natural = lses.double() * math.log(2.0)
    heads = torch.tensor(lines) // s % h
    entering = natural if facts is None else torch.cat([natural, logits.cpu().double()[heads][:, None]], 1)
    want_lse = torch.logsumexp(entering, 1)
    shares = torch.exp(natural - torch.where(want_lse.isinf(), 0.0, want_lse)[:, None])
    want = (shares[..., None] * values.double()).sum(1)
    out, lse = out.cpu().double().reshape(-1, dv), lse.cpu().double().flatten()
    assert (out[:first] == 7.0).all()
    assert (lse[:first] == 7.0).all()
    torch.testing.assert_close(out[first:], want, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(lse[first:], want_lse, rtol=1e-5, atol=1e-5)


def test_a_line_with_a_nan_keeps_it(device):
    q = torch.zeros(1, 1, 2, 64, dtype=torch.float16, device=device)
    problem = AttentionProblem.from_tensors(q, q, q)
    records = torch.zeros(2, 3, 72)
    records[0, 1] = float("nan")
    out, lse = torch.empty_like(q), torch.empty(1, 1, 2, device=device)
    parts_of.combine_parts_launch(problem, range(2), records.shape, overlapped=False)(
        records.to(device), out, lse, None, None)
    assert out[0, 0, 0].isnan().all()
    assert lse[0, 0, 0].isnan()
    assert (out[0, 0, 1] == 0.0).all()
