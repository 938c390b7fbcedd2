"""dq from the dQ accumulator of the Hopper backward kernel: put in order, scaled, rounded (maths.md, eq. 10)."""

import triton
import triton.language as tl

_CHUNK = tl.constexpr(128)  # sequences that are looked through at once


@triton.jit
def rows_of_block(cu_seqlens, count, block, total):
    """Return the first row of dq of a block of 64 queries, and where its sequence ends.

    Packed sequence n owns the blocks from cu_seqlens[n] div 64 + n on; rows behind the last sequence count as one. The
    first number is taken for 0, as in varlen.border_at, and one behind the tensor for its end, as in varlen.extent.
    """
    begin = block * 64
    stop = total
    if cu_seqlens is not None:
        sequence = 0
        for first in tl.range(1, count + 1, _CHUNK):
            numbers = first + tl.arange(0, _CHUNK)
            blocks = tl.load(cu_seqlens + numbers, mask=numbers <= count, other=0).to(tl.int32) // 64 + numbers
            sequence += tl.sum(((blocks <= block) & (numbers <= count)).to(tl.int32), 0)
        row = tl.load(cu_seqlens + sequence, mask=sequence > 0, other=0).to(tl.int32)
        begin += row - (row // 64 + sequence) * 64
        following = tl.load(cu_seqlens + tl.minimum(sequence + 1, count)).to(tl.int32)
        stop = tl.where(sequence < count, tl.minimum(following, total), total)
    return begin, stop


@triton.jit(do_not_specialize=["sq", "heads", "parts", "count"])
def hopper_dq_kernel(accum_ptr, dq, cu_seqlens, sq, heads, parts, count, scale, D: tl.constexpr, COLUMNS: tl.constexpr,
                     PARTS: tl.constexpr):
    """Write one part of dq, 64 rows by COLUMNS columns; PARTS parts lie side by side.

    Grid: (parts of a head · heads · batches,): CUDA has at most 65535 CTAs along a second dim. accum: each part in
    thread-major order (dq_accum.thread_major): four by four what thread after thread of a warpgroup holds of it, (eight
    columns, warp, row of 8, two columns, upper or lower 8 rows, one of the two columns). dq: a StridedRows. cu_seqlens,
    count: of packed sequences their borders and their number, else None.
    """
    part = tl.program_id(0) % parts
    head_row = tl.program_id(0) // parts
    values = tl.load(accum_ptr + (head_row.to(tl.int64) * parts + part) * (64 * COLUMNS) + tl.arange(0, 64 * COLUMNS))
    values = tl.reshape(values, (COLUMNS // 8, 4, 8, 4, 2, 2))
    scaled = tl.reshape(tl.permute(values, (1, 4, 2, 0, 3, 5)), (64, COLUMNS)) * scale
    columns = tl.arange(0, COLUMNS) + part % PARTS * COLUMNS
    begin, stop = rows_of_block(cu_seqlens, count, part // PARTS, sq)
    rows = begin + tl.arange(0, 64)
    place = dq.ptr + (head_row // heads).to(tl.int64) * dq.stride_b + (head_row % heads).to(tl.int64) * dq.stride_h
    place += rows.to(tl.int64)[:, None] * dq.stride_s + columns[None, :]
    tl.store(place, scaled.to(dq.ptr.dtype.element_ty), mask=(rows < stop)[:, None] & (columns < D)[None, :])
