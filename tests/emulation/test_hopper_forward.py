"""The Hopper forward kernel: its source on the CPU, of whole tiles and with split-KV."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal, window
from tilewise.problem.options import NO_OPERANDS, NO_SETTINGS, Operands, OperandSpec
from tilewise.problem.sequences import Sequences
from tilewise.testing import oracle

forward_on_cpu = pytest.importorskip("emulation.forward_on_cpu", reason="Triton is not installed")
gluon_on_cpu = pytest.importorskip("emulation.gluon_on_cpu")
attend, call_of, check, combined = (
    getattr(forward_on_cpu, name) for name in ("attend", "call_of", "check", "combined"))


CASES = {
    "full": (Mask(), (150, 700), (2, 1), 1), "causal": (causal("bottom_right"), (200, 620), (1, 1), 1),
    "more_splits_than_blocks": (causal("top_left"), (300, 300), (1, 1), 1),
    "warpgroups_without_rows": (Mask(), (200, 700), (2, 1), 1),
    "rows_in_front": (causal("bottom_right"), (390, 500), (1, 1), 1),
    "window": (window(200, 30, "bottom_right"), (150, 500), (2, 2), 1),
    "rows_without_a_key": (causal("bottom_right"), (300, 200), (1, 1), 1),
    "packed_heads": (causal("bottom_right"), (5, 600), (6, 2), 4),
    "many_packed_heads": (causal("bottom_right"), (2, 600), (64, 1), 64),
}


@pytest.mark.parametrize(("d", "mask", "config"), [
    (64, Mask(), HopperForwardConfig(128, 2)), (64, Mask(), HopperForwardConfig(128, 3, ping_pong=True)),
    (64, causal("bottom_right"), HopperForwardConfig(128, 3, ping_pong=True)),
    (128, Mask(), HopperForwardConfig(128, 2, ping_pong=True)),
    (256, Mask(), HopperForwardConfig(64, 2, q_stages=1, epilogue_passes=2, ping_pong=True))], ids=str)
def test_the_greatest_of_scores_far_apart_is_found_wherever_it_is(d, mask, config):
    """What exceeds a maximum by more than 128, to base 2, overflows: scores are hundreds apart."""
    random.seed(0)
    problem, tensors = call_of(mask, (192, 300), (1, 1), (d, d))
    problem = replace(problem, scale=50.0 * (64 / d) ** 0.5)
    check(problem, tensors, *attend(problem, config, tensors)[:2])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("dims", "config"), [
    ((64, 64), HopperForwardConfig(128, 2)), ((128, 128), HopperForwardConfig(128, 2)),
    ((64, 64), HopperForwardConfig(128, 3, ping_pong=True)), ((128, 128), HopperForwardConfig(128, 2, ping_pong=True)),
    ((64, 64), HopperForwardConfig(128, 2, kv_stages=4, ping_pong=True)), ((64, 40), HopperForwardConfig(128, 1)),
    ((136, 72), HopperForwardConfig(64, 2, q_stages=1, epilogue_passes=2))],
    ids=["64", "128", "three_warpgroups", "128_in_turns", "64_in_turns", "one_warpgroup", "pieces"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_its_source_computes_out_and_lse_on_the_cpu_of_whole_tiles_and_of_splits(case, dims, config, splits):
    random.seed(0)
    mask, sizes, heads, pack_gqa = case
    problem, tensors = call_of(mask, sizes, heads, dims)
    out, lse, partial = attend(problem, config, tensors, pack_gqa, (0, splits) if splits > 1 else None)
    if splits > 1:
        assert lse.isnan().all(), "nothing but the splits is written"
        out, lse = (got.unflatten(0, (problem.b, problem.hq, problem.sq)) for got in combined(partial, problem.dv))
    check(problem, tensors, out, lse)


@pytest.mark.parametrize(("lengths_q", "lengths_k", "consumers", "tiles_of_call"), [
    ((200,), (700,), 3, [(6, 3), (6, 1)]), ((256,), (700,), 3, [(6, 3), (6, 1)]),
    ((64, 136), (500, 200), 3, [(4, 1), (2, 3)]), ((64, 136), (500, 200), 2, [(4, 1), (2, 2), (2, 1)])], ids=str)
def test_a_warpgroup_without_queries_in_a_tile_makes_no_products_of_its_steps(lengths_q, lengths_k, consumers,
                                                                             tiles_of_call, monkeypatch):
    """A step's S is one product, its P·V two. ``tiles_of_call``: steps of each tile, and warpgroups with a query.

    What is left to the others is S of a tile's first step and P·V of its last one, which come with the tiles around it.
    """
    made, multiply = [], gluon_on_cpu._multiply
    monkeypatch.setattr(gluon_on_cpu, "_multiply", lambda *operands, **how: made.append(how) or multiply(
        *operands, **how))
    problem, tensors = call_of(Mask(), (sum(lengths_q), sum(lengths_k)), (1, 1), (64, 64))
    data = ()
    if len(lengths_q) > 1:
        facts = OperandSpec((len(lengths_q) + 1,), (1,), torch.int32)
        problem = replace(problem, sequences=Sequences(len(lengths_q), facts, facts))
        data = (*(torch.tensor((0, *own)).cumsum(0).int() for own in (lengths_q, lengths_k)), None, None)
    attend(problem, HopperForwardConfig(128, consumers, ping_pong=True), tensors, programs=1, lengths=data)
    own = sum(3 * (steps * attending + consumers - attending) for steps, attending in tiles_of_call)
    assert len(made) == consumers + own, "S of a program's first tile has none to come with"


@pytest.mark.parametrize(("whole", "splits"), [(4, 3), (1, 8)], ids=str)
def test_its_source_computes_some_tiles_in_one_and_the_others_in_splits(whole, splits):
    """Six tiles of 128 queries, six blocks of keys; of eight splits the last two are empty."""
    random.seed(0)
    problem, tensors = call_of(Mask(), (300, 700), (2, 2), (64, 64))
    out, lse, partial = attend(problem, HopperForwardConfig(128, 2), tensors, split_kv=(whole, splits))
    first = {4: 428, 1: 128}[whole]
    out_rows, lse_rows = (got.view(600, *got.shape[3:]) for got in (out, lse))
    assert out_rows[first:].isnan().all(), "nothing but the splits is written of these"
    assert lse_rows[first:].isnan().all()
    out_rows[first:], lse_rows[first:] = combined(partial, problem.dv)
    check(problem, tensors, out, lse)


@pytest.mark.parametrize("mask", [Mask(), causal("bottom_right"), window(60, 9, "bottom_right")], ids=str)
@pytest.mark.parametrize("config", [
    HopperForwardConfig(128, 3, ping_pong=True), HopperForwardConfig(128, 2, 4, ping_pong=True),
    HopperForwardConfig(128, 2)], ids=str)
@pytest.mark.parametrize(("heads", "pack_gqa"), [((2, 1), 1), ((2, 1), 2), ((6, 2), 4)], ids=str)
def test_its_source_computes_packed_sequences_on_the_cpu(mask, config, heads, pack_gqa):
    """Among them one without rows, one that ends in a tile's first warpgroup, and one without keys."""
    random.seed(0)
    lengths_q, lengths_k = (70, 0, 200, 1, 30), (70, 9, 260, 130, 0)
    cu_q, cu_k = (torch.tensor((0, *lengths)).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    problem, tensors = call_of(mask, (sum(lengths_q), sum(lengths_k)), heads, (64, 64))
    facts = OperandSpec((len(cu_q),), (1,), torch.int32)
    problem = replace(problem, sequences=Sequences(len(lengths_q), facts, facts))
    out, lse, _ = attend(problem, config, tensors, pack_gqa, lengths=(cu_q, cu_k, None, None))
    for number, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        part_q, part_k = slice(cu_q[number], cu_q[number] + rows), slice(cu_k[number], cu_k[number] + keys)
        if rows:
            check(problem, [tensor[:, :, part] for tensor, part in zip(tensors, (part_q, part_k, part_k), strict=True)],
                  out[:, :, part_q], lse[:, :, part_q])


@pytest.mark.parametrize("mask", [Mask(), causal("bottom_right")], ids=str)
@pytest.mark.parametrize("config", [HopperForwardConfig(128, 3, ping_pong=True), HopperForwardConfig(128, 2)], ids=str)
@pytest.mark.parametrize(("heads", "pack_gqa"), [((2, 1), 1), ((2, 1), 2), ((6, 2), 4)], ids=str)
def test_its_source_computes_padded_lengths_on_the_cpu_and_nan_behind_them_reaches_nothing(mask, config, heads,
                                                                                           pack_gqa):
    random.seed(0)
    lengths_q, lengths_k = torch.tensor((300, 64, 0), dtype=torch.int32), torch.tensor((150, 290, 7), dtype=torch.int32)
    problem, tensors = call_of(mask, (300, 300), heads, (64, 64), b=3)
    facts = OperandSpec((3,), (1,), torch.int32)
    problem = replace(problem, sequences=Sequences(None, None, None, facts, facts))
    for tensor, lengths in zip(tensors, (lengths_q, lengths_k, lengths_k), strict=True):
        for entry, length in enumerate(lengths):
            tensor[entry, :, length:] = float("nan")
    out, lse, _ = attend(problem, config, tensors, pack_gqa, lengths=(None, None, lengths_q, lengths_k))
    for entry, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        assert (out[entry, :, rows:] == 0.0).all()
        assert (lse[entry, :, rows:] == float("-inf")).all()
        if rows:
            part = slice(entry, entry + 1)
            check(problem, [tensor[part, :, :length] for tensor, length in zip(
                tensors, (rows, keys, keys), strict=True)], out[part, :, :rows], lse[part, :, :rows])


@pytest.mark.parametrize(("config", "d"), [(HopperForwardConfig(128, 2), 64), (HopperForwardConfig(128, 2), 128),
                                           (HopperForwardConfig(128, 3, ping_pong=True), 64)], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_max_logit_is_the_greatest_score_of_a_row_and_no_sink(case, config, d):
    """Of enough keys for a frozen maximum, which then is not used; -inf of a row that sees no key."""
    random.seed(0)
    mask, sizes, heads, pack_gqa = case
    problem, tensors = call_of(mask, sizes, heads, (d, d), sinks=True)
    problem = replace(problem, scores=problem.scores._replace(max_logit=True))
    largest, sinks = torch.full((1, heads[0], sizes[0]), float("nan")), torch.full((heads[0],), 100.0)
    attend(problem, config, tensors, pack_gqa, sinks=sinks, max_logit=largest)
    torch.testing.assert_close(largest.double(), oracle.max_logit(*tensors[:2], mask, problem.scale), rtol=1e-5,
                               atol=1e-5)


@pytest.mark.parametrize("added", [False, True], ids=["alone", "with a bias"])
def test_max_logit_is_of_capped_scores(added):
    problem, tensors = call_of(causal("bottom_right"), (200, 620), (1, 1), (64, 64))
    operands = Operands(bias=torch.randn(1, 1, 200, 620)) if added else NO_OPERANDS
    spec = OperandSpec((1, 1, 200, 620), (124000, 124000, 620, 1), torch.float32) if added else None
    problem = replace(problem, scores=problem.scores._replace(max_logit=True, softcap=2.0, bias=spec))
    largest = torch.full((1, 1, 200), float("nan"))
    attend(problem, HopperForwardConfig(128, 2), tensors, operands=operands, max_logit=largest)
    changes = oracle.Changes(operands, NO_SETTINGS._replace(softcap=2.0))
    torch.testing.assert_close(largest.double(), oracle.max_logit(*tensors[:2], problem.mask, problem.scale, changes),
                               rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pack_gqa", [1, 2])
def test_max_logit_of_packed_sequences_is_minus_infinity_past_their_lengths(pack_gqa):
    borders = [torch.tensor([0, *itertools.accumulate(own)], dtype=torch.int32)
               for own in ((120, 0, 80), (300, 40, 90))]
    used = torch.tensor([100, 0, 80], dtype=torch.int32)
    problem, tensors = call_of(causal("bottom_right"), (200, 430), (2, 1), (64, 64))
    spec = OperandSpec((4,), (1,), torch.int32)
    problem = replace(problem, scores=problem.scores._replace(max_logit=True),
                      sequences=Sequences(3, spec, spec, spec._replace(shape=(3,))))
    largest = torch.full((1, 2, 200), float("nan"))
    attend(problem, HopperForwardConfig(128, 2), tensors, pack_gqa, lengths=(*borders, used), max_logit=largest)
    q, k, _ = tensors
    for (first, count), keys in (((0, 100), (0, 300)), ((120, 80), (340, 430))):
        own = q[:, :, first:first + count], k[:, :, keys[0]:keys[1]]
        torch.testing.assert_close(largest[:, :, first:first + count].double(),
                                   oracle.max_logit(*own, problem.mask, problem.scale), rtol=1e-5, atol=1e-5)
    assert largest[:, :, 100:120].isneginf().all()
