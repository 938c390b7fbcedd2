"""Merges a partial result over other keys into the result so far, in one pass over memory (maths.md, eq. 11)."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewise.kernels.triton.launch import Launch
from tilewise.kernels.triton.primitives import LN2, LOG2E, head_offset
from tilewise.problem import Sizes, alignment_of
from tilewise.support.caches import registered

_ELEMENTS = 2048  # of out in a CTA of four warps: 16 a thread
_AT_LEAST = 16  # columns
# out (b, h, s, dv), lse (b, h, s), and max_logit as lse or None.
Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class MergeNumbers(NamedTuple):
    """The numbers of a call, for which the kernel is not specialised; ``tiles``: of a head's ``rows``."""

    rows: int
    heads: int
    tiles: int


@triton.jit
def merge_partial_kernel(out, lse, max_logit, part_out, part_lse, part_max, rounded, numbers, DV: tl.constexpr,
                         BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Merge ROWS rows of a head.

    lse' = ln(e^lse + e^part_lse);  out' = e^(lse − lse')·out + e^(part_lse − lse')·part_out

    Grid: (tiles · heads · batches,). Every tensor is a StridedTensor; out, lse and max_logit, float32, are updated in
    place, the latter None together with part_max; out' is written to rounded, in its dtype, unless that is None.
    numbers: MergeNumbers.
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
    (out, *_), (part_out, *_), tensors = result, part, (*result, *part, rounded)
    if not out.numel():
        return
    alignment = alignment_of([tensor.data_ptr() for tensor in tensors if tensor is not None])
    strides = tuple([None if tensor is None else tensor.stride() for tensor in tensors])
    dtypes = part_out.dtype, None if rounded is None else rounded.dtype
    merge_partial_launch(tuple(out.shape), strides, dtypes, out.device, alignment)(*tensors)


@registered
@lru_cache(maxsize=1024)
def merge_partial_launch(shape: Sizes, strides: tuple[Sizes | None, ...], dtypes: tuple[torch.dtype | None, ...],
                         device: torch.device, alignment: tuple[bool, ...]) -> Launch:
    """Bind the kernel: call what is returned with out, lse and max_logit of the result, of the part, and rounded.

    Args:
        shape: of out.
        strides: of these seven; None of what is not there.
        dtypes: of the part's out, and of rounded or None.
        device, alignment: of all, and which of those that are there begin at a multiple of 16 bytes: a launch keeps
            the kernel of its first call.
    """
    del dtypes, device, alignment
    b, heads, rows, dv = shape
    block = max(_AT_LEAST, 1 << (dv - 1).bit_length())
    at_once = max(1, _ELEMENTS // block)
    tiles = -(-rows // at_once)
    scalars = MergeNumbers(rows, heads, tiles), dv, block, at_once
    return Launch(merge_partial_kernel, tiles * heads * b, scalars, strides, num_warps=4, num_stages=1)
