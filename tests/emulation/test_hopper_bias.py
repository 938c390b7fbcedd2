"""A bias in the Hopper backward kernels of heads up to 128: their source on the CPU, beside float64."""

import random
from dataclasses import replace

import pytest
import torch

from emulation.backward_calls import (
    MASKS,
    NONE_AHEAD,
    SCALE,
    SLOPES,
    alibi_of,
    bias_of,
    call_of,
    compare,
    expected,
    extra_columns_of,
    taken_off_by,
    with_bias,
    with_slopes,
    with_true_lse,
)
from emulation.hopper_calls import bound_backward
from tilewise.kernels.enqueue import addresses_in
from tilewise.kernels.hopper.arguments import BackwardOperands, BackwardPointers
from tilewise.kernels.hopper.backward.config import (
    D64Variant,
    D128AugmentedKVariant,
    D128Variant,
    HopperD64Config,
    HopperD128AugmentedKConfig,
    HopperD128Config,
)
from tilewise.masks import Mask, causal
from tilewise.problem.options import OperandSpec

backward_on_cpu, plan_on_cpu = (pytest.importorskip(f"emulation.{name}", reason="Triton is not installed") for name in (
    "backward_on_cpu", "plan_on_cpu"))
DYNAMIC, DETERMINISTIC, HEAD_PERSISTENT = (HopperD64Config(variant=variant) for variant in D64Variant)
WIDE_DYNAMIC, WIDE_HEAD_PERSISTENT = (HopperD128AugmentedKConfig(variant=variant) for variant in D128AugmentedKVariant)
S_AHEAD = HopperD128Config(s_ahead=True, variant=D128Variant.DQ_FROM_REGISTERS)
IN_ORDER = HopperD128Config(s_ahead=True, variant=D128Variant.DETERMINISTIC)
CONFIGS = {
    "d64_dynamic": (DYNAMIC, 64), "d64_deterministic": (DETERMINISTIC, 64),
    "d64_head_persistent": (HEAD_PERSISTENT, 40), "d128_dynamic": (WIDE_DYNAMIC, 128),
    "d128_head_persistent": (WIDE_HEAD_PERSISTENT, 80), "s_ahead": (S_AHEAD, 64),
    "s_ahead_in_order": (IN_ORDER, 40), "staged": (HopperD128Config(), 128)}


def hold(mask, config, d, entries=2, own_heads=True, dtype=torch.float16):
    random.seed(0)
    problem, tensors = call_of(*mask, (d, d))
    bias = bias_of(problem, entries, problem.hq if own_heads else 1, dtype)
    problem = with_bias(problem, bias)
    assert config.fits(problem)
    tensors = with_true_lse(problem, tensors, taken_off_by(problem, bias))
    got = backward_on_cpu.differentiate(problem, tensors, config, 3, 3, added=bias)
    compare(got, expected(problem, tensors, taken_off=taken_off_by(problem, bias)))


@pytest.mark.parametrize(("config", "d"), CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_bias_of_each_head_is_added_to_the_scores(mask, config, d):
    """NaN stands where no pair is, and the first keys and queries that are read are not always the first ones."""
    hold(mask, config, d)


@pytest.mark.parametrize(("entries", "own_heads"), [(1, True), (2, False), (1, False)], ids=["batch", "heads", "both"])
@pytest.mark.parametrize(("config", "d"), [(DYNAMIC, 64), (WIDE_DYNAMIC, 128), (S_AHEAD, 64)], ids=str)
def test_batch_entries_and_heads_may_share_a_bias(config, d, entries, own_heads):
    hold(MASKS["causal"], config, d, entries, own_heads)


@pytest.mark.parametrize(("config", "d"), [(DYNAMIC, 64), (DETERMINISTIC, 64), (S_AHEAD, 64), (
    HopperD128Config(), 128)], ids=str)
def test_a_bias_may_be_float32(config, d):
    """Its tiles are twice as large: of some kernels one is in flight, which is filled anew while it is used no more."""
    hold(MASKS["window"], config, d, dtype=torch.float32)


@pytest.mark.parametrize("together", [2, 4])
def test_ctas_of_the_dynamic_scheduler_may_run_at_once(together):
    random.seed(1)
    problem, tensors = call_of(*MASKS["full"], (64, 64))
    bias = bias_of(problem, 2, problem.hq)
    problem = with_bias(problem, bias)
    tensors = with_true_lse(problem, tensors, taken_off_by(problem, bias))
    got = backward_on_cpu.differentiate(problem, tensors, DYNAMIC, 4, together, added=bias)
    compare(got, expected(problem, tensors, taken_off=taken_off_by(problem, bias)))


@pytest.mark.parametrize(("config", "d"), [(DYNAMIC, 64), (WIDE_DYNAMIC, 128), (S_AHEAD, 64)], ids=str)
def test_a_bias_may_hide_keys_and_rows(config, d):
    """-inf hides a key, or all keys of a query, whose lse is -inf."""
    random.seed(0)
    problem, tensors = call_of(*MASKS["full"], (d, d))
    bias = bias_of(problem, 2, problem.hq)
    bias[..., 100:170] = -torch.inf
    bias[:, :, 7] = -torch.inf
    problem = with_bias(problem, bias)
    tensors = with_true_lse(problem, tensors, taken_off_by(problem, bias))
    got = backward_on_cpu.differentiate(problem, tensors, config, 3, 3, added=bias)
    q, k, v, dout, lse, delta = tensors
    hidden = lse == -torch.inf
    assert hidden[:, :, 7].all()
    shown = (q, k, v, dout, lse.masked_fill(hidden, torch.inf), delta)
    compare(got, expected(problem, shown, taken_off=taken_off_by(problem, bias)))


@pytest.mark.parametrize(("config", "d"), [*CONFIGS.values()], ids=CONFIGS)
def test_a_bias_may_hide_rows_beside_slopes(config, d):
    """Rows that alone are hidden, whole blocks, and the last block, behind which columns have no query."""
    random.seed(0)
    problem, tensors = call_of(*NONE_AHEAD["causal"], (d, d))
    bias, slopes = bias_of(problem, 2, problem.hq), SLOPES["entries"]
    for rows in (slice(7, 8), slice(60, 130), slice(-20, None)):
        bias[:, :, rows] = -torch.inf
    taken_off = alibi_of(problem, slopes) + taken_off_by(problem, bias)
    problem = with_bias(with_slopes(problem, slopes), bias)
    tensors = with_true_lse(problem, tensors, taken_off)
    got = backward_on_cpu.differentiate(problem, tensors, config, 3, 3, slopes=slopes, added=bias)
    compare(got, expected(problem, shown(tensors), taken_off=taken_off))


@pytest.mark.parametrize(("config", "d"), [(DYNAMIC, 64), (WIDE_DYNAMIC, 128), (HopperD128Config(), 128), (
    S_AHEAD, 64)], ids=str)
def test_a_bias_is_added_in_lists_of_blocks(config, d):
    """Of documents under a causal mask: NaN stands where a pair is hidden, and rows may be by the bias alone."""
    random.seed(0)
    torch.manual_seed(0)
    starts = torch.tensor([0] * 90 + [1] * 130 + [2] * 80)
    visible = causal().visible(300, 300)[None, None] & (starts[:, None] == starts)
    spec = OperandSpec((1, 1, 300, 300), (90000, 90000, 300, 1), torch.bool)
    problem, tensors = call_of(Mask(), (300, 300), (2, 1), (d, d), b=1)
    bias = bias_of(problem, 1, 2).masked_fill(~visible, torch.nan)
    bias = torch.nn.functional.pad(bias, (0, 4))[..., :300]
    bias[:, :, 70:130] = -torch.inf
    problem = with_bias(replace(problem, scores=problem.scores._replace(mask=spec)), bias)
    q, k, v, dout, _, delta = tensors
    scores = (SCALE * q.double() @ k.double().mT + bias.double()).masked_fill(~visible, -torch.inf)
    tensors = q, k, v, dout, scores.logsumexp(-1).float(), delta
    plan = plan_on_cpu.plan_of(visible, config.block_n // 64, 1, keys_first=True)
    got = backward_on_cpu.differentiate(problem, tensors, config, 3, 3, plan, added=bias)
    compare(got, expected(problem, shown(tensors), visible, -bias.double()))


def shown(tensors):
    """The tensors with an lse by which float64 has no probabilities where the bias hides a whole row."""
    q, k, v, dout, lse, delta = tensors
    assert (lse == -torch.inf).any()
    return q, k, v, dout, lse.masked_fill(lse == -torch.inf, torch.inf), delta


@pytest.mark.parametrize(("config", "d"), [(DYNAMIC, 64), (WIDE_DYNAMIC, 128), (HopperD128Config(), 128)], ids=str)
@pytest.mark.parametrize("mask", [NONE_AHEAD["causal"], NONE_AHEAD["window"]], ids=["causal", "window"])
def test_a_bias_and_slopes_may_come_together(mask, config, d):
    random.seed(0)
    problem, tensors = call_of(*mask, (d, d))
    bias = bias_of(problem, 2, problem.hq)
    slopes = SLOPES["entries"]
    taken_off = alibi_of(problem, slopes) + taken_off_by(problem, bias)
    problem = with_bias(with_slopes(problem, slopes), bias)
    tensors = with_true_lse(problem, tensors, taken_off)
    got = backward_on_cpu.differentiate(problem, tensors, config, 3, 3, slopes=slopes, added=bias)
    compare(got, expected(problem, tensors, taken_off=taken_off))


@pytest.mark.parametrize(("config", "d"), [(DYNAMIC, 64), (WIDE_DYNAMIC, 128), (HopperD128Config(), 128)], ids=str)
def test_the_copy_engine_gets_a_shared_bias_once_and_the_rows_of_queries_that_see_a_key_alone(config, d):
    """Behind these rows it fills in zeros. Without augmented K the kernel reads delta too, in whose place a bias is."""
    problem, tensors = call_of(*NONE_AHEAD["fewer_keys"], (d, d))
    bias = bias_of(problem, 1, problem.hq).expand(2, -1, -1, -1)
    problem = with_bias(problem, bias)
    launch = bound_backward(problem, config)
    place = launch.scalars[0].bias
    assert (place.own_batch, place.own_head, place.first_key) == (0, 1, problem.seen_keys.start)
    q, k, v, dout, lse, delta = tensors
    read = extra_columns_of(lse, delta) if config.augmented_k else lse
    taken = launch.taken((q, k, v, dout, lse, delta, q, k, v), read, launch._bias_read(bias))
    own_delta = None if config.augmented_k else delta
    made = launch.arguments(taken, torch.zeros(launch.accum_shape), counter=torch.zeros(1, dtype=torch.int32),
                            delta=own_delta)
    queries, sk = problem.seeing_queries, problem.sk
    assert queries.start > 0
    assert tuple(made[5].shape) == (1, problem.hq, len(queries), sk)
    assert made[5].base.data_ptr() == bias[:, :, queries.start:].data_ptr()
    assert list(made[5].strides) == [16, *bias.stride()[1:]]
    assert made[5].block_shape == [1, 1, 64, 64]
    (pointers,) = (argument for argument in made if isinstance(argument, BackwardPointers))
    assert pointers.delta is own_delta


@pytest.mark.parametrize(("config", "d"), [(DYNAMIC, 64), (WIDE_DYNAMIC, 128)], ids=str)
def test_a_bias_that_is_released_before_it_is_fenced_is_found(config, d, monkeypatch):
    """The fence of dS is what orders the reads of a tile before the copy that comes into its place."""
    module = backward_on_cpu.d64 if config is DYNAMIC else backward_on_cpu.d128
    read = module.read_bias.fn

    def read_and_release(pipe, count, wg, constants):
        found = read(pipe, count, wg, constants)
        backward_on_cpu.bias.consumer_release(pipe.empty, count, constants.BIAS_STAGES)
        return found

    monkeypatch.setitem(backward_on_cpu.CONSTANTS, (module, "read_bias"), read_and_release)
    monkeypatch.setitem(backward_on_cpu.CONSTANTS, (module, "release_bias"), lambda *_: None)
    monkeypatch.setattr(backward_on_cpu.gluon_on_cpu, "PATIENCE", 0.5)  # of the partitions that wait for the failed one
    with pytest.raises(AssertionError, match="no fence between threads"):
        hold(MASKS["full"], config, d)


@pytest.mark.parametrize(("config", "d"), [(HEAD_PERSISTENT, 64), (WIDE_HEAD_PERSISTENT, 128), (
    HopperD128Config(), 128)], ids=str)
def test_a_call_hands_over_the_addresses_of_its_arguments(config, d):
    problem, tensors = call_of(*NONE_AHEAD["fewer_keys"], (d, d))
    bias, slopes = bias_of(problem, 2, problem.hq), SLOPES["entries"]
    problem = with_bias(with_slopes(problem, slopes), bias)
    queries, keys = problem.seeing_queries, problem.seen_keys

    def whole(rows, length, seen):
        return torch.nn.functional.pad(rows, (0, 0, seen.start, length - seen.stop)) if rows.ndim == 4 else (
            torch.nn.functional.pad(rows, (seen.start, length - seen.stop)))

    q, k, v, dout, lse, delta = (whole(rows, *(
        (problem.sk, keys) if i in (1, 2) else (problem.sq, queries))) for i, rows in enumerate(tensors))
    launch = bound_backward(problem, config, 132, None, lambda sizes, strides, dtype: torch.empty_strided(
        sizes, strides, dtype=dtype))
    asked = []
    launch.enqueue = lambda addresses, arguments, alike: asked.append((addresses, arguments(), alike))
    launch.enqueue_augmented_k = launch.enqueue_dq = lambda *_, **__: None
    launch(q, k, v, dout, lse, delta, q.clone(), k.clone(), v.clone(),
           operands=BackwardOperands(slopes=slopes, bias=bias))
    ((addresses, arguments, alike),) = asked
    assert list(addresses) == addresses_in(arguments)
    assert not alike, "the alignment of operands may change from call to call"
    assert arguments[5].base.data_ptr() == bias[:, :, queries.start:].data_ptr()
    (pointers,) = (argument for argument in arguments if isinstance(argument, BackwardPointers))
    assert pointers.slopes is slopes
    assert (pointers.delta is None) == config.augmented_k
