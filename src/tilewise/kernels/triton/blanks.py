"""Zeros for the rows that see nothing, where another library's kernel wrote the rest and lengths are data.

Which rows these are the device alone knows: padding, and what stands outside of a band whose place depends on lengths
(maths.md, eq. 26). A program that has none of them reads two lengths and writes nothing.
"""

from typing import Literal

import triton
import triton.language as tl

from tilewise.kernels.triton.launch import Launch, is_shifted, tile_slots
from tilewise.kernels.triton.places import locate
from tilewise.problem import AttentionProblem, Sizes, padded_dim

_ROWS = 64  # a program; fewer launch more programs, more hold more zeros in registers


@triton.jit
def blank_rows_kernel(
    rows_ptr, lse_ptr, sinks_ptr, own_cu, own_seqlens, other_cu, other_seqlens,
    stride_b, stride_h, stride_s, stride_sink, behind, ahead, count, own, other, heads, tiles,
    SHIFTED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write 0 into the (b, h, s, d) rows that see nothing, and with lse_ptr lse's −inf, or the sink, beside them.

    Position p sees those of the other side from p − behind to p + ahead, both moved by the difference of the lengths
    if SHIFTED; None leaves a side open. The last stride is 1; lse is contiguous.
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
    offs_d = tl.arange(0, BLOCK_D)
    base = rows_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    ptrs = base + (own_row + offs).to(tl.int64)[:, None] * stride_s + offs_d[None, :]
    zeros = tl.zeros([BLOCK, BLOCK_D], dtype=rows_ptr.dtype.element_ty)
    tl.store(ptrs, zeros, mask=blank[:, None] & (offs_d < D)[None, :])
    if lse_ptr is not None:
        lse = tl.full([BLOCK], float("-inf"), tl.float32)
        if sinks_ptr is not None:
            lse = tl.where(taking_part, tl.load(sinks_ptr + head * stride_sink).to(tl.float32), lse)
        lse_ptrs = lse_ptr + (batch.to(tl.int64) * heads + head) * own + own_row + offs
        tl.store(lse_ptrs, lse, mask=blank)


def blank_launch(problem: AttentionProblem, side: Literal["q", "k"], width: int, strides: Sizes) -> Launch:
    """Bind the kernel for a tensor (b, h, s, width) of queries or keys with these strides.

    Call the result with (rows, lse or None, sinks or None, cu_seqlens and seqlens of its own side, those of the other).
    """
    mask, sinks, of_queries = problem.mask, problem.scores.sinks, side == "q"
    heads, own, other = (problem.hq, problem.sq, problem.sk) if of_queries else (problem.hk, problem.sk, problem.sq)
    tiles = tile_slots(problem, own, _ROWS)
    scalars = (
        *strides[:3], 0 if sinks is None else sinks.strides[0],
        *((mask.left, mask.right) if of_queries else (mask.right, mask.left)), problem.pairs[0], own, other, heads,
        tiles, is_shifted(problem), width, padded_dim(width), _ROWS,
    )
    return Launch(blank_rows_kernel, tiles * heads * problem.b, scalars, num_warps=4)
