"""Launching a Hopper kernel: its arguments from a problem, and what it counts or sums in."""

import functools
import math
from typing import Any, Protocol

import torch

from tilewise.masks import Span
from tilewise.problem import AttentionProblem, legal_strides

# What keys and values of one section of heads may take of L2 (50 MiB on an H200): 24 and 48 were no better.
_SECTION_BYTES = 32 * 2**20
# The same for q, dout and the sums for dq: what the trial used.
_BACKWARD_SECTION_BYTES = 24 * 2**20
_KEYS = 128  # keys of a program of the backward kernel
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
        self.blocks = [[1, 1, size, width] for size in (64, config.keys, config.keys, 64)]
        self.layouts = [gl.NVMMASharedLayout.get_default_for(block, self.dtype) for block in self.blocks]

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Enqueue the kernel on the current stream of the current device."""
        self.kernel[self.grid](*self.arguments(tensors, _counter(tensors[0].device)), *self.scalars, **OPTIONS)

    def arguments(self, tensors: tuple[torch.Tensor, ...], counter: torch.Tensor) -> tuple[Any, ...]:
        """Descriptors of q, k, v and out, then lse and the counter."""
        q, k, v, out, lse = tensors
        k, v = _rows(k, self.keys), _rows(v, self.keys)
        described = [self.describe(tensor, list(tensor.shape), legal_strides(tensor), block, layout)
                     for tensor, block, layout in zip((q, k, v, out), self.blocks, self.layouts, strict=True)]
        return (*described, lse, counter)


class HopperBackwardShape(Protocol):
    """What the backward kernel reads of its config (tilewise.tuning.configs)."""

    @property
    def queries(self) -> int:
        """Queries a step."""

    @property
    def stages(self) -> int:
        """Tiles of q in flight."""

    @property
    def out_stages(self) -> int:
        """Tiles of dout in flight."""

    @property
    def ahead(self) -> bool:
        """Whether a step computes the next one's scores."""

    @property
    def direct(self) -> bool:
        """Whether dQ is added from registers."""

    def width(self, problem: AttentionProblem) -> int:
        """Width of a head inside the tiles."""


class HopperBackward:
    """The backward kernels bound to a problem; call it with (q, k, v, dout, lse, delta, dq, dk, dv).

    delta: as the Triton backend's kernel computes it. Gradients: a last stride of 1, the others legal for a descriptor.
    """

    def __init__(self, problem: AttentionProblem, config: HopperBackwardShape) -> None:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from tilewise.kernels.gluon.hopper_backward import Shape, hopper_backward_kernel
        from tilewise.kernels.gluon.hopper_dq import hopper_dq_kernel

        self.kernel, self.dq_kernel, self.describe = hopper_backward_kernel, hopper_dq_kernel, TensorDescriptor
        self.config = config
        dtype = gl.bfloat16 if problem.dtype is torch.bfloat16 else gl.float16
        width, band = config.width(problem), problem.band
        tiles, lines = math.ceil(problem.sk / _KEYS), problem.b * problem.hk
        self.grid = (tiles * lines,)
        self.scalars = (
            tiles, problem.hk, problem.b, _backward_section(problem, width), problem.sq, problem.sk, band.lower or 0,
            band.upper or 0, problem.group, problem.scale, problem.scale * math.log2(math.e),
            Shape(width, config.queries, _KEYS // 64, config.stages, config.out_stages, config.ahead, config.direct,
                  band.lower is not None, band.upper is not None))
        self.blocks = [[1, 1, size, width] for size in (config.queries, 64, 64, config.queries, 64, 64)]
        self.layouts = [gl.NVMMASharedLayout.get_default_for(block, dtype) for block in self.blocks]
        # A part of dQ: half of a step, the columns of 64 queries or 64 of 128 queries.
        halves = config.queries == 64
        parts, columns = 2 * math.ceil(problem.sq / config.queries), width // 2 if halves else width
        self.sums_shape = (problem.b * problem.hq * parts * columns // 4, 256)
        self.sums_block = [columns // 4, 256]
        self.sums_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        self.dq_grid = (parts, problem.b * problem.hq)
        self.dq_scalars = (problem.sq, problem.hq, parts, problem.scale, problem.d, columns, halves)

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Enqueue the kernels on the current stream of the current device."""
        *inputs, dq, dk, dv = tensors
        sums = torch.zeros(self.sums_shape, dtype=torch.float32, device=dq.device)
        self.kernel[self.grid](*self.arguments((*inputs, dk, dv), sums), *self.scalars, **OPTIONS)
        self.dq_kernel[self.dq_grid](sums, dq, *dq.stride()[:3], *self.dq_scalars, num_warps=4)

    def arguments(self, tensors: tuple[torch.Tensor, ...], sums: torch.Tensor) -> tuple[Any, ...]:
        """Descriptors of q, k, v and dout; lse and delta; descriptors of dk and dv; the sums, or their descriptor."""
        q, k, v, dout, lse, delta, dk, dv = tensors
        described = [self.describe(tensor, list(tensor.shape), legal_strides(tensor), block, layout)
                     for tensor, block, layout in zip((q, k, v, dout, dk, dv), self.blocks, self.layouts, strict=True)]
        target = sums if self.config.direct else self.describe(sums, list(sums.shape), list(sums.stride()),
                                                               self.sums_block, self.sums_layout)
        return (*described[:4], lse, delta, *described[4:], target)


def _section(problem: AttentionProblem) -> int:
    """Heads of q whose keys and values are worked on together."""
    bytes_of_head = len(problem.seen_keys) * (problem.d + problem.dv) * problem.dtype.itemsize
    return max(1, _SECTION_BYTES // bytes_of_head) * problem.group


def _backward_section(problem: AttentionProblem, width: int) -> int:
    """Heads of k whose query heads' q, dout and sums for dq are worked on together."""
    bytes_of_head = problem.sq * (2 * problem.dtype.itemsize + 4) * width * problem.group
    return max(1, _BACKWARD_SECTION_BYTES // bytes_of_head)


def _rows(tensor: torch.Tensor, rows: Span) -> torch.Tensor:
    return tensor if len(rows) == tensor.shape[2] else tensor[:, :, rows.start:rows.stop]


def _counter(device: torch.device) -> torch.Tensor:
    """A zero that the kernel counts up from and leaves as it was.

    Launches of one stream come one after another and share it. Those of a captured graph may run beside anything, and
    get one of their own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _counter_of_stream(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _counter_of_stream(device: torch.device, stream: int) -> torch.Tensor:
    del stream
    return torch.zeros(1, dtype=torch.int32, device=device)
