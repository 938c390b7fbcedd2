"""Zeros where nothing is seen, and each sequence's lengths: the kernels, interpreted on the CPU, against the oracle."""

import pytest
import torch

from conformance.calls import operands_of, problem_of, stored, visible_of
from tilewise.testing.cases import CASES, Case
from tilewise.testing.inputs import make_inputs

blanks = pytest.importorskip("tilewise.kernels.triton.blanks", reason="Triton is not installed")
LENGTHS = [case for case in CASES if case.has_lengths and not case.mask.has_exceptions and not case.mask_tensor
           and not case.documents]
NAN = float("nan")


@pytest.fixture(scope="module", autouse=True)
def interpreted(device):
    if device.type == "cpu" and not hasattr(blanks.blank_rows_kernel, "rewrite"):
        pytest.skip("Triton was imported to compile, not to interpret")


def _blank(case: Case, side: str, device):
    """Return rows and lse, full of NaN before the kernel, after it; and which rows see something, (b, h, s)."""
    inputs = make_inputs(case, torch.float16, device)
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands)
    like = inputs.q if side == "q" else inputs.k
    rows = torch.full_like(like, NAN)
    lse = torch.full(like.shape[:3], NAN, device=device) if side == "q" else None
    lengths = {"q": (operands.cu_seqlens_q, operands.seqlens_q), "k": (operands.cu_seqlens_k, operands.seqlens_k)}
    more = torch.full((*like.shape[:3], 8), NAN, dtype=torch.float16, device=device) if side == "k" else None
    blanks.blank_launch(problem, side, rows.shape[3], rows.stride(), None if more is None else (8, more.stride()))(
        rows, more, lse, operands.sinks if side == "q" else None, *lengths[side], *lengths["k" if side == "q" else "q"])
    visible = visible_of(case, device)
    seen = visible.any(-1) if side == "q" else visible.any(2).unflatten(1, (case.hk, -1)).any(2)
    assert more is None or torch.equal(more.isnan().any(-1), rows.isnan().any(-1))
    return rows, lse, stored(case, seen, side), operands


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("case", LENGTHS, ids=str)
def test_rows_that_see_nothing_are_zero_and_no_other_is_touched(case, side, device):
    rows, _, seen, _ = _blank(case, side, device)
    assert torch.equal(rows.isnan(), seen[..., None].expand(rows.shape))
    assert not rows[~seen].any()


@pytest.mark.parametrize("case", LENGTHS, ids=str)
def test_their_lse_is_the_sink_and_that_of_padding_minus_infinity(case, device):
    _, lse, seen, operands = _blank(case, "q", device)
    visible = visible_of(case, device)
    taking_part = stored(case, visible.new_ones(visible.shape[:3]), "q")
    expected = torch.full_like(lse, float("-inf"))
    if operands.sinks is not None:
        expected = torch.where(taking_part, operands.sinks.float()[:, None], expected)
    assert torch.equal(lse.isnan(), seen)
    torch.testing.assert_close(lse[~seen], expected[~seen], rtol=0, atol=0)


@pytest.mark.parametrize("case", LENGTHS, ids=str)
def test_lengths_are_those_of_each_sequence_however_they_are_given(case, device):
    inputs = make_inputs(case, torch.float16, device)
    operands = operands_of(case, inputs)
    lengths = torch.full((2, case.b + 1), -1, dtype=torch.int32, device=device)
    blanks.lengths_launch(problem_of(case, inputs, operands), case.b + 1)(
        lengths, operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqlens_q, operands.seqlens_k)
    assert lengths.tolist() == [[*(len(span) for span in case.spans(side)), -1] for side in "qk"]


def test_a_length_is_no_more_than_there_are_rows(device):
    case = Case("padded", b=2, sq=5, sk=7, lengths_k=(7, 3))
    inputs = make_inputs(case, torch.float16, device)
    operands = operands_of(case, inputs)
    operands.seqlens_k[:] = 100
    lengths = torch.empty(2, 2, dtype=torch.int32, device=device)
    blanks.lengths_launch(problem_of(case, inputs, operands), 2)(lengths, None, None, None, operands.seqlens_k)
    assert lengths.tolist() == [[5, 5], [7, 7]]
