"""The Hopper backward kernel of heads up to 128: its source on the CPU, in the ways that a block may be computed."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from emulation.backward_calls import (
    MASKS,
    NONE_AHEAD,
    SLOPES,
    alibi_of,
    call_of,
    compare,
    compare_beside_a_hidden_overflow,
    dq_of_accum,
    expected,
    extra_columns_of,
    with_a_hidden_overflow,
    with_slopes,
    with_true_lse,
)
from emulation.hopper_calls import bound_backward
from tilewise.kernels.hopper.backward.config import (
    D128AugmentedKVariant,
    D128Variant,
    HopperD128AugmentedKConfig,
    HopperD128Config,
)
from tilewise.masks import Mask, causal, window
from tilewise.problem.options import OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences

backward_on_cpu, forward_on_cpu = (pytest.importorskip(f"emulation.{name}", reason="Triton is not installed")
                                   for name in ("backward_on_cpu", "forward_on_cpu"))
S_AHEAD = HopperD128Config(s_ahead=True, variant=D128Variant.DQ_FROM_REGISTERS)
STAGED, FROM_REGISTERS, DETERMINISTIC = (HopperD128Config(variant=variant) for variant in (
    D128Variant.DQ_STAGED, D128Variant.DQ_FROM_REGISTERS, D128Variant.DETERMINISTIC))
DETERMINISTIC_AHEAD = replace(DETERMINISTIC, s_ahead=True)
DYNAMIC, HEAD_PERSISTENT = (HopperD128AugmentedKConfig(variant=variant) for variant in D128AugmentedKVariant)


@pytest.mark.parametrize(("config", "d"), [
    (S_AHEAD, 64), (S_AHEAD, 40), (FROM_REGISTERS, 128), (STAGED, 128), (DYNAMIC, 128), (DYNAMIC, 80),
    (HEAD_PERSISTENT, 128), (HEAD_PERSISTENT, 80), (DETERMINISTIC, 128)], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_source_computes_the_gradients_on_the_cpu(mask, config, d):
    random.seed(0)
    problem, tensors = call_of(*mask, (d, d))
    compare(backward_on_cpu.differentiate(problem, tensors, config, 3, 3), expected(problem, tensors))


@pytest.mark.parametrize(("config", "d"), [(S_AHEAD, 64), (STAGED, 128)], ids=str)
def test_a_hidden_score_that_overflows_adds_nothing_to_gradients_under_a_softcap(config, d, monkeypatch):
    """P is 0 there, and was multiplied by 1 - tanh², which is NaN."""
    monkeypatch.setitem(backward_on_cpu.CONSTANTS, (backward_on_cpu.softmax, "squashed"),
                        forward_on_cpu.squashed_with_overflow)
    random.seed(0)
    problem, tensors = with_a_hidden_overflow(*call_of(*MASKS["causal"], (d, d)))
    capped = replace(problem, scores=ScoreOptions(softcap=1.5))
    compare_beside_a_hidden_overflow(backward_on_cpu.differentiate(capped, tensors, config, 3, 3), expected(
        problem, tensors, function=lambda scores: 1.5 * torch.tanh(scores / 1.5)))


@pytest.mark.parametrize(("config", "d"), [(S_AHEAD, 64), (STAGED, 128), (DETERMINISTIC, 128)], ids=str)
@pytest.mark.parametrize("mask", [*list(MASKS.values())[1:], (
    window(None, None, "bottom_right"), (200, 300), (2, 1))], ids=[*list(MASKS)[1:], "full"])
def test_slopes_times_the_distance_are_taken_off(mask, config, d):
    """A head's own; of full masks and windows keys lie ahead, and of some the first keys or queries are not read."""
    random.seed(0)
    problem, tensors = call_of(*mask, (d, d))
    slopes = torch.tensor([[0.5, -0.01], [-0.02, 1.0]])[:, :problem.hq].contiguous()
    got = backward_on_cpu.differentiate(with_slopes(problem, slopes), tensors, config, 3, 3, slopes=slopes)
    compare(got, expected(problem, tensors, taken_off=alibi_of(problem, slopes)))


@pytest.mark.parametrize("slopes", SLOPES.values(), ids=SLOPES)
@pytest.mark.parametrize(("config", "d"), [(DYNAMIC, 128), (DYNAMIC, 80), (HEAD_PERSISTENT, 128)], ids=str)
@pytest.mark.parametrize("mask", NONE_AHEAD.values(), ids=NONE_AHEAD)
def test_products_take_slopes_times_the_distance_off_where_no_key_is_ahead(mask, config, d, slopes):
    random.seed(0)
    problem, tensors = call_of(*mask, (d, d))
    got = backward_on_cpu.differentiate(with_slopes(problem, slopes), tensors, config, 3, 2, slopes=slopes)
    compare(got, expected(problem, tensors, taken_off=alibi_of(problem, slopes)))


@pytest.mark.parametrize("config", [DYNAMIC, HEAD_PERSISTENT], ids=["dynamic", "head_persistent"])
def test_no_query_past_the_last_one_has_an_infinite_probability(config):
    """A negative slope of 1, 192 keys behind: what the last block has in common is 2^277, and inf · 0 is NaN."""
    random.seed(0)
    problem, tensors = call_of(*NONE_AHEAD["top_left"], (128, 128))
    slopes = torch.tensor([[-1.0, -2.0]])
    taken_off = alibi_of(problem, slopes)
    tensors = with_true_lse(problem, tensors, taken_off)
    got = backward_on_cpu.differentiate(with_slopes(problem, slopes), tensors, config, 3, 2, slopes=slopes)
    compare(got, expected(problem, tensors, taken_off=taken_off))


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("sides", [(None, None), (None, 0)], ids=["full", "causal"])
def test_of_packed_sequences_each_has_its_own_slopes_and_diagonal(sides, alignment):
    random.seed(0)
    lengths_q, lengths_k = (120, 0, 180), (211, 40, 50)
    mask, borders = window(*sides, alignment), [[0, *itertools.accumulate(own)] for own in (lengths_q, lengths_k)]
    problem, tensors = call_of(window(None, None, alignment), (300, 301), (2, 1), (64, 64), b=1)
    slopes = torch.tensor([[0.5, -0.02], [3.0, 3.0], [0.1, 1.0]])
    visible, taken_off = torch.zeros(300, 301, dtype=torch.bool), torch.zeros(1, 2, 300, 301, dtype=torch.float64)
    for number, own in enumerate(zip(lengths_q, lengths_k, strict=True)):
        part = tuple(slice(border[number], border[number + 1]) for border in borders)
        visible[part] = mask.visible(*own)
        if all(own):
            sequence = replace(problem, sq=own[0], sk=own[1])
            taken_off[(0, slice(None), *part)] = alibi_of(sequence, slopes[number:number + 1])[0]
    spec = OperandSpec((4,), (1,), torch.int32)
    packed = with_slopes(replace(problem, mask=mask, sequences=Sequences(3, spec, spec)), slopes)
    got = backward_on_cpu.differentiate(packed, tensors, HopperD128Config(), 4, 1, slopes=slopes, borders=[
        torch.tensor(border, dtype=torch.int32) for border in borders])
    compare(got[1:], expected(problem, tensors, visible, taken_off)[1:])


# Of queries and keys: tiles that no query sees, several tiles that add to a block, and sequences without a row.
PACKS = {"long": ((100, 0, 290, 70), (70, 60, 400, 1)), "many_keys": ((65, 200), (700, 130)), "few": ((3, 9), (200, 5))}


def packed_call(mask, lengths, d):
    """Return (problem, tensors, borders, visible) of packed sequences."""
    (sq, sk), borders = map(sum, lengths), [[0, *itertools.accumulate(own)] for own in lengths]
    problem, tensors = call_of(Mask(), (sq, sk), (2, 1), (d, d), b=1)
    visible = torch.zeros(sq, sk, dtype=torch.bool)
    for number, own in enumerate(zip(*lengths, strict=True)):
        visible[tuple(slice(border[number], border[number + 1]) for border in borders)] = mask.visible(*own)
    q, k, v, dout, lse, delta = tensors
    lse = lse.masked_fill(~visible.any(1), -torch.inf)
    spec = OperandSpec((len(borders[0]),), (1,), torch.int32)
    problem = replace(problem, mask=mask, sequences=Sequences(len(lengths[0]), spec, spec), deterministic=True)
    return problem, (q, k, v, dout, lse, delta), [torch.tensor(own, dtype=torch.int32) for own in borders], visible


def dq_of_packed(accum, problem, borders, width):
    """dQ of the rows of all sequences, whose blocks lie in the accumulator as varlen.locate_keys says."""
    parts = dq_of_accum(accum, width // 2, (1, problem.hq), None)
    blocks = parts.unflatten(2, (-1, 2, 64)).transpose(3, 4).flatten(4).flatten(2, 3)
    begins = [(int(start) // 64 + number) * 64 for number, start in enumerate(borders[0][:-1])]
    return torch.cat([blocks[:, :, begin:begin + int(rows)] for begin, rows in zip(
        begins, borders[0].diff(), strict=True)], 2)


@pytest.mark.parametrize(("lengths", "mask", "config", "d"), [
    ("long", Mask(), DETERMINISTIC_AHEAD, 64), ("long", causal("bottom_right"), DETERMINISTIC, 128),
    ("long", window(100, 30, "bottom_right"), DETERMINISTIC_AHEAD, 64), ("few", Mask(), DETERMINISTIC, 128),
    ("many_keys", causal("bottom_right"), DETERMINISTIC_AHEAD, 64),
    ("many_keys", window(40, None, "top_left"), DETERMINISTIC, 128)], ids=str)
def test_tiles_of_packed_sequences_add_to_dq_in_their_order(lengths, mask, config, d):
    """The accumulator is right, and so is every bit of it again, whatever other CTAs do meanwhile."""
    problem, tensors, borders, visible = packed_call(mask, PACKS[lengths], d)
    found = []
    for together in (1, 3):
        random.seed(together)
        (accum, _), dk, dv = backward_on_cpu.differentiate(problem, tensors, config, 132, together, borders=borders)
        found.append((dq_of_packed(accum, problem, borders, max(64, d))[..., :d], dk, dv))
    compare(found[0], expected(problem, (*tensors[:4], tensors[4].masked_fill(tensors[4].isinf(), torch.inf),
                                         tensors[5]), visible))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("mask", "config", "d"), [
    (Mask(), S_AHEAD, 40), (causal("bottom_right"), S_AHEAD, 64), (window(40, None, "top_left"), S_AHEAD, 64),
    (causal("bottom_right"), FROM_REGISTERS, 128)], ids=str)
def test_a_tile_that_has_all_keys_of_a_packed_sequence_writes_its_dq(mask, config, d):
    """Of each head of a group, with queries that see no key too, and in their rows alone; the others add to dQ."""
    random.seed(0)
    problem, tensors, borders, visible = packed_call(mask, ((100, 0, 290, 70, 30), (70, 60, 400, 1, 128)), d)
    problem = replace(problem, deterministic=False)
    (accum, written), dk, dv = backward_on_cpu.differentiate(problem, tensors, config, 132, 1, borders=borders)
    added = dq_of_packed(accum, problem, borders, max(64, d))[..., :d] * problem.scale
    are_written = torch.ones(sum((100, 290, 70, 30)), dtype=torch.bool)
    are_written[100:390] = False
    assert torch.equal(written.isnan(), ~are_written[:, None].expand_as(written))
    assert not added[:, :, are_written].any()
    got = torch.where(are_written[:, None], written, added), dk, dv
    dq, *rest = expected(problem, (*tensors[:4], tensors[4].masked_fill(tensors[4].isinf(), torch.inf), tensors[5]),
                         visible)
    compare(got, (dq * problem.scale, *rest))


@pytest.mark.parametrize(("illegal", "side"), [
    ((0, 300, 100, 400), "keys"), ((0, 350, 30, 60, 400), "both"), ((0, 500, 900, 400), "queries"),
    ((0, -50, 400, 20), "both")], ids=str)
def test_no_tile_waits_for_ever_where_borders_decrease(illegal, side):
    """A tile waits for those before it of its sequence, of which there may be none then."""
    random.seed(0)
    legal = torch.linspace(0, 400, len(illegal)).int()
    lengths = tuple(legal.diff().tolist())
    problem, tensors, borders, _ = packed_call(causal("bottom_right"), (lengths, lengths), 64)
    given = torch.tensor(illegal, dtype=torch.int32)
    borders = [given if side in (own, "both") else border for own, border in zip(
        ("queries", "keys"), borders, strict=True)]
    backward_on_cpu.differentiate(problem, tensors, DETERMINISTIC_AHEAD, 132, 3, borders=borders)


@pytest.mark.parametrize(("sk", "config", "ctas"), [(128, DYNAMIC, 4), (4096, DYNAMIC, 128),
                                                    (8192, DYNAMIC, 132), (8192, STAGED, 256)], ids=str)
def test_persistent_backward_ctas_are_one_an_sm_and_none_without_a_tile(sk, config, ctas):
    problem, _ = call_of(Mask(), (128, sk), (4, 4), (128, 128), b=1)
    assert bound_backward(problem, config).grid == (ctas,)


def test_a_deterministic_accumulator_is_followed_by_a_semaphore_for_each_block():
    problem, (q, k, v, dout, lse, delta) = call_of(Mask(), (200, 200), (5, 5), (128, 128), b=3)
    plain, ordered = (bound_backward(problem, config) for config in (HopperD128Config(), DETERMINISTIC))
    blocks = 3 * 5 * 4
    assert plain.accum_shape == (blocks * 64 * 128 // 256, 256)
    accum = torch.zeros(ordered.accum_shape)
    described, semaphores = ordered.arguments((q, k, v, dout, lse, delta, k, v, q), accum)[9:11]
    assert tuple(described.shape) == plain.accum_shape
    assert semaphores.dtype is torch.int32
    assert semaphores.numel() >= blocks
    assert semaphores.data_ptr() == accum.data_ptr() + 4 * math.prod(plain.accum_shape)


def test_where_ctas_own_heads_the_accumulator_is_that_of_a_head_a_cta():
    """The kernel writes dq, which it gets, and reads the accumulator by its address."""
    problem, (q, k, v, dout, lse, delta) = call_of(Mask(), (200, 200), (6, 3), (128, 128), b=2)
    launch = bound_backward(problem, HEAD_PERSISTENT, 4)
    assert launch.grid == (4,)
    assert launch.accum_shape == (4 * 2 * 4 * 64 * 128 // 256, 256)
    accum = torch.zeros(launch.accum_shape)
    columns = extra_columns_of(lse, delta)
    of_dq, described, workspace = launch.arguments((q, k, v, dout, columns, delta, k, v, q), accum)[8:11]
    assert (of_dq.base.data_ptr(), of_dq.block_shape) == (q.data_ptr(), [1, 1, 64, 64])
    assert described.base.data_ptr() == workspace.data_ptr() == accum.data_ptr()
