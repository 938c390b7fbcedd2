"""Checks of what trees, intervals, blocks and prefixes are made of, and whether they are those of a call's lengths."""

from collections.abc import Sequence
from typing import Any

import torch

from tilewise.errors import InvalidInput
from tilewise.validate.values import checked_alignment, is_integer

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def checked_intervals(start: Any, stop: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return starts and stops, (b|1, h|1, sk, 1 or 2) each, of one shape; raises :class:`InvalidInput` for others."""
    for name, tensor in (("start", start), ("stop", stop)):
        is_one = isinstance(tensor, torch.Tensor) and tensor.dtype in _INTEGERS
        if not is_one or not (tensor.dim() == 3 or (tensor.dim() == 4 and tensor.shape[3] in (1, 2))):
            raise InvalidInput(f"intervals: {name} is {_what(tensor)}; allowed is a tensor of integers of shape "
                               "(b or 1, hq or 1, sk), or (b or 1, hq or 1, sk, 1 or 2).")
    if start.device != stop.device:
        raise InvalidInput(f"intervals: start is on {start.device} and stop on {stop.device}: move them to one device.")
    start, stop = (tensor[..., None] if tensor.dim() == 3 else tensor for tensor in (start, stop))
    if start.shape[2:] != stop.shape[2:] or any(1 not in pair and pair[0] != pair[1] for pair in zip(
            start.shape[:2], stop.shape[:2], strict=True)):
        raise InvalidInput(f"intervals: start has shape {tuple(start.shape)} and stop {tuple(stop.shape)}; allowed are "
                           "equal ones, or 1 in place of b or hq.")
    shape = [other if own == 1 else own for own, other in zip(start.shape, stop.shape, strict=True)]
    return start.expand(shape), stop.expand(shape)


def checked_segments(segments: Any) -> torch.Tensor:
    """Return the segment of each token, (b|1, s), int64; raises :class:`InvalidInput` for what is none."""
    if isinstance(segments, torch.Tensor) and segments.dim() in (1, 2) and segments.dtype in _INTEGERS:
        return (segments[None] if segments.dim() == 1 else segments).long()
    raise InvalidInput(f"tree: segments is {_what(segments)}; allowed is a tensor of integers of shape (s,) or (b, s).")


def checked_parents(parents: Any, batch: int) -> list[list[int]]:
    """Return the parents of each batch entry's segments, or one list for all; raises :class:`InvalidInput`."""
    allowed = ("allowed is a list of integers, one a segment, or a list of those, one a batch entry, or such a tensor "
               "of integers on the CPU.")
    if isinstance(parents, torch.Tensor):
        if parents.device.type != "cpu" or parents.dtype not in _INTEGERS:
            raise InvalidInput(f"tree: parents is {_what(parents)} on {parents.device}; {allowed}")
        parents = parents.tolist()
    rows = _rows(parents)
    if rows is None:
        raise InvalidInput(f"tree: parents is {parents!r}; {allowed}")
    if len(rows) not in (1, batch):
        raise InvalidInput(f"tree: parents has {len(rows)} lists and segments {batch} batch entries; allowed is a list "
                           "for each, or one for all.")
    for row in rows:
        for segment, parent in enumerate(row):
            if not -1 <= parent < segment:
                raise InvalidInput(f"tree: the parent of segment {segment} is {parent}; allowed are -1, for none, and "
                                   "the segments before it.")
    return rows


def checked_bitmap(bitmap: Any) -> torch.Tensor:
    """Return which blocks are visible, (b|1, h|1, nq, nk); raises :class:`InvalidInput` for what is no bitmap."""
    if isinstance(bitmap, torch.Tensor) and bitmap.dtype is torch.bool and bitmap.dim() in (2, 4):
        return bitmap[None, None] if bitmap.dim() == 2 else bitmap
    raise InvalidInput(f"blocks: bitmap is {_what(bitmap)}; allowed is a boolean tensor of shape (blocks of queries, "
                       "blocks of keys), or (b or 1, hq or 1, blocks of queries, blocks of keys).")


def checked_block_size(size: Any) -> tuple[int, int]:
    """Return queries and keys of a block; raises :class:`InvalidInput` for what is no size."""
    sides = size if isinstance(size, tuple) else (size, size)
    if len(sides) == 2 and all(is_integer(side) and 1 <= side < 2**31 for side in sides):
        return int(sides[0]), int(sides[1])
    raise InvalidInput(f"blocks: size is {size!r}; allowed is an integer of 1 and more, or a pair of them: queries and "
                       "keys of a block.")


def checked_prefixes(lengths: Any, alignment: Any) -> tuple[torch.Tensor, int | None]:
    """Return a length for each batch entry and the diagonal's offset, None for none; raises :class:`InvalidInput`."""
    if not (isinstance(lengths, torch.Tensor) and lengths.dim() == 1 and lengths.dtype in _INTEGERS):
        raise InvalidInput(f"prefixes: lengths is {_what(lengths)}; allowed is a tensor of integers of shape (b,). "
                           "prefix(length) takes an integer.")
    if alignment is None:
        return lengths, None
    if alignment == "bottom_right":
        raise InvalidInput("prefixes: alignment is 'bottom_right'; allowed are 'top_left' and an integer, the key that "
                           "query 0 stands on: with the lengths of the call, pass alignment=sk - sq.")
    offset = checked_alignment(alignment)
    return lengths, 0 if offset == "top_left" else offset


def check_known_mask(kind: Any, shape: Sequence[int], sizes: Sequence[int], *, is_packed: bool) -> None:
    """Raise :class:`InvalidInput` for a mask that is made for other lengths than those of the call.

    Args:
        kind: of the mask, a tilewise.functions.MaskKind.
        shape: of its table.
        sizes: (b, hq, sq, sk) of the call.
        is_packed: whether sequences are.
    """
    said, (b, hq, sq, sk) = kind.text(shape), sizes
    if is_packed:
        raise InvalidInput(f"mask is {said}, and sequences are packed; allowed are batch entries, as attention() has "
                           "them: its seqlens_q and seqlens_k say how long each is.")
    counts = [(what, own, wanted) for what, own, wanted in (("batch entries", shape[0], b), ("heads", shape[1], hq))
              if own != 1]
    if kind.name == "blocks":
        counts += [(f"blocks of {side} {of}", own, -(-length // side)) for of, own, side, length in zip(
            ("queries", "keys"), shape[2:], kind.numbers, (sq, sk), strict=True)]
    elif kind.name != "prefixes":
        counts += [("queries", shape[2], sq)] if kind.name == "tree" else []
        counts += [("keys", shape[2], sk)]
    elif kind.numbers[0] is None and sq != sk:
        raise InvalidInput(f"mask is {said} and names no alignment, but q has {sq} positions and k has {sk}; pass "
                           "alignment='top_left', or the key that query 0 stands on: sk - sq where the last query "
                           "stands on the last key.")
    for what, own, wanted in counts:
        if own != wanted:
            raise InvalidInput(f"mask is {said}, made for {own} {what}, and the call has {wanted}.")


def no_other_tensors(mask: object, maker: str) -> InvalidInput:
    """Make the error for tensors of the caller's in the place of the library's."""
    return InvalidInput(f"cannot give {mask} other tensors, which the library makes; call tilewise.{maker}() again.")


def _rows(parents: Any) -> list[list[int]] | None:
    """Return a list of lists of integers, of one list too; None for anything else."""
    if not isinstance(parents, (list, tuple)):
        return None
    rows = [parents] if all(is_integer(parent) for parent in parents) else parents
    if not all(isinstance(row, (list, tuple)) and all(is_integer(parent) for parent in row) for row in rows):
        return None
    return [[int(parent) for parent in row] for row in rows]


def _what(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"
