"""Forward and backward against float64, on every case."""

import pytest

from conformance.calls import (
    assert_forward_within_budget,
    assert_gradients_within_budget,
    forward,
    forward_and_backward,
    needs_of,
    operands_of,
    problem_of,
    skip_if_refused,
)
from tilewise.backends.base import Saved
from tilewise.dispatch import get_backend
from tilewise.testing.cases import case_named
from tilewise.testing.inputs import make_inputs


def test_forward_stays_within_error_budget(backend, case, dtype, device):
    inputs = make_inputs(case, dtype, device)
    assert_forward_within_budget(case, inputs, forward(backend, case, inputs))


def test_gradients_stay_within_error_budget(backend, case, dtype, through, device):
    inputs = make_inputs(case, dtype, device)
    results = forward_and_backward(backend, case, inputs, through)
    assert_gradients_within_budget(case, inputs, results.gradients, through)


@pytest.mark.parametrize("name", ["gqa", "causal_bottom_right_more_queries", "window_both_sides", "moat_window",
                                  "sinks_blind_queries", "everything"])
def test_gradients_through_lse_alone_stay_within_error_budget(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    results = forward_and_backward(backend, case, inputs, "lse")
    assert_gradients_within_budget(case, inputs, results.gradients, "lse")
    assert not results.dv.any(), "v does not enter lse"


@pytest.mark.parametrize("name", ["gqa_causal_odd_lengths", "causal_bottom_right_more_queries", "moat_window",
                                  "everything"])
def test_backward_takes_the_out_and_lse_of_another_backend(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands)
    skip_if_refused(backend, problem.backward(lse_grad=False))
    out, lse, _ = get_backend("reference").forward(problem, *inputs[:3], operands)
    got = backend.backward(problem.backward(lse_grad=False), Saved(*inputs[:3], out, lse, operands), inputs.dout,
                           None, needs_of(operands))
    assert_gradients_within_budget(case, inputs, got)
