"""Floating-point operations and bytes of a case: what a time is divided into."""

from typing import Literal

import torch

from tilewise.masks import Mask
from tilewise.testing.cases import Case

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_ROW_BYTES = 4  # lse and delta are float32


def credited_pairs(case: Case) -> float:
    """Number of (query, key) pairs of one head that count, in the convention of the FlashAttention papers.

    A causal square counts as half of the full square, without the half diagonal on top; any other mask counts the
    pairs that it leaves visible.
    """
    if case.mask == Mask():
        return case.sq * case.sk
    causal_square = case.sq == case.sk and case.mask.left is None and case.mask.right == 0
    if causal_square:
        return case.sq * case.sk / 2
    return case.mask.band(case.sq, case.sk).visible_pairs(case.sq, case.sk)


def flops(case: Case, direction: Direction) -> float:
    """Operations that the mathematics needs; what a kernel recomputes beyond them is not credited, nor is an option.

    Forward: two matrix products, 4·b·hq·s²·d when all dims agree. Backward: five, 2.5 times the forward.
    """
    products = case.d + case.dv if direction == "forward" else 3 * case.d + 2 * case.dv
    return 2.0 * case.b * case.hq * credited_pairs(case) * products


def least_bytes(case: Case, dtype: torch.dtype, direction: Direction) -> int:
    """Bytes that must cross the memory bus: every input read once and every output written once, options left out."""
    q, k = case.hq * case.sq * case.d, case.hk * case.sk * case.d
    v, out = case.hk * case.sk * case.dv, case.hq * case.sq * case.dv
    rows = case.hq * case.sq
    if direction == "forward":
        elements, row_values = q + k + v + out, rows
    else:  # reads q, k, v, out, dout and lse, writes dq, dk, dv; delta is written, then read
        elements, row_values = 2 * (q + k + v) + 2 * out, 3 * rows
    return case.b * (elements * dtype.itemsize + row_values * _ROW_BYTES)
