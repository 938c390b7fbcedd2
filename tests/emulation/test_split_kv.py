"""Split-KV of the Hopper forward kernel: which blocks of keys a split has; jit functions called as plain Python."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from emulation.hopper_calls import bound_forward
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.testing.strategies import windows

split_kv = pytest.importorskip("tilewise.kernels.hopper.forward.split_kv", reason="Triton is not installed")
tiles = pytest.importorskip("tilewise.kernels.hopper.tile_scheduler")
mask_ranges = pytest.importorskip("tilewise.kernels.hopper.mask_ranges")
CONFIG = HopperForwardConfig(128, 2)


@pytest.fixture(scope="module", autouse=True)
def plain_python():
    """The functions of gl that are called here, on numbers."""
    language = SimpleNamespace(minimum=min, maximum=max, where=lambda test, a, b: a if test else b)
    with pytest.MonkeyPatch.context() as patch:
        for module in (tiles, mask_ranges, split_kv):
            patch.setattr(module, "gl", language)
        for module, names in ((tiles, ("_swizzled",)),
                              (split_kv, ("tile_at", "kv_blocks_of", "split_of", "blocks_before", "blocks_of_split",
                                          "blocks_of_tile"))):
            for name in names:
                patch.setattr(module, name, getattr(module, name).fn)
        yield


def problem_of(sq, sk, mask, b=1, heads=1):
    strides = (heads * sk * 128, sk * 128, 128, 1)
    return AttentionProblem(b=b, hq=heads, hk=heads, sq=sq, sk=sk, d=128, dv=128, dtype=torch.bfloat16,
                            device=torch.device("cuda", 0), scale=1.0, mask=mask, k_strides=strides, v_strides=strides)


def places(spans, shape):
    """The first keys of some steps in order, and of those that need a mask."""
    begins = [mask_ranges.n_block_start.fn(step, spans, shape) for step in range(spans[3])]
    return begins, begins[:spans[2]]


@given(st.integers(1, 900), st.integers(1, 2000), windows(1800), st.integers(2, 9), st.integers(0, 3))
@example(300, 2000, causal("bottom_right"), 3, 0)
@example(300, 300, causal("top_left"), 5, 0)  # more splits than blocks
@example(200, 2000, window(900, 100, "bottom_right"), 4, 0)  # a mask at both ends
@example(500, 2000, Mask(), 7, 3)
@example(500, 300, Mask(), 4, 1)
def test_each_block_of_a_tile_is_in_one_split_and_needs_its_mask_there_too(sq, sk, mask, num_splits, whole):
    problem = problem_of(sq, sk, mask)
    if problem.is_empty:
        return
    n_tiles = -(-sq // 128)
    whole = min(whole, n_tiles - 1)
    numbers, shape = bound_forward(problem, CONFIG, 132, split_kv=(whole, num_splits)).scalars
    grid, bounds, plan = numbers.grid, numbers.bounds, numbers.splits
    assert (plan.whole, plan.num_splits, shape.SPLIT_KV) == (whole, num_splits, 2 if whole else 1)
    total = split_kv.num_work_tiles.fn(n_tiles, plan, shape)
    assert total == whole + (n_tiles - whole) * num_splits
    found = {}
    for number in range(total):
        tile, _row, exists = split_kv.locate_work_tile.fn(number, grid, bounds, (), plan, None, shape)
        first, split = tile.first, tile.split
        spans = split_kv.blocks_of_tile(tile, bounds, plan, None, shape)
        assert exists == (spans[3] > 0)
        found.setdefault(first, []).append((split, *places(spans, shape)))
    assert sorted(found) == [128 * tile for tile in range(n_tiles)]
    firsts = [first for first, splits_of in found.items() if splits_of[0][0] == -1]
    assert len(firsts) == whole
    for first, splits_of in found.items():
        begins, masked = places(mask_ranges.kv_blocks_of.fn(first, bounds, shape), shape)
        if first in firsts:
            assert splits_of == [(-1, begins, masked)]
            continue
        assert [split for split, _, _ in splits_of] == list(range(num_splits))
        assert sorted(begin for _, own, _ in splits_of for begin in own) == sorted(begins)
        assert sorted(begin for _, _, own in splits_of for begin in own) == sorted(masked)
        steps = [len(own) for _, own, _ in splits_of]
        assert steps[0] > 0, "the first split marks the empty ones"
        if len(begins) >= num_splits:
            assert all(abs(own - len(begins) / num_splits) < 1 for own in steps)
        used = min(num_splits, len(begins))  # as write_partial has it
        assert all(steps[:used])
        assert not any(steps[used:])


def test_the_rows_that_are_combined_are_those_of_the_tiles_that_are_split():
    problem = problem_of(300, 700, Mask(), b=2, heads=2)  # three tiles a head, the last of 44 rows
    for whole, first in ((0, 0), (1, 128), (3, 300), (5, 556), (11, 1156)):
        bound = bound_forward(problem, CONFIG, 132, split_kv=(whole, 3))
        assert bound.split_rows == range(first, 1200)
        assert bound.partial_shape == (1200 - first, 3, 128 + 8)
        assert bound.scalars[0].splits.first_row == first


def test_each_split_has_a_cta_up_to_one_an_sm():
    problem = problem_of(1024, 1024, causal())
    for plan, programs in ((None, 8), ((0, 3), 24), ((6, 3), 12), ((0, 20), 132)):
        assert bound_forward(problem, CONFIG, 132, split_kv=plan).grid == (programs,)
