"""The Hopper backward kernel of heads up to 64: its source on the CPU, every way to assign tiles and accumulate dQ."""

import random

import pytest
import torch

from emulation.backward_calls import (
    MASKS,
    NONE_AHEAD,
    SLOPES,
    alibi_of,
    call_of,
    compare,
    expected,
    with_slopes,
    with_true_lse,
)
from tilewise.kernels.hopper.backward.config import D64Variant, HopperD64Config

backward_on_cpu = pytest.importorskip("emulation.backward_on_cpu", reason="Triton is not installed")
DYNAMIC, DETERMINISTIC, HEAD_PERSISTENT = (HopperD64Config(variant=variant) for variant in D64Variant)
TWO, FOUR = (HopperD64Config(variant=D64Variant.HEAD_PERSISTENT, ctas_per_head=ctas) for ctas in (2, 4))


def differentiate(mask, config, d, together=None, num_sms=4):
    """Return (problem, tensors, (dq before it is scaled, dk, dv)).

    together: how many CTAs run at once, as many as share a head unless said otherwise.
    """
    random.seed(0)
    problem, tensors = call_of(*mask, (d, d))
    return problem, tensors, backward_on_cpu.differentiate(problem, tensors, config, num_sms,
                                                           together or config.ctas_per_head)


@pytest.mark.parametrize("d", [64, 40])
@pytest.mark.parametrize("config", [DETERMINISTIC, HEAD_PERSISTENT, TWO, FOUR, DYNAMIC],
                         ids=["deterministic", "head_persistent", "two", "four", "dynamic"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_source_computes_the_gradients_on_the_cpu(mask, config, d):
    problem, tensors, gradients = differentiate(mask, config, d)
    compare(gradients, expected(problem, tensors))


@pytest.mark.parametrize("together", [2, 4])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_ctas_of_the_dynamic_scheduler_may_run_at_once(mask, together):
    problem, tensors, gradients = differentiate(mask, DYNAMIC, 64, together)
    compare(gradients, expected(problem, tensors))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_ctas_of_the_dynamic_scheduler_may_have_one_tile_each(mask):
    problem, tensors, gradients = differentiate(mask, DYNAMIC, 64, num_sms=132)
    compare(gradients, expected(problem, tensors))


@pytest.mark.parametrize("config", [HEAD_PERSISTENT, TWO, FOUR], ids=["head_persistent", "two", "four"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_head_persistent_cta_has_the_bits_of_deterministic_accumulation(mask, config):
    """A call may take either way, as its batch has it, with deterministic=True."""
    problem, _, (dq, *of_keys) = differentiate(mask, config, 64)
    _, _, (accum, *of_keys_in_order) = differentiate(mask, DETERMINISTIC, 64)
    assert torch.equal((dq * problem.scale).half(), (accum * problem.scale).half())
    assert all(map(torch.equal, of_keys, of_keys_in_order))


@pytest.mark.parametrize(("module", "config"), [("dq_accum", TWO), ("d64", DETERMINISTIC)])
def test_a_fence_that_is_left_out_is_found(module, config, monkeypatch):
    """Of an accumulator that threads have read before the copy engine writes there again; of dS before an MMA."""
    monkeypatch.setitem(backward_on_cpu.CONSTANTS, (getattr(backward_on_cpu, module), "fence_async_shared"),
                        lambda: None)
    monkeypatch.setattr(backward_on_cpu.gluon_on_cpu, "PATIENCE", 3.0)  # of those that wait for the failed one
    with pytest.raises(AssertionError, match="no fence between threads"):
        differentiate(MASKS["full"], config, 64)


@pytest.mark.parametrize("slopes", SLOPES.values(), ids=SLOPES)
@pytest.mark.parametrize("config", [DETERMINISTIC, HEAD_PERSISTENT, TWO, FOUR, DYNAMIC],
                         ids=["deterministic", "head_persistent", "two", "four", "dynamic"])
@pytest.mark.parametrize("mask", NONE_AHEAD.values(), ids=NONE_AHEAD)
def test_slopes_times_the_distance_are_taken_off_where_no_key_is_ahead(mask, config, slopes):
    random.seed(0)
    problem, tensors = call_of(*mask, (64, 64))
    got = backward_on_cpu.differentiate(with_slopes(problem, slopes), tensors, config, 4, config.ctas_per_head,
                                        slopes=slopes)
    compare(got, expected(problem, tensors, taken_off=alibi_of(problem, slopes)))


def test_no_query_past_the_last_one_has_an_infinite_probability():
    """A negative slope of 1, 192 keys behind: what the last block has in common is 2^277, and inf · 0 is NaN."""
    random.seed(0)
    problem, tensors = call_of(*NONE_AHEAD["top_left"], (64, 64))
    slopes = torch.tensor([[-1.0, -2.0]])
    taken_off = alibi_of(problem, slopes)
    tensors = with_true_lse(problem, tensors, taken_off)
    got = backward_on_cpu.differentiate(with_slopes(problem, slopes), tensors, DYNAMIC, 4, 1, slopes=slopes)
    compare(got, expected(problem, tensors, taken_off=taken_off))
