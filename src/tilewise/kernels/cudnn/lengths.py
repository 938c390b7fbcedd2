"""Lengths that never change, on the device: one tensor for good where a launch at every call would write the same.

cuDNN wants the lengths of queries and of keys, or none: where a call gives those of one side, or none and they are
wanted nevertheless, the others are a constant.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

_MOST = 4096  # tensors kept, of all devices; calls of more sizes write theirs each time
_LARGEST = 1024  # lengths of one of them: 4 KiB, so that all are 16 MiB at most
_kept: dict[tuple[int, int, torch.device], "_Constant"] = {}


@dataclass
class _Constant:
    """Equal lengths.

    Attributes:
        written: recorded behind what writes them, on the stream of the first call; None = known to have happened.
    """

    lengths: torch.Tensor
    written: Any


def constant_lengths(count: int, length: int, device: torch.device) -> torch.Tensor | None:
    """Return int32 (count,) of equal lengths that is never freed; None where there is none, or not safely yet.

    Never freed, it may be read on every stream and by every CUDA graph: no order with its reuse is to be kept. The host
    does not wait: until the writing has happened, the current stream does. While that is captured nothing is made, and
    only what is known to be written is taken, for a graph cannot wait for what lies outside of it.
    """
    key = count, length, device
    kept, capturing = _kept.get(key), torch.cuda.is_current_stream_capturing()
    if kept is None:
        if capturing or count > _LARGEST or len(_kept) >= _MOST:
            return None
        kept = _kept.setdefault(key, _made(count, length, device))
    if kept.written is not None and not capturing:
        if kept.written.query():
            kept.written = None
        else:
            torch.cuda.current_stream(device).wait_event(kept.written)
            return kept.lengths
    return kept.lengths if kept.written is None else None


def _made(count: int, length: int, device: torch.device) -> _Constant:
    """Write a constant, on the current stream.

    It is allocated in a thread of its own: what redirects the caller's allocations, as torch's CUDA graph trees do,
    would count it as theirs.
    """
    with ThreadPoolExecutor(1) as allocating:
        lengths = allocating.submit(lambda: torch.empty(count, dtype=torch.int32, device=device)).result()
    lengths.fill_(length)
    if device.type != "cuda":
        return _Constant(lengths, None)
    new_event: Any = torch.cuda.Event  # untyped in torch
    written = new_event()
    written.record(torch.cuda.current_stream(device))
    return _Constant(lengths, written)
