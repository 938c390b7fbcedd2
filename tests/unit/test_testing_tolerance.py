import math

import pytest
import torch

from tilewise.errors import InvalidInput
from tilewise.testing.tolerance import assert_within_budget, compare

EXACT = torch.linspace(-2.0, 2.0, 24, dtype=torch.float64).reshape(2, 3, 4)


def _off_by(amount, where=None):
    values = EXACT.clone()
    if where is None:
        return values + amount
    values[where] += amount
    return values


def test_equal_values_pass_even_with_a_perfect_yardstick():
    report = compare("out", EXACT, EXACT, EXACT, 2.0)
    assert report.ok
    assert (report.max_error, report.mean_error) == (0.0, 0.0)


def test_factor_times_the_yardsticks_error_is_the_limit():
    assert compare("out", _off_by(1.9e-3), EXACT, _off_by(1e-3), 2.0).ok
    assert not compare("out", _off_by(2.1e-3), EXACT, _off_by(1e-3), 2.0).ok
    assert compare("dq", _off_by(2.1e-3), EXACT, _off_by(1e-3), 3.0).ok


def test_worst_of_several_yardsticks_counts():
    small, large, broken = _off_by(1e-4), _off_by(1e-3), _off_by(math.nan)
    assert compare("dq", _off_by(2.9e-3), EXACT, [small, large], 3.0).ok
    assert not compare("dq", _off_by(2.9e-3), EXACT, [small], 3.0).ok
    assert not compare("dq", EXACT, EXACT, [small, broken], 3.0).ok
    with pytest.raises(InvalidInput, match="yardstick has shape"):
        compare("dq", EXACT, EXACT, [small, large[:1]], 3.0)


def test_one_wrong_element_fails_by_the_maximum_and_is_named():
    report = compare("dq", _off_by(0.5, (1, 2, 0)), EXACT, _off_by(0.1), 3.0)
    assert not report.ok
    assert report.mean_error < report.mean_budget
    assert report.worst == (1, 2, 0)
    assert report.got == pytest.approx(report.exact + 0.5)
    assert "(1, 2, 0)" in str(report)
    assert "OVER BUDGET" in str(report)


def test_bad_bulk_fails_by_the_mean():
    report = compare("dq", _off_by(0.15), EXACT, _off_by(0.1, (0, 0, 0)), 2.0)
    assert not report.ok
    assert report.max_error < report.max_budget


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_result_never_passes(bad):
    got = EXACT.clone()
    got[0, 1, 2] = bad
    report = compare("out", got, EXACT, _off_by(1e30), 2.0)
    assert not report.ok
    assert report.worst == (0, 1, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_yardstick_that_is_not_finite_lets_nothing_pass(bad):
    assert not compare("out", EXACT, EXACT, _off_by(bad, (0, 0, 0)), 2.0).ok


@pytest.mark.parametrize(("got", "passes"), [(-math.inf, True), (math.inf, False), (-1e30, False), (math.nan, False)])
def test_minus_infinity_must_match_exactly(got, passes):
    exact = torch.tensor([0.5, -math.inf], dtype=torch.float64)
    report = compare("lse", torch.tensor([0.5, got]), exact, exact, 2.0)
    assert report.ok is passes


def test_infinity_where_exact_is_finite_fails():
    assert not compare("lse", torch.tensor([-math.inf]), torch.tensor([1.0]).double(), torch.tensor([1.1]), 2.0).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_to_the_dtype_is_inside_the_band_and_four_times_that_is_not(dtype):
    exact = torch.linspace(1.0, 1.99, 1001, dtype=torch.float64)
    rounded = exact.to(dtype)
    assert compare("out", rounded, exact, exact, 2.0).ok
    assert not compare("out", (rounded.double() + 4 * torch.finfo(dtype).eps).to(dtype), exact, exact, 2.0).ok


def test_empty_result_passes_and_says_so():
    report = compare("out", EXACT[:0], EXACT[:0], EXACT[:0], 2.0)
    assert report.ok
    assert report.worst == ()


def test_wrong_shape_raises_instead_of_broadcasting():
    with pytest.raises(InvalidInput, match=r"dk: got has shape \(1, 3, 4\), exact has \(2, 3, 4\)"):
        compare("dk", EXACT[:1], EXACT, EXACT, 3.0)
    with pytest.raises(InvalidInput, match="yardstick has shape"):
        compare("dk", EXACT, EXACT, EXACT[:1], 3.0)


def test_assertion_carries_the_report():
    with pytest.raises(AssertionError, match=r"dv OVER BUDGET.*worst at \(0, 0, 1\)"):
        assert_within_budget("dv", _off_by(1.0, (0, 0, 1)), EXACT, EXACT, 3.0)
    assert_within_budget("dv", EXACT, EXACT, EXACT, 3.0)


def test_a_unit_in_the_last_place_of_a_single_number_is_inside_the_band():
    exact = torch.tensor([-0.70774281], dtype=torch.float32).double()
    unit = torch.finfo(torch.float32).eps / 2
    assert compare("lse", (exact + unit).float(), exact, exact, 2.0).ok
    assert not compare("lse", (exact + 3 * unit).float(), exact, exact, 2.0).ok
    zero = torch.zeros(1, dtype=torch.float64)
    assert not compare("dk", (zero + 1e-20).float(), zero, zero, 3.0).ok
