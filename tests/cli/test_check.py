"""``tilewise check``."""

import pytest
import torch

from tilewise.backends.reference import ReferenceBackend
from tilewise.testing.cases import CASES

SMALL = ("--case", "gqa", "--backend", "reference")


def test_a_case_passes_with_errors_budgets_and_worst_coordinates(run):
    finished = run("check", *SMALL, "--dtype", "float32,bfloat16", "--device", "cpu", "--json")
    assert finished.status == 0
    checks = finished.json
    assert [(check["case"], check["dtype"], check["ok"]) for check in checks] == [
        ("gqa", "float32", True), ("gqa", "bfloat16", True)]
    for result in checks[0]["results"]:
        assert 0 <= result["max_error"] <= result["max_budget"]
        assert 0 <= result["mean_error"] <= result["mean_budget"]
        assert len(result["worst"]) == (3 if result["name"] == "lse" else 4)
    assert [result["name"] for result in checks[0]["results"]] == ["out", "lse", "dq", "dk", "dv"]


def test_a_case_with_options_is_checked_with_them(run):
    finished = run("check", "--case", "everything", "--backend", "reference", "--dtype", "float32", "--device", "cpu",
                   "--json")
    (check,) = finished.json
    assert (check["ok"], check["checked"]) == (True, "full")
    assert [result["name"] for result in check["results"]] == [
        "out", "lse", "dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks"]


def test_a_shape_given_by_flags_is_checked(run):
    finished = run("check", "--sq", 40, "--sk", 24, "--hq", 4, "--hk", 2, "--d", 16, "--mask", "causal:bottom_right",
                   "--dtype", "float32", "--backend", "reference", "--device", "cpu", "--json")
    assert finished.status == 0
    assert finished.json[0]["case"] == "b1_h4x2_s40x24_d16_causal:bottom_right"


def test_every_backend_passes_the_empty_cases(run):
    """A batch of nothing had no heads to compare, and joining none of them broke the whole command."""
    empty = [case.name for case in CASES if not (case.b and case.sq and case.sk)]
    assert "no_batch" in empty
    named = [word for name in empty for word in ("--case", name)]
    finished = run("check", *named, "--dtype", "float32", "--device", "cpu", "--json")
    assert finished.status == 0
    computed = [check for check in finished.json if check["refusal"] is None]
    assert {check["case"] for check in computed if check["backend"] == "reference"} == set(empty)
    assert all(check["ok"] and check["checked"] == "full" and check["results"] for check in computed)


@pytest.mark.parametrize(("backend", "dtypes"), [("torch", "float32,bfloat16"), ("reference", "float32")])
def test_every_named_case_passes(run, backend, dtypes):
    finished = run("check", "--backend", backend, "--dtype", dtypes, "--device", "cpu", "--json")
    assert finished.status == 0
    assert {check["case"] for check in finished.json} == {case.name for case in CASES}


def test_a_backend_that_refuses_is_told_and_is_no_failure(run):
    finished = run("check", "--case", "window_left", "--backend", "torch", "--dtype", "float32", "--device", "cpu")
    assert finished.status == 0
    assert "refused by torch: " in finished.output


@pytest.mark.parametrize("as_json", [True, False])
def test_a_wrong_result_exits_with_1_and_shows_the_coordinate(run, monkeypatch, as_json):
    forward = ReferenceBackend.forward

    def wrong(self, *arguments):
        results = forward(self, *arguments)
        results.out[0, 1, 2, 3] += 1.0
        return results

    monkeypatch.setattr(ReferenceBackend, "forward", wrong)
    finished = run("check", *SMALL, "--dtype", "float32", "--device", "cpu", *(["--json"] if as_json else []))
    assert finished.status == 1
    if as_json:
        (out,) = (result for result in finished.json[0]["results"] if result["name"] == "out")
        assert (out["ok"], out["worst"]) == (False, [0, 1, 2, 3])
    else:
        assert "FAILED reference" in finished.output
        assert "(0, 1, 2, 3)" in finished.output


def test_a_backend_that_breaks_exits_with_1_and_its_words(run, monkeypatch):
    def broken(self, *arguments):
        raise ZeroDivisionError("no tiles")

    monkeypatch.setattr(ReferenceBackend, "forward", broken)
    finished = run("check", *SMALL, "--dtype", "float32", "--device", "cpu", "--json")
    assert finished.status == 1
    assert finished.json[0]["failure"] == "ZeroDivisionError: no tiles"


def test_verbose_prints_a_line_a_result(run):
    output = run("check", *SMALL, "--dtype", "float32", "--device", "cpu", "--verbose").output
    lines = [line for line in output.splitlines() if "gqa" in line and " ok " in line]
    assert len(lines) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so --device cuda is no mistake")
def test_a_device_that_is_not_here_exits_with_2(run):
    finished = run("check", "--device", "cuda")
    assert finished.status == 2
    assert "0 GPUs" in finished.errors
