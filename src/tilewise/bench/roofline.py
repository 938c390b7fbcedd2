"""Floating-point operations and bytes of a case: what a time is divided into."""

import math
from typing import Literal

import torch

from tilewise.masks import Mask, Span
from tilewise.testing.cases import Case

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_ROW_BYTES = 4  # lse and delta are float32


def credited_pairs(case: Case) -> float:
    """Number of (query, key) pairs of one head that count, in the convention of the FlashAttention papers.

    A causal square counts as half of the full square, without the half diagonal on top; any other mask counts the
    pairs that it leaves visible. Of a batch, or of sequences whose lengths are data, each counts by itself.

    Raises:
        InvalidInput: the case has documents whose lengths it does not tell.
    """
    if case.documents:
        entries = zip(case.document_spans("q"), case.document_spans("k"), strict=True)
        return sum(_seen(case, *document) for entry in entries for document in zip(*entry, strict=True))
    if not case.has_lengths:
        return case.b * _pairs(case.mask, case.sq, case.sk)
    return sum(_pairs(case.mask, len(queries), len(keys))
               for queries, keys in zip(case.spans("q"), case.spans("k"), strict=True))


def flops(case: Case, direction: Direction) -> float:
    """Operations that the mathematics needs; what a kernel recomputes beyond them is not credited, nor is an option.

    Forward: two matrix products, 4·b·hq·s²·d when all dims agree. Backward: five, 2.5 times the forward.
    """
    products = case.d + case.dv if direction == "forward" else 3 * case.d + 2 * case.dv
    return 2.0 * case.hq * credited_pairs(case) * products


def least_bytes(case: Case, dtype: torch.dtype, direction: Direction) -> int:
    """Bytes that must cross the memory bus: every input read once and every output written once, options left out."""
    sq, sk = (math.prod(case.stored(side)) for side in ("q", "k"))
    q, k = case.hq * sq * case.d, case.hk * sk * case.d
    v, out = case.hk * sk * case.dv, case.hq * sq * case.dv
    rows = case.hq * sq
    if direction == "forward":
        elements, row_values = q + k + v + out, rows
    else:  # reads q, k, v, out, dout and lse, writes dq, dk, dv; delta is written, then read
        elements, row_values = 2 * (q + k + v) + 2 * out, 3 * rows
    return elements * dtype.itemsize + row_values * _ROW_BYTES


def _pairs(mask: Mask, sq: int, sk: int) -> float:
    if not mask.is_bounded:
        return sq * sk
    causal_square = sq == sk and mask.left is None and mask.right == 0 and not mask.has_exceptions
    return sq * sk / 2 if causal_square else mask.band(sq, sk).visible_pairs(sq, sk)


def _seen(case: Case, queries: Span, keys: Span) -> int:
    """Count the visible pairs of one document."""
    if not case.mask.is_bounded:
        return len(queries) * len(keys)
    band = case.mask.band(case.sq, case.sk)
    return sum(len(Span(max(span.start, keys.start), min(span.stop, keys.stop)))
               for i in range(queries.start, queries.stop) for span in band.key_spans(Span(i, i + 1), case.sk))
