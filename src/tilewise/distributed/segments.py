"""Which part of a result is the first of its rows, and which the last: the one is taken, the other rounds the sum."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from tilewise.distributed.steps import Block, Step
from tilewise.masks import Span


class Segment(NamedTuple):
    """Rows of a block, of which all that came before and will come is the same.

    Attributes:
        rows: of the rank's queries.
        within: rows of the block's results.
        is_first, is_last: whether no earlier, and no later, block has these rows of the same heads.
    """

    rows: Span
    within: Span
    is_first: bool
    is_last: bool


class Segments(NamedTuple):
    """The segments of a plan.

    Attributes:
        of_blocks: of each step and each of its blocks, ascending.
        idle: heads of keys, and rows that no block has.
    """

    of_blocks: tuple[tuple[tuple[Segment, ...], ...], ...]
    idle: tuple[tuple[Span, Span], ...]


def segments_of(steps: Sequence[Step], rows: int) -> Segments:
    """Return the segments of the blocks of steps, which have the same heads or none in common, of so many rows."""
    touched: dict[Span, list[tuple[int, int, Span]]] = {}
    for step_number, step in enumerate(steps):
        of_heads = touched.setdefault(step.heads, [])
        of_heads += [(step_number, number, run) for number, block in enumerate(step.blocks)
                     for run in block.query_runs]
    found: dict[tuple[int, int], list[Segment]] = {}
    idle = []
    for heads, calls in touched.items():
        ends = sorted({0, rows, *(end for *_, run in calls for end in (run.start, run.stop))})
        for start, stop in pairwise(ends):
            blocks = [(step, block) for step, block, run in calls if run.start <= start and stop <= run.stop]
            for place in blocks:
                found.setdefault(place, []).append(_segment(steps[place[0]].blocks[place[1]], Span(start, stop), (
                    place == blocks[0], place == blocks[-1])))
            if not blocks:
                idle.append((heads, Span(start, stop)))
    return Segments(tuple([tuple([_joined(found.get((number, block), ())) for block in range(len(step.blocks))])
                           for number, step in enumerate(steps)]), tuple(idle))


def _segment(block: Block, rows: Span, flags: tuple[bool, bool]) -> Segment:
    ahead = 0
    for run in block.query_runs:
        if run.start <= rows.start < run.stop:
            ahead += rows.start - run.start
            break
        ahead += len(run)
    return Segment(rows, Span(ahead, ahead + len(rows)), *flags)


def _joined(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Join neighbours of which the same holds."""
    found: list[Segment] = []
    for own in segments:
        last = found[-1] if found else None
        if last is not None and last.rows.stop == own.rows.start and last[2:] == own[2:]:
            found[-1] = own._replace(rows=Span(last.rows.start, own.rows.stop),
                                     within=Span(last.within.start, own.within.stop))
        else:
            found.append(own)
    return tuple(found)
