"""Which kernels make dQ of the Triton backend, and on its way or by one of their own the gradient of a bias."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from tilewise.backends._support.hopper import sums_dbias, untrusted
from tilewise.kernels.triton.launch import Launch
from tilewise.problem import AttentionProblem, Sizes
from tilewise.tuning.device import device_spec
from tilewise.tuning.select import dbias_launches, entries_config, hopper_dbias_config, triton_config

if TYPE_CHECKING:
    from tilewise.kernels.hopper.backward.launch_dbias import HopperDbias
    from tilewise.kernels.triton.bias_gradient import BiasGradientSums
    from tilewise.kernels.triton.config import TileConfig


def dq_launches(
        problem: AttentionProblem, precision: str, dout_strides: Sizes, dq_strides: Sizes, *, descriptors: bool,
        dbias: bool, dq_is_made: bool = False) -> "tuple[Launch | BiasGradientSums, Launch | HopperDbias | None]":
    """Return what makes dQ, and the kernel of its own that makes a bias's gradient; None where dQ's makes that too.

    Args:
        problem: of the backward pass.
        precision: of float32 products.
        dout_strides, dq_strides: how dout and dq lie in memory.
        descriptors: whether the tensors may come through them.
        dbias: whether the gradient of the bias is wanted.
        dq_is_made: whether other kernels have made dQ, so that to launch it here serves what it sums on its way alone.
    """
    from tilewise.kernels.triton.bias_gradient import BiasGradientSums, sees_alike
    from tilewise.kernels.triton.dq import dq_launch

    spec = device_spec(problem.device)
    config = triton_config("dq", problem, spec, descriptors=descriptors)
    entries, own = 0, None
    if dbias:
        entries, own = _dbias_of(problem, config, precision, dout_strides, descriptors, dq_is_made)
    at_once = 1
    if entries > 1 and sees_alike(problem):
        together = entries_config(problem, spec)
        config, at_once = (config, 1) if together is None else (together, together.entries)
    bind_dq = partial(dq_launch, problem, config, precision, dout_strides, dq_strides)
    return BiasGradientSums(problem, entries, at_once, bind_dq) if entries else bind_dq(), own


def _dbias_of(problem: AttentionProblem, dq_config: "TileConfig", precision: str, dout_strides: Sizes,
              descriptors: bool, dq_is_made: bool) -> "tuple[int, Launch | HopperDbias | None]":
    """Say how a bias has its gradient: on dQ's way, in how many launches, or by which kernel of its own.

    0 and None where it lacks a query or a key dim.
    """
    from tilewise.kernels.triton.dbias import dbias_launch

    spec = device_spec(problem.device)
    entries = dbias_launches(problem, dq_config, spec)
    tile = None
    if descriptors and sums_dbias(problem):
        tile = hopper_dbias_config(problem, entries, dq_is_made=dq_is_made)
    if tile is not None and untrusted("dbias", problem.device) is None:
        from tilewise.kernels.hopper.backward.launch_dbias import HopperDbias

        num_sms = torch.cuda.get_device_properties(problem.device).multi_processor_count
        return 0, HopperDbias(problem, tile, num_sms)
    if entries:
        return entries, None
    return 0, dbias_launch(problem, triton_config("dbias", problem, spec, descriptors=descriptors), precision,
                           dout_strides)
