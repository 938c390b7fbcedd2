"""Operations and bytes of a problem."""

import pytest
import torch

from tilewise.bench.roofline import credited_pairs, flops, least_bytes
from tilewise.bench.shapes import packed_case, priced, shape_case
from tilewise.masks import Mask, causal, chunk, prefix, sink_tokens, window
from tilewise.testing import oracle
from tilewise.testing.cases import Case
from tilewise.testing.inputs import make_inputs, make_operands


def test_forward_counts_four_b_h_s_squared_d_and_backward_two_and_a_half_times_that():
    case = shape_case(2, (16, 16), (4096, 4096), (128, 128), Mask())
    assert flops(case, "forward") == 4 * 2 * 16 * 4096**2 * 128
    assert flops(case, "backward") == 2.5 * flops(case, "forward")


def test_a_causal_square_counts_as_half_of_the_full_one():
    full, half = (shape_case(1, (4, 4), (1024, 1024), (64, 64), mask) for mask in (Mask(), causal()))
    assert flops(half, "forward") == flops(full, "forward") / 2


def test_options_count_nothing():
    plain, *others = (case for case, _ in priced(shape_case(1, (4, 2), (64, 64), (32, 32), causal()))
                      if not case.documents)
    for case in others:
        for direction in ("forward", "backward"):
            assert flops(case, direction) == flops(plain, direction)
            assert least_bytes(case, torch.bfloat16, direction) == least_bytes(plain, torch.bfloat16, direction)


def test_other_masks_count_the_pairs_that_are_visible():
    for mask in (window(15, 3), causal() & window(9, 0), prefix(20), sink_tokens(3), causal() & chunk(30)):
        case = shape_case(2, (1, 1), (100, 100), (8, 8), mask)
        assert credited_pairs(case) == 2 * int(mask.visible(100, 100).sum())


@pytest.mark.parametrize("mask", [Mask(), causal("bottom_right"), window(9, 3, "top_left") & chunk(50)])
def test_documents_count_the_pairs_that_are_visible(mask):
    case = Case("documents", b=3, sq=90, sk=130, mask=mask, documents="mixed")
    inputs, operands = (make(case, torch.float32, "cpu") for make in (make_inputs, make_operands))
    visible = oracle.visible_pairs(inputs.q, inputs.k, mask, operands)
    assert credited_pairs(case) == int(visible.sum())


@pytest.mark.parametrize("packed", ["", "tight", "gaps"])
def test_sequences_count_as_problems_of_their_own(packed):
    for mask in (Mask(), causal("bottom_right"), window(3, 2, "top_left")):
        case = Case("lengths", b=4, sq=20, sk=30, mask=mask, lengths_q=(20, 7, 5, 0), lengths_k=(30, 7, 9, 3),
                    packed=packed)
        pairs = zip(case.lengths_q, case.lengths_k, strict=True)
        alone = [shape_case(1, (2, 2), pair, (64, 64), mask) for pair in pairs]
        assert credited_pairs(case) == sum(map(credited_pairs, alone))
        assert flops(case, "backward") == sum(flops(one, "backward") for one in alone)


def test_bytes_count_each_packed_row_once():
    packed = packed_case((4, 2), (9, 0, 21), 16, causal("top_left"))
    one = shape_case(1, (4, 2), (30, 30), (16, 16), causal())
    for direction in ("forward", "backward"):
        assert least_bytes(packed, torch.bfloat16, direction) == least_bytes(one, torch.bfloat16, direction)


def test_unequal_dims_count_each_product_by_its_own_dim():
    case = shape_case(1, (1, 1), (10, 20), (6, 4), Mask())
    assert flops(case, "forward") == 2 * 10 * 20 * (6 + 4)
    assert flops(case, "backward") == 2 * 10 * 20 * (3 * 6 + 2 * 4)


def test_bytes_count_every_input_and_output_once():
    case = shape_case(2, (4, 2), (10, 20), (6, 3), Mask())
    q, k, v, out, rows = 2 * 4 * 10 * 6, 2 * 2 * 20 * 6, 2 * 2 * 20 * 3, 2 * 4 * 10 * 3, 2 * 4 * 10
    assert least_bytes(case, torch.float16, "forward") == 2 * (q + k + v + out) + 4 * rows
    assert least_bytes(case, torch.float16, "backward") == 2 * (2 * (q + k + v) + 2 * out) + 12 * rows
