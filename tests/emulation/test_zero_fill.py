"""Zeros where nothing is seen, and each sequence's lengths: the kernels, interpreted on the CPU, against the oracle."""

import pytest
import torch

from conformance.calls import operands_of, problem_of, stored, visible_of
from tilewise.masks import window
from tilewise.testing.cases import CASES, Case
from tilewise.testing.inputs import make_inputs

zero_fill = pytest.importorskip("tilewise.kernels.triton.zero_fill", reason="Triton is not installed")
LENGTHS = [case for case in CASES if case.has_lengths and not case.mask.has_exceptions and not case.mask_tensor
           and not case.documents]
NAN = float("nan")


@pytest.fixture(scope="module", autouse=True)
def interpreted(device):
    if device.type == "cpu" and not hasattr(zero_fill.zero_fill_out_kernel, "rewrite"):
        pytest.skip("Triton was imported to compile, not to interpret")


def _blank(case: Case, device, given=None):
    """Return out, lse and the gradients, full of NaN before the kernels, after them.

    Behind these, by sides: which rows see something, or are seen, (b, h, s); and the operands. ``given``: the lse of
    rows that see something.
    """
    inputs = make_inputs(case, torch.float16, device)
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands)
    out = torch.empty_strided((problem.b, problem.hq, problem.sq, problem.dv), problem.out_strides,
                              dtype=torch.float16, device=device).fill_(NAN)
    lse = torch.full(out.shape[:3], NAN, device=device)
    gradients = [torch.full_like(like, NAN) for like in inputs[:3]]
    lengths = operands.cu_seqlens_q, operands.seqlens_q, operands.cu_seqlens_k, operands.seqlens_k
    zero_fill.zero_fill_out_launch(problem)(out, lse, given, operands.sinks, *lengths)
    strides = tuple(gradient.stride() for gradient in gradients)
    zero_fill.zero_fill_gradients_launch(problem, strides)(*gradients, *lengths)
    visible = visible_of(case, device)
    seen = {"q": visible.any(-1), "k": visible.any(2).unflatten(1, (case.hk, -1)).any(2)}
    return (out, lse, *gradients), {side: stored(case, own, side) for side, own in seen.items()}, operands


@pytest.mark.parametrize("case", LENGTHS, ids=str)
def test_rows_that_see_nothing_are_zero_and_no_other_is_touched(case, device):
    (out, _, dq, dk, dv), seen, _ = _blank(case, device)
    for rows, side in ((out, "q"), (dq, "q"), (dk, "k"), (dv, "k")):
        assert torch.equal(rows.isnan(), seen[side][..., None].expand(rows.shape))
        assert not rows[~seen[side]].any()


@pytest.mark.parametrize("case", LENGTHS, ids=str)
def test_their_lse_is_the_sink_and_that_of_padding_minus_infinity(case, device):
    (_, lse, *_), seen, operands = _blank(case, device)
    visible, seen = visible_of(case, device), seen["q"]
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
    zero_fill.lengths_launch(problem_of(case, inputs, operands), case.b + 1)(
        lengths, operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqlens_q, operands.seqlens_k)
    assert lengths.tolist() == [[*(len(span) for span in case.spans(side)), -1] for side in "qk"]


def test_a_length_is_no_more_than_there_are_rows(device):
    case = Case("padded", b=2, sq=5, sk=7, lengths_k=(7, 3))
    inputs = make_inputs(case, torch.float16, device)
    operands = operands_of(case, inputs)
    operands.seqlens_k[:] = 100
    lengths = torch.empty(2, 2, dtype=torch.int32, device=device)
    zero_fill.lengths_launch(problem_of(case, inputs, operands), 2)(lengths, None, None, None, operands.seqlens_k)
    assert lengths.tolist() == [[5, 5], [7, 7]]


PACKED = [case for case in LENGTHS if case.packed]


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_the_lse_of_what_sees_something_comes_from_a_tensor_with_heads_innermost(case, device):
    (_, lse, *_), seen, _ = _blank(case, device)
    given = torch.randn(lse.shape, device=device)
    (_, whole, *_), _, _ = _blank(case, device, given.transpose(1, 2).contiguous())
    torch.testing.assert_close(whole, torch.where(seen["q"], given, lse), rtol=0, atol=0)


@pytest.mark.parametrize("case", PACKED, ids=str)
@pytest.mark.parametrize("steps", [((3,), (5, 7)), ((1, 2, 3, 4), (5, 6, 7, 8)), ((), (1,))], ids=str)
def test_borders_are_rows_times_the_steps_of_their_side(case, steps, device):
    inputs = make_inputs(case, torch.float16, device)
    operands = operands_of(case, inputs)
    count = sum(map(len, steps))
    index = torch.full((2 + count, case.b + 2), -1, dtype=torch.int32, device=device)
    zero_fill.lengths_launch(problem_of(case, inputs, operands), case.b + 2, *steps)(
        index, operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqlens_q, operands.seqlens_k)
    assert [row[:case.b] for row in index[:2].tolist()] == [[len(span) for span in case.spans(side)] for side in "qk"]
    borders = [operands.cu_seqlens_q] * len(steps[0]) + [operands.cu_seqlens_k] * len(steps[1])
    for row, own, step in zip(index[2:], borders, (*steps[0], *steps[1]), strict=True):
        assert row.tolist() == [*(own * step).tolist(), -1]


def test_the_first_border_is_taken_for_0_of_lengths_and_of_borders(device):
    """Else a sequence that begins later would have the length of one that begins at 0, and end behind the tensor."""
    case = next(case for case in PACKED if case.b > 1)
    inputs = make_inputs(case, torch.float16, device)
    operands = operands_of(case, inputs)
    found = []
    for first in (0, 3):
        index = torch.full((4, case.b + 1), -1, dtype=torch.int32, device=device)
        borders = [own.clone() for own in (operands.cu_seqlens_q, operands.cu_seqlens_k)]
        for own in borders:
            own[0] = first
        zero_fill.lengths_launch(problem_of(case, inputs, operands), case.b + 1, (1,), (1,))(
            index, *borders, operands.seqlens_q, operands.seqlens_k)
        found.append(index.tolist())
    assert found[0] == found[1]
    assert found[0][2] == operands.cu_seqlens_q.tolist()


def test_lengths_that_are_no_data_are_those_of_what_is_seen(device):
    case = Case("late", b=2, sq=4, sk=9, mask=window(2, 0, "bottom_right"))
    lengths = torch.empty(2, 2, dtype=torch.int32, device=device)
    zero_fill.lengths_launch(problem_of(case, make_inputs(case, torch.float16, device)), 2)(lengths, *[None] * 4)
    assert lengths.tolist() == [[4, 4], [6, 6]]
