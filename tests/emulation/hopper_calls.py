"""Calls of the Hopper kernels, bound as tuning would, and what their forward kernel gets."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tilewise.kernels.hopper.backward.launch_d256 import backward_launch
from tilewise.kernels.hopper.forward.config import SplitPlan
from tilewise.kernels.hopper.forward.launch import HopperForward
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem
from tilewise.tuning.schedules_hopper import backward_schedule, schedule_on_grid


def problem_of(sq=4096, sk=4096, mask=None, d=128, b=1, heads=(1, 1), dv=None):
    (hq, hk), dv = heads, dv or d
    return AttentionProblem(b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv, dtype=torch.bfloat16,
                            device=torch.device("cuda", 0), scale=1.0, mask=Mask() if mask is None else mask,
                            k_strides=(hk * sk * d, sk * d, d, 1), v_strides=(hk * sk * dv, sk * dv, dv, 1))


def bound_forward(problem, config, num_sms=132, pack_gqa=1, split_kv=None, plan=None):
    """The forward kernel with a tile, and the schedule that tuning has for it.

    split_kv: a SplitPlan's numbers. plan: the strides of a mask plan.
    """
    schedule = schedule_on_grid(problem, config, pack_gqa, split_kv and SplitPlan(*split_kv))
    return HopperForward(problem, config, schedule, num_sms, plan)


def bound_backward(problem, config, num_sms=132, incoming=None, allocate=None, plans=(), group_splits=1):
    """The backward kernels of a config, likewise. plans: the strides of each mask plan."""
    schedule = backward_schedule(problem, config, group_splits)
    return backward_launch(problem, config, schedule, problem.q_strides, num_sms, incoming, allocate, plans)


def scalars_of(problem, config, pack_gqa=1):
    """Return the arguments that the kernel gets: grid, bounds and what is fixed when it is compiled."""
    numbers, constants = bound_forward(problem, config, 132, pack_gqa).scalars
    return numbers.grid, numbers.bounds, constants
