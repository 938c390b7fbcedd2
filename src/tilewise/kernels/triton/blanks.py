"""What another library's kernel wants of lengths that are data, and leaves to be done where they hide something.

It wants each sequence's own lengths, however they were given. And which rows see nothing the device alone knows:
padding, and what stands outside of a band whose place depends on lengths (maths.md, eq. 26). These are zeroed by a
second kernel; a program of it that has none of them reads two lengths and writes nothing.
"""

from typing import Literal

import triton
import triton.language as tl

from tilewise.kernels.triton.launch import Launch, is_shifted, tile_slots
from tilewise.kernels.triton.places import extent, locate
from tilewise.problem import AttentionProblem, Sizes, padded_dim

_ROWS = 64  # a program; fewer launch more programs, more hold more zeros in registers
_SEQUENCES = 128  # a program


@triton.jit
def sequence_lengths_kernel(lengths_ptr, cu_q, cu_k, seqlens_q, seqlens_k, rows_q, rows_k, stride, count,
                            BLOCK: tl.constexpr):
    """Write how many queries and keys of each sequence take part, (2, sequences), int32: no more than there are."""
    sequences = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = sequences < count
    known = tl.minimum(sequences, count - 1)
    _begin, _rows, queries = extent(cu_q, seqlens_q, known, count, rows_q)
    _begin, _rows, keys = extent(cu_k, seqlens_k, known, count, rows_k)
    tl.store(lengths_ptr + sequences, queries, mask=inside)
    tl.store(lengths_ptr + stride + sequences, keys, mask=inside)


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
    rows_ptr, more_ptr, lse_ptr, sinks_ptr, own_cu, own_seqlens, other_cu, other_seqlens,
    stride_b, stride_h, stride_s, more_stride_b, more_stride_h, more_stride_s, stride_sink,
    behind, ahead, count, own, other, heads, tiles,
    SHIFTED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MORE_D: tl.constexpr, MORE_BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write 0 into the (b, h, s, d) rows that see nothing, and into those of a second tensor with more_ptr.

    With lse_ptr, lse's −inf, or the sink, is written beside them. Position p sees those of the other side from
    p − behind to p + ahead, both moved by the difference of the lengths if SHIFTED; None leaves a side open. The last
    stride is 1; lse is contiguous.
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
    blank = (offs >= 0) & (offs < own_rows) & ~(taking_part & (start < stop))       # [BLOCK]
    rows = own_row + offs
    _blank(rows_ptr, head, batch, rows, blank, stride_b, stride_h, stride_s, D, BLOCK_D)
    if more_ptr is not None:
        _blank(more_ptr, head, batch, rows, blank, more_stride_b, more_stride_h, more_stride_s, MORE_D, MORE_BLOCK_D)
    if lse_ptr is not None:
        lse = tl.full([BLOCK], float("-inf"), tl.float32)
        if sinks_ptr is not None:
            lse = tl.where(taking_part, tl.load(sinks_ptr + head * stride_sink).to(tl.float32), lse)
        lse_ptrs = lse_ptr + (batch.to(tl.int64) * heads + head) * own + rows
        tl.store(lse_ptrs, lse, mask=blank)


def lengths_launch(problem: AttentionProblem, stride: int) -> Launch:
    """Bind the kernel of the lengths, (2, sequences) with that row stride.

    Call the result with (lengths, cu_seqlens of q and k, seqlens of q and k).
    """
    count = problem.pairs[0]
    scalars = (problem.sq, problem.sk, stride, count, _SEQUENCES)
    return Launch(sequence_lengths_kernel, -(-count // _SEQUENCES), scalars, num_warps=4)


def blank_launch(problem: AttentionProblem, side: Literal["q", "k"], width: int, strides: Sizes,
                 more: tuple[int, Sizes] | None = None) -> Launch:
    """Bind the kernel for a tensor (b, h, s, width) of queries or keys with these strides; ``more``: of another.

    Call the result with (rows, rows of the other or None, lse or None, sinks or None, cu_seqlens and seqlens of its own
    side, those of the other side).
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
