"""How the Hopper kernels go through a call: what is illegal, and which heads are scheduled together."""

from dataclasses import replace

import pytest
import torch

from tilewise.errors import InvalidInput
from tilewise.kernels.hopper.backward.config import (
    D64Variant,
    D128Variant,
    HopperBackwardSchedule,
    HopperD64Config,
    HopperD128Config,
    HopperD256Config,
)
from tilewise.kernels.hopper.forward.config import HopperForwardConfig, HopperForwardSchedule, SplitPlan
from tilewise.masks import Mask, causal
from tilewise.problem import AttentionProblem
from tilewise.tuning.schedules_hopper import backward_schedule, forward_schedule, schedule_on_grid
from tilewise.tuning.wave_model import grid_plan_of


def problem_of(s=4096, d=128, heads=(32, 8), mask=None, dtype=torch.bfloat16):
    (hq, hk) = heads
    return AttentionProblem(b=2, hq=hq, hk=hk, sq=s, sk=s, d=d, dv=d, dtype=dtype, device=torch.device("cuda", 0),
                            scale=1.0, mask=Mask() if mask is None else mask)


@pytest.mark.parametrize(("kind", "settings", "message"), [
    (HopperForwardSchedule, {"heads_per_swizzle": 0}, "heads_per_swizzle=0; allowed is 1 or more."),
    (HopperForwardSchedule, {"pack_gqa": 3}, "pack_gqa=3; allowed are 1, 2, 4, 8, 16, 32, 64."),
    (HopperForwardSchedule, {"softmax_parts": 3}, "softmax_parts=3; allowed are 1, 2."),
    (HopperForwardSchedule, {"tiles_from_end": True, "skip_padding": True},
     "tiles_from_end=True with skip_padding=True and pack_gqa=1; allowed are skip_padding=False and pack_gqa=1."),
    (HopperForwardSchedule, {"tiles_from_end": True, "pack_gqa": 2},
     "tiles_from_end=True with skip_padding=False and pack_gqa=2; allowed are skip_padding=False and pack_gqa=1."),
    (HopperForwardSchedule, {"sink_block_first": True},
     "sink_block_first=True with frozen_max=False; allowed is frozen_max=True."),
    (HopperBackwardSchedule, {"kv_heads_per_swizzle": 0}, "kv_heads_per_swizzle=0; allowed is 1 or more."),
    (HopperBackwardSchedule, {"kv_heads_per_swizzle": 1, "dq_heads_per_swizzle": -1},
     "dq_heads_per_swizzle=-1; allowed is 1 or more."),
    (HopperBackwardSchedule, {"kv_heads_per_swizzle": 1, "group_splits": 0}, "group_splits=0; allowed is 1 or more."),
])
def test_an_illegal_schedule_cannot_be_constructed(kind, settings, message):
    legal = {} if kind is HopperBackwardSchedule else {"heads_per_swizzle": 1}
    with pytest.raises(InvalidInput) as caught:
        kind(**legal | settings)
    assert str(caught.value) == message


def test_heads_whose_keys_and_values_fit_l2_are_scheduled_together_and_those_of_a_group_always():
    two = HopperForwardConfig(128, 2)
    for s, d, heads in ((4096, 128, 12 * 4), (16384, 128, 3 * 4), (131072, 128, 4), (4096, 64, 32 * 4),
                        (4096, 256, 8 * 4)):
        assert schedule_on_grid(problem_of(s, d), two).heads_per_swizzle == heads
    assert schedule_on_grid(problem_of(), two, pack_gqa=4).heads_per_swizzle == 12, "kv heads, where a group is a tile"


def test_a_schedule_has_what_the_cost_model_says_of_the_grid():
    two, few = HopperForwardConfig(128, 2), replace(problem_of(), sq=4)
    plan = grid_plan_of(few, two, 132)
    assert plan.pack_gqa == 4
    assert plan.split_kv is not None
    assert forward_schedule(few, two, 132) == schedule_on_grid(few, two, plan.pack_gqa, plan.split_kv)
    assert schedule_on_grid(few, two, 4, SplitPlan(0, 3)).split_kv == (0, 3)


def test_only_float16_takes_the_first_keys_before_the_maximum_is_frozen():
    for dtype, first in ((torch.float16, True), (torch.bfloat16, False)):
        schedule = schedule_on_grid(problem_of(dtype=dtype), HopperForwardConfig(128, 2))
        assert (schedule.frozen_max, schedule.sink_block_first) == (True, first)


def test_backward_kv_heads_whose_queries_fit_l2_are_scheduled_together_by_powers_of_two():
    staged, ordered = HopperD128Config(), HopperD128Config(variant=D128Variant.DETERMINISTIC)
    plain, masked = (problem_of(mask=mask).backward(lse_grad=False) for mask in (Mask(), causal()))
    assert [backward_schedule(replace(plain, sq=s), staged).kv_heads_per_swizzle for s in (4096, 8192, 32768)] == [
        4, 2, 1]
    for problem, kv_heads in ((plain, 4), (masked, 16)):
        assert backward_schedule(problem, ordered).kv_heads_per_swizzle == kv_heads, "16 at least under a diagonal"


def test_ctas_that_own_heads_take_no_others():
    problem = problem_of(512, 64, (8, 8)).backward(lse_grad=False)
    owning = HopperD64Config(variant=D64Variant.HEAD_PERSISTENT)
    assert backward_schedule(problem, owning) == HopperBackwardSchedule(1)
    assert backward_schedule(problem, HopperD64Config()).kv_heads_per_swizzle > 1


def test_where_dq_has_a_kernel_of_its_own_its_heads_are_swizzled_as_the_forward_pass_s():
    problem = problem_of(4096, 256).backward(lse_grad=False)
    schedule = backward_schedule(problem, HopperD256Config())
    assert schedule.dq_heads_per_swizzle == schedule_on_grid(problem, HopperForwardConfig(64, 2)).heads_per_swizzle
    assert schedule.kv_heads_per_swizzle == 8, "q and dout, without an accumulator: 4 MiB a head"
