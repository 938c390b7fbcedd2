"""Who sees whom: masks as values, their meaning and their tile ranges.

A mask of this module is a *band*. With ``i`` the query's index, ``j`` the key's and

    offset = 0 (top_left)   or   key_length − query_length (bottom_right),

query ``i`` sees key ``j`` when  i + offset − left ≤ j ≤ i + offset + right  (maths.md, eq. 12).
``causal()`` is the band without a left bound and with ``right = 0``.
"""

from dataclasses import dataclass
from typing import Literal, overload

import torch

from tilewise.errors import InvalidInput

Alignment = Literal["top_left", "bottom_right"]
ALIGNMENTS: tuple[Alignment, ...] = ("top_left", "bottom_right")


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range of indices ``start <= i < stop``; empty when ``start >= stop``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Band:
    """A mask with its lengths put in: query i sees key j when ``lower <= j - i <= upper``.

    ``None`` leaves that side unbounded. All tile ranges, on every backend, come from here.
    """

    lower: int | None
    upper: int | None

    def keys_of(self, queries: Span, key_length: int) -> Span:
        """Keys that at least one query of the span sees (maths.md, eq. 13)."""
        start = 0 if self.lower is None else max(0, queries.start + self.lower)
        stop = key_length if self.upper is None else min(key_length, queries.stop + self.upper)
        return Span(start, stop) if queries.start < queries.stop else Span(0, 0)

    def shared_keys_of(self, queries: Span, key_length: int) -> Span:
        """Keys that every query of the span sees (maths.md, eq. 14)."""
        start = 0 if self.lower is None else max(0, queries.stop - 1 + self.lower)
        stop = key_length if self.upper is None else min(key_length, queries.start + self.upper + 1)
        return Span(start, stop) if queries.start < queries.stop else Span(0, 0)

    def transposed(self) -> "Band":
        """The same band read from the keys' side: key j is seen by query i when the result allows i − j."""
        return Band(None if self.upper is None else -self.upper, None if self.lower is None else -self.lower)

    def visible_pairs(self, query_length: int, key_length: int) -> int:
        """Number of (query, key) pairs that are visible; what a FLOP count multiplies."""
        return sum(len(self.keys_of(Span(i, i + 1), key_length)) for i in range(query_length))


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask as a value. Make one with :func:`causal` or :func:`window`, combine with ``&``.

    Attributes:
        left: keys kept to the left of the diagonal; None = all.
        right: keys kept to the right of the diagonal; None = all.
        alignment: which corner the diagonal runs through; None = not named, allowed while query and
            key lengths are equal, where both corners give the same mask.
    """

    left: int | None = None
    right: int | None = None
    alignment: Alignment | None = None

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
                    self.alignment or other.alignment)

    def __str__(self) -> str:
        named = "" if self.alignment is None else f"alignment={self.alignment!r}"
        if self.right == 0:
            causal_text = f"causal({named})"
            return causal_text if self.left is None else f"{causal_text} & window({self.left}, 0)"
        if not self.is_bounded:
            return "no mask"
        return f"window({self.left}, {self.right}{', ' + named if named else ''})"

    @property
    def is_bounded(self) -> bool:
        """Whether anything is hidden at all (for long enough sequences)."""
        return self.left is not None or self.right is not None

    def band(self, query_length: int, key_length: int) -> Band:
        """Put the lengths in. Raises :class:`InvalidInput` if they differ and no alignment is named."""
        if not self.is_bounded:
            return Band(None, None)
        offset = self.offset(query_length, key_length)
        return Band(None if self.left is None else offset - self.left,
                    None if self.right is None else offset + self.right)

    def offset(self, query_length: int, key_length: int) -> int:
        """Return where the diagonal runs: query i stands on key i + offset. Raises as :meth:`band` does."""
        if query_length == key_length:
            return 0
        if self.alignment is None:
            raise InvalidInput(_alignment_message(self, query_length, key_length))
        return key_length - query_length if self.alignment == "bottom_right" else 0

    def visible(self, query_length: int, key_length: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the dense mask: (query_length, key_length), bool, True where the pair takes part.

        O(query_length x key_length) memory: for oracles and pictures, never for kernels.
        """
        band = self.band(query_length, key_length)
        distance = (torch.arange(key_length, device=device)[None, :]
                    - torch.arange(query_length, device=device)[:, None])
        visible = torch.ones_like(distance, dtype=torch.bool)
        if band.lower is not None:
            visible &= distance >= band.lower
        if band.upper is not None:
            visible &= distance <= band.upper
        return visible

    def show(self, query_length: int = 5, key_length: int = 5) -> str:
        """Draw the mask: one row a query, ``■`` = takes part, ``·`` = hidden.

        >>> print(causal("bottom_right").show(2, 4))
        ■ ■ ■ ·
        ■ ■ ■ ■
        """
        rows = self.visible(query_length, key_length).tolist()
        return "\n".join(" ".join("■" if seen else "·" for seen in row) for row in rows)


@dataclass(frozen=True, slots=True, eq=False)
class TensorMask:
    """A band and a boolean tensor that must both let a pair take part; made by ``causal() & tensor``.

    Attributes:
        band: who sees whom by position; its hidden tiles are skipped.
        tensor: broadcasts to (b, hq, sq, sk), bool, True where the pair takes part.
    """

    band: Mask
    tensor: torch.Tensor

    def __and__(self, other: "Mask | torch.Tensor | TensorMask") -> "TensorMask":
        if isinstance(other, Mask):
            return TensorMask(self.band & other, self.tensor)
        if isinstance(other, torch.Tensor):
            return TensorMask(self.band, self.tensor & other)
        if isinstance(other, TensorMask):
            return TensorMask(self.band & other.band, self.tensor & other.tensor)
        return NotImplemented

    def __rand__(self, other: Mask) -> "TensorMask":
        return self & other

    def __str__(self) -> str:
        return f"{self.band} & a tensor of shape {tuple(self.tensor.shape)}"


def causal(alignment: Alignment | None = None) -> Mask:
    """Mask the future: a query sees the keys up to its own position.

    Args:
        alignment: "top_left" puts query 0 on key 0 (torch's ``is_causal``); "bottom_right" puts the last query on
            the last key (flash-attn, decoding with a cache). May be left out while both lengths are equal.

    Raises:
        InvalidInput: alignment is not one of the two, or left out where lengths differ (at the call).
    """
    return Mask(None, 0, _checked_alignment(alignment))


def window(left: int | None, right: int | None, alignment: Alignment | None = None) -> Mask:
    """Keep the keys from ``left`` before to ``right`` after the diagonal, both ends and the diagonal included.

    Args:
        left, right: integers >= 0, in tokens; None = unbounded on that side. ``window(1023, 0)`` sees 1024 keys.
        alignment: as in :func:`causal`.

    Raises:
        InvalidInput: a side is negative or not an integer, or the alignment is unknown.
    """
    return Mask(_checked_side("left", left), _checked_side("right", right), _checked_alignment(alignment))


def _tighter(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _checked_side(name: str, value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise InvalidInput(f"window: {name} is {value!r}; allowed is an integer >= 0, or None for no bound on that side.")


def _checked_alignment(value: object) -> Alignment | None:
    if value is None or value in ALIGNMENTS:
        return value
    raise InvalidInput(f"alignment is {value!r}; allowed are 'top_left' and 'bottom_right'.")


def _alignment_message(mask: Mask, query_length: int, key_length: int) -> str:
    # A drawing of the true lengths would fill screens; 3 against 5 (or 5 against 3) shows the difference.
    rows, columns = (3, 5) if query_length < key_length else (5, 3)
    pictures = [Mask(mask.left and min(mask.left, 1), mask.right, name).show(rows, columns).split("\n")
                for name in ALIGNMENTS]
    columns_of_text = zip(*([name, *picture] for name, picture in zip(ALIGNMENTS, pictures, strict=True)), strict=True)
    drawn = "\n".join(f"  {a:<15}{b}" for a, b in columns_of_text)
    return (
        f"mask is {mask} and names no alignment, but q has {query_length} positions and k has {key_length}: "
        f"the mask is ambiguous. Pass alignment='top_left' (torch's is_causal) or 'bottom_right' (flash-attn, "
        f"decoding with a cache):\n{drawn}"
    )
