"""Which tile the cost model gives the Hopper forward kernel under a window, and when a group's heads share it."""

from dataclasses import replace

import pytest
import torch

from tilewise.functions import FunctionCode
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import FunctionSpec, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning.heuristics_hopper import forward_heuristic
from tilewise.tuning.wave_model import grid_plan_of
from tilewise.tuning.window_model import has_window, tile_time


def problem_of(d, mask, heads=(32, 32), s=8192, **fields):
    sizes = {"b": 1, "sq": s, "sk": s} | fields
    return AttentionProblem(hq=heads[0], hk=heads[1], d=d, dv=d, dtype=torch.bfloat16, device=torch.device("cuda", 0),
                            scale=1.0, mask=mask, **sizes)


def chosen(problem):
    """Warpgroups, keys a block, and heads of a group in a tile."""
    config = forward_heuristic(problem)
    return config.consumers, config.block_n, grid_plan_of(problem, config, 132).pack_gqa


@pytest.mark.parametrize(("d", "keys", "heads", "fastest"), [
    (64, 64, (32, 32), (2, 64, 1)), (64, 128, (32, 32), (2, 64, 1)), (64, 512, (32, 32), (2, 128, 1)),
    (64, 1024, (32, 32), (2, 128, 1)), (64, 2048, (32, 32), (3, 128, 1)), (64, 4096, (32, 32), (3, 128, 1)),
    (64, 64, (32, 4), (2, 128, 8)),  # 79 keys are one block
    (64, 128, (32, 16), (2, 64, 2)), (64, 256, (32, 4), (2, 64, 8)), (64, 1024, (32, 8), (3, 128, 4)),
    (64, 4096, (32, 4), (3, 128, 8)), (64, 128, (64, 8), (2, 64, 8)),  # the last one gpt-oss's
    (128, 64, (32, 32), (2, 64, 1)), (128, 512, (32, 32), (2, 128, 1)), (128, 512, (32, 8), (2, 64, 4)),
    (128, 1024, (32, 8), (2, 128, 1)), (128, 4096, (32, 4), (2, 128, 1)),
    (256, 512, (16, 16), (2, 64, 1)), (256, 512, (16, 4), (2, 64, 4)), (256, 4096, (16, 2), (2, 64, 8)),
], ids=str)
def test_a_window_has_the_tile_that_was_fastest(d, keys, heads, fastest):
    assert chosen(problem_of(d, causal() & window(keys - 1, 0), heads)) == fastest


def test_keys_behind_a_query_count_too():
    assert chosen(problem_of(64, window(64, 64))) == (2, 64, 1)
    assert chosen(problem_of(64, window(512, 512))) == (2, 128, 1)


def test_packed_sequences_have_blocks_that_fit_the_window_and_tiles_of_a_group_unless_deterministic():
    sequences = Sequences(5, OperandSpec((6,), (1,), torch.int32), OperandSpec((6,), (1,), torch.int32))
    for keys, block_n in ((128, 64), (512, 128)):
        problem = problem_of(64, window(keys - 1, 0), (32, 4), sequences=sequences)
        assert chosen(problem) == (2, 64, 8)
        assert chosen(replace(problem, deterministic=True)) == (2, block_n, 1)


def replace_count(sequences, count):
    """So many packed sequences; padded ones as they are."""
    if sequences.packed is None:
        return sequences
    facts = OperandSpec((count + 1,), (1,), torch.int32)
    return Sequences(count, facts, facts)


@pytest.mark.parametrize("sequences", [
    Sequences(5, OperandSpec((6,), (1,), torch.int32), OperandSpec((6,), (1,), torch.int32)),
    Sequences(seqlens_k=OperandSpec((1,), (1,), torch.int32))], ids=str)
@pytest.mark.parametrize("heads", [(16, 16), (32, 4)], ids=str)
def test_neighbours_do_not_change_the_tile_of_a_deterministic_call(sequences, heads):
    for keys, block_n in ((128, 64), (512, 128)):
        problem = problem_of(64, window(keys - 1, 0), heads, sequences=sequences, deterministic=True)
        assert {chosen(replace(problem, sq=s, sk=s, sequences=replace_count(sequences, count)))
                for s in (700, 1024, 2800, 8192) for count in (1, 5, 300)} == {(2, block_n, 1)}


def test_a_bias_and_a_score_function_and_few_tiles_keep_the_blocks_that_were_timed():
    mask = window(127, 0)
    plain = problem_of(64, mask)
    bias = OperandSpec((1, 1, 8192, 8192), (2**26, 2**26, 8192, 1), torch.bfloat16)
    assert chosen(replace(plain, scores=ScoreOptions(bias=bias)))[1] == 128
    function = FunctionSpec(FunctionCode("f", None, None, None, 0), ())
    assert forward_heuristic(replace(plain, scores=ScoreOptions(score_function=function))) == forward_heuristic(
        replace(plain, scores=ScoreOptions(score_function=function), mask=Mask()))
    assert chosen(problem_of(64, mask, (2, 2), 4096))[1] == 128  # 64 tiles
    assert chosen(problem_of(64, mask, (8, 8), 4096))[1] == 64  # 256


def test_a_deterministic_calls_tile_is_that_of_one_batch_element():
    alone = problem_of(64, window(127, 0), (8, 1), 2048, deterministic=True)
    assert chosen(alone) == chosen(replace(alone, b=64)) == (2, 128, 1)
    assert chosen(replace(alone, b=64, deterministic=False)) == (2, 64, 8)


@pytest.mark.parametrize(("mask", "is_window"), [
    (Mask(), False), (causal(), False), (window(127, None), False), (window(127, 0), True), (window(3, 5), True)],
    ids=str)
def test_a_window_ends_on_both_sides(mask, is_window):
    assert has_window(problem_of(64, mask)) == is_window


def test_one_query_sees_one_block_of_its_window():
    problem = problem_of(64, window(127, 0, "bottom_right"), (64, 8), b=64, sq=1)
    assert chosen(problem) == (2, 128, 8)
    assert chosen(replace(problem, sq=4)) == (2, 64, 8)


def test_no_more_keys_are_counted_than_there_are():
    config, problem = HopperForwardConfig(64, 2), problem_of(64, window(511, 0), s=128)
    assert tile_time(problem, config, 1) == tile_time(replace(problem, mask=window(127, 0)), config, 1)
    assert tile_time(problem, config, 1) < tile_time(replace(problem, sk=256), config, 1)
