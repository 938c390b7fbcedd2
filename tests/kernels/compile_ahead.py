"""Compile the Triton kernels for a GPU that is not here, and read what the compiler made of them.

Run as a script: Triton decides at import whether it interprets, and its version is chosen by PYTHONPATH, so the tests
start a process per Triton version. Reads a JSON list of requests on standard input, prints one JSON row a line.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tilewise.kernels.triton.backward import delta_launch, dkdv_launch, dq_launch
from tilewise.kernels.triton.forward import forward_launch
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem, dense_strides
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics import delta_config
from tilewise.tuning.table import KERNELS, config_for

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class CompileOnlyDriver:
    """The part of Triton's driver that the JIT front end asks before it compiles."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return (self.target.backend, self.target.arch)  # Triton caches per device: one for each target

    def get_current_stream(self, device):
        del device
        return 0


def problem_of(request):
    b, hq, hk, s, d = 1, 2, 1, 4096, request["d"]
    shapes = (b, hq, s, d), (b, hk, s, d), (b, hk, s, d)
    strides = [dense_strides(shape, (4, 2, 1, 1)) for shape in shapes]
    return AttentionProblem(
        b=b, hq=hq, hk=hk, sq=s, sk=s, d=d, dv=d, dtype=getattr(torch, request["dtype"]),
        device=torch.device("cuda", 0), scale=1.0, mask=Mask(*request["mask"]), q_strides=strides[0],
        k_strides=strides[1], v_strides=strides[2])


def launch_of(kernel, problem, config, spec):
    """Return the launch and the dtypes of its tensors, in order."""
    dtype, f32 = problem.dtype, torch.float32
    q_strides, k_strides, v_strides = problem.q_strides, problem.k_strides, problem.v_strides
    if kernel == "delta":
        launch = delta_launch(problem, delta_config(problem, spec), problem.out_strides, problem.out_strides, None)
        return launch, (dtype, dtype, dtype, f32)
    config = config or config_for(kernel, problem, spec)
    if kernel == "forward":
        return forward_launch(problem, config, "ieee"), (dtype,) * 4 + (f32,)
    problem = replace(problem, direction="backward")
    if kernel == "dkdv":
        launch = dkdv_launch(problem, config, "ieee", problem.out_strides, k_strides, v_strides)
        return launch, (dtype,) * 4 + (f32, f32) + (dtype,) * 2
    return dq_launch(problem, config, "ieee", problem.out_strides, q_strides), (dtype,) * 4 + (f32, f32, dtype)


def compile_for(request):
    spec = DeviceSpec.of_arch(request["arch"], request.get("device", ""))
    config = request.get("config")
    if config:
        config = KERNELS[request["kernel"]](*config)
    launch, dtypes = launch_of(request["kernel"], problem_of(request), config, spec)
    driver.set_active(CompileOnlyDriver(TARGETS[request["arch"]]))
    compiled = launch.kernel.warmup(*dtypes, *launch.scalars, grid=launch.grid, **launch.options)
    row = request | {"triton": triton.__version__, "shared": compiled.metadata.shared, "limit": spec.shared_memory,
                     "num_warps": launch.options["num_warps"]}
    return row | (amd_report(compiled) if request["arch"].startswith("gfx") else nvidia_report(compiled))


def nvidia_report(compiled):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    counts = {name.lower(): len(re.findall(rf"\b{name}\b", sass)) for name in ("HGMMA", "HMMA", "UTCHMMA", "LDL", "STL")}
    return {"registers": registers, "stack": stack, "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"), **counts}


def amd_report(compiled):
    text = compiled.asm["amdgcn"]
    found = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}
    return {"registers": found["vgpr_count"], "stack": 4 * found["vgpr_spill_count"], "mfma": text.count("v_mfma")}


def _tool(name, *arguments):
    done = subprocess.run([getattr(knobs.nvidia, name).path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


if __name__ == "__main__":
    for wanted in json.load(sys.stdin):
        print(json.dumps(compile_for(wanted)), flush=True)
