"""Figures from rows."""

import re

import pytest

from tilewise.bench.plots import draw_figures
from tilewise.errors import InvalidInput
from unit.bench_rows import grid_rows, row


def panels(path):
    return len(re.findall(r'<g id="axes_\d+">', path.read_text(encoding="utf-8")))


def test_speed_has_a_panel_a_pass_and_memory_a_panel_a_case(tmp_path):
    speed, memory = draw_figures(grid_rows(), tmp_path, "cpu")
    assert (speed.name, memory.name) == ("cpu-speed.svg", "cpu-memory.svg")
    assert (panels(speed), panels(memory)) == (2, 1)


def test_each_option_has_a_panel_of_its_own(tmp_path):
    rows = [row("tilewise", s, options=options) for s in (512, 1024) for options in ("", "sinks")]
    assert panels(draw_figures(rows, tmp_path, "options")[0]) == 2


def test_equal_rows_give_equal_bytes(tmp_path):
    first, second = (draw_figures(grid_rows(), tmp_path / name, "cpu") for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_png_is_written_too(tmp_path):
    for path in draw_figures(grid_rows(), tmp_path, "cpu", "png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_rows_without_a_time_are_left_out_and_none_at_all_raises(tmp_path):
    failed = row(status="failed", ms_p20=None, ms_p50=None, ms_p80=None, tflops=None)
    assert panels(draw_figures([*grid_rows(), failed], tmp_path, "cpu")[0]) == 2
    with pytest.raises(InvalidInput, match="nothing to draw"):
        draw_figures([failed], tmp_path, "cpu")


def test_an_unknown_format_raises(tmp_path):
    with pytest.raises(InvalidInput, match="format is 'gif'"):
        draw_figures(grid_rows(), tmp_path, "cpu", "gif")
