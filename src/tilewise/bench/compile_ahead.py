"""Compile many tiles at once, in processes of their own: one compilation keeps one core busy for seconds.

What a process compiles it leaves in Triton's cache on disk, under the same key that a launch looks up. The processes
are spawned, since a fork of a process that uses CUDA cannot; and a compiler that aborts takes none but its own along.
"""

import multiprocessing
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from tilewise.bench.grids import Cell
from tilewise.bench.tile_launches import PER_ROW, TENSORS, tile_launch
from tilewise.problem import AttentionProblem
from tilewise.tuning.configs import AnyConfig

DIED = "the compiler ended its process"
Request = TypeVar("Request", bound=Hashable)


@dataclass(frozen=True)
class Task:
    """A kernel on a cell: what one search is about."""

    kernel: str
    cell: Cell

    def problem(self, device: torch.device) -> AttentionProblem:
        """Describe the call that the kernel belongs to."""
        problem = self.cell.problem(device)
        return problem if self.kernel.endswith("forward") else problem.backward(lse_grad=False)

    def __str__(self) -> str:
        return f"{self.kernel} {self.cell}"


Tile = tuple[Task, AnyConfig]


class AheadCompiler(Generic[Request]):
    """A pool of processes that works through requests in their order; leaving the ``with`` block drops the rest.

    Args:
        requests: what will be asked for.
        compile_one: compiles a request; runs in the processes.
        workers: how many of them.
    """

    def __init__(self, requests: Iterable[Request], compile_one: Callable[[Request], object], workers: int) -> None:
        self._compile_one, self._workers = compile_one, workers
        self._jobs: dict[Request, Future[object]] = {}
        self._start(requests)

    def __enter__(self) -> "AheadCompiler[Request]":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def fault(self, request: Request) -> str | None:
        """Wait for a request; return a reason if its compiler died, since the caller's own process would too.

        Any other failure is left to the caller's launch, which meets it again and has the right words for it. So is a
        request that nobody announced.
        """
        job = self._jobs.pop(request, None)
        if job is None or not isinstance(job.exception(), BrokenProcessPool):
            return None
        # One death breaks a whole pool: try this request alone, and begin anew with those that are left.
        self._pool.shutdown()
        self._start([other for other, left in self._jobs.items() if isinstance(left.exception(), BrokenProcessPool)])
        with _pool(1) as alone:
            return DIED if isinstance(alone.submit(self._compile_one, request).exception(), BrokenProcessPool) else None

    def _start(self, requests: Iterable[Request]) -> None:
        self._pool = _pool(self._workers)
        self._jobs |= {request: self._pool.submit(self._compile_one, request) for request in requests}


def tile_compiler(target: Any) -> Callable[[Tile], object]:
    """Return what compiles a tile for a Triton target, a device of that kind being there or not."""
    return partial(compile_tile, target=target)


def compile_tile(tile: Tile, target: Any) -> object:
    """Compile one tile into Triton's cache; return the compiled kernel's shared memory in bytes."""
    from triton.runtime import driver

    driver.set_active(CompileOnlyDriver(target))
    task, config = tile
    problem = task.problem(torch.device("meta"))
    # Meta tensors have the dtypes, the strides and, at address 0, the alignment that a kernel is compiled for.
    like_q = torch.empty_strided((problem.b, problem.hq, problem.sq, problem.d), problem.q_strides,
                                 dtype=problem.dtype, device="meta")
    rows = torch.empty(like_q.shape[:3], dtype=torch.float32, device="meta")
    launch = tile_launch(task.kernel, problem, config)
    tensors = launch.arguments(tuple(rows if name in PER_ROW else like_q for name in TENSORS[task.kernel]))
    compiled = launch.kernel.warmup(*tensors, *launch.scalars, grid=launch.grid, **launch.options)
    return compiled.metadata.shared


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


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
