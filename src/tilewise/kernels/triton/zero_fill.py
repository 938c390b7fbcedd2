"""Lengths on the device in the form that cuDNN takes them, and zeros in the rows that it leaves unwritten.

cuDNN takes each sequence's own lengths, and of packed ones the elements at which they begin in each tensor. Only the
device knows which rows see no key: padding, and rows outside of a band that depends on lengths (maths.md, eq. 26). A
second kernel zeroes them; a program without such rows reads two lengths and writes nothing.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.launch import Launch, is_shifted, tile_slots
from tilewise.kernels.triton.tile_scheduler import locate_work_tile, sequence_extent
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
        _begin, _rows, queries = sequence_extent(cu_q, seqlens_q, known, count, rows_q)
        _begin, _rows, keys = sequence_extent(cu_k, seqlens_k, known, count, rows_k)
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
            there, read = sequences <= count, (sequences > 0) & (sequences <= count)  # the first is 0: sequence_start
            begins = tl.load(cu_q + sequences, mask=read & of_queries, other=0).to(tl.int32)
            begins += tl.load(cu_k + sequences, mask=read & (border >= borders_q), other=0).to(tl.int32)
            tl.store(index_ptr + (border + 2) * stride + sequences, begins * step, mask=there)


@triton.jit
def _zero_fill(ptr, head, batch, rows, blank, stride_b, stride_h, stride_s, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write 0 into the rows [BLOCK] that are blank."""
    offs_d = tl.arange(0, BLOCK_D)
    base = ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    ptrs = base + rows.to(tl.int64)[:, None] * stride_s + offs_d[None, :]
    zeros = tl.zeros([rows.shape[0], BLOCK_D], dtype=ptr.dtype.element_ty)
    tl.store(ptrs, zeros, mask=blank[:, None] & (offs_d < D)[None, :])


@triton.jit
def _blind(own_cu, own_seqlens, other_cu, other_seqlens, count, own, other, heads, tiles, behind, ahead,
           SHIFTED: tl.constexpr, BLOCK: tl.constexpr):
    """Find the rows of a program's tile that see nothing.

    Position p sees those of the other side from p − behind to p + ahead, both moved by the difference of the lengths if
    SHIFTED; None leaves a side open. Returns (head, batch, rows, there, blank, taking part), the last four [BLOCK].
    """
    first, head, _sequence, batch, own_row, _other_row, own_rows, own_length, other_length = locate_work_tile(
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
    return head, batch, own_row + offs, there, there & ~(taking_part & (start < stop)), taking_part


@triton.jit
def zero_fill_out_kernel(
    out_ptr, lse_ptr, seen_ptr, sinks_ptr, cu_q, seqlens_q, cu_k, seqlens_k, stride_b, stride_h, stride_s, stride_sink,
    behind, ahead, count, queries, keys, heads, tiles,
    SHIFTED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write 0 into the rows of out (b, h, s, d) that see nothing, and −inf, or the sink, into lse's.

    With seen_ptr, (b, s, h), all others of lse are written from there. Out's last stride is 1; lse is contiguous.
    """
    head, batch, rows, there, blank, taking_part = _blind(
        cu_q, seqlens_q, cu_k, seqlens_k, count, queries, keys, heads, tiles, behind, ahead, SHIFTED, BLOCK)
    _zero_fill(out_ptr, head, batch, rows, blank, stride_b, stride_h, stride_s, D, BLOCK_D)
    lse = tl.full([BLOCK], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        lse = tl.where(taking_part, tl.load(sinks_ptr + head * stride_sink).to(tl.float32), lse)
    lse_ptrs = lse_ptr + (batch.to(tl.int64) * heads + head) * queries + rows
    if seen_ptr is not None:
        seen_ptrs = seen_ptr + (batch.to(tl.int64) * queries + rows) * heads + head
        tl.store(lse_ptrs, tl.load(seen_ptrs, mask=there & ~blank), mask=there & ~blank)
    tl.store(lse_ptrs, lse, mask=blank)


@triton.jit
def zero_fill_gradients_kernel(
    dq_ptr, dk_ptr, dv_ptr, cu_q, seqlens_q, cu_k, seqlens_k, dq_stride_b, dq_stride_h, dq_stride_s,
    dk_stride_b, dk_stride_h, dk_stride_s, dv_stride_b, dv_stride_h, dv_stride_s,
    left, right, count, queries, keys, heads_q, heads_k, tiles_q, tiles_k, programs_q, programs_k,
    SHIFTED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write 0 into the rows of dq, (b, h, s, d), that see nothing, and into those of dk and dv that nothing sees.

    The grid's second dim has the queries, then the keys. The last stride of each tensor is 1.
    """
    if tl.program_id(1) == 0:
        if tl.program_id(0) < programs_q:
            head, batch, rows, _there, blank, _part = _blind(
                cu_q, seqlens_q, cu_k, seqlens_k, count, queries, keys, heads_q, tiles_q, left, right, SHIFTED, BLOCK)
            _zero_fill(dq_ptr, head, batch, rows, blank, dq_stride_b, dq_stride_h, dq_stride_s, D, BLOCK_D)
    else:
        if tl.program_id(0) < programs_k:
            head, batch, rows, _there, blank, _part = _blind(
                cu_k, seqlens_k, cu_q, seqlens_q, count, keys, queries, heads_k, tiles_k, right, left, SHIFTED, BLOCK)
            _zero_fill(dk_ptr, head, batch, rows, blank, dk_stride_b, dk_stride_h, dk_stride_s, D, BLOCK_D)
            _zero_fill(dv_ptr, head, batch, rows, blank, dv_stride_b, dv_stride_h, dv_stride_s, DV, BLOCK_DV)


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


def zero_fill_out_launch(problem: AttentionProblem) -> Launch:
    """Bind the kernel for out, with the problem's strides, and lse.

    Call the result with (out, lse, lse of what sees something or None, sinks or None, cu_seqlens and seqlens of
    queries, those of keys).
    """
    mask, sinks = problem.mask, problem.scores.sinks
    tiles = tile_slots(problem, problem.sq, _ROWS)
    scalars = (*problem.out_strides[:3], 0 if sinks is None else sinks.strides[0], mask.left, mask.right,
               problem.pairs[0], problem.sq, problem.sk, problem.hq, tiles, is_shifted(problem), problem.dv,
               padded_dim(problem.dv), _ROWS)
    return Launch(zero_fill_out_kernel, tiles * problem.hq * problem.b, scalars, num_warps=4)


def zero_fill_gradients_launch(problem: AttentionProblem, strides: tuple[Sizes, Sizes, Sizes]) -> Launch:
    """Bind the kernel for dq, dk and dv with these strides.

    Call the result with (dq, dk, dv, cu_seqlens and seqlens of queries, those of keys).
    """
    mask = problem.mask
    tiles_q, tiles_k = (tile_slots(problem, length, _ROWS) for length in (problem.sq, problem.sk))
    programs = tiles_q * problem.hq * problem.b, tiles_k * problem.hk * problem.b
    scalars = (*(stride for own in strides for stride in own[:3]), mask.left, mask.right, problem.pairs[0], problem.sq,
               problem.sk, problem.hq, problem.hk, tiles_q, tiles_k, *programs, is_shifted(problem), problem.d,
               padded_dim(problem.d), problem.dv, padded_dim(problem.dv), _ROWS)
    return Launch(zero_fill_gradients_kernel, (max(programs), 2), scalars, num_warps=4)
