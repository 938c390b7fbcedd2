"""Peak memory of one call, above what was held before it."""

import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

MIB = 2**20
_RESET_PEAK = "5"  # proc(5): writing 5 to clear_refs sets VmHWM back to VmRSS
_PROCESS = Path("/proc/self")


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Run the call and return the most memory it held at once, its result included, in MiB.

    On CUDA the allocator's own count; on Linux's CPU the process's resident peak, which the kernel keeps (page
    granular, exact for tensors past some KiB). None where the system keeps no such count.
    """
    if device.type == "cuda":
        return _cuda_peak(call, device)
    return _resident_peak(call) if sys.platform == "linux" else None


def available_bytes(device: torch.device) -> int | None:
    """Memory that is free on the device now; None where the system does not tell."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if sys.platform != "linux":
        return None
    return _kib(Path("/proc/meminfo"), "MemAvailable") * 1024


def _cuda_peak(call: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def _resident_peak(call: Callable[[], object]) -> float:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        # Freed blocks that the allocator kept would be reused, and missing from the peak.
        libc.malloc_trim(0)
    (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
    before = _kib(_PROCESS / "status", "VmRSS")
    result = call()
    peak = _kib(_PROCESS / "status", "VmHWM")
    del result
    return max(0.0, (peak - before) * 1024 / MIB)


def _kib(file: Path, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", file.read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"{file} has no field {field}")
    return int(match[1])
