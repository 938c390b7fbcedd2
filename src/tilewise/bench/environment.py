"""What this machine offers: versions, devices, and which backends are usable on each."""

import importlib.util
import os
from typing import Any

import torch

from tilewise.bench.grids import Cell, dtype_name
from tilewise.bench.memory import MIB, available_bytes
from tilewise.bench.plan import available_providers
from tilewise.bench.provenance import device_name, provenance
from tilewise.bench.shapes import FULL, shape_case
from tilewise.dispatch import answer_of
from tilewise.support.names import BACKENDS

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXTRAS = ("triton", "cudnn", "typer", "rich", "matplotlib")


def environment() -> dict[str, Any]:
    """Return the facts as plain values, ready for JSON."""
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    here = provenance(devices[-1], "")
    cudnn: Any = torch.backends.cudnn
    return {
        "versions": {"tilewise": here.tilewise, "commit": here.commit, "python": here.python, "torch": here.torch,
                     "triton": here.triton, "cuda": torch.version.cuda or "", "hip": torch.version.hip or "",
                     "cudnn": str(cudnn.version() or ""), "driver": here.driver},
        "packages": {name: importlib.util.find_spec(name) is not None for name in _EXTRAS},
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith("TILEWISE_")},
        "devices": [_device_facts(device) for device in devices],
    }


def _device_facts(device: torch.device) -> dict[str, Any]:
    free = available_bytes(device)
    _, absent = available_providers([], device)
    return {"device": str(device), "name": device_name(device), "free_mib": None if free is None else free // MIB,
            "backends": {name: _backend_facts(name, device) for name in BACKENDS}, "absent_providers": absent}


def _backend_facts(name: str, device: torch.device) -> dict[str, str | None]:
    """Return, by dtype, the backend's refusal of a plain call, forward or backward; None where it takes both."""
    facts: dict[str, str | None] = {}
    for dtype in _DTYPES:
        problem = Cell("info", shape_case(1, (8, 8), (1024, 1024), (64, 64), FULL), dtype).problem(device)
        answers = (answer_of(name, side) for side in (problem, problem.backward(lse_grad=False)))
        facts[dtype_name(dtype)] = next((answer for answer in answers if answer is not None), None)
    return facts
