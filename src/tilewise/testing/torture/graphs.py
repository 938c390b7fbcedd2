"""CUDA graphs: what is captured once computes again what lies in its tensors then."""

from collections.abc import Callable
from typing import Any

import torch

from tilewise.masks import causal
from tilewise.testing.cases import Case
from tilewise.testing.torture.checks import Check, Need
from tilewise.testing.torture.trial import Got, Trial

_GPU_ONLY = "CUDA graphs are for GPUs"
_WARM_UPS = 3


def _replays(trial: Trial, case: Case, *, backward: bool) -> None:
    """Capture a call, then replay it twice with other inputs in the same tensors."""
    inputs = trial.inputs(case)
    leaves = [tensor.clone().requires_grad_(backward) for tensor in inputs[:3]]
    dout = inputs.dout.clone()

    def call() -> Got:
        out, _ = trial.attend(case, leaves[0], leaves[1], leaves[2])
        if not backward:
            return Got(out.detach())
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        return Got(out.detach(), None, dq, dk, dv)

    captured, graph = trial.guarded(lambda: _captured(call))
    for seed in (1, 2):
        others = trial.inputs(case, seed)
        with torch.no_grad():
            for tensor, other in zip((*leaves, dout), others, strict=False):
                tensor.copy_(other)
        trial.guarded(graph.replay)
        trial.judge(case, others, captured)


def _captured(call: Callable[[], Got]) -> tuple[Got, torch.cuda.CUDAGraph]:
    """Warm up on a stream beside, as torch's documentation asks for, and capture."""
    cuda: Any = torch.cuda  # whose stubs leave its streams untyped
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    return captured, graph


def _forward(trial: Trial, case: Case) -> None:
    _replays(trial, case, backward=False)


def _training(trial: Trial, case: Case) -> None:
    _replays(trial, case, backward=True)


def _check(name: str, about: str, case: Case, *needs: Need) -> Check:
    return Check(name, "graphs", about, case, _training if needs else _forward, gpu_only=_GPU_ONLY, needs=needs)


_CAUSAL = Case("graph", b=2, sq=320, sk=320, mask=causal())
_FEW_QUERIES = Case("graph_few_queries", sq=16, sk=4096)

CHECKS: tuple[Check, ...] = (
    _check("graph_of_forward", "a captured forward pass, replayed with other inputs", _CAUSAL),
    _check("graph_of_few_queries", "the same of 16 queries and 4096 keys, which kernels split", _FEW_QUERIES),
    _check("graph_of_training", "captured forward and backward passes, replayed with other inputs", _CAUSAL,
           "backward"),
)
