"""What the launches of decoding hand to their kernels."""

import pytest
import torch

from tilewise.kernels.triton.config import DecodeConfig, Splits
from tilewise.problem.decode import CacheOperands, DecodeOptions, decode_problem, specs_of_inputs, specs_of_present

pytest.importorskip("triton", reason="Triton is not installed")
from tilewise.kernels.triton.decode_launch import combine_launch, decode_launch, is_whole, strides_of

CONFIG = DecodeConfig(16, 64, 4, 4)


def problem_of(capacity=64, stride=16, page=False, **operands):
    """A problem of meta tensors, whose caches have this many positions, this far apart."""
    q = torch.empty(2, 4, 1, 16, dtype=torch.float16, device="meta")
    cache = torch.empty_strided((2, 2, capacity, 16), (stride * capacity * 2, stride * capacity, stride, 1),
                                dtype=torch.float16, device="meta")
    if page:
        operands["block_table"] = torch.empty(2, 5, dtype=torch.int32, device="meta")
    return decode_problem(specs_of_inputs(q, cache, cache), specs_of_present(CacheOperands(**operands)),
                          DecodeOptions())


@pytest.mark.parametrize("page", [False, True])
@pytest.mark.parametrize(("capacity", "stride", "wide"), [(2**20, 16, False), (2**20, 2048, True), (2**28, 16, True)])
def test_offsets_inside_a_head_have_64_bits_where_32_do_not_do(capacity, stride, wide, page):
    launch = decode_launch(problem_of(capacity, stride, page), CONFIG, Splits(3), 1, "ieee")
    assert launch.scalars[-1].INT64 is wide


def test_unit_strides_and_what_is_absent_are_none():
    assert strides_of(problem_of()) == (None,) * 6
    strides = strides_of(problem_of(block_table=torch.empty(2, 1, dtype=torch.int32, device="meta"),
                                    alibi_slopes=torch.empty(4, device="meta").expand(2, 4)))
    assert (strides.table, strides.slopes_b, strides.slopes_h) == (None, 0, None)


def test_a_split_of_fixed_length_is_always_combined():
    assert is_whole(Splits(1))
    assert not is_whole(Splits(1, 512))
    assert not is_whole(Splits(2))


def test_only_an_overlapped_combination_asks_for_an_early_launch():
    problem = problem_of()
    assert "launch_pdl" not in combine_launch(problem, CONFIG, Splits(2)).options
    overlapped = DecodeConfig(16, 64, 4, 4, overlapped=True)
    assert combine_launch(problem, overlapped, Splits(2)).options["launch_pdl"] is True
