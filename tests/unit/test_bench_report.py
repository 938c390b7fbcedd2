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


def test_a_deterministic_call_is_held_against_ours_and_another_backend_is_not():
    rows = [row("tilewise"), row("tilewise:triton", ms_p50=3.0), row("tilewise:deterministic", ms_p50=2.5)]
    assert markdown(rows).splitlines()[-1].endswith("| **2** | 3 | 2.5 (1.25×) |")
    assert markdown(rows[-1:]).splitlines()[-1].endswith("| **2.5** |")


def test_memory_and_accuracy_are_tables_of_their_own():
    assert markdown(grid_rows(), "memory").splitlines()[-1].endswith("| **12** | 12 |")
    assert "1.0e-06 (1.0e-08)" in markdown(grid_rows(), "accuracy")
    with pytest.raises(InvalidInput, match="view is 'heat'"):
        markdown(grid_rows(), "heat")


def test_a_table_says_which_pass_was_measured_at_which_commit():
    """Passes that were timed apart stood under the newest commit alone, which half of the rows had not been run at."""
    apart = [row("tilewise", commit="aaaaaaa", date="2026-01-03T00:00:00Z"),
             row("tilewise", direction="backward", commit="bbbbbbb", date="2026-01-02T00:00:00Z")]
    wanted = "regime turns; forward: commit aaaaaaa, 2026-01-03; backward: commit bbbbbbb, 2026-01-02."
    assert markdown(apart).splitlines()[0].endswith(wanted)
    superseded = row("tilewise", commit="ccccccc", date="2026-01-01T00:00:00Z")
    assert markdown([superseded, *apart]).splitlines()[0].endswith(wanted)


def test_rows_of_one_commit_have_it_once_with_the_newest_day():
    rows = [row("tilewise", commit="aaaaaaa", date="2026-01-02T23:59:00Z"),
            row("tilewise", direction="backward", commit="aaaaaaa", date="2026-01-03T00:01:00Z")]
    assert markdown(rows).splitlines()[0].endswith("regime turns; commit aaaaaaa; 2026-01-03.")
    assert markdown(grid_rows()).splitlines()[0].endswith("regime turns; 2026-01-02.")


def test_a_summary_has_the_mean_and_the_least_ratio_over_lengths_and_masks():
    rows = [row("tilewise", s, mask=mask, ms_p50=1.0) for s in (512, 1024) for mask in ("none", "causal")]
    rows += [row("naive", s, mask="causal", ms_p50=time) for s, time in ((512, 2.0), (1024, 8.0))]
    rows += [row("tilewise:torch", ms_p50=9.0), row("tilewise:deterministic", ms_p50=1.25)]
    rows += [row("flex", ms_p50=None, status="failed"), row("naive", direction="backward", ms_p50=1.0)]
    rows += [row("tilewise", direction="backward", hq=8, hk=2, d=64, dv=32, ms_p50=3.0),
             row("naive", direction="backward", hq=8, hk=2, d=64, dv=32, ms_p50=2.0)]
    lines = markdown(rows, "summary").splitlines()
    assert lines[0].startswith("How many times tilewise is as fast, over all lengths and masks: geometric mean (least)")
    assert lines[2:] == [
        "| heads | pass | naive | tilewise:deterministic |", "|---|---|---:|---:|",
        "| d64 float32 | forward | **4.00×** (2.000) of 2 | **1.25×** (1.250) of 1 |",
        "| d64/32 float32, 4 query heads share one | backward | **0.67×** (0.667) of 1 | – |"]


def test_a_summary_says_how_many_commits_its_rows_are_of():
    rows = [row("tilewise", commit="aaaaaaa", date="2026-01-03T00:00:00Z"), row("naive", commit="aaaaaaa")]
    assert markdown(rows, "summary").splitlines()[0].endswith("regime turns; commit aaaaaaa; 2026-01-03.")
    rows += [row("naive", 1024, commit="bbbbbbb", date="2026-01-05T00:00:00Z")]
    assert markdown(rows, "summary").splitlines()[0].endswith("regime turns; 2 commits, 2026-01-02 to 2026-01-05.")


def test_a_summary_needs_a_peer():
    with pytest.raises(InvalidInput, match="view is 'summary', and no row has a peer's time; allowed are rows of"):
        markdown([row("tilewise"), row("tilewise:torch")], "summary")


def option_rows():
    """Plain calls of 2 ms and softcap at 3 ms, a peer that takes 4 and 6, and one that has no softcap."""
    return [row("tilewise", ms_p50=2.0), row("flex", ms_p50=4.0), row("naive", ms_p50=1.0),
            row("tilewise", options="softcap 30", ms_p50=3.0), row("flex", options="softcap 30", ms_p50=6.3),
            row("naive", options="softcap 30", ms_p50=None, status="refused")]


def test_an_option_has_a_price_in_plain_calls_and_peers_are_held_against_ours():
    lines = markdown(option_rows(), "price").splitlines()
    assert lines[0].startswith("Milliseconds of tilewise; the price:")
    assert lines[2] == "| case | option | pass | tilewise | price | flex | naive |"
    shape = "b1 h8 s512 d64 float32 causal"
    assert lines[4:] == [f"| {shape} | none | forward | **2** | 1.00× | 2.00× | 0.50× |",
                         f"| {shape} | softcap 30 | forward | **3** | 1.50× | 2.10× | refused |"]


def test_a_price_needs_the_plain_call_of_the_same_backend_shape_and_pass():
    rows = [row("tilewise:torch"), row("tilewise", direction="backward"), row("tilewise", 1024),
            row("tilewise", options="softcap 30", ms_p50=3.0), row("tilewise", 2048, options="sinks", status="wrong",
                                                                   ms_p50=None)]
    lines = markdown(rows, "price").splitlines()
    assert lines[-2].endswith("| softcap 30 | forward | **3** | – |")
    assert lines[-1].endswith("| sinks | forward | wrong | – |")


def test_prices_of_rows_without_an_option_raise():
    with pytest.raises(InvalidInput, match="view is 'price', and no row has an option; allowed are rows of a grid"):
        markdown(grid_rows(), "price")


def test_other_tables_name_the_options_of_a_case():
    assert "| b1 h8 s512 d64 float32 causal, softcap 30 | forward |" in markdown(option_rows())


def test_the_marked_table_is_made_anew_and_all_else_stays(results):
    text, without_rows = updated_readme(README, results)
    assert without_rows == []
    assert text.startswith("# Title\n\n<!-- bench:cpu/small -->\nMilliseconds")
    assert text.endswith("<!-- /bench:cpu/small -->\n\nThe end.\n")
    assert updated_readme(text, results) == (text, [])


def test_a_bare_name_and_a_view_are_understood(results):
    text, _ = updated_readme("<!-- bench:small:accuracy --><!-- /bench:small:accuracy -->", results)
    assert "Error against float64" in text


def test_a_marker_asks_for_prices_too(tmp_path):
    marked = "<!-- bench:options:price -->not run yet<!-- /bench:options:price -->"
    assert updated_readme(marked, tmp_path) == (marked, ["options:price"])
    write_rows(tmp_path / "options.csv", option_rows())
    assert "| softcap 30 | forward | **3** | 1.50× |" in updated_readme(marked, tmp_path)[0]


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
