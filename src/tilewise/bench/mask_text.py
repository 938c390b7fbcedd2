"""Masks as one line of text, both ways: what a flag takes and a row of results holds.

Examples: "none", "causal", "causal:bottom_right", "window:1023,0", "window:15,inf:top_left",
"causal & window:1023,0", "prefix:512", "causal & chunk:8192", "window:1023,0 & sink_tokens:4".
"""

from typing import cast

from tilewise.errors import InvalidInput
from tilewise.masks import Alignment, Mask, causal, chunk, prefix, sink_tokens, window
from tilewise.support.names import MASK_FORMS

_COUNTED = {"prefix": prefix, "chunk": chunk}


def parse_mask(text: str) -> Mask:
    """Read a mask.

    Raises:
        InvalidInput: the text is none of the forms above; the message quotes the part at fault.

    >>> print(parse_mask("causal:bottom_right & window:7,0"))
    causal(alignment='bottom_right') & window(7, 0)
    """
    mask = Mask()
    for part in text.split("&"):
        mask &= _parse_part(part.strip())
    return mask


def format_mask(mask: Mask) -> str:
    """Write a mask so that :func:`parse_mask` reads the same mask back.

    >>> format_mask(parse_mask("window:7,inf"))
    'window:7,inf'
    """
    if not mask.is_bounded:
        return "none"
    parts = [f"{name}:{count}" for name in ("prefix", "chunk", "sink_tokens")
             if (count := getattr(mask, name)) is not None]
    if mask.left is None and mask.right == 0:
        if mask.prefix is None:
            parts.insert(0, "causal")
    elif mask.left is not None or mask.right is not None:
        sides = ",".join("inf" if side is None else str(side) for side in (mask.left, mask.right))
        parts.insert(0, f"window:{sides}")
    return " & ".join((parts[0] if mask.alignment is None else f"{parts[0]}:{mask.alignment}", *parts[1:]))


def _parse_part(part: str) -> Mask:
    kind, *details = part.split(":")
    if kind == "none" and not details:
        return Mask()
    if kind == "causal" and len(details) <= 1:
        return causal(cast("Alignment | None", details[0] if details else None))
    if kind == "sink_tokens" and len(details) == 1 and details[0].isdecimal():
        return sink_tokens(int(details[0]))
    if 1 <= len(details) <= 2:
        alignment = cast("Alignment | None", details[1] if len(details) == 2 else None)
        if kind in _COUNTED and details[0].isdecimal():
            return _COUNTED[kind](int(details[0]), alignment)
        sides = details[0].split(",")
        if kind == "window" and len(sides) == 2:
            left, right = (_parse_side(side.strip(), part) for side in sides)
            return window(left, right, alignment)
    raise InvalidInput(f"mask is {part!r}; allowed are {MASK_FORMS}.")


def _parse_side(side: str, part: str) -> int | None:
    if side == "inf":
        return None
    if side.isdecimal():
        return int(side)
    raise InvalidInput(f"mask is {part!r}: its side {side!r} is neither an integer >= 0 nor inf.")
