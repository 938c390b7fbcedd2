"""Gradient of a bias from the dQ kernel, which stores the dS that it computes, or adds it to that of earlier entries.

Where the batch shares the bias, dQ is launched for one batch entry after another, or for a few at once: a CTA then
has a tile of queries of each, adds up their dS in registers, and reads the bias once. A launch reads, adds and writes
what those before it on the stream have left, without atomics, so the sum is the same on every run. Between launches it
is in float32: of a 16-bit bias that takes a buffer of the bias's shape beside the gradient, which is this gradient
before it is rounded. Where one launch has every entry, nothing is read again and there is no buffer. The alternative, a
kernel of its own (dbias.py), makes S and dP once more.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilewise.kernels.triton.launch import Launch
from tilewise.kernels.triton.primitives import head_offset, offsets
from tilewise.problem import AttentionProblem, Sizes
from tilewise.problem.options import OperandSpec


@triton.jit
def pair_rows(ptr, strides, sequence, head, first, ROWS: tl.constexpr):
    """Point to the rows ``first .. first + ROWS`` of one head's pairs, [ROWS], with the strides of a StridedTensor."""
    base = ptr + head_offset(sequence, head, strides.stride_b, strides.stride_h) + first.to(tl.int64) * strides.stride_s
    return base + offsets(tl.arange(0, ROWS), strides.stride_s, True)


@triton.jit
def halves(tile):
    """Split a tile, [ROWS, COLUMNS], into its first and its last columns.

    On its way to memory a tile changes its layout through shared memory: by halves, through half as much of it (sm_90,
    d 128: 112 KiB for each CTA instead of 120, so that two fit where one did) and with fewer registers (24 bytes of
    stack instead of 64 where nothing is added).
    """
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def locate_half(rows, offs_m, first_k, stop_q, stop_k, HALF: tl.constexpr, COLUMNS: tl.constexpr,
                CHECKED: tl.constexpr):
    """Point to half 0 or 1 of a tile of pairs with the pointers ``rows``, and say which of its pairs there are.

    Where not CHECKED all keys are inside; without a check along them a thread moves 16 bytes at once.
    """
    offs_n = first_k + HALF * COLUMNS + tl.arange(0, COLUMNS)
    inside = (offs_m < stop_q)[:, None]
    if CHECKED:
        inside = inside & (offs_n < stop_k)[None, :]
    return rows[:, None] + offs_n[None, :], inside


@triton.jit
def load_pairs_by_halves(rows, offs_m, first_k, stop_q, stop_k, BLOCK_N: tl.constexpr, CHECKED: tl.constexpr):
    """Load both halves, [BLOCK_M, BLOCK_N / 2], of a tile of pairs; 0 outside."""
    low_ptrs, low_inside = locate_half(rows, offs_m, first_k, stop_q, stop_k, 0, BLOCK_N // 2, CHECKED)
    high_ptrs, high_inside = locate_half(rows, offs_m, first_k, stop_q, stop_k, 1, BLOCK_N // 2, CHECKED)
    return tl.load(low_ptrs, mask=low_inside, other=0.0), tl.load(high_ptrs, mask=high_inside, other=0.0)


@triton.jit
def store_pairs_by_halves(rows, pairs, earlier, offs_m, first_k, stop_q, stop_k, BLOCK_N: tl.constexpr,
                          CHECKED: tl.constexpr):
    """Store both halves of a tile of pairs, with those of ``earlier`` ones added, unless None; in their own dtype."""
    low, high = halves(pairs)
    if earlier is not None:
        low += earlier[0]
        high += earlier[1]
    low_ptrs, low_inside = locate_half(rows, offs_m, first_k, stop_q, stop_k, 0, BLOCK_N // 2, CHECKED)
    high_ptrs, high_inside = locate_half(rows, offs_m, first_k, stop_q, stop_k, 1, BLOCK_N // 2, CHECKED)
    tl.store(low_ptrs, low.to(rows.dtype.element_ty), mask=low_inside)
    tl.store(high_ptrs, high.to(rows.dtype.element_ty), mask=high_inside)


def pair_strides(problem: AttentionProblem, at_once: int | None) -> Sizes | None:
    """Strides (b, h, s) of a bias's dense gradient: 0 for a batch that shares it, None where dQ's kernel makes none."""
    bias = problem.scores.bias
    if at_once is None or bias is None:
        return None
    own_batches, heads, size_q, size_k = bias.shape
    return (0 if own_batches == 1 else heads * size_q * size_k), size_q * size_k, size_k


def sees_alike(problem: AttentionProblem) -> bool:
    """Whether all batch entries see the same tiles: no lengths that are data, no documents or lists of their own."""
    return not problem.sequences.are_data and all(facts.shape[0] == 1 for facts in _hiding(problem))


def _hiding(problem: AttentionProblem) -> list[OperandSpec]:
    scores = problem.scores
    return [facts for facts in (scores.documents_q, scores.documents_k, scores.tiles_q) if facts is not None]


class BiasGradientSums:
    """The launches of dQ that make the gradient of a bias too; called as one launch of dQ is, with that gradient.

    Args:
        problem: of the backward pass; its bias has a query and a key dim and every head.
        entries: the batch entries that share the bias and are added up, or 1 where each has its own.
        at_once: how many of them a launch adds in registers; more than 1 only where they see alike.
        bind: returns a launch of dQ for so many entries, or with 0 for each entry apart; one that reads or writes
            another dtype, or reads nothing, needs one of its own.
    """

    def __init__(self, problem: AttentionProblem, entries: int, at_once: int, bind: Callable[[int], Launch]) -> None:
        # Of a tile that no query of it sees, nothing is written.
        self._skips = problem.mask.is_bounded or problem.sequences.are_data or bool(_hiding(problem))
        # Else an entry may skip what an earlier one has written, or the other way round.
        self._alike = entries == 1 or sees_alike(problem)
        at_once = min(at_once, entries)  # a CTA for more of them would read and write past the last one
        firsts = range(0, entries, at_once)
        first, following, last = bind(at_once if entries > 1 else 0), bind(at_once), bind(entries - firsts[-1])
        self._steps: list[tuple[int | None, Launch]] = [(begin, following) for begin in firsts]
        self._steps[-1] = (firsts[-1], last)
        self._steps[0] = (0 if entries > 1 else None, first)

    def __call__(self, *arguments: Any) -> None:
        """Enqueue the launches: ``arguments`` as of one of dQ; it is for here to say which pairs are earlier ones."""
        *tensors, pairs, _earlier, _entry, modifiers = arguments
        if self._skips and self._alike:
            pairs.zero_()
        *before, (last_entry, last) = self._steps
        is_total = not before or pairs.dtype is torch.float32
        total = pairs if is_total else torch.empty_like(pairs, dtype=torch.float32)
        earlier = None if self._alike else total.zero_()
        for entry, launch in before:
            launch(*tensors, total, earlier, entry, modifiers)
            earlier = total
        last(*tensors, pairs if self._alike else total, earlier, last_entry, modifiers)
        if not (self._alike or is_total):
            pairs.copy_(total)
