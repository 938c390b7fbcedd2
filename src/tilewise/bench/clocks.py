"""Clock and power of a GPU while something runs on it, read from the driver and never set."""

import importlib
import importlib.util
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_PERIOD = 0.05


@dataclass(frozen=True)
class ClockReading:
    """Medians over a window of time."""

    sm_mhz: float | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class _Sample:
    at: float
    sm_mhz: float
    power_w: float


class ClockSampler:
    """Samples in the background inside a ``with`` block; without a GPU or its tools, every reading is empty.

    >>> with ClockSampler(torch.device("cpu")) as clocks:
    ...     clocks.window(0.0, 1.0)
    ClockReading(sm_mhz=None, power_w=None)
    """

    def __init__(self, device: torch.device) -> None:
        self._samples: list[_Sample] = []
        self._stop = threading.Event()
        self._read = _reader(device)
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "ClockSampler":
        if self._read is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def window(self, start: float, stop: float) -> ClockReading:
        """Return the medians between two readings of :func:`time.monotonic`."""
        inside = [sample for sample in tuple(self._samples) if start <= sample.at <= stop]
        if not inside:
            return ClockReading()
        return ClockReading(statistics.median(sample.sm_mhz for sample in inside),
                            statistics.median(sample.power_w for sample in inside))

    def _sample(self) -> None:
        read = self._read
        while read is not None and not self._stop.wait(_PERIOD):
            sm_mhz, power_w = read()
            self._samples.append(_Sample(time.monotonic(), sm_mhz, power_w))


def _reader(device: torch.device) -> Callable[[], tuple[float, float]] | None:
    if device.type != "cuda" or torch.version.hip:
        return None
    # CUDA_VISIBLE_DEVICES renumbers devices for torch alone; the UUID means the same to everyone.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    if importlib.util.find_spec("pynvml") is not None:
        return _nvml_reader(uuid)
    return _smi_reader(uuid) if shutil.which("nvidia-smi") else None


def _nvml_reader(uuid: str) -> Callable[[], tuple[float, float]]:
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def read() -> tuple[float, float]:
        return (float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0)

    return read


def _smi_reader(uuid: str) -> Callable[[], tuple[float, float]]:
    command = ["nvidia-smi", f"--id={uuid}", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]

    def read() -> tuple[float, float]:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        sm_mhz, power_w = (float(field) for field in answer.split(","))
        return sm_mhz, power_w

    return read
