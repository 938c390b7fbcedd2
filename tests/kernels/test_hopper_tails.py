"""Tails hold lse and delta of queries as products take them off, and the sums for dq begin at 0."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Triton is not installed")
from tilewise.kernels.gluon.hopper_tails import hopper_tails_kernel

SCALE, SUMS = 0.125, 4096


@pytest.mark.parametrize(("rows", "zeroed", "counted"), [(1, SUMS, False), (64, SUMS, True), (1000, SUMS, False),
                                                         (1000, 0, False)])
def test_three_numbers_add_up_to_a_float32_one(rows, zeroed, counted, device):
    torch.manual_seed(0)
    lse, delta = torch.randn(2, rows) * torch.tensor([[100.0], [1e-3]])
    tails, programs = torch.full((rows + 1, 16), float("nan"), dtype=torch.bfloat16), -(-rows // 64) + 1
    sums = torch.full(((programs + 1) * SUMS,), float("nan"))
    lse, delta, tails, sums = (tensor.to(device) for tensor in (lse, delta, tails, sums))
    hopper_tails_kernel[(programs,)](lse, delta, tails, sums, rows, SCALE, zeroed, counted)
    assert tails[rows].isnan().all(), "past the last row"
    cleared = programs * (zeroed + counted)  # a counter each behind the sums
    assert torch.equal(sums.isnan(), torch.arange(len(sums), device=device) >= cleared)
    assert not sums[:cleared].any()
    made = tails[:rows].double()
    for first, want in ((0, -lse / SCALE), (3, -delta)):
        torch.testing.assert_close(made[:, first:first + 3].sum(1), want.double(), rtol=2.0**-24, atol=0.0)
    assert not made[:, 6:].any(), "what meets zeros must be finite"


def test_a_query_that_sees_nothing_has_finite_numbers_that_make_its_probabilities_zero(device):
    """-inf would meet the zeros that pick delta: 0 · inf is NaN."""
    lse = torch.tensor([float("-inf"), 1.0], device=device)
    tails, sums = torch.zeros(2, 16, dtype=torch.bfloat16, device=device), torch.zeros(SUMS, device=device)
    hopper_tails_kernel[(1,)](lse, torch.ones_like(lse), tails, sums, 2, SCALE, SUMS, False)
    assert tails.isfinite().all()
    assert (tails[:, :3].float().sum(1) * 2.0**-40 < -1e16).tolist() == [True, False]
