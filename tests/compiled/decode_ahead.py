"""Compile the kernels of decoding for a GPU that is not here; a script, as compile_ahead.py, for the same reasons."""

import re
from dataclasses import replace
from functools import partial

import torch

from compiled.compile_ahead import amd_report, nvidia_report, prepared
from compiled.compile_record import serve
from tilewise.kernels.triton.decode_launch import (
    append_launch,
    cache_of,
    combine_launch,
    decode_launch,
    extras_of,
    is_whole,
    rotary_of,
    strides_of,
)
from tilewise.masks import Mask
from tilewise.problem.decode import CacheOperands, DecodeOptions, decode_problem, specs_of_inputs, specs_of_present
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics_decode import choose_splits, decode_config

_COPIED = re.compile(r"cp\.async\.c[ag]\.shared\.global\s*\[[^]]*\],\s*\[[^]]*\],\s*(\w+)")  # bytes of a copy


def tensors_of(request):
    """q, the caches and the operands; request["every"]: all of these that go together, and one key a sequence."""
    b, hk, group, capacity = 2, 2, 4, 8192
    d, sq, page, dtype = request["d"], request.get("sq", 1), request.get("page", 0), getattr(torch, request["dtype"])
    q = torch.empty(b, sq, hk * group, d, dtype=dtype).transpose(1, 2)
    cache = torch.empty(b if not page else 64, page or capacity, hk, d, dtype=dtype).transpose(1, 2)
    given = {"cache_seqlens": torch.empty(b, dtype=torch.int32)}
    if page:
        given["block_table"] = torch.empty(b, capacity // page, dtype=torch.int32)
    if request.get("every"):
        new = torch.empty(b, hk, 1, d, dtype=dtype)
        angles = torch.empty(capacity, d // 4, dtype=dtype)
        given |= {"k": new, "v": new, "rotary_cos": angles, "rotary_sin": angles, "sinks": torch.empty(hk * group),
                  "alibi_slopes": torch.empty(b, hk * group), "cache_leftpad": torch.empty(b, dtype=torch.int32)}
    return q, cache, CacheOperands(**given)


def prepare(request):
    spec = DeviceSpec.of_arch(request["arch"])
    q, kv, operands = tensors_of(request)
    every = bool(request.get("every"))
    options = DecodeOptions(Mask(100, 0) if every else Mask(), softcap=30.0 if every else None,
                            num_splits=request.get("splits"))
    problem = decode_problem(specs_of_inputs(q, kv, kv), specs_of_present(operands), options)
    config = replace(decode_config(problem, spec), overlapped=request.get("overlapped", False))
    splits = choose_splits(problem, config, 132)
    parts, rows = torch.empty(8, dtype=problem.dtype if is_whole(splits) else torch.float32), torch.empty(8)
    strides = strides_of(problem)
    cache, rotary = cache_of(operands, strides), rotary_of(operands, strides)
    extras = extras_of(operands, strides, problem.softcap)
    if request["kernel"] == "append":
        launch, tensors = append_launch(problem), (operands.k, operands.v, kv, kv, cache, rotary)
    elif request["kernel"] == "combine":
        launch = combine_launch(problem, config, splits)
        tensors = (rows, rows, torch.empty(8, dtype=problem.dtype), rows, extras)
    else:
        launch = decode_launch(problem, config, splits, config.row_tiles(problem), "ieee")
        tensors = (q, kv, kv, parts, rows, cache, rotary, extras)
    facts = {"limit": spec.shared_memory, "planned": config.shared_bytes(problem.width, problem.dtype.itemsize)}
    return prepared(request["arch"], partial(launch.compile, launch.arguments(tensors)), facts, report)


def report(compiled, _log):
    if "amdgcn" in compiled.asm:
        return amd_report(compiled)
    ptx = compiled.asm["ptx"]
    return nvidia_report(compiled) | {
        "waits": ptx.count("griddepcontrol.wait"), "lets": ptx.count("griddepcontrol.launch_dependents"),
        "copies": sorted({int(size, 0) for size in _COPIED.findall(ptx)})}


if __name__ == "__main__":
    serve(prepare)
