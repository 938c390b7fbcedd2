"""Tails hold lse and delta of queries as products take them off, and the sums for dq begin at 0."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Triton is not installed")
from tilewise.kernels.gluon.hopper_tails import hopper_tails_kernel
from tilewise.problem import padded_dim

SCALE, SUMS = 0.125, 4096


def write(out, dout, lse, delta, tails, sums, programs=None, zeroed=0, counted=False):
    """Call the kernel for (heads, queries) of one entry of a batch."""
    heads, sq = lse.shape
    steps = -(-sq // 64)
    of_rows = [None] * 6 if out is None else [
        number for tensor in (out, dout) for number in (tensor.stride(0), *tensor.stride()[:2])]
    dv = 1 if out is None else out.shape[2]
    hopper_tails_kernel[(programs or steps * heads,)](
        out, dout, lse, delta, tails, sums, *of_rows, sq, heads, steps, SCALE, dv, padded_dim(dv), zeroed, counted)


@pytest.mark.parametrize(("rows", "zeroed", "counted"), [(1, SUMS, False), (64, SUMS, True), (1000, SUMS, False),
                                                         (1000, 0, False)])
def test_three_numbers_add_up_to_a_float32_one(rows, zeroed, counted, device):
    torch.manual_seed(0)
    lse, delta = torch.randn(2, 2, rows) * torch.tensor([100.0, 1e-3]).view(2, 1, 1)
    tails, programs = torch.full((2 * rows + 1, 16), float("nan"), dtype=torch.bfloat16), 2 * -(-rows // 64)
    sums = torch.full(((programs + 1) * SUMS,), float("nan"))
    lse, delta, tails, sums = (tensor.to(device) for tensor in (lse, delta, tails, sums))
    write(None, None, lse, delta, tails, sums, programs, zeroed, counted)
    assert tails[2 * rows].isnan().all(), "past the last row"
    cleared = programs * (zeroed + counted)  # a counter each behind the sums
    assert torch.equal(sums.isnan(), torch.arange(len(sums), device=device) >= cleared)
    assert not sums[:cleared].any()
    check(tails[:2 * rows], lse, delta)


@pytest.mark.parametrize(("sq", "dv"), [(64, 64), (100, 128), (130, 80)])
def test_delta_is_made_of_out_and_dout_where_it_is_not_there(sq, dv, device):
    torch.manual_seed(0)
    out, wide = torch.randn(3, sq, dv).half().to(device), torch.randn(3, sq, dv + 8).half().to(device)
    dout = wide[:, :, :dv]
    lse = torch.randn(3, sq, device=device)
    sums = torch.zeros(1, device=device)
    tails = torch.full((3 * sq, 16), float("nan"), dtype=torch.bfloat16, device=device)
    write(out, dout, lse, None, tails, sums)
    check(tails, lse, (out.double() * dout.double()).sum(2), rtol=1e-5, atol=1e-4)


def check(tails, lse, delta, **of_delta):
    made = tails.double()
    exactly = {"rtol": 2.0**-24, "atol": 0.0}
    for first, want, near in ((0, -lse / SCALE, exactly), (3, -delta, of_delta or exactly)):
        torch.testing.assert_close(made[:, first:first + 3].sum(1), want.double().flatten(), **near)
    assert not made[:, 6:].any(), "what meets zeros must be finite"


def test_a_query_that_sees_nothing_has_finite_numbers_that_make_its_probabilities_zero(device):
    """-inf would meet the zeros that pick delta: 0 · inf is NaN."""
    lse = torch.tensor([[float("-inf"), 1.0]], device=device)
    tails, sums = torch.zeros(2, 16, dtype=torch.bfloat16, device=device), torch.zeros(SUMS, device=device)
    write(None, None, lse, torch.ones_like(lse), tails, sums, zeroed=SUMS)
    assert tails.isfinite().all()
    assert (tails[:, :3].float().sum(1) * 2.0**-40 < -1e16).tolist() == [True, False]
