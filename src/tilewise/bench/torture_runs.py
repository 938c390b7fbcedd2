"""Run the torture suite on an implementation by name, in a process of its own.

A kernel that reads what is not there takes the whole device from its process, and some libraries end the process or
never return. So the checks run in a process beside this one: where it is lost, that check has failed, and another
process goes on with the next.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import torch

from tilewise.bench.torture_peers import implementation_named
from tilewise.testing.torture import CHECKS, Result
from tilewise.testing.torture.suite import run_check
from tilewise.testing.torture.trial import Trial

_BY_NAME = {check.name: check for check in CHECKS}
ALL = tuple(_BY_NAME)
_Work = tuple[str, str, torch.dtype, Sequence[str]]  # implementation, device, dtype and checks
_LIMIT = 300.0  # seconds that a check may take, compilations included
_START = 120.0  # seconds until a process has imported everything


def torture_apart(name: str, device: torch.device, dtype: torch.dtype, on_result: Callable[[Result], None], *,
                  checks: Sequence[str] = ALL, limit: float = _LIMIT) -> list[Result]:
    """Run checks on the implementation of that name, tell each result when it is there, and return them all.

    Args:
        name: as :func:`tilewise.bench.torture_peers.implementation_named` takes it.
        device, dtype: of the inputs.
        on_result: told each result.
        checks: names of those to run; default: all.
        limit: seconds that a check may take.
    """
    results: list[Result] = []
    while len(results) < len(checks):
        for result in _some_results((name, str(device), dtype, checks[len(results):]), limit):
            results.append(result)
            on_result(result)
    return results


def _some_results(work: _Work, limit: float) -> Iterator[Result]:
    """Give the results of one process: up to the last check, or to the one that ended it."""
    name, _, _, checks = work
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(there, *work), daemon=True)
    process.start()
    there.close()
    began, allowed = time.monotonic(), _START + limit
    try:
        for check in checks:
            if not here.poll(allowed):
                yield _broken(check, name, f"did not end within {limit:g} s", began)
                return
            try:
                result: Result = here.recv()
            except EOFError:
                process.join()
                yield _broken(check, name, f"ended its process (exit code {process.exitcode})", began)
                return
            yield result
            began, allowed = time.monotonic(), limit
            if result.lost:
                return
    finally:
        process.kill()
        process.join()
        here.close()


def _broken(name: str, implementation: str, sentence: str, began: float) -> Result:
    check = _BY_NAME[name]
    seconds = time.monotonic() - began
    return Result(name, check.group, implementation, "fail", sentence, check.issue or "", seconds, lost=True)


def _run(there: Connection, name: str, device: str, dtype: torch.dtype, checks: Sequence[str]) -> None:
    """Run the checks and send each result."""
    trial = Trial(implementation_named(name), device, dtype)
    for check in checks:
        result = run_check(_BY_NAME[check], trial)
        there.send(result)
        if result.lost:
            return
