"""Bias, ALiBi and dropout in the Hopper forward kernel: its source on the CPU, beside float64."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_SETTINGS, Operands
from tilewise.testing import oracle
from tilewise.tuning import schedules_hopper

forward_on_cpu = pytest.importorskip("emulation.forward_on_cpu", reason="Triton is not installed")
attend, check = forward_on_cpu.attend, forward_on_cpu.check
TWO, THREE = HopperForwardConfig(128, 2), HopperForwardConfig(128, 3, ping_pong=True)
WIDE = HopperForwardConfig(64, 2, q_stages=1, epilogue_passes=2)
SHIFTED = window(96, 32, "bottom_right")  # of 300 and 556 keys the first 160 are not seen


@pytest.fixture(autouse=True)
def short_calls_too(monkeypatch):
    monkeypatch.setattr(schedules_hopper, "LEAST_FROZEN", 1)


def call_of(operands, mask=None, sizes=(300, 556), heads=(4, 2), d=64, b=2, dtype=torch.float16, settings=NO_SETTINGS):
    random.seed(0)
    torch.manual_seed(0)
    (sq, sk), (hq, hk) = sizes, heads
    tensors = [torch.randn(b, *shape).to(dtype) for shape in ((hq, sq, d), (hk, sk, d), (hk, sk, d))]
    problem = AttentionProblem.from_tensors(*tensors, operands, mask=Mask() if mask is None else mask, scale=0.125,
                                            settings=settings)
    return replace(problem, device=torch.device("cuda", 0)), tensors


def hold(operands, config, lengths=(), **facts):
    """Run a call with operands and compare it with float64."""
    problem, tensors = call_of(operands, **facts)
    got = attend(problem, config, tensors, lengths=lengths, operands=operands)[:2]
    changes = oracle.Changes(operands, facts.get("settings", NO_SETTINGS))
    check(problem, tensors, *got, changes)
    return got


def bias_of(shape, dtype=torch.float16):
    torch.manual_seed(1)
    return 3.0 * torch.randn(shape).to(dtype)


def in_rows_for_tma(bias):
    """The same numbers, in rows that begin at multiples of 16 bytes."""
    rows = bias.new_full((*bias.shape[:3], -(-bias.shape[3] // 8) * 8), torch.nan)
    return rows[..., :bias.shape[3]].copy_(bias)


@pytest.mark.parametrize("laid_out", [in_rows_for_tma, torch.Tensor.contiguous], ids=["tma", "threads"])
@pytest.mark.parametrize("config", [TWO, THREE, WIDE], ids=["two", "three", "one_part"])
@pytest.mark.parametrize("mask", [Mask(), causal("bottom_right"), SHIFTED], ids=["full", "causal", "shifted"])
def test_a_bias_is_added_to_the_pairs_that_are_seen(mask, config, laid_out):
    hold(Operands(bias=laid_out(bias_of((1, 4, 300, 556)))), config, mask=mask, d=200 if config is WIDE else 64)


@pytest.mark.parametrize("bias", [
    bias_of((2, 1, 300, 556), torch.float32), bias_of((1, 1, 1, 556)), bias_of((2, 4, 300, 1)),
    bias_of((2, 4, 556, 300)).mT, bias_of((1, 4, 300, 1112))[..., ::2]],
    ids=["float32", "of_keys", "of_queries", "transposed", "strided"])
def test_a_bias_of_any_dtype_and_strides(bias):
    hold(Operands(bias=bias), TWO, mask=SHIFTED)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tma_brings_a_bias_that_batch_entries_or_heads_share(shape, dtype):
    bias = in_rows_for_tma(bias_of((*shape, 300, 556), dtype))
    hold(Operands(bias=bias.expand(2, 4, 300, 556)), TWO, mask=SHIFTED, dtype=dtype)
    hold(Operands(bias=bias), TWO, dtype=dtype)


@pytest.mark.parametrize("laid_out", [in_rows_for_tma, torch.Tensor.contiguous], ids=["tma", "threads"])
@pytest.mark.parametrize("config", [TWO, THREE], ids=["two", "three"])
def test_a_bias_may_hide_whole_blocks_and_rows(config, laid_out):
    """-inf where a tile begins, in all but the first keys, and in all of a row, which gives 0."""
    bias = laid_out(bias_of((1, 4, 300, 556)))
    bias[..., 300:] = -torch.inf
    bias[..., 130:200, 20:] = -torch.inf
    hold(Operands(bias=bias), config)
    bias[..., 7, :] = -torch.inf
    problem, tensors = call_of(Operands(bias=bias))
    out, lse = attend(problem, config, tensors, operands=Operands(bias=bias))[:2]
    assert not out[:, :, 7].any()
    assert (lse[:, :, 7] == -torch.inf).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("config", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("mask", [
    window(None, None, "top_left"), causal("bottom_right"), causal("top_left"), SHIFTED],
    ids=["full", "causal", "top_left", "shifted"])
def test_slopes_times_the_distance_are_taken_off(mask, config):
    """Also where it is steep, or negative: a tile's first blocks then have scores far below those that come later."""
    slopes = torch.tensor([[0.5, 0.0, 4.0, -0.02], [1.0, 2.0, -0.25, 0.125]])
    hold(Operands(alibi_slopes=slopes), config, mask=mask)


def test_all_of_it_at_once_with_a_softcap():
    settings = NO_SETTINGS._replace(softcap=4.0, dropout_p=0.25)
    hold(Operands(bias=bias_of((1, 4, 300, 556)), alibi_slopes=torch.tensor([[0.5, 0.1, 0.0, 0.02]]),
                  seed=torch.tensor([2**40 + 7])), TWO, mask=causal("bottom_right"), settings=settings)


@pytest.mark.parametrize("config", [TWO, THREE, WIDE], ids=["two", "three", "one_part"])
@pytest.mark.parametrize("mask", [Mask(), causal("bottom_right"), SHIFTED, window(90, 5, "bottom_right")],
                         ids=["full", "causal", "shifted", "blocks_begin_anywhere"])
def test_dropout_drops_what_the_reference_drops(mask, config):
    """lse is that of all pairs; a block of keys begins at a multiple of 16, wherever the window does."""
    sizes = (300, 396) if mask.left == 90 else (300, 556)  # what is not seen must be a multiple of 16
    hold(Operands(seed=torch.tensor([-3])), config, mask=mask, sizes=sizes, d=200 if config is WIDE else 64,
         settings=NO_SETTINGS._replace(dropout_p=0.3))


@pytest.mark.parametrize("mask", [causal("bottom_right"), window(None, None, "bottom_right"),
                                  window(None, None, "top_left")], ids=["causal", "full", "top_left"])
def test_of_packed_sequences_each_has_its_own_bias_slopes_and_draws(mask):
    """Of lengths that differ, so that a diagonal through the last query and key is another one in each."""
    lengths_q, lengths_k = (120, 0, 180), (300, 40, 90)
    borders = [torch.tensor([0, *itertools.accumulate(own)], dtype=torch.int32) for own in (lengths_q, lengths_k)]
    slopes = torch.tensor([[0.5, 0.0, 0.1, 0.02]]) * torch.tensor([[1.0], [2.0], [3.0]])
    operands = Operands(bias=bias_of((3, 4, 180, 300)), alibi_slopes=slopes, seed=torch.tensor([11]),
                        cu_seqlens_q=borders[0], cu_seqlens_k=borders[1])
    settings = NO_SETTINGS._replace(dropout_p=0.25, longest=(180, 300))
    hold(operands, TWO, borders, mask=mask, sizes=(300, 430), b=1, settings=settings)
