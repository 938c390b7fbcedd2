"""The self-check of the Gluon kernels with a Triton that they were not run with before a release.

A new release of Triton compiles the same kernels to other machine code, and nothing but a run tells whether that is
right. So the first use of a family of kernels with such a Triton runs a few small calls of the family and holds their
results against dense attention in float64. The family is used if they agree, else refused with the reason. What was
found is kept on disk, for each version of Triton, torch and tilewise and each kind of GPU.

The check has a thread and a stream of its own: modes, autocast, the current stream and device, and whether gradients
are enabled belong to a thread, so none of the caller's reaches the check, and none of the check's the caller.
"""

import contextlib
import hashlib
import json
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tilewise import settings
from tilewise.backends._support.self_check_calls import CALLS, Family, deviation
from tilewise.backends.base import Pending
from tilewise.kernels.hooks import take_of_kernels
from tilewise.support.disk_cache import keep
from tilewise.support.packages import whole_version

# Words of errors that say nothing of the kernels: torch's and Triton's own where memory is short, and CUDA's where
# another thread captures a graph meanwhile. Such a failure holds for this process and is not kept on disk.
_PASSING = ("out of memory", "captur")
_LONGEST_ERROR = 300  # characters of an error's text; a compiler's can fill pages
_UNKNOWN = "unknown"

# (family, name of the GPU) -> what was found against it, None if nothing was.
_found: dict[tuple[Family, str], str | None] = {}
_lock = threading.Lock()


def why_not(family: Family, device: torch.device) -> str | None:
    """Return why this Triton is not trusted with a family of kernels on a device, None if it is.

    The first answer for a kind of GPU takes the check, some seconds, unless the disk knows the result. Nothing is said
    against a device that is not here, or that kernels are only compiled for. While a CUDA graph is captured no check
    can run: the answer is then a :class:`Pending` one.
    """
    if not _is_here(device):
        return None
    gpu, version = torch.cuda.get_device_name(device), whole_version("triton", "triton")
    triton = f"Triton {version}" if version else "a Triton that tells no version"
    with _lock:
        if (family, gpu) not in _found:
            kept = _recalled(family, gpu)
            if kept == _UNKNOWN and torch.cuda.is_current_stream_capturing():
                return Pending(f"awaits its self-check with {triton}, which cannot run while a CUDA graph is "
                               "captured: make one such call before the capture")
            _found[family, gpu] = _checked(family, device, gpu) if kept == _UNKNOWN else kept
        failure = _found[family, gpu]
    if failure is None:
        _warn_once(f"tilewise was not tested with {triton} before its release. A self-check of its Hopper "
                   f"kernels on {gpu} has passed, and backend 'gluon' uses them; backend='triton' does without.")
        return None
    reason = f"the self-check of its {family} kernels with {triton} failed on {gpu}: {failure}"
    path = _path(family, gpu)
    again = "the next process does" if path is None or not path.exists() else f"remove {path}"
    _warn_once(f"tilewise does not use its Hopper kernels, since {reason}. Backend 'triton' serves in their place, and "
               f"is slower. docs/backends.md names the versions of Triton that were tested. To check again: {again}.")
    return reason


def is_pending(family: Family, device: torch.device) -> bool:
    """Whether :func:`why_not` has a :class:`Pending` answer."""
    return isinstance(why_not(family, device), Pending)


def forget() -> None:
    """Let go of what this process has found, as if it had just started."""
    _found.clear()
    _warn_once.cache_clear()


def _is_here(device: torch.device) -> bool:
    """Whether kernels can run on the device; where they are compiled ahead, torch may answer for another machine's."""
    return take_of_kernels() is None and torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()


def _checked(family: Family, device: torch.device, gpu: str) -> str | None:
    """Run the check, and keep what it finds."""
    with ThreadPoolExecutor(1) as thread:
        failure = thread.submit(_failure, family, device).result()
    path = _path(family, gpu)
    if path is not None and not (failure and any(word in failure for word in _PASSING)):
        with contextlib.suppress(OSError):  # a folder that cannot be written costs each process a check
            keep(json.dumps(_facts(family, gpu) | {"failure": failure}, indent=1).encode(), path)
    return failure


def _failure(family: Family, device: torch.device) -> str | None:
    """Make the family's calls; return what is wrong with the first one that is not right."""
    new_stream: Any = torch.cuda.Stream  # untyped in torch
    try:
        with torch.cuda.device(device), torch.cuda.stream(new_stream(device)):
            found = (deviation(family, dims, device) for dims in CALLS[family])
            return next((wrong for wrong in found if wrong is not None), None)
    except Exception as error:  # whatever a compiler or a driver raises is a reason not to use the kernels
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_ERROR]


def _facts(family: Family, gpu: str) -> dict[str, str | None]:
    """What a result holds for."""
    package = __name__.partition(".")[0]  # "tilewise", unless this is a copy that is imported under another name
    return {"family": family, "gpu": gpu, "triton": whole_version("triton", "triton"), "torch": torch.__version__,
            package: whole_version(package, "tilewise")}


def _path(family: Family, gpu: str) -> Path | None:
    """Where a result is kept; None where there is no home, or Triton tells no version by which to find it again."""
    facts = _facts(family, gpu)
    if not facts["triton"]:
        return None
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    try:
        return settings.cache_folder() / f"self-check-{family}-{digest}.json"
    except RuntimeError:
        return None


def _recalled(family: Family, gpu: str) -> str | None:
    """Return the failure that the disk knows, None if a check has passed, _UNKNOWN where nothing that fits is there."""
    path = _path(family, gpu)
    try:
        kept = json.loads(path.read_bytes()) if path is not None else {}
    except (OSError, ValueError):
        return _UNKNOWN
    if not isinstance(kept, dict) or not isinstance(kept.get("failure", _UNKNOWN), str | None):
        return _UNKNOWN
    failure: str | None = kept.get("failure", _UNKNOWN)
    return failure


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)
