"""Parts of packed sequences in few local calls: every visible pair once, and one call for each pair of ranks."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.distributed import balanced
from tilewise.distributed.blocks import summed_of
from tilewise.distributed.layouts import Layout, joined, named_layout
from tilewise.distributed.packing import borders_of, mask_at_corner, query_runs
from tilewise.distributed.plan import Problem, all_gather_plan, ring_plan
from tilewise.masks import Mask, Span

CAUSAL = tw.causal("top_left")
CORNERS = ("top_left", "bottom_right")
MASKS = st.builds(Mask, st.none() | st.integers(0, 6), st.none() | st.integers(0, 3), st.sampled_from(CORNERS),
                  st.none() | st.integers(1, 4), st.none() | st.integers(1, 3), st.none() | st.integers(2, 7))


def dealt(length, ranks, numbers):
    """Lay out pieces of two positions, each to a rank by its number."""
    held = [[] for _ in range(ranks)]
    for piece, start in enumerate(range(0, length, 2)):
        held[numbers[piece % len(numbers)] % ranks].append(Span(start, min(length, start + 2)))
    return Layout("dealt", tuple([joined(tuple(own)) for own in held]))


def rows_of(layout, rank):
    return [position for piece in layout.pieces[rank] for position in range(piece.start, piece.stop)]


def pairs_of(block, rows, buffer):
    """Yield the queries, the keys and the dense mask of each sequence of a block."""
    queries = [rows[row] for run in block.query_runs for row in range(run.start, run.stop)]
    keys = buffer[block.keys.start:block.keys.stop]
    borders = block.borders or ((0, len(queries)), (0, len(keys)))
    assert (borders[0][-1], borders[1][-1]) == (len(queries), len(keys))
    for (first, stop), (first_k, stop_k) in zip(*map(pairwise, borders), strict=True):
        yield queries[first:stop], keys[first_k:stop_k], block.mask.visible(stop - first, stop_k - first_k)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 3),
       st.booleans(), MASKS | st.just(CAUSAL), st.booleans(), st.lists(st.integers(0, 3), min_size=1, max_size=9),
       st.integers(1, 4))
def test_each_visible_pair_of_packed_sequences_is_computed_once(lengths, behind, are_equal, mask, merges, numbers,
                                                                ranks):
    of_q = [one for one, _ in lengths]
    of_k = of_q if are_equal else [one for _, one in lengths]
    sequences = tuple([(*of_queries, *of_keys) for of_queries, of_keys in zip(
        *(pairwise(accumulate(own, initial=0)) for own in (of_q, of_k)), strict=True)])
    sq, sk = sum(of_q) + behind, sum(of_k) + behind
    layouts = dealt(sq, ranks, numbers), dealt(sk, ranks, numbers)
    problem = Problem(*layouts, mask, merges, 2, sequences=sequences)
    visible = torch.zeros(sq, sk, dtype=torch.int)
    for first, stop, first_k, stop_k in sequences:
        visible[first:stop, first_k:stop_k] = mask.visible(stop - first, stop_k - first_k).int()
    for make in (ring_plan, lambda *own: all_gather_plan(*own, lambda rows: 1).steps):
        counted = torch.zeros_like(visible)
        for rank in range(ranks):
            rows = rows_of(layouts[0], rank)
            for step in make(problem, rank):
                buffer = [-1] * step.length
                for part in step.parts:
                    buffer[part.at.start:part.at.stop] = rows_of(layouts[1], part.rank)[part.rows.start:part.rows.stop]
                for block in step.blocks:
                    for queries, keys, seen in pairs_of(block, rows, buffer):
                        counted[torch.tensor(queries, dtype=torch.long)[:, None],
                                torch.tensor(keys, dtype=torch.long)] += seen.int()
        assert torch.equal(counted, visible)


@given(MASKS, st.integers(1, 9), st.integers(1, 9), st.integers(-6, 6), st.permutations(CORNERS))
def test_a_mask_moved_to_a_corner_shows_the_same_pairs(mask, rows, columns, offset, corners):
    mask = Mask(mask.left, mask.right, offset, mask.prefix, mask.sink_tokens, mask.chunk)
    moved = mask_at_corner(mask, rows, columns, corners)
    if moved is None:
        assert offset not in (0, columns - rows)
        return
    assert moved.alignment in (None, *CORNERS)
    assert torch.equal(moved.visible(rows, columns), mask.visible(rows, columns))


def packed_documents(lengths, ranks, layout_name):
    """Return the problem of documents of such lengths."""
    borders = list(accumulate(lengths, initial=0))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    layout = (balanced(CAUSAL & tw.documents(ids), borders[-1], ranks) if layout_name == "balanced"
              else named_layout(layout_name, borders[-1], ranks))
    return Problem(layout, layout, CAUSAL, True, 8, sequences=tuple([(*own, *own) for own in pairwise(borders)]))


# Between 1/16 and 1/2 of a rank's 8192 tokens.
LENGTHS = [512, 4096, 1700, 3333, 640, 2048, 900, 3900, 1300, 2600] * 3 + [2449]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_packed_documents_have_one_call_for_each_pair_of_ranks(layout):
    """There was one for each piece of a document: 84 in the ring of eight balanced ranks, up to 14 on one of them."""
    problem = packed_documents(LENGTHS, 8, layout)
    for rank in range(8):
        steps = ring_plan(problem, rank)
        assert max(len(step.blocks) for step in steps) == 1
        assert len(steps[0].blocks) == 1
        assert max(len(step.blocks) for step in all_gather_plan(problem, rank, lambda rows: 4).steps) <= 2


def test_sequences_that_are_cut_on_every_rank_have_one_call_for_each_pair_of_ranks():
    """As in ring_flash_attn, where each rank has two pieces of each sequence."""
    borders = list(range(0, 81, 16))
    pieces = [joined(tuple([Span(first + at, first + at + 2) for first in borders[:-1]
                            for at in (2 * rank, 14 - 2 * rank)])) for rank in range(4)]
    layout = Layout("zigzag in each sequence", tuple(pieces))
    problem = Problem(layout, layout, CAUSAL, True, 2, sequences=tuple([(*own, *own) for own in pairwise(borders)]))
    assert [[len(step.blocks) for step in ring_plan(problem, rank)] for rank in range(4)] == [[1, 1, 1, 1]] * 4


def test_windows_that_cross_borders_alike_are_one_call():
    layout = named_layout("contiguous", 64, 4)
    problem = Problem(layout, layout, CAUSAL & tw.window(5, 0), True, 2, sequences=((0, 64, 0, 64),))
    _, second, *_ = ring_plan(problem, 1)
    (block,) = second.blocks
    assert (len(block.queries), len(block.keys)) == (5, 5)
    pieces = Layout("even and odd", tuple([tuple([Span(start, start + 8) for start in range(8 * rank, 64, 16)])
                                           for rank in range(2)]))
    problem = Problem(pieces, pieces, CAUSAL & tw.window(5, 0), True, 2, sequences=((0, 64, 0, 64),))
    assert [len(step.blocks) for step in ring_plan(problem, 1)] == [1, 1]


def test_idle_rows_of_queries_are_left_out_where_most_are_idle():
    near, far = [Span(0, 4), Span(5, 9)], [Span(0, 4), Span(30, 34)]
    assert query_runs(near) == (Span(0, 9),)
    assert query_runs(far) == (Span(0, 4), Span(30, 34))
    keys = [Span(3, 5), Span(8, 9)]
    assert borders_of(near, keys, query_runs(near)) == ((0, 4, 5, 5, 9), (0, 2, 2, 5, 6))
    assert borders_of(far, keys, query_runs(far)) == ((0, 4, 4, 8), (0, 2, 5, 6))


def test_operands_of_the_pairs_leave_parts_of_sequences_alone():
    """A bias has rows and columns of each sequence's positions, which two parts do not share."""
    problem = packed_documents(LENGTHS[:6], 2, "zigzag")
    alone = Problem(problem.queries, problem.keys, CAUSAL, False, 8, sequences=problem.sequences)
    counts = [sum(len(step.blocks) for step in ring_plan(one, 0)) for one in (problem, alone)]
    assert counts[0] <= 2 < counts[1]


def test_parts_of_queries_are_told_from_one_another():
    problem = packed_documents(LENGTHS, 8, "balanced")
    assert {summed_of(ring_plan(problem, rank), rank).out for rank in range(8)} == {True}
    whole = packed_documents([64] * 8, 4, "contiguous")
    assert {summed_of(ring_plan(whole, rank), rank) for rank in range(4)} == {(False, False)}
