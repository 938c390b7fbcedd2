"""What another library's kernel wants of lengths that are data, and leaves to be done where they hide something.

It wants each sequence's own lengths, however they were given, and of packed ones the elements at which they begin in
each tensor. And which rows see nothing the device alone knows: padding, and what stands outside of a band whose place
depends on lengths (maths.md, eq. 26). These are zeroed by a second kernel; a program of it that has none of them reads
two lengths and writes nothing.
"""

from typing import Literal

import triton
import triton.language as tl

from tilewise.kernels.triton.launch import Launch, is_shifted, tile_slots
from tilewise.kernels.triton.places import extent, locate
from tilewise.problem import AttentionProblem, Sizes, padded_dim

_ROWS = 64  # a program; fewer launch more programs, more hold more zeros in registers
_SEQUENCES = 128  # a program
MOST_BORDERS = 8  # row strides in one launch: of q, out, their gradients and lse; of k, v and theirs


@triton.jit
def sequence_lengths_kernel(index_ptr, cu_q, cu_k, seqlens_q, seqlens_k, rows_q, rows_k, stride, count, tiles,
                            borders_q, step_0, step_1, step_2, step_3, step_4, step_5, step_6, step_7,
                            BLOCK: tl.constexpr):
    """Write how many queries and keys of each sequence take part, no more than there are, then its borders; all int32.

    Row 0 of (2 + borders, stride) has the queries, row 1 the keys, and each row behind them the ``count + 1`` borders
    of queries (as many rows as ``borders_q``) or of keys, times the step that is its own.
    """
    border = tl.program_id(0) // tiles - 1
    sequences = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    if border < 0:
        inside = sequences < count
        known = tl.maximum(tl.minimum(sequences, count - 1), 0)  # border 0 is there without a sequence
        _begin, _rows, queries = extent(cu_q, seqlens_q, known, count, rows_q)
        _begin, _rows, keys = extent(cu_k, seqlens_k, known, count, rows_k)
        tl.store(index_ptr + sequences, queries, mask=inside)
        tl.store(index_ptr + stride + sequences, keys, mask=inside)
    else:
        if cu_q is not None:
            step = tl.where(border == 1, step_1, step_0)
            step = tl.where(border == 2, step_2, step)
            step = tl.where(border == 3, step_3, step)
            step = tl.where(border == 4, step_4, step)
            step = tl.where(border == 5, step_5, step)
            step = tl.where(border == 6, step_6, step)
            step = tl.where(border == 7, step_7, step)
            of_queries = border < borders_q
            there = sequences <= count
            begins = tl.load(cu_q + sequences, mask=there & of_queries, other=0).to(tl.int32)
            begins += tl.load(cu_k + sequences, mask=there & (border >= borders_q), other=0).to(tl.int32)
            tl.store(index_ptr + (border + 2) * stride + sequences, begins * step, mask=there)


@triton.jit
def _blank(ptr, head, batch, rows, blank, stride_b, stride_h, stride_s, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write 0 into the rows [BLOCK] that are blank."""
    offs_d = tl.arange(0, BLOCK_D)
    base = ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    ptrs = base + rows.to(tl.int64)[:, None] * stride_s + offs_d[None, :]
    zeros = tl.zeros([rows.shape[0], BLOCK_D], dtype=ptr.dtype.element_ty)
    tl.store(ptrs, zeros, mask=blank[:, None] & (offs_d < D)[None, :])


@triton.jit
def blank_rows_kernel(
    rows_ptr, more_ptr, lse_ptr, seen_ptr, sinks_ptr, own_cu, own_seqlens, other_cu, other_seqlens,
    stride_b, stride_h, stride_s, more_stride_b, more_stride_h, more_stride_s, stride_sink,
    behind, ahead, count, own, other, heads, tiles,
    SHIFTED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MORE_D: tl.constexpr, MORE_BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write 0 into the (b, h, s, d) rows that see nothing, and into those of a second tensor with more_ptr.

    With lse_ptr, lse's −inf, or the sink, is written beside them, and with seen_ptr too, (b, s, h), all the others of
    lse from there. Position p sees those of the other side from p − behind to p + ahead, both moved by the difference
    of the lengths if SHIFTED; None leaves a side open. The last stride is 1; lse is contiguous.
    """
    first, head, _sequence, batch, own_row, _other_row, own_rows, own_length, other_length = locate(
        own_cu, own_seqlens, other_cu, other_seqlens, count, tiles, heads, own, other, BLOCK, False)
    offs = first + tl.arange(0, BLOCK)
    place = offs
    if SHIFTED:
        place += other_length - own_length
    start, stop = offs * 0, offs * 0 + other_length
    if behind is not None:
        start = tl.maximum(start, place - behind)
    if ahead is not None:
        stop = tl.minimum(stop, place + ahead + 1)
    taking_part = offs < own_length
    there = (offs >= 0) & (offs < own_rows)
    blank = there & ~(taking_part & (start < stop))                                 # [BLOCK]
    rows = own_row + offs
    _blank(rows_ptr, head, batch, rows, blank, stride_b, stride_h, stride_s, D, BLOCK_D)
    if more_ptr is not None:
        _blank(more_ptr, head, batch, rows, blank, more_stride_b, more_stride_h, more_stride_s, MORE_D, MORE_BLOCK_D)
    if lse_ptr is not None:
        lse = tl.full([BLOCK], float("-inf"), tl.float32)
        if sinks_ptr is not None:
            lse = tl.where(taking_part, tl.load(sinks_ptr + head * stride_sink).to(tl.float32), lse)
        lse_ptrs = lse_ptr + (batch.to(tl.int64) * heads + head) * own + rows
        if seen_ptr is not None:
            seen_ptrs = seen_ptr + (batch.to(tl.int64) * own + rows) * heads + head
            tl.store(lse_ptrs, tl.load(seen_ptrs, mask=there & ~blank), mask=there & ~blank)
        tl.store(lse_ptrs, lse, mask=blank)


def lengths_launch(problem: AttentionProblem, stride: int, steps_q: Sizes = (), steps_k: Sizes = ()) -> Launch:
    """Bind the kernel of the lengths and borders: (2 + borders, sequences + 1) with that row stride.

    ``steps_q``, ``steps_k``: of packed sequences, what the borders of queries and of keys are multiplied by, for each
    a row. Lengths that are no data are those of the queries that see a key, and of the keys that are seen. Call the
    result with (what is written, cu_seqlens of q and k, seqlens of q and k).
    """
    count, steps = problem.pairs[0], (*steps_q, *steps_k)
    tiles = -(-(count + 1) // _SEQUENCES)
    scalars = (len(problem.seeing_queries), len(problem.seen_keys), stride, count, tiles, len(steps_q), *steps,
               *(0 for _ in range(MOST_BORDERS - len(steps))), _SEQUENCES)
    return Launch(sequence_lengths_kernel, tiles * (1 + len(steps)), scalars, num_warps=4)


def blank_launch(problem: AttentionProblem, side: Literal["q", "k"], width: int, strides: Sizes,
                 more: tuple[int, Sizes] | None = None) -> Launch:
    """Bind the kernel for a tensor (b, h, s, width) of queries or keys with these strides; ``more``: of another.

    Call the result with (rows, rows of the other or None, lse or None, lse of what sees something or None, sinks or
    None, cu_seqlens and seqlens of its own side, those of the other side).
    """
    mask, sinks, of_queries = problem.mask, problem.scores.sinks, side == "q"
    heads, own, other = (problem.hq, problem.sq, problem.sk) if of_queries else (problem.hk, problem.sk, problem.sq)
    tiles = tile_slots(problem, own, _ROWS)
    more_width, more_strides = more or (width, strides)
    scalars = (
        *strides[:3], *more_strides[:3], 0 if sinks is None else sinks.strides[0],
        *((mask.left, mask.right) if of_queries else (mask.right, mask.left)), problem.pairs[0], own, other, heads,
        tiles, is_shifted(problem), width, padded_dim(width), more_width, padded_dim(more_width), _ROWS,
    )
    return Launch(blank_rows_kernel, tiles * heads * problem.b, scalars, num_warps=4)
