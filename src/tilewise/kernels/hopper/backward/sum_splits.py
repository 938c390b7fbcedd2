"""dk and dv where a group's query heads are split among tiles: the sums of the splits', rounded (maths.md, eq. 10)."""

import triton
import triton.language as tl

ROWS = tl.constexpr(32)  # of a CTA


@triton.jit
def _sum_rows(splits, gradient, row, head, rows, heads, SPLITS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Write some rows of one head's gradient."""
    numbers = row + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (numbers < rows)[:, None] & (columns < D)[None, :]
    batch, head = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    numbers = numbers.to(tl.int64)[:, None]
    place = splits.ptr + batch * splits.stride_b + numbers * splits.stride_s + columns[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(place + (head * SPLITS + split) * splits.stride_h, mask=inside, other=0.0)
    place = gradient.ptr + batch * gradient.stride_b + head * gradient.stride_h
    place += numbers * gradient.stride_s + columns[None, :]
    tl.store(place, total.to(gradient.ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "heads"])
def hopper_sum_splits_kernel(dk_splits, dv_splits, dk, dv, rows, heads, SPLITS: tl.constexpr, D: tl.constexpr,
                             DV: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_V: tl.constexpr):
    """Write dk and dv, in the order of the splits whatever CTA was first: the same bits on every run.

    Grid: (blocks of ROWS rows of a head · heads · batches,). All four: StridedRows, the splits in float32, those of a
    head side by side. D, DV: their columns; COLUMNS, COLUMNS_V: as many or more, a power of two.
    """
    blocks = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % blocks * ROWS
    head = tl.program_id(0) // blocks
    _sum_rows(dk_splits, dk, row, head, rows, heads, SPLITS, D, COLUMNS)
    _sum_rows(dv_splits, dv, row, head, rows, heads, SPLITS, DV, COLUMNS_V)
