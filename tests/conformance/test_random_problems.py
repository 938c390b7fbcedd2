"""Problems nobody thought of: random sizes, masks, options, scales and layouts."""

import torch
from hypothesis import HealthCheck, assume, given, settings

from conformance.calls import (
    assert_forward_within_budget,
    assert_gradients_within_budget,
    forward_and_backward,
    problem_of,
    skip_if_refused,
)
from tilewise.testing.cases import case_named
from tilewise.testing.inputs import make_inputs
from tilewise.testing.strategies import small_cases, small_cases_with_options


def _check(backend, case, device):
    inputs = make_inputs(case, torch.float32, device)
    problem = problem_of(case, inputs)
    assume(backend.why_not(problem) is None and backend.why_not(problem.backward(lse_grad=False)) is None)
    results = forward_and_backward(backend, case, inputs)
    assert_forward_within_budget(case, inputs, results[:2])
    assert_gradients_within_budget(case, inputs, results.gradients)


def _skip_if_refused(backend, name, device):
    skip_if_refused(backend, problem_of(case_named(name), make_inputs(case_named(name), torch.float32, device)))


# A backend may refuse most masks; what it takes is still worth trying.
@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(case=small_cases())
def test_any_small_problem_stays_within_error_budget(backend, device, case):
    _skip_if_refused(backend, "mha", device)
    _check(backend, case, device)


@given(case=small_cases_with_options())
def test_any_small_problem_with_any_options_stays_within_error_budget(backend, device, case):
    _skip_if_refused(backend, "everything", device)
    _check(backend, case, device)
