"""What others hook into launches: a profiler, which sees those alone that Triton makes, and whoever compiles ahead."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol


class Take(Protocol):
    """What gets each kernel in the place of the GPU."""

    def __call__(self, name: str, compile_kernel: Callable[[], Any], file: Path | None = None) -> None:
        """Take a kernel that a call is about to launch.

        Args:
            name: of the kernel.
            compile_kernel: finds the kernel in the cache on disk, or compiles it and leaves it there, with the key that
                a launch looks up.
            file: where it is kept; None of a kernel of Triton's, which keeps its own.
        """


_take: ContextVar[Take | None] = ContextVar("tilewise_take", default=None)


def watching() -> Callable[[], bool]:
    """Return what tells, at every launch anew, whether a profiler has hooked itself into Triton's launches."""
    from triton import knobs

    runtime = knobs.runtime

    def watched() -> bool:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # each a chain, a function or None
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    return watched


def take_of_kernels() -> Take | None:
    """Return what takes the kernels of this thread's calls in the place of the GPU; None: they are launched."""
    return _take.get()


@contextlib.contextmanager
def compile_only(take: Take) -> Iterator[None]:
    """Hand kernels to ``take`` instead of launching them, inside a ``with`` block and in its thread."""
    token = _take.set(take)
    try:
        yield
    finally:
        _take.reset(token)
