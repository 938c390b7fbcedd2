"""Partial results: first parts are taken as they are, last ones write the result's dtype, the others are merged."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.backends.base import Results
from tilewise.distributed import partial
from tilewise.distributed.layouts import named_layout
from tilewise.distributed.partial import PartialResults, QueryGradient, sinks_gradient
from tilewise.distributed.plan import Problem, ring_plan
from tilewise.distributed.segments import Segment, segments_of
from tilewise.distributed.steps import Block, Place, Step
from tilewise.masks import Mask, Span

HEADS, INF = Span(0, 2), float("inf")


def steps_of(*blocks):
    """Return a step for each list of (first, stop) runs."""
    return [Step(HEADS, (), (), (Block(Span(runs[0][0], runs[-1][1]), Span(0, 1), Mask(), Place(0, 0, 0, 0), None,
                                       tuple(Span(*run) for run in runs) if len(runs) > 1 else ()),))
            for runs in blocks]


def parts_of(steps, rows, dv, dtype=torch.float32):
    """Return results for each block, some of whose rows have seen no key."""
    made = []
    for step in steps:
        count = sum(map(len, step.blocks[0].query_runs))
        lse = torch.randn(1, 2, count) * 3
        lse[:, :, count // 2] = -INF
        out = torch.randn(1, 2, count, dv).masked_fill(lse[..., None] == -INF, 0.0)
        made.append(Results(out.to(dtype), lse, lse + 1.0))
    return made


def summed(steps, parts, q, dv, **options):
    """Return what the parts come to, and what they are by merging one after another in float64."""
    found, rows = PartialResults(q, dv, **{"max_logit": True, "summed": True, "rounds": True} | options), q.shape[2]
    segments = segments_of(steps, rows)
    out, lse, most = torch.zeros(1, 2, rows, dv).double(), *(torch.full((1, 2, rows), -INF).double() for _ in range(2))
    for step, part, (own,) in zip(steps, parts, segments.of_blocks, strict=True):
        at = torch.cat([torch.arange(run.start, run.stop) for run in step.blocks[0].query_runs])
        out[:, :, at], lse[:, :, at] = tw.merge(out[:, :, at], lse[:, :, at], part.out.double(), part.lse.double())
        most[:, :, at] = torch.maximum(most[:, :, at], part.max_logit.double())
        found.add(HEADS, Results(*[one.clone() for one in part]), own)
    for heads, own in segments.idle:
        found.leave_empty(heads, own)
    return found, (out, lse, most)


WAYS = {"one": [[(0, 9)]], "three_of_all_rows": [[(0, 9)]] * 3, "second_half_last": [[(0, 9)], [(0, 9)], [(4, 9)]],
        "halves": [[(0, 4)], [(4, 9)]], "idle_rows": [[(2, 5)], [(3, 7)]], "runs": [[(0, 9)], [(0, 2), (6, 8)]],
        "runs_first": [[(1, 3), (7, 9)], [(0, 9)], [(2, 8)]]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_parts_come_to_what_merging_all_of_them_does(way, dtype):
    steps, q = steps_of(*way), torch.zeros(1, 9, 2, 4, dtype=dtype).transpose(1, 2)
    parts = parts_of(steps, 9, 5)
    results, (out, lse, most) = summed(steps, parts, q, 5)
    found = results.results()
    assert found.out.dtype is dtype
    assert found.out.stride() == torch.empty(1, 9, 2, 5).transpose(1, 2).stride()
    torch.testing.assert_close(found.out.double(), out, rtol=2 ** -8 if dtype is torch.bfloat16 else 2e-5, atol=2e-6)
    torch.testing.assert_close(found.lse.double(), lse)
    torch.testing.assert_close(found.max_logit.double(), most)


@given(st.lists(st.lists(st.integers(0, 12), min_size=2, max_size=4, unique=True).map(sorted), max_size=5))
def test_each_row_has_one_first_and_one_last_part_and_idle_rows_none(ends):
    ways = [list(zip(own[::2], own[1::2], strict=False)) for own in ends]
    steps = steps_of(*ways)
    segments = segments_of(steps, 12)
    for row in range(12):
        having = [(number, one) for number, (own,) in enumerate(segments.of_blocks) for one in own
                  if one.rows.start <= row < one.rows.stop]
        wanted = [number for number, runs in enumerate(ways) if any(start <= row < stop for start, stop in runs)]
        assert [number for number, _ in having] == wanted
        assert [one.is_first for _, one in having] == [number == wanted[0] for number in wanted]
        assert [one.is_last for _, one in having] == [number == wanted[-1] for number in wanted]
        for number, one in having:
            rows = [at for start, stop in ways[number] for at in range(start, stop)]
            assert rows[one.within.start + row - one.rows.start] == row
        assert not steps or sum(rows.start <= row < rows.stop for _, rows in segments.idle) == (not wanted)


@given(st.lists(st.lists(st.integers(0, 12), min_size=2, max_size=4, unique=True).map(sorted), max_size=5))
def test_segments_backwards_are_those_of_the_steps_in_the_other_order(ends):
    steps = steps_of(*[list(zip(own[::2], own[1::2], strict=False)) for own in ends])
    assert segments_of(steps, 12).backwards()[::-1] == segments_of(steps[::-1], 12).of_blocks


def test_blocks_have_the_first_part_of_all_their_rows_or_of_none():
    def firsts(*ways):
        return segments_of(steps_of(*ways), 9).first_blocks()

    assert firsts([(0, 9)], [(4, 9)]) == ((True,), (False,))
    assert firsts([(0, 4)], [(4, 9)], [(2, 6)]) == ((True,), (True,), (False,))
    assert firsts([(0, 4)], [(2, 9)]) is None
    assert firsts([(0, 4)]) is None


def test_heads_that_steps_do_not_share_have_first_parts_of_their_own():
    steps = [step.__class__(heads, (), (), step.blocks) for step, heads in zip(
        steps_of([(0, 4)], [(0, 4)]), (Span(0, 1), Span(1, 2)), strict=True)]
    assert segments_of(steps, 4).of_blocks == (((Segment(Span(0, 4), Span(0, 4), True, True),),),) * 2


def operations(way, monkeypatch, dtype=torch.bfloat16):
    """Return which operations move rows of out, with how many rows, in the order in which they happen."""
    seen, merge, copy = [], partial.merge_part, torch.Tensor.copy_

    def merging(result, part, rounded=None):
        seen.append(("merge", result.out.shape[2], None if rounded is None else rounded.dtype))
        with monkeypatch.context() as inner:
            inner.setattr(torch.Tensor, "copy_", copy)
            merge(result, part, rounded)

    def copying(self, source, *more):
        if self.dim() == 4:
            seen.append(("copy", self.shape[2], self.dtype))
        return copy(self, source, *more)

    steps, q = steps_of(*way), torch.zeros(1, 2, 9, 4, dtype=dtype)
    parts = parts_of(steps, 9, 4)
    with monkeypatch.context() as patched:
        patched.setattr(partial, "merge_part", merging)
        patched.setattr(torch.Tensor, "copy_", copying)
        summed(steps, parts, q, 4)[0].results()
    return seen


def test_the_last_merge_writes_the_results_dtype_and_nothing_is_cast_behind_it(monkeypatch):
    assert operations(WAYS["three_of_all_rows"], monkeypatch) == [("merge", 9, None), ("merge", 9, torch.bfloat16)]
    # Of a zigzag: the first half has its last part one step earlier.
    assert operations(WAYS["second_half_last"], monkeypatch) == [
        ("merge", 4, torch.bfloat16), ("merge", 5, None), ("merge", 5, torch.bfloat16)]


def test_the_first_part_of_rows_is_taken_and_not_merged(monkeypatch):
    assert operations(WAYS["halves"], monkeypatch) == [("copy", 4, torch.bfloat16), ("copy", 5, torch.bfloat16)]
    assert operations(WAYS["idle_rows"], monkeypatch) == [
        ("copy", 1, torch.bfloat16), ("copy", 2, torch.float32), ("merge", 2, torch.bfloat16),
        ("copy", 2, torch.bfloat16)]
    assert operations(WAYS["three_of_all_rows"], monkeypatch, torch.float32) == [("merge", 9, None)] * 2


def test_a_causal_ring_merges_once_less_than_it_has_steps(monkeypatch):
    layout = named_layout("zigzag", 36, 2)
    steps = ring_plan(Problem(layout, layout, tw.causal("top_left"), True, 2), 1)
    (first,), (second,) = segments_of(steps, 18).of_blocks
    assert [(one.is_first, one.is_last) for one in first] == [(True, False)]
    assert [(one.is_first, one.is_last) for one in second] == [(False, True)]


def test_parts_that_are_not_summed_stay_as_they_are():
    q = torch.zeros(1, 2, 4, 3, dtype=torch.bfloat16)
    steps = steps_of([(0, 2)], [(2, 4)])
    parts = parts_of(steps, 4, 5, torch.bfloat16)
    results, _ = summed(steps, parts, q, 5, summed=False)
    for number, own in enumerate(results.results()):
        assert torch.equal(own, torch.cat([part[number] for part in parts], 2))


def test_the_only_part_is_the_result():
    q, steps = torch.zeros(1, 2, 4, 4, dtype=torch.bfloat16), steps_of([(0, 4)])
    (part,) = parts_of(steps, 4, 4, torch.bfloat16)
    found = PartialResults(q, 4, max_logit=False, summed=False, rounds=True)
    found.add(HEADS, part, segments_of(steps, 4).of_blocks[0][0])
    assert found.results().out is part.out


def test_sinks_of_rows_without_a_key():
    sinks = torch.tensor([0.5, -INF], dtype=torch.float64)
    parts = PartialResults(torch.zeros(1, 2, 3, 4, dtype=torch.float64), 4, max_logit=False, summed=True, rounds=False)
    parts.leave_empty(HEADS, Span(0, 3))
    parts.add_sinks(sinks)
    results = parts.results()
    assert results.lse[0, :, 0].tolist() == [0.5, -INF]
    dlse = torch.ones(1, 2, 3, dtype=torch.float64)
    assert sinks_gradient(sinks, results.lse, results.out, results.out, dlse).tolist() == [3.0, 0.0]
    parts.clear_lse(Span(1, 2))
    assert parts.results().lse[0, 0].tolist() == [0.5, -INF, 0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_gradient_of_queries_is_the_sum_of_its_parts(way, dtype):
    steps, q = steps_of(*way), torch.zeros(1, 9, 2, 4, dtype=dtype).transpose(1, 2)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    found, total, segments = QueryGradient(q), torch.zeros(1, 2, 9, 4).double(), segments_of(steps, 9)
    for step, (own,) in zip(steps, segments.of_blocks, strict=True):
        at = torch.cat([torch.arange(run.start, run.stop) for run in step.blocks[0].query_runs])
        part = torch.randn(1, 2, len(at), 4, dtype=wide)
        total[:, :, at] += part
        found.add(HEADS, part, own)
    for heads, rows in segments.idle:
        found.leave_empty(heads, rows)
    got = found.get()
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), total, rtol=2 ** -8 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)


def test_the_last_part_of_a_gradient_of_queries_writes_its_dtype(monkeypatch):
    steps, q, written = steps_of(*WAYS["three_of_all_rows"]), torch.zeros(1, 2, 9, 4, dtype=torch.bfloat16), []
    add = torch.add
    monkeypatch.setattr(torch, "add", lambda *given, out: written.append(out.dtype) or add(*given, out=out))
    found = QueryGradient(q)
    for (own,) in segments_of(steps, 9).of_blocks:
        found.add(HEADS, torch.ones(1, 2, 9, 4), own)
    assert written == [torch.float32, torch.bfloat16], "the second part is added in float32, the third one rounds"
    assert torch.equal(found.get(), torch.full_like(q, 3.0))


def test_the_first_part_of_some_rows_is_kept_without_a_copy(monkeypatch):
    q, copied = torch.zeros(1, 2, 9, 4, dtype=torch.bfloat16), []
    steps, copy = steps_of([(4, 9)], [(0, 9)]), torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda own, given: copied.append(own.shape[2]) or copy(own, given))
    found = QueryGradient(q)
    for (own,), rows in zip(segments_of(steps, 9).of_blocks, (5, 9), strict=True):
        found.add(HEADS, torch.ones(1, 2, rows, 4), own)
    assert copied == [4]
    assert found.get()[0, 0, :, 0].tolist() == [1.0] * 4 + [2.0] * 5


def test_rows_that_the_kept_part_lacks_are_summed_beside_it():
    q, ways = torch.zeros(1, 2, 9, 4, dtype=torch.bfloat16), ([(4, 9)], [(1, 6)], [(0, 9)])
    found = QueryGradient(q)
    for (own,), ((start, stop),) in zip(segments_of(steps_of(*ways), 9).of_blocks, ways, strict=True):
        found.add(HEADS, torch.ones(1, 2, stop - start, 4), own)
    assert found.get()[0, 1, :, 3].tolist() == [1.0] + [2.0] * 3 + [3.0] * 2 + [2.0] * 3
