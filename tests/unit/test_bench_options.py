"""What the options of a cell are called, and its tensors."""

from dataclasses import replace

import pytest
import torch

from tilewise.bench.grids import Cell
from tilewise.bench.options import OPTIONS, make_tensors, options_of, options_text
from tilewise.bench.shapes import CAUSAL, FULL, packed_case, priced, shape_case
from tilewise.testing.cases import CASES, case_named
from tilewise.testing.inputs import make_operands

PLAIN = shape_case(2, (4, 2), (33, 33), (16, 16), CAUSAL)


def cell(case, learned=()):
    return Cell("options", case, torch.float32, learned)


def test_options_are_told_in_words_with_their_dims_sizes_and_gradients():
    assert [options_text(cell(case, learned)) for case, learned in priced(PLAIN)] == [
        "", "bias 1hqk", "bias 1hqk with gradient", "ALiBi slopes", "softcap 30", "sinks with gradient", "dropout 0.1",
        "boolean mask 11qk", "documents mixed"]
    assert options_text(cell(case_named("everything"), ("alibi_slopes",))) == (
        "bias 1hqk, boolean mask b1qk, ALiBi slopes with gradient, sinks, softcap 4, dropout 0.2")
    assert options_text(cell(case_named("packed_bias"))) == "bias bhqk, packed sequences of 58/66 tokens"
    assert options_text(cell(packed_case((2, 2), (9, 5), 8, FULL))) == "packed sequences of 14 tokens"
    assert options_text(cell(case_named("padded"))) == "padded sequences"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option_of_a_case_is_known(case):
    assert bool(options_of(case)) == case.has_options
    assert set(options_of(case)) <= set(OPTIONS)


@pytest.mark.parametrize(("dims", "mask"), [("11qk", FULL), ("bhqk", CAUSAL), ("b11k", CAUSAL)])
def test_every_query_sees_a_key_and_the_mask_stays_that_of_the_tests_else(dims, mask):
    case = replace(PLAIN, mask_tensor=dims, mask=mask)
    made, drawn = make_tensors(cell(case), torch.device("cpu")).operands.mask, make_operands(case, torch.float32,
                                                                                             "cpu").mask
    visible = made & mask.visible(33, 33, torch.device("cpu"))
    assert visible.any(-1).all()
    assert not visible.all()
    changed = (made != drawn).nonzero()
    assert len(changed)
    assert (changed[:, 2] == changed[:, 3]).all()


def test_slopes_are_those_of_the_tests_without_a_sign():
    """A negative one, which no model has, lifts the maximum of far keys: Hopper's forward pass computes tiles anew."""
    case = replace(PLAIN, alibi="h")
    made, drawn = make_tensors(cell(case), torch.device("cpu")).operands, make_operands(case, torch.float32, "cpu")
    assert (drawn.alibi_slopes < 0).any()
    assert torch.equal(made.alibi_slopes, drawn.alibi_slopes.abs())


def test_queries_and_keys_that_are_packed_alike_share_their_lengths():
    alike = make_tensors(cell(packed_case((2, 2), (9, 5), 8, FULL)), torch.device("cpu")).operands
    assert alike.cu_seqlens_k is alike.cu_seqlens_q
    assert alike.cu_seqlens_q.tolist() == [0, 9, 14]
    unlike = make_tensors(cell(case_named("packed")), torch.device("cpu")).operands
    assert unlike.cu_seqlens_k.tolist() == [0, 13, 79, 119]
