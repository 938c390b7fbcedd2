"""The tables of docs/torture.md say what its rows say."""

import importlib.util
from pathlib import Path

from tilewise.bench.provenance import Provenance
from tilewise.bench.torture_rows import row_of, write_torture_rows
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
