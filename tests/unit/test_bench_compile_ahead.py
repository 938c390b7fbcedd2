"""Compiling in other processes: what they leave is what a launch looks up, and their death is no one else's."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilewise.bench.compile_ahead import DIED, AheadCompiler

# One tile of each kernel for a GPU that is not here; the caller then compiles the same with tensors that have memory,
# at addresses of their own, as a launch would.
SAME_KEY = """
import pathlib, sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tilewise.bench.compile_ahead import AheadCompiler, CompileOnlyDriver, Task, tile_compiler
from tilewise.bench.tile_launches import PER_ROW, TENSORS, tile_launch
from tilewise.bench.tuning_runs import Wanted, tasks
from tilewise.testing.inputs import make_inputs
from tilewise.tuning.configs import DqConfig, ForwardConfig
from tilewise.tuning.heuristics import hopper_backward_config, hopper_forward_config

CPU = torch.device("cpu")
target = GPUTarget("cuda", 90, 32)
wanted = Wanted(("forward", "dq"), widths=(64,), masks=("none",), lengths=(128,), tokens=256, hidden=128)
forward, dq = tasks(wanted, CPU)
tiles = [(forward, ForwardConfig(64, 32, 4, 1)), (dq, DqConfig(64, 32, 4, 1, True))]
for kernel, heuristic in (("hopper_forward", hopper_forward_config), ("hopper_backward", hopper_backward_config)):
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
    launch.kernel.warmup(*launch.arguments(tuple(tensors)), *launch.scalars, grid=launch.grid, **launch.options)
assert sorted(cache.rglob("*.cubin")) == compiled
"""


@pytest.mark.aot
def test_a_launch_finds_what_the_processes_compiled(tmp_path):
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", SAME_KEY, str(tmp_path)], capture_output=True, text=True, check=False,
                          env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path),
                                            "PYTHONPATH": str(root / "src")})
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_process_that_dies_is_that_requests_fault_alone():
    """raise_signal stands for a compiler: SIGCHLD does nothing, SIGKILL ends the process, and 1000 raises."""
    requests = (signal.SIGCHLD, signal.SIGKILL, signal.SIGWINCH, 1000)
    with AheadCompiler(requests, signal.raise_signal, 2) as ahead:
        assert [ahead.fault(request) for request in requests] == [None, DIED, None, None]


def test_leaving_drops_the_requests_that_no_process_has_begun():
    start = time.monotonic()
    with AheadCompiler((0.0, 0.3, 0.31, 0.32, 60.0, 61.0), time.sleep, 1) as ahead:
        assert ahead.fault(0.0) is None
    assert time.monotonic() - start < 30


def test_a_request_that_nobody_announced_has_no_fault():
    with AheadCompiler((), signal.raise_signal, 1) as ahead:
        assert ahead.fault(signal.SIGKILL) is None
