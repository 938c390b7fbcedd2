"""Compile Hopper kernels, and print what a launch through the driver and Triton's own launcher hand to them.

Run as a script, by test_handed_arguments.py. Triton's launcher is the real one, all but what it builds in C, which
needs a driver: in its place stand functions that keep their arguments. It reads a kernel's signature and its IR's
descriptors and no machine code, so PTX is not assembled: in the place of machine code stand the sizes of the parameters
that the PTX declares.
"""

import json
import re
import struct
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

from compiled.compile_ahead import (
    TARGETS,
    backward_plans_of,
    max_logit_of,
    operands_of,
    plan_of,
    problem_of,
    tensors_of,
)
from launch.driver_double import DriverDouble
from tilewise.bench.compile_ahead import CompileOnlyDriver
from tilewise.kernels import driver as cuda
from tilewise.kernels.hopper.arguments import NO_BACKWARD_OPERANDS, BackwardOperands, Lengths
from tilewise.kernels.hopper.backward import launch as launch_backward
from tilewise.kernels.hopper.backward.config import HopperDbiasConfig
from tilewise.kernels.hopper.backward.launch_d256 import backward_launch
from tilewise.kernels.hopper.backward.launch_dbias import HopperDbias
from tilewise.kernels.hopper.forward import launch as launching
from tilewise.kernels.triton.forward import forward_launch
from tilewise.kernels.triton.launch import modifiers_of, operand_addresses
from tilewise.problem.options import OperandSpec, ScoreOptions
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics_hopper import backward_heuristic, forward_heuristic
from tilewise.tuning.heuristics_triton import tile_heuristic
from tilewise.tuning.schedules_hopper import backward_schedule, schedule_on_grid

# Sizes of parameters, as PTX declares them.
_DECLARED = re.compile(r"\.param (?:\.align \d+ )?\.([a-z]+\d+)(?: \.ptr[^,]*?)? \w+_param_\d+(?:\[(\d+)\])?")
_STREAM = 77


class Driver(CompileOnlyDriver):
    """A driver that compiles, and whose tensor maps are what they would be encoded from."""

    def __init__(self, target):
        super().__init__(target)
        self.handed = []

    @property
    def utils(self):
        return self

    def fill_tma_descriptor(self, *form):
        return ("map", *(tuple(part) if isinstance(part, list | tuple) else part for part in form))

    fill_tma_descriptor_tiled = fill_tma_descriptor

    def build_signature_metadata(self, signature):
        return signature

    def launch(self, *arguments):
        self.handed.append(arguments)


class PyKernelArg:
    """What Triton's extension in C has for the kind of an argument."""

    def __init__(self, nested_tuple, type):
        self.nested_tuple, self.type = nested_tuple, type


class Extension:
    """A launcher as Triton 3.6 builds one for each signature."""

    def __init__(self, source, handed):
        self.kinds = re.search(r'PyArg_ParseTuple\(args, "([\w()]+)"', source)[1]
        self.launch = lambda *arguments: handed.append(arguments)


def by_triton(compiled, grid, arguments, active):
    """Return what Triton's launcher hands its part in C: the values of the kernel's parameters, in order."""
    active.handed.clear()
    build = patch.object(nvidia, "compile_module_from_src", lambda src, **_: Extension(src, active.handed), create=True)
    kinds = [patch.object(nvidia, name, value, create=True) for name, value in (
        ("PyKernelArg", PyKernelArg), ("ARG_CONSTEXPR", 0), ("ARG_KERNEL", 1), ("ARG_TUPLE", 2),
        ("library_dirs", list))]
    with build, kinds[0], kinds[1], kinds[2], kinds[3], kinds[4]:
        run = nvidia.CudaLauncher(compiled.src, compiled.metadata)
        run(*(*grid, 1, 1)[:3], _STREAM, 1, (4, 1, 2), None, None, None, *arguments)
    (handed,) = active.handed
    kinds = getattr(run, "arg_annotations", None)
    if kinds is not None:
        return handed[0:3], flat(zip(kinds, handed[-1], strict=True), lambda kind: (kind.type == 0, kind.nested_tuple))
    signature = []
    for kind in compiled.src.signature.values():
        rank = 0 if isinstance(kind, tuple) or not kind.startswith("tensordesc") else kind.partition("[")[2].partition(
            "]")[0].count(",") + 1
        signature += ["map", *["i32"] * rank, *["i64"] * rank] if rank else [kind]
    own = handed[len(handed) - len(signature):]
    return handed[0:3], flat(zip(signature, own, strict=True), lambda kind: (kind == "constexpr", isinstance(
        kind, tuple) and kind))


def flat(pairs, read):
    """The values that become parameters; ``read`` says of a kind if it is none, and which kinds it consists of."""
    values = []
    for kind, value in pairs:
        is_constant, nested = read(kind)
        if nested:
            values += flat(zip(nested, value, strict=True), read)
        elif not is_constant:
            value = value.data_ptr() if isinstance(value, torch.Tensor) else value
            # Triton's part in C rounds floats to the 32 bits that a kernel gets.
            values.append(struct.unpack("<f", struct.pack("<f", value))[0] if isinstance(value, float) else value)
    return values


def declared(compiled):
    """Sizes of the parameters that the PTX declares."""
    sizes = {"b8": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8, "f32": 4, "f64": 8, "b16": 2, "b32": 4, "b64": 8}
    ptx = compiled.asm["ptx"]
    head = ptx[ptx.index(".entry"):]
    return [sizes[kind] * int(count or 1) for kind, count in _DECLARED.findall(head[:head.index(")")])]


def by_driver(enqueue, addresses, arguments, compiled):
    """Return what a launch through the driver hands on, in the form of Triton's."""
    double = DriverDouble()
    known = SimpleNamespace(asm={"cubin": json.dumps(declared(compiled)).encode()}, metadata=compiled.metadata,
                            src=compiled.src)
    with (patch.object(cuda, "bindings", lambda: double), patch.object(cuda, "raw_stream", lambda: lambda device: 0)):
        cuda.load.cache_clear()
        image = cuda.image_of(known)
        fields = cuda.fields_of(image.types, (*arguments, *enqueue.scalars), len(arguments))
        cuda.bind(image, enqueue.grid, fields, 0)(tuple(addresses))
        cuda.load.cache_clear()
    (launch,) = double.launches
    formats = "".join(field.formats for field in fields).replace("128s", "m")
    values = []
    for kind, offset in zip(formats, launch.offsets, strict=False):
        if kind == "m":
            values.append(as_triton(double.map_in(launch.parameters, offset)))
        else:
            values += struct.unpack_from(f"<{kind}", launch.parameters, offset)
    return launch.grid, values


def as_triton(encoded):
    """A tensor map's arguments as Triton's launcher hands them to its part in C."""
    dtype, rank, address, sizes, strides, block, steps, interleave, swizzle, promotion, fill = encoded
    assert (steps, interleave, promotion) == ([1] * rank, 0, 2), "as Triton's part in C has them"
    itemsize = {9: 2, 6: 2, 7: 4}[int(dtype)]
    return ("map", address, int(swizzle), itemsize, int(dtype), tuple(block[::-1]), tuple(sizes[::-1]),
            (*(stride // itemsize for stride in strides[::-1]), 1), int(fill))


@contextmanager
def bound(request):
    """What enqueues the kernels of a request's pass, and what calls it."""
    operands = operands_of(request)
    problem = problem_of(request, operands)
    q, k, v, out, rows = tensors_of(problem)
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if request["kernel"] == "hopper_forward":
        config = forward_heuristic(problem)
        strides, plan = plan_of(problem, config.consumers, config.block_n // 64)
        schedule = schedule_on_grid(problem, config, request.get("pack_gqa", 1))
        launch = launching.HopperForward(problem, config, schedule, 132, strides)
        counter, out = torch.empty(1, dtype=torch.int32), out.to(problem.out_dtype)
        with patch.object(launching, "counter_of", lambda device: counter):
            yield [launch.enqueue], lambda: launch(lambda: (q, k, v), addresses, out, rows, operands,
                                                   max_logit_of(problem, rows), plan=plan)
    elif request["kernel"] == "hopper_dbias":
        bias = torch.empty(1, problem.hq, problem.sq, problem.sk, dtype=problem.dtype)
        facts = OperandSpec(tuple(bias.shape), bias.stride(), bias.dtype)
        launch = HopperDbias(replace(problem, direction="backward", scores=ScoreOptions(bias=facts)),
                             HopperDbiasConfig(), num_sms=132)
        modifiers = SimpleNamespace(bias=SimpleNamespace(ptr=bias))
        yield [launch.enqueue], lambda: launch(q, k, v, out, rows, rows.clone(), torch.empty_like(bias), modifiers)
    elif request["kernel"] == "forward":
        launch = forward_launch(problem, tile_heuristic("forward", problem, DeviceSpec.of_arch("sm_90"),
                                                     descriptors=request["descriptors"]), "ieee")
        at_operands = operand_addresses(problem)(operands)
        yield [launch.enqueue], lambda: launch.at(
            (*addresses, out.data_ptr(), rows.data_ptr(), None, *at_operands),
            lambda: (q, k, v, out, rows, None, modifiers_of(problem, operands)))
    else:
        config = backward_heuristic(problem)
        strides, plans = backward_plans_of(problem, config)
        schedule = backward_schedule(problem, config, request.get("group_splits", 1))
        whole = launch = backward_launch(problem, config, schedule, problem.q_strides, 132, plans=strides)
        if schedule.group_splits > 1:
            launch = whole.launch
        gradients = (torch.empty_like(like, dtype=problem.out_dtype) for like in (q, k, v))
        given = {"seed": operands.seed, "slopes": operands.alibi_slopes, "bias": operands.bias, **plans}
        read_too = NO_BACKWARD_OPERANDS
        if any(tensor is not None for tensor in (*operands.lengths, *given.values())):
            read_too = BackwardOperands(Lengths(*operands.lengths), **given)
        tensors = (q, k, v, out, rows, rows.clone(), *gradients)
        counter = torch.empty(1, dtype=torch.int32)
        parts = [getattr(launch, name).enqueue for name in ("dkdv", "dq") if hasattr(launch, name)] or [
            launch.enqueue, launch.enqueue_augmented_k, launch.enqueue_zero, launch.enqueue_dq]
        if whole is not launch:
            parts.append(whole.enqueue_sum)
        launch.allocate = whole.allocate = lambda sizes, strides, dtype: torch.empty_strided(
            sizes, strides, dtype=dtype)
        with patch.object(launch_backward, "counter_of", lambda device: counter):
            yield parts, lambda: whole(*tensors, operands=read_too)


def launches(request, active):
    """Of each kernel that a pass launches: what either way hands on."""
    rows = []
    with bound(request) as (enqueues, call):
        for enqueue in enqueues:
            def keep(addresses, arguments, alike=False, enqueue=enqueue):
                made = arguments()
                compiled = enqueue.compile(made)
                triton_grid, triton_values = by_triton(compiled, enqueue.grid, (*made, *enqueue.scalars), active)
                own_grid, own_values = by_driver(enqueue, addresses, made, compiled)
                rows.append({"kernel": compiled.metadata.name, "triton": [triton_grid, triton_values],
                             "driver": [own_grid, own_values]})

            enqueue.__class__ = type("Kept", (type(enqueue),), {"__call__": lambda self, *given, **named: self.keep(
                *given, **named)})
            enqueue.keep = keep
        call()
    return {"launches": rows}


if __name__ == "__main__":
    made = Driver(TARGETS["sm_90"])
    driver.set_active(made)
    # What is compiled here is half a kernel, and is kept apart from whole ones.
    with (tempfile.TemporaryDirectory() as folder, patch.object(knobs.cache, "dir", folder),
          patch.object(CUDABackend, "make_cubin", lambda *_: b"")):
        for wanted in map(json.loads, sys.stdin):
            print(json.dumps(launches(wanted, made)), flush=True)
