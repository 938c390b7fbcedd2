"""The tables of docs/torture.md say what its rows say."""

import importlib.util
from pathlib import Path

import pytest

from tilewise.bench.provenance import Provenance
from tilewise.bench.torture_rows import row_of, write_torture_rows
from tilewise.errors import InvalidInput
from tilewise.testing.torture import Result

PATH = Path(__file__).resolve().parents[2] / "benchmarks/torture.py"
ORIGIN = Provenance("NVIDIA H200", "580.1", "2.13", "3.7.1", "3.11", "0.1", "0123456789ab", "2026-11-25T00:00:00Z", "")
ISSUE = "https://github.com/pytorch/pytorch/issues/196678"


spec = importlib.util.spec_from_file_location("torture_tables", PATH)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def test_a_table_tells_who_fails_what_by_how_much_and_where_it_ran(tmp_path):
    results = [Result("ordinary", "numbers", "tilewise", "pass"), Result("one_query", "edges", "tilewise", "pass"),
               Result("ordinary", "numbers", "peer", "fail", "dq: \x1b[91m`nan`\x1b[0m | at 3", ISSUE),
               Result("one_query", "edges", "peer", "n/a", "takes none")]
    write_torture_rows(tmp_path / "torture.csv", [row_of(result, "bfloat16", ORIGIN) for result in results])
    assert script.table(tmp_path / "torture.csv").splitlines() == [
        "| | tilewise | peer |", "|---|---|---|", "| **numbers** | | |", "| `ordinary` | pass | **FAIL** |",
        "| **edges** | | |", "| `one_query` | pass | – |", "| **failed, of those that apply** | 0 of 2 | 1 of 1 |", "",
        f"- peer, `ordinary` ([pytorch#196678]({ISSUE})): `dq: 'nan' | at 3`", "",
        "NVIDIA H200; driver 580.1; bfloat16; torch 2.13; Triton 3.7.1; commit 0123456789ab; 2026-11-25."]


def test_columns_of_several_dtypes_name_them(tmp_path):
    result = Result("ordinary", "numbers", "tilewise", "pass")
    write_torture_rows(tmp_path / "torture.csv", [row_of(result, dtype, ORIGIN) for dtype in ("float32", "bfloat16")])
    lines = script.table(tmp_path / "torture.csv").splitlines()
    assert lines[0] == "| | tilewise, float32 | tilewise, bfloat16 |"
    assert lines[-1].startswith("NVIDIA H200; driver 580.1; float32, bfloat16; ")


def test_rows_are_read_as_they_were_written(tmp_path):
    row = row_of(Result("one_query", "edges", "sdpa_math", "fail", "dk: nan", ISSUE, 0.123), "bfloat16", ORIGIN)
    write_torture_rows(tmp_path / "torture.csv", [row])
    assert script.read_torture_rows(tmp_path / "torture.csv") == [row]


def test_files_that_are_no_rows_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"none\.csv is no file; allowed is a CSV that `tilewise check --torture"):
        script.read_torture_rows(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("check,speed\n", "utf-8")
    with pytest.raises(InvalidInput, match=r"no table of `tilewise check --torture`: missing .* columns .*speed"):
        script.read_torture_rows(tmp_path / "other.csv")
