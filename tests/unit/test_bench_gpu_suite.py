"""The rows of test runs on a GPU: what counts as passed, and a file that grows."""

import csv
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_suite.py"


@pytest.fixture(scope="module")
def gpu_suite():
    spec = importlib.util.spec_from_file_location("gpu_suite", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_errors_are_failures_and_what_is_skipped_has_not_passed(gpu_suite):
    report = ('<testsuites><testsuite errors="1" failures="2" skipped="30" tests="100" time="12.5"/>'
              '<testsuite errors="0" failures="0" skipped="1" tests="5" time="1.5"/></testsuites>')
    assert gpu_suite.counts(report) == (71, 3, 31, 14.0)


def test_rows_are_appended_below_one_line_of_names(gpu_suite, tmp_path):
    row = gpu_suite.Row("3.7.1", 71, 3, 31, 14, "tests", "NVIDIA H200", "580", "2.11.0", "0123456789ab", "2026-01-01")
    gpu_suite.append(row, tmp_path / "rows.csv")
    gpu_suite.append(replace(row, triton="3.8.0"), tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [own["triton"] for own in rows] == ["3.7.1", "3.8.0"]
    assert rows[0]["passed"] == "71"


def test_the_table_has_the_last_run_of_the_same_tests_without_pytests_other_arguments(gpu_suite, tmp_path):
    row = gpu_suite.Row("3.8.0", 71, 3, 31, 14, "-q --tb=short -n 14 tests/conformance -k gluon", "NVIDIA H100", "580",
                        "2.11.0", "0123456789ab", "2026-01-01T01:02:03Z")
    gpu_suite.append(row, tmp_path / "rows.csv")
    gpu_suite.append(replace(row, triton="3.9.0", arguments="-n 2"), tmp_path / "rows.csv")
    gpu_suite.append(replace(row, passed=74, failed=0, arguments="-n 2 tests/conformance -k gluon", commit="abcdefa",
                             date="2026-01-02T01:02:03Z"), tmp_path / "rows.csv")
    assert gpu_suite.table(tmp_path / "rows.csv").splitlines()[2:] == [
        "| `tests` | 3.9.0 | 71 | 3 | 31 | 0123456789ab | 2026-01-01 |",
        "| `tests/conformance -k gluon` | 3.8.0 | 74 | 0 | 31 | abcdefa | 2026-01-02 |", "",
        "NVIDIA H100, torch 2.11.0."]
