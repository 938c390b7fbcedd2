"""What the processes of a pool do: list the kernels that a call launches, and compile one of them."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.compile_ahead.gpu import on_fake_gpu
from tilewise.errors import InvalidInput

Call = Callable[[], object]


class Work(NamedTuple):
    """A piece of work: list the kernels of a call, or, unless ``kernel`` is None, compile that one of them.

    Attributes:
        call: which one, by its place in the list.
        kernel: which one of the call's launches, in their order.
    """

    call: int
    kernel: int | None = None


@dataclass(frozen=True)
class Found:
    """A kernel that a call launches.

    Attributes:
        name: of the kernel.
        place: the folder (of Triton's kernels) or the file of the cache, whether it is there or not.
        cached: whether it is there.
    """

    name: str
    place: Path
    cached: bool


class _LookedUp(Exception):
    """Ends a look-up; no error."""

    def __init__(self, place: Path, cached: bool) -> None:
        super().__init__(place)
        self.place, self.cached = place, cached


def work(piece: Work, calls: Sequence[Call]) -> tuple[Found, ...] | float:
    """Return the kernels of a call, or how many seconds the compilation of one took.

    Raises:
        InvalidInput: the call cannot be made.
        Exception: what a compiler raises.
    """
    call = calls[piece.call]
    if piece.kernel is None:
        return found_in(call)
    return compiled(call, piece.kernel)


def found_in(call: Call) -> tuple[Found, ...]:
    """Look up each kernel that a call launches in the cache on disk, in their order."""
    found: list[Found] = []

    def take(name: str, compile_kernel: Callable[[], Any], file: Path | None = None) -> None:
        if file is not None:
            found.append(Found(name, file, file.exists()))
            return
        try:
            with _look_up_only():
                compile_kernel()
        except _LookedUp as answer:
            found.append(Found(name, answer.place, answer.cached))
        else:
            raise RuntimeError(f"{name} was not looked up in Triton's cache")

    try:
        with on_fake_gpu(take):
            call()
    except Exception as error:
        # Exceptions travel between processes by their arguments, which not every one has kept.
        raise InvalidInput(f"{type(error).__name__}: {error}") from None
    return tuple(found)


def compiled(call: Call, kernel: int) -> float:
    """Compile one of the kernels that a call launches; return the seconds that it took.

    Raises:
        OSError: the kernel is not in its cache afterwards; whatever else a compiler raises is its own.
    """
    launches, seconds = 0, 0.0

    def take(name: str, compile_kernel: Callable[[], Any], file: Path | None = None) -> None:
        nonlocal launches, seconds
        if launches == kernel:
            start = time.perf_counter()
            compile_kernel()
            seconds = time.perf_counter() - start
            if file is not None and not file.exists():  # Triton raises where it cannot write, the CUDA kernels warn
                raise OSError(f"compiled, and not kept: {file} cannot be written; set TILEWISE_CACHE to a folder that "
                              "can be written")
        launches += 1

    with on_fake_gpu(take):
        call()
    return seconds


@contextlib.contextmanager
def _look_up_only() -> Iterator[None]:
    """Make Triton end each compilation by :class:`_LookedUp` where it has looked the kernel up, inside of a block."""
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.manager_class = _looking_up(knobs.cache.manager_class)
        yield


@cache
def _looking_up(manager: Any) -> Any:
    """Derive from a manager of Triton's cache (None: its own) one that ends a compilation where it would begin."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    class LookingUp(manager or FileCacheManager):  # type: ignore[misc]
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            super().__init__(key, override, dump)
            self._place = Path(knobs.cache.dir) / key

        def get_group(self, filename: str) -> None:
            """Tell what is there, and go no further."""
            raise _LookedUp(self._place, filename in (super().get_group(filename) or {}))

    return LookingUp
