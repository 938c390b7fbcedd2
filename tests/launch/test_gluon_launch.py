"""What the Hopper forward kernel is compiled for, and what it is launched with: the facts of a problem and a tile."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

from emulation.hopper_calls import bound_backward, bound_forward, problem_of, scalars_of
from tilewise.kernels.hopper.arguments import BackwardOperands, Lengths
from tilewise.kernels.hopper.backward.config import HopperD128Config
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal, window
from tilewise.problem.options import Operands, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning.heuristics_hopper import forward_heuristic

launch = pytest.importorskip("tilewise.kernels.hopper.forward.launch", reason="Triton is not installed")
launch_backward = pytest.importorskip("tilewise.kernels.hopper.backward.launch")


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
        widths.append(None)  # there is no bias
        problem = problem_of(d=d, dv=dv)
        config = forward_heuristic(problem)
        bound = bound_forward(problem, config)
        assert [block and block[0][3] for block in bound.blocks] == widths
        rows = [64, 64, config.block_n, config.block_n, config.block_n, config.block_n, 64, 64]
        assert all(block is None or block[0][:3] == [1, 1, row] for block, row in zip(bound.blocks, rows, strict=True))


def test_packed_rows_are_a_querys_heads_one_after_another_then_the_next_query():
    problem = problem_of(10, b=2, heads=(12, 2))
    bound = bound_forward(problem, HopperForwardConfig(128, 2), 132, pack_gqa=8)
    assert [block and block[0] for block in bound.blocks] == [
        [1, 1, 8, 8, 128], None, [1, 1, 128, 128], None, [1, 1, 128, 128], None, [1, 1, 8, 8, 128], None]
    assert bound.scalars[0].grid[:3] == (1, 2, 2), "tiles, kv heads, batches"
    q = torch.arange(2 * 12 * 10 * 128).view(2, 10, 12, 128).transpose(1, 2)
    grouped = launch._grouped(q, bound.group)
    assert grouped.shape == (2, 2, 10, 6, 128)
    assert torch.equal(grouped[1, 1, 3, 4], q[1, 6 + 4, 3])


def test_twice_a_softcap_takes_the_scales_place():
    log2e = math.log2(math.e)
    for softcap, scaling in ((None, (0.25 * log2e, None, 0.5, None)),
                             (30.0, (60.0 * log2e, 2.0 * log2e * 0.25 / 30.0, 128.0, None))):
        problem = replace(problem_of(), scale=0.25, scores=ScoreOptions(softcap=softcap))
        numbers, _ = bound_forward(problem, HopperForwardConfig(128, 2)).scalars
        assert numbers.scaling == pytest.approx(scaling)


@pytest.mark.parametrize(("stride", "passed"), [(1, None), (0, 0), (7, 7)])
def test_sinks_may_lie_apart(stride, passed):
    problem = replace(problem_of(), scores=ScoreOptions(sinks=OperandSpec((1,), (stride,), torch.float32)))
    bound = bound_forward(problem, HopperForwardConfig(128, 2))
    assert bound.sinks_stride == bound.scalars[0].sinks_stride == passed
    split = bound_forward(problem, HopperForwardConfig(128, 2), split_kv=(0, 2))
    assert (split.sinks_stride, split.scalars[0].sinks_stride) == (passed, None), "they enter where splits are combined"


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


def handed_to_the_front_end(enqueue, arguments):
    """Of each argument that the kernel is compiled for, constants aside, its type and what it is specialised for."""
    seen = []
    enqueue.kernel = SimpleNamespace(warmup=lambda *own, **_: seen.extend(own))
    enqueue.compile(arguments)
    return [native_specialize_impl(CUDABackend, own, False, True, True) for own in seen[:-1]]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_kernels_are_compiled_for_no_number_and_wherever_lengths_lie(packed):
    """Else each length of a sequence would compile a kernel of its own."""
    def bound(sq, b, shift):
        """What a call of both passes has compiled, its lengths ``shift`` numbers past a multiple of 16 bytes."""
        lengths = torch.zeros(shift + b + packed, dtype=torch.int32)[shift:]
        facts = OperandSpec(tuple(lengths.shape), lengths.stride(), lengths.dtype)
        names = ("cu_seqlens_q", "cu_seqlens_k") if packed else ("seqlens_q", "seqlens_k")
        sequences = Sequences(b if packed else None, **dict.fromkeys(names, facts))
        operands = Operands(**dict.fromkeys(names, lengths))
        problem = replace(problem_of(sq, sq, window(80, 0, "bottom_right"), b=1 if packed else b), sequences=sequences)
        read_too = BackwardOperands(Lengths(*operands.lengths))
        q = torch.zeros(problem.b, 1, sq, 128, dtype=torch.bfloat16)
        lse = torch.zeros(q.shape[:3])
        forward = bound_forward(problem, HopperForwardConfig(128, 2))
        backward = bound_backward(problem, HopperD128Config())
        accum = torch.zeros(backward.accum_shape)
        return (*handed_to_the_front_end(forward.enqueue, forward.arguments(
                    (q, q, q, q, lse), torch.zeros(1, dtype=torch.int32), operands)),
                *handed_to_the_front_end(backward.enqueue, backward.arguments(
                    backward.taken((q, q, q, q, lse, lse, q, q, q), lse), accum, read_too)))

    assert bound(1024, 16, 0) == bound(1009, 1, 1)
