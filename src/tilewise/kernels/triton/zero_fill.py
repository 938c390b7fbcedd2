"""Lengths on the device in the form that cuDNN takes them, and zeros in the rows that it leaves unwritten.

cuDNN takes each sequence's own lengths, and of packed ones the elements at which they begin in each tensor. Only the
device knows which rows see no key: padding, and rows outside of a band that depends on lengths (maths.md, eq. 26). A
second kernel zeroes them; a CTA without such rows reads two lengths and writes nothing.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.triton.launch import Launch, is_shifted, tile_slots
from tilewise.kernels.triton.tile_scheduler import locate_work_tile, sequence_extent
from tilewise.problem import AttentionProblem, Sizes, padded_dim

_ROWS = 64  # of a CTA; fewer launch more CTAs, more hold more zeros in registers
_SEQUENCES = 128  # of a CTA
MOST_BORDERS = tl.constexpr(8)  # row strides in one launch: of q, out, their gradients and lse; of k, v and theirs


class IndexNumbers(NamedTuple):
    """The numbers of a call, for which the kernel is not specialised; steps: MOST_BORDERS of them.

    stride: of the rows that are written. count: of sequences. borders_q: how many of the borders are those of queries.
    """

    sq: int
    sk: int
    stride: int
    count: int
    tiles: int
    borders_q: int
    steps: tuple[int, ...]


class Side(NamedTuple):
    """Queries or keys: cu_seqlens, seqlens or None, and how many rows and heads there are, and tiles for each head."""

    cu: Any
    seqlens: Any
    rows: Any
    heads: Any
    tiles: Any


class BlankNumbers(NamedTuple):
    """The numbers of a call, for which the kernels are not specialised.

    left, right: of the window, None where it is open. count: of sequences. tiles_q, tiles_k: for each head. ctas_q,
    ctas_k: of the whole grid. stride_sink: of the sinks.
    """

    left: int | None
    right: int | None
    count: int
    sq: int
    sk: int
    hq: int
    hk: int
    tiles_q: int
    tiles_k: int
    ctas_q: int
    ctas_k: int
    stride_sink: int


@triton.jit
def sequence_lengths_kernel(index_ptr, cu_q, cu_k, seqlens_q, seqlens_k, numbers, BLOCK: tl.constexpr):
    """Write how many queries and keys of each sequence take part, no more than there are, then its borders; all int32.

    Row 0 of (2 + borders, stride) has the queries, row 1 the keys, and each row behind them the ``count + 1`` borders
    of queries (as many rows as ``borders_q``) or of keys, times the step that is its own. numbers: IndexNumbers.
    """
    stride, count, tiles, borders_q = numbers.stride, numbers.count, numbers.tiles, numbers.borders_q
    border = tl.program_id(0) // tiles - 1
    sequences = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    if border < 0:
        inside = sequences < count
        known = tl.maximum(tl.minimum(sequences, count - 1), 0)  # border 0 is there without a sequence
        _begin, _rows, queries = sequence_extent(cu_q, seqlens_q, known, count, numbers.sq)
        _begin, _rows, keys = sequence_extent(cu_k, seqlens_k, known, count, numbers.sk)
        tl.store(index_ptr + sequences, queries, mask=inside)
        tl.store(index_ptr + stride + sequences, keys, mask=inside)
    else:
        if cu_q is not None:
            step = numbers.steps[0]
            for i in tl.static_range(1, MOST_BORDERS):
                step = tl.where(border == i, numbers.steps[i], step)
            of_queries = border < borders_q
            there, read = sequences <= count, (sequences > 0) & (sequences <= count)  # the first is 0: sequence_start
            begins = tl.load(cu_q + sequences, mask=read & of_queries, other=0).to(tl.int32)
            begins += tl.load(cu_k + sequences, mask=read & (border >= borders_q), other=0).to(tl.int32)
            tl.store(index_ptr + (border + 2) * stride + sequences, begins * step, mask=there)


@triton.jit
def _zero_fill(tensor, head, batch, rows, blank, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write 0 into the rows [BLOCK] that are blank."""
    offs_d = tl.arange(0, BLOCK_D)
    base = tensor.ptr + batch.to(tl.int64) * tensor.stride_b + head.to(tl.int64) * tensor.stride_h
    ptrs = base + rows.to(tl.int64)[:, None] * tensor.stride_s + offs_d[None, :]
    zeros = tl.zeros([rows.shape[0], BLOCK_D], dtype=tensor.ptr.dtype.element_ty)
    tl.store(ptrs, zeros, mask=blank[:, None] & (offs_d < D)[None, :])


@triton.jit
def _blind(own, other, count, behind, ahead, SHIFTED: tl.constexpr, BLOCK: tl.constexpr):
    """Find the rows of a CTA's tile that see nothing; it is one of the Side ``own``.

    Position p sees those of the other side from p − behind to p + ahead, both moved by the difference of the lengths if
    SHIFTED; None leaves a side open. Returns (head, batch, rows, there, blank, taking part), the last four [BLOCK].
    """
    first, head, _sequence, batch, own_row, _other_row, own_rows, own_length, other_length = locate_work_tile(
        own.cu, own.seqlens, other.cu, other.seqlens, count, own.tiles, own.heads, own.rows, other.rows, BLOCK, False)
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
def zero_fill_out_kernel(out, lse_ptr, seen_ptr, sinks_ptr, cu_q, seqlens_q, cu_k, seqlens_k, numbers,
                         SHIFTED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """Write 0 into the rows of out (b, h, s, d) that see nothing, and −inf, or the sink, into lse's.

    With seen_ptr, (b, s, h), all others of lse are written from there. Out's last stride is 1; lse is contiguous.
    numbers: BlankNumbers.
    """
    sq, hq = numbers.sq, numbers.hq
    queries, keys = Side(cu_q, seqlens_q, sq, hq, numbers.tiles_q), Side(cu_k, seqlens_k, numbers.sk, None, None)
    head, batch, rows, there, blank, taking_part = _blind(
        queries, keys, numbers.count, numbers.left, numbers.right, SHIFTED, BLOCK)
    _zero_fill(out, head, batch, rows, blank, D, BLOCK_D)
    lse = tl.full([BLOCK], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * numbers.stride_sink).to(tl.float32)
        lse = tl.where(taking_part, sink, lse)
    lse_ptrs = lse_ptr + (batch.to(tl.int64) * hq + head) * sq + rows
    if seen_ptr is not None:
        seen_ptrs = seen_ptr + (batch.to(tl.int64) * sq + rows) * hq + head
        tl.store(lse_ptrs, tl.load(seen_ptrs, mask=there & ~blank), mask=there & ~blank)
    tl.store(lse_ptrs, lse, mask=blank)


@triton.jit
def zero_fill_gradients_kernel(dq, dk, dv, cu_q, seqlens_q, cu_k, seqlens_k, numbers, SHIFTED: tl.constexpr,
                               D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
                               BLOCK: tl.constexpr):
    """Write 0 into the rows of dq, (b, h, s, d), that see nothing, and into those of dk and dv that nothing sees.

    The grid's second dim has the queries, then the keys. The last stride of each tensor is 1. numbers: BlankNumbers.
    """
    queries = Side(cu_q, seqlens_q, numbers.sq, numbers.hq, numbers.tiles_q)
    keys = Side(cu_k, seqlens_k, numbers.sk, numbers.hk, numbers.tiles_k)
    left, right, count = numbers.left, numbers.right, numbers.count
    if tl.program_id(1) == 0:
        if tl.program_id(0) < numbers.ctas_q:
            head, batch, rows, _there, blank, _part = _blind(queries, keys, count, left, right, SHIFTED, BLOCK)
            _zero_fill(dq, head, batch, rows, blank, D, BLOCK_D)
    else:
        if tl.program_id(0) < numbers.ctas_k:
            head, batch, rows, _there, blank, _part = _blind(keys, queries, count, right, left, SHIFTED, BLOCK)
            _zero_fill(dk, head, batch, rows, blank, D, BLOCK_D)
            _zero_fill(dv, head, batch, rows, blank, DV, BLOCK_DV)


def lengths_launch(problem: AttentionProblem, stride: int, steps_q: Sizes = (), steps_k: Sizes = ()) -> Launch:
    """Bind the kernel of the lengths and borders: (2 + borders, sequences + 1) with that row stride.

    ``steps_q``, ``steps_k``: of packed sequences, what the borders of queries and of keys are multiplied by, for each
    a row. Lengths that are no data are those of the queries that see a key, and of the keys that are seen. Call the
    result with (what is written, cu_seqlens of q and k, seqlens of q and k).
    """
    count, steps = problem.pairs[0], (*steps_q, *steps_k)
    tiles = -(-(count + 1) // _SEQUENCES)
    numbers = IndexNumbers(len(problem.seeing_queries), len(problem.seen_keys), stride, count, tiles, len(steps_q),
                           (*steps, *(0,) * (MOST_BORDERS.value - len(steps))))
    return Launch(sequence_lengths_kernel, tiles * (1 + len(steps)), (numbers, _SEQUENCES), num_warps=4)


def zero_fill_out_launch(problem: AttentionProblem) -> Launch:
    """Bind the kernel for out, with the problem's strides, and lse.

    Call the result with (out, lse, lse of what sees something or None, sinks or None, cu_seqlens and seqlens of
    queries, those of keys).
    """
    numbers = _numbers(problem)
    scalars = numbers, is_shifted(problem), problem.dv, padded_dim(problem.dv), _ROWS
    return Launch(zero_fill_out_kernel, numbers.ctas_q, scalars, (problem.out_strides[:3],), num_warps=4)


def zero_fill_gradients_launch(problem: AttentionProblem, strides: tuple[Sizes, Sizes, Sizes]) -> Launch:
    """Bind the kernel for dq, dk and dv with these strides.

    Call the result with (dq, dk, dv, cu_seqlens and seqlens of queries, those of keys).
    """
    numbers = _numbers(problem)
    scalars = (numbers, is_shifted(problem), problem.d, padded_dim(problem.d), problem.dv, padded_dim(problem.dv),
               _ROWS)
    return Launch(zero_fill_gradients_kernel, (max(numbers.ctas_q, numbers.ctas_k), 2), scalars,
                  tuple(own[:3] for own in strides), num_warps=4)


def _numbers(problem: AttentionProblem) -> BlankNumbers:
    mask, sinks = problem.mask, problem.scores.sinks
    tiles_q, tiles_k = (tile_slots(problem, length, _ROWS) for length in (problem.sq, problem.sk))
    return BlankNumbers(mask.left, mask.right, problem.pairs[0], problem.sq, problem.sk, problem.hq, problem.hk,
                        tiles_q, tiles_k, tiles_q * problem.hq * problem.b, tiles_k * problem.hk * problem.b,
                        0 if sinks is None else sinks.strides[0])
