"""What torch has set when a call is made: the device that is current, and whether TF32 is allowed."""

import contextlib
from functools import cache

import torch

# Bound once: read at every call, a chain of attributes costs the host more than what it ends in.
_FLOAT32, _matmul = torch.float32, torch.backends.cuda.matmul


def is_current(device: torch.device) -> bool:
    """Whether Triton, which launches on the current device, will find the tensors there.

    Where it will, a backend enters no context: that costs the host as much as two allocations.
    """
    return _one_device() or device.type != "cuda" or device.index == torch.cuda.current_device()


@cache
def _one_device() -> bool:
    """Whether there is one GPU: then it is the current one, and asking costs the host more than this look-up."""
    return torch.cuda.device_count() == 1


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return what autocast casts to on devices of this kind, "cpu" or "cuda" or another; None where it is off.

    torch raises where it is asked about meta tensors, which hold nothing that could be cast.
    """
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def without_autocast(kind: str) -> contextlib.AbstractContextManager[object]:
    """Keep an autocast region of the caller from rounding float32 tiles to half; meta tensors as above."""
    return contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether the user has allowed torch to round factors of a product in this dtype, float32 alone, to TF32.

    torch raises where its older name for this, ``allow_tf32``, is read after the newer was written; the newer can be
    read whichever was.
    """
    return dtype is _FLOAT32 and bool(_matmul.fp32_precision == "tf32")
