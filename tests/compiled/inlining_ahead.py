"""Ask whether the Hopper kernels inline score functions, for a GPU that is not here.

Run as a script, as compile_ahead.py is: reads a request in JSON a line, answers each with a row in JSON a line: the
reason against it, or the kernels of a whole call with the function.
"""

import json
import sys
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from conformance.functions import score_functions
from tilewise import attention
from tilewise.compile_ahead.gpu import GPUS, Settings, on_fake_gpu, prepare
from tilewise.functions import ScoreFunction
from tilewise.integrations.flex import traced_score
from tilewise.kernels.hopper.inlining import why_not_inlined

TABLE = torch.zeros(4, 900)


@triton.jit
def with_slope(score, slope):
    return score * slope


@triton.jit
def calling(score, batch, head, q_idx, k_idx, slopes):
    """Other functions: one of the user's, Triton's in Triton, and libdevice's."""
    slope = tl.load(slopes + head)
    return with_slope(tl.sigmoid(score) + libdevice.tanh(score), slope) - slope * tl.abs(q_idx - k_idx)


@triton.jit
def numbered(score, batch, head, q_idx, k_idx):
    return score + tl.arange(0, 64)


@triton.jit
def numbered_derivative(dscore, score, batch, head, q_idx, k_idx):
    return dscore + tl.arange(0, 64)


@triton.jit
def scanned(score, batch, head, q_idx, k_idx):
    """What needs a whole row, and ends in an error of a pass, not of the front end."""
    return tl.cumsum(score, 1)


@triton.jit
def doubled(score, batch, head, q_idx, k_idx):
    return score * 2.0


def of_every_kind(score, b, h, q_idx, kv_idx):
    """What is traced: a load, a curve, a choice, an infinity, integers of both signs, one result for all pairs."""
    hidden = torch.where((q_idx - kv_idx) % 7 == 3, -float("inf"), 20 * torch.tanh(score / 20))
    return torch.where((q_idx - kv_idx) // 3 < 400, hidden, score) + TABLE[h, q_idx - kv_idx]


def constant(score, b, h, q_idx, kv_idx):
    return h * 0.5


def in_float64(score, b, h, q_idx, kv_idx):
    return score.double() * 0.1


def functions():
    traced = {mod.__name__: traced_score(mod) for mod in (of_every_kind, constant, in_float64)}
    return score_functions("cpu") | traced | {
        "calling": ScoreFunction(calling, tensors=(TABLE[:, 0].contiguous(),)), "numbered": ScoreFunction(numbered),
        "scanned": ScoreFunction(scanned),
        "numbered_derivative": ScoreFunction(doubled, derivative=numbered_derivative),
        "complex": ScoreFunction(calling, tensors=(torch.zeros(4, dtype=torch.complex64),))}


def launched(function):
    """The kernels that both passes of a call launch, compiled or not; each has its arguments compared."""
    prepare(GPUS["h200"], Settings.here())
    names = []
    with on_fake_gpu(lambda name, compile_kernel, file=None: names.append(name)):
        q, k, v = (torch.empty(1, 4, 700, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
                   for _ in range(3))
        tensors = tuple(torch.empty_like(tensor, device="cuda") for tensor in function.tensors)
        out = attention(q, k, v, score_function=replace(function, tensors=tensors), backend="gluon")
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    return names


def main():
    known = functions()
    for line in sys.stdin:
        request = json.loads(line)
        function = known[request["function"]]
        if request.get("call"):
            print(json.dumps({"kernels": launched(function)}), flush=True)
            continue
        reason = why_not_inlined(function.code, tuple(tensor.dtype for tensor in function.tensors),
                                 backward=request["backward"], int64=request["int64"])
        print(json.dumps({"reason": reason, "name": function.code.name}), flush=True)


if __name__ == "__main__":
    main()
