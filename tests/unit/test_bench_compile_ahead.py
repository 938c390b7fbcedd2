"""Compiling tiles in other processes: what they leave is what a launch looks up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# One tile of each kernel for a GPU that is not here; the caller then compiles the same with tensors that have memory,
# at addresses of their own, as a launch would.
SAME_KEY = """
import pathlib, sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tilewise.bench.compile_ahead import Task, tile_compiler
from tilewise.bench.tile_launches import PER_ROW, TENSORS, tile_launch
from tilewise.bench.tuning_runs import Wanted, tasks
from tilewise.compile_ahead.pool import AheadCompiler, CompileOnlyDriver
from tilewise.kernels.triton.config import DqConfig, ForwardConfig
from tilewise.testing.inputs import make_inputs
from tilewise.tuning.heuristics_hopper import backward_heuristic, forward_heuristic

CPU = torch.device("cpu")
target = GPUTarget("cuda", 90, 32)
wanted = Wanted(("forward", "dq"), widths=(64,), masks=("none",), lengths=(128,), tokens=256, hidden=128)
forward, dq = tasks(wanted, CPU)
tiles = [(forward, ForwardConfig(64, 32, 4, 1)), (dq, DqConfig(64, 32, 4, 1, True))]
for kernel, heuristic in (("hopper_forward", forward_heuristic), ("hopper_backward", backward_heuristic)):
    task = Task(kernel, forward.cell)
    tiles.append((task, heuristic(task.problem(CPU))))
cache = pathlib.Path(sys.argv[1])
with AheadCompiler(tiles, tile_compiler(target), 1) as ahead:
    assert [ahead.fault(tile) for tile in tiles] == [None] * 4
compiled = sorted(cache.rglob("*.cubin"))
assert len(compiled) == 4, compiled
driver.set_active(CompileOnlyDriver(target))
for task, config in tiles:
    inputs = make_inputs(task.cell.case, task.cell.dtype, CPU)
    launch = tile_launch(task.kernel, task.problem(CPU), config)
    tensors = [torch.zeros(inputs.q.shape[:3]) if name in PER_ROW else getattr(inputs, name, inputs.dout)
               for name in TENSORS[task.kernel]]
    launch.compile(launch.arguments(tuple(tensors)))
assert sorted(cache.rglob("*.cubin")) == compiled
"""
WIDE_HEADS = """
import torch
from tilewise.bench.tile_launches import PER_ROW, TENSORS, tile_launch
from tilewise.bench.tuning_runs import Task, Wanted, tasks
from tilewise.testing.inputs import make_inputs
from tilewise.tuning.heuristics_hopper import backward_heuristic

CPU = torch.device("cpu")
wanted = Wanted(("forward",), widths=(256,), masks=("none",), lengths=(128,), tokens=256, hidden=256)
task = Task("hopper_backward", tasks(wanted, CPU)[0].cell)
problem, inputs = task.problem(CPU), make_inputs(task.cell.case, task.cell.dtype, CPU)
launch = tile_launch(task.kernel, problem, backward_heuristic(problem))
named = {name: torch.zeros(inputs.q.shape[:3]) if name in PER_ROW else torch.zeros_like(inputs.q)
         for name in TENSORS[task.kernel]}
*described, pointers = launch.arguments(tuple(named.values()))
given = [own.base for own in described if own is not None]
assert [id(own) for own in given] == [id(named[name]) for name in ("q", "k", "v", "dout", "dk", "dv")]
assert pointers.lse is named["lse"] and pointers.delta is named["delta"]
"""


@pytest.mark.aot
def test_a_launch_finds_what_the_processes_compiled(tmp_path):
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", SAME_KEY, str(tmp_path)], capture_output=True, text=True, check=False,
                          env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path),
                                            "PYTHONPATH": str(root / "src")})
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_kernel_of_wide_heads_gets_its_tensors_in_their_places():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", WIDE_HEADS], capture_output=True, text=True, check=False,
                          env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(root / "src")})
    assert done.returncode == 0, done.stderr[-4000:]
