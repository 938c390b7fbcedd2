"""What the Triton kernels take of a dtype and a device, for attention and for decoding."""

import importlib.util
import os
from functools import cache

import torch

from tilewise.backends._support.current import allows_tf32

PLANS = 1024  # problems whose plans are kept


def why_not_at_all(dtype: torch.dtype) -> str | None:
    """Return why no kernel computes in this dtype, or none at all."""
    if not _installed():
        return "Triton is not installed; CUDA and ROCm builds of torch bring it, others need tilewise[triton]"
    if dtype is torch.float64:
        return "computes in float16, bfloat16 and float32, got float64; backend='reference' takes it"
    return None


def why_not_here(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why no kernel runs on this device."""
    if device.type == "cuda":
        return None
    if device.type != "cpu":
        return f"runs on CUDA and ROCm devices, got {device}"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "runs on CUDA and ROCm devices, got cpu; to interpret it there, start with TRITON_INTERPRET=1"
    if dtype is torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly; use float16 or float32 on the CPU"
    return None


def precision_of(dtype: torch.dtype) -> str:
    """How float32 products are made: exactly, unless the user allowed TF32 in torch's own settings."""
    return "tf32" if allows_tf32(dtype) else "ieee"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
