"""A launch after the first: what it hands to Triton's launcher, and when it takes Triton's own way."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.runtime import driver

from tilewise.kernels.triton.launch import NO_MODIFIERS, Launch

STREAM = 77


class OneDevice:
    """A driver whose current device is 3."""

    def get_current_device(self):
        return 3

    def get_current_stream(self, device):
        assert device == 3
        return STREAM


class Compiled:
    """A compiled kernel that keeps what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.run_with, self.own_way = [], []

    def run(self, *arguments):
        self.run_with.append(arguments)

    def __getitem__(self, grid):
        return lambda *arguments: self.own_way.append((grid, arguments))


class Kernel:
    """A kernel of two tensors, modifiers and two scalars; its front end hands out what it compiled."""

    arg_names = ("q_ptr", "out_ptr", "modifiers", "sq", "BLOCK")

    def __init__(self):
        self.compiled, self.front_end = Compiled(), []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.front_end.append((grid, arguments, options))
            return self.compiled

        return launch


@pytest.fixture
def launch(monkeypatch):
    monkeypatch.setattr(driver, "_active", OneDevice())
    return Launch(Kernel(), 5, (128, 64), optional=1, num_warps=4)


TENSORS = (torch.zeros(2), torch.zeros(3))


def test_the_first_call_goes_through_the_front_end_and_later_ones_past_it(launch):
    assert not launch.takes_pointers
    launch(*TENSORS)
    assert launch.kernel.front_end == [
        ((5, 1, 1), (*TENSORS, NO_MODIFIERS, 128, 64), {"num_warps": 4, "enable_fp_fusion": True})]
    assert launch.takes_pointers
    launch(*TENSORS)
    launch(11, 12, NO_MODIFIERS)
    begin = (5, 1, 1, STREAM, "function", "metadata", None, None, None)
    assert launch.kernel.compiled.run_with == [(*begin, *tensors, NO_MODIFIERS, 128, 64) for tensors in (TENSORS,
                                                                                                         (11, 12))]
    assert len(launch.kernel.front_end) == 1
    assert launch.kernel.compiled.own_way == []


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hooks_see_every_launch(launch, name):
    launch(*TENSORS)
    hooks = getattr(knobs.runtime, name)

    def hook(metadata):
        pass

    hooks.add(hook)
    try:
        launch(*TENSORS)
    finally:
        hooks.remove(hook)
    launch(*TENSORS)
    assert launch.kernel.compiled.own_way == [((5, 1, 1), (*TENSORS, NO_MODIFIERS, 128, 64))]
    assert len(launch.kernel.compiled.run_with) == 1


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_in_the_place_of_the_chain_is_seen_and_none_is_no_hook(launch, monkeypatch, name):
    launch(*TENSORS)
    monkeypatch.setattr(knobs.runtime, name, None, raising=False)
    launch(*TENSORS)
    monkeypatch.setattr(knobs.runtime, name, print, raising=False)
    launch(*TENSORS)
    assert (len(launch.kernel.compiled.run_with), len(launch.kernel.compiled.own_way)) == (1, 1)


def test_a_launch_through_descriptors_wants_the_tensors(launch):
    of_blocks = Launch(launch.kernel, 5, (128, 64), (([1, 1, 8, 16], 4),), num_warps=4)
    of_blocks(torch.zeros(1, 1, 8, 16), TENSORS[1], NO_MODIFIERS)
    assert not of_blocks.takes_pointers
