"""Which warpgroups, heads in a tile and parts of keys a call of the Hopper forward kernel gets, by waves of tiles."""

from dataclasses import replace

import pytest
import torch

from tilewise.dispatch import order
from tilewise.masks import Mask, causal
from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning.configs import HopperForwardConfig
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics import hopper_forward_config
from tilewise.tuning.hopper import forward_config
from tilewise.tuning.waves import layout_of

TWO, NARROW = HopperForwardConfig(128, 2), HopperForwardConfig(128, 3, ping_pong=True)
LENGTHS = Sequences(seqlens_k=OperandSpec((1,), (1,), torch.int32))


def problem_of(b, heads, s, d, mask=None, **fields):
    (hq, hk), (sq, sk) = (pair if isinstance(pair, tuple) else (pair, pair) for pair in (heads, s))
    return AttentionProblem(b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=d, dtype=torch.bfloat16,
                            device=torch.device("cuda", 0), scale=1.0, mask=Mask() if mask is None else mask, **fields)


def chosen(problem, multiprocessors=132):
    """Warpgroups, rows of a tile that are heads of a group, and the cut."""
    config = hopper_forward_config(problem, multiprocessors)
    _time, pack, cut = layout_of(problem, config, multiprocessors)
    return config.consumers, pack, cut


@pytest.mark.parametrize(("b", "heads", "s", "d", "mask", "consumers"), [
    (1, 16, 2048, 64, None, 2), (1, 16, 2048, 64, causal(), 2),  # 1.3 waves of 192 queries, 1.9 of 128
    (2, 16, 2048, 64, None, 3), (1, 16, 4096, 64, None, 3), (4, 32, 4096, 64, causal(), 3),
    (1, 16, 512, 64, None, 1), (1, 16, 512, 128, None, 1), (1, 8, 1024, 128, None, 1),  # half a wave of 128
    (2, 16, 512, 128, None, 2), (6, 16, 512, 64, None, 2), (1, 4, 512, 256, None, 2), (1, 4, 512, 136, None, 2),
], ids=str)
def test_a_tile_has_as_many_warpgroups_as_makes_the_shortest_waves(b, heads, s, d, mask, consumers):
    assert chosen(problem_of(b, heads, s, d, mask))[0] == consumers


@pytest.mark.parametrize(("b", "heads", "s", "d", "mask", "layout"), [
    (1, 8, (512, 32768), 128, None, (2, 1, (0, 4, 1))),
    (1, 8, (512, 32768), 64, causal("bottom_right"), (2, 1, (0, 4, 1))),
    (1, 4, (512, 16384), 256, None, (2, 1, (0, 8, 1))), (1, (16, 4), (256, 8192), 128, None, (2, 1, (0, 4, 1))),
    (1, (64, 8), (1, 32768), 128, None, (1, 8, (0, 16, 1))), (4, (32, 8), (4, 8192), 128, None, (1, 4, (0, 4, 1))),
    (1, 2, 4096, 128, causal(), (2, 1, (0, 2, 1))), (1, 24, (512, 8192), 128, None, (2, 1, None)),  # 96 tiles
    (1, 32, (512, 8192), 128, None, (2, 1, None)),  # nearly a wave
], ids=str)
def test_tiles_that_are_less_than_a_wave_are_cut_where_there_are_keys_enough(b, heads, s, d, mask, layout):
    assert chosen(problem_of(b, heads, s, d, mask)) == layout


@pytest.mark.parametrize(("b", "heads", "s", "d", "cut"), [
    (1, 9, 2048, 128, (132, 8, 1)), (1, 6, 4096, 128, (132, 2, 1)), (1, 5, 4096, 256, (132, 4, 1)),
    (1, 8, 16384, 64, (660, 4, 1)),
    # 68 and 100 of 132 tiles: a first part that is longer makes as much of them in fewer parts
    (2, 16, 8192, 128, (1980, 4, 4)), (4, 16, 4096, 128, (1980, 3, 3)), (1, 8, 16384, 256, (924, 2, 5)),
    (2, 8, 8192, 256, (924, 2, 5)), (4, 8, 4096, 256, (924, 2, 5)), (1, 11, 8192, 256, (660, 4, 2)),
    (1, 6, 4224, 128, (132, 2, 1)),
    (1, 12, 2048, 128, None), (1, 3, 16384, 128, None), (8, 16, 2048, 128, None), (8, 8, 2048, 256, None),  # too little
    (2, 16, 640, 256, None), (16, 32, 1536, 256, None), (4, 8, 4096, 192, None),  # nor was so little timed
    (4, 32, 4096, 64, None), (1, 32, 16384, 64, None),  # steps of three warpgroups are slower where tiles may be parts
    (1, 33, 4096, 128, None), (1, 5, 16384, 256, None),  # eight waves and no tile more; 112 tiles nearly fill one
], ids=str)
def test_the_tiles_of_a_last_wave_are_cut_where_that_saves_more_than_it_costs(b, heads, s, d, cut):
    assert chosen(problem_of(b, heads, s, d))[2] == cut


def test_a_last_wave_stays_whole_under_a_mask_and_with_sinks_and_where_heads_share_tiles():
    problem = problem_of(1, 9, 2048, 128)
    sinks = ScoreOptions(sinks=OperandSpec((9,), (1,), torch.float32))
    for other in (replace(problem, mask=causal()), replace(problem, scores=sinks)):
        assert layout_of(other, TWO, 132)[1:] == (1, None)
    few = problem_of(64, (64, 8), (1, 4096), 128)
    assert layout_of(few, TWO, 132)[1:] == (8, None)
    with_sinks = replace(problem_of(1, 8, (512, 32768), 128), scores=sinks)
    assert layout_of(with_sinks, TWO, 132).cut == (0, 4, 1), "sinks enter where parts are combined"


@pytest.mark.parametrize(("b", "heads", "s", "d"), [(1, 8, (512, 32768), 128), (1, 9, 2048, 128),
                                                    (4, 8, (1, 8192), 64)], ids=str)
def test_nothing_is_cut_where_lengths_are_data_or_bits_are_no_neighbours_affair(b, heads, s, d):
    problem = problem_of(b, heads, s, d)
    assert layout_of(problem, TWO, 132).cut is not None
    for other in (replace(problem, deterministic=True), replace(problem, sequences=LENGTHS)):
        assert layout_of(other, TWO, 132).cut is None


def test_a_deterministic_calls_tiles_are_those_of_one_batch_entry():
    for d, s in ((64, 2048), (64, 512), (128, 512), (128, (3, 700))):
        alone, many = (problem_of(b, (64, 8) if s == (3, 700) else 16, s, d, deterministic=True) for b in (1, 9))
        assert chosen(alone) == chosen(many)


def test_the_devices_multiprocessors_decide():
    problem = problem_of(1, 16, 2048, 64)
    device = DeviceSpec.of_arch("sm_90", "no-such-device")
    assert [forward_config(problem, device, count).consumers for count in (132, 176)] == [2, 3]
    cuts = [chosen(problem_of(1, 8, (512, 32768), 128), count)[2] for count in (132, 66, 32)]
    assert cuts == [(0, 4, 1), (0, 2, 1), None]


def test_heads_of_a_group_share_tiles_where_that_makes_fewer_waves_or_tiles_to_be_cut():
    for sq, b, heads, pack in (
            (1, 64, (64, 8), 8), (1, 64, (40, 8), 8), (4, 64, (64, 8), 8),  # 20 to 32 waves; then 4
            (1, 2, (64, 8), 8), (4096, 2, (64, 8), 1),  # one is one, but cut; and full tiles are as many
            (1, 64, (64, 64), 1), (1, 64, (130, 1), 1)):  # no group, and one past a tile's rows
        problem = problem_of(b, heads, (sq, 4096), 128)
        assert layout_of(problem, TWO, 132).pack == pack
        assert layout_of(replace(problem, deterministic=True), TWO, 132).pack == 1, "an entry is one wave"
        lengths = Sequences(seqlens_q=OperandSpec((b,), (1,), torch.int32))
        assert layout_of(replace(problem, sequences=lengths), TWO, 132).pack == 1, "a length ends one head's rows"


def test_few_queries_of_many_keys_go_to_gluon_where_their_tiles_are_cut(monkeypatch):
    monkeypatch.setattr("tilewise.dispatch.device_spec", lambda device: DeviceSpec.of_arch("sm_90"))
    problem = problem_of(1, (64, 8), (1, 8192), 128)
    for other in (problem, problem_of(1, 8, (1, 8192), 128), problem_of(1, (8, 2), (17, 8192), 256)):
        assert order(other, False)[0] == "gluon"
    for other in (replace(problem, deterministic=True), replace(problem, sequences=LENGTHS), replace(problem, sk=8191),
                  replace(problem, d=264)):
        assert order(other, False)[0] == "triton"
    assert order(problem.backward(lse_grad=False), False)[0] == "triton"
