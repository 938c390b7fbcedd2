"""cuDNN and its front end: which are here, and a handle of each thread for each device."""

import importlib
import threading
from functools import cache
from typing import Any

import torch

from tilewise.support.packages import package_version

_handles = threading.local()


@cache
def frontend_version() -> tuple[int, int] | None:
    """Version of the front end, its first two numbers; None where it is not installed."""
    return package_version("cudnn", "nvidia-cudnn-frontend")


@cache
def library_version() -> tuple[int, int, int] | None:
    """Version of the cuDNN that torch runs with, (9, 19, 0); None for a torch without it."""
    cudnn: Any = torch.backends.cudnn
    number = cudnn.version()
    return None if number is None else (number // 10000, number // 100 % 100, number % 100)


@cache
def frontend() -> Any:
    """Import the front end: late, as it takes a while and is optional."""
    return importlib.import_module("cudnn")


def handle_of(device: torch.device) -> Any:
    """Return this thread's handle for the device, which must be current, set to the stream that is current now.

    A handle carries its stream and scratch state, so that no two threads share one.
    """
    held: dict[int, Any] = _handles.__dict__.setdefault("of_device", {})
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in held:
        held[index] = frontend().create_handle()
    frontend().set_stream(held[index], stream_of(index))
    return held[index]


def stream_of(index: int) -> int:
    """Return the address of the stream that is current on a device.

    As Triton's launches ask for it: torch.cuda.current_stream makes an object of it first, at every call.
    """
    return int(torch._C._cuda_getCurrentRawStream(index))
