"""NaN in what no one sees reaches nothing: keys without a query, queries without a key and padding are not read.

Padding holds NaN in every case of layout "moat" whose lengths are data. Backend 'cudnn' is excepted there: it asks for
finite padding (docs/backends.md), and refuses that layout's strides.
"""

from dataclasses import replace

import pytest
import torch

from conformance.calls import (
    assert_forward_within_budget,
    assert_gradients_within_budget,
    forward,
    forward_and_backward,
    operands_of,
)
from tilewise.dispatch import FINITE_PADDING
from tilewise.testing.cases import CASES, case_named
from tilewise.testing.inputs import make_inputs, padding_of

DENSE = [case for case in CASES if not case.has_lengths]
PADDED = [case for case in CASES if case.has_lengths and case.layout == "moat"]
BLIND = [case for case in DENSE if case.sk and not case.mask.visible(case.sq, case.sk).any(-1).all()]
UNSEEN = [case for case in DENSE if case.sq and not case.mask.visible(case.sq, case.sk).any(0).all()]


def _with_rows(tensor, rows, value):
    planted = tensor.clone()
    planted[:, :, rows] = value
    return planted


def _check(backend, case, clean, planted, through):
    results = forward_and_backward(backend, case, planted, through)
    assert_forward_within_budget(case, clean, results[:2])
    assert_gradients_within_budget(case, clean, results.gradients, through)
    return results


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", UNSEEN, ids=str)
def test_keys_that_no_query_sees_may_hold_anything(backend, case, value, device, main_dtype):
    clean = make_inputs(case, main_dtype, device)
    unseen = ~case.mask.visible(case.sq, case.sk, device).any(0)
    planted = clean._replace(k=_with_rows(clean.k, unseen, value), v=_with_rows(clean.v, unseen, value))
    results = _check(backend, case, clean, planted, "out")
    assert not results.dk[:, :, unseen].any()
    assert not results.dv[:, :, unseen].any()


@pytest.mark.parametrize("through", ["out", "out_and_lse"])
@pytest.mark.parametrize("case", BLIND, ids=str)
def test_queries_that_see_no_key_may_hold_anything(backend, case, through, device, main_dtype):
    clean = make_inputs(case, main_dtype, device)
    blind = ~case.mask.visible(case.sq, case.sk, device).any(-1)
    nan = float("nan")
    # With sinks a blind query's lse is the sink: its gradient counts.
    names = ("q", "dout") if case.sinks else ("q", "dout", "dlse")
    planted = clean._replace(**{name: _with_rows(getattr(clean, name), blind, nan) for name in names})
    results = _check(backend, case, clean, planted, through)
    assert not results.dq[:, :, blind].any()


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("mha_causal", "window_both_sides")], ids=str)
def test_nan_in_a_seen_key_is_not_swallowed(backend, case, device, main_dtype):
    inputs = make_inputs(case, main_dtype, device)
    key = case.sk - 1
    seeing = case.mask.visible(case.sq, case.sk, device)[:, key]
    rows = torch.zeros(case.sk, dtype=torch.bool, device=device)
    rows[key] = True
    results = forward_and_backward(backend, case, inputs._replace(k=_with_rows(inputs.k, rows, float("nan"))))
    assert results.out[:, :, seeing].isnan().all()
    assert results.lse[:, :, seeing].isnan().all()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy's, of the interpreted kernels
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_nan_in_a_query_stays_in_its_row(backend, softcap, device, main_dtype):
    """In tiles without a hidden pair too, where what a kernel computes of several scores at once is of one row."""
    case = replace(case_named("mha"), name="long", sq=140, sk=300, softcap=softcap)
    clean = make_inputs(case, main_dtype, device)
    rows = torch.zeros(case.sq, dtype=torch.bool, device=device)
    rows[70] = True
    results = forward_and_backward(backend, case, clean._replace(q=_with_rows(clean.q, rows, float("nan"))))
    assert results.out[:, :, rows].isnan().all()
    assert results.lse[:, :, rows].isnan().all()
    for result in (results.out, results.lse, results.dq):
        assert result[:, :, ~rows].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_keys_that_a_tensor_hides_from_all_reach_no_output(backend, value, device, main_dtype):
    """Their values are read, and 0 · NaN is NaN, so that this is promised of k, out and lse alone."""
    case = case_named("mask_tensor_causal_gqa")
    clean = make_inputs(case, main_dtype, device)
    operands = operands_of(case, clean)
    hidden = torch.arange(case.sk, device=device) % 7 == 2
    operands = operands._replace(mask=operands.mask & ~hidden)
    planted = clean._replace(k=_with_rows(clean.k, hidden, value))
    assert_forward_within_budget(case, clean, forward(backend, case, planted, operands), operands)


@pytest.mark.parametrize("case", PADDED, ids=str)
def test_padding_may_hold_anything_and_changes_no_bit(backend, case, device, main_dtype):
    if backend.name in FINITE_PADDING:
        pytest.skip(f"backend {backend.name!r} asks for finite padding where lengths are data")
    with_nan, with_inf, with_zeros = (make_inputs(case, main_dtype, device) for _ in range(3))
    operands = operands_of(case, with_nan)
    assert with_nan.q.isnan().any()
    for inputs, value in ((with_inf, float("inf")), (with_zeros, 0.0)):
        for tensor, side in zip(inputs, "qkkqq", strict=True):
            tensor.transpose(1, 2)[padding_of(case, side, device)] = value
    got, *expected = (forward_and_backward(backend, case, inputs, "out_and_lse", operands, deterministic=True)
                      for inputs in (with_nan, with_inf, with_zeros))
    for value, results in zip((float("inf"), 0.0), expected, strict=True):
        for name, one, other in zip(got._fields, got, results, strict=True):
            assert one is other is None or torch.equal(one, other), (name, value)
    for name, side in (("out", "q"), ("lse", "q"), ("dq", "q"), ("dk", "k"), ("dv", "k")):
        rows = getattr(got, name).transpose(1, 2)[padding_of(case, side, device)]
        assert torch.equal(rows, torch.full_like(rows, float("-inf") if name == "lse" else 0.0)), name
