"""benchmarks/report.py: its tables from rows, and a document in step with them."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tilewise.bench.rows import write_rows
from tilewise.errors import InvalidInput
from unit.bench_rows import grid_rows, option_rows, row

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "benchmarks/report.py")
report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report)

README = "# Title\n\n<!-- bench:cpu/small -->\nold\n<!-- /bench:cpu/small -->\n\nThe end.\n"


@pytest.fixture
def results(tmp_path):
    write_rows(tmp_path / "cpu" / "small.csv", grid_rows())
    return tmp_path


@pytest.fixture
def document(results):
    path = results / "README.md"
    path.write_text(README, encoding="utf-8")
    return path


def run(monkeypatch, *arguments):
    """Run the script with these arguments; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
    return report.main()


def test_a_summary_has_the_mean_and_the_least_ratio_over_lengths_and_masks():
    rows = [row("tilewise", s, mask=mask, ms_p50=1.0) for s in (512, 1024) for mask in ("none", "causal")]
    rows += [row("naive", s, mask="causal", ms_p50=time) for s, time in ((512, 2.0), (1024, 8.0))]
    rows += [row("tilewise:torch", ms_p50=9.0), row("tilewise:deterministic", ms_p50=1.25)]
    rows += [row("flex", ms_p50=None, status="failed"), row("naive", direction="backward", ms_p50=1.0)]
    rows += [row("tilewise", direction="backward", hq=8, hk=2, d=64, dv=32, ms_p50=3.0),
             row("naive", direction="backward", hq=8, hk=2, d=64, dv=32, ms_p50=2.0)]
    lines = report.summary(rows).splitlines()
    assert lines[0].startswith("How many times tilewise is as fast, over all lengths and masks: geometric mean (least)")
    assert lines[2:] == [
        "| heads | pass | naive | tilewise:deterministic |", "|---|---|---:|---:|",
        "| d64 float32 | forward | **4.00×** (2.000) of 2 | **1.25×** (1.250) of 1 |",
        "| d64/32 float32, 4 query heads share one | backward | **0.67×** (0.667) of 1 | – |"]


def test_a_summary_says_how_many_commits_its_rows_are_of():
    rows = [row("tilewise", commit="aaaaaaa", date="2026-01-03T00:00:00Z"), row("naive", commit="aaaaaaa")]
    assert report.summary(rows).splitlines()[0].endswith("regime turns; commit aaaaaaa; 2026-01-03.")
    rows += [row("naive", 1024, commit="bbbbbbb", date="2026-01-05T00:00:00Z")]
    assert report.summary(rows).splitlines()[0].endswith("regime turns; 2 commits, 2026-01-02 to 2026-01-05.")


def test_a_summary_needs_a_peer():
    with pytest.raises(InvalidInput, match="view is 'summary', and no row has a peer's time; allowed are rows of"):
        report.summary([row("tilewise"), row("tilewise:torch")])


def test_accuracy_is_a_table_of_its_own(results):
    assert "1.0e-06 (1.0e-08)" in report.table(results / "cpu/small.csv", "accuracy")
    with pytest.raises(InvalidInput, match="view is 'heat'; allowed are speed, memory, price, summary, accuracy"):
        report.table(results / "cpu/small.csv", "heat")


def test_the_marked_table_is_made_anew_and_all_else_stays(results):
    text, without_rows = report.updated_readme(README, results)
    assert without_rows == []
    assert text.startswith("# Title\n\n<!-- bench:cpu/small -->\nMilliseconds")
    assert text.endswith("<!-- /bench:cpu/small -->\n\nThe end.\n")
    assert report.updated_readme(text, results) == (text, [])


def test_a_bare_name_and_a_view_are_understood(results):
    text, _ = report.updated_readme("<!-- bench:small:accuracy --><!-- /bench:small:accuracy -->", results)
    assert "Error against float64" in text


def test_a_marker_asks_for_prices_too(tmp_path):
    marked = "<!-- bench:options:price -->not run yet<!-- /bench:options:price -->"
    assert report.updated_readme(marked, tmp_path) == (marked, ["options:price"])
    write_rows(tmp_path / "options.csv", option_rows())
    assert "| softcap 30 | forward | **3** | 1.50× |" in report.updated_readme(marked, tmp_path)[0]


def test_a_marker_without_rows_keeps_its_text_and_is_named(results):
    text = "<!-- bench:paper -->not run yet<!-- /bench:paper -->"
    assert report.updated_readme(text, results) == (text, ["paper"])


@pytest.mark.parametrize(("text", "message"), [
    ("<!-- bench:twice --><!-- /bench:twice -->", "fits 2 files.*cpu/twice.*gpu/twice"),
    ("<!-- bench:cpu/small -->", "has no end"),
    ("<!-- bench:cpu/small --><!-- /bench:other -->", "allowed is its own end"),
])
def test_a_marker_that_means_nothing_raises(results, text, message):
    for folder in ("cpu", "gpu"):
        write_rows(results / folder / "twice.csv", grid_rows())
    with pytest.raises(InvalidInput, match=message):
        report.updated_readme(text, results)


def test_check_exits_with_1_while_out_of_step_and_writes_nothing(document, results, monkeypatch, capsys):
    assert run(monkeypatch, "--readme", document, "--results", results, "--check") == 1
    assert "out of step" in capsys.readouterr().out
    assert document.read_text(encoding="utf-8") == README


def test_an_update_brings_a_document_in_step(document, results, monkeypatch):
    assert run(monkeypatch, "--readme", document, "--results", results) == 0
    assert "| **512** | 2048 (4.00×) |" in document.read_text(encoding="utf-8")
    assert run(monkeypatch, "--readme", document, "--results", results, "--check") == 0


def test_rows_are_printed_as_markdown(results, monkeypatch, capsys):
    assert run(monkeypatch, results / "cpu/small.csv", "--view", "memory") == 0
    assert "| case | pass | tilewise | naive |" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [(), ("rows.csv", "--readme", "README.md")], ids=["neither", "both"])
def test_files_and_a_document_are_alternatives(arguments, monkeypatch):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *arguments)


@pytest.mark.parametrize("name", ["docs/float32.md", "docs/results.md"])
def test_the_tables_of_our_documents_are_in_step_with_the_committed_rows(name, monkeypatch):
    assert "<!-- bench:" in (ROOT / name).read_text("utf-8")
    assert run(monkeypatch, "--readme", ROOT / name, "--check") == 0
