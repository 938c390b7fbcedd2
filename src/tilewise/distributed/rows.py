"""Some rows of (b, heads, rows, d): views, and copies and sums, on a GPU by a kernel that goes over memory once."""

import torch

from tilewise.backends._support.triton import why_not_at_all
from tilewise.masks import Span

_DIMS = 4  # of what the kernel takes


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels take a tensor: of its device, and of its dtype."""
    return tensor.device.type == "cuda" and why_not_at_all(tensor.dtype) is None


def rows_of(tensor: torch.Tensor, rows: Span, heads: Span | None = None) -> torch.Tensor:
    """Return a view of some rows, and heads, of (b, heads, rows) or (b, heads, rows, d).

    It is the tensor itself where these are all: a view costs the host 2 us.
    """
    _, all_heads, all_rows, *_ = tensor.shape
    has_heads = heads is None or heads.stop - heads.start == all_heads
    if has_heads and rows.stop - rows.start == all_rows:
        return tensor
    if heads is None:
        return tensor[:, :, rows.start:rows.stop]
    return tensor[:, heads.start:heads.stop, rows.start:rows.stop]


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
