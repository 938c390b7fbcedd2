"""What the Hopper forward kernel is compiled for, and what it is launched with: the facts of a problem and a tile."""

import math
from dataclasses import replace

import pytest
import torch

from emulation.hopper_calls import bound_forward, problem_of, scalars_of
from tilewise.kernels.gluon.forward_config import HopperForwardConfig
from tilewise.masks import Mask, causal, window
from tilewise.problem.options import OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning.heuristics_hopper import forward_heuristic

launch = pytest.importorskip("tilewise.kernels.gluon.launch", reason="Triton is not installed")


def test_softmax_is_split_in_two_halves_at_small_head_dims_and_long_kv_blocks():
    for d, dv, keys, parts, steady in ((64, 64, 128, 2, 2), (128, 128, 128, 2, 2), (96, 40, 128, 2, 2),
                                       (128, 128, 64, 1, 2), (192, 128, 128, 1, 1), (64, 256, 64, 1, 1),
                                       (192, 192, 64, 1, 2), (256, 250, 64, 1, 2)):
        problem, config = problem_of(d=d, dv=dv, mask=window(9, 0)), HopperForwardConfig(keys, 2)
        assert parts == scalars_of(problem, config)[2].PARTS
        assert steady == scalars_of(replace(problem, mask=causal()), config)[2].PARTS


def test_the_kernel_gets_each_chunk_by_itself_and_none_where_there_is_one():
    for d, dv, widths in ((128, 128, [128, None, 128, None, 128, None, 128]),
                          (64, 64, [64, None, 64, None, 64, None, 64]),
                          (192, 128, [128, 64, 128, 64, 128, None, 64]), (256, 96, [256, None, 256, None, 64, 32, 32])):
        problem = problem_of(d=d, dv=dv)
        config = forward_heuristic(problem)
        bound = bound_forward(problem, config)
        assert [block and block[0][3] for block in bound.blocks] == widths
        rows = [64, 64, config.block_n, config.block_n, config.block_n, config.block_n, 64]
        assert all(block is None or block[0][:3] == [1, 1, row] for block, row in zip(bound.blocks, rows, strict=True))


def test_packed_rows_are_a_querys_heads_one_after_another_then_the_next_query():
    problem = problem_of(10, b=2, heads=(12, 2))
    bound = bound_forward(problem, HopperForwardConfig(128, 2), 132, pack_gqa=8)
    assert [block and block[0] for block in bound.blocks] == [
        [1, 1, 8, 8, 128], None, [1, 1, 128, 128], None, [1, 1, 128, 128], None, [1, 1, 8, 8, 128]]
    assert bound.scalars[:3] == (1, 2, 2), "tiles, kv heads, batches"
    q = torch.arange(2 * 12 * 10 * 128).view(2, 10, 12, 128).transpose(1, 2)
    grouped = launch._grouped(q, bound.group)
    assert grouped.shape == (2, 2, 10, 6, 128)
    assert torch.equal(grouped[1, 1, 3, 4], q[1, 6 + 4, 3])


def test_a_softcap_takes_the_scales_place_and_tanh_gets_the_rest():
    log2e = math.log2(math.e)
    for softcap, scaling in ((None, (0.25 * log2e, None, 0.5)),
                             (30.0, (30.0 * log2e, 2.0 * log2e * 0.25 / 30.0, 64.0))):
        problem = replace(problem_of(), scale=0.25, scores=ScoreOptions(softcap=softcap))
        numbers = bound_forward(problem, HopperForwardConfig(128, 2)).scalars
        assert numbers[10:13] == pytest.approx(scaling)


@pytest.mark.parametrize(("stride", "passed"), [(1, None), (0, 0), (7, 7)])
def test_sinks_may_lie_apart(stride, passed):
    problem = replace(problem_of(), scores=ScoreOptions(sinks=OperandSpec((1,), (stride,), torch.float32)))
    assert bound_forward(problem, HopperForwardConfig(128, 2)).sinks_stride == passed


@pytest.mark.parametrize(("sq", "programs"), [(128, 4), (4096, 128), (8192, 132)])
def test_there_is_one_cta_an_sm_and_none_without_a_tile(sq, programs):
    problem = problem_of(sq, sq, heads=(4, 4))
    assert bound_forward(problem, HopperForwardConfig(128, 2)).grid == (programs,)


def test_three_warpgroups_tiles_are_counted_from_the_end_under_an_upper_bound_and_their_warpgroups_rest_elsewhere():
    lengths = Sequences(seqlens_q=OperandSpec((1,), (1,), torch.int32))
    for consumers, mask, are_data, from_end, rests in (
            (3, causal(), False, True, False), (3, window(None, 5), False, True, False),
            (3, Mask(), False, False, True), (3, window(9, 0), False, False, True), (3, causal(), True, False, True),
            (2, causal(), False, False, False), (2, Mask(), False, False, False), (2, causal(), True, False, True),
            (1, Mask(), True, False, False)):
        problem = problem_of(mask=mask, d=64)
        shape = scalars_of(replace(problem, sequences=lengths) if are_data else problem,
                           HopperForwardConfig(128, consumers))[2]
        assert (from_end, rests) == (shape.TILES_FROM_END, shape.SKIP_PADDING)
    shared = scalars_of(problem_of(mask=causal(), d=64, heads=(2, 1)), HopperForwardConfig(128, 3), 2)[2]
    assert (shared.TILES_FROM_END, shared.SKIP_PADDING) == (False, True), "a first query of -1 would be no tile"
