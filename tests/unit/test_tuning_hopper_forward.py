"""Which tile of the Hopper forward kernel a problem gets where no table has a row."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal, chunk, prefix, sink_tokens, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning.heuristics_hopper import forward_heuristic
from tilewise.tuning.schedules_hopper import forward_schedule, schedule_on_grid

SLOPES, BIAS = OperandSpec((1, 32), (32, 1), torch.float32), OperandSpec((1, 1, 1, 4096), (0, 0, 0, 1), torch.float32)
SINKS = OperandSpec((32,), (1,), torch.float32)
DOCUMENTS = ScoreOptions(**{name: OperandSpec((1, 4, 4096), (16384, 4096, 1), torch.int32)
                            for name in ("documents_q", "documents_k")})
BOOLEAN = ScoreOptions(mask=OperandSpec((1, 1, 4096, 4096), (4096**2, 4096**2, 4096, 1), torch.bool))
PLANS = {"documents": {"scores": DOCUMENTS}, "causal_documents": {"mask": causal(), "scores": DOCUMENTS},
         "boolean": {"scores": BOOLEAN}, "chunk": {"mask": causal() & chunk(1024)}, "prefix": {"mask": prefix(100)},
         "sink_tokens": {"mask": window(1024, 0) & sink_tokens(4)}}


def problem_of(d=64, dv=None, s=4096, mask=None):
    return AttentionProblem(b=1, hq=2, hk=2, sq=s, sk=s, d=d, dv=dv or d, dtype=torch.bfloat16,
                            device=torch.device("cuda", 0), scale=1.0, mask=Mask() if mask is None else mask)


def test_three_warpgroups_have_ping_pong_where_heads_are_narrow_and_sequences_long():
    for d, dv, s, mask, three in ((64, 64, 768, Mask(), True), (64, 64, 767, Mask(), False),
                                  (40, 64, 1792, causal(), True), (64, 64, 1791, causal(), False),
                                  (64, 64, 1792, window(None, 9), True), (64, 64, 2047, window(99, None), False),
                                  (64, 64, 8192, window(4095, 0), True), (64, 64, 8192, window(99, 0), False),
                                  (64, 72, 4096, Mask(), False), (72, 64, 4096, Mask(), False)):
        config = forward_heuristic(replace(problem_of(d, dv, s=s, mask=mask), b=8, hq=32, hk=32))
        assert config.consumers == (3 if three else 2)
        assert not three or config == HopperForwardConfig(block_n=128, consumers=3, ping_pong=True)


@pytest.mark.parametrize(("options", "d", "ping_pong", "stages"), [
    ({"softcap": 30.0}, 64, True, 4), ({"alibi_slopes": SLOPES}, 64, True, 4), ({"dropout_p": 0.1}, 64, True, 4),
    ({"bias": BIAS}, 64, False, 4), ({"softcap": 30.0}, 128, True, 2), ({"dropout_p": 0.1}, 128, False, 2),
    ({"bias": BIAS}, 128, False, 2), ({"sinks": SINKS}, 128, True, 2)], ids=str)
def test_scores_that_cost_more_than_their_exponentials_are_two_warpgroups_work(options, d, ping_pong, stages):
    problem = replace(problem_of(d, d, s=4096), b=8, hq=32, hk=32)
    changed = forward_heuristic(replace(problem, scores=ScoreOptions(**options)))
    assert (changed.consumers, changed.ping_pong, changed.kv_stages) == (2, ping_pong, stages)
    assert forward_heuristic(problem).consumers == (3 if d == 64 else 2)


def test_heads_share_no_tile_and_tiles_are_whole_where_positions_count():
    """Few queries of grouped heads would share a tile, and its keys be split."""
    problem = replace(problem_of(128, 128, s=8192), b=1, hq=8, hk=1, sq=64)
    plain = forward_schedule(problem, HopperForwardConfig(128, 2), 132)
    assert (plain.pack_gqa, plain.split_kv is None) == (8, False)
    for options in ({"bias": BIAS}, {"alibi_slopes": SLOPES}, {"dropout_p": 0.1}):
        schedule = forward_schedule(replace(problem, scores=ScoreOptions(**options)), HopperForwardConfig(128, 2), 132)
        assert (schedule.pack_gqa, schedule.split_kv) == (1, None)


def test_dropouts_tiles_are_counted_from_the_first_query():
    """Counted from the last one they would begin between the 16 queries that it draws for at once."""
    problem = problem_of(mask=causal())
    three = HopperForwardConfig(128, 3, ping_pong=True)
    assert schedule_on_grid(problem, three).tiles_from_end
    assert not schedule_on_grid(replace(problem, scores=ScoreOptions(dropout_p=0.1)), three).tiles_from_end


def test_two_warpgroups_of_narrow_heads_have_four_stages_where_they_are_at_work_for_more_than_four_waves():
    for b, num_sms, stages in ((8, 132, 4), (4, 132, 2), (4, 128, 2), (4, 127, 4)):
        problem = replace(problem_of(64, 64, s=512, mask=causal()), b=b, hq=32, hk=32)
        for mask in (causal(), Mask()):
            config = forward_heuristic(replace(problem, mask=mask), num_sms)
            assert config == HopperForwardConfig(128, 2, stages, ping_pong=True)
    one = replace(problem_of(64, 64, s=512, mask=causal()), hq=132, hk=132)  # four waves of an entry
    for b, deterministic in product((1, 2), (False, True)):
        config = forward_heuristic(replace(one, b=b, deterministic=deterministic))
        assert config.kv_stages == (4 if b > 1 and not deterministic else 2), "bits are of one element"


@pytest.mark.parametrize(("d", "dv", "s", "mask", "ping_pong"), [
    (96, 96, 1024, Mask(), True), (72, 80, 1024, causal(), True), (96, 96, 1023, Mask(), False),
    (96, 64, 4096, Mask(), False), (128, 128, 511, Mask(), False), (128, 104, 512, causal(), True),
    (128, 128, 16384, causal(), True), (128, 128, 511, causal(), False), (128, 128, 16384, Mask(), True),
    (64, 64, 511, Mask(), False), (64, 40, 512, Mask(), True), (64, 64, 512, window(100, 0), False),
    (64, 64, 512, causal(), True), (64, 64, 1791, causal(), True),
    (192, 192, 4096, Mask(), False),
    (256, 256, 511, Mask(), False), (256, 256, 512, causal(), True), (256, 200, 16384, Mask(), True),
    (96, 96, 4096, window(100, 0), False), (256, 256, 4096, window(100, 0), False),
])
def test_two_warpgroups_have_ping_pong_where_that_was_timed_and_one_alone_has_none(d, dv, s, mask, ping_pong):
    problem = replace(problem_of(d, dv, s=s, mask=mask), b=8, hq=32, hk=32)
    config = forward_heuristic(problem)
    assert (config.consumers, config.ping_pong) == (2, ping_pong)
    lengths = replace(problem, sequences=Sequences(seqlens_q=OperandSpec((8,), (1,), torch.int32)))
    assert forward_heuristic(lengths).ping_pong == ping_pong, "the bound counts where lengths are data"
    alone = forward_heuristic(replace(problem, b=1, hq=1, hk=1, sq=512, sk=512))
    assert max(d, dv) > 128 or (alone.consumers, alone.ping_pong) == (1, False)


def test_of_packed_sequences_the_mean_length_counts_and_of_deterministic_calls_none():
    """Which have the tiles of a middle length, and keep the maximum."""
    borders = OperandSpec((9,), (1,), torch.int32)
    for s, packed, deterministic, three in ((6144, 8, False, 3), (6143, 8, False, 2), (4096, 0, False, 3),
                                            (16384, 8, True, 2), (64, 8, True, 2), (4096, None, False, 3),
                                            (4096, None, True, 2)):
        sequences = Sequences(packed, *((None, None, borders) if packed is None else (borders, borders)))
        problem = replace(problem_of(64, 64, s=s), sequences=sequences, deterministic=deterministic)
        config = forward_heuristic(problem)
        assert config.consumers == three
        if deterministic:
            assert config.ping_pong
            assert forward_schedule(problem, config, 132).frozen_max


@pytest.mark.parametrize(("d", "dv", "config"), [
    (192, 128, HopperForwardConfig(block_n=128, consumers=2, q_stages=1, epilogue_passes=2)),
    (192, 192, HopperForwardConfig(block_n=64, consumers=2, epilogue_passes=2)),
    (256, 256, HopperForwardConfig(block_n=64, consumers=2, q_stages=1, ping_pong=True, epilogue_passes=2)),
    (64, 192, HopperForwardConfig(block_n=64, consumers=2)),
], ids=str)
def test_wide_heads_take_as_many_keys_a_step_as_registers_and_shared_memory_allow(d, dv, config):
    assert forward_heuristic(problem_of(d, dv)) == config


@pytest.mark.parametrize("case", PLANS)
def test_masks_that_begin_anew_along_the_sequence_have_two_warpgroups_and_four_stages_and_others_three(case):
    problem = replace(problem_of(), b=8, hq=32, hk=32, **PLANS[case])
    assert forward_heuristic(problem) == (
        HopperForwardConfig(128, 3, ping_pong=True) if case in ("prefix", "sink_tokens") else
        HopperForwardConfig(128, 2, kv_stages=4, ping_pong=True))
    assert forward_heuristic(replace(problem, mask=causal(), scores=ScoreOptions())).consumers == 3


@pytest.mark.parametrize("case", ["documents", "causal_documents", "boolean", "chunk", "prefix"])
def test_with_a_mask_plan_two_warpgroups_have_four_stages_in_few_waves_too(case):
    problem = replace(problem_of(s=512), b=4, hq=32, hk=32)
    assert forward_heuristic(replace(problem, mask=causal())) == HopperForwardConfig(128, 2, 2, ping_pong=True)
    assert forward_heuristic(replace(problem, **PLANS[case])) == HopperForwardConfig(128, 2, 4, ping_pong=True)
    wider = replace(problem, d=128, dv=128, **PLANS[case])
    assert forward_heuristic(wider).kv_stages == 2, "there is no room for four"


@pytest.mark.parametrize("config", [HopperForwardConfig(128, 2), HopperForwardConfig(128, 3, ping_pong=True)], ids=str)
@pytest.mark.parametrize("case", PLANS)
def test_a_mask_plan_freezes_the_maximum_where_a_window_does_not(case, config):
    problem = replace(problem_of(), **PLANS[case])
    schedule = schedule_on_grid(problem, config)
    assert schedule.frozen_max
    assert not schedule_on_grid(replace(problem, sq=511, sk=511), config).frozen_max
    assert schedule_on_grid(replace(problem, mask=window(1024, 0), scores=DOCUMENTS), config).frozen_max
    assert not schedule_on_grid(replace(problem, mask=window(1024, 0), scores=ScoreOptions()), config).frozen_max


@pytest.mark.parametrize(("options", "mask", "is_frozen"), [
    ({}, Mask(), True), ({"softcap": 30.0}, Mask(), True), ({"dropout_p": 0.1}, causal(), True),
    ({"bias": BIAS}, causal(), False), ({"alibi_slopes": SLOPES}, causal(), True),
    ({"alibi_slopes": SLOPES}, window(None, 1, "top_left"), False), ({"alibi_slopes": SLOPES}, Mask(), False)], ids=str)
def test_the_maximum_is_frozen_where_a_tiles_first_keys_are_not_the_ones_that_count_least(options, mask, is_frozen):
    problem = replace(problem_of(mask=mask), scores=ScoreOptions(**options))
    assert schedule_on_grid(problem, HopperForwardConfig(128, 2)).frozen_max == is_frozen


@pytest.mark.parametrize("case", PLANS)
def test_tiles_of_a_mask_plan_are_counted_from_the_first_query_and_visit_its_blocks_in_their_order(case):
    """In float16 and three warpgroups, where a causal call counts from the end and visits the first keys first."""
    config = HopperForwardConfig(128, 3, ping_pong=True)
    plain = replace(problem_of(mask=causal()), dtype=torch.float16)
    for problem, is_plain in ((plain, True), (replace(plain, **PLANS[case]), False)):
        schedule = schedule_on_grid(problem, config)
        assert (schedule.tiles_from_end, schedule.skip_padding, schedule.sink_block_first) == (
            is_plain, not is_plain, is_plain)


@pytest.mark.parametrize(("fields", "is_split", "is_packed"), [
    ({"sq": 4, "hq": 8, "hk": 1}, True, True), ({"sq": 128}, True, False),
    ({"b": 32, "hq": 64, "hk": 8, "sq": 4}, False, True)], ids=str)
def test_with_a_mask_plan_no_keys_are_split_and_no_heads_share_a_tile(fields, is_split, is_packed):
    plain = replace(problem_of(), **fields)
    schedules = [forward_schedule(problem, HopperForwardConfig(128, 1), 132) for problem in (
        plain, replace(plain, scores=DOCUMENTS), replace(plain, scores=BOOLEAN))]
    assert [(schedule.split_kv is not None, schedule.pack_gqa > 1) for schedule in schedules] == [
        (is_split, is_packed), (False, False), (False, False)]
