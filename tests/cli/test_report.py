"""``tilewise report``: tables from rows, and a README in step with them."""

from pathlib import Path

import pytest

from tilewise.bench.rows import write_rows
from unit.bench_rows import grid_rows

ROOT = Path(__file__).parents[2]
MARKED = "Before.\n<!-- bench:small --><!-- /bench:small -->\nAfter.\n"


@pytest.fixture
def readme(tmp_path):
    write_rows(tmp_path / "results" / "cpu" / "small.csv", grid_rows())
    path = tmp_path / "README.md"
    path.write_text(MARKED, encoding="utf-8")
    return path


def report(run, readme, *more):
    return run("report", "--readme", readme, "--results", readme.parent / "results", *more)


def test_check_exits_with_1_while_out_of_step_and_writes_nothing(run, readme):
    finished = report(run, readme, "--check")
    assert finished.status == 1
    assert "out of step" in finished.output
    assert readme.read_text(encoding="utf-8") == MARKED


def test_an_update_brings_it_in_step(run, readme):
    assert report(run, readme).status == 0
    text = readme.read_text(encoding="utf-8")
    assert "| **512** | 2048 (4.00×) |" in text
    assert text.startswith("Before.\n")
    assert text.endswith("\nAfter.\n")
    assert report(run, readme, "--check").status == 0


def test_rows_are_printed_as_markdown(run, readme):
    finished = run("report", readme.parent / "results" / "cpu" / "small.csv", "--view", "memory")
    assert finished.status == 0
    assert "| case | pass | tilewise | naive |" in finished.output


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md", "docs/float32.md", "docs/results.md"])
def test_the_tables_of_our_documents_are_in_step_with_the_committed_rows(run, name):
    assert "<!-- bench:" in (ROOT / name).read_text("utf-8")
    assert run("report", "--readme", ROOT / name, "--results", ROOT / "benchmarks" / "results", "--check").status == 0
