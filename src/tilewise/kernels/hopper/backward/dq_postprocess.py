"""dq from the dQ accumulator of the Hopper backward kernel: put in order, scaled, rounded (maths.md, eq. 10).

The accumulator of packed sequences has blocks of which nothing is read: those between two sequences, and those of
sequences whose keys are one tile, which writes dq itself (dq_accum.write_dq_rows). They are not set to 0 either.
"""

import triton
import triton.language as tl

_CHUNK = tl.constexpr(128)  # sequences that are looked through at once
ONE_TILE = tl.constexpr(128)  # keys of a tile of d128.py


@triton.jit
def border_at(cu_seqlens, number, total):
    """Return where a packed sequence begins, inside the tensor in any case; 0 in place of the first number."""
    border = tl.load(cu_seqlens + number, mask=number > 0, other=0).to(tl.int32)
    return tl.minimum(tl.maximum(border, 0), total)


@triton.jit
def sequence_of(cu_seqlens, count, slot, ROWS: tl.constexpr):
    """Find the packed sequence that owns a slot of ROWS rows, as varlen.sequence_of does."""
    sequence = 0
    for first in tl.range(1, count + 1, _CHUNK):
        numbers = first + tl.arange(0, _CHUNK)
        borders = tl.maximum(tl.load(cu_seqlens + numbers, mask=numbers <= count, other=0).to(tl.int32), 0)
        sequence += tl.sum(((borders // ROWS + numbers <= slot) & (numbers <= count)).to(tl.int32), 0)
    return sequence


@triton.jit
def rows_of_sequence(cu_seqlens, count, sequence, total):
    """Return a packed sequence's first row and where it ends; rows behind the last one count as one, too."""
    begin = border_at(cu_seqlens, sequence, total)
    stop = border_at(cu_seqlens, tl.minimum(sequence + 1, count), total)
    return begin, tl.where(sequence < count, stop, total)


@triton.jit
def rows_of_block(cu_q, cu_k, count, block, sq, sk):
    """Return the first row of dq of a block of 64 queries, and where its sequence ends, or where nothing is summed.

    Packed sequence n owns the blocks from cu_q[n] div 64 + n on. cu_k: None unless a sequence of one tile is left out;
    it is not where borders, behind the tensor or decreasing, give that tile to another sequence or to none.
    """
    begin = block * 64
    stop = sq
    if cu_q is not None:
        sequence = sequence_of(cu_q, count, block, 64)
        row, stop = rows_of_sequence(cu_q, count, sequence, sq)
        begin += row - (row // 64 + sequence) * 64
        if cu_k is not None:
            first_key, last_key = rows_of_sequence(cu_k, count, sequence, sk)
            is_there = sequence_of(cu_k, count, first_key // ONE_TILE + sequence, ONE_TILE) == sequence
            stop = tl.where(is_there & (last_key - first_key <= ONE_TILE), begin, stop)
    return begin, stop


@triton.jit(do_not_specialize=["sq", "sk", "blocks", "count"])
def hopper_zero_kernel(accum_ptr, cu_q, cu_k, sq, sk, blocks, count, WIDTH: tl.constexpr):
    """Set the dQ accumulator of packed sequences to 0, where it is read. Grid: (blocks of a head · heads,).

    The arguments are those of hopper_dq_kernel.
    """
    begin, stop = rows_of_block(cu_q, cu_k, count, tl.program_id(0) % blocks, sq, sk)
    if begin < stop:
        place = accum_ptr + tl.program_id(0).to(tl.int64) * (64 * WIDTH)
        tl.store(place + tl.arange(0, 64 * WIDTH), tl.zeros((64 * WIDTH,), tl.float32))


@triton.jit(do_not_specialize=["sq", "sk", "heads", "parts", "count"])
def hopper_dq_kernel(accum_ptr, dq, cu_q, cu_k, sq, sk, heads, parts, count, scale, D: tl.constexpr,
                     COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Write one part of dq, 64 rows by COLUMNS columns; PARTS parts lie side by side.

    Grid: (parts of a head · heads · batches,): CUDA has at most 65535 CTAs along a second dim. accum: each part in
    thread-major order (dq_accum.thread_major): four by four what thread after thread of a warpgroup holds of it, (eight
    columns, warp, row of 8, two columns, upper or lower 8 rows, one of the two columns). dq: a StridedRows. cu_q, cu_k,
    count: of packed sequences their borders and their number, else None; cu_k also where each tile adds to dQ.
    """
    part = tl.program_id(0) % parts
    head_row = tl.program_id(0) // parts
    begin, stop = rows_of_block(cu_q, cu_k, count, part // PARTS, sq, sk)
    if begin < stop:
        place = accum_ptr + (head_row.to(tl.int64) * parts + part) * (64 * COLUMNS)
        values = tl.reshape(tl.load(place + tl.arange(0, 64 * COLUMNS)), (COLUMNS // 8, 4, 8, 4, 2, 2))
        scaled = tl.reshape(tl.permute(values, (1, 4, 2, 0, 3, 5)), (64, COLUMNS)) * scale
        columns = tl.arange(0, COLUMNS) + part % PARTS * COLUMNS
        rows = begin + tl.arange(0, 64)
        place = dq.ptr + (head_row // heads).to(tl.int64) * dq.stride_b + (head_row % heads).to(tl.int64) * dq.stride_h
        place += rows.to(tl.int64)[:, None] * dq.stride_s + columns[None, :]
        tl.store(place, scaled.to(dq.ptr.dtype.element_ty), mask=(rows < stop)[:, None] & (columns < D)[None, :])
