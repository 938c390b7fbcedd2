"""Shapes as cases with a name: what grids are lists of."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tilewise.bench.mask_text import format_mask
from tilewise.masks import Mask, causal
from tilewise.testing.cases import Case, Layout

FULL = Mask()
CAUSAL = causal()
# The end of a case's name, what the case has, and which of its operands are learned.
_PRICED: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("", {}, ()),
    ("bias", {"bias": "1hqk"}, ()),
    ("bias_learned", {"bias": "1hqk"}, ("bias",)),
    ("alibi", {"alibi": "h"}, ()),
    ("softcap", {"softcap": 30.0}, ()),
    ("sinks", {"sinks": True}, ("sinks",)),
    ("dropout", {"dropout_p": 0.1}, ()),
    ("mask_tensor", {"mask_tensor": "11qk"}, ()),
    ("documents", {"documents": "mixed"}, ()),
)


def shape_case(b: int, heads: tuple[int, int], lengths: tuple[int, int], dims: tuple[int, int], mask: Mask,
               layout: Layout = "bhsd", scale: float | None = None) -> Case:
    """Name a shape: heads (hq, hk), lengths (sq, sk), dims (d, dv)."""
    texts = [f"{name}{first}" if first == second else f"{name}{first}x{second}"
             for name, (first, second) in (("h", heads), ("s", lengths), ("d", dims))]
    name = "_".join([f"b{b}", *texts, format_mask(mask)])
    return Case(name=name, b=b, hq=heads[0], hk=heads[1], sq=lengths[0], sk=lengths[1], d=dims[0], dv=dims[1],
                mask=mask, scale=scale, layout=layout)


def priced(case: Case) -> list[tuple[Case, tuple[str, ...]]]:
    """Return the plain case and, beside it, a case an option, each with the operands that get a gradient."""
    return [(replace(case, name=f"{case.name}_{name}" if name else case.name, **fields), learned)
            for name, fields, learned in _PRICED]


def packed_case(heads: tuple[int, int], lengths: Sequence[int], d: int, mask: Mask) -> Case:
    """Name packed sequences, in the layout that packing gives; a bounded mask needs an alignment."""
    longest = max(lengths)
    case = shape_case(len(lengths), heads, (longest, longest), (d, d), mask, "bshd")
    return replace(case, name=f"{case.name}_packed", lengths_q=tuple(lengths), lengths_k=tuple(lengths), packed="tight")


def packed_kv_cases(b: int, heads: int, s: int, d: int) -> tuple[Case, Case, Case]:
    """Name one shape whose k and v are views of one tensor in three forms.

    With all keys; with lengths of the keys, from all down to over half, as padded batch entries; and the same sequences
    packed, in tensors of their own.
    """
    lengths = tuple(s - entry * s // (2 * b) for entry in range(b))
    plain = shape_case(b, (heads, heads), (s, s), (d, d), FULL, "packed_kv")
    return (replace(plain, name=f"{plain.name}_kv"),
            replace(plain, name=f"{plain.name}_kv_padded", lengths_k=lengths),
            replace(plain, name=f"{plain.name}_packed", lengths_q=(s,) * b, lengths_k=lengths, packed="tight",
                    layout="bshd"))


def square_case(b: int, heads: int | tuple[int, int], s: int, d: int, mask: Mask, layout: Layout) -> Case:
    """Name a shape with as many queries as keys and one head dim; heads: of all, or (hq, hk)."""
    pair = (heads, heads) if isinstance(heads, int) else heads
    return shape_case(b, pair, (s, s), (d, d), mask, layout)
