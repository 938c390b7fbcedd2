"""Problems nobody thought of: random sizes, masks, options, scales, layouts and strides.

Hypothesis shrinks what it finds to the least; the configurations go wider (strides, NaN, dtypes, scores far from 0,
gradients through lse) and are those of `tilewise fuzz`.
"""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from conformance.calls import (
    assert_forward_within_budget,
    assert_gradients_within_budget,
    forward_and_backward,
    problem_of,
    skip_if_refused,
)
from tilewise.bench.backend_checks import check_configuration
from tilewise.cli.session import Finding
from tilewise.testing.cases import case_named
from tilewise.testing.configurations import draw
from tilewise.testing.inputs import make_inputs
from tilewise.testing.strategies import small_cases, small_cases_with_options

BLOCK = 20  # seeds a test
SEEDS = {"cpu": 80, "cuda": 300}


def pytest_generate_tests(metafunc):
    if "first_seed" in metafunc.fixturenames:
        device = torch.device(metafunc.config.getoption("--device"))
        metafunc.parametrize("first_seed", range(0, SEEDS[device.type], BLOCK))


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


def test_random_configurations_stay_within_error_budget(backend, first_seed, device):
    size = "large" if device.type == "cuda" else "small"
    findings = [Finding(configuration, check, device)
                for configuration in (draw(seed, size) for seed in range(first_seed, first_seed + BLOCK))
                for check in check_configuration(configuration, [backend.name], device)]
    refusals = [finding.check.refusal for finding in findings]
    if all(refusals):
        pytest.skip(f"all {BLOCK} are refused, the first because backend {backend.name!r} {refusals[0]}")
    told = [f"{finding.reproducer}\n{finding.check.failure or [str(r) for r in finding.check.reports if not r.ok]}"
            for finding in findings if not finding.check.ok]
    assert not told, "\n".join(told)
