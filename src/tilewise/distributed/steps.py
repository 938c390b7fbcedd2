"""What a plan is made of: steps, the parts of keys that they have, and the blocks that they compute."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tilewise.distributed.packing import Borders
from tilewise.masks import Mask, Span


class Place(NamedTuple):
    """Where the pairs of a block are in the whole.

    Attributes:
        query_row, key_row: the first rows of all ranks' together.
        first_query, first_key: their positions in their sequence: the same, unless sequences are packed.
        sequence: the number of their sequence, or of the first one.
    """

    query_row: int
    key_row: int
    first_query: int
    first_key: int
    sequence: int = 0



class Block(NamedTuple):
    """One local call.

    Attributes:
        queries: rows of the rank's queries.
        keys: rows of the step's buffer.
        mask: of the block.
        place: where its pairs are in the whole.
        borders: of a block of several packed sequences, where each begins; None of one sequence.
        runs: where not all rows of the range take part, those that do, which then lie one behind the other; else none.
    """

    queries: Span
    keys: Span
    mask: Mask
    place: Place
    borders: Borders | None = None
    runs: tuple[Span, ...] = ()

    @property
    def query_runs(self) -> tuple[Span, ...]:
        """The ranges of the rank's queries that take part."""
        return self.runs or (self.queries,)


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

    @cached_property
    def length(self) -> int:
        """Rows of the buffer."""
        return sum(len(part.rows) for part in self.parts)

    def received(self, rank: int) -> dict[int, tuple[Part, ...]]:
        """Return what comes from each other rank."""
        return {source: parts for source, parts in self.by_source.items() if source != rank}

    @cached_property
    def sent(self) -> dict[int, tuple[Part, ...]]:
        """What each other rank is sent."""
        return _by_rank(self.sends)

    @cached_property
    def by_source(self) -> dict[int, tuple[Part, ...]]:
        """What the buffer holds of each rank."""
        return _by_rank(self.parts)


def _by_rank(parts: Iterable[Part]) -> dict[int, tuple[Part, ...]]:
    found: dict[int, list[Part]] = {}
    for part in parts:
        found.setdefault(part.rank, []).append(part)
    return {rank: tuple(of_rank) for rank, of_rank in sorted(found.items())}
