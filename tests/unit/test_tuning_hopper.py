"""Tiles of the Gluon kernels: the legal ones are proposed, a table is asked where it was measured, or the heuristic."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch

from tilewise.errors import InvalidInput
from tilewise.functions import FunctionCode
from tilewise.kernels.hopper.backward.config import (
    D64Variant,
    D128AugmentedKVariant,
    D128Variant,
    HopperD64Config,
    HopperD128AugmentedKConfig,
    HopperD128Config,
    HopperD192Config,
    HopperD256Config,
)
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal, chunk, prefix, sink_tokens, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import FunctionSpec, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning import heuristics_hopper, kinds, table
from tilewise.tuning.candidates_hopper import propose_hopper
from tilewise.tuning.ctas_per_head import choose_ctas_per_head
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics_hopper import backward_heuristic, forward_heuristic, prefers_gluon
from tilewise.tuning.schedules_hopper import forward_schedule
from tilewise.tuning.search import MOST_CANDIDATES
from tilewise.tuning.select import hopper_backward_config, hopper_forward_config
from tilewise.tuning.table import Bucket, make_row, read_table, write_table

DEVICE = DeviceSpec.of_arch("sm_90", "some-hopper")
HEURISTICS = {"hopper_forward": forward_heuristic, "hopper_backward": backward_heuristic}
FORWARD = HopperForwardConfig(block_n=64, consumers=2, kv_stages=4)
BACKWARD = HopperD128Config(q_stages=4, dout_stages=1, variant=D128Variant.DQ_FROM_REGISTERS)
BUSY = {"b": 8, "hq": 16, "hk": 16}  # heads that fill the SMs


def problem_of(d=128, dv=None, s=4096, kernel="hopper_forward", **fields):
    fields = {"b": 1, "hq": 2, "hk": 2, "mask": Mask(), "dtype": torch.bfloat16, **fields}
    problem = AttentionProblem(sq=s, sk=s, d=d, dv=dv or d, device=torch.device("cuda", 0), scale=1.0, **fields)
    return problem if kernel == "hopper_forward" else problem.backward(lse_grad=False)


def row_of(config, d=128, kernel="hopper_forward", **fields):
    """The row of a problem for which this config was the fastest."""
    problem = problem_of(d, kernel=kernel, **BUSY, **fields)
    return make_row(Bucket.of(problem), config, HEURISTICS[kernel](problem))


@pytest.fixture
def rows(monkeypatch):
    """Let these rows be the device's tables."""
    masks = Mask(), causal()
    made = {
        "hopper_forward": tuple(row_of(FORWARD, d, mask=mask) for d in (64, 128, 256) for mask in masks),
        "hopper_backward": tuple(row_of(BACKWARD, d, kernel="hopper_backward", mask=mask) for d in (64, 128)
                                 for mask in masks),
    }
    monkeypatch.setattr(table, "load_rows", lambda device, file, kernel: made[kernel] if (device, file) == (
        "some-hopper", f"{kernel}.16bit.json") else ())
    return made


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("kernel", HEURISTICS)
def test_proposals_are_distinct_legal_and_begin_with_the_heuristics(kernel, d):
    problem = problem_of(d, kernel=kernel)
    found = propose_hopper(kernel, problem, DEVICE)
    assert found.tiles[0] == found.plain == HEURISTICS[kernel](problem)
    assert found.described is None
    assert len(set(found.tiles)) == len(found.tiles) <= MOST_CANDIDATES
    assert all(config.shared_bytes(problem) <= DEVICE.shared_memory for config in found.tiles)
    assert propose_hopper(kernel, problem, DEVICE, most=2).tiles == found.tiles[:2]


def test_few_are_legal_where_heads_are_wide_and_all_ways_where_they_are_narrow():
    assert {kernel: [len(propose_hopper(kernel, problem_of(d, kernel=kernel), DEVICE).tiles) for d in (64, 128, 256)]
            for kernel in HEURISTICS} == {"hopper_forward": [14, 6, 2], "hopper_backward": [16, 7, 2]}
    narrow = propose_hopper("hopper_forward", problem_of(64), DEVICE).tiles
    assert {(config.block_n, config.consumers, config.ping_pong) for config in narrow} == {
        (*sides, turns) for sides in ((64, 2), (128, 2), (128, 3)) for turns in (False, True)}
    assert {config.q_stages for config in narrow if config.kv_stages == 2} == {2}  # there is room for them
    ways = [{(config.kernel, config.variant, config.s_ahead, config.ctas_per_head) for config in propose_hopper(
        "hopper_backward", problem_of(d, kernel="hopper_backward"), DEVICE).tiles} for d in (64, 128)]
    any_order = D128Variant.DQ_STAGED, D128Variant.DQ_FROM_REGISTERS
    assert ways == [
        {*product(["d128"], any_order, (False, True), [1]), ("d64", "dynamic_tiles", False, 1),
         *product(["d64"], ["head_persistent"], [False], (1, 2, 4))},
        {*product(["d128"], any_order, [False], [1]),
         *product(["d128_augmented_k"], D128AugmentedKVariant, [False], [1])}]


def test_registers_bound_keys_and_warpgroups():
    for d, dv, keys, consumers in ((64, 128, {64, 128}, {2}), (128, 192, {64}, {2}), (96, 64, {64, 128}, {2})):
        tiles = propose_hopper("hopper_forward", replace(problem_of(d, dv), b=8, hq=16, hk=16), DEVICE).tiles
        assert ({config.block_n for config in tiles}, {config.consumers for config in tiles}) == (keys, consumers)
    for d, dv, kernels in ((192, 128, ["d192", "d256"]), (136, 40, ["d192", "d256"]), (200, 64, ["d256"]),
                           (192, 192, ["d256"]), (64, 136, ["d256"]), (128, 128, ["d128_augmented_k", "d128"])):
        tiles = propose_hopper("hopper_backward", problem_of(d, dv, kernel="hopper_backward"), DEVICE).tiles
        assert list(dict.fromkeys(config.kernel for config in tiles)) == kernels


UNFIT = {"d": {"d": 136}, "dv": {"dv": 136}, "scale": {"scale": 2.0**-41}, "negative": {"scale": -1.0},
         "function": {"scores": ScoreOptions(score_function=FunctionSpec(FunctionCode("f", None, None, None, 0), ()))},
         "softcap": {"scores": ScoreOptions(softcap=3.0)}, "dropout": {"scores": ScoreOptions(dropout_p=0.1)},
         "alibi": {"scores": ScoreOptions(alibi_slopes=OperandSpec((1, 2), (2, 1), torch.float32))},
         "lengths": {"sequences": Sequences(seqlens_k=OperandSpec((1,), (1,), torch.int32))}}


@pytest.mark.parametrize("name", ["softcap", "dropout", "lengths", "mask"])
def test_some_options_have_dq_in_a_kernel_of_its_own_above_128_columns(name):
    fields = {"mask": prefix(3)} if name == "mask" else UNFIT[name]
    capped = replace(problem_of(192, 128, kernel="hopper_backward"), **fields)
    for d in (192, 256):
        problem = replace(capped, d=d)
        assert backward_heuristic(problem) == HopperD256Config()
        tiles = propose_hopper("hopper_backward", problem, DEVICE).tiles
        assert {config.kernel for config in tiles} == {"d256"}
    allowed = r"causal masks and windows, no softcap, dropout or lengths that are data\."
    with pytest.raises(InvalidInput, match=rf"^kernel=d192 for .*; allowed are {allowed}$"):
        HopperD192Config().columns(capped)


@pytest.mark.parametrize("fields", UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize(("d", "config"), [(128, HopperD128AugmentedKConfig()), (64, HopperD64Config())], ids=str)
def test_k_is_not_augmented_where_something_comes_between_lse_and_the_probabilities(d, config, fields):
    problem = replace(problem_of(d, kernel="hopper_backward"), **fields)
    assert not backward_heuristic(problem).augmented_k
    allowed = (r"head dims .*, a scale of 2\^-40 or more, and no softcap, score function, dropout, lengths that are "
               "data or ALiBi with keys ahead")
    with pytest.raises(InvalidInput, match=rf"^kernel={config.kernel} for .*; allowed are {allowed}\.$"):
        config.columns(problem)


@pytest.mark.parametrize(("mask", "sees_ahead"), [
    (causal("bottom_right"), False), (window(300, 0), False), (window(300, 1), True),
    (window(None, None, "top_left"), True), (causal() & prefix(3), True)], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_alibi_has_the_config_of_a_plain_call_where_no_key_is_ahead(d, mask, sees_ahead):
    slopes = ScoreOptions(alibi_slopes=OperandSpec((1, 2), (0, 1), torch.bfloat16))
    for heads, s in ((2, 4096), (132, 512)):
        plain = replace(problem_of(d, kernel="hopper_backward", s=s, mask=mask), hq=heads, hk=heads)
        config = backward_heuristic(replace(plain, scores=slopes))
        assert config.augmented_k != sees_ahead
        assert (config == backward_heuristic(plain)) != sees_ahead


@pytest.mark.parametrize(("d", "deterministic", "config"), [
    (64, False, HopperD128Config(s_ahead=True, variant=D128Variant.DQ_FROM_REGISTERS)),
    (128, False, HopperD128Config(variant=D128Variant.DQ_FROM_REGISTERS)),
    (64, True, HopperD128Config(variant=D128Variant.DETERMINISTIC)),
    (128, True, HopperD128Config(variant=D128Variant.DETERMINISTIC))], ids=str)
def test_a_score_function_has_a_variant_beside_which_registers_are_left(d, deterministic, config):
    problem = replace(problem_of(d, kernel="hopper_backward"), deterministic=deterministic, **UNFIT["function"])
    assert backward_heuristic(problem) == hopper_backward_config(problem, DEVICE) == config


@pytest.mark.parametrize(("d", "stages"), [(64, 4), (72, 4), (128, 4), (192, 2), (256, 2)])
def test_a_score_function_has_two_warpgroups_and_64_keys_in_the_forward_pass_and_no_tuned_tile(d, stages):
    problem = replace(problem_of(d), b=8, hq=16, hk=16, **UNFIT["function"])
    config = forward_heuristic(problem)
    assert (config.consumers, config.ping_pong, config.block_n, config.kv_stages) == (2, False, 64, stages)
    assert hopper_forward_config(problem, DEVICE) == config
    schedule = forward_schedule(problem, config, 132)
    assert (schedule.frozen_max, schedule.softmax_parts) == (True, 2)


def bias_of(*strides, shape=(1, 2, 512, 512), dtype=torch.bfloat16):
    return {"scores": ScoreOptions(bias=OperandSpec(shape, strides, dtype))}


@pytest.mark.parametrize("fields", [
    bias_of(0, 0, 512, 1), bias_of(2**20 + 4, 2**18, 512, 1), bias_of(0, 5, 512, 1, shape=(4, 1, 512, 512))],
    ids=["shared", "one_batch_entry", "one_head"])
def test_no_step_is_made_along_batch_entries_or_heads_that_share_a_bias(fields):
    problem = replace(problem_of(64, s=512), **fields)
    assert forward_heuristic(problem).bias_stages(problem) > 0


@pytest.mark.parametrize(("d", "q_stages", "bias_stages"), [(64, 2, 1), (96, 2, 1), (128, 1, 1), (256, 1, 0)])
def test_tma_brings_a_bias_where_a_block_of_it_fits(d, q_stages, bias_stages):
    problem = replace(problem_of(d), **BUSY, **bias_of(0, 2**24, 2**12, 1, shape=(8, 16, 4096, 4096)))
    config = forward_heuristic(problem)
    assert (config.q_stages, config.bias_stages(problem)) == (q_stages, bias_stages)
    assert config.shared_bytes(problem) <= DEVICE.shared_memory
    assert HopperForwardConfig(64, 3).bias_stages(problem) == 0
    wide = replace(problem, d=192, dv=128)
    assert forward_heuristic(wide).block_n == 128  # as without a bias: blocks of 64 keys were slower there
    assert forward_heuristic(wide).bias_stages(wide) == 0


@pytest.mark.parametrize("fields", [
    bias_of(2**20, 2**18, 512, 1, dtype=torch.float32), bias_of(2**20, 2**18, 516, 1), bias_of(2**20, 2**18, 1, 512),
    bias_of(0, 0, 0, 1), bias_of(0, 512, 0, 1, shape=(1, 2, 1, 512)),
    bias_of(2**20 + 4, 2**18, 512, 1, shape=(2, 2, 512, 512)),
    bias_of(2**20, 2**18, 512, 1) | {"sequences": Sequences(seqlens_k=OperandSpec((1,), (1,), torch.int32))}],
    ids=["float32", "rows", "transposed", "shared", "of_keys", "batches", "lengths"])
def test_threads_load_a_bias_that_tma_cannot_move(fields):
    problem = replace(problem_of(64, s=512), **fields)
    assert forward_heuristic(problem).bias_stages(problem) == 0


@pytest.mark.parametrize("d", [40, 64, 72, 128])
def test_plain_calls_have_augmented_k_and_deterministic_ones_of_narrow_heads_too(d):
    problem = problem_of(d, kernel="hopper_backward")
    dynamic = (HopperD64Config(variant=D64Variant.DYNAMIC_TILES) if d <= 64 else
               HopperD128AugmentedKConfig(variant=D128AugmentedKVariant.DYNAMIC_TILES))
    assert backward_heuristic(problem, 60) == dynamic
    assert backward_heuristic(replace(problem, deterministic=True), 60) == (
        HopperD64Config(variant=D64Variant.DETERMINISTIC) if d <= 64 else
        HopperD128Config(variant=D128Variant.DETERMINISTIC))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "sk", "number"), [(33, 512, 132), (33, 513, 132), (33, 513, 165), (1, 64, 132)])
def test_ctas_of_narrow_heads_are_persistent_where_none_has_a_second_tile_too(heads, sk, number, deterministic):
    problem = replace(problem_of(64, kernel="hopper_backward"), b=1, hq=heads, hk=heads, sk=sk,
                      mask=causal("bottom_right"), deterministic=deterministic)
    config = backward_heuristic(problem, number)
    assert config.variant == ("deterministic" if deterministic else "dynamic_tiles")


FEW, MANY = ({"b": b, "hq": 33, "hk": 33, "sq": 1000, "sk": 1000} for b in (1, 8))


@pytest.mark.parametrize(("fields", "ctas_per_head"), [
    ({"b": 32, "hq": 32, "hk": 32, "sq": 512, "sk": 512}, 2),
    ({"b": 16, "hq": 32, "hk": 32, "sq": 1024, "sk": 1024}, 4),
    ({"b": 8, "hq": 32, "hk": 32, "sq": 2048, "sk": 2048}, 4),
    ({"b": 4, "hq": 32, "hk": 32, "sq": 4096, "sk": 4096}, 0),  # L2
    ({"b": 32, "hq": 32, "hk": 32, "sq": 512, "sk": 512, "mask": causal()}, 1),
    ({"b": 16, "hq": 32, "hk": 32, "sq": 1024, "sk": 1024, "mask": causal()}, 2),  # L2, one a head
    ({"b": 4, "hq": 48, "hk": 48, "sq": 1024, "sk": 1024, "mask": causal()}, 2),  # a round of 132 and one of 60
    ({"b": 8, "hq": 32, "hk": 32, "sq": 2048, "sk": 2048, "mask": causal()}, 0),
    ({"b": 4, "hq": 66, "hk": 66, "sq": 500, "sk": 530}, 1),  # as test_determinism.py's, and one entry of it
    ({"b": 1, "hq": 66, "hk": 66, "sq": 500, "sk": 530}, 0),
    (MANY, 2), (MANY | {"mask": causal()}, 2), (FEW, 0), (FEW | {"mask": causal()}, 0),
    ({"b": 32, "hq": 32, "hk": 32, "sq": 512, "sk": 512, "deterministic": True}, 2),
    ({"b": 32, "hq": 32, "hk": 8, "sq": 512, "sk": 512}, 0),  # L2, four query heads a program
    ({"b": 16, "hq": 32, "hk": 32, "sq": 1024, "sk": 1100}, 0),  # nine tiles
    ({"b": 16, "hq": 32, "hk": 32, "sq": 64, "sk": 1024}, 1),  # a step a tile: each would wait for the one before
    ({"b": 16, "hq": 32, "hk": 32, "sq": 1024, "sk": 8192, "mask": causal("bottom_right")}, 0),
    ({"b": 16, "hq": 32, "hk": 32, "sq": 1024, "sk": 1024, "mask": window(None, 1023)}, 0),  # hides nothing
    ({"b": 4, "hq": 33, "hk": 33, "sq": 512, "sk": 512, "mask": window(99, 0)}, 1),
    ({"b": 32, "hq": 32, "hk": 32, "sq": 640, "sk": 640, "mask": window(99, 0)}, 1),
    ({"b": 32, "hq": 32, "hk": 32, "sq": 1152, "sk": 1152, "mask": window(99, 0)}, 0),  # nine tiles
    ({"b": 32, "hq": 16, "hk": 16, "sq": 448, "sk": 448, "d": 128, "dv": 128, "mask": window(99, 0)}, 1),
    ({"b": 8, "hq": 32, "hk": 32, "sq": 2048, "sk": 2048, "mask": window(127, 0)}, 2),
    ({"b": 8, "hq": 32, "hk": 32, "sq": 2048, "sk": 2048, "mask": window(99, 156, alignment="top_left")}, 2),
    ({"b": 8, "hq": 32, "hk": 32, "sq": 2048, "sk": 2048, "mask": window(99, 157, alignment="top_left")}, 0),
    ({"b": 8, "hq": 32, "hk": 32, "sq": 2048, "sk": 2048, "mask": window(99, None)}, 0),  # no window's end
    ({"b": 1, "hq": 32, "hk": 32, "sq": 16384, "sk": 16384, "mask": window(255, 0)}, 4),
    ({"b": 16, "hq": 64, "hk": 8, "sq": 4096, "sk": 4096, "mask": window(127, 0)}, 0),  # L2, heads of 8
    ({"b": 8, "hq": 32, "hk": 32, "sq": 2048, "sk": 2048, "d": 96, "dv": 96, "mask": window(127, 0)}, 0),
    ({"b": 1, "hq": 140, "hk": 140, "sq": 512, "sk": 512}, 0),  # a second round of 8
    ({"b": 32, "hq": 16, "hk": 16, "sq": 512, "d": 128, "dv": 128}, 0),
    ({"b": 32, "hq": 16, "hk": 16, "sq": 512, "sk": 512, "d": 128, "dv": 128, "mask": causal()}, 1),
    ({"b": 64, "hq": 16, "hk": 16, "sq": 256, "d": 72, "dv": 96}, 1),
    ({"b": 51, "hq": 16, "hk": 16, "sq": 320, "sk": 320, "d": 128, "dv": 128}, 1),
    ({"b": 42, "hq": 16, "hk": 16, "sq": 384, "sk": 384, "d": 128, "dv": 128}, 0),  # L2
    ({"b": 16, "hq": 16, "hk": 16, "sq": 1024, "sk": 1024, "d": 128, "dv": 128, "mask": causal()}, 0),  # L2
    ({"b": 20, "hq": 16, "hk": 16, "sq": 256, "d": 128, "dv": 128}, 1),  # 2.4 rounds of 3
    ({"b": 19, "hq": 16, "hk": 16, "sq": 256, "d": 128, "dv": 128}, 0),
    ({"b": 64, "hq": 16, "hk": 16, "sq": 256, "d": 128, "dv": 128, "deterministic": True}, 0),
    ({"b": 32, "hq": 32, "hk": 32, "sq": 512, "scores": ScoreOptions(softcap=3.0)}, 0)], ids=str)
def test_ctas_are_head_persistent_where_that_keeps_all_busy_and_l2_holds_it(fields, ctas_per_head):
    problem = replace(problem_of(64, kernel="hopper_backward"), **fields)
    config = backward_heuristic(problem)
    assert (config.head_persistent, config.ctas_per_head) == (ctas_per_head > 0, max(1, ctas_per_head))
    assert config.shared_bytes(problem) <= DEVICE.shared_memory


def facts(*shape, dtype=torch.int32):
    return OperandSpec(shape, (1,) * len(shape), dtype)


DOCUMENTS = {"documents_q": facts(1, 4, 4096), "documents_k": facts(1, 4, 4096)}
BOOLEAN = {"mask": facts(1, 1, 4096, 4096, dtype=torch.bool)}
FUNCTION = FunctionSpec(FunctionCode("sees", None, None, None, 0, reads_batch=False, reads_head=False), ())
TILED = BOOLEAN | {"tiles_q": facts(9), "tiles_k": facts(9)}
PLANS = {"documents": {"scores": ScoreOptions(**DOCUMENTS)}, "boolean": {"scores": ScoreOptions(**BOOLEAN)},
         "function": {"scores": ScoreOptions(mask_function=FUNCTION)},
         "function_of_tensors": {"scores": ScoreOptions(mask_function=FUNCTION._replace(
             code=replace(FUNCTION.code, tensors=1), dtypes=(torch.int32,)))},
         "tiled": {"scores": ScoreOptions(**TILED)}, "prefix": {"mask": prefix(100)},
         "causal_documents": {"mask": causal(), "scores": ScoreOptions(**DOCUMENTS)},
         "boolean_of_documents": {"scores": ScoreOptions(**DOCUMENTS, **BOOLEAN)},
         "chunk": {"mask": causal() & chunk(64)}, "sink_tokens": {"mask": window(99, 0) & sink_tokens(4)}}


@pytest.mark.parametrize("case", PLANS)
@pytest.mark.parametrize(("d", "s"), [(64, 512), (128, 256)])
def test_no_cta_owns_a_head_with_a_mask_plan(case, d, s):
    problem = replace(problem_of(d, s=s, kernel="hopper_backward"), b=32, hq=32, hk=32)
    for mask in (Mask(), causal()):
        assert choose_ctas_per_head(replace(problem, mask=mask), 132) > 0
        assert backward_heuristic(replace(problem, mask=mask)).head_persistent
    planned = replace(problem, **PLANS[case])
    assert choose_ctas_per_head(planned, 132) == 0
    assert backward_heuristic(planned) == (
        HopperD64Config(variant=D64Variant.DYNAMIC_TILES) if d == 64 else
        HopperD128AugmentedKConfig(variant=D128AugmentedKVariant.DYNAMIC_TILES))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", PLANS)
def test_a_mask_plan_is_worth_its_launches_from_some_work_on(case, direction):
    """With a caller's boolean tensor, or a function's tensors, a plan is built in every call; all others are kept."""
    is_of_each_call = case in ("boolean", "boolean_of_documents", "function_of_tensors")
    least, entries = ((heuristics_hopper.LEAST_WORK_FOR_A_PLAN_A_CALL, 10) if is_of_each_call else
                      (heuristics_hopper.LEAST_WORK_FOR_A_PLAN, 4))
    assert entries * 6250**2 * 64 == least, "of one head, and of one product"
    problem = replace(problem_of(64, s=6250), b=entries, hq=1, hk=1, direction=direction)
    for s, is_worth_it in ((6250, True), (6249, False)):
        assert prefers_gluon(replace(problem, sq=s, sk=s, **PLANS[case])) == is_worth_it
        assert prefers_gluon(replace(problem, sq=s, sk=s)), "two bounds take no plan"
    wide = replace(problem_of(256, s=100), direction=direction)
    assert prefers_gluon(wide)
    assert prefers_gluon(replace(wide, scores=ScoreOptions(softcap=30.0)))
    assert not prefers_gluon(replace(wide, **PLANS[case])), "however fast the kernels of wide heads are"


BIASED = {dtype: ScoreOptions(bias=OperandSpec((1, 1, 512, 512), (2**18, 2**18, 512, 1), dtype))
          for dtype in (torch.bfloat16, torch.float32)}


@pytest.mark.parametrize(("d", "mask", "dtype", "config"), [
    (64, Mask(), None, HopperD64Config(variant=D64Variant.HEAD_PERSISTENT, ctas_per_head=2)),
    (64, Mask(), torch.bfloat16, HopperD64Config()),
    (64, causal(), torch.bfloat16, HopperD64Config(variant=D64Variant.HEAD_PERSISTENT)),
    (64, causal(), torch.float32, HopperD64Config()),
    (128, causal(), torch.bfloat16, HopperD128AugmentedKConfig(variant=D128AugmentedKVariant.HEAD_PERSISTENT)),
    (128, causal(), torch.float32, HopperD128Config())], ids=str)
def test_beside_a_bias_the_variant_is_one_that_fits(d, mask, dtype, config):
    scores = ScoreOptions() if dtype is None else BIASED[dtype]
    problem = problem_of(d, s=512, kernel="hopper_backward", b=8, hq=16, hk=16, mask=mask, scores=scores)
    assert backward_heuristic(problem) == config
    assert config.fits(problem)


def test_a_row_that_was_measured_without_a_bias_serves_no_call_with_one_beside_which_it_does_not_fit(monkeypatch):
    """It has four tiles of q, and a bias leaves room for two."""
    wide = HopperD128Config(q_stages=4, dout_stages=2)
    monkeypatch.setattr(table, "load_rows", lambda *of: (row_of(wide, 128, kernel="hopper_backward", mask=causal()),))
    plain = problem_of(128, kernel="hopper_backward", mask=causal(), **BUSY)
    shape, strides = (1, 1, 4096, 4096), (2**24, 2**24, 4096, 1)
    small, large = (replace(plain, scores=ScoreOptions(bias=OperandSpec(shape, strides, dtype)))
                    for dtype in (torch.bfloat16, torch.float32))
    assert hopper_backward_config(plain, DEVICE) == wide
    assert not wide.fits(small)
    assert hopper_backward_config(small, DEVICE) == backward_heuristic(small)
    assert hopper_backward_config(large, DEVICE) == HopperD128Config()


def test_how_many_ctas_share_a_head_goes_by_the_device_s_multiprocessors():
    problem = replace(problem_of(64, kernel="hopper_backward"), b=1, hq=114, hk=114, sq=512, sk=512)
    configs = [hopper_backward_config(problem, DEVICE, number) for number in (132, 114, 78, 57, 1)]
    assert [config.head_persistent * config.ctas_per_head for config in configs] == [0, 2, 2, 1, 1]


@pytest.mark.parametrize("fields", [{"d": 64}, {"d": 40}, {"d": 128}, {"d": 104}, {"d": 256}, {"mask": causal()},
                                    {"s": 3000}, {"deterministic": True}], ids=str)
def test_a_row_of_the_table_serves_plain_calls_of_its_width(rows, fields):
    assert hopper_forward_config(problem_of(**BUSY, **fields), DEVICE) == FORWARD


@pytest.mark.parametrize("fields", [
    {"d": 96}, {"d": 192}, {"d": 64, "dv": 128}, {"d": 40, "dv": 64}, {"scores": ScoreOptions(softcap=3.0)},
    {"scores": ScoreOptions(dropout_p=0.1)}, {"sequences": Sequences(seqlens_k=facts(1))},
    {"sequences": Sequences(2, None, None, facts(3), facts(3))}, {"mask": window(128, 0)}, {"s": 2000}, {"s": 8200},
    {"scores": ScoreOptions(sinks=OperandSpec((16,), (1,), torch.float32))}, *PLANS.values()], ids=str)
@pytest.mark.parametrize("kernel", HEURISTICS)
def test_what_no_table_has_measured_gets_the_heuristics_tile(rows, kernel, fields):
    problem = problem_of(kernel=kernel, **BUSY, **fields)
    chosen = hopper_forward_config if kernel == "hopper_forward" else hopper_backward_config
    assert chosen(problem, DEVICE) == HEURISTICS[kernel](problem)


def test_dq_in_a_fixed_order_and_widths_without_a_row_get_the_heuristics_steps(rows):
    assert hopper_backward_config(problem_of(kernel="hopper_backward", **BUSY), DEVICE) == BACKWARD
    for fields in ({"deterministic": True}, {"d": 256}):
        problem = problem_of(kernel="hopper_backward", **BUSY, **fields)
        assert hopper_backward_config(problem, DEVICE) == backward_heuristic(problem)
    problem = problem_of(**BUSY)
    assert hopper_forward_config(problem, DeviceSpec.of_arch("sm_90", "another")) == forward_heuristic(problem)


@pytest.mark.parametrize("kernel", HEURISTICS)
def test_more_keys_than_queries_get_the_heuristics_tile(rows, kernel):
    problem = replace(problem_of(kernel=kernel, **BUSY), sk=5000)
    chosen = hopper_forward_config if kernel == "hopper_forward" else hopper_backward_config
    assert chosen(problem, DEVICE) == HEURISTICS[kernel](problem)


def test_the_row_nearest_in_length_is_taken(rows):
    rows["hopper_forward"] += (row_of(replace(FORWARD, kv_stages=2), s=512),)
    problems = [problem_of(s=s, **BUSY) for s in (512, 2100, 8000)]
    assert len({forward_heuristic(problem) for problem in problems}) == 1
    assert [hopper_forward_config(problem, DEVICE).kv_stages for problem in problems] == [2, 4, 4]


@pytest.mark.parametrize(("kernel", "d", "fields"), [
    ("hopper_forward", 128, {"b": 1, "hq": 2, "sq": 1024, "sk": 1024}),
    ("hopper_forward", 64, {"sq": 1024, "sk": 1024}),
    ("hopper_backward", 64, {"hq": 32, "sq": 2048, "sk": 2048, "mask": Mask()}),
    ("hopper_backward", 128, {"sq": 256})], ids=str)
def test_a_row_serves_those_alone_whom_the_heuristic_would_have_given_the_same(rows, kernel, d, fields):
    chosen = hopper_forward_config if kernel == "hopper_forward" else hopper_backward_config
    measured = problem_of(d, kernel=kernel, **BUSY, mask=causal())
    assert chosen(measured, DEVICE) != HEURISTICS[kernel](measured)
    other = replace(measured, **fields, hk=fields.get("hq", measured.hk))
    assert chosen(other, DEVICE) == HEURISTICS[kernel](other) != HEURISTICS[kernel](measured)


def test_tables_are_written_and_read_and_a_broken_row_is_named(tmp_path):
    path = tmp_path / "hopper_backward.16bit.json"
    own = HopperD64Config(variant=D64Variant.HEAD_PERSISTENT, ctas_per_head=2)
    row = make_row(Bucket(128, 2, True, 2048), BACKWARD, own, ms=0.5)
    assert row == {
        "width": 128, "itemsize": 2, "masked": True, "length": 2048, "kernel": "d128", "q_stages": 4, "dout_stages": 1,
        "s_ahead": False, "variant": "dq_from_registers", "ms": 0.5, "heuristic": {
            "kernel": "d64", "q_stages": 4, "dout_stages": 4, "variant": "head_persistent", "ctas_per_head": 2}}
    write_table(path, {"device": "a GPU"}, [row])
    assert read_table(path, "hopper_backward") == (row,)
    assert repr(table.backward_config_of(read_table(path, "hopper_backward")[0])) == repr(BACKWARD)
    for change, words in (({"q_stages": 3}, "q_stages=3; allowed are 2, 4"),
                          ({"s_ahead": 1}, "s_ahead is 1; allowed is bool"),
                          ({"kernel": None}, "kernel is None; allowed are d64, d128_augmented_k, d128, d192, d256"),
                          ({"kernel": "d64"}, "variant is 'dq_from_registers'; allowed are dynamic_tiles, det"),
                          ({"kernel": "d64", "variant": "dynamic_tiles"}, "ctas_per_head is None; allowed is int"),
                          ({"variant": "ordered"}, "variant is 'ordered'; allowed are dq_from_registers, dq_"),
                          ({"heuristic": None}, "heuristic is None; allowed is an object with kernel"),
                          ({"heuristic": {"kernel": "d192", "q_stages": "2"}}, "q_stages is '2'; allowed is int"),
                          ({"heuristic": {"stages": 2, "out_stages": 2}}, "kernel is None; allowed are d64, ")):
        path.write_text(json.dumps({"provenance": {}, "rows": [row | change]}), encoding="utf-8")
        with pytest.raises(InvalidInput, match=f"row 0: {words}"):
            read_table(path, "hopper_backward")


def test_the_backend_asks_the_table(rows, monkeypatch):
    from tilewise.backends import gluon

    asked = []
    monkeypatch.setattr(gluon, "device_spec", lambda device: DEVICE)
    monkeypatch.setattr(gluon, "HopperForward", lambda problem, config, *others: asked.append(config))
    monkeypatch.setattr(gluon, "backward_launch", lambda problem, config, *others: asked.append(config))
    monkeypatch.setattr("tilewise.kernels.triton.backward.delta_launch", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("GPU", (), {
        "multi_processor_count": 132}))
    strides = BUSY | dict.fromkeys(("q_strides", "k_strides", "v_strides"), (1, 1, 1, 1))
    gluon._plan.__wrapped__(problem_of(**strides))
    gluon._backward_plan.__wrapped__(problem_of(kernel="hopper_backward", **strides), ((1,), (1,), None), True)
    assert asked == [FORWARD, BACKWARD]


def test_the_names_of_the_kernels_are_tables_of_their_own():
    assert not set(kinds.HOPPER_KINDS) & set(kinds.KINDS)


@pytest.mark.parametrize("kernel", HEURISTICS)
def test_the_rows_in_the_package_are_of_the_heuristic_of_today_and_serve_the_problems_that_were_measured(kernel):
    """16384 tokens of 2048 elements. A heuristic that changes leaves rows behind that serve nobody: measure anew."""
    device = DeviceSpec.of_arch("sm_90", "nvidia-h200")
    rows = table.load_rows(device.name, f"{kernel}.16bit.json", kernel)
    assert {(row["width"], row["masked"]) for row in rows} == set(product((64, 128, 256), (False, True)))
    chosen = hopper_forward_config if kernel == "hopper_forward" else hopper_backward_config
    for row in rows:
        heads, d = 2048 // row["width"], row["width"]
        problem = problem_of(d, s=row["length"], kernel=kernel, b=16384 // row["length"], hq=heads, hk=heads,
                             mask=causal() if row["masked"] else Mask())
        own = HEURISTICS[kernel](problem)
        assert row["heuristic"] == table.fields_of(own), row
        measured = (table.forward_config_of if kernel == "hopper_forward" else table.backward_config_of)(row)
        assert chosen(problem, device) == measured, row
        assert measured in propose_hopper(kernel, problem, device).tiles, row
        assert (row["ms"] < 0.98 * row["heuristic_ms"]) == (measured != own), row

