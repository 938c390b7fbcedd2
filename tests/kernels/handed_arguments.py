"""Launch a compiled Hopper kernel twice, by Triton's own way and past it, and print what either hands on.

Run as a script, by test_handed_arguments.py. Triton's launcher is the real one, all but what it builds in C, which
needs a driver: in its place stand functions that keep their arguments. It reads a kernel's signature and its IR's
descriptors and no machine code, so PTX is not assembled.
"""

import json
import re
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from kernels.compile_ahead import TARGETS, operands_of, problem_of, tensors_of
from tilewise.bench.compile_ahead import CompileOnlyDriver
from tilewise.kernels.gluon import launch as launching
from tilewise.kernels.gluon import launch_backward
from tilewise.kernels.gluon.launch_backward_wide import backward_launch
from tilewise.kernels.gluon.launch_dbias import HopperDbias
from tilewise.scores import OperandFacts, ScoreOptions
from tilewise.tuning.configs import HopperDbiasConfig
from tilewise.tuning.heuristics import hopper_backward_config, hopper_forward_config


class Driver(CompileOnlyDriver):
    """A driver that compiles, and whose tensor maps are what they would be encoded from."""

    @property
    def utils(self):
        return self

    def fill_tma_descriptor(self, *form):
        return ["map", *(list(part) if isinstance(part, tuple | list) else part for part in form)]


class Compiled:
    """A compiled kernel with its handles loaded."""

    function, packed_metadata = 1, (4, 1, 2)

    def __init__(self, compiled):
        self.handed, self.source = [], None
        with patch.object(nvidia, "compile_module_from_src", self.build), patch.object(nvidia, "library_dirs", list):
            self.run = nvidia.CudaLauncher(compiled.src, compiled.metadata)

    def build(self, src, **_libraries):
        self.source = src
        return self

    def launch(self, *arguments):
        self.handed.append(arguments)

    @property
    def format(self):
        """What the launcher in C reads of each argument, from the first of the kernel's own."""
        return re.search(r'PyArg_ParseTuple\(args, "(\w+)"', self.source)[1][nvidia._BASE_ARGS_FORMAT_LEN:]


class FrontEnd:
    """The kernel's front end, up to the launcher: compiles at the first call."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, None

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            made = self.kernel.warmup(*arguments, grid=grid, **options)
            self.compiled = Compiled(made)
            self.compiled.run(*(*grid, 1, 1)[:3], 0, 1, self.compiled.packed_metadata, None, None, None, *arguments)
            return self.compiled

        return launch


def plain(argument):
    """An argument as JSON has it; a tensor is its address, as it is past the front end."""
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


@contextmanager
def bound(request):
    """The launch of a request's pass, its tensors, and the memory that it makes itself, which is one for its calls."""
    operands = operands_of(request)
    problem = problem_of(request, operands)
    q, k, v, out, rows = tensors_of(problem)
    if request["kernel"] == "hopper_forward":
        launch = launching.HopperForward(problem, hopper_forward_config(problem), multiprocessors=132)
        counter = torch.empty(1, dtype=torch.int32)
        with patch.object(launching, "counter_of", lambda device: counter):
            yield launch, (q, k, v, out, rows, operands.sinks), [counter]
        return
    if request["kernel"] == "hopper_dbias":
        bias = torch.empty(1, problem.hq, problem.sq, problem.sk, dtype=problem.dtype)
        facts = OperandFacts(tuple(bias.shape), bias.stride(), bias.dtype)
        launch = HopperDbias(replace(problem, direction="backward", scores=ScoreOptions(bias=facts)),
                             HopperDbiasConfig(), multiprocessors=132)
        modifiers = SimpleNamespace(bias=SimpleNamespace(ptr=bias), data_ptr=bias.data_ptr)
        yield launch, (q, k, v, out, rows, rows.clone(), torch.empty_like(bias), modifiers), [bias]
        return
    launch = backward_launch(problem, hopper_backward_config(problem), problem.q_strides, multiprocessors=132)
    if "part" in request:
        gradients = [q] if request["part"] == "dq" else [k, v]
        yield (getattr(launch, request["part"]),
               (q, k, v, out, rows, rows.clone(), *map(torch.empty_like, gradients)), [None])
        return
    data = (operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqlens_q, operands.seqlens_k, operands.seed)
    sums = torch.empty(launch.sums_shape)
    tensors = (q, k, v, out, rows, rows.clone(), *map(torch.empty_like, (q, k, v)))
    tails = torch.empty(launch.tails_shape, dtype=torch.bfloat16)
    counter = torch.empty(1, dtype=torch.int32)
    made = [tails, sums, counter] if launch.config.stays and not launch.config.alone else [tails, sums]
    with (patch.object(torch, "zeros", lambda *shape, **options: sums),
          patch.object(launch_backward, "counter_of", lambda device: counter),
          patch.object(launch, "allocate", lambda sizes, strides, dtype: sums if dtype is torch.float32 else tails)):
        yield launch, (*tensors, *data) if any(tensor is not None for tensor in data) else tensors, made


def launches(request):
    with bound(request) as (launch, tensors, made):
        launch.enqueue.kernel = FrontEnd(launch.kernel)
        if request["kernel"] == "hopper_backward" and "part" not in request:
            launch.enqueue_dq.kernel = FrontEnd(launch.enqueue_dq.kernel)
            launch.enqueue_tails.kernel = FrontEnd(launch.enqueue_tails.kernel)
        launch(*tensors)
        launch(*tensors)
        compiled = launch.enqueue.kernel.compiled
    return {"handed": [[plain(argument) for argument in arguments] for arguments in compiled.handed],
            "base": nvidia._BASE_ARGS_FORMAT_LEN, "format": compiled.format,
            "addresses": [None if tensor is None else tensor.data_ptr() for tensor in (*tensors, *made)]}


if __name__ == "__main__":
    driver.set_active(Driver(TARGETS["sm_90"]))
    # What is compiled here is half a kernel, and is kept apart from whole ones.
    with (tempfile.TemporaryDirectory() as folder, patch.object(knobs.cache, "dir", folder),
          patch.object(CUDABackend, "make_cubin", lambda *_: b"")):
        for wanted in map(json.loads, sys.stdin):
            print(json.dumps(launches(wanted)), flush=True)
