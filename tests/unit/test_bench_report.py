"""Markdown tables, and the marked tables of a README."""

import pytest

from tilewise.bench.report import comparisons, markdown, updated_readme
from tilewise.bench.rows import write_rows
from tilewise.errors import InvalidInput
from unit.bench_rows import grid_rows, row

README = "# Title\n\n<!-- bench:cpu/small -->\nold\n<!-- /bench:cpu/small -->\n\nThe end.\n"


@pytest.fixture
def results(tmp_path):
    write_rows(tmp_path / "cpu" / "small.csv", grid_rows())
    return tmp_path


def test_a_peer_is_held_against_ours():
    side = comparisons(grid_rows())[0]
    assert side.ours.provider == "tilewise"
    assert side.speedup_over("naive") == pytest.approx(4.0)


def test_the_speed_table_has_a_line_a_case_and_pass_and_the_ratio_in_it():
    lines = markdown(grid_rows()).splitlines()
    assert lines[0].startswith("Milliseconds")
    assert lines[2] == "| case | pass | tilewise | naive |"
    assert lines[4] == "| b1 h8 s512 d64 float32 causal | forward | **512** | 2048 (4.00×) |"
    assert len(lines) == 8


def test_a_result_without_a_time_shows_its_status():
    rows = [row("tilewise"), row("naive", status="wrong", ms_p50=None, tflops=None)]
    assert markdown(rows).splitlines()[-1].endswith("| **2** | wrong |")


def test_fast_devices_are_told_in_tflops():
    rows = [row("tilewise", tflops=400.0), row("naive", tflops=100.0, ms_p50=8.0)]
    assert "TFLOP/s" in markdown(rows)
    assert markdown(rows).splitlines()[-1].endswith("| **400** | 100 (4.00×) |")


def test_memory_and_accuracy_are_tables_of_their_own():
    assert markdown(grid_rows(), "memory").splitlines()[-1].endswith("| **12** | 12 |")
    assert "1.0e-06 (1.0e-08)" in markdown(grid_rows(), "accuracy")
    with pytest.raises(InvalidInput, match="view is 'heat'"):
        markdown(grid_rows(), "heat")


def test_the_marked_table_is_made_anew_and_all_else_stays(results):
    text, without_rows = updated_readme(README, results)
    assert without_rows == []
    assert text.startswith("# Title\n\n<!-- bench:cpu/small -->\nMilliseconds")
    assert text.endswith("<!-- /bench:cpu/small -->\n\nThe end.\n")
    assert updated_readme(text, results) == (text, [])


def test_a_bare_name_and_a_view_are_understood(results):
    text, _ = updated_readme("<!-- bench:small:accuracy --><!-- /bench:small:accuracy -->", results)
    assert "Error against float64" in text


def test_a_marker_without_rows_keeps_its_text_and_is_named(results):
    text = "<!-- bench:paper -->not run yet<!-- /bench:paper -->"
    assert updated_readme(text, results) == (text, ["paper"])


def test_host_rows_are_told_in_microseconds():
    rows = [row(name, regime="host", host_us=us, ms_p50=us / 1e3, tflops=None)
            for name, us in (("tilewise", 20.0), ("sdpa_flash", 30.0))]
    assert markdown(rows).startswith("Microseconds")
    assert markdown(rows).splitlines()[-1].endswith("| **20** | 30 (1.50×) |")


@pytest.mark.parametrize(("text", "message"), [
    ("<!-- bench:twice --><!-- /bench:twice -->", "fits 2 files.*cpu/twice.*gpu/twice"),
    ("<!-- bench:cpu/small -->", "has no end"),
    ("<!-- bench:cpu/small --><!-- /bench:other -->", "allowed is its own end"),
])
def test_a_marker_that_means_nothing_raises(results, text, message):
    for folder in ("cpu", "gpu"):
        write_rows(results / folder / "twice.csv", grid_rows())
    with pytest.raises(InvalidInput, match=message):
        updated_readme(text, results)
