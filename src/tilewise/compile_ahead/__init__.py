"""Compile ahead of a job what its calls will launch, into the caches on disk that its processes read.

:func:`compile_ahead` runs each call, forward and backward, on tensors without memory, up to its launches: the kernels
come from the same host code as at run time, under the same keys. No GPU is needed. ``tilewise compile`` is its command
line. docs/compile-ahead.md tells how many processes share the caches.
"""

import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tilewise.compile_ahead.calls import CallShape, calls_of_model
from tilewise.compile_ahead.gpu import GPUS, Gpu, Settings, gpu_of, prepare
from tilewise.compile_ahead.pool import AheadCompiler, CompilerDied
from tilewise.compile_ahead.worker import Call, Found, Work, work
from tilewise.errors import InvalidInput, TilewiseError

__all__ = ["GPUS", "CallShape", "Gpu", "Kernel", "Report", "calls_of_model", "compile_ahead"]

_MOST_WORKERS = 32  # of those that are not asked for: each takes some 500 MB
_LONGEST_FAILURE = 1000  # characters


@dataclass(frozen=True)
class Kernel:
    """A kernel that calls launch.

    Attributes:
        name: of the kernel.
        calls: those that launch it.
        place: its folder (of Triton's kernels) or its file in the cache.
        cached: whether it was there before.
        seconds: that its compilation took; None if it was cached, or failed.
        failure: why it is not there now; None if it is.
    """

    name: str
    calls: tuple[str, ...]
    place: Path
    cached: bool
    seconds: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Report:
    """What :func:`compile_ahead` did.

    Attributes:
        gpu: what was compiled for.
        kernels: in the order of the calls and of their launches, each once.
        idle: the calls that launch no kernel of tilewise's: another backend serves them.
    """

    gpu: Gpu
    kernels: tuple[Kernel, ...]
    idle: tuple[str, ...] = ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """The caches that the kernels are in."""
        return tuple(dict.fromkeys(kernel.place.parent for kernel in self.kernels))

    @property
    def ok(self) -> bool:
        """Whether every kernel is in its cache now."""
        return all(kernel.failure is None for kernel in self.kernels)


def compile_ahead(calls: Iterable[Call], *, device: Gpu | torch.device | str | None = None,
                  workers: int | None = None, on_kernel: Callable[[Kernel, int, int], None] | None = None) -> Report:
    """Compile what calls launch into the caches on disk, ahead of the job that makes them.

    Triton's kernels go to its own cache (``TRITON_CACHE_DIR``), those of the backends ``cuda`` and ``cuda_ieee`` to
    tilewise's (``TILEWISE_CACHE``). What is there already is not compiled again.

    Args:
        calls: of :class:`CallShape`, or functions without arguments, at the top level of a module, that make tensors
            on "cuda", call tilewise, and let torch run the backward pass. Their tensors have no memory: a call that
            reads one on the host cannot be compiled ahead.
        device: the GPU to compile for: a name in :data:`GPUS`, a :class:`Gpu`, "cuda:INDEX", or None for the one that
            is here.
        workers: processes that compile; None = one a core.
        on_kernel: is called when a kernel is done, with it, the number of those that are done, and of all.

    Returns:
        Each kernel, whether it was there, and what its compilation took. A kernel that cannot be compiled is reported
        there and raises nothing.

    Raises:
        InvalidInput: a call that tilewise refuses, or an argument without a meaning; the message names it.

    The processes are spawned: in a script, call it under ``if __name__ == "__main__":``. They are set as this process
    is in what kernels depend on: environment variables, TF32, deterministic algorithms; ``use_backend`` does not reach
    them.

    >>> from tilewise.compile_ahead import CallShape, compile_ahead
    >>> from tilewise import causal
    >>> report = compile_ahead([CallShape(8192, hq=32, hk=8, mask=causal())], device="h200")  # doctest: +SKIP
    """
    wanted, gpu = _checked_calls(calls), gpu_of(device)
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = min(cores, _MOST_WORKERS)
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise InvalidInput(f"workers is {workers!r}; allowed is an integer of 1 and more, or None for one a core.")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise InvalidInput("TRITON_INTERPRET is 1, with which Triton compiles nothing; allowed is 0, or unset.")
    pieces = [Work(number) for number in range(len(wanted))]
    with AheadCompiler(pieces, partial(work, calls=wanted), workers, partial(prepare, gpu, Settings.here())) as pool:
        launches = {piece: _launches_of(pool, piece, wanted[piece.call]) for piece in pieces}
        idle = tuple(str(wanted[piece.call]) for piece, found in launches.items() if not found)
        kernels = _each_once(launches, wanted)
        pool.announce(piece for piece, kernel in kernels.items() if not kernel.cached)
        made: list[Kernel] = []
        for piece, kernel in kernels.items():
            made.append(kernel if kernel.cached else _outcome(pool, piece, kernel))
            if on_kernel is not None:
                on_kernel(made[-1], len(made), len(kernels))
    if torch.cuda.is_available():
        _build_tritons_driver()
    return Report(gpu, tuple(made), idle)


def _checked_calls(calls: Iterable[Call]) -> tuple[Call, ...]:
    wanted = tuple(calls) if isinstance(calls, Iterable) else None
    if not wanted:
        raise InvalidInput(f"calls is {calls!r}; allowed is a sequence of one or more calls.")
    for number, call in enumerate(wanted):
        if not callable(call):
            raise InvalidInput(f"calls[{number}] is a {type(call).__name__}; allowed is a CallShape, or a function "
                               "without arguments.")
        try:
            pickle.dumps(call)
        except Exception as error:  # whatever pickle raises
            raise InvalidInput(f"calls[{number}] is {call!r}, which another process cannot be handed ({error}); "
                               "allowed is a CallShape, or a function at the top level of a module.") from error
    return wanted


def _launches_of(pool: AheadCompiler[Work], piece: Work, call: Call) -> tuple[Found, ...]:
    """Return the kernels of a call."""
    try:
        found: tuple[Found, ...] = pool.outcome(piece)
    except InvalidInput as error:
        raise InvalidInput(f"calls[{piece.call}] is {call}, and cannot be made: {error}") from error
    except CompilerDied as error:
        raise TilewiseError(f"the process that was to list the kernels of calls[{piece.call}], {call}, has ended. In a "
                            "script, call compile_ahead under `if __name__ == \"__main__\":`, since its processes "
                            "import the script.") from error
    return found


def _each_once(launches: dict[Work, tuple[Found, ...]], calls: Sequence[Call]) -> dict[Work, Kernel]:
    """Return each kernel with the first launch of it."""
    firsts: dict[Path, Work] = {}
    kernels: dict[Work, Kernel] = {}
    for piece, found in launches.items():
        for number, kernel in enumerate(found):
            first = firsts.setdefault(kernel.place, piece._replace(kernel=number))
            known = kernels.get(first, Kernel(kernel.name, (), kernel.place, kernel.cached))
            kernels[first] = replace(known, calls=tuple(dict.fromkeys((*known.calls, str(calls[piece.call])))))
    return kernels


def _outcome(pool: AheadCompiler[Work], piece: Work, kernel: Kernel) -> Kernel:
    """Wait for a kernel."""
    try:
        return replace(kernel, seconds=pool.outcome(piece))
    except Exception as error:  # a compiler's are many, and none is the caller's
        reason = str(error) if isinstance(error, CompilerDied) else f"{type(error).__name__}: {error}"
        return replace(kernel, failure=reason[:_LONGEST_FAILURE])


def _build_tritons_driver() -> None:
    """Have Triton build what it talks to the GPU's driver by, which it keeps among the kernels."""
    from triton.runtime import driver

    _ = driver.active.utils
