"""The Hopper forward kernel with a frozen row maximum; overflowed tiles are recomputed: its source on the CPU."""

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from emulation.hopper_calls import bound_forward, problem_of, scalars_of
from tilewise.functions import FunctionCode
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal, window
from tilewise.problem.options import FunctionSpec, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning import schedules_hopper

forward_on_cpu = pytest.importorskip("emulation.forward_on_cpu", reason="Triton is not installed")
attend, call_of, check, combined = (
    getattr(forward_on_cpu, name) for name in ("attend", "call_of", "check", "combined"))
FUNCTION = FunctionSpec(FunctionCode("changes", None, None, None, 0), ())
TWO, THREE = HopperForwardConfig(128, 2), HopperForwardConfig(128, 3, ping_pong=True)
WIDE = HopperForwardConfig(64, 2, q_stages=1, epilogue_passes=2)
CASES = {
    "full": (Mask(), (150, 700), (64, 64), TWO), "three": (Mask(), (390, 500), (64, 64), THREE),
    "causal": (causal("bottom_right"), (200, 620), (64, 64), TWO),
    "three_causal": (causal("bottom_right"), (390, 500), (64, 64), THREE),
    "diagonal": (causal("top_left"), (300, 600), (128, 128), TWO),
    # A warpgroup's first query sees whole steps alone, and nothing of those that need a mask.
    "whole_steps": (causal("bottom_right"), (129, 512), (64, 64), TWO),
    "rows_without_a_key": (causal("bottom_right"), (400, 300), (64, 64), TWO),
    "wide": (causal("bottom_right"), (200, 400), (136, 200), WIDE),
}


@pytest.fixture(autouse=True)
def short_calls_too(monkeypatch):
    monkeypatch.setattr(schedules_hopper, "LEAST_FROZEN", 1)


@pytest.fixture
def loaded(monkeypatch):
    """The tiles that the producer publishes, in order: their numbers; the last says whether a tile is recomputed."""
    return forward_on_cpu.published_tiles(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("splits", "sinks"), [(1, False), (1, True), (3, False)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_its_source_computes_out_and_lse_and_recomputes_no_tile_of_common_scores(case, splits, sinks, dtype, loaded):
    random.seed(0)
    mask, sizes, dims, config = case
    problem, tensors = call_of(mask, sizes, (2, 1), dims, sinks=sinks, dtype=dtype)
    assert scalars_of(problem, config)[2].FROZEN_MAX
    own = torch.tensor((-200.0, -300.0)) if problem.scores.sinks else None  # of no weight, but one must be asked for
    out, lse, partial = attend(problem, config, tensors, 1, (0, splits) if splits > 1 else None, own)
    if splits > 1:
        out, lse = (got.unflatten(0, (problem.b, problem.hq, problem.sq)) for got in combined(partial, problem.dv))
    if own is not None:
        unseen = lse < -150.0
        lse, out = torch.where(unseen, float("-inf"), lse), torch.where(unseen[..., None], 0.0, out)
    check(problem, tensors, out, lse)
    assert not any(tile[-1] for tile in loaded)
    assert len(set(loaded)) == len(loaded)


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize(("case", "split_kv"), [
    *product(CASES, (None, (0, 2))), ("full", (3, 2)), ("three", (4, 2))], ids=str)
def test_a_tile_with_scores_too_far_above_its_first_ones_is_recomputed(case, split_kv, programs, loaded):
    """Scores are hundreds apart: what exceeds those of the first steps by more than 128, to base 2, overflows.

    Of three programs each has few tiles, all of which are judged behind its last one; of one the first ones before.
    """
    random.seed(0)
    mask, sizes, dims, config = CASES[case]
    problem, tensors = call_of(mask, sizes, (4, 1), dims, dtype=torch.bfloat16)
    problem = replace(problem, scale=4000.0 / dims[0])
    out, lse, partial = attend(problem, config, tensors, 1, split_kv, programs=programs)
    if split_kv is not None:
        rows = bound_forward(problem, config, programs, 1, split_kv).split_rows
        flat = out.view(-1, problem.dv), lse.view(-1)
        for whole, split in zip(flat, combined(partial, problem.dv), strict=True):
            whole[rows.start:] = split
    check(problem, tensors, out, lse)
    again = [tile[:-1] for tile in loaded if tile[-1]]
    assert again
    assert len(set(again)) == len(again)
    assert set(again) <= {tile[:-1] for tile in loaded if not tile[-1]}
    if programs == 1 and len(again) > 4:
        assert not all(tile[-1] for tile in loaded[-len(again):]), "bad tiles do not wait for the last number"


def test_in_float16_an_overflowed_tile_is_recomputed_too(loaded):
    """There P overflows from 11 above a row's maximum on, of two steps: keys that climb as the steps go down."""
    problem, (q, k, v) = call_of(Mask(), (130, 700), (1, 1), (64, 64))
    q[..., 0] = 8.0
    k[..., 0] = torch.arange(700).flip(0) // 100 * 16.0
    k[:, :, :128, 0] = 0.0  # the step that comes second
    check(problem, (q, k, v), *attend(problem, TWO, (q, k, v))[:2])
    assert sorted(tile for tile in loaded if tile[-1]) == [(0, 0, 0, 1), (128, 0, 0, 1)]


def far_above(keys):
    """A call of four tiles of 128 queries, in which some keys of the first tile's head dim outdo the others by 200."""
    problem, (q, k, v) = call_of(Mask(), (512, 512), (1, 1), (64, 64), dtype=torch.bfloat16)
    problem = replace(problem, scale=1.0)
    q, k = q * 0.25, k * 0.25
    q[:, :, :, 0] = 0.0
    q[:, :, 130:132, 0] = 100.0
    k[:, :, :, 0] = 0.0
    k[:, :, keys, 0] = 2.0
    return problem, (q, k, v)


def test_only_the_overflowed_tile_is_recomputed(loaded):
    problem, tensors = far_above(slice(0, 3))  # steps are taken from the last keys down
    check(problem, tensors, *attend(problem, TWO, tensors)[:2])
    assert sorted(loaded) == [(0, 0, 0, 0), (128, 0, 0, 0), (128, 0, 0, 1), (256, 0, 0, 0), (384, 0, 0, 0)]


def test_a_tile_whose_first_kv_block_has_the_greatest_score_is_not_recomputed(loaded):
    problem, tensors = far_above(slice(500, 512))
    check(problem, tensors, *attend(problem, TWO, tensors)[:2])
    assert sorted(loaded) == [(0, 0, 0, 0), (128, 0, 0, 0), (256, 0, 0, 0), (384, 0, 0, 0)]


def test_in_bfloat16_a_tile_is_recomputed_before_large_values_overflow(loaded):
    """Weights of e^52, times values around 2^60, are more than float32 holds; their sum alone is not."""
    problem, (q, k, v) = far_above(slice(0, 3))
    q[:, :, 130:132, 0], v = 26.0, v * 2.0**60
    out, lse, _ = attend(problem, TWO, (q, k, v))
    check(problem, (q, k, v * 2.0**-60), out.float() * 2.0**-60, lse)
    assert out.isfinite().all()
    assert [tile for tile in loaded if tile[-1]] == [(128, 0, 0, 1)]


@pytest.mark.parametrize("split_kv", [None, (0, 2)], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_in_float16_first_keys_that_outdo_all_others_recompute_no_tile(case, split_kv, loaded):
    """As attention's sinks do. The calls of these tests are in float16; a part of a tile may not have them."""
    random.seed(0)
    mask, sizes, dims, config = case
    problem, (q, k, v) = call_of(mask, sizes, (2, 1), dims)
    assert scalars_of(problem, config)[2].SINK_BLOCK_FIRST
    assert not scalars_of(replace(problem, dtype=torch.bfloat16), config)[2].SINK_BLOCK_FIRST
    q[..., 0] = 8.0
    k[..., 0] = 0.0
    k[:, :, 0, 0] = 100.0
    out, lse, partial = attend(problem, config, (q, k, v), 1, split_kv)
    if split_kv is not None:
        out, lse = (got.unflatten(0, (problem.b, problem.hq, problem.sq)) for got in combined(partial, problem.dv))
    check(problem, (q, k, v), out, lse)
    assert not any(tile[-1] for tile in loaded)


def test_values_that_are_not_finite_reach_what_they_reach_with_online_softmax(monkeypatch):
    """An infinite value leaves lse finite, and a score of infinity does not."""
    problem, (q, k, v) = call_of(Mask(), (200, 600), (1, 1), (64, 64))
    v[0, 0, 100, 3] = float("inf")
    k[0, 0, 300, 2] = float("inf")
    tensors = q, k, v
    k_only = q, k, torch.zeros_like(v)
    for given in (tensors, k_only, (q, torch.zeros_like(k), v)):
        with monkeypatch.context() as patch:
            got = attend(problem, TWO, given)[:2]
            patch.setattr(schedules_hopper, "LEAST_FROZEN", 10**9)
            want = attend(problem, TWO, given)
        for own, other in zip(got, want, strict=False):
            torch.testing.assert_close(own, other, rtol=4e-3, atol=4e-3, equal_nan=True)


def packed_call(mask, lengths, heads, dtype=torch.bfloat16, dims=(64, 64), sinks=False):
    """Packed sequences, (queries, keys) of each: the problem, the tensors, and the borders."""
    borders = [torch.tensor((0, *side)).cumsum(0).int() for side in zip(*lengths, strict=True)]
    problem, tensors = call_of(mask, [int(side[-1]) for side in borders], heads, dims, sinks=sinks, dtype=dtype)
    facts = OperandSpec((len(lengths) + 1,), (1,), torch.int32)
    return replace(problem, sequences=Sequences(len(lengths), facts, facts)), tensors, borders


def check_packed(problem, tensors, borders, out, lse):
    for (first_q, stop_q), (first_k, stop_k) in zip(*(pairwise(side.tolist()) for side in borders), strict=True):
        if stop_q > first_q:
            own = [tensor[:, :, at] for tensor, at in zip(
                tensors, (slice(first_q, stop_q), *[slice(first_k, stop_k)] * 2), strict=True)]
            check(problem, own, out[:, :, first_q:stop_q], lse[:, :, first_q:stop_q])


PACKED = ((520, 530), (0, 9), (70, 600), (30, 0), (129, 512), (200, 150))


@pytest.mark.parametrize(("config", "dtype"), [(TWO, torch.bfloat16), (THREE, torch.float16)], ids=["two", "three"])
@pytest.mark.parametrize("mask", [Mask(), causal("bottom_right"), causal("top_left")], ids=str)
@pytest.mark.parametrize(("heads", "pack_gqa"), [((2, 1), 1), ((6, 2), 4)], ids=str)
def test_tiles_of_packed_sequences_are_recomputed_where_they_overflow_and_there_alone(mask, config, heads, pack_gqa,
                                                                                      dtype, loaded):
    """Scores that are common recompute none; of scores hundreds apart some do, and results are right."""
    random.seed(0)
    problem, tensors, borders = packed_call(mask, PACKED, heads, dtype)
    assert bound_forward(problem, config, pack_gqa=pack_gqa).scalars[1].FROZEN_MAX
    out, lse, _ = attend(problem, config, tensors, pack_gqa, lengths=(*borders, None, None))
    check_packed(problem, tensors, borders, out, lse)
    assert not any(tile[-1] for tile in loaded)
    problem = replace(problem, scale=60.0)
    out, lse, _ = attend(problem, config, tensors, pack_gqa, lengths=(*borders, None, None))
    check_packed(problem, tensors, borders, out, lse)
    again = [tile[:-1] for tile in loaded if tile[-1]]
    assert again
    assert len(set(again)) == len(again)
    assert len(again) < len(loaded) - len(again), "most of the first blocks have a row's greatest score"


@pytest.mark.parametrize("programs", [1, 40])
def test_wide_heads_sinks_and_programs_without_a_tile(programs, loaded):
    """One tile of Q, and buffers of out that are used twice; 40 programs have fewer tiles."""
    problem, tensors, borders = packed_call(causal("bottom_right"), ((90, 300), (0, 5), (64, 400)), (2, 1),
                                            dims=(136, 200), sinks=True)
    sinks = torch.tensor((-200.0, -300.0))
    for scale, is_recomputed in ((0.05, False), (40.0, True)):
        loaded.clear()
        problem = replace(problem, scale=scale)
        out, lse, _ = attend(problem, WIDE, tensors, sinks=sinks, lengths=(*borders, None, None), programs=programs)
        check_packed(problem, tensors, borders, out, lse)
        assert any(tile[-1] for tile in loaded) is is_recomputed


@pytest.mark.parametrize("behind", ["next", "padding"])
@pytest.mark.parametrize("config", [TWO, THREE], ids=["two", "three"])
def test_what_lies_behind_a_sequences_queries_has_no_tile_recomputed(config, behind, loaded):
    """The first query of the next sequence, which has an early key of the first one as its greatest; NaN in padding."""
    problem, (q, k, v), borders = packed_call(Mask(), ((100, 300), (60, 200), (40, 100)), (1, 1))
    used = torch.tensor([100, 50, 40], dtype=torch.int32)
    problem = replace(problem, sequences=problem.sequences._replace(seqlens_q=OperandSpec((3,), (1,), torch.int32)))
    if behind == "next":
        q[:, :, 100] = 1000.0 * k[:, :, 5]
    else:
        q[:, :, 150:160] = float("nan")
    out, lse, _ = attend(problem, config, (q, k, v), lengths=(*borders, used, None))
    again = {tile[3] for tile in loaded if tile[-1]}
    assert again <= {100} if behind == "next" else not again, "sequences by where they begin"
    for (first, stop), keys in (((0, 100), (0, 300)), ((100, 150), (300, 500)), ((160, 200), (500, 600))):
        own = q[:, :, first:stop], k[:, :, slice(*keys)], v[:, :, slice(*keys)]
        check(problem, own, out[:, :, first:stop], lse[:, :, first:stop])
    assert (out[:, :, 150:160] == 0.0).all()
    assert lse[:, :, 150:160].isneginf().all()


@pytest.mark.parametrize("config", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("mask", [Mask(), causal("bottom_right")], ids=str)
def test_padded_sequences_have_a_frozen_maximum_too(mask, config, loaded):
    problem, tensors = call_of(mask, (300, 500), (2, 1), (64, 64), b=3, dtype=torch.bfloat16)
    lengths = [torch.tensor(side, dtype=torch.int32) for side in ((300, 64, 0), (150, 500, 7))]
    facts = OperandSpec((3,), (1,), torch.int32)
    problem = replace(problem, sequences=Sequences(None, None, None, facts, facts), scale=60.0)
    assert scalars_of(problem, config)[2].FROZEN_MAX
    for tensor, side in zip(tensors, (lengths[0], lengths[1], lengths[1]), strict=True):
        for entry, length in enumerate(side):
            tensor[entry, :, length:] = float("nan")
    out, lse, _ = attend(problem, config, tensors, lengths=(None, None, *lengths))
    for entry, (rows, keys) in enumerate(zip(*lengths, strict=True)):
        if rows:
            part = slice(entry, entry + 1)
            own = [tensor[part, :, :length] for tensor, length in zip(tensors, (rows, keys, keys), strict=True)]
            check(problem, own, out[part, :, :rows], lse[part, :, :rows])
        assert (out[entry, :, rows:] == 0.0).all()
        assert lse[entry, :, rows:].isneginf().all()
    again = [tile[:-1] for tile in loaded if tile[-1]]
    assert again
    assert len(set(again)) == len(again)
    loaded.clear()
    attend(replace(problem, scale=0.1), config, tensors, lengths=(None, None, *lengths))
    assert not any(tile[-1] for tile in loaded), "not for the NaN behind the second entry's queries"


def test_the_maximum_is_frozen_where_keys_are_many_and_no_lower_bound_hides_the_first_ones(monkeypatch):
    monkeypatch.undo()
    plain = problem_of(d=64)
    lengths = Sequences(seqlens_q=OperandSpec((1,), (1,), torch.int32))

    def packed(count):
        facts = OperandSpec((count + 1,), (1,), torch.int32)
        return Sequences(count, facts, facts)

    sinks = ScoreOptions(sinks=OperandSpec((1,), (1,), torch.float32))
    for problem, config, is_steady in (
            (plain, TWO, True), (plain, THREE, True), (problem_of(mask=causal()), TWO, True),
            (problem_of(mask=window(None, 7)), TWO, True), (replace(plain, scores=sinks), TWO, True),
            (problem_of(d=256), WIDE, True), (problem_of(100, 512), TWO, True), (problem_of(4096, 511), TWO, False),
            (problem_of(mask=window(9, 0)), TWO, False), (problem_of(mask=window(9, None)), TWO, False),
            (replace(plain, scores=ScoreOptions(softcap=30.0)), TWO, True),
            (replace(plain, scores=ScoreOptions(score_function=FUNCTION)), TWO, True),
            (replace(plain, sequences=lengths), TWO, True), (replace(plain, sequences=packed(8)), TWO, True),
            (replace(plain, sequences=packed(9)), TWO, False),  # 455 tokens on average
            *((replace(plain, sequences=packed(count), deterministic=True), TWO, True)  # whatever neighbours' lengths
              for count in (1, 8, 9, 600)),
            (plain, HopperForwardConfig(64, 1), False)):
        assert scalars_of(problem, config)[2].FROZEN_MAX is is_steady
