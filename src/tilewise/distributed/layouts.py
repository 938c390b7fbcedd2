"""Layouts: which positions of a sequence each rank holds, as a few contiguous pieces."""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

from tilewise.masks import Span
from tilewise.support.caches import registered
from tilewise.validate.distributed import check_layout, check_layout_name

LAYOUTS = ("contiguous", "zigzag")
Pieces = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Who holds which positions of a sequence; made by :func:`named_layout` or :func:`tilewise.distributed.balanced`.

    Attributes:
        name: what a message calls it.
        pieces: of each rank, half-open ranges of positions, ascending and disjoint; together they hold each position
            of the sequence once. A rank may have none.
    """

    name: str
    pieces: tuple[Pieces, ...]
    _lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Asked for several times a call: counted and hashed once. Numbers alone have the same hash in every process.
        object.__setattr__(self, "_lengths", tuple([sum(map(len, own)) for own in self.pieces]))
        object.__setattr__(self, "_hash", hash(self.pieces))

    def __hash__(self) -> int:
        return self._hash

    @property
    def length(self) -> int:
        """How many positions the sequence has."""
        return sum(self._lengths)

    def shard_length(self, rank: int) -> int:
        """How many positions a rank holds."""
        return self._lengths[rank]

    def local_spans(self, rank: int, span: Span) -> tuple[tuple[Span, Span], ...]:
        """Return what a rank holds of a range of positions: in the sequence, and in the rank's shard."""
        found, start = [], 0
        for piece in self.pieces[rank]:
            held = Span(max(piece.start, span.start), min(piece.stop, span.stop))
            if len(held):
                found.append((held, Span(start + held.start - piece.start, start + held.stop - piece.start)))
            start += len(piece)
        return tuple(found)


@registered
@lru_cache(maxsize=1024)
def named_layout(layout: str | Layout, length: int, ranks: int) -> Layout:
    """Lay a sequence out over the ranks.

    "contiguous" gives rank r the r-th of as many pieces as there are ranks. "zigzag" cuts twice as many pieces and
    gives rank r the r-th from the front and the r-th from the back, so that every rank has the same share of a causal
    mask. Pieces are of one length where it divides, else their lengths differ by one at most.

    Args:
        layout: one of the names, or a layout, which is checked against length and ranks.
        length: positions of the sequence, >= 0.
        ranks: how many there are.

    Raises:
        InvalidInput: an unknown name, or a layout of another length or number of ranks.
    """
    if isinstance(layout, Layout):
        check_layout(layout, length, ranks)
        return layout
    check_layout_name(layout, LAYOUTS)
    count = ranks if layout == "contiguous" else 2 * ranks
    pieces = [Span(*ends) for ends in pairwise([number * length // count for number in range(count + 1)])]
    if layout == "contiguous":
        return Layout(layout, tuple([joined((piece,)) for piece in pieces]))
    return Layout(layout, tuple([joined((pieces[rank], pieces[-1 - rank])) for rank in range(ranks)]))


@registered
@lru_cache(maxsize=1024)
def layout_of_rows(layout: Layout, size: int) -> Layout:
    """Return who holds which positions among rows of so many ranks, each of which holds what its ranks do."""
    rows = [layout.pieces[first:first + size] for first in range(0, len(layout.pieces), size)]
    return Layout(layout.name, tuple([joined(tuple(_ascending(row))) for row in rows]))


@registered
@lru_cache(maxsize=1024)
def layout_in_row(layout: Layout, row: int, size: int) -> Layout:
    """Return who holds which positions among the ranks of one such row, counted without those of other rows."""
    own = layout.pieces[row * size:(row + 1) * size]
    ends = accumulate((len(piece) for piece in _ascending(own)), initial=0)
    counted = {piece: Span(*within) for piece, within in zip(_ascending(own), pairwise(ends), strict=True)}
    return Layout(layout.name, tuple([tuple([counted[piece] for piece in pieces]) for pieces in own]))


def _ascending(row: tuple[Pieces, ...]) -> list[Span]:
    return sorted((piece for pieces in row for piece in pieces), key=lambda piece: piece.start)


def joined(spans: Pieces) -> Pieces:
    """Return ascending ranges with those joined that touch or overlap, and without empty ones."""
    found: list[Span] = []
    for span in spans:
        if found and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(span.stop, found[-1].stop))
        elif len(span):
            found.append(span)
    return tuple(found)
