"""Write what each backend takes into backends.md: the answers of ``why_not``, asked without a GPU.

Usage: ``python docs/support_table.py`` rewrites the block between the markers.
"""

import os
import sys
import unittest.mock
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from tilewise.autograd.double_backward import why_not_twice
from tilewise.backends import cudnn
from tilewise.backends._support import hopper
from tilewise.dispatch import BACKENDS, get_backend
from tilewise.masks import Mask, causal, chunk, prefix, sink_tokens, window
from tilewise.problem import AttentionProblem, dense_strides
from tilewise.problem.options import FunctionCode, FunctionSpec, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning.device import DeviceSpec

PAGE = Path(__file__).with_name("backends.md")
CAPABILITY = (9, 0)
FLOAT32_ALONE = ("cuda", "cuda_ieee")
BEGIN, END = "<!-- support table -->\n", "<!-- /support table -->\n"


def describe(device: str, *, hk: int = 8, lengths: tuple[int, int] = (1024, 1024), dims: tuple[int, int] = (64, 64),
             dtype: torch.dtype = torch.bfloat16, mask: Mask | None = None) -> AttentionProblem:
    """Describe a call of a usual size on a device that need not be here; lengths (sq, sk), dims (d, dv)."""
    hq, (sq, sk), (d, dv) = 8, lengths, dims
    shapes = (2, hq, sq, d), (2, hk, sk, d), (2, hk, sk, dv)
    q_strides, k_strides, v_strides = (dense_strides(shape, (4, 3, 2, 1)) for shape in shapes)
    return AttentionProblem(b=2, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv, dtype=dtype, device=torch.device(device),
                            scale=d**-0.5, mask=Mask() if mask is None else mask, q_strides=q_strides,
                            k_strides=k_strides, v_strides=v_strides)


def rows(device: str) -> dict[str, AttentionProblem]:
    """Name the problems of one table."""
    plain = describe(device)
    fewer_queries = (512, 1024)
    named = {str(dtype).removeprefix("torch."): describe(device, dtype=dtype)
             for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
    return named | {
        "causal": describe(device, mask=causal()),
        "causal top_left, fewer queries": describe(device, lengths=fewer_queries, mask=causal("top_left")),
        "causal bottom_right, fewer queries": describe(device, lengths=fewer_queries, mask=causal("bottom_right")),
        "sliding window": describe(device, mask=causal() & window(255, 0)),
        "prefix": describe(device, mask=prefix(255)),
        "sliding window with sink tokens": describe(device, mask=causal() & window(255, 0) & sink_tokens(4)),
        "causal within chunks": describe(device, mask=causal() & chunk(256)),
        "GQA, causal": describe(device, hk=2, mask=causal()),
        "head dim 256": describe(device, dims=(256, 256)),
        "head dim 512": describe(device, dims=(512, 512)),
        "head dim 576, of v 512": describe(device, dims=(576, 512)),
        "head dim 640": describe(device, dims=(640, 640)),
        "head dim 80": describe(device, dims=(80, 80)),
        "head dim of v different": describe(device, dims=(192, 128)),
        "head dim not innermost in memory": replace(plain, q_strides=(8 * 1024 * 64, 1024 * 64, 1, 1024)),
        "no keys": describe(device, lengths=(1024, 0)),
        **{name: replace(plain, scores=options) for name, options in options_of(plain).items()},
        **with_lengths(plain),
        "gradient": plain.backward(lse_grad=False),
        "gradient, causal": describe(device, mask=causal()).backward(lse_grad=False),
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
    alone = {
        "additive bias": {"bias": operand(problem.dtype, *pairs)},
        "ALiBi": {"alibi_slopes": operand(torch.float32, 1, heads)},
        "documents": {"documents_q": operand(torch.int32, 1, 4, problem.sq),
                      "documents_k": operand(torch.int32, 1, 4, problem.sk)},
        "boolean mask": {"mask": operand(torch.bool, *pairs)},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": operand(torch.float32, heads)},
        "dropout": {"dropout_p": 0.125},
        "score function": {"score_function": FunctionSpec(FunctionCode("score", _nothing, _nothing, None, 0), ())},
        "mask function": {"mask_function": FunctionSpec(FunctionCode("mask", _nothing, _nothing, None, 0), ())},
        "max_logit": {"max_logit": True},
    }
    together = {name: value for options in alone.values() for name, value in options.items()}
    return {name: ScoreOptions(**options) for name, options in {**alone, "all of these": together}.items()}


def _nothing(*_: object) -> torch.Tensor:
    """Stand for a function of the user's, in Triton and in torch."""
    return torch.empty(0)


def table(device: str) -> str:
    """Return a Markdown table, a row a problem and a column a backend, and below it the sentences of refusal."""
    lines = [f"| | {' | '.join(BACKENDS)} |", "|---" * (1 + len(BACKENDS)) + "|"]
    numbers: dict[str, int] = {}
    answers = {name: [get_backend(backend).why_not(asked(name, problem, backend)) for backend in BACKENDS]
               for name, problem in rows(device).items()}
    answers["double_backward=True"] = [why_not_twice(backend) for backend in BACKENDS]
    for name, reasons in answers.items():
        cells = ["yes" if reason is None else f"no ({numbers.setdefault(reason, len(numbers) + 1)})"
                 for reason in reasons]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in numbers.items())]) + "\n"


def asked(name: str, problem: AttentionProblem, backend: str) -> AttentionProblem:
    """Return what a backend is asked about: those of float32 about float32, but where the row is about a dtype."""
    about_dtype = name == str(problem.dtype).removeprefix("torch.")
    return problem if about_dtype or backend not in FLOAT32_ALONE else replace(problem, dtype=torch.float32)


def render() -> str:
    """Return the generated block, without its markers."""
    # A table for a device that need not be here: the facts of it that backends ask for are given.
    spec = DeviceSpec.of_arch(f"sm_{CAPABILITY[0]}{CAPABILITY[1]}")
    with (unittest.mock.patch("torch.cuda.get_device_capability", return_value=CAPABILITY),
          unittest.mock.patch("tilewise.backends.gluon.device_spec", return_value=spec),
          unittest.mock.patch("tilewise.backends._support.hopper.triton_version", return_value=hopper.OLDEST),
          unittest.mock.patch("tilewise.backends._support.float32.device_spec", return_value=spec),
          unittest.mock.patch("tilewise.backends._support.float32.lacking", return_value=None),
          unittest.mock.patch("tilewise.backends.triton.device_spec", return_value=spec),
          unittest.mock.patch("tilewise.backends.cudnn.frontend_version", return_value=cudnn.OLDEST_FRONTEND),
          unittest.mock.patch("tilewise.backends.cudnn.library_version", return_value=cudnn.OLDEST_LIBRARY),
          unittest.mock.patch("tilewise.backends.cudnn.graph_refusal", return_value=None)):
        gpu = table("cuda")
    capability = ".".join(map(str, CAPABILITY))
    return f"### On a GPU (compute capability {capability})\n\n{gpu}\n### On the CPU\n\n{table('cpu')}"


def main() -> None:
    """Rewrite the block in the page."""
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET"):
        sys.exit("the table is made where Triton is installed and TRITON_INTERPRET is not set")
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}{render()}{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
