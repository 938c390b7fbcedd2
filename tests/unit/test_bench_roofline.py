"""Operations and bytes of a problem."""

import torch

from tilewise.bench.grids import priced, shape_case
from tilewise.bench.roofline import credited_pairs, flops, least_bytes
from tilewise.masks import Mask, causal, window


def test_forward_counts_four_b_h_s_squared_d_and_backward_two_and_a_half_times_that():
    case = shape_case(2, (16, 16), (4096, 4096), (128, 128), Mask())
    assert flops(case, "forward") == 4 * 2 * 16 * 4096**2 * 128
    assert flops(case, "backward") == 2.5 * flops(case, "forward")


def test_a_causal_square_counts_as_half_of_the_full_one():
    full, half = (shape_case(1, (4, 4), (1024, 1024), (64, 64), mask) for mask in (Mask(), causal()))
    assert flops(half, "forward") == flops(full, "forward") / 2


def test_options_count_nothing():
    plain, *others = (case for case, _ in priced(shape_case(1, (4, 2), (64, 64), (32, 32), causal())))
    for case in others:
        for direction in ("forward", "backward"):
            assert flops(case, direction) == flops(plain, direction)
            assert least_bytes(case, torch.bfloat16, direction) == least_bytes(plain, torch.bfloat16, direction)


def test_other_masks_count_the_pairs_that_are_visible():
    for mask in (window(15, 3), causal() & window(9, 0)):
        case = shape_case(1, (1, 1), (100, 100), (8, 8), mask)
        assert credited_pairs(case) == int(mask.visible(100, 100).sum())


def test_unequal_dims_count_each_product_by_its_own_dim():
    case = shape_case(1, (1, 1), (10, 20), (6, 4), Mask())
    assert flops(case, "forward") == 2 * 10 * 20 * (6 + 4)
    assert flops(case, "backward") == 2 * 10 * 20 * (3 * 6 + 2 * 4)


def test_bytes_count_every_input_and_output_once():
    case = shape_case(2, (4, 2), (10, 20), (6, 3), Mask())
    q, k, v, out, rows = 2 * 4 * 10 * 6, 2 * 2 * 20 * 6, 2 * 2 * 20 * 3, 2 * 4 * 10 * 3, 2 * 4 * 10
    assert least_bytes(case, torch.float16, "forward") == 2 * (q + k + v + out) + 4 * rows
    assert least_bytes(case, torch.float16, "backward") == 2 * (2 * (q + k + v) + 2 * out) + 12 * rows
