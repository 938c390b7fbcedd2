"""dQ from the sums that the Hopper backward kernel leaves: their order undone, scaled, rounded (maths.md, eq. 10)."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["sq", "heads", "parts"])
def hopper_dq_kernel(sums_ptr, dq_ptr, stride_b, stride_h, stride_s, sq, heads, parts, scale, D: tl.constexpr,
                     COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Write one part of dQ, 64 rows by COLUMNS columns; PARTS lie side by side.

    Grid: (parts of a head, heads · batches). sums: of each part, four by four, what thread after thread of a
    warpgroup holds of it: (eight columns, warp, row of 8, pair of columns, upper or lower 8 rows, column of the pair).
    """
    part = tl.program_id(0)
    line = tl.program_id(1)
    values = tl.load(sums_ptr + (line.to(tl.int64) * parts + part) * (64 * COLUMNS) + tl.arange(0, 64 * COLUMNS))
    values = tl.reshape(values, (COLUMNS // 8, 4, 8, 4, 2, 2))
    dq = tl.reshape(tl.permute(values, (1, 4, 2, 0, 3, 5)), (64, COLUMNS)) * scale
    columns = tl.arange(0, COLUMNS) + part % PARTS * COLUMNS
    rows = part // PARTS * 64 + tl.arange(0, 64)
    place = dq_ptr + (line // heads).to(tl.int64) * stride_b + (line % heads).to(tl.int64) * stride_h
    place += rows.to(tl.int64)[:, None] * stride_s + columns[None, :]
    tl.store(place, dq.to(dq_ptr.dtype.element_ty), mask=(rows < sq)[:, None] & (columns < D)[None, :])
