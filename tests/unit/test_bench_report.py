"""Markdown tables of rows."""

import pytest

from tilewise.bench.report import comparisons, has_prices, markdown
from tilewise.errors import InvalidInput
from unit.bench_rows import grid_rows, option_rows, row


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


def test_memory_is_a_table_of_its_own():
    assert markdown(grid_rows(), "memory").splitlines()[-1].endswith("| **12** | 12 |")
    with pytest.raises(InvalidInput, match="view is 'heat'; allowed are speed, memory, price"):
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


def test_an_option_has_a_price_in_plain_calls_and_peers_are_held_against_ours():
    lines = markdown(option_rows(), "price").splitlines()
    assert lines[0].startswith("Milliseconds of tilewise; the price:")
    assert lines[2] == "| case | option | pass | tilewise | price | flex | naive |"
    shape = "b1 h8 s512 d64 float32 causal"
    assert lines[4:] == [f"| {shape} | none | forward | **2** | 1.00× | 2.00× | 0.50× |",
                         f"| {shape} | softcap 30 | forward | **3** | 1.50× | 2.10× | refused |"]


def test_prices_are_there_where_a_shape_has_a_plain_call_and_one_with_an_option():
    assert has_prices(option_rows())
    assert not has_prices(grid_rows())
    assert not has_prices([row("tilewise", s=512), row("tilewise", s=1024, options="softcap 30")])


def test_the_hosts_times_beside_those_of_the_device_are_a_table_of_their_own():
    rows = [row("tilewise"), row("tilewise", s=64, regime="host", host_us=7.0, tflops=None)]
    device, host = markdown(rows).split("\n\nMicroseconds of the host")
    assert device.splitlines()[-1] == "| b1 h8 s512 d64 float32 causal | forward | **2** |"
    assert host.splitlines()[-1] == "| b1 h8 s64 d64 float32 causal | forward | **7** |"


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


def test_host_rows_are_told_in_microseconds():
    rows = [row(name, regime="host", host_us=us, ms_p50=us / 1e3, tflops=None)
            for name, us in (("tilewise", 20.0), ("sdpa_flash", 30.0))]
    assert markdown(rows).startswith("Microseconds")
    assert markdown(rows).splitlines()[-1].endswith("| **20** | 30 (1.50×) |")
