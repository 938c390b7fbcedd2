"""Parts of packed sequences put together into as few local calls as there can be.

A call of packed sequences has one mask, by its corners, and sequences whose rows follow one another. Parts of sequences
become sequences of such a call: their mask is moved to a corner, rows of keys that lie between two parts become a
sequence without queries, and rows of queries one without keys, or are left out where most would be such.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations
from typing import Literal, NamedTuple

from tilewise.distributed.layouts import joined
from tilewise.masks import Mask, Span

Borders = tuple[tuple[int, ...], tuple[int, ...]]  # cu_seqlens of queries and keys
Corner = Literal["top_left", "bottom_right"]
_CORNERS: tuple[Corner, Corner] = ("top_left", "bottom_right")


class Packable(NamedTuple):
    """A part of a sequence, or a whole one.

    Attributes:
        queries: rows of the rank's queries.
        keys: rows of a buffer.
        mask: of the part.
    """

    queries: Span
    keys: Span
    mask: Mask


class PackedCall(NamedTuple):
    """Parts of sequences that one call computes.

    Attributes:
        members: numbers of the parts, ascending in queries and in keys.
        mask: of all of them, at a corner.
    """

    members: list[int]
    mask: Mask


def packed_calls(parts: list[Packable]) -> list[PackedCall]:
    """Return as few calls as one pass finds, for the better order of corners; each part is in one of them."""
    return min((_first_fit(parts, corners) for corners in permutations(_CORNERS)), key=len)


def _first_fit(parts: list[Packable], corners: Iterable[Corner]) -> list[PackedCall]:
    """Give each part to the first call that has its mask and ends ahead of it."""
    found: list[PackedCall] = []
    for number in sorted(range(len(parts)), key=lambda one: (parts[one].queries.start, parts[one].keys.start)):
        own = parts[number]
        mask = mask_at_corner(own.mask, len(own.queries), len(own.keys), corners)
        for call in found:
            last = parts[call.members[-1]]
            if mask == call.mask and last.queries.stop <= own.queries.start and last.keys.stop <= own.keys.start:
                call.members.append(number)
                break
        else:
            found.append(PackedCall([number], own.mask if mask is None else mask))
    return found


def mask_at_corner(mask: Mask, rows: int, columns: int, corners: Iterable[Corner]) -> Mask | None:
    """Return the mask of so many queries and keys by the first corner that it can be told by, or None."""
    if not mask.is_bounded:
        return Mask()
    offset = mask.offset(rows, columns)
    offsets = {corner: 0 if corner == "top_left" else columns - rows for corner in corners}
    for corner, own in offsets.items():
        if own == offset:
            return replace(mask, alignment=corner)
    for corner, own in offsets.items():
        left, right = (None if side is None else side + moved for side, moved in (
            (mask.left, own - offset), (mask.right, offset - own)))
        if mask.chunk is None and min(left or 0, right or 0) >= 0:
            return replace(mask, left=left, right=right, alignment=corner)
    return None


def query_runs(queries: list[Span]) -> tuple[Span, ...]:
    """Return the rows of a call's queries: all from the first to the last, or several ranges where most are idle."""
    runs, whole = joined(tuple(queries)), Span(queries[0].start, queries[-1].stop)
    return runs if 2 * sum(map(len, runs)) < len(whole) else (whole,)


def borders_of(queries: list[Span], keys: list[Span], runs: tuple[Span, ...]) -> Borders:
    """Return cu_seqlens of the queries and keys of a call, with what lies between its parts as sequences.

    Args:
        queries, keys: of each part, ascending.
        runs: of :func:`query_runs`.
    """
    ends_q, ends_k = [0], [0]
    at_q, at_k = queries[0].start, keys[0].start
    for of_q, of_k in zip(queries, keys, strict=True):
        idle_q = of_q.start - at_q if len(runs) == 1 else 0
        for more_q, more_k in ((idle_q, 0), (0, of_k.start - at_k), (len(of_q), len(of_k))):
            if more_q or more_k:
                ends_q.append(ends_q[-1] + more_q)
                ends_k.append(ends_k[-1] + more_k)
        at_q, at_k = of_q.stop, of_k.stop
    return tuple(ends_q), tuple(ends_k)
