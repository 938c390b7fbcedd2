"""A pool of processes that compile: the death of one is no one else's."""

import signal
import time

import pytest

from tilewise.compile_ahead.pool import DIED, AheadCompiler, CompilerDied


def test_a_process_that_dies_is_that_requests_fault_alone():
    """raise_signal stands for a compiler: SIGCHLD does nothing, SIGKILL ends the process, and 1000 raises."""
    requests = (signal.SIGCHLD, signal.SIGKILL, signal.SIGWINCH, 1000)
    with AheadCompiler(requests, signal.raise_signal, 2) as ahead:
        assert [ahead.fault(request) for request in requests] == [None, DIED, None, None]


def test_leaving_drops_the_requests_that_no_process_has_begun():
    start = time.monotonic()
    with AheadCompiler((0.0, 0.3, 0.31, 0.32, 60.0, 61.0), time.sleep, 1) as ahead:
        assert ahead.fault(0.0) is None
    assert time.monotonic() - start < 30


def test_a_request_that_nobody_announced_has_no_fault():
    with AheadCompiler((), signal.raise_signal, 1) as ahead:
        assert ahead.fault(signal.SIGKILL) is None


def test_an_outcome_is_what_was_made_or_raised_and_may_be_announced_later():
    with AheadCompiler((4,), factor, 1) as ahead:
        ahead.announce((3, -1, 5))
        assert ahead.outcome(5) == 25
        with pytest.raises(ValueError, match="not -1"):
            ahead.outcome(-1)
        assert (ahead.outcome(4), ahead.outcome(3)) == (16, 9)


def test_an_outcome_of_a_process_that_died_says_so():
    with AheadCompiler((signal.SIGKILL,), signal.raise_signal, 1) as ahead, pytest.raises(CompilerDied, match=DIED):
        ahead.outcome(signal.SIGKILL)


def factor(number):
    if number < 0:
        raise ValueError(f"not {number}")
    return number * number
