"""Compile the tiles of a search ahead of their launches, in the processes of compile_ahead/pool.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilewise.bench.grids import Cell
from tilewise.bench.tile_launches import PER_ROW, TENSORS, tile_launch
from tilewise.compile_ahead.pool import CompileOnlyDriver
from tilewise.problem import AttentionProblem
from tilewise.tuning.kinds import AnyConfig


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
    return launch.compile(tensors).metadata.shared
