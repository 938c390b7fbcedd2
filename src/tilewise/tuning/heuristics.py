"""Problem and device to config, where no table has a row. Pure functions; each number has its reason."""

from dataclasses import replace
from typing import TypeVar

from tilewise.problem import AttentionProblem, padded_dim
from tilewise.tuning.configs import DeltaConfig, DkdvConfig, DqConfig, ForwardConfig
from tilewise.tuning.device import DeviceSpec

Config = TypeVar("Config", ForwardConfig, DkdvConfig, DqConfig)


def forward_config(problem: AttentionProblem, device: DeviceSpec) -> ForwardConfig:
    """Tile of the forward kernel."""
    if device.arch == "interpreter":
        return ForwardConfig(64, 64, 4, 1)
    width = max(padded_dim(problem.d), padded_dim(problem.dv))
    if problem.dtype.itemsize == 4:
        return _fitting(ForwardConfig(64, 32, 4, 2), problem, device)
    if width <= 64:
        return _fitting(ForwardConfig(128, 64, 4, 3), problem, device)
    if width <= 128:
        return _fitting(ForwardConfig(128, 64, 8, 3), problem, device)
    return _fitting(ForwardConfig(128, 64, 8, 2), problem, device)


def dkdv_config(problem: AttentionProblem, device: DeviceSpec) -> DkdvConfig:
    """Tile of the dK/dV kernel."""
    if device.arch == "interpreter":
        return DkdvConfig(64, 64, 4, 1)
    width = max(padded_dim(problem.d), padded_dim(problem.dv))
    if problem.dtype.itemsize == 4:
        return _fitting(DkdvConfig(32, 64, 4, 1), problem, device)
    if width <= 64:
        return _fitting(DkdvConfig(64, 128, 8, 2), problem, device)
    if width <= 128:
        return _fitting(DkdvConfig(64, 128, 8, 2), problem, device)
    return _fitting(DkdvConfig(32, 64, 8, 2), problem, device)


def dq_config(problem: AttentionProblem, device: DeviceSpec) -> DqConfig:
    """Tile of the dQ kernel."""
    if device.arch == "interpreter":
        return DqConfig(64, 64, 4, 1)
    width = max(padded_dim(problem.d), padded_dim(problem.dv))
    if problem.dtype.itemsize == 4:
        return _fitting(DqConfig(64, 32, 4, 1), problem, device)
    if width <= 64:
        return _fitting(DqConfig(128, 64, 8, 2), problem, device)
    if width <= 128:
        return _fitting(DqConfig(128, 64, 8, 2), problem, device)
    return _fitting(DqConfig(64, 32, 8, 2), problem, device)


def delta_config(problem: AttentionProblem, device: DeviceSpec) -> DeltaConfig:
    """Tile of the delta kernel: about 16 KiB of out and dout in flight a program."""
    del device
    return DeltaConfig(block_m=max(16, 4096 // padded_dim(problem.dv)), num_warps=4)


def _fitting(config: Config, problem: AttentionProblem, device: DeviceSpec) -> Config:
    """Shrink a config until it fits the device's shared memory: pipeline depth first, then the streamed tile."""
    streamed = "block_m" if isinstance(config, DkdvConfig) else "block_n"
    resident = "block_n" if isinstance(config, DkdvConfig) else "block_m"
    while config.shared_bytes(problem) > device.shared_memory:
        if config.num_stages > 1:
            config = replace(config, num_stages=config.num_stages - 1)
        elif getattr(config, streamed) > 16:
            config = replace(config, **{streamed: getattr(config, streamed) // 2})
        else:
            config = replace(config, **{resident: getattr(config, resident) // 2})
    return config
