"""Launching the Hopper kernel for the gradient of a shared bias: its arguments from a problem."""

import math
from typing import Any

import torch

from tilewise.kernels.enqueue import Enqueue
from tilewise.kernels.hopper.arguments import BiasGrid, BiasStrides, MaskBounds, Sharing
from tilewise.kernels.hopper.backward.config import HopperDbiasConfig
from tilewise.kernels.hopper.launch import OPTIONS
from tilewise.problem import AttentionProblem, legal_strides


class HopperDbias:
    """The kernel bound to a problem whose bias has a query and a key dim.

    Call it as the Triton backend's own kernel for this, with (q, k, v, dout, lse, delta, dbias, modifiers), of which it
    reads the bias. q, k, v and dout are legal for a descriptor, lse and delta contiguous, dbias is dense.
    """

    def __init__(self, problem: AttentionProblem, config: HopperDbiasConfig, num_sms: int) -> None:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from tilewise.kernels.hopper.backward.dbias import hopper_dbias_kernel
        from tilewise.kernels.hopper.backward.dbias_tiles import BLOCKS_PER_TILE, TILE_QUERIES
        from tilewise.kernels.hopper.backward.dbias_types import Config

        bias = problem.scores.bias
        assert bias is not None
        own_batches, own_heads, size_q, size_k = bias.shape
        dense = (own_heads * size_q * size_k, size_q * size_k, size_k, 1)
        shared_heads = problem.hq // own_heads
        bias_heads = own_batches * own_heads
        m_blocks = math.ceil(size_q / int(TILE_QUERIES))
        n_blocks = math.ceil(size_k / (64 * int(BLOCKS_PER_TILE)))
        band, dtype = problem.band, gl.bfloat16 if problem.dtype is torch.bfloat16 else gl.float16
        block = [1, 1, 64, config.columns(problem)]
        self.describe, self.form = TensorDescriptor, (block, gl.NVMMASharedLayout.get_default_for(block, dtype))
        self.kernel = hopper_dbias_kernel
        self.grid = (min(bias_heads * m_blocks * n_blocks, num_sms),)
        self.scalars = (
            BiasStrides(*bias.strides), MaskBounds(size_q, size_k, band.lower or 0, band.upper or 0),
            Sharing(own_heads, shared_heads, problem.b // own_batches * shared_heads, problem.group),
            BiasGrid(m_blocks, n_blocks, bias_heads), problem.hq, problem.scale * math.log2(math.e),
            Config(WIDTH=block[3], Q_STAGES=config.q_stages, KV_STAGES=config.stages, BIAS_VECTOR=bias.vector,
                   DBIAS_VECTOR=bias._replace(strides=dense).vector, HAS_LOWER=band.lower is not None,
                   HAS_UPPER=band.upper is not None))
        self.enqueue = Enqueue(self.kernel, self.grid, self.scalars, OPTIONS,
                               specialized=self.kernel.arg_names.index("strides"))

    def __call__(self, *tensors: Any) -> None:
        """Enqueue the kernel on the current stream of the current device."""
        *read, dbias, modifiers = tensors
        mine = (*read, modifiers.bias.ptr, dbias)
        self.enqueue(tuple([tensor.data_ptr() for tensor in mine]), lambda: self.arguments(mine))

    def arguments(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Return descriptors of q, k, v and dout, and lse, delta, the bias and its gradient as they are."""
        described = [self.describe(tensor, list(tensor.shape), legal_strides(tensor), *self.form)
                     for tensor in tensors[:4]]
        return (*described, *tensors[4:])
