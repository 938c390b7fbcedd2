"""Lengths that never change, on the device: one tensor for good where a launch at every call would write the same.

cuDNN wants the lengths of queries and of keys, or none: where a call gives those of one side, or none and they are
wanted nevertheless, the others are a constant.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_MOST = 4096  # each half a KiB of a device's memory; calls of more sizes write theirs each time
_kept: dict[tuple[int, int, torch.device], torch.Tensor] = {}


def constant_lengths(count: int, length: int, device: torch.device) -> torch.Tensor | None:
    """Return int32 (count,) of equal lengths that is never freed; None where there is none yet and none may be made.

    Never freed, it may be read on every stream and by every CUDA graph: no order with its reuse is to be kept. It is
    made in a thread and on a stream of its own, and waited for: what redirects the caller's allocations, as torch's
    CUDA graph trees do, would count it as theirs. None is made while the caller's stream is captured.
    """
    key = count, length, device
    kept = _kept.get(key)
    if kept is not None or len(_kept) >= _MOST or torch.cuda.is_current_stream_capturing():
        return kept
    with ThreadPoolExecutor(1) as maker:
        return _kept.setdefault(key, maker.submit(_filled, count, length, device).result())


def _filled(count: int, length: int, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.full((count,), length, dtype=torch.int32, device=device)
    new_stream: Any = torch.cuda.Stream  # untyped in torch
    stream = new_stream(device)
    with torch.cuda.stream(stream):
        made = torch.full((count,), length, dtype=torch.int32, device=device)
    stream.synchronize()
    return made
