"""Which backend serves which call: calls of every kind, and what backends answer, also for a GPU that is not here.

The answers are the backends' own, of ``why_not``; nothing is allocated or computed.
"""

import contextlib
import importlib.util
import re
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from tilewise.backends import cudnn
from tilewise.backends._support import hopper
from tilewise.dispatch import Explanation, explain_problem
from tilewise.errors import InvalidInput
from tilewise.functions import FunctionCode
from tilewise.masks import Mask, causal, chunk, prefix, sink_tokens, window
from tilewise.problem import AttentionProblem, dense_strides
from tilewise.problem.options import FunctionSpec, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.support.caches import clear_caches
from tilewise.support.generated import jit_function
from tilewise.support.names import DTYPES
from tilewise.tuning.device import DeviceSpec

LENGTH = 4096  # queries and keys of the calls that are asked about: long enough for the kernels of long calls
_HEAD_DIMS = ((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512),
              (640, 640))


def describe(device: str, *, hk: int = 8, lengths: tuple[int, int] = (1024, 1024), dims: tuple[int, int] = (64, 64),
             dtype: torch.dtype = torch.bfloat16, mask: Mask | None = None) -> AttentionProblem:
    """Describe a call of a usual size on a device that need not be here; lengths (sq, sk), dims (d, dv)."""
    hq, (sq, sk), (d, dv) = 8, lengths, dims
    shapes = (2, hq, sq, d), (2, hk, sk, d), (2, hk, sk, dv)
    q_strides, k_strides, v_strides = (dense_strides(shape, (4, 3, 2, 1)) for shape in shapes)
    return AttentionProblem(b=2, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv, dtype=dtype, device=torch.device(device),
                            scale=d**-0.5, mask=Mask() if mask is None else mask, q_strides=q_strides,
                            k_strides=k_strides, v_strides=v_strides)


def rows(device: str, dtype: torch.dtype = torch.bfloat16, length: int = 1024) -> dict[str, AttentionProblem]:
    """Name calls of every kind, of one dtype, but for those that are about a dtype; ``length``: queries and keys."""
    call = partial(describe, device, dtype=dtype, lengths=(length, length))
    plain = call()
    fewer_queries = (length // 2, length)
    named = {name: call(dtype=getattr(torch, name)) for name in DTYPES}
    return named | {
        "causal": call(mask=causal()),
        "causal top_left, fewer queries": call(lengths=fewer_queries, mask=causal("top_left")),
        "causal bottom_right, fewer queries": call(lengths=fewer_queries, mask=causal("bottom_right")),
        "sliding window": call(mask=causal() & window(255, 0)),
        "prefix": call(mask=prefix(255)),
        "sliding window with sink tokens": call(mask=causal() & window(255, 0) & sink_tokens(4)),
        "causal within chunks": call(mask=causal() & chunk(256)),
        "GQA, causal": call(hk=2, mask=causal()),
        "head dim 256": call(dims=(256, 256)),
        "head dim 512": call(dims=(512, 512)),
        "head dim 576, of v 512": call(dims=(576, 512)),
        "head dim 640": call(dims=(640, 640)),
        "head dim 80": call(dims=(80, 80)),
        "head dim of v different": call(dims=(192, 128)),
        "head dim not innermost in memory": replace(plain, q_strides=(8 * length * 64, length * 64, 1, length)),
        "no keys": call(lengths=(length, 0)),
        **{name: replace(plain, scores=options) for name, options in options_of(plain).items()},
        **with_lengths(plain),
        "gradient": plain.backward(lse_grad=False),
        "gradient, causal": call(mask=causal()).backward(lse_grad=False),
        "gradient through lse": plain.backward(lse_grad=True),
        "gradient, dropout": replace(plain, scores=ScoreOptions(dropout_p=0.125)).backward(lse_grad=False),
        "gradient, deterministic=True": replace(plain, deterministic=True).backward(lse_grad=False),
    }


def operand(dtype: torch.dtype, *shape: int) -> OperandSpec:
    """Describe a dense operand."""
    return OperandSpec(shape, torch.empty(shape, device="meta").stride(), dtype)


def with_lengths(problem: AttentionProblem) -> dict[str, AttentionProblem]:
    """Name the problems whose lengths are data."""
    lengths, borders = operand(torch.int32, problem.b), operand(torch.int32, 9)
    return {"lengths of each sequence": replace(problem, sequences=Sequences(seqlens_q=lengths, seqlens_k=lengths)),
            "packed sequences": replace(problem, b=1, sequences=Sequences(8, borders, borders))}


def options_of(problem: AttentionProblem) -> dict[str, ScoreOptions]:
    """Name the options of a call, each alone and all together."""
    heads, pairs = problem.hq, (1, problem.hq, problem.sq, problem.sk)
    alone: dict[str, dict[str, Any]] = {
        "additive bias": {"bias": operand(problem.dtype, *pairs)},
        "ALiBi": {"alibi_slopes": operand(torch.float32, 1, heads)},
        "documents": {"documents_q": operand(torch.int32, 1, 4, problem.sq),
                      "documents_k": operand(torch.int32, 1, 4, problem.sk)},
        "boolean mask": {"mask": operand(torch.bool, *pairs)},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": operand(torch.float32, heads)},
        "dropout": {"dropout_p": 0.125},
        "score function": {"score_function": FunctionSpec(FunctionCode("score", _unchanged(), _nothing, None, 0), ())},
        "mask function": {"mask_function": FunctionSpec(FunctionCode(
            "mask", _nothing, _nothing, None, 0, reads_batch=False, reads_head=False), ())},
        "max_logit": {"max_logit": True},
    }
    together = {name: value for options in alone.values() for name, value in options.items()}
    return {name: ScoreOptions(**options) for name, options in {**alone, "all of these": together}.items()}


@cache
def _unchanged() -> Any:
    """Return a score function in Triton, where that is installed, of which its compiler may be asked."""
    source = "def score(score, batch, head, q_idx, k_idx):\n    return score\n"
    return _nothing if importlib.util.find_spec("triton") is None else jit_function("score", source, {})


def _nothing(*_: object) -> torch.Tensor:
    """Stand for a function of the user's, in Triton and in torch."""
    return torch.empty(0)


@dataclass(frozen=True)
class Support:
    """What backends answer to one kind of call.

    Attributes:
        group: of the table that it stands in: "head dims", or a dtype.
        name: of the call in it.
    """

    group: str
    name: str
    dtype: str
    answer: Explanation


def supported(device: str, on_step: Callable[[str], None] = lambda text: None) -> list[Support]:
    """Ask all backends about calls of every dtype: of several head dims, then with each mask and option."""
    asked: list[tuple[str, str, str, AttentionProblem]] = []
    for dtype in DTYPES:
        known: torch.dtype = getattr(torch, dtype)
        asked += [("head dims", f"{d}" if d == dv else f"{d}, of v {dv}", dtype,
                   describe(device, dims=(d, dv), dtype=known, lengths=(LENGTH, LENGTH))) for d, dv in _HEAD_DIMS]
    for dtype in DTYPES:
        calls = rows(device, getattr(torch, dtype), LENGTH)
        named = {"no mask, no option": calls[dtype], "deterministic=True": replace(calls[dtype], deterministic=True)}
        named |= {name: problem for name, problem in calls.items() if name not in DTYPES and "gradient" not in name}
        asked += [(dtype, name, dtype, problem) for name, problem in named.items()]
    found = []
    for group, name, dtype, problem in asked:
        on_step(f"{dtype}, {name}")
        found.append(Support(group, name, dtype, explain_problem(problem)))
    return found


def check_arch(arch: str) -> None:
    """Raise :class:`InvalidInput` for what names no architecture of a GPU, or where backends cannot be asked."""
    if (found := re.fullmatch(r"sm_(\d{1,2})(\d)", arch)) is None or (int(found[1]), int(found[2])) < (7, 5):
        raise InvalidInput(f"arch is {arch!r}; allowed are NVIDIA's from sm_75 on, such as sm_80, sm_90 and sm_100.")
    if importlib.util.find_spec("triton") is None:
        raise InvalidInput(f"arch is {arch!r}, and Triton is not installed, without which the backends of GPUs cannot "
                           "be asked; allowed is to install tilewise[triton], or to leave the architecture out.")


@contextlib.contextmanager
def as_if_on(arch: str) -> Iterator[None]:
    """Let backends answer in a ``with`` block for "cuda" as on a GPU of an architecture, whatever is here.

    Every optional package counts as installed, in the oldest version that is taken, and cuDNN as taking its graphs.

    Raises:
        InvalidInput: as :func:`check_arch`.
    """
    check_arch(arch)
    capability, spec = (int(arch[3:-1]), int(arch[-1])), DeviceSpec.of_arch(arch)
    answers = {
        "torch.cuda.get_device_capability": capability, "tilewise.dispatch.device_spec": spec,
        "tilewise.backends.gluon.device_spec": spec, "tilewise.backends._support.hopper.triton_version": hopper.OLDEST,
        "tilewise.backends._support.float32.device_spec": spec, "tilewise.backends._support.float32.lacking": None,
        "tilewise.backends.triton.device_spec": spec,
        "tilewise.backends.cudnn.frontend_version": cudnn.OLDEST_FRONTEND,
        "tilewise.backends.cudnn.library_version": cudnn.OLDEST_LIBRARY,
        "tilewise.backends.cudnn.graph_refusal": None,
    }
    clear_caches()  # of what was answered for another device
    with contextlib.ExitStack() as stack:
        stack.callback(clear_caches)
        for name, answer in answers.items():
            stack.enter_context(unittest.mock.patch(name, return_value=answer))
        yield
