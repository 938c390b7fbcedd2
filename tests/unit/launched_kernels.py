"""Compile calls ahead, then make them on tensors that have memory, by the backends alone; compare what both look up.

Run as a script, with a cache of its own (TRITON_CACHE_DIR, TILEWISE_CACHE) and the Triton that PYTHONPATH chooses. It
prints a JSON value: the places in the caches that compile_ahead reported, those that the launches looked up, and the
files that the launches left there beside them.
"""

import json
import sys
from base64 import b32encode
from dataclasses import replace
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from tilewise import causal, window
from tilewise.backends.base import Needs, Saved
from tilewise.compile_ahead import GPUS, CallShape, compile_ahead
from tilewise.compile_ahead.gpu import Settings, prepare
from tilewise.dispatch import choose
from tilewise.kernels.hooks import compile_only
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPERANDS, Operands

GPU = GPUS["h200"]
CALLS = {
    "gluon": CallShape(1024, hq=16, hk=4, d=128, mask=causal(), layout="bshd"),
    "triton": CallShape(200, hq=2, d=16, dtype=torch.float16, mask=window(63, 0), sinks=True, backend="triton"),
    "cuda": CallShape(1024, hq=2, d=64, dtype=torch.float32, mask=causal()),
}


class OnCpu(TorchFunctionMode):
    """What is made on the GPU lies in memory of the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def launch(call):
    """Run the two passes of a call on the backends that serve it."""
    def tensor(h, d):
        if call.layout == "bshd":
            return torch.randn(call.b, call.sq, h, d, dtype=call.dtype).transpose(1, 2)
        return torch.randn(call.b, h, call.sq, d, dtype=call.dtype)

    hk = call.hk or call.hq
    q, k, v = tensor(call.hq, call.d), tensor(hk, call.d), tensor(hk, call.d)
    operands = Operands(sinks=torch.randn(call.hq, dtype=call.dtype)) if call.sinks else NO_OPERANDS
    problem = replace(AttentionProblem.from_tensors(q, k, v, operands, mask=call.mask), device=torch.device("cuda", 0))
    with OnCpu():
        out, lse, _ = choose(problem, call.backend).forward(problem, q, k, v, operands)
        problem = problem.backward(lse_grad=False)
        choose(problem, call.backend).backward(problem, Saved(q, k, v, out, lse, operands), torch.randn_like(out), None,
                                               Needs())


def main(names, cache):
    calls = [CALLS[name] for name in names]
    report = compile_ahead(calls, device=GPU, workers=1)
    files = sorted(str(path) for path in cache.rglob("*") if path.is_file())
    prepare(GPU, Settings.here())
    torch._C._dynamo.guards._empty_strided_cuda = lambda sizes, strides, dtype: torch.empty_strided(
        sizes, strides, dtype=dtype)
    launched = []

    def take(name, compile_kernel, file=None):
        compiled = compile_kernel()
        launched.append(file.name if file else b32encode(bytes.fromhex(compiled.hash)).decode().rstrip("="))

    with compile_only(take):
        for call in calls:
            launch(call)
    left = sorted(str(path) for path in cache.rglob("*") if path.is_file() and str(path) not in files)
    print(json.dumps({"ahead": sorted(kernel.place.name for kernel in report.kernels),
                      "launched": sorted(set(launched)), "left": left, "gpu": report.gpu.name,
                      "failures": [kernel.failure for kernel in report.kernels if kernel.failure],
                      "names": [kernel.name for kernel in report.kernels]}))


if __name__ == "__main__":
    main(sys.argv[2:], Path(sys.argv[1]))
