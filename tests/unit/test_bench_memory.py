"""Peak memory of a call."""

import sys

import pytest
import torch

from tilewise.bench.memory import MIB, available_bytes, peak_mib

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a resident peak that can be reset")


def filled(mib):
    return torch.ones(mib * MIB // 4)


@pytest.mark.parametrize("mib", [8, 24, 96])
def test_the_peak_of_a_call_is_what_it_held_even_if_it_gave_it_back(mib):
    def call():
        filled(mib)

    call()  # first-time set-up is no part of a call
    assert peak_mib(call, CPU) == pytest.approx(mib, abs=2)


def test_memory_freed_before_the_call_is_not_taken_for_free():
    filled(20)  # below the size at which the allocator returns a block to the system at once
    assert peak_mib(lambda: filled(20), CPU) == pytest.approx(20, abs=2)


def test_an_earlier_higher_peak_does_not_count():
    filled(200)
    assert peak_mib(lambda: filled(10), CPU) == pytest.approx(10, abs=2)


def test_available_memory_is_a_sensible_number_of_bytes():
    assert 2**20 < available_bytes(CPU) < 2**50
