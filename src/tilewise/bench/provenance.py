"""Where, when and with what a number was measured."""

import importlib
import importlib.util
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

import tilewise
from tilewise.errors import InvalidInput


@dataclass(frozen=True)
class Provenance:
    """The columns that say how a row came to be; empty where this machine does not tell."""

    device_name: str
    driver: str
    torch: str
    triton: str
    python: str
    tilewise: str
    commit: str
    date: str
    command: str


def provenance(device: torch.device, command: str, stated_commit: str | None = None) -> Provenance:
    """Gather the facts of this process, for work on one device.

    Args:
        stated_commit: for code that runs outside its checkout, where git cannot tell; None = what git says.

    Raises:
        InvalidInput: the stated commit is no hash.
    """
    return Provenance(
        device_name=device_name(device), driver=_driver() if device.type == "cuda" else "",
        torch=torch.__version__, triton=_version("triton"), python=platform.python_version(),
        tilewise=tilewise.__version__, commit=commit() if stated_commit is None else _checked_commit(stated_commit),
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), command=command,
    )


def device_name(device: torch.device) -> str:
    """Return the marketing name of a GPU, or the CPU's model with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()}, {torch.get_num_threads()} threads"


def commit() -> str:
    """Return the commit of the checkout this package runs from, '+' behind it if files differ; '' outside one."""
    here = Path(__file__).parent
    inside = _output("git", "-C", str(here), "ls-files", "--error-unmatch", __file__)
    if not inside:
        return ""
    head = _output("git", "-C", str(here), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no")
    return f"{head}+" if changed else head


def _checked_commit(stated: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{7,40}\+?", stated):
        raise InvalidInput(f"commit is {stated!r}; allowed are 7 to 40 lower-case hexadecimal digits, with '+' behind "
                           "them if files differ from that commit.")
    return stated


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _driver() -> str:
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0] if lines else ""


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return ""
    return str(importlib.import_module(package).__version__)


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
