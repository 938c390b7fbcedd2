"""Compile the kernels for a GPU that is not here, and read what the compiler made of them.

Run as a script: Triton decides at import whether it interprets, and its version is chosen by PYTHONPATH, so the tests
start a process per Triton version. Reads a request in JSON a line, answers each with a row in JSON a line.
"""

import re
import subprocess
import tempfile
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import torch
from torch.nn.attention.flex_attention import create_block_mask
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from compiled.compile_record import Prepared, serve
from compiled.sass import early_reads, possibly_unset, spills_in_steps, stray_descriptors
from conformance.functions import known_masks, mask_functions, score_functions
from tilewise.backends._support.mask_plans import backward_planners, planner_of
from tilewise.bench.compile_ahead import CompileOnlyDriver
from tilewise.integrations.flex import traced_mask, traced_score
from tilewise.kernels.hopper.arguments import BackwardOperands, Lengths
from tilewise.kernels.hopper.backward.config import BACKWARD_CONFIGS, HopperDbiasConfig
from tilewise.kernels.hopper.backward.launch_d256 import backward_launch
from tilewise.kernels.hopper.backward.launch_dbias import HopperDbias
from tilewise.kernels.hopper.forward.config import SplitPlan
from tilewise.kernels.hopper.forward.launch import NO_PLAN, HopperForward
from tilewise.kernels.triton.backward import delta_launch, dkdv_launch
from tilewise.kernels.triton.combine import combine_splits_launch
from tilewise.kernels.triton.dbias import dbias_launch
from tilewise.kernels.triton.dq import dq_launch
from tilewise.kernels.triton.forward import forward_launch
from tilewise.kernels.triton.launch import modifiers_of
from tilewise.kernels.triton.merge_partial import merge_partial_kernel
from tilewise.kernels.triton.row_tiles import rows_launch
from tilewise.kernels.triton.write_rows import write_rows_kernel
from tilewise.kernels.triton.zero_fill import lengths_launch, zero_fill_gradients_launch, zero_fill_out_launch
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem, dense_strides
from tilewise.problem.options import FunctionSpec, Operands, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics_hopper import forward_heuristic
from tilewise.tuning.heuristics_triton import delta_config, entries_config, single_tile_config, tile_heuristic
from tilewise.tuning.schedules_hopper import backward_schedule, schedule_on_grid

TABLE, IDS = torch.zeros(2, 9000, dtype=torch.bfloat16), torch.zeros(2, 4096, dtype=torch.int32)
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def operands_of(request):
    """Every operand, or with request["options"] a list of names of them, or none."""
    shape = {"b": 1, "h": 2, "s": 4096}
    of_bias = getattr(torch, request.get("bias", "bfloat16"))
    made = {"bias": torch.empty(1, shape["h"], shape["s"], shape["s"], dtype=of_bias),
            "alibi_slopes": torch.empty(1, shape["h"]), "sinks": torch.empty(shape["h"]),
            "mask": torch.empty(1, 1, shape["s"], shape["s"], dtype=torch.bool),
            "seed": torch.empty(1, dtype=torch.int64)}
    made |= {f"{name}_{side}": torch.empty(size, dtype=torch.int32) for side in "qk" for name, size in (
        ("cu_seqlens", (shape["b"] + 1,)), ("seqlens", (shape["b"],)), ("documents", (1, 4, shape["s"])),
        ("tiles", (1, 1, shape["s"] // 128, 2 + shape["s"] // 128)))}
    made |= {f"{kind}_tensors": function.tensors for kind, function in functions_of(request).items()}
    return Operands(**{name: tensor for name, tensor in made.items()
                       if name in request.get("options", ()) or name.endswith("tensors")})


def functions_of(request):
    """A function of the test suite for each "score:NAME" and "mask:NAME" in request["options"]."""
    named = dict(option.split(":") for option in request.get("options", ()) if ":" in option)
    return {kind: all_functions()[kind][name] for kind, name in named.items()}


@cache
def all_functions():
    """The functions that requests name, by kind and name; made when one does, since it takes a tenth of a second."""
    sizes = SimpleNamespace(b=1, hq=2, sq=4096, sk=4096)
    made = {"score": score_functions("cpu"), "mask": mask_functions("cpu") | known_masks(sizes, "cpu")}
    made["score"]["traced"] = traced_score(of_every_kind)
    made["mask"]["traced"] = traced_mask(create_block_mask(in_documents, None, None, 4096, 4096, device="cpu")).function
    made["mask"]["joined"] = (made["mask"]["tree"] & made["mask"]["chosen"]).function
    return made


def of_every_kind(score, b, h, q_idx, kv_idx):
    """What is traced: a load, a curve, a choice, integers of both signs."""
    return torch.where((q_idx - kv_idx) // 3 < 400, 20 * torch.tanh(score / 20), score) + TABLE[h, q_idx - kv_idx]


def in_documents(b, h, q_idx, kv_idx):
    """What of a mask is traced: a table of two dims, positions, and the state of a block."""
    return (IDS[h, q_idx] == IDS[h, kv_idx]) & (q_idx >= kv_idx)


def scores_of(request, operands):
    facts = {name: OperandSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype)
             for name, tensor in zip(operands._fields, operands.alone, strict=False)
             if tensor is not None and name != "seed" and "seqlens" not in name}
    facts |= {f"{kind}_function": FunctionSpec(function.code, tuple(tensor.dtype for tensor in function.tensors))
              for kind, function in functions_of(request).items()}
    names = request.get("options", ())
    return ScoreOptions(softcap=30.0 if "softcap" in names else None, max_logit="max_logit" in names,
                        dropout_p=0.1 if operands.seed is not None else 0.0, **facts)


def max_logit_of(problem, rows):
    """Where the largest scores go, if they are wanted."""
    return torch.empty_like(rows) if problem.scores.max_logit else None


def sequences_of(operands):
    facts = {name: OperandSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype)
             for name, tensor in zip(operands._fields, operands.alone, strict=False)
             if tensor is not None and "seqlens" in name}
    packed = None if operands.cu_seqlens_q is None else len(operands.cu_seqlens_q) - 1
    return Sequences(packed, **facts, max_seqlen_q=packed and 4096, max_seqlen_k=packed and 4096)


def problem_of(request, operands):
    (hq, hk), b, s, d = request.get("heads", (2, 1)), 1, request.get("s", 4096), request["d"]
    dv = request.get("dv", d)
    shapes = (b, hq, s, d), (b, hk, s, d), (b, hk, s, dv)
    strides = [dense_strides(shape, (4, 2, 1, 1)) for shape in shapes]
    return AttentionProblem(
        b=b, hq=hq, hk=hk, sq=s, sk=s, d=d, dv=dv, dtype=getattr(torch, request["dtype"]),
        device=torch.device("cuda", 0), scale=1.0, mask=Mask(*request["mask"]),
        deterministic=request.get("deterministic", False), float32_results=request.get("float32_results", False),
        scores=scores_of(request, operands), sequences=sequences_of(operands), q_strides=strides[0],
        k_strides=strides[1], v_strides=strides[2])


def pairs_of(kernel, problem):
    """What dQ makes for a bias beside itself: nothing, its gradient, or a part of a sum over the batch, and from what.

    Returns (pairs, earlier pairs, entry, entries at once).
    """
    if kernel == "dq":
        return None, None, None, None
    if kernel == "dq_alone":
        return torch.empty(1, 1, 16, 16, dtype=problem.dtype), None, None, 0
    which, at_once = kernel.removeprefix("dq_").split("_of_")
    rounded, total = (torch.empty(1, 1, 16, 16, dtype=dtype) for dtype in (problem.dtype, torch.float32))
    made = {"all": (rounded, None), "first": (total, None), "next": (total, total), "last": (rounded, total)}
    return *made[which], 0, int(at_once)


def tensors_of(problem):
    """Return q, k, v, out and lse."""
    rows = torch.empty(problem.b, problem.hq, problem.sq)
    return *(torch.empty_strided(shape, strides, dtype=problem.dtype) for shape, strides in (
        ((problem.b, problem.hq, problem.sq, problem.d), problem.q_strides),
        ((problem.b, problem.hk, problem.sk, problem.d), problem.k_strides),
        ((problem.b, problem.hk, problem.sk, problem.dv), problem.v_strides),
        ((problem.b, problem.hq, problem.sq, problem.dv), problem.out_strides))), rows


def launch_of(kernel, problem, config, modifiers):
    """Return the launch and its arguments before the scalars, in order."""
    q, k, v, out, rows = tensors_of(problem)
    if kernel == "forward":
        return forward_launch(problem, config, "ieee"), (q, k, v, out, rows, None, modifiers)
    if kernel == "combine_splits":
        shape = problem.hq * problem.sq, 4, problem.dv + 8
        return combine_splits_launch(problem, range(problem.hq * problem.sq), shape, overlapped=True), (
            torch.empty(8), out, rows, modifiers.sinks.ptr, None)
    if kernel in ("merge_partial", "write_rows"):
        wide = out.to(torch.float32)
        rounded = None if out.dtype is torch.float32 else out  # the last part of a sum in 16 bits, or any other
        code, tensors = {"merge_partial": (merge_partial_kernel, (wide, rows, rows, wide, rows, rows, rounded)),
                         "write_rows": (write_rows_kernel, (out, wide, wide))}[kernel]
        strides = tuple(None if own is None else own.stride() for own in tensors)
        dtypes = tuple(None if own is None else own.dtype for own in tensors)
        there = sum(own is not None for own in tensors)
        return rows_launch(code, tuple(out.shape), strides, dtypes, problem.device, (True,) * there), tensors
    if kernel == "lengths":
        steps = () if problem.sequences.packed is None else ((1, 512, 1024, 8), (2048, 1024))
        return lengths_launch(problem, 8, *steps), (torch.empty(8, 8, dtype=torch.int32), *modifiers.lengths)
    if kernel.startswith("mask"):
        planner, numbers = planner_of(problem, rows=2, columns=2, keys_first=False), torch.empty(8, dtype=torch.int32)
        return {"mask_cells": (planner.cells, (torch.empty(8, dtype=torch.int8), modifiers)),
                "mask_lists": (planner.lists, (numbers, torch.empty(8, dtype=torch.int8))),
                "mask_bits": (planner.bits, (numbers, numbers, modifiers))}[kernel]
    if kernel.startswith("zero_fill"):
        lengths = modifiers.lengths
        by_side = lengths.cu_q, lengths.q, lengths.cu_k, lengths.k
        if kernel == "zero_fill_gradients":
            return zero_fill_gradients_launch(problem, (q.stride(), k.stride(), v.stride())), (q, k, v, *by_side)
        seen = None if lengths.cu_q is None else rows
        return zero_fill_out_launch(problem), (out, rows, seen, modifiers.sinks.ptr, *by_side)
    problem = replace(problem, direction="backward")
    if kernel == "delta":
        launch = delta_launch(problem, delta_config(problem), out.stride(), out.stride(), None)
        return launch, (out, out, out, rows, modifiers)
    if kernel.startswith("dq"):
        pairs, earlier, entry, at_once = pairs_of(kernel, problem)
        return dq_launch(problem, config, "ieee", out.stride(), q.stride(), at_once), (
            q, k, v, out, rows, rows, q, None, rows if modifiers.alibi.ptr is not None else None, pairs, earlier,
            entry, modifiers)
    if kernel == "dbias":
        pairs = torch.empty(1, 1, 16, 16, dtype=problem.dtype)
        return dbias_launch(problem, config, "ieee", out.stride()), (q, k, v, out, rows, rows, pairs, modifiers)
    if kernel == "dkdv_and_dq":
        launch = dkdv_launch(problem, config, "ieee", out.stride(), (k.stride(), v.stride()), (True, True),
                             (out.stride(), q.stride()))
        return launch, (q, k, v, out, rows, None, k, v, None, out, q, modifiers)
    needs = (kernel != "dv", kernel != "dk")
    launch = dkdv_launch(problem, config, "ieee", out.stride(), (k.stride(), v.stride()), needs)
    return launch, (q, k, v, out, rows, rows, k, v, None, None, None, modifiers)


def prepare(request):
    if request["kernel"].startswith("hopper"):
        return prepare_hopper(request)
    spec = DeviceSpec.of_arch(request["arch"])
    operands = operands_of(request)
    kernel, problem = request["kernel"], problem_of(request, operands)
    config = None
    if kernel == "dkdv_and_dq":
        config = single_tile_config(problem, spec)
    elif not kernel.startswith(("zero_fill", "combine", "merge", "write_rows", "delta", "lengths", "mask")):
        tiles_of = "dq" if kernel.startswith("dq") else kernel
        config = tile_heuristic(tiles_of, problem, spec, descriptors=request["descriptors"])
        at_once = int(kernel.rpartition("_of_")[2]) if "_of_" in kernel else 1
        if at_once > 1:
            config = entries_config(replace(problem, b=at_once), spec)
    launch, tensors = launch_of(kernel, problem, config, modifiers_of(problem, operands))
    facts = {"limit": spec.shared_memory, "expected": 0 if config is None else config.shared_bytes(problem)}
    return prepared(request["arch"], partial(launch.compile, launch.arguments(tensors)), facts, report)


def report(compiled, _log):
    return amd_report(compiled) if "amdgcn" in compiled.asm else nvidia_report(compiled)


def prepare_hopper(request):
    """A Gluon kernel; ptxas's log is printed where TRITON_DUMP_PTXAS_LOG is set and the kernel is not in a cache."""
    operands = operands_of(request)
    spec, problem = DeviceSpec.of_arch("sm_90"), problem_of(request, operands)
    q, k, v, out, rows = tensors_of(problem)
    written = [torch.empty_like(tensor, dtype=problem.out_dtype) for tensor in (q, k, v, out)]
    lengths = (operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqlens_q, operands.seqlens_k)
    if request["kernel"] == "hopper_forward":
        config = replace(forward_heuristic(problem), **request.get("config", {}))
        split_kv = request.get("split_kv") and SplitPlan(*request["split_kv"])
        schedule = schedule_on_grid(problem, config, request.get("pack_gqa", 1), split_kv)
        strides, plan = plan_of(problem, config.consumers, config.block_n // 64)
        launch = HopperForward(problem, config, schedule, 132, strides)
        arguments = launch.arguments((q, k, v, written[3], rows), torch.empty(1, dtype=torch.int32), operands,
                                     torch.empty(8) if split_kv else max_logit_of(problem, rows), plan)
    elif request["kernel"] == "hopper_dbias":
        config = HopperDbiasConfig(*request["config"])
        bias = torch.empty(1, problem.hq, problem.sq, problem.sk, dtype=getattr(torch, request["bias"]))
        facts = OperandSpec(tuple(bias.shape), bias.stride(), bias.dtype)
        problem = replace(problem, direction="backward", scores=ScoreOptions(bias=facts))
        launch = HopperDbias(problem, config, num_sms=132)
        arguments = launch.arguments((q, k, v, out, rows, rows, bias, bias))
    else:
        settings = dict(request["config"])
        config = BACKWARD_CONFIGS[settings.pop("kernel")](**settings)
        strides, plans = backward_plans_of(problem, config)
        schedule = backward_schedule(problem, config, request.get("group_splits", 1))
        launch = backward_launch(problem, config, schedule, problem.q_strides, 132, plans=strides)
        if schedule.group_splits > 1:
            launch, written[1:3] = launch.launch, [torch.empty_strided(*form) for form in launch.forms]
        taken = (q, k, v, out, rows, rows)
        read_too = BackwardOperands(Lengths(*lengths), operands.seed, slopes=operands.alibi_slopes, bias=operands.bias,
                                    score_tensors=operands.score_tensors, **plans)
        if config.kernel == "d256":
            launch = launch.dq if request["part"] == "dq" else launch.dkdv
            written = written[:1] if request["part"] == "dq" else written[1:3]
            arguments = launch.arguments((*taken[:4], *written), *taken[4:], read_too)
        else:
            read = torch.empty(launch.columns_shape, dtype=torch.bfloat16) if config.augmented_k else rows
            counter = torch.empty(1, dtype=torch.int32) if config.dynamic_tiles else None
            delta = rows if operands.bias is not None and not config.augmented_k else None
            arguments = launch.arguments(launch.taken((*taken, *written[:3]), read, operands.bias),
                                         torch.empty(launch.accum_shape), read_too, counter, delta)
    facts = {"limit": spec.shared_memory, "planned": config.shared_bytes(problem)}
    return prepared("sm_90", partial(launch.enqueue.compile, arguments), facts, report_of_hopper)


def plan_of(problem, rows, columns):
    """Return the strides of a call's mask plan, and something in the place of its lists and bits; or None's."""
    planner = planner_of(problem, rows=rows, columns=columns, keys_first=False)
    if planner is None:
        return None, NO_PLAN
    return planner.strides, (torch.empty(8, dtype=torch.int32), torch.empty(8, dtype=torch.int32))


def backward_plans_of(problem, config):
    """Likewise of a backward pass: the strides of each plan, and what stands in their place, by BackwardOperands."""
    planners = backward_planners(replace(problem, direction="backward"), config)
    names = ("lists", "bits", "dq_lists", "dq_bits")[:2 * len(planners)]
    return tuple(planner.strides for planner in planners), {name: torch.empty(8, dtype=torch.int32) for name in names}


def report_of_hopper(compiled, log):
    """Facts of a Gluon kernel; ``warnings``: that products are serialized, C7510 and its kin of ptxas's log."""
    sass, ptx = sass_of(compiled), compiled.asm["ptx"]
    waits = {"acquire": ptx.count("ld.acquire.gpu"), "release": ptx.count("st.release.gpu"),
             "complete": len(re.findall(r"cp\.async\.bulk\.wait_group\s+0;", ptx))}
    transposed = len(re.findall(r"ldmatrix\.\S+\.trans\.", ptx))  # which few kernels have
    if transposed:
        waits["transposed"] = transposed
    return nvidia_report(compiled) | sass_report(sass) | waits | {
        "logged": "Used" in log, "warnings": re.findall(r"C75\d\d", log), "threads": 32 * compiled.metadata.num_warps,
        "unset": possibly_unset(sass), "strays": stray_descriptors(sass), "in_steps": spills_in_steps(sass),
        "early": early_reads(sass)}


def prepared(arch, compile_it, facts, read):
    driver.set_active(CompileOnlyDriver(TARGETS[arch]))
    return Prepared(facts, compile_it, read)


def nvidia_report(compiled):
    """Registers, stack and, by the names of PTX, products and copies of tiles."""
    usage = _of_cubin(compiled, "cuobjdump", "--dump-resource-usage")
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    ptx = compiled.asm["ptx"]
    names = {"wgmma": "wgmma.mma_async", "mma": "mma.sync", "tcgen05": "tcgen05.mma",
             "bulk": "cp.async.bulk.tensor"}
    return {"shared": compiled.metadata.shared, "registers": registers, "stack": stack,
            **{name: ptx.count(word) for name, word in names.items()}}


def sass_report(sass):
    names = ("HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "REDG", "WARPGROUP.ARRIVE")
    return {name.lower(): len(re.findall(rf"\b{name}\b", sass)) for name in names}


def sass_of(compiled):
    return _of_cubin(compiled, "nvdisasm", "-c")


def _of_cubin(compiled, *command):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return _tool(*command, file.name)


def amd_report(compiled):
    text = compiled.asm["amdgcn"]
    found = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}
    return {"shared": compiled.metadata.shared, "registers": found["vgpr_count"],
            "stack": 4 * found["vgpr_spill_count"], "mfma": text.count("v_mfma")}


def _tool(name, *arguments):
    done = subprocess.run([getattr(knobs.nvidia, name).path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


if __name__ == "__main__":
    serve(prepare)
