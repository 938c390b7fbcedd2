"""How many warpgroups, query heads a tile and splits of its keys the cost model gives the Hopper forward kernel."""

from dataclasses import replace

import pytest
import torch

from tilewise.dispatch import order
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics_hopper import forward_heuristic
from tilewise.tuning.schedules_hopper import forward_schedule
from tilewise.tuning.select import hopper_forward_config
from tilewise.tuning.wave_model import grid_plan_of

TWO, NARROW = HopperForwardConfig(128, 2), HopperForwardConfig(128, 3, ping_pong=True)
LENGTHS = Sequences(seqlens_k=OperandSpec((1,), (1,), torch.int32))


def problem_of(b, heads, s, d, mask=None, **fields):
    (hq, hk), (sq, sk) = (pair if isinstance(pair, tuple) else (pair, pair) for pair in (heads, s))
    return AttentionProblem(b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=d, dtype=torch.bfloat16,
                            device=torch.device("cuda", 0), scale=1.0, mask=Mask() if mask is None else mask, **fields)


def chosen(problem, num_sms=132):
    """Warpgroups, heads of a group in a tile, and the plan of its splits."""
    config = forward_heuristic(problem, num_sms)
    _time, pack_gqa, split_kv = grid_plan_of(problem, config, num_sms)
    return config.consumers, pack_gqa, split_kv


@pytest.mark.parametrize(("b", "heads", "s", "d", "mask", "consumers"), [
    (1, 16, 2048, 64, None, 2), (1, 16, 2048, 64, causal(), 2),  # 1.3 waves of 192 queries, 1.9 of 128
    (2, 16, 2048, 64, None, 3), (1, 16, 4096, 64, None, 3), (4, 32, 4096, 64, causal(), 3),
    (1, 16, 512, 64, None, 1), (1, 16, 512, 128, None, 1), (1, 8, 1024, 128, None, 1),  # half a wave of 128
    (2, 16, 512, 128, None, 2), (6, 16, 512, 64, None, 2), (1, 4, 512, 256, None, 2), (1, 4, 512, 136, None, 2),
], ids=str)
def test_a_tile_has_as_many_warpgroups_as_makes_the_shortest_waves(b, heads, s, d, mask, consumers):
    assert chosen(problem_of(b, heads, s, d, mask))[0] == consumers


@pytest.mark.parametrize(("b", "heads", "s", "d", "mask", "plan"), [
    (1, 8, (512, 32768), 128, None, (2, 1, (0, 4))),
    (1, 8, (512, 32768), 64, causal("bottom_right"), (2, 1, (0, 4))),
    (1, 4, (512, 16384), 256, None, (2, 1, (0, 8))), (1, (16, 4), (256, 8192), 128, None, (2, 1, (0, 4))),
    (1, (64, 8), (1, 32768), 128, None, (1, 8, (0, 16))), (4, (32, 8), (4, 8192), 128, None, (1, 4, (0, 4))),
    (1, 2, 4096, 128, causal(), (2, 1, (0, 2))), (1, 24, (512, 8192), 128, None, (2, 1, None)),  # 96 tiles
    (1, 32, (512, 8192), 128, None, (2, 1, None)),  # nearly a wave
], ids=str)
def test_tiles_of_less_than_a_wave_are_split_where_there_are_enough_keys(b, heads, s, d, mask, plan):
    assert chosen(problem_of(b, heads, s, d, mask)) == plan


@pytest.mark.parametrize(("b", "heads", "s", "d", "plan"), [
    (1, 9, 2048, 128, (132, 8)), (1, 6, 4096, 128, (132, 2)), (1, 5, 4096, 256, (132, 4)), (1, 6, 4224, 128, (132, 2)),
    (1, 12, 2048, 128, None), (1, 33, 4096, 128, None), (1, 5, 16384, 256, None),  # too little, and whole waves
    (1, 8, 16384, 64, None), (2, 16, 8192, 128, None), (4, 8, 4096, 256, None), (1, 32, 16384, 64, None),  # many waves
], ids=str)
def test_the_tiles_of_a_last_wave_are_split_where_that_saves_more_than_it_costs(b, heads, s, d, plan):
    assert chosen(problem_of(b, heads, s, d))[2] == plan


def test_a_last_wave_stays_whole_under_a_mask_and_with_sinks_and_where_heads_share_tiles():
    problem = problem_of(1, 9, 2048, 128)
    sinks = ScoreOptions(sinks=OperandSpec((9,), (1,), torch.float32))
    for other in (replace(problem, mask=causal()), replace(problem, scores=sinks)):
        assert grid_plan_of(other, TWO, 132)[1:] == (1, None)
    few = problem_of(64, (64, 8), (1, 4096), 128)
    assert grid_plan_of(few, TWO, 132)[1:] == (8, None)
    with_sinks = replace(problem_of(1, 8, (512, 32768), 128), scores=sinks)
    assert grid_plan_of(with_sinks, TWO, 132).split_kv == (0, 4), "sinks enter where splits are combined"


@pytest.mark.parametrize(("b", "heads", "s", "d"), [(1, 8, (512, 32768), 128), (1, 9, 2048, 128),
                                                    (4, 8, (1, 8192), 64)], ids=str)
def test_nothing_is_split_where_lengths_are_on_the_device_or_the_call_is_deterministic(b, heads, s, d):
    problem = problem_of(b, heads, s, d)
    assert grid_plan_of(problem, TWO, 132).split_kv is not None
    for other in (replace(problem, deterministic=True), replace(problem, sequences=LENGTHS)):
        assert grid_plan_of(other, TWO, 132).split_kv is None


def test_a_deterministic_calls_tiles_are_those_of_one_batch_element():
    for d, s in ((64, 2048), (64, 512), (128, 512), (128, (3, 700))):
        alone, many = (problem_of(b, (64, 8) if s == (3, 700) else 16, s, d, deterministic=True) for b in (1, 9))
        assert chosen(alone) == chosen(many)


def test_the_number_of_sms_decides():
    problem = problem_of(1, 16, 2048, 64)
    device = DeviceSpec.of_arch("sm_90", "no-such-device")
    assert [hopper_forward_config(problem, device, count).consumers for count in (132, 176)] == [2, 3]
    plans = [chosen(problem_of(1, 8, (512, 32768), 128), count)[2] for count in (132, 66, 32)]
    assert plans == [(0, 4), (0, 2), None]


def test_heads_of_a_group_share_tiles_where_that_makes_fewer_waves_or_tiles_to_split():
    for sq, b, heads, pack in (
            (1, 64, (64, 8), 8), (1, 64, (40, 8), 8), (4, 64, (64, 8), 8),  # 20 to 32 waves; then 4
            (1, 2, (64, 8), 8), (4096, 2, (64, 8), 1),  # one wave either way, but split; and full tiles are as many
            (1, 64, (64, 64), 1), (1, 64, (130, 1), 1)):  # no group, and one past a tile's rows
        problem = problem_of(b, heads, (sq, 4096), 128)
        assert grid_plan_of(problem, TWO, 132).pack_gqa == pack
        assert grid_plan_of(replace(problem, deterministic=True), TWO, 132).pack_gqa == 1, "a batch element is one wave"
        varlen = replace(problem, sequences=Sequences(seqlens_q=OperandSpec((b,), (1,), torch.int32)))
        assert grid_plan_of(varlen, TWO, 132).pack_gqa == 1, "it was not timed"


@pytest.mark.parametrize(("heads", "count", "d", "pack"), [
    ((32, 8), 251, 128, 4), ((32, 8), 4, 128, 4), ((64, 8), 4, 64, 8), ((16, 8), 4, 64, 2),  # whatever their length
    ((24, 8), 251, 64, 4), ((24, 8), 115, 64, 1), ((24, 8), 4, 64, 1),  # of four heads in a tile one does not exist
    ((32, 8), 28, 256, 4), ((32, 8), 4, 256, 1),  # wide heads
    ((8, 8), 251, 128, 1), ((130, 1), 251, 128, 1)], ids=str)
@pytest.mark.parametrize("mask", [Mask(), causal("top_left")], ids=str)
def test_heads_of_a_group_share_tiles_where_packed_sequences_then_end_in_fewer(heads, count, d, pack, mask):
    """16384 tokens in so many sequences."""
    facts = OperandSpec((count + 1,), (1,), torch.int32)
    problem = problem_of(1, heads, 16384, d, mask, sequences=Sequences(count, facts, facts))
    assert forward_schedule(problem, TWO, 132).pack_gqa == pack
    for other in ({"deterministic": True}, {"scores": ScoreOptions(dropout_p=0.1)}):
        assert forward_schedule(replace(problem, **other), TWO, 132).pack_gqa == 1


@pytest.mark.parametrize(("heads", "count", "d", "pack"), [
    ((24, 8), 251, 64, 4), ((24, 8), 115, 64, 4), ((32, 8), 4, 256, 4), ((130, 1), 251, 128, 1)], ids=str)
def test_beside_their_ends_a_window_of_packed_sequences_may_fit_tiles_of_a_group_better(heads, count, d, pack):
    facts = OperandSpec((count + 1,), (1,), torch.int32)
    problem = problem_of(1, heads, 16384, d, window(127, 0), sequences=Sequences(count, facts, facts))
    assert forward_schedule(problem, forward_heuristic(problem), 132).pack_gqa == pack


def test_few_queries_of_many_keys_go_to_gluon_where_their_keys_are_split(monkeypatch):
    monkeypatch.setattr("tilewise.dispatch.device_spec", lambda device: DeviceSpec.of_arch("sm_90"))
    problem = problem_of(1, (64, 8), (1, 8192), 128)
    for other in (problem, problem_of(1, 8, (1, 8192), 128), problem_of(1, (8, 2), (17, 8192), 256)):
        assert order(other, False)[0] == "gluon"
    for other in (replace(problem, deterministic=True), replace(problem, sequences=LENGTHS), replace(problem, sk=8191),
                  replace(problem, d=264)):
        assert order(other, False)[0] == "triton"
    assert order(problem.backward(lse_grad=False), False)[0] == "triton"
