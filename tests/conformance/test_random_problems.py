"""Problems nobody thought of: random sizes, masks, options, scales, layouts, strides, NaN and dtypes.

All are configurations of one generator. Hypothesis makes tiny ones and shrinks what it finds to the least; the seeds of
`tilewise fuzz` make larger ones.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from conformance.calls import problem_of, skip_if_refused
from tilewise.bench.backend_checks import check_configuration
from tilewise.cli.session import Finding
from tilewise.testing.cases import case_named
from tilewise.testing.configurations import draw
from tilewise.testing.inputs import make_inputs
from tilewise.testing.strategies import configurations, plain_configurations

BLOCK = 20  # seeds a test
SEEDS = {"cpu": 80, "cuda": 300}


def pytest_generate_tests(metafunc):
    if "first_seed" in metafunc.fixturenames:
        device = torch.device(metafunc.config.getoption("--device"))
        metafunc.parametrize("first_seed", range(0, SEEDS[device.type], BLOCK))


def _check(backend, configuration, device):
    (check,) = check_configuration(configuration, [backend.name], device)
    assume(check.refusal is None)
    assert check.ok, f"{configuration}\n{_told(check)}"


def _told(check):
    return check.failure or [str(report) for report in check.reports if not report.ok]


def _skip_if_refused(backend, name, device):
    skip_if_refused(backend, problem_of(case_named(name), make_inputs(case_named(name), torch.float32, device)))


# A backend may refuse most masks; what it takes is still worth trying.
@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(configuration=plain_configurations())
def test_any_tiny_problem_stays_within_error_budget(backend, device, configuration):
    _skip_if_refused(backend, "mha", device)
    _check(backend, replace(configuration, dtype=torch.float32), device)


@given(configuration=configurations())
def test_any_tiny_problem_with_any_options_stays_within_error_budget(backend, device, configuration):
    _skip_if_refused(backend, "everything", device)
    _check(backend, configuration, device)


@pytest.mark.usefixtures("sums_in_one_order")
def test_random_configurations_stay_within_error_budget(backend, first_seed, device):
    size = "large" if device.type == "cuda" else "small"
    findings = [Finding(configuration, check, device)
                for configuration in (draw(seed, size) for seed in range(first_seed, first_seed + BLOCK))
                for check in check_configuration(configuration, [backend.name], device)]
    refusals = [finding.check.refusal for finding in findings]
    if all(refusals):
        pytest.skip(f"all {BLOCK} are refused, the first because backend {backend.name!r} {refusals[0]}")
    told = [f"{finding.reproducer}\n{_told(finding.check)}" for finding in findings if not finding.check.ok]
    assert not told, "\n".join(told)
