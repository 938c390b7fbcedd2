"""The order of a Hopper kernel's tiles and steps: jit functions called as plain Python, since Gluon has no interpreter.

A quotient of ints rounds towards 0 on a GPU and down in Python. They differ for fewer than 1 - KEYS keys alone, where
the source takes the larger of it and 0 or 1.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from emulation.hopper_calls import bound_backward, problem_of, scalars_of
from tilewise.kernels.hopper.arguments import TileGrid
from tilewise.kernels.hopper.backward.config import (
    D128AugmentedKVariant,
    D128Variant,
    HopperD128AugmentedKConfig,
    HopperD128Config,
    HopperD256Config,
)
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal, window
from tilewise.testing.strategies import windows
from tilewise.tuning.heuristics_hopper import forward_heuristic

pipeline = pytest.importorskip("tilewise.kernels.hopper.pipeline", reason="Triton is not installed")
tiles = pytest.importorskip("tilewise.kernels.hopper.tile_scheduler", reason="Triton is not installed")
mask_ranges = pytest.importorskip("tilewise.kernels.hopper.mask_ranges")
ROWS = 64  # queries a warpgroup
QUERIES = int(mask_ranges.QUERIES)  # a step of the backward kernel


@pytest.fixture(scope="module", autouse=True)
def plain_python():
    """The three functions of gl that are called here, on numbers, and a constant as one."""
    with pytest.MonkeyPatch.context() as patch:
        numbers = SimpleNamespace(minimum=min, maximum=max, where=lambda test, a, b: a if test else b)
        for module, called in ((tiles, "_swizzled"), (mask_ranges, "masked_q_blocks_of")):
            patch.setattr(module, "gl", numbers)
            patch.setattr(module, called, getattr(module, called).fn)
        patch.setattr(mask_ranges, "QUERIES", QUERIES)
        yield


CONFIGS = st.builds(HopperForwardConfig, block_n=st.sampled_from((64, 128)), consumers=st.sampled_from((2, 3)))
SIZES, MASKS = st.integers(1, 900), windows(1800)


def firsts_of(order, sq, shape):
    """The first query of each tile of a head, in order; of tiles counted from the end the first one may be negative."""
    firsts = sorted({tiles.tile_at.fn(number, order, sq, shape)[0] for number in range(order[0] * order[1] * order[2])})
    assert tiles.NO_TILE.value not in firsts, "a tile that says that there is none"
    return firsts


def inside(visible, first, number):
    """Some rows, as far as there are such."""
    return visible[max(0, first):max(0, first + number)]


@given(SIZES, SIZES, MASKS, CONFIGS, st.sampled_from((1, 2, 8, 64)))
@example(900, 900, Mask(), HopperForwardConfig(128, 3), 1)
@example(300, 700, causal("bottom_right"), HopperForwardConfig(128, 2), 8)
@example(512, 512, causal("top_left"), HopperForwardConfig(128, 2), 1)
@example(300, 700, causal("bottom_right"), HopperForwardConfig(128, 3), 1)
@example(700, 300, causal("bottom_right"), HopperForwardConfig(128, 2), 1)
@example(256, 257, causal("bottom_right"), HopperForwardConfig(128, 2), 1)  # one key of the second step is seen
@example(512, 512, window(900, 126, "top_left"), HopperForwardConfig(128, 2), 1)  # and here all but one of the first
@example(800, 800, window(127, 0, "top_left"), HopperForwardConfig(64, 3), 1)
@example(200, 900, window(0, 0, "bottom_right"), HopperForwardConfig(128, 2), 1)
def test_every_visible_key_is_in_one_kv_block_and_unmasked_blocks_are_wholly_visible(sq, sk, mask, config, pack):
    problem, queries = problem_of(sq, sk, mask), ROWS // pack
    assume(not problem.is_empty)
    order, band, shape = scalars_of(problem, config, pack)
    keys = problem.seen_keys
    visible = mask.visible(sq, sk)[:, keys.start:keys.stop]
    assert band[1] == visible.shape[1]
    for first in firsts_of(order, sq, shape):
        spans = mask_ranges.kv_blocks_of.fn(first, band, shape)
        begins = [mask_ranges.n_block_start.fn(step, spans, shape) for step in range(spans[3])]
        assert begins
        assert all(begin >= 0 for begin in begins), "the copy engine would shift what is before the tensor"
        assert len(set(begins)) == len(begins)
        assert all((begin - min(begins)) % config.block_n == 0 for begin in begins), "steps overlap"
        seen = inside(visible, first, queries * config.consumers).any(0).nonzero().flatten().tolist()
        assert {(key - min(begins)) // config.block_n * config.block_n + min(begins) for key in seen} <= set(begins)
        if seen:
            assert len(begins) <= -(-(seen[-1] + 1 - seen[0]) // config.block_n), "a step that nobody needs"
        for row in range(first, first + queries * config.consumers, queries):
            masked = mask_ranges.masked_blocks_of.fn(row, spans, band, shape)
            for begin in begins[masked:]:
                part = inside(visible, row, queries)[:, begin:begin + config.block_n]
                assert part.all(), (first, row, begin)
                assert begin + config.block_n <= band[1], "keys past the last one need a mask"


@pytest.mark.parametrize("config", [HopperForwardConfig(128, 2), HopperForwardConfig(128, 3)], ids=str)
@pytest.mark.parametrize("mask", [causal(), window(None, 63)], ids=str)
def test_without_a_lower_bound_warpgroups_mask_no_kv_block_that_all_their_queries_see_wholly(mask, config):
    problem = problem_of(1000, 1000, mask)
    order, band, shape = scalars_of(problem, config)
    for first, own in product(firsts_of(order, problem.sq, shape), range(config.consumers)):
        row, spans = first + own * ROWS, mask_ranges.kv_blocks_of.fn(first, band, shape)
        for step in range(mask_ranges.masked_blocks_of.fn(row, spans, band, shape)):
            last_key = mask_ranges.n_block_start.fn(step, spans, shape) + config.block_n - 1
            assert last_key > row + mask.right or last_key >= problem.sk


@given(st.integers(1, 1000), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.sampled_from((64, 128)),
       st.booleans())
def test_every_tile_has_one_number(sq, b, hk, group, d, is_causal):
    problem = problem_of(sq, sq, causal() if is_causal else None, d, b, (hk * group, hk))
    for config in (forward_heuristic(problem), *[HopperForwardConfig(128, 3)] * (d <= 64)):
        order, _, shape = scalars_of(problem, config)
        assert (is_causal and config.consumers == 3) == shape.TILES_FROM_END
        check_numbers(order, shape, sq)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("order", list(product((1, 2, 7), (1, 3, 8), (1, 2), (1, 2, 3, 4, 5, 16, 100))), ids=str)
def test_every_tile_has_one_number_whatever_the_heads_per_swizzle(order, is_causal):
    _, _, shape = scalars_of(problem_of(mask=causal() if is_causal else None), HopperForwardConfig(128, 2))
    check_numbers(order, shape)


def check_numbers(order, shape, sq=None):
    n_tiles, heads, batches, _ = order = TileGrid(*order)
    rows = ROWS * shape.CONSUMERS
    sq = n_tiles * rows if sq is None else sq
    numbered = Counter(tiles.tile_at.fn(number, order, sq, shape) for number in range(n_tiles * heads * batches))
    before = -(-sq // ROWS) * ROWS - n_tiles * rows if shape.TILES_FROM_END else 0
    assert -rows < before <= 0
    firsts = [before + tile * rows for tile in range(n_tiles)]
    assert firsts == firsts_of(order, sq, shape)
    assert firsts[-1] < sq <= firsts[-1] + rows
    assert numbered == Counter(product(firsts, range(heads), range(batches)))


def test_causal_swizzles_come_one_after_another_the_remainder_first_and_long_tiles_before_short_ones():
    n_tiles, heads, batches, section = order = TileGrid(5, 4, 2, 3)
    _, _, shape = scalars_of(problem_of(mask=causal()), HopperForwardConfig(128, 2))
    places = [tiles.tile_at.fn(number, order, 600, shape) for number in range(n_tiles * heads * batches)]
    lines = [batch * heads + head for _, head, batch in places]
    sections = [lines[:2 * n_tiles], lines[2 * n_tiles:5 * n_tiles], lines[5 * n_tiles:]]
    assert [set(lines) for lines in sections] == [{0, 1}, {2, 3, 4}, {5, 6, 7}]
    assert len(sections[-1]) == section * n_tiles
    for (first, *_), (after, *_) in pairwise(places[2 * n_tiles:5 * n_tiles]):
        assert first >= after


def test_a_swizzle_holds_whole_groups_of_heads_whose_keys_and_values_fit_l2():
    """24 MiB of width 128, else 32. 2¹⁴ keys of width 128 take 8 MiB, and of longer ones it is one kv head."""
    for d, sk, group, section in ((128, 1 << 14, 4, 12), (128, 1 << 20, 8, 8), (64, 1 << 14, 1, 8), (64, 512, 1, 96),
                                  (128, 1024, 1, 32)):
        problem = problem_of(128, sk, causal("bottom_right"), d, heads=(16 * group, 16))
        order, _, _ = scalars_of(problem, forward_heuristic(problem))
        assert order[3] == section


def test_mask_bounds_count_from_the_first_visible_key():
    problem = problem_of(100, 1000, window(255, 0, "bottom_right"))
    assert problem.seen_keys.start == 645
    _, band, shape = scalars_of(problem, HopperForwardConfig(128, 2))
    assert band == (100, 355, 0, 255)
    assert (shape.HAS_LOWER, shape.HAS_UPPER) == (True, True)


BLOCK_N = 128  # of a program of the backward kernel for narrow heads
NONDETERMINISTIC, DETERMINISTIC = HopperD128Config(), HopperD128Config(variant=D128Variant.DETERMINISTIC)
WIDE = HopperD256Config()
HEAD_PERSISTENT = HopperD128AugmentedKConfig(variant=D128AugmentedKVariant.HEAD_PERSISTENT)


def backward_scalars_of(problem, config=NONDETERMINISTIC):
    bound = bound_backward(problem, config)
    numbers, constants = (bound.dkdv if config == WIDE else bound).scalars
    return numbers.grid, numbers.bounds, constants


def begins_of(first, spans, shape):
    """The first queries of all steps of the tile of keys from ``first`` on."""
    return [mask_ranges.q_block_start_serpentine.fn(step, first, spans, shape) if shape.HEAD_PERSISTENT else
            mask_ranges.q_block_start.fn(step, spans, shape) for step in range(spans[3])]


@given(SIZES, SIZES, MASKS, st.sampled_from((NONDETERMINISTIC, DETERMINISTIC, WIDE, HEAD_PERSISTENT)))
@example(900, 900, Mask(), NONDETERMINISTIC)
@example(512, 512, causal("top_left"), NONDETERMINISTIC)
@example(300, 700, causal("bottom_right"), NONDETERMINISTIC)
@example(700, 300, causal("bottom_right"), NONDETERMINISTIC)
@example(100, 600, causal("top_left"), NONDETERMINISTIC)
@example(800, 800, window(127, 0, "top_left"), NONDETERMINISTIC)
@example(200, 900, window(0, 0, "bottom_right"), NONDETERMINISTIC)
@example(800, 800, window(127, 0, "top_left"), DETERMINISTIC)
@example(300, 700, causal("bottom_right"), WIDE)
@example(800, 820, window(127, 0, "top_left"), WIDE)
def test_backward_every_visible_query_is_in_one_q_block_and_unmasked_blocks_are_wholly_visible(sq, sk, mask, config):
    problem = problem_of(sq, sk, mask)
    (n_tiles, *_), band, shape = backward_scalars_of(problem, config)
    counts_all = not (config.deterministic or config.head_persistent)
    queries, keys = problem.seeing_queries, problem.seen_keys
    visible = mask.visible(sq, sk)[queries.start:queries.stop, keys.start:keys.stop]
    sq, sk = visible.shape
    assert visible.any(0).all(), "a key that no query sees is read"
    assert visible.any(1).all(), "a query that sees no key is read"
    assert (n_tiles - 1) * config.block_n < sk <= n_tiles * config.block_n, "every key has its gradient written"
    for first in range(0, n_tiles * config.block_n, config.block_n):
        spans = mask_ranges.q_blocks_of.fn(first, band, shape)
        begins = begins_of(first, spans, shape)
        assert all(begin % QUERIES == 0 and 0 <= begin < sq for begin in begins), "dq's sums lie on a grid"
        assert len(set(begins)) == len(begins)
        seeing = visible[:, first:first + config.block_n].any(1).nonzero().flatten().tolist()
        assert {query // QUERIES * QUERIES for query in seeing} <= set(begins)
        if seeing:
            assert len(begins) <= seeing[-1] // QUERIES - seeing[0] // QUERIES + 1, "a step for nobody"
        for key in range(first, first + config.block_n, ROWS):
            ends = mask_ranges.phases_of.fn(key, spans, band, shape)
            assert list(ends) == sorted(ends)
            assert (ends[0], ends[-1]) == (0, spans[3])
            assert shape.HAS_LOWER or counts_all or ends[1] == 0, "this phase is left out"
            for step in range(ends[1], ends[2]):
                assert visible[begins[step]:begins[step] + QUERIES, key:key + ROWS].all(), (key, begins[step])
                assert key + ROWS <= sk, "keys past the last one need a mask"
                # What the kernel computes in place of queries_at, where no step is masked.
                counted = spans[0] + (spans[1] - spans[2] + step) * QUERIES
                assert not counts_all or begins[step] == counted


@pytest.mark.parametrize("config", [NONDETERMINISTIC, DETERMINISTIC, WIDE, HEAD_PERSISTENT],
                         ids=["no order", "order", "wide", "alone"])
def test_causal_backward_masks_no_q_block_whose_queries_all_see_the_warpgroups_keys(config):
    (n_tiles, *_), band, shape = backward_scalars_of(problem_of(1024, 1024, causal()), config)
    for key in range(0, n_tiles * config.block_n, ROWS):
        spans = mask_ranges.q_blocks_of.fn(key // config.block_n * config.block_n, band, shape)
        ends = mask_ranges.phases_of.fn(key, spans, band, shape)
        for step in {*range(spans[3])} - {*range(ends[1], ends[2])}:
            assert begins_of(key // config.block_n * config.block_n, spans, shape)[step] < key + ROWS - 1


@pytest.mark.parametrize(("mask", "steps"), [
    (Mask(), [[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]]),
    (causal(), [[5, 4], [4, 5, 3, 2], [5, 4, 3, 2, 1, 0]])], ids=str)
def test_a_head_persistent_cta_takes_q_blocks_in_serpentine_order(mask, steps):
    _, band, shape = backward_scalars_of(problem_of(384, 384, mask), HEAD_PERSISTENT)
    begins = [begins_of(first, mask_ranges.q_blocks_of.fn(first, band, shape), shape) for first in (256, 128, 0)]
    assert begins == [[QUERIES * step for step in row] for row in steps]


@example(900, 900, window(64, 0, "top_left"), 2, 2, 3)
@example(900, 900, window(65, None, "top_left"), 1, 1, 1)
@given(SIZES, SIZES, MASKS, st.integers(1, 2), st.integers(1, 2), st.integers(1, 3))
def test_tiles_accumulate_each_q_block_in_the_order_of_their_ctas_and_reach_it_in_this_order(
        sq, sk, mask, b, hk, section):
    """A tile may only wait for programs of lower numbers: others may not be running. And it seldom should."""
    problem = problem_of(sq, sk, mask, b=b, heads=(hk, hk))
    assume(not problem.is_empty)
    (n_tiles, *_), band, shape = backward_scalars_of(problem, DETERMINISTIC)
    order, adding = TileGrid(n_tiles, hk, b, section), {}
    for number in range(n_tiles * hk * b):
        first, head, batch = tiles.kv_tile_at.fn(number, order, shape)[:3]
        spans = mask_ranges.q_blocks_of.fn(first, band, shape)
        for turn in range(spans[3]):
            step = mask_ranges.q_block_start.fn(turn, spans, shape) // QUERIES
            rank = mask_ranges.rank_of.fn(first, step, band, shape)
            adding.setdefault((batch, head, step), []).append((rank, first, turn))
    for ranks, firsts, turns in (zip(*tiles_of_step, strict=True) for tiles_of_step in adding.values()):
        assert ranks == tuple(range(len(ranks)))
        assert firsts == tuple(sorted(firsts))
        assert turns == tuple(sorted(turns)), "one that started at the same time would wait"


@pytest.mark.parametrize(("d", "dv", "of_q", "of_v"), [
    (256, 256, (256, None), (256, None)), (192, 128, (128, 64), (128, None)), (192, 192, (128, 64), (128, 64)),
    (136, 72, (128, 64), (128, None)), (40, 200, (64, None), (256, None))])
def test_wide_heads_come_in_tiles_whose_sides_are_powers_of_two(d, dv, of_q, of_v):
    """Forms say None where there is no second tile."""
    problem = replace(problem_of(1000, 1000, d=d, heads=(4, 2)), dv=dv)
    launch = bound_backward(problem, WIDE)
    assert (launch.dkdv.grid, launch.dq.grid) == ((2 * 16,), (4 * 8,))
    sources = [of_q, of_q, of_v, of_v]
    for part, forms in ((launch.dkdv, [*sources, of_q, of_v]), (launch.dq, [*sources, of_q])):
        assert part.forms == [[columns and ([1, 1, 64, columns], ANY) for columns in pair] for pair in forms]


@given(SIZES, SIZES, MASKS)
@example(900, 900, Mask())
@example(300, 700, causal("bottom_right"))
@example(700, 300, causal("bottom_right"))
@example(800, 820, window(127, 0, "top_left"))
def test_in_the_dq_kernel_each_visible_key_is_in_one_kv_block_and_unmasked_blocks_are_wholly_visible(sq, sk, mask):
    problem = problem_of(sq, sk, mask)
    numbers, shape = bound_backward(problem, WIDE).dq.scalars
    n_tiles, band = numbers.grid.tiles, numbers.bounds
    queries, keys = problem.seeing_queries, problem.seen_keys
    visible = mask.visible(sq, sk)[queries.start:queries.stop, keys.start:keys.stop]
    sq, sk = visible.shape
    assert (n_tiles - 1) * 128 < sq <= n_tiles * 128, "every query has its gradient written"
    for first in range(0, n_tiles * 128, 128):
        spans = mask_ranges.kv_blocks_of.fn(first, band, shape)
        begins = [mask_ranges.n_block_start.fn(step, spans, shape) for step in range(spans[3])]
        seen = visible[first:first + 128].any(0).nonzero().flatten().tolist()
        assert sum(begin <= key < begin + 64 for begin in begins for key in seen) == len(seen)
        for row in (first, first + 64):
            begin = int(shape.HAS_UPPER and mask_ranges.first_block_is_hidden.fn(begins[0], spans[3], row, band[3],
                                                                                 shape))
            assert not (begin and visible[row:row + 64, begins[0]:begins[0] + 64].any()), "left out"
            for step in range(max(begin + 1, mask_ranges.masked_blocks_of.fn(row, spans, band, shape)), spans[3]):
                assert visible[row:row + 64, begins[step]:begins[step] + 64].all(), (row, begins[step])
                assert begins[step] + 64 <= sk or row >= sq, "keys past the last one need a mask"


@pytest.mark.parametrize("config", [NONDETERMINISTIC, DETERMINISTIC])
def test_grids_have_one_dim_however_many_heads_there_are(config):
    """Heads were dQ's second dim, of which CUDA launches 65535 at most: 4096 windows of 16 heads failed."""
    problem = problem_of(64, 64, d=64, b=4096, heads=(16, 16))
    launch = bound_backward(problem, config)
    assert launch.grid == (4096 * 16,)
    assert launch.enqueue_dq.grid == (2 * 4096 * 16,)


@given(st.integers(1, 1000), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_every_backward_tile_has_one_number_and_long_ones_come_first(sk, b, hk, group, is_causal):
    problem = problem_of(sk, sk, causal() if is_causal else None, 64, b, (hk * group, hk))
    order, _, shape = backward_scalars_of(problem)
    n_tiles, heads, batches, section = order
    places = [tiles.kv_tile_at.fn(number, order, shape)[:3] for number in range(n_tiles * heads * batches)]
    assert Counter(places) == Counter(product(range(0, n_tiles * BLOCK_N, BLOCK_N), range(heads), range(batches)))
    if is_causal and section >= heads * batches:
        assert [first for first, *_ in places] == sorted(first for first, *_ in places)


def test_a_backward_swizzle_holds_heads_whose_queries_and_dq_accumulators_fit_l2():
    """24 MiB at 128 columns; of the 8 MiB that q, dout and sums of 8192 queries take, two heads, and never none.

    Heads of a group come in turn, and count once. Sections are powers of two, to end together.
    """
    for sq, group, section in ((4096, 1, 4), (8192, 1, 2), (4096, 2, 4), (3000, 1, 8), (1 << 20, 8, 1)):
        problem = problem_of(sq, 128, causal("bottom_right"), heads=(16 * group, 16))
        assert backward_scalars_of(problem)[0][3] == section
        assert backward_scalars_of(problem, DETERMINISTIC)[0][3] == 16, "tiles of one head wait for one another"


def test_ordered_tiles_that_start_together_are_of_many_heads():
    """Under a bound above; else L2 decides, as where there is no order."""
    for mask, most in ((causal("bottom_right"), 9), (Mask(), 32)):
        order, _, shape = backward_scalars_of(problem_of(4096, 4096, mask, heads=(32, 32)), DETERMINISTIC)
        places = [tiles.kv_tile_at.fn(number, order, shape)[:3] for number in range(132)]
        assert max(Counter(head for _, head, _ in places).values()) == most
