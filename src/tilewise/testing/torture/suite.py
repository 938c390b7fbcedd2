"""Run the checks on an implementation."""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from tilewise.testing.torture import determinism, edges, graphs, layouts, numbers, sizes, streams
from tilewise.testing.torture.checks import Check
from tilewise.testing.torture.implementation import Implementation
from tilewise.testing.torture.trial import NotApplicable, Trial, Wrong

Status = Literal["pass", "fail", "n/a"]
CHECKS: tuple[Check, ...] = (numbers.CHECKS + edges.CHECKS + layouts.CHECKS + sizes.CHECKS + determinism.CHECKS
                             + graphs.CHECKS + streams.CHECKS)
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one check.

    Attributes:
        check, group, issue: those of the check.
        implementation: its name.
        status: pass, fail, or n/a where it does not apply.
        sentence: what failed and by how much, or why it does not apply; "" of a pass.
        seconds: that it took, the reference's time included.
        lost: the device answers no more: an illegal access ended what this process can do with it.
    """

    check: str
    group: str
    implementation: str
    status: Status
    sentence: str = ""
    issue: str = ""
    seconds: float = 0.0
    lost: bool = False


def torture(implementation: Implementation, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16, *,
            checks: Sequence[Check] = CHECKS, on_result: Callable[[Result], None] | None = None) -> list[Result]:
    """Run the checks on an attention function, one after another, and return what became of each.

    Nothing is raised for a failure; where the device is lost, the checks behind that one are not applicable.

    Args:
        implementation: the function, and what it takes.
        device: "cpu" or a CUDA device.
        dtype: of the inputs.
        checks: which ones; default: all.
        on_result: told each result when it is there.

    >>> import torch
    >>> from tilewise.testing.torture import CHECKS, Implementation, torture
    >>> def attention(q, k, v, *, causal, scale):
    ...     return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    >>> [result.status for result in torture(Implementation("torch", attention), checks=CHECKS[:2])]
    ['pass', 'pass']
    """
    trial, results, lost_in = Trial(implementation, device, dtype), [], None
    for check in checks:
        result = (run_check(check, trial) if lost_in is None else
                  _result(check, trial, "n/a", f"the device was lost in {lost_in}"))
        lost_in = check.name if result.lost else lost_in
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results


def run_check(check: Check, trial: Trial) -> Result:
    """Run one check, and give back the memory that it held."""
    began = time.perf_counter()
    with torch.cuda.device(trial.device) if trial.is_on_gpu else nullcontext():  # streams and graphs are of the current
        status, sentence = _outcome(check, trial)
    lost = status == "fail" and trial.is_on_gpu and not _answers(trial.device)
    if trial.is_on_gpu and not lost:
        gc.collect()  # an exception and its frames are a cycle
        torch.cuda.empty_cache()
    return _result(check, trial, status, sentence, seconds=time.perf_counter() - began, lost=lost)


def failures(results: Iterable[Result]) -> list[Result]:
    """Return those that failed."""
    return [result for result in results if result.status == "fail"]


def _outcome(check: Check, trial: Trial) -> tuple[Status, str]:
    lacking = check.lacking(trial.implementation, trial.device, trial.dtype) or _too_large(check, trial)
    if lacking is not None:
        return "n/a", lacking
    try:
        check.run(trial, check.case_on(trial.device))
    except NotApplicable as reason:
        return "n/a", str(reason)
    except Wrong as failure:
        return "fail", str(failure)
    except torch.OutOfMemoryError as error:
        return "n/a", f"out of memory: {_needed(check, trial)}{' '.join(str(error).split())[:200]}"
    return "pass", ""


def _too_large(check: Check, trial: Trial) -> str | None:
    if not check.elements or not trial.is_on_gpu:
        return None
    free, _ = torch.cuda.mem_get_info(trial.device)
    if check.elements * trial.dtype.itemsize <= free:
        return None
    return f"{_needed(check, trial)}{free / _GIB:.1f} GiB are free"


def _needed(check: Check, trial: Trial) -> str:
    if not check.elements:
        return ""
    return f"takes about {check.elements * trial.dtype.itemsize / _GIB:.1f} GiB ({check.elements} elements); "


def _answers(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _result(check: Check, trial: Trial, status: Status, sentence: str, *, seconds: float = 0.0,
            lost: bool = False) -> Result:
    name, issue = trial.implementation.name, check.issue or ""
    return Result(check.name, check.group, name, status, sentence, issue, seconds, lost)
