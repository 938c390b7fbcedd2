"""Compile many kernels at once, in processes of their own: one compilation keeps one core busy for seconds.

What a process compiles it leaves in the cache on disk, under the same key that a launch looks up. The processes are
spawned, since a fork of a process that uses CUDA cannot use it; a compiler that aborts ends its own process alone.
"""

import multiprocessing
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from tilewise.errors import TilewiseError

DIED = "the compiler ended its process"
Request = TypeVar("Request", bound=Hashable)


class CompilerDied(TilewiseError, RuntimeError):
    """The process of a request has ended without an answer."""


class AheadCompiler(Generic[Request]):
    """A pool of processes that works through requests in their order; leaving the ``with`` block drops the rest.

    Args:
        requests: what will be asked for.
        compile_one: compiles a request; runs in the processes.
        workers: how many of them.
        prepare: runs first in each process.
    """

    def __init__(self, requests: Iterable[Request], compile_one: Callable[[Request], object], workers: int,
                 prepare: Callable[[], None] | None = None) -> None:
        self._compile_one, self._workers, self._prepare = compile_one, workers, prepare
        self._jobs: dict[Request, Future[object]] = {}
        self._pool = self._new_pool(workers)
        self.announce(requests)

    def __enter__(self) -> "AheadCompiler[Request]":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def announce(self, requests: Iterable[Request]) -> None:
        """Add requests behind those that are already there."""
        self._jobs |= {request: self._pool.submit(self._compile_one, request) for request in requests}

    def fault(self, request: Request) -> str | None:
        """Wait for a request; return a reason if its compiler died, since the caller's own process would too.

        Any other failure is left to the caller's launch, which meets it again and has the right words for it. So is a
        request that nobody announced.
        """
        if request not in self._jobs:
            return None
        try:
            self.outcome(request)
        except CompilerDied as death:
            return str(death)
        except Exception:  # its own launch will raise it
            return None
        return None

    def outcome(self, request: Request) -> Any:
        """Wait for a request that was announced; return what was made of it, once.

        Raises:
            CompilerDied: its process ended.
            Exception: what ``compile_one`` raised.
        """
        job = self._jobs.pop(request)
        if not isinstance(job.exception(), BrokenProcessPool):
            return job.result()
        # One death breaks a whole pool: try this request alone, and begin anew with those that are left.
        self._pool.shutdown()
        self._pool = self._new_pool(self._workers)
        self.announce([other for other, left in self._jobs.items() if isinstance(left.exception(), BrokenProcessPool)])
        with self._new_pool(1) as alone:
            try:
                return alone.submit(self._compile_one, request).result()
            except BrokenProcessPool as death:
                raise CompilerDied(DIED) from death

    def _new_pool(self, workers: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), self._prepare)


class CompileOnlyDriver:
    """The part of Triton's driver that its front end asks before it compiles."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> Any:
        """A key of Triton's caches in memory, one for each target."""
        return (self.target.backend, self.target.arch)

    def get_current_stream(self, device: Any) -> int:
        """A stream that nothing is launched on."""
        del device
        return 0
