"""Copies and sums of some rows of (b, heads, rows, d): on a GPU by one kernel that reads and writes memory once."""

import torch

from tilewise.backends._support.triton import why_not_at_all

_DIMS = 4  # of what the kernel takes


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels take a tensor: of its device, and of its dtype."""
    return tensor.device.type == "cuda" and why_not_at_all(tensor.dtype) is None


def write_rows(out: torch.Tensor, part: torch.Tensor, total: torch.Tensor | None = None) -> None:
    """Write part, or total + part, to out in its dtype.

    Args:
        out: (b, heads, rows, d), with any strides; of other dims by torch.
        part, total: of that shape, in any float dtype; total may be out.
    """
    if out.dim() == _DIMS and has_kernels(out) and has_kernels(part):
        from tilewise.kernels.triton import write_rows as by_triton

        with torch.cuda.device(out.device):
            by_triton.write_rows(out, part, total)
    elif total is None:
        out.copy_(part)
    else:
        torch.add(total, part, out=out)
