"""Run the torture suite on an implementation by name, in a process of its own.

A kernel that reads what is not there takes the whole device from its process, and some libraries end the process or
never return. So the checks run in a process beside this one: where it is lost, that check has failed, and another
process goes on with the next.
"""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from tilewise.bench.torture_peers import implementation_named
from tilewise.testing.torture import CHECKS, Result
from tilewise.testing.torture.suite import run_check
from tilewise.testing.torture.trial import Trial

_LIMIT = 300.0  # seconds that a check may take, compilations included
_START = 120.0  # seconds until a process has imported everything


def torture_apart(name: str, device: torch.device, dtype: torch.dtype, on_result: Callable[[Result], None], *,
                  limit: float = _LIMIT) -> list[Result]:
    """Run all checks on the implementation of that name, and tell each result when it is there.

    Args:
        name: as :func:`tilewise.bench.torture_peers.implementation_named` takes it.
        device, dtype: of the inputs.
        on_result: told each result.
        limit: seconds that a check may take.
    """
    results: list[Result] = []
    while len(results) < len(CHECKS):
        for result in _some_results(name, device, dtype, len(results), limit):
            results.append(result)
            on_result(result)
    return results


def _some_results(name: str, device: torch.device, dtype: torch.dtype, first: int, limit: float) -> list[Result]:
    """Return the results of one process: of the checks from one on, to the last, or to the one that ended it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, name, str(device), dtype, first), daemon=True)
    process.start()
    there.close()
    results: list[Result] = []
    began, allowed = time.monotonic(), _START + limit
    try:
        while first + len(results) < len(CHECKS):
            if not here.poll(allowed):
                results.append(_broken(name, first + len(results), f"did not end within {limit:g} s", began))
                break
            try:
                result: Result = here.recv()
            except EOFError:
                process.join()
                results.append(_broken(name, first + len(results), f"ended its process (exit code {process.exitcode})",
                                       began))
                break
            results.append(result)
            began, allowed = time.monotonic(), limit
            if result.lost:
                break
    finally:
        process.kill()
        process.join()
        here.close()
    return results


def _broken(name: str, number: int, sentence: str, began: float) -> Result:
    check = CHECKS[number]
    seconds = time.monotonic() - began
    return Result(check.name, check.group, name, "fail", sentence, check.issue or "", seconds, lost=True)


def _work(there: Connection, name: str, device: str, dtype: torch.dtype, first: int) -> None:
    """Run the checks from one on, and send each result."""
    trial = Trial(implementation_named(name), device, dtype)
    for check in CHECKS[first:]:
        result = run_check(check, trial)
        there.send(result)
        if result.lost:
            return
