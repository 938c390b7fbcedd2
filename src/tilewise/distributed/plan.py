"""What each rank computes and sends, step by step: planned from layouts and a mask alone, alike on every rank.

In a step a rank has a buffer of keys: some of its own, or of others', or both. It attends to them block by block while
the messages of the next step travel. A block is a rectangle of its queries and of the buffer's keys with a mask of its
own (:func:`tilewise.masks.cutting.cut_mask`). Only keys that a rank's queries can see are sent to it. All ranks have
equally many steps, of which some may be empty: were one left out, two ranks could wait for each other's messages in
different orders.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from tilewise.distributed.layouts import Layout, joined
from tilewise.masks import Mask, Span
from tilewise.masks.cutting import MaskBlock, cut_mask

# Of a rectangle that a mask by position leaves visible: what is left of it where data hides the rest.
Narrow = Callable[[MaskBlock], tuple[MaskBlock, ...]]
_CAUSAL = Mask(right=0, alignment="top_left")


class Block(NamedTuple):
    """One local call.

    Attributes:
        queries: rows of the rank's queries.
        keys: rows of the step's buffer.
        mask: of the block.
        first_query, first_key: their positions in the whole sequences.
    """

    queries: Span
    keys: Span
    mask: Mask
    first_query: int
    first_key: int


class Part(NamedTuple):
    """Rows of a rank's keys, and where they lie in a step's buffer."""

    rank: int
    rows: Span
    at: Span


@dataclass(frozen=True)
class Step:
    """What happens between two exchanges.

    Attributes:
        heads: heads of keys and values.
        parts: what the buffer holds; a rank may have several parts.
        sends: to other ranks, rows of the own keys: parts of their buffers. By rank.
        blocks: what is computed.
    """

    heads: Span
    parts: tuple[Part, ...]
    sends: tuple[Part, ...]
    blocks: tuple[Block, ...]

    @property
    def length(self) -> int:
        """Rows of the buffer."""
        return sum(len(part.rows) for part in self.parts)

    def received(self, rank: int) -> dict[int, tuple[Part, ...]]:
        """Return what comes from each other rank."""
        return _by_rank(part for part in self.parts if part.rank != rank)

    def sent(self) -> dict[int, tuple[Part, ...]]:
        """Return what each other rank is sent."""
        return _by_rank(self.sends)


@dataclass(frozen=True)
class Problem:
    """What a plan is made from; hashable.

    Attributes:
        queries, keys: the layouts.
        mask: by position, of the whole sequences.
        merges: whether blocks without hidden pairs may become one, which no operand of the pairs allows.
        kv_heads: how many heads keys have.
    """

    queries: Layout
    keys: Layout
    mask: Mask
    merges: bool
    kv_heads: int

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.queries.pieces)


def no_narrowing(block: MaskBlock) -> tuple[MaskBlock, ...]:
    """Leave a rectangle as it is: of masks by position alone."""
    return (block,)


def ring_plan(problem: Problem, rank: int, narrow: Narrow = no_narrowing) -> tuple[Step, ...]:
    """Plan one step for each rank's keys: the own ones first, then those of the rank before, and so on around."""
    heads, steps = Span(0, problem.kv_heads), []
    for distance in range(problem.ranks):
        source, target = (rank - distance) % problem.ranks, (rank + distance) % problem.ranks
        blocks = visible_blocks(problem, rank, source, narrow)
        parts = _parts(problem, blocks, (source,))
        sends: tuple[Part, ...] = ()
        if distance:
            for_target = _parts(problem, visible_blocks(problem, target, rank, narrow), (rank,))
            sends = tuple([part._replace(rank=target) for part in for_target])
        made = _local_blocks(problem, rank, blocks, parts)
        steps.append(Step(heads, parts, sends, _merged(problem, made, source == rank)))
    return tuple(steps)


def all_gather_plan(problem: Problem, rank: int, groups: int, narrow: Narrow = no_narrowing) -> tuple[Step, ...]:
    """Plan one step for each group of heads, in which a rank has all keys that its queries can see."""
    ranks = tuple(range(problem.ranks))
    blocks = _blocks_of_all_keys(problem, rank, narrow)
    parts = _parts(problem, blocks, ranks)
    made = _merged(problem, _local_blocks(problem, rank, blocks, parts), is_own=False)
    sends: list[Part] = []
    for target in ranks:
        if target != rank:
            theirs = _parts(problem, _blocks_of_all_keys(problem, target, narrow), ranks)
            sends += [part._replace(rank=target) for part in theirs if part.rank == rank]
    size = problem.kv_heads // groups
    steps = [Step(Span(first, first + size), parts, tuple(sends), made)
             for first in range(0, problem.kv_heads, size)]
    return tuple(steps)


# Of masks by position; a plan that data narrows is made for its call.
cached_ring_plan = lru_cache(maxsize=256)(ring_plan)
cached_all_gather_plan = lru_cache(maxsize=256)(all_gather_plan)


def visible_blocks(problem: Problem, rank: int, source: int, narrow: Narrow) -> list[MaskBlock]:
    """Return the rectangles of a rank's queries and another's keys that hold visible pairs, in whole positions."""
    lengths = problem.queries.length, problem.keys.length
    return [left for queries, keys in product(problem.queries.pieces[rank], problem.keys.pieces[source])
            for block in cut_mask(problem.mask, queries, keys, lengths) for left in narrow(block)]


def _blocks_of_all_keys(problem: Problem, rank: int, narrow: Narrow) -> list[MaskBlock]:
    lengths = problem.queries.length, problem.keys.length
    return [left for queries in problem.queries.pieces[rank]
            for block in cut_mask(problem.mask, queries, Span(0, lengths[1]), lengths) for left in narrow(block)]


def _parts(problem: Problem, blocks: Iterable[MaskBlock], sources: Iterable[int]) -> tuple[Part, ...]:
    """Return where the keys of the blocks come from, in the order of their positions."""
    needed = joined(tuple(sorted((block.keys for block in blocks), key=lambda span: (span.start, span.stop))))
    held = sorted(((whole, source, rows) for source in sources for span in needed
                   for whole, rows in problem.keys.local_spans(source, span)), key=lambda one: one[0].start)
    found, at = [], 0
    for whole, source, rows in held:
        found.append(Part(source, rows, Span(at, at + len(whole))))
        at += len(whole)
    return tuple(found)


def _local_blocks(problem: Problem, rank: int, blocks: Iterable[MaskBlock], parts: tuple[Part, ...]) -> list[Block]:
    """Return the blocks in rows of the rank's queries and of a buffer that holds the parts."""
    places = sorted((_position(problem.keys, part), part.at.start, len(part.rows)) for part in parts)
    found = []
    for queries, keys, mask in blocks:
        ((_, rows),) = problem.queries.local_spans(rank, queries)
        start = next(at + keys.start - first for first, at, length in places if first <= keys.start < first + length)
        found.append(Block(rows, Span(start, start + len(keys)), mask, queries.start, keys.start))
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
    if not problem.merges or len(blocks) < 2:
        return tuple(blocks)
    same = problem.queries == problem.keys and problem.mask.offset(problem.queries.length, problem.keys.length) == 0
    if is_own and same and replace(problem.mask, alignment="top_left") == _CAUSAL:
        # The pieces' order is that of the positions: what is causal in the sequence is so in the shard.
        rows = Span(0, max(block.queries.stop for block in blocks))
        return (Block(rows, rows, _CAUSAL, blocks[0].first_query, blocks[0].first_key),)
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


def _by_rank(parts: Iterable[Part]) -> dict[int, tuple[Part, ...]]:
    found: dict[int, list[Part]] = {}
    for part in parts:
        found.setdefault(part.rank, []).append(part)
    return {rank: tuple(of_rank) for rank, of_rank in sorted(found.items())}
