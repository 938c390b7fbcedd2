"""Write what each backend takes into backends.md: the answers of ``why_not``, asked without a GPU.

Usage: ``python docs/support_table.py`` rewrites the block between the markers.
"""

import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from tilewise.autograd.double_backward import why_not_twice
from tilewise.bench.support import as_if_on, rows
from tilewise.dispatch import get_backend
from tilewise.problem import AttentionProblem
from tilewise.support.names import BACKENDS

PAGE = Path(__file__).with_name("backends.md")
ARCH, CAPABILITY = "sm_90", "9.0"
FLOAT32_ALONE = ("cuda", "cuda_ieee")
BEGIN, END = "<!-- support table -->\n", "<!-- /support table -->\n"


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
    with as_if_on(ARCH):
        gpu = table("cuda")
    return f"### On a GPU (compute capability {CAPABILITY})\n\n{gpu}\n### On the CPU\n\n{table('cpu')}"


def main() -> None:
    """Rewrite the block in the page."""
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET"):
        sys.exit("the table is made where Triton is installed and TRITON_INTERPRET is not set")
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}{render()}{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
