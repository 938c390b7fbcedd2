"""What each rank computes and sends, step by step: planned from layouts and a mask alone, alike on every rank.

In a step a rank has a buffer of keys: some of its own, or of others', or both. It attends to them block by block while
the messages of the next step travel. A block is a rectangle of its queries and of the buffer's keys with a mask of its
own (:func:`tilewise.masks.cutting.cut_mask`). Only keys that a rank's queries can see are sent to it. All ranks have
equally many steps, of which some may be empty: were one left out, two ranks could wait for each other's messages in
different orders.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from tilewise.distributed.layouts import Layout, joined
from tilewise.distributed.packing import Packable, borders_of, packed_calls, query_runs
from tilewise.distributed.steps import Block, Part, Place, Step
from tilewise.masks import Mask, Span
from tilewise.masks.cutting import MaskBlock, cut_mask
from tilewise.support.caches import registered

# Of a rectangle that a mask by position leaves visible: what is left of it where data hides the rest.
Narrow = Callable[[MaskBlock], tuple[MaskBlock, ...]]
_CAUSAL = Mask(right=0, alignment="top_left")


class Rectangle(NamedTuple):
    """Pairs of one sequence that a mask by position leaves visible.

    Attributes:
        queries, keys: rows of all ranks' together.
        mask: of the rectangle.
        place: where it is in the whole.
        is_whole: whether it has all queries and keys of a packed sequence.
    """

    queries: Span
    keys: Span
    mask: Mask
    place: Place
    is_whole: bool = False


@dataclass(frozen=True)
class Problem:
    """What a plan is made from; hashable.

    Attributes:
        queries, keys: the layouts.
        mask: by position, of the whole sequences.
        merges: whether blocks without hidden pairs may become one, which no operand of the pairs allows.
        kv_heads: how many heads keys have.
        step: where a mask trims the queries and keys of a block, it begins at a multiple of this; 1 without dropout,
            whose draws belong to more positions at once.
        sequences: of packed ones, in their order, the rows that take part: first query, one past the last, first key
            and one past the last; None of one sequence. The mask is each one's own.
    """

    queries: Layout
    keys: Layout
    mask: Mask
    merges: bool
    kv_heads: int
    step: int = 1
    sequences: tuple[tuple[int, int, int, int], ...] | None = None

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.queries.pieces)

    @property
    def heads_apart(self) -> int:
        """Heads of keys that calls may divide among them: not with dropout, whose draws go by a head's number."""
        return self.kv_heads if self.step == 1 else 1


def no_narrowing(block: MaskBlock) -> tuple[MaskBlock, ...]:
    """Leave a rectangle as it is: of masks by position alone."""
    return (block,)


def ring_plan(problem: Problem, rank: int, narrow: Narrow = no_narrowing) -> tuple[Step, ...]:
    """Plan one step for each rank's keys: the own ones first, then those of the rank before, and so on around."""
    heads, steps = Span(0, problem.kv_heads), []
    for distance in range(problem.ranks):
        source, target = (rank - distance) % problem.ranks, (rank + distance) % problem.ranks
        blocks = _of_source(problem, rank, source, narrow)
        parts = _parts(problem, blocks, (source,))
        sends: tuple[Part, ...] = ()
        if distance:
            for_target = _whole_parts(_parts(problem, _of_source(problem, target, rank, narrow), (rank,)))
            sends = tuple([part._replace(rank=target) for part in for_target])
        made = _local_blocks(problem, rank, blocks, parts, is_own=source == rank)
        steps.append(Step(heads, _whole_parts(parts), sends, _merged(problem, made, source == rank)))
    return tuple(steps)


class GatherPlan(NamedTuple):
    """What a rank does in an all-gather.

    Attributes:
        steps: one for each group of heads.
        most_received: rows of keys, of that rank which receives most; alike on every rank.
    """

    steps: tuple[Step, ...]
    most_received: int


def all_gather_plan(problem: Problem, rank: int, groups: Callable[[int], int],
                    narrow: Narrow = no_narrowing) -> GatherPlan:
    """Plan one step for each group of heads, in which a rank has all keys that its queries can see.

    Args:
        problem: the call.
        rank: the own one.
        groups: returns how many there are, a divisor of the heads of keys, for such a ``most_received``.
        narrow: what is left of a rectangle where data hides the rest.
    """
    ranks = tuple(range(problem.ranks))
    blocks = rectangles_of(problem, rank, Span(0, problem.keys.length), narrow)
    parts = _parts(problem, blocks, ranks)
    made = _merged(problem, _local_blocks(problem, rank, blocks, parts, is_own=False), is_own=False)
    sends: list[Part] = []
    most = _received(parts, rank)
    for target in ranks:
        if target != rank:
            theirs = _whole_parts(_parts(
                problem, rectangles_of(problem, target, Span(0, problem.keys.length), narrow), ranks))
            sends += [part._replace(rank=target) for part in theirs if part.rank == rank]
            most = max(most, _received(theirs, target))
    size = problem.kv_heads // groups(most)
    return GatherPlan(tuple([Step(Span(first, first + size), _whole_parts(parts), tuple(sends), made)
                             for first in range(0, problem.kv_heads, size)]), most)


def _received(parts: Iterable[Part], rank: int) -> int:
    """Return how many rows of keys come from other ranks."""
    return sum(len(part.rows) for part in parts if part.rank != rank)


# Of masks by position: the estimate of a cost asks for every rank's.
cached_ring_plan = registered(lru_cache(maxsize=256)(ring_plan))


def rectangles_of(problem: Problem, rank: int, keys: Span, narrow: Narrow = no_narrowing) -> list[Rectangle]:
    """Return the rectangles of a rank's queries and a range of keys that hold visible pairs."""
    find = _of_one_sequence if problem.sequences is None else _of_packed_sequences
    return [found for queries in problem.queries.pieces[rank] for found in find(problem, queries, keys, narrow)]


def _of_one_sequence(problem: Problem, queries: Span, keys: Span, narrow: Narrow) -> Iterator[Rectangle]:
    lengths = problem.queries.length, problem.keys.length
    for block in cut_mask(problem.mask, queries, keys, lengths, problem.step):
        for left in narrow(block):
            at = left.queries.start, left.keys.start
            yield Rectangle(*left, Place(*at, *at))


def _of_packed_sequences(problem: Problem, queries: Span, keys: Span, _: Narrow) -> Iterator[Rectangle]:
    """Yield what packed sequences have in a range of queries and one of keys: whole ones as they are, parts trimmed."""
    sequences = problem.sequences or ()
    first = max(bisect_right(sequences, span.start, key=itemgetter(stop)) for span, stop in ((queries, 1), (keys, 3)))
    for number in range(first, len(sequences)):
        first_q, stop_q, first_k, stop_k = own = sequences[number]
        if first_q >= queries.stop or first_k >= keys.stop:
            break
        if stop_q == first_q or stop_k == first_k:
            continue
        lengths = stop_q - first_q, stop_k - first_k
        if queries.start <= first_q and stop_q <= queries.stop and keys.start <= first_k and stop_k <= keys.stop:
            mask = replace(problem.mask, alignment=problem.mask.offset(*lengths)) if problem.mask.alignment else (
                problem.mask)
            yield Rectangle(Span(first_q, stop_q), Span(first_k, stop_k), mask, Place(first_q, first_k, 0, 0, number),
                            is_whole=True)
            continue
        inside = (Span(max(queries.start, first_q) - first_q, min(queries.stop, stop_q) - first_q),
                  Span(max(keys.start, first_k) - first_k, min(keys.stop, stop_k) - first_k))
        for block in cut_mask(problem.mask, *inside, lengths):
            yield _placed(block, own, number)


def _placed(block: MaskBlock, sequence: tuple[int, int, int, int], number: int) -> Rectangle:
    """Return a rectangle in rows of one in positions of a packed sequence."""
    first_q, _, first_k, _ = sequence
    queries, keys, mask = block
    rows = Span(first_q + queries.start, first_q + queries.stop), Span(first_k + keys.start, first_k + keys.stop)
    return Rectangle(*rows, mask, Place(rows[0].start, rows[1].start, queries.start, keys.start, number))


def _of_source(problem: Problem, rank: int, source: int, narrow: Narrow) -> list[Rectangle]:
    """Return the rectangles of a rank's queries and another's keys."""
    return [found for keys in problem.keys.pieces[source] for found in rectangles_of(problem, rank, keys, narrow)]


def _parts(problem: Problem, blocks: Iterable[Rectangle], sources: Iterable[int]) -> tuple[Part, ...]:
    """Return where the keys of the blocks come from, in the order of their positions."""
    needed = joined(tuple(sorted((block.keys for block in blocks), key=lambda span: (span.start, span.stop))))
    held = sorted(((whole, source, rows) for source in sources for span in needed
                   for whole, rows in problem.keys.local_spans(source, span)), key=lambda one: one[0].start)
    found, at = [], 0
    for whole, source, rows in held:
        found.append(Part(source, rows, Span(at, at + len(whole))))
        at += len(whole)
    return tuple(found)


def _whole_parts(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Join parts whose rows follow one another, in the rank's keys as in the buffer: fewer messages' parts to copy."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last is not None and (last.rank, last.rows.stop, last.at.stop) == (part.rank, part.rows.start,
                                                                             part.at.start):
            found[-1] = Part(part.rank, Span(last.rows.start, part.rows.stop), Span(last.at.start, part.at.stop))
        else:
            found.append(part)
    return tuple(found)


def _local_blocks(problem: Problem, rank: int, rectangles: Iterable[Rectangle], parts: tuple[Part, ...], *,
                  is_own: bool) -> list[Block]:
    """Return the blocks in rows of the rank's queries and of a buffer that holds the parts."""
    places = sorted((_position(problem.keys, part), part.at.start, len(part.rows)) for part in parts)
    found = []
    for one in rectangles:
        ((_, rows),) = problem.queries.local_spans(rank, one.queries)
        start = next(at + one.keys.start - first for first, at, length in places
                     if first <= one.keys.start < first + length)
        found.append(Block(rows, Span(start, start + len(one.keys)), one.mask, one.place))
    if problem.sequences is None:
        return found
    if not problem.merges:
        return _runs_of_whole(problem, list(zip(found, rectangles, strict=True)))
    return _packed(_joined_queries(_joined_keys(_causal_shards(problem, found) if is_own else found)))


def _causal_shards(problem: Problem, blocks: list[Block]) -> list[Block]:
    """Make one block of all that a rank has of a sequence: what is causal in the sequence is so in the shard."""
    sequences = problem.sequences or ()
    if problem.queries != problem.keys or replace(problem.mask, alignment="top_left") != _CAUSAL or any(
            own[:2] != own[2:] for own in sequences):
        return blocks
    of_sequences: dict[int, list[Block]] = {}
    for block in blocks:
        of_sequences.setdefault(block.place.sequence, []).append(block)
    return [Block(_around([block.queries for block in own]), _around([block.keys for block in own]), _CAUSAL,
                  own[0].place) for own in of_sequences.values()]


def _around(spans: list[Span]) -> Span:
    return Span(min(one.start for one in spans), max(one.stop for one in spans))


def _packed(blocks: list[Block]) -> list[Block]:
    """Make one block of several parts of sequences where one call computes them."""
    found = []
    for numbers, mask in packed_calls([Packable(block.queries, block.keys, block.mask) for block in blocks]):
        own = [blocks[number] for number in numbers]
        if len(own) == 1:
            found += own
            continue
        queries, keys = [block.queries for block in own], [block.keys for block in own]
        runs = query_runs(queries)
        found.append(Block(Span(queries[0].start, queries[-1].stop), Span(keys[0].start, keys[-1].stop), mask,
                           own[0].place, borders_of(queries, keys, runs), runs if len(runs) > 1 else ()))
    return found


def _runs_of_whole(problem: Problem, blocks: list[tuple[Block, Rectangle]]) -> list[Block]:
    """Put whole packed sequences together that follow one another: operands of the pairs count the sequences."""
    runs: list[list[tuple[Block, Rectangle]]] = []
    for block, one in blocks:
        last = runs[-1][-1][1] if runs else None
        if (last is not None and last.is_whole and one.is_whole and last.place.sequence + 1 == one.place.sequence
                and last.queries.stop == one.queries.start and last.keys.stop == one.keys.start):
            runs[-1].append((block, one))
        else:
            runs.append([(block, one)])
    found = []
    for run in runs:
        if len(run) == 1:
            found.append(run[0][0])
            continue
        queries, keys = [block.queries for block, _ in run], [block.keys for block, _ in run]
        whole = Span(queries[0].start, queries[-1].stop), Span(keys[0].start, keys[-1].stop)
        found.append(Block(*whole, problem.mask, run[0][0].place, borders_of(queries, keys, whole[:1])))
    return found


def _position(layout: Layout, part: Part) -> int:
    """Return the position of a part's first row in the sequence."""
    start = 0
    for piece in layout.pieces[part.rank]:
        if part.rows.start < start + len(piece):
            return piece.start + part.rows.start - start
        start += len(piece)
    raise AssertionError("a part has a row")


def _merged(problem: Problem, blocks: list[Block], is_own: bool) -> tuple[Block, ...]:
    """Make one block of several where one call computes them: fewer, larger launches, and fewer results to merge."""
    if not problem.merges or problem.sequences is not None or len(blocks) < 2:
        return tuple(blocks)
    same = problem.queries == problem.keys and problem.mask.offset(problem.queries.length, problem.keys.length) == 0
    if is_own and same and replace(problem.mask, alignment="top_left") == _CAUSAL:
        # The pieces' order is that of the positions: what is causal in the sequence is so in the shard.
        rows = Span(0, max(block.queries.stop for block in blocks))
        return (Block(rows, rows, _CAUSAL, blocks[0].place),)
    return tuple(_joined_queries(_joined_keys(blocks)))


def _joined_keys(blocks: list[Block]) -> list[Block]:
    """Join blocks without hidden pairs that have the same queries and adjacent keys."""
    found: list[Block] = []
    for block in sorted(blocks, key=lambda one: (one.queries.start, one.queries.stop, one.keys.start)):
        last = found[-1] if found else None
        if last is not None and _are_full(last, block) and last.queries == block.queries and (
                last.keys.stop == block.keys.start):
            found[-1] = last._replace(keys=Span(last.keys.start, block.keys.stop))
        else:
            found.append(block)
    return found


def _joined_queries(blocks: list[Block]) -> list[Block]:
    """Join blocks without hidden pairs that have the same keys and adjacent queries."""
    found: list[Block] = []
    for block in sorted(blocks, key=lambda one: (one.keys.start, one.keys.stop, one.queries.start)):
        last = found[-1] if found else None
        if last is not None and _are_full(last, block) and last.keys == block.keys and (
                last.queries.stop == block.queries.start):
            found[-1] = last._replace(queries=Span(last.queries.start, block.queries.stop))
        else:
            found.append(block)
    return found


def _are_full(*blocks: Block) -> bool:
    return not any(block.mask.is_bounded for block in blocks)
