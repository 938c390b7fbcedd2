"""Whether a launch finds the tensors on the device that is current."""

from functools import cache

import torch


def is_current(device: torch.device) -> bool:
    """Whether Triton, which launches on the current device, will find the tensors there.

    Where it will, a backend enters no context: that costs the host as much as two allocations.
    """
    return _one_device() or device.type != "cuda" or device.index == torch.cuda.current_device()


@cache
def _one_device() -> bool:
    """Whether there is one GPU: then it is the current one, and asking costs the host more than this look-up."""
    return torch.cuda.device_count() == 1
