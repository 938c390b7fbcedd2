"""Copies rows of a tensor, or adds them to others, and rounds what comes out, in one pass over memory.

torch's own kernels have wide loads and stores for dense tensors alone: of some rows of each head they reach a third of
the memory's speed in 16 bits, and half of it in float32 (benchmarks/journal/context-parallel.md).
"""

import torch
import triton
import triton.language as tl

from tilewise.kernels.triton.primitives import head_offset
from tilewise.kernels.triton.row_tiles import launch_on_rows


@triton.jit
def write_rows_kernel(out, part, total, numbers, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Write part, or the sum of total and part in float32, to ROWS rows of a head of out, in its dtype.

    Grid: (tiles · heads · batches,). Every tensor is a StridedTensor; total is None, or out itself, or apart from it.
    numbers: RowNumbers.
    """
    tile = tl.program_id(0) % numbers.tiles
    head = tl.program_id(0) // numbers.tiles % numbers.heads
    batch = tl.program_id(0) // numbers.tiles // numbers.heads
    own = tile * ROWS + tl.arange(0, ROWS)
    rows = own.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    there = (own < numbers.rows)[:, None] & (offs_d < D)[None, :]
    part_rows = part.ptr + head_offset(batch, head, part.stride_b, part.stride_h) + rows * part.stride_s
    found = tl.load(part_rows[:, None] + (offs_d * part.stride_d)[None, :], mask=there, other=0.0)  # [ROWS, BLOCK_D]
    if total is not None:
        total_rows = total.ptr + head_offset(batch, head, total.stride_b, total.stride_h) + rows * total.stride_s
        so_far = tl.load(total_rows[:, None] + (offs_d * total.stride_d)[None, :], mask=there, other=0.0)
        found = so_far.to(tl.float32) + found.to(tl.float32)
    out_rows = out.ptr + head_offset(batch, head, out.stride_b, out.stride_h) + rows * out.stride_s
    tl.store(out_rows[:, None] + (offs_d * out.stride_d)[None, :], found, mask=there)


def write_rows(out: torch.Tensor, part: torch.Tensor, total: torch.Tensor | None = None) -> None:
    """Write part, or total + part, to out, on the current stream of the current device.

    Args:
        out: (b, h, s, d), of 16 or 32 bits, with any strides.
        part, total: of the same shape, as out; total may be out.
    """
    launch_on_rows(write_rows_kernel, out, (out, part, total))
