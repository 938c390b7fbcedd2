"""Cut a mask to some of a sequence's queries and keys: what a part of a call sees is again a mask by position.

With queries that begin at ``a`` and keys that begin at ``c``, the diagonal ``i + offset = j`` runs through local
positions ``i′ = i − a`` and ``j′ = j − c`` as ``i′ + (offset + a − c) = j′``. Bounds stay as they are, counts of first
keys shrink by ``c``, and chunks stay chunks where ``c`` begins one.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from tilewise.masks.bands import Span
from tilewise.masks.mask import Mask


class MaskBlock(NamedTuple):
    """A rectangle of pairs with the mask inside of it.

    Attributes:
        queries, keys: positions in the whole sequence.
        mask: of the rectangle; its alignment is named, an integer unless 0. It hides nothing where it is not bounded.
    """

    queries: Span
    keys: Span
    mask: Mask

    @property
    def is_full(self) -> bool:
        """Whether every pair of the rectangle takes part."""
        return not self.mask.is_bounded


def cut_mask(mask: Mask, queries: Span, keys: Span, lengths: tuple[int, int],
             step: int = 1) -> tuple[MaskBlock, ...]:
    """Return disjoint rectangles that hold every pair of ``queries`` and ``keys`` that the mask leaves visible.

    One rectangle, or two where chunks do not begin with the keys; none where nothing is visible. A rectangle is trimmed
    to the queries that see one of its keys, and to the keys that are seen.

    Args:
        mask: of the whole sequence.
        queries, keys: half-open ranges of positions in it.
        lengths: numbers of queries and keys of the whole sequence, which the mask's alignment is resolved by.
        step: a trimmed rectangle begins at multiples of it, or where the range does.

    Raises:
        InvalidInput: the lengths differ, and the mask is bounded and names no alignment.
    """
    offset = mask.offset(*lengths) if mask.is_bounded or mask.alignment is not None else 0
    if not len(queries) or not len(keys):
        return ()
    parts = [(queries, keys)]
    if mask.chunk is not None:
        parts = _parts_by_chunk(mask.chunk, offset, queries, keys)
    blocks = [_block(mask, offset, *part, step) for part in parts if len(part[0]) and len(part[1])]
    return tuple([block for block in blocks if block is not None])


def _parts_by_chunk(chunk: int, offset: int, queries: Span, keys: Span) -> list[tuple[Span, Span]]:
    """Part a rectangle where a chunk begins, unless its keys begin one; what lies in no common chunk is left out."""
    first = max((queries.start + offset) // chunk, keys.start // chunk) * chunk
    start = max(keys.start, first)
    border = first if start == first else first + chunk
    behind = Span(max(queries.start, border - offset), queries.stop), Span(max(keys.start, border), keys.stop)
    if border == first:
        return [behind]
    inside = (Span(max(queries.start, first - offset), min(queries.stop, border - offset)),
              Span(start, min(keys.stop, border)))
    return [inside, behind]


def _block(mask: Mask, offset: int, queries: Span, keys: Span, step: int) -> MaskBlock | None:
    """Return the rectangle, trimmed, with its mask; None where nothing is visible."""
    band = _local(mask, offset, queries, keys).band(len(queries), len(keys))
    seen, seeing = band.keys_of(Span(0, len(queries)), len(keys)), band.queries_of(Span(0, len(keys)), len(queries))
    if not len(seen) or not len(seeing):
        return None
    # Keys that begin a chunk go on to.
    step_k = step if mask.chunk is None or keys.start % mask.chunk else math.lcm(mask.chunk, step)
    queries = Span(max(queries.start, (queries.start + seeing.start) // step * step), queries.start + seeing.stop)
    keys = Span(max(keys.start, (keys.start + seen.start) // step_k * step_k), keys.start + seen.stop)
    return MaskBlock(queries, keys, _without_idle_bounds(_local(mask, offset, queries, keys), queries, keys))


def _local(mask: Mask, offset: int, queries: Span, keys: Span) -> Mask:
    """Return the mask in positions that begin with those of a rectangle."""
    chunk = mask.chunk
    if chunk is not None and keys.start % chunk:
        chunk = None  # all of it is one chunk: _parts_by_chunk has seen to that
    prefix, sinks = (None if count is None or count <= keys.start else count - keys.start
                     for count in (mask.prefix, mask.sink_tokens))
    return Mask(mask.left, mask.right, offset + queries.start - keys.start, prefix, sinks, chunk)


def _without_idle_bounds(mask: Mask, queries: Span, keys: Span) -> Mask:
    """Leave out what hides no pair of the rectangle, so that a kernel need not look."""
    rows, columns = len(queries), len(keys)
    offset = mask.offset(rows, columns)
    if mask.left is not None and min(columns, offset - mask.left + rows - 1) <= (mask.sink_tokens or 0):
        mask = replace(mask, left=None, sink_tokens=None)
    if mask.right is not None and max(offset + mask.right, (mask.prefix or 0) - 1) >= columns - 1:
        mask = replace(mask, right=None, prefix=None)
    if mask.chunk is not None and len({*(position // mask.chunk for position in (
            offset, offset + rows - 1, 0, columns - 1))}) == 1:
        mask = replace(mask, chunk=None)
    return replace(mask, sink_tokens=None if mask.left is None else mask.sink_tokens,
                   prefix=None if mask.right is None else mask.prefix)
