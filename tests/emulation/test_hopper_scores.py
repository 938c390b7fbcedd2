"""The Hopper forward kernel on sharp rows and on huge scores: its source on the CPU, beside float64."""

import math
import random
from dataclasses import replace

import pytest
import torch

from emulation.hopper_calls import scalars_of
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal
from tilewise.testing import oracle
from tilewise.tuning import schedules_hopper

forward_on_cpu = pytest.importorskip("emulation.forward_on_cpu", reason="Triton is not installed")
launch = pytest.importorskip("tilewise.kernels.hopper.forward.launch", reason="Triton is not installed")
attend, call_of, check, combined = (
    getattr(forward_on_cpu, name) for name in ("attend", "call_of", "check", "combined"))
TWO, THREE = HopperForwardConfig(128, 2), HopperForwardConfig(128, 3, ping_pong=True)
WIDE = HopperForwardConfig(64, 2, q_stages=1, epilogue_passes=2)
HUGE = {"133120": 133120.0, "1e6": 999424.0}  # which bfloat16 has
SMALL = 2.0**-6


@pytest.fixture(autouse=True)
def short_calls_too(monkeypatch):
    monkeypatch.setattr(schedules_hopper, "LEAST_FROZEN", 1)


@pytest.fixture
def again(monkeypatch):
    """The tiles that are recomputed."""
    return forward_on_cpu.published_tiles(monkeypatch, recomputed_only=True)


def rounded_below_the_maximum(problem, tensors):
    """Out as FlashAttention makes it: each P rounded relative to its row's true maximum, their sum before that."""
    q, k, v = (tensor.float() for tensor in tensors)
    scores = (problem.scale * q @ k.mT).masked_fill(~problem.mask.visible(problem.sq, problem.sk), float("-inf"))
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    return (probs.to(problem.dtype).float() @ v / probs.sum(-1, keepdim=True)).to(problem.dtype)


def errors(problem, tensors, out):
    error = (out.double() - oracle.attend(*tensors, problem.mask, problem.scale)[0]).abs()
    return torch.stack([error.max(), error.mean()])


@pytest.mark.parametrize("kind", ["sharp", "offset", "climbing"])
@pytest.mark.parametrize(("d", "config", "mask"), [
    (64, TWO, Mask()), (64, TWO, causal("bottom_right")), (64, THREE, Mask()), (128, TWO, Mask()), (200, WIDE, Mask())],
    ids=["64", "64_causal", "three", "128", "one_part"])
def test_sharp_rows_in_bfloat16_err_as_with_weights_rounded_below_the_true_maximum(d, config, mask, kind, again):
    """Below the maximum of a row's first steps the leading weight is not 1, and out took all of its rounding.

    That was 1.3 to 1.8 times the greatest error, and up to 1.2 times the mean one.
    """
    random.seed(0)
    problem, (q, k, v) = call_of(mask, (128, 1100), (1, 1), (d, d), dtype=torch.bfloat16)
    problem = replace(problem, scale=d**-0.5)
    assert scalars_of(problem, config)[2].FROZEN_MAX
    q, k, v = q * 8, k, v + 3
    if kind == "offset":
        k = k + 3
    if kind == "climbing":  # by up to 20, in scores of base e, as steps go down to the first keys: no tile comes again
        q, k = q * 0.25, k.clone()
        q[..., 0], k[..., 0] = d**0.5, torch.linspace(20, 0, 1100)
    tensors = q, k, v
    got = errors(problem, tensors, attend(problem, config, tensors)[0])
    yardstick = errors(problem, tensors, rounded_below_the_maximum(problem, tensors))
    assert not again
    assert (got <= torch.tensor((1.25, 1.05)) * yardstick).all(), f"max and mean: {got}, of the yardstick {yardstick}"


def huge(kind, number, shape):
    """Queries or keys: each a row of one number, whose products are whole and whose sums float32 has."""
    rows = torch.full(shape, number)
    if kind != "constant":  # of either sign, a row at a time
        rows *= torch.where(torch.rand(shape[:-1]) < 0.5, -1.0, 1.0)[..., None]
    if kind == "beside_small":
        rows *= torch.where(torch.rand(shape[:-1]) < 0.5, SMALL / number, 1.0)[..., None]
    return rows


@pytest.mark.parametrize("mask", [Mask(), causal("bottom_right")], ids=str)
@pytest.mark.parametrize("kind", ["constant", "mixed_signs", "beside_small"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("number", HUGE.values(), ids=HUGE)
def test_keys_of_one_huge_score_have_one_weight(number, splits, kind, mask):
    """A shift is rounded, and was so by thousands where scores are around 10^11: out was 0 or NaN. Splits of a row had
    the same weight, however many keys they had: lse has no bits for their number.
    """
    random.seed(0)
    problem, (q, k, v) = call_of(mask, (130, 500), (1, 1), (64, 64), dtype=torch.bfloat16)
    q, k = (huge(kind, number, tensor.shape).to(q.dtype) for tensor in (q, k))
    out, lse, partial = attend(problem, TWO, (q, k, v), 1, (0, splits) if splits > 1 else None)
    if splits > 1:
        out, lse = (got.unflatten(0, (1, 1, 130)) for got in combined(partial, 64))
    check(problem, (q, k, v), out, lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_huge_number_everywhere_is_what_comes_out(dtype):
    """In float16 as large as it has: then P, too large by 2^-25 of the shift, was beyond float16 as well."""
    problem, tensors = call_of(Mask(), (130, 500), (1, 1), (64, 64), dtype=dtype)
    problem = replace(problem, scale=0.125 if dtype is torch.bfloat16 else 20.0)
    tensors = [torch.full_like(tensor, 133120.0 if dtype is torch.bfloat16 else 65472.0) for tensor in tensors]
    out, lse, _ = attend(problem, TWO, tensors)
    assert (out == tensors[2][0, 0, 0, 0]).all()
    torch.testing.assert_close(lse.double(), oracle.attend(*tensors, Mask(), problem.scale)[1], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("scores", [2.0**27.9, -(2.0**27.9), 2.0**28.1, -(2.0**28.1)],
                         ids=["below", "below_and_negative", "above", "above_and_negative"])
def test_scores_on_both_sides_of_the_border_of_huge_ones_are_right_and_only_huge_ones_are_recomputed(scores, again):
    """Rows of which some are huge and others not, in one tile: each has its own scale."""
    problem, (q, k, v) = call_of(Mask(), (128, 500), (1, 1), (64, 64), dtype=torch.bfloat16)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = torch.where(torch.arange(128) % 3 == 0, 1.0, 2.0**-27)
    k[..., 0] = scores / (problem.scale * math.log2(math.e))
    check(problem, (q, k, v), *attend(problem, TWO, (q, k, v))[:2])
    assert bool(again) == (abs(scores) > 2.0**28)


@pytest.mark.parametrize(("scale_log2", "wanted"), [
    (0.18, 0.25), (0.25, 0.25), (0.2500001, 0.5), (1.0, 1.0), (1.4, 2.0), (2.0**-126, 2.0**-126),
    (1.01 * 2.0**126, 2.0**127), (2.0**127, 2.0**127), (1.44 * 2.0**127, 2.0**127)])
def test_the_exact_scale_is_the_least_power_of_two_from_the_scale_on_that_float32_has(scale_log2, wanted):
    assert launch.exact_scale_of(scale_log2) == wanted
