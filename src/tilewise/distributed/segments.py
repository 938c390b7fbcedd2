"""Which part of a result is the first of its rows, and which the last: the one is taken, the other rounds the sum."""

from bisect import insort
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from tilewise.distributed.steps import Step
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

    def backwards(self) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
        """Return those of a pass from the last step to the first, and from the last block: first parts come last.

        Steps have their numbers still; the blocks of a step come in the order of the pass.
        """
        return tuple([tuple([tuple([own._replace(is_first=own.is_last, is_last=own.is_first) for own in of_block])
                             for of_block in of_step[::-1]]) for of_step in self.of_blocks])

    def first_blocks(self) -> tuple[tuple[bool, ...], ...] | None:
        """Return of each step's blocks which have the first part of all their rows.

        None where a block has that of some of its rows only, or rows are idle.
        """
        firsts = [[{own.is_first for own in of_block} for of_block in of_step] for of_step in self.of_blocks]
        if self.idle or any(len(found) > 1 for of_step in firsts for found in of_step):
            return None
        return tuple([tuple([True in found for found in of_step]) for of_step in firsts])


class _Run(NamedTuple):
    """Neighbouring query rows of a block.

    Attributes:
        step, block: the number of the step, and of the block there.
        shift: what is added to a row of the rank's queries to find it in the block's results.
    """

    step: int
    block: int
    shift: int


def segments_of(steps: Sequence[Step], rows: int) -> Segments:
    """Return the segments of the blocks of steps, which have the same heads or none in common, of so many rows."""
    found: dict[tuple[int, int], list[Segment]] = {}
    idle = []
    for heads, (begins, ends) in _borders(steps).items():
        active: list[_Run] = []
        for start, stop in pairwise(sorted({0, rows, *begins, *ends})):
            for run in ends.get(start, ()):
                active.remove(run)
            for run in begins.get(start, ()):
                insort(active, run)
            for run in active:
                found.setdefault((run.step, run.block), []).append(
                    Segment(Span(start, stop), Span(start + run.shift, stop + run.shift), run == active[0],
                            run == active[-1]))
            if not active:
                idle.append((heads, Span(start, stop)))
    return Segments(tuple([tuple([_joined(found.get((number, block), ())) for block in range(len(step.blocks))])
                           for number, step in enumerate(steps)]), tuple(idle))


def _borders(steps: Sequence[Step]) -> dict[Span, tuple[dict[int, list[_Run]], dict[int, list[_Run]]]]:
    """Return which runs begin at a row, and which end there, of each step's heads."""
    found: dict[Span, tuple[dict[int, list[_Run]], dict[int, list[_Run]]]] = {}
    for step_number, step in enumerate(steps):
        begins, ends = found.setdefault(step.heads, ({}, {}))
        for number, block in enumerate(step.blocks):
            before = 0
            for run in block.query_runs:
                if run:
                    own = _Run(step_number, number, before - run.start)
                    begins.setdefault(run.start, []).append(own)
                    ends.setdefault(run.stop, []).append(own)
                    before += len(run)
    return found


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
