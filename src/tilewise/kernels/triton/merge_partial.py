"""Merges a partial result over other keys into the result so far, in one pass over memory (maths.md, eq. 11)."""

import torch
import triton
import triton.language as tl

from tilewise.kernels.triton.primitives import LN2, LOG2E, head_offset
from tilewise.kernels.triton.row_tiles import launch_on_rows

# out (b, h, s, dv), lse (b, h, s), and max_logit as lse or None.
Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@triton.jit
def merge_partial_kernel(out, lse, max_logit, part_out, part_lse, part_max, rounded, numbers, DV: tl.constexpr,
                         BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Merge ROWS rows of a head.

    lse' = ln(e^lse + e^part_lse);  out' = e^(lse − lse')·out + e^(part_lse − lse')·part_out

    Grid: (tiles · heads · batches,). Every tensor is a StridedTensor; out, lse and max_logit, float32, are updated in
    place, the latter None together with part_max; out' is written to rounded, in its dtype, unless that is None.
    numbers: RowNumbers.
    """
    tile = tl.program_id(0) % numbers.tiles
    head = tl.program_id(0) // numbers.tiles % numbers.heads
    batch = tl.program_id(0) // numbers.tiles // numbers.heads
    own = tile * ROWS + tl.arange(0, ROWS)
    inside = own < numbers.rows
    rows = own.to(tl.int64)
    lse_ptrs = lse.ptr + head_offset(batch, head, lse.stride_b, lse.stride_h) + rows * lse.stride_s
    part_lse_ptrs = (part_lse.ptr + head_offset(batch, head, part_lse.stride_b, part_lse.stride_h)
                     + rows * part_lse.stride_s)
    before = tl.load(lse_ptrs, mask=inside, other=float("-inf"))  # [ROWS]
    added = tl.load(part_lse_ptrs, mask=inside, other=float("-inf"))  # [ROWS]
    greater = tl.maximum(before, added)
    # Infinities are shifted by 0, since ∞ − ∞ is NaN: a row that has seen no key yet has an lse of −inf.
    shift = tl.where(tl.abs(greater) == float("inf"), 0.0, greater)
    weight = tl.exp2((before - shift) * LOG2E) + tl.exp2((added - shift) * LOG2E)
    is_empty = weight == 0.0
    subtracted = shift + LN2 * tl.log2(tl.where(is_empty, 1.0, weight))
    total = tl.where(is_empty, float("-inf"), subtracted)

    offs_d = tl.arange(0, BLOCK_D)
    there = inside[:, None] & (offs_d < DV)[None, :]
    out_rows = out.ptr + head_offset(batch, head, out.stride_b, out.stride_h) + rows * out.stride_s
    part_rows = part_out.ptr + head_offset(batch, head, part_out.stride_b, part_out.stride_h) + rows * part_out.stride_s
    out_ptrs = out_rows[:, None] + (offs_d * out.stride_d)[None, :]
    so_far = tl.load(out_ptrs, mask=there, other=0.0)  # [ROWS, BLOCK_D]
    part = tl.load(part_rows[:, None] + (offs_d * part_out.stride_d)[None, :], mask=there, other=0.0)  # [ROWS, BLOCK_D]
    tl.debug_barrier()  # several threads have read each row's numbers, and each writes them: not before all have read
    tl.store(lse_ptrs, total, mask=inside)
    kept, new = tl.exp2((before - subtracted) * LOG2E), tl.exp2((added - subtracted) * LOG2E)
    merged = so_far * kept[:, None] + part.to(tl.float32) * new[:, None]
    if rounded is None:
        tl.store(out_ptrs, merged, mask=there)
    else:
        rounded_rows = rounded.ptr + head_offset(batch, head, rounded.stride_b, rounded.stride_h)
        rounded_rows += rows * rounded.stride_s
        tl.store(rounded_rows[:, None] + (offs_d * rounded.stride_d)[None, :], merged, mask=there)
    if max_logit is not None:
        max_ptrs = max_logit.ptr + head_offset(batch, head, max_logit.stride_b, max_logit.stride_h)
        max_ptrs += rows * max_logit.stride_s
        part_max_ptrs = part_max.ptr + head_offset(batch, head, part_max.stride_b, part_max.stride_h)
        part_max_ptrs += rows * part_max.stride_s
        largest = tl.load(max_ptrs, mask=inside, other=0.0)
        of_part = tl.load(part_max_ptrs, mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(max_ptrs, tl.maximum(largest, of_part, propagate_nan=tl.PropagateNan.ALL), mask=inside)


def merge_partial(result: Partial, part: Partial, rounded: torch.Tensor | None = None) -> None:
    """Merge a part into the result so far, in place, on the current stream of the current device.

    Args:
        result: float32, with any strides.
        part: of other keys and the same rows, on the same device; out in any float dtype, the others float32. It has
            a max_logit where the result has one.
        rounded: where out is written instead of the result's, of any float dtype.
    """
    launch_on_rows(merge_partial_kernel, result[0], (*result, *part, rounded))
