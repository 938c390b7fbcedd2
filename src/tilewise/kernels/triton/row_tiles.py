"""Launches of kernels that go over the rows of (b, h, s, d) tensors, some rows of a head in each CTA."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tilewise.kernels.triton.launch import Launch
from tilewise.problem import Sizes, alignment_of
from tilewise.support.caches import registered

_ELEMENTS = 2048  # of a tensor in a CTA of four warps: 16 a thread
_AT_LEAST = 16  # columns


class RowNumbers(NamedTuple):
    """The numbers of a call, for which a kernel is not specialised; ``tiles``: of a head's ``rows``."""

    rows: int
    heads: int
    tiles: int


def launch_on_rows(kernel: Any, out: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> None:
    """Launch a kernel on the current stream of the current device, unless there is no row.

    Args:
        kernel: takes the tensors, each a StridedTensor or None, then RowNumbers, D, BLOCK_D and ROWS.
        out: (b, h, s, d), whose rows it goes over.
        tensors: what it takes.
    """
    if not out.numel():
        return
    alignment = alignment_of([tensor.data_ptr() for tensor in tensors if tensor is not None])
    strides = tuple([None if tensor is None else tensor.stride() for tensor in tensors])
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
    rows_launch(kernel, tuple(out.shape), strides, dtypes, out.device, alignment)(*tensors)


@registered
@lru_cache(maxsize=1024)
def rows_launch(kernel: Any, shape: Sizes, strides: tuple[Sizes | None, ...], dtypes: tuple[torch.dtype | None, ...],
                device: torch.device, alignment: tuple[bool, ...]) -> Launch:
    """Bind a kernel: call what is returned with its tensors.

    Args:
        kernel: as of :func:`launch_on_rows`.
        shape: of the tensor whose rows it goes over.
        strides, dtypes: of all tensors; None of what is not there.
        device, alignment: of all, and which of those that are there begin at a multiple of 16 bytes: a launch keeps
            the kernel of its first call.
    """
    del dtypes, device, alignment
    b, heads, rows, d = shape
    block = max(_AT_LEAST, 1 << (d - 1).bit_length())
    at_once = max(1, _ELEMENTS // block)
    tiles = -(-rows // at_once)
    return Launch(kernel, tiles * heads * b, (RowNumbers(rows, heads, tiles), d, block, at_once), strides, num_warps=4,
                  num_stages=1)
