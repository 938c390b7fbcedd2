"""Masks as values, their meaning and how they combine; bands.py has their tile ranges.

A mask of this module is a *band* with exceptions. With ``i`` the query's index, ``j`` the key's and

    offset = 0 (top_left)   or   key_length − query_length (bottom_right)   or   a number of the caller's,

query ``i`` sees key ``j`` when all of these hold (maths.md, eq. 23; without exceptions, eq. 12):

    j ≥ i + offset − left    or  j < sink_tokens
    j ≤ i + offset + right   or  j < prefix
    (i + offset) div chunk  =  j div chunk

``causal()`` is the band without a left bound and with ``right = 0``. What needs a tensor (documents, an arbitrary
boolean mask) is joined to a band by ``&``. The union of two masks by position, where it is one, is ``|``.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, cast, overload

import torch

from tilewise.errors import InvalidInput
from tilewise.masks.bands import Band, Span
from tilewise.masks.document_ranges import Documents, documents_of
from tilewise.masks.operators import JoinsTensors, refused_union
from tilewise.masks.tile_lists import TileLists, tile_lists
from tilewise.validate.values import (
    ALIGNMENTS,
    FARTHEST,
    check_lengths_to_show,
    checked_alignment,
    checked_count,
    checked_side,
)

__all__ = ["ALIGNMENTS", "Alignment", "Band", "Mask", "Span", "TensorMask", "causal", "chunk", "documents", "prefix",
           "sink_tokens", "window"]

Alignment = Literal["top_left", "bottom_right"]


@dataclass(frozen=True, slots=True)
class Mask(JoinsTensors):
    """A mask as a value. Make one with :func:`causal`, :func:`window` and the like, combine with ``&`` and ``|``.

    ``&`` keeps the tighter bound of each side and the exceptions of both: ``causal() & window(1023, 0) &
    sink_tokens(4)`` is causal, within 1024 keys, but for the first four. ``|`` sees exactly what either mask sees, and
    raises where no mask does: of two alignments, or of different chunks unless one mask contains the other. An
    alignment that one mask leaves out is the other's. A mask has no truth value and no complement.

    Attributes:
        left: keys kept to the left of the diagonal; None = all.
        right: keys kept to the right of the diagonal; None = all.
        alignment: which corner the diagonal runs through, or the offset itself: query i stands on key i + alignment,
            which serves a part of the queries and keys of a longer sequence. None = not named, allowed while query and
            key lengths are equal, where both corners give the same mask. An offset of 0 is "top_left".
        prefix: keys, the first ones, that ``right`` does not hide; None = none.
        sink_tokens: keys, the first ones, that ``left`` does not hide; None = none.
        chunk: length of the chunks outside of which nothing is seen; None = no chunks.

    Raises:
        InvalidInput: as the function that makes such a mask.
    """

    left: int | None = None
    right: int | None = None
    alignment: Alignment | int | None = None
    prefix: int | None = None
    sink_tokens: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, side in (("left", self.left), ("right", self.right)):
            if side is not None and not (side.__class__ is int and 0 <= side < FARTHEST):
                object.__setattr__(self, name, checked_side(name, side))
        if self.alignment is not None:
            alignment = checked_alignment(self.alignment)
            if alignment is not self.alignment:  # dynamo traces no assignment to a frozen value
                object.__setattr__(self, "alignment", alignment)
        if self.has_exceptions:
            for name, (said, least) in _COUNTS.items():
                count = getattr(self, name)
                if count is not None and not (count.__class__ is int and least <= count <= FARTHEST):
                    object.__setattr__(self, name, checked_count(said, least, count))

    @overload
    def __and__(self, other: "Mask") -> "Mask": ...
    @overload
    def __and__(self, other: "torch.Tensor | TensorMask") -> "TensorMask": ...

    def __and__(self, other: "Mask | torch.Tensor | TensorMask") -> "Mask | TensorMask":
        if isinstance(other, torch.Tensor):
            return TensorMask(self, other)
        if not isinstance(other, Mask):
            return NotImplemented
        if self.alignment and other.alignment and self.alignment != other.alignment:
            raise InvalidInput(
                f"cannot combine {self} & {other}: a mask has one alignment, got {self.alignment!r} and "
                f"{other.alignment!r}. Give both parts the same alignment."
            )
        return Mask(_tighter(self.left, other.left), _tighter(self.right, other.right),
                    self.alignment or other.alignment, _tighter(self.prefix, other.prefix),
                    _tighter(self.sink_tokens, other.sink_tokens), _joined_chunk(self.chunk, other.chunk))

    def __or__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            # Not by super(), which knows the class that dataclass(slots=True) has replaced.
            return JoinsTensors.__or__(self, other)
        if self.alignment and other.alignment and self.alignment != other.alignment:
            raise refused_union(self, other, f"a mask has one alignment, got {self.alignment!r} and "
                                             f"{other.alignment!r}. Give both parts the same alignment, or")
        alignment = self.alignment or other.alignment
        if self.chunk == other.chunk:
            # A query's own position lies inside of both bands: one cannot lack at its left what the other lacks at its
            # right, so the union of the bands is the band of the looser bounds.
            left, sinks = _looser((self.left, self.sink_tokens), (other.left, other.sink_tokens))
            right, first = _looser((self.right, self.prefix), (other.right, other.prefix))
            return Mask(left, right, alignment, first, sinks, self.chunk)
        for one, part in ((self, other), (other, self)):
            if _contains(one, part):
                return replace(one, alignment=alignment)
        raise refused_union(self, other, "no mask sees exactly what either sees; allowed are masks of equal chunks, or "
                                         "one that contains the other.")

    def __str__(self) -> str:
        named = "" if self.alignment is None else f"alignment={self.alignment!r}"
        parts = []
        if self.right == 0:
            parts.append(f"causal({named})")
            if self.left is not None:
                parts.append(f"window({self.left}, 0)")
        elif self.left is not None or self.right is not None:
            parts.append(f"window({self.left}, {self.right}{', ' + named if named else ''})")
        if self.chunk is not None:
            parts.append(f"chunk({self.chunk}{', ' + named if named and not parts else ''})")
        parts += [f"{name}({value})" for name in ("prefix", "sink_tokens")
                  if (value := getattr(self, name)) is not None]
        return " & ".join(parts) or "no mask"

    @property
    def is_bounded(self) -> bool:
        """Whether anything is hidden at all (for long enough sequences)."""
        return self.left is not None or self.right is not None or self.chunk is not None

    @property
    def has_exceptions(self) -> bool:
        """Whether the mask is more than a plain band."""
        return self.prefix is not None or self.sink_tokens is not None or self.chunk is not None

    def band(self, query_length: int, key_length: int) -> Band:
        """Put the lengths in. Raises :class:`InvalidInput` if they differ and no alignment is named."""
        if not self.is_bounded:
            return Band(None, None)
        offset = self.offset(query_length, key_length)
        return Band(None if self.left is None else offset - self.left,
                    None if self.right is None else offset + self.right,
                    self.prefix, self.sink_tokens, self.chunk, offset if self.chunk is not None else 0)

    def offset(self, query_length: int, key_length: int) -> int:
        """Return where the diagonal runs: query i stands on key i + offset. Raises as :meth:`band` does."""
        if query_length == key_length and not isinstance(self.alignment, int):
            return 0
        if self.alignment is None:
            raise InvalidInput(_alignment_message(self, query_length, key_length))
        if isinstance(self.alignment, int):
            return self.alignment
        return key_length - query_length if self.alignment == "bottom_right" else 0

    def visible(self, query_length: int, key_length: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the dense mask: (query_length, key_length), bool, True where the pair takes part.

        O(query_length x key_length) memory: for oracles and pictures, never for kernels.
        """
        queries, keys = (torch.arange(length, device=device) for length in (query_length, key_length))
        return self.band(query_length, key_length).sees(queries[:, None], keys)

    def _visible_rows(self, first: int, stop: int, lengths: tuple[int, int]) -> torch.Tensor:
        queries, keys = torch.arange(first, stop), torch.arange(lengths[1])
        return self.band(*lengths).sees(queries[:, None], keys)

    def show(self, query_length: int = 5, key_length: int = 5) -> str:
        """Draw the mask: one row a query, ``■`` = takes part, ``·`` = hidden.

        >>> print(causal("bottom_right").show(2, 4))
        ■ ■ ■ ·
        ■ ■ ■ ■
        """
        return _drawn(self.visible(query_length, key_length))


@dataclass(frozen=True, slots=True, eq=False)
class TensorMask(JoinsTensors):
    """A band with documents, a boolean tensor or a function, all of which must let a pair take part; made with ``&``.

    Attributes:
        band: who sees whom by position; its hidden tiles are skipped.
        tensor: broadcasts to (b, hq, sq, sk), bool, True where the pair takes part; None = all.
        documents: who is in one document; hidden tiles are skipped; None = all are.
        tiles: lists of the tiles that all of these leave visible, made by :meth:`tiled` or of a ``BlockMask``'s lists
            of blocks; None = there are none.
        function: a :class:`tilewise.functions.MaskFunction`; None = all.
    """

    band: Mask
    tensor: torch.Tensor | None = None
    documents: Documents | None = None
    tiles: TileLists | None = None
    function: Any = None

    def __and__(self, other: "Mask | torch.Tensor | TensorMask") -> "TensorMask":
        if isinstance(other, Mask):
            other = TensorMask(other)
        elif isinstance(other, torch.Tensor):
            other = TensorMask(Mask(), other)
        elif not isinstance(other, TensorMask):
            return NotImplemented
        if self.tiles is not None or other.tiles is not None:
            raise InvalidInput(f"cannot combine {self} & {other}: the lists of a tiled mask are of that mask alone. "
                               "Combine first, then call tiled().")
        if self.documents is not None and other.documents is not None:
            raise InvalidInput("cannot combine documents & documents: a mask has one. Give each pair of ids a number "
                               "of its own, and pass those.")
        function = other.function if self.function is None else self.function
        if self.function is not None and other.function is not None:
            function = self.function.joined_with(other.function)
        tensor = self.tensor if other.tensor is None else other.tensor
        if self.tensor is not None and other.tensor is not None:
            tensor = self.tensor & other.tensor
        return TensorMask(self.band & other.band, tensor, self.documents or other.documents,
                          function=function)

    def __rand__(self, other: "Mask | torch.Tensor") -> "TensorMask":
        return self & other

    @property
    def has_function(self) -> bool:
        """Whether a function decides, of which :meth:`visible` asks the first batch entry and head alone."""
        return self.function is not None

    def visible(self, query_length: int, key_length: int) -> torch.Tensor:
        """Return the dense mask, (b|1, hq|1, query_length, key_length), bool, on the tensors' device.

        A function is asked for the first batch entry and head. O(query_length x key_length) memory: for oracles and
        pictures, never for kernels.
        """
        visible = self._rows_but_the_function(0, query_length, query_length, key_length)
        return visible if self.function is None else visible & self.function.visible(query_length, key_length,
                                                                                     visible.device)

    def tiled(self, query_length: int, key_length: int) -> "TensorMask":
        """Return the same mask with lists of its visible tiles, so that the others cost nothing.

        For a mask that is used in many calls, and hides whole tiles of 128 queries by 128 keys: a boolean tensor is
        otherwise read everywhere that the band and the documents leave visible. Computed on the tensors' device, in
        O(128 x key_length) memory, without waiting for it. To be made anew when the tensor changes. A function is no
        part of the lists: it is asked wherever they leave a tile visible.

        Args:
            query_length, key_length: of the calls; lengths that are data have no lists.
        """
        lists = tile_lists(lambda first, stop: self._rows_but_the_function(first, stop, query_length, key_length),
                           query_length, key_length)
        return replace(self, tiles=lists)

    def _visible_rows(self, first: int, stop: int, lengths: tuple[int, int]) -> torch.Tensor:
        visible = self._rows_but_the_function(first, stop, *lengths)[0, 0]
        if self.function is None:
            return visible
        says: torch.Tensor = self.function._visible_rows(first, stop, lengths, visible.device)
        return visible & says

    def _rows_but_the_function(self, first: int, stop: int, query_length: int, key_length: int) -> torch.Tensor:
        """Return all but the function, of queries ``first`` to ``stop``: (b|1, hq|1, stop - first, key_length)."""
        tensors = [tensor for tensor in (self.tensor, *(self.documents or ())) if tensor is not None]
        tensors += () if self.function is None else self.function.tensors
        device = tensors[0].device if tensors else None
        queries, keys = torch.arange(first, stop, device=device), torch.arange(key_length, device=device)
        visible = self.band.band(query_length, key_length).sees(queries[:, None], keys)[None, None]
        if self.documents is not None:
            numbers = self.documents.q[:, 0, first:stop, None]
            visible = visible & (numbers == self.documents.k[:, 0, None, :])[:, None]
        if self.tensor is None:
            return visible
        rows = self.tensor
        if rows.dim() > 1 and rows.shape[-2] > 1:
            rows = rows[..., first:stop, :]
        return visible & rows

    def show(self, query_length: int | None = None, key_length: int | None = None) -> str:
        """Draw the mask of the first batch entry and head as :meth:`Mask.show` does; lengths are the tensors' own."""
        if self.documents is not None:
            query_length, key_length = self.documents.q.shape[2], self.documents.k.shape[2]
        elif self.tensor is not None and self.tensor.dim() > 1:
            query_length, key_length = (own if own > 1 else given for own, given in zip(
                self.tensor.shape[-2:], (query_length, key_length), strict=True))
        check_lengths_to_show(self, query_length, key_length)
        return _drawn(self.visible(cast(int, query_length), cast(int, key_length))[0, 0])

    def __str__(self) -> str:
        parts = [str(self.band)] if self.band.is_bounded else []
        if self.documents is not None:
            parts.append(f"documents of {self.documents.q.shape[2]} tokens")
        if self.tensor is not None:
            parts.append(f"a tensor of shape {tuple(self.tensor.shape)}")
        if self.function is not None:
            parts.append(str(self.function))
        return " & ".join(parts)


def causal(alignment: Alignment | int | None = None) -> Mask:
    """Mask the future: a query sees the keys up to its own position.

    Args:
        alignment: "top_left" puts query 0 on key 0 (torch's ``is_causal``); "bottom_right" puts the last query on
            the last key (flash-attn, decoding with a cache); an integer puts query 0 on that key, which may lie before
            the first one or past the last. May be left out while both lengths are equal.

    Raises:
        InvalidInput: alignment is none of these, or left out where lengths differ (at the call).
    """
    return Mask(None, 0, alignment)


def window(left: int | None, right: int | None, alignment: Alignment | int | None = None) -> Mask:
    """Keep the keys from ``left`` before to ``right`` after the diagonal, both ends and the diagonal included.

    Args:
        left, right: integers >= 0, in tokens; None, or 2³⁰ and more = unbounded on that side. ``window(1023, 0)`` sees
            1024 keys.
        alignment: as in :func:`causal`.

    Raises:
        InvalidInput: a side is negative or not an integer, or the alignment is unknown.
    """
    return Mask(left, right, alignment)


def prefix(length: int, alignment: Alignment | int | None = None) -> Mask:
    """Mask the future but for a prefix: a query sees the first ``length`` keys and those up to its own position.

    The mask of a prefix language model (Raffel et al., 2020). ``& window(left, 0)`` bounds the prefix too.

    Args:
        length: keys of the prefix, >= 0; more than 2³⁰ are as good as 2³⁰.
        alignment: as in :func:`causal`.

    Raises:
        InvalidInput: length is negative or not an integer, or the alignment is unknown.
    """
    return Mask(None, 0, alignment, prefix=checked_count(*_COUNTS["prefix"], length))


def sink_tokens(count: int) -> Mask:
    """Keep the first keys in sight where a window's left bound would hide them (StreamingLLM; Xiao et al., 2024).

    Meant to be joined to a window, as in ``causal() & window(1023, 0) & sink_tokens(4)``; alone it hides nothing.

    Args:
        count: keys, from the first one, that no left bound hides; >= 0, more than 2³⁰ are as good as 2³⁰. Other
            bounds still hide them.

    Raises:
        InvalidInput: count is negative or not an integer.
    """
    return Mask(sink_tokens=checked_count(*_COUNTS["sink_tokens"], count))


def chunk(length: int, alignment: Alignment | int | None = None) -> Mask:
    """Keep what lies in one chunk: positions are cut into chunks of ``length``, and a query sees its own one's keys.

    ``causal() & chunk(8192)`` is the local attention of Llama 4.

    Args:
        length: positions a chunk, >= 1; more than 2³⁰ are as good as 2³⁰.
        alignment: as in :func:`causal`: which key a query's position is that of.

    Raises:
        InvalidInput: length is less than 1 or not an integer, or the alignment is unknown.
    """
    return Mask(alignment=alignment, chunk=checked_count(*_COUNTS["chunk"], length))


def documents(ids: torch.Tensor, key_ids: torch.Tensor | None = None) -> TensorMask:
    """Keep what lies in one document: a query sees the keys that have its id.

    Computed on the ids' device, without waiting for it. Ids may come in any order; where a document's tokens stand
    together, tiles that hold none of a document's pairs are skipped.

    Args:
        ids: (sq,) or (b, sq), an integer dtype: the document of each query, and of each key if there are no others.
        key_ids: (sk,) or (b, sk); None = ids.

    Raises:
        InvalidInput: not such a tensor.

    >>> print(documents(torch.tensor([7, 7, 7, 2, 2])).show())
    ■ ■ ■ · ·
    ■ ■ ■ · ·
    ■ ■ ■ · ·
    · · · ■ ■
    · · · ■ ■
    """
    return TensorMask(Mask(), documents=documents_of(ids, key_ids))


# Field -> what a message calls it, and its least value.
_COUNTS = {"prefix": ("prefix: length", 0), "sink_tokens": ("sink_tokens: count", 0), "chunk": ("chunk: length", 1)}


def _joined_chunk(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    if max(a, b) % min(a, b):
        raise InvalidInput(f"cannot combine chunk({a}) & chunk({b}): one length must be a multiple of the other.")
    return min(a, b)


def _drawn(visible: torch.Tensor) -> str:
    return "\n".join(" ".join("■" if seen else "·" for seen in row) for row in visible.tolist())


def _tighter(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


_Side = tuple[int | None, int | None]  # a bound, and the first keys that it does not hide


def _looser(a: _Side, b: _Side) -> _Side:
    """Return the side that hides what both hide. A side without a bound hides nothing, whatever its exception."""
    unbounded = [side for side in (a, b) if side[0] is None]
    counts = [count for _, count in unbounded or (a, b) if count is not None]
    bound = None if a[0] is None or b[0] is None else max(a[0], b[0])
    return bound, max(counts) if counts else None  # not by max's default, which torch.compile does not follow


def _contains(mask: Mask, part: Mask) -> bool:
    """Whether ``mask`` surely sees all that ``part`` sees, of whatever lengths. Alignments are not compared."""
    if mask.chunk is not None and (part.chunk is None or mask.chunk % part.chunk):
        return False
    return all(
        # Two positions of one chunk are less than its length apart.
        bound is None or (part.chunk is not None and part.chunk <= bound + 1)
        or (own is not None and own <= bound and (own_exception or 0) <= (exception or 0))
        for (bound, exception), (own, own_exception) in (
            ((mask.left, mask.sink_tokens), (part.left, part.sink_tokens)),
            ((mask.right, mask.prefix), (part.right, part.prefix))))


def _alignment_message(mask: Mask, query_length: int, key_length: int) -> str:
    # A drawing of the true lengths would fill screens; 3 against 5 (or 5 against 3) shows the difference.
    rows, columns = (3, 5) if query_length < key_length else (5, 3)
    small = {"left": 1, "prefix": 1, "sink_tokens": 1, "chunk": 2}
    parts = {name: value and min(value, most) for name, most in small.items() for value in [getattr(mask, name)]}
    pictures = [replace(mask, alignment=name, **parts).show(rows, columns).split("\n") for name in ALIGNMENTS]
    columns_of_text = zip(*([name, *picture] for name, picture in zip(ALIGNMENTS, pictures, strict=True)), strict=True)
    drawn = "\n".join(f"  {a:<15}{b}" for a, b in columns_of_text)
    return (
        f"mask is {mask} and names no alignment, but q has {query_length} positions and k has {key_length}: "
        f"the mask is ambiguous. Pass alignment='top_left' (torch's is_causal) or 'bottom_right' (flash-attn, "
        f"decoding with a cache):\n{drawn}"
    )
