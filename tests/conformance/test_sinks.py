"""Sinks: a logit a head in the softmax's denominator, the only part of it where a query sees no key."""

import pytest
import torch

from conformance.calls import forward, forward_and_backward, operands_of, stored, visible_of
from tilewise.testing.cases import Case, case_named
from tilewise.testing.inputs import make_inputs, padding_of

BLIND = ("sinks_blind_queries", "sinks_mask_tensor_blind_queries", "sinks_no_keys", "everything_moat_blind_queries",
         "padded_sinks_blind_queries_gqa", "padded_zero_lengths", "packed_window_sinks")


@pytest.mark.parametrize("name", BLIND)
def test_blind_query_gives_the_sink_as_lse_and_zero_output(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    results = forward_and_backward(backend, case, inputs, "out_and_lse")
    padding = padding_of(case, "q", device)[:, None]
    blind = ~stored(case, visible_of(case, device).any(-1), "q") & ~padding
    assert blind.any()
    sinks = operands.sinks.float()[:, None].expand_as(results.lse)
    torch.testing.assert_close(results.lse[blind], sinks[blind], rtol=1e-6, atol=1e-6)
    assert not results.out[blind].any()
    assert not results.dq[blind].any()


@pytest.mark.parametrize("name", ["sinks_blind_queries", "sinks_no_keys"])
def test_lse_of_blind_queries_passes_its_gradient_to_the_sinks(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    blind = ~visible_of(case, device).any(-1)
    inputs = inputs._replace(dlse=inputs.dlse * blind)  # no other row's arrives
    results = forward_and_backward(backend, case, inputs, "lse")
    expected = inputs.dlse.double().sum((0, 2))
    torch.testing.assert_close(results.dsinks.double(), expected, rtol=0.01, atol=1e-4)
    assert not results.dk.any()


@pytest.mark.parametrize("sink", [-200.0, 200.0])
def test_sink_far_from_the_scores_stays_finite(backend, sink, device, main_dtype):
    """exp(sink) is 0 or infinite in float32: a sink enters the softmax by its distance to the largest score alone."""
    case = Case("far_sinks", b=2, hq=4, hk=2, sq=66, sk=40, d=16, dv=16, mask=case_named("sinks_blind_queries").mask,
                sinks=True)
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    operands = operands._replace(sinks=torch.full_like(operands.sinks, sink))
    results = forward_and_backward(backend, case, inputs, "out_and_lse", operands)
    assert all(tensor.isfinite().all() for tensor in results if tensor is not None)
    seeing = visible_of(case, device).any(-1)
    if sink > 0:
        assert not results.out.abs().max() > 1e-6
        assert torch.equal(results.lse, torch.full_like(results.lse, sink))
    else:
        plain = forward(backend, case, inputs, operands._replace(sinks=None))
        torch.testing.assert_close(results.out, plain.out)
        torch.testing.assert_close(results.lse[seeing], plain.lse[seeing])


@pytest.mark.parametrize("name", ["sinks_blind_queries", "sinks_mask_tensor_blind_queries"])
def test_sink_of_minus_infinity_is_none(backend, name, device, main_dtype):
    """A query that sees no key of such a head gave NaN: the shift of its softmax was −inf."""
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    operands = operands._replace(sinks=torch.full_like(operands.sinks, float("-inf")))
    got = forward_and_backward(backend, case, inputs, operands=operands)
    plain = forward_and_backward(backend, case, inputs, operands=operands._replace(sinks=None))
    assert (plain.lse == float("-inf")).any()
    for field in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(got, field), getattr(plain, field))
    assert not got.dsinks.any()
