"""Groups of query heads that are split among tiles: the Hopper backward kernels' source on the CPU, beside float64."""

import random
from dataclasses import replace

import pytest
import torch

from emulation.backward_calls import (
    MASKS,
    SCALE,
    bias_of,
    call_of,
    compare,
    expected,
    taken_off_by,
    with_bias,
    with_true_lse,
)
from emulation.hopper_calls import bound_backward
from tilewise.errors import InvalidInput
from tilewise.kernels.hopper.arguments import BackwardOperands
from tilewise.kernels.hopper.backward.config import (
    D128Variant,
    HopperD64Config,
    HopperD128AugmentedKConfig,
    HopperD128Config,
    HopperD192Config,
    HopperD256Config,
)
from tilewise.kernels.reference.dropout import keep_tile
from tilewise.masks import causal, window
from tilewise.problem.options import ScoreOptions

backward_on_cpu, wide_heads = (pytest.importorskip(f"emulation.{name}", reason="Triton is not installed") for name in (
    "backward_on_cpu", "test_hopper_d256"))
CONFIGS = {
    "d64_dynamic": (HopperD64Config(), 64),
    "d64_narrow": (HopperD64Config(), 40),
    "d128_dynamic": (HopperD128AugmentedKConfig(), 128),
    "staged": (HopperD128Config(), 80),
    "from_registers": (HopperD128Config(s_ahead=True, variant=D128Variant.DQ_FROM_REGISTERS), 64),
}


def split_call(mask, d, group=4, hk=2):
    mask, lengths, _heads = mask
    return call_of(mask, lengths, (group * hk, hk), (d, 128 if d == 160 else d))


def summed(gradient, splits):
    assert gradient.dtype is torch.float32
    return gradient.unflatten(1, (-1, splits)).sum(2)


@pytest.mark.parametrize(("splits", "mask"), [(2, "causal"), (4, "causal"), (2, "window"), (4, "full")])
@pytest.mark.parametrize(("config", "d"), CONFIGS.values(), ids=CONFIGS)
def test_each_split_has_the_gradients_of_its_query_heads(config, d, splits, mask):
    random.seed(0)
    problem, tensors = split_call(MASKS[mask], d)
    keys = slice(problem.seen_keys.start, problem.seen_keys.stop)
    assert len(problem.seen_keys) == problem.sk
    dq, dk, dv = backward_on_cpu.differentiate(problem, tensors, config, 3, 3, group_splits=splits)
    wanted = expected(problem, tensors)
    compare((dq, *(summed(gradient[:, :, keys], splits) for gradient in (dk, dv))), wanted)
    of_splits = replace(problem, hk=problem.hk * splits)
    wide = [tensor.repeat_interleave(splits, 1) for tensor in tensors[1:3]]
    compare((dk, dv), expected(of_splits, (tensors[0], *wide, *tensors[3:]))[1:])


def test_each_split_reads_the_bias_of_its_own_heads():
    random.seed(0)
    problem, tensors = split_call(MASKS["causal"], 64)
    bias = bias_of(problem, 2, problem.hq)
    problem = with_bias(problem, bias)
    tensors = with_true_lse(problem, tensors, taken_off_by(problem, bias))
    dq, dk, dv = backward_on_cpu.differentiate(problem, tensors, HopperD64Config(), 3, 3, added=bias, group_splits=2)
    compare((dq, summed(dk, 2), summed(dv, 2)), expected(problem, tensors, taken_off=taken_off_by(problem, bias)))


@pytest.mark.parametrize(("splits", "dropout_p"), [(2, 0.0), (4, 0.0), (2, 0.25)])
def test_splits_of_wide_heads(splits, dropout_p):
    random.seed(0)
    problem, tensors = split_call(MASKS["causal"], 200)
    operands = BackwardOperands(seed=torch.tensor([5]) if dropout_p else None)
    launch = bound_backward(replace(problem, scores=ScoreOptions(dropout_p=dropout_p)), HopperD256Config(),
                            group_splits=splits)
    (dq,) = wide_heads.run_part(launch.launch.dq, tensors, tensors[:1], operands=operands)
    dk, dv = wide_heads.run_part(launch.launch.dkdv, tensors, backward_on_cpu.filled_splits(launch), operands=operands)
    kept = keep_tile(torch.tensor([5]), problem.b * problem.hq, problem.seeing_queries, problem.seen_keys, dropout_p)
    kept = kept.unflatten(0, (problem.b, problem.hq)).double() / (1.0 - dropout_p)
    wanted = expected(problem, tensors, kept=kept)
    compare((dq, summed(dk, splits), summed(dv, splits)), (wanted[0] * SCALE, *wanted[1:]))


@pytest.mark.parametrize(("mask", "lengths", "config", "message"), [
    (causal(), (128, 128), HopperD64Config(),
     "group_splits=4 of 6 query heads that share a head of k; allowed are their divisors."),
    (causal("top_left"), (70, 140), HopperD64Config(),
     "group_splits=2 of a call with queries or keys that are not read; allowed is 1."),
    (window(9, 9, "top_left"), (140, 70), HopperD256Config(),
     "group_splits=2 of a call with queries or keys that are not read; allowed is 1."),
    (causal(), (128, 128), HopperD192Config(),
     "group_splits=2 of the kernel of head dims 129 to 192; allowed is 1.")])
def test_what_is_not_split_is_refused(mask, lengths, config, message):
    problem, _tensors = split_call((mask, lengths, None), 160 if isinstance(config, HopperD192Config) else 64, group=6)
    with pytest.raises(InvalidInput) as caught:
        bound_backward(problem, config, group_splits=int(message[13]))
    assert str(caught.value) == message
