"""Launches the Gluon kernels: Hopper GPUs, 16-bit, plain calls; the fastest there."""

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from tilewise.backends.base import Gradients, Needs, Results, Saved
from tilewise.backends.current import is_current
from tilewise.errors import UnsupportedProblem
from tilewise.kernels.gluon.launch import HopperForward
from tilewise.problem import AttentionProblem, Sizes
from tilewise.scores import NO_OPERANDS, NO_OPTIONS, Operands
from tilewise.tuning.device import device_spec
from tilewise.tuning.heuristics import hopper_forward_config

WIDEST = 128
# The Triton that the kernels ran with on a GPU, and passed. Newer ones, to 3.9, compile them too (tests/kernels), but
# an assembler's work is not to be trusted unseen: pipeline.py tells of a fault that was found by running, and only so.
CHECKED = (3, 6)
_EVERY = Needs()


class GluonBackend:
    """Warp-specialised kernels for sm_90; every result is the same on every run."""

    name = "gluon"

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Return the reason against, if there is one."""
        return (_wrong_machine(problem) or _wrong_pass(problem) or _wrong_options(problem) or _wrong_strides(problem))

    def forward(self, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                operands: Operands = NO_OPERANDS) -> Results:
        """See :class:`tilewise.backends.base.Backend`."""
        plan = _plan(problem)
        out = torch.empty_strided(plan.shape, plan.strides, dtype=problem.dtype, device=problem.device)
        lse = torch.empty(plan.shape[:3], dtype=torch.float32, device=problem.device)
        if is_current(problem.device):
            plan.launch(q, k, v, out, lse)
        else:
            with torch.cuda.device(problem.device):
                plan.launch(q, k, v, out, lse)
        return Results(out, lse)

    def backward(self, problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                 needs: Needs = _EVERY) -> Gradients:
        """There is none yet: why_not refuses every backward problem."""
        raise UnsupportedProblem(f"backend 'gluon' refuses this problem: {problem}", {self.name: _NO_BACKWARD})


_NO_BACKWARD = "has no backward pass; without backend= another one takes what it saved"


@dataclass(frozen=True)
class _Plan:
    """Shape and strides of out, and the launch."""

    shape: Sizes
    strides: Sizes
    launch: HopperForward


@lru_cache(maxsize=1024)
def _plan(problem: AttentionProblem) -> _Plan:
    multiprocessors = torch.cuda.get_device_properties(problem.device).multi_processor_count
    return _Plan((problem.b, problem.hq, problem.sq, problem.dv), problem.out_strides,
                 HopperForward(problem, hopper_forward_config(problem), multiprocessors))


@cache
def _triton_version() -> tuple[int, ...] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])


def _wrong_machine(problem: AttentionProblem) -> str | None:
    """Hopper, and a Triton whose Gluon is known."""
    if problem.device.type != "cuda":
        return f"runs on Hopper GPUs (sm_90), got {problem.device}"
    arch = device_spec(problem.device).arch
    if arch != "sm_90":
        return f"runs on Hopper GPUs (sm_90), got {arch}"
    version = _triton_version()
    if version != CHECKED:
        found = "none" if version is None else ".".join(map(str, version))
        return f"has run with Triton 3.6 alone, and other versions' code is unchecked on GPUs, got {found}"
    return None


def _wrong_pass(problem: AttentionProblem) -> str | None:
    if problem.direction == "backward":
        return _NO_BACKWARD
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, got {problem.dtype}"
    if max(problem.d, problem.dv) > WIDEST:
        return f"takes head dims up to {WIDEST}, got {problem.d} and {problem.dv}"
    return None


def _wrong_options(problem: AttentionProblem) -> str | None:
    if problem.sequences.are_data:
        return f"takes no lengths that are data, got {problem.sequences}"
    if problem.mask.has_exceptions:
        return f"takes causal masks and windows, got {problem.mask}"
    if problem.scores.max_logit:
        return "takes no max_logit"
    if problem.scores != NO_OPTIONS:
        return f"takes nothing that changes scores, got {problem.scores}"
    if problem.is_empty:
        return "needs a pair that is visible, got none"
    return None


def _wrong_strides(problem: AttentionProblem) -> str | None:
    """Say which tensor Hopper's copy engine cannot move: it wants 16-byte multiples, but for a last stride of 1."""
    itemsize = problem.dtype.itemsize
    if not problem.aligned:
        return "needs q, k and v at addresses that are multiples of 16 bytes"
    queries, keys = (problem.b, problem.hq, problem.sq), (problem.b, problem.hk, problem.sk)
    for name, sizes, strides in (("q", queries, problem.q_strides), ("k", keys, problem.k_strides),
                                 ("v", keys, problem.v_strides), ("out", queries, problem.out_strides)):
        if strides[3] != 1 or any(size > 1 and (stride <= 0 or stride * itemsize % 16)
                                  for size, stride in zip(sizes, strides, strict=False)):
            return (f"needs a last stride of 1 and the others positive multiples of {16 // itemsize} elements, got "
                    f"{name} with {strides}")
    return None


backend = GluonBackend()
