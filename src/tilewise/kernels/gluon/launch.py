"""Launching a Hopper kernel: its arguments from a problem, and the counter that hands out its tiles."""

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tilewise.kernels.gluon.enqueue import Enqueue
from tilewise.masks import Span
from tilewise.problem import AttentionProblem, legal_strides

# What keys and values of one section of heads may take of L2 (50 MiB on an H200): 24 and 48 were no better.
_SECTION_BYTES = 32 * 2**20
# A warpgroup is four warps. Contracting a·b + c into one rounding is what the softmax's cost counts on; Triton 3.10
# changes the default, and 3.9 warns of it.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


class HopperShape(Protocol):
    """What the kernel reads of its config (tilewise.tuning.configs)."""

    @property
    def keys(self) -> int:
        """Keys a step."""

    @property
    def consumers(self) -> int:
        """Warpgroups that attend."""

    @property
    def stages(self) -> int:
        """Pairs of K and V in flight."""

    @property
    def query_stages(self) -> int:
        """Tiles of queries in flight."""

    @property
    def ping_pong(self) -> bool:
        """Whether the warpgroups take turns."""

    def width(self, problem: AttentionProblem) -> int:
        """Width of a head inside the tiles."""


class HopperForward:
    """The forward kernel bound to a problem; call it with (q, k, v, out, lse).

    ``multiprocessors``: of the device; one program runs on each.
    """

    def __init__(self, problem: AttentionProblem, config: HopperShape, multiprocessors: int) -> None:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from tilewise.kernels.gluon.hopper_forward import Shape, hopper_forward_kernel

        self.kernel, self.describe = hopper_forward_kernel, TensorDescriptor
        self.keys = problem.seen_keys
        self.dtype = gl.bfloat16 if problem.dtype is torch.bfloat16 else gl.float16
        width = config.width(problem)
        band, first, rows = problem.band, self.keys.start, 64 * config.consumers
        tiles = math.ceil(problem.sq / rows)
        total = tiles * problem.hq * problem.b
        self.grid = (min(total, multiprocessors),)
        # Keys count from the first one that is seen: those before it are not read.
        self.scalars = (
            tiles, problem.hq, problem.b, _section(problem), problem.sq, len(self.keys),
            0 if band.lower is None else band.lower - first, 0 if band.upper is None else band.upper - first,
            problem.group, problem.scale * math.log2(math.e),
            Shape(width, config.keys, config.consumers, config.stages, config.query_stages, config.ping_pong,
                  band.lower is not None, band.upper is not None,
                  config.consumers > 2 and band.lower is None and band.upper is not None))
        self.enqueue = Enqueue(self.kernel, self.grid, self.scalars, OPTIONS)
        self.blocks = [[1, 1, size, width] for size in (64, config.keys, config.keys, 64)]
        self.layouts = [gl.NVMMASharedLayout.get_default_for(block, self.dtype) for block in self.blocks]

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Enqueue the kernel on the current stream of the current device."""
        counter = _counter(tensors[0].device)
        q, k, v, out, lse = tensors
        self.enqueue((q.data_ptr(), _address(k, self.keys), _address(v, self.keys), out.data_ptr(), lse.data_ptr(),
                      counter.data_ptr()), lambda: self.arguments(tensors, counter))

    def arguments(self, tensors: tuple[torch.Tensor, ...], counter: torch.Tensor) -> tuple[Any, ...]:
        """Descriptors of q, k, v and out, then lse and the counter."""
        q, k, v, out, lse = tensors
        k, v = _rows(k, self.keys), _rows(v, self.keys)
        described = [self.describe(tensor, list(tensor.shape), legal_strides(tensor), block, layout)
                     for tensor, block, layout in zip((q, k, v, out), self.blocks, self.layouts, strict=True)]
        return (*described, lse, counter)


def _section(problem: AttentionProblem) -> int:
    """Heads of q whose keys and values are worked on together."""
    bytes_of_head = len(problem.seen_keys) * (problem.d + problem.dv) * problem.dtype.itemsize
    return max(1, _SECTION_BYTES // bytes_of_head) * problem.group


def _rows(tensor: torch.Tensor, rows: Span) -> torch.Tensor:
    return tensor if len(rows) == tensor.shape[2] else tensor[:, :, rows.start:rows.stop]


def _address(tensor: torch.Tensor, rows: Span) -> int:
    """Where :func:`_rows` begins, without making it."""
    start = tensor.data_ptr()
    return start + rows.start * tensor.stride(2) * tensor.itemsize if rows.start else start


def _counter(device: torch.device) -> torch.Tensor:
    """A zero that the kernel counts up from and leaves as it was.

    Launches of one stream come one after another and share it. Those of a captured graph may run beside anything, and
    get one of their own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _counter_of_stream(device, _streams()(device.index))


@functools.cache
def _streams() -> Callable[[int], int]:
    """What tells a device's current stream, as Triton asks for it; torch's own way makes an object of it."""
    from triton.runtime import driver

    return driver.active.get_current_stream


@functools.cache
def _counter_of_stream(device: torch.device, stream: int) -> torch.Tensor:
    del stream
    return torch.zeros(1, dtype=torch.int32, device=device)
