"""Which tile a problem gets, and what else is chosen for it: all that backends ask of tuning.

A table's row decides where one was measured (table.py, tables/<device>/), else a heuristic, a file a family of kernels:

* Triton: :func:`triton_config`, else heuristics_triton.py, which also has what no table is made of.
* Hopper: :func:`hopper_forward_config` and :func:`hopper_backward_config`, else heuristics_hopper.py, which asks
  wave_model.py, window_model.py and ctas_per_head.py; then schedules_hopper.py says how a kernel goes through a call
  with that tile, and group_splits.py among how many of them the backward pass splits a group of query heads.
* CUDA in float32 and decoding have no tables: heuristics_cuda.py, heuristics_decode.py.
"""

from tilewise.kernels.hopper.backward.config import HopperBackwardConfig
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.problem import AttentionProblem
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.group_splits import choose_group_splits
from tilewise.tuning.heuristics_cuda import CUDA_DELTA, CUDA_SPLIT, backward_kernels, cuda_config
from tilewise.tuning.heuristics_decode import choose_splits, decode_config
from tilewise.tuning.heuristics_hopper import NUM_SMS, backward_heuristic, forward_heuristic, hopper_dbias_config
from tilewise.tuning.heuristics_triton import (
    dbias_launches,
    delta_config,
    entries_config,
    single_tile_config,
    split_dkdv,
    tile_heuristic,
    wants_descriptors,
)
from tilewise.tuning.kinds import TritonConfig
from tilewise.tuning.schedules_hopper import backward_schedule, forward_schedule
from tilewise.tuning.table import backward_config_of, forward_config_of, hopper_row, triton_config_of, triton_row

__all__ = [
    "triton_config", "wants_descriptors", "split_dkdv", "single_tile_config", "delta_config", "dbias_launches",
    "entries_config",
    "hopper_forward_config", "forward_schedule", "hopper_backward_config", "backward_schedule", "choose_group_splits",
    "hopper_dbias_config",
    "cuda_config", "backward_kernels", "CUDA_DELTA", "CUDA_SPLIT",
    "decode_config", "choose_splits",
]


def triton_config(kernel: str, problem: AttentionProblem, device: DeviceSpec, *, descriptors: bool) -> TritonConfig:
    """Return the table's config for the problem, else the heuristic one; arguments as of ``tile_heuristic``."""
    row = triton_row(kernel, problem, device, descriptors=descriptors)
    if row is None:
        return tile_heuristic(kernel, problem, device, descriptors=descriptors)
    return triton_config_of(kernel, row)


def hopper_forward_config(problem: AttentionProblem, device: DeviceSpec,
                          num_sms: int = NUM_SMS) -> HopperForwardConfig:
    """Return the table's config for the problem, else the heuristic one."""
    own = forward_heuristic(problem, num_sms)
    row = hopper_row("hopper_forward", problem, device, own)
    return own if row is None else forward_config_of(row)


def hopper_backward_config(problem: AttentionProblem, device: DeviceSpec,
                           num_sms: int = NUM_SMS) -> HopperBackwardConfig:
    """Return the table's config for the problem, else the heuristic one; so too where a bias does not fit beside it."""
    own = backward_heuristic(problem, num_sms)
    row = hopper_row("hopper_backward", problem, device, own)
    measured = own if row is None else backward_config_of(row)
    return measured if measured.fits(problem) else own
