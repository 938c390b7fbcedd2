"""Figures from rows."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tilewise.bench.plots import draw_figures, draw_standing, origin_of
from tilewise.bench.rows import read_rows, write_rows
from tilewise.bench.standing import closing_sentence
from tilewise.errors import InvalidInput
from unit.bench_rows import grid_rows, row

ROOT = Path(__file__).resolve().parents[2]
FIGURES = sorted(path for kind in ("speed", "memory") for path in (ROOT / "docs" / "figures").glob(f"*-{kind}.svg"))


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


def test_panels_come_by_pass_then_by_mask(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("tilewise.bench.plots._panel", lambda axis, members, *rest, **flags: seen.append(members[0]))
    rows = [row("tilewise", d=d, dv=d, mask=mask, direction=direction) for d in (64, 128)
            for mask in ("causal", "none") for direction in ("backward", "forward")]
    draw_figures(rows, tmp_path, "paper")
    wanted = [(direction, mask, d) for direction in ("forward", "backward") for mask in ("none", "causal")
              for d in (64, 128)]
    assert [(row.direction, row.mask, row.d) for row in seen[:8]] == wanted


def test_a_figure_names_its_rows_and_other_rows_have_another_name(tmp_path):
    rows = grid_rows()
    for path in draw_figures(rows, tmp_path, "cpu"):
        assert origin_of(rows) in path.read_text(encoding="utf-8")
    assert origin_of(rows) == origin_of([*rows, row("tilewise", s=512, date="2025-01-01T00:00:00Z", ms_p50=9.0)])
    assert origin_of(rows) != origin_of(rows[1:])


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_figures_of_the_documents_were_drawn_from_the_rows_that_are_here(path):
    rows = ROOT / "benchmarks/results/nvidia-h200" / f"{path.stem.rpartition('-')[0]}.csv"
    assert origin_of(read_rows(rows)) in path.read_text(encoding="utf-8"), "draw it anew: python benchmarks/plot.py"


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_the_figure_of_the_readme_was_drawn_from_the_rows_that_are_here(ground):
    rows = read_rows(ROOT / "benchmarks/results/nvidia-h200/paper.csv")
    text = (ROOT / f"docs/figures/front-{ground}.svg").read_text("utf-8")
    assert origin_of(rows) in text, "draw it anew: python benchmarks/front_figure.py"
    assert f"docs/figures/front-{ground}.svg" in (ROOT / "README.md").read_text("utf-8")


def test_the_figure_of_the_readme_has_a_panel_a_pass_and_head_dim_and_a_line_a_library(tmp_path):
    script = runpy.run_path(str(ROOT / "benchmarks/front_figure.py"))
    rows = [row(name, s, d=d, dv=d, mask=mask, direction=direction)
            for name in ("tilewise", "sdpa_cudnn", "sdpa_math") for s in (2048, 1024) for d in (64, 128, 256)
            for mask in ("causal", "none") for direction in ("forward", "backward")]
    found = script["shown"](rows, 128, "backward")
    assert list(found) == ["sdpa_cudnn", "tilewise"]
    assert [(one.sq, one.d, one.mask) for one in found["tilewise"]] == [(1024, 128, "causal"), (2048, 128, "causal")]
    script["draw"](rows, tmp_path / "front.svg", "dark")
    assert panels(tmp_path / "front.svg") == 4
    assert "<!-- cuDNN -->" in (tmp_path / "front.svg").read_text("utf-8")


def test_the_figure_of_a_runs_standing_has_a_point_a_cell_and_its_sentence(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    points, titles = [], []
    scatter, title = Axes.scatter, Figure.suptitle
    monkeypatch.setattr(Axes, "scatter", lambda self, x, y, **style: (points.extend(zip(x, y, strict=True)),
                                                                      scatter(self, x, y, **style))[1])
    monkeypatch.setattr(Figure, "suptitle", lambda self, text, **style: (titles.append(text),
                                                                         title(self, text, **style))[1])
    assert draw_standing(grid_rows(), tmp_path / "run" / "standing.svg")
    assert points == [(4.0, 1), (4.0, 0), (4.0, 1), (4.0, 0)]
    assert " ".join(titles[0].split()) == closing_sentence(grid_rows())
    text = (tmp_path / "run" / "standing.svg").read_text(encoding="utf-8")
    assert origin_of(grid_rows()) in text


def test_nothing_compared_is_nothing_drawn(tmp_path):
    assert not draw_standing([row("tilewise")], tmp_path / "standing.svg")
    assert not list(tmp_path.iterdir())


def test_documents_show_figures():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert {path.name for path in FIGURES} == set(re.findall(r"\(figures/([a-z0-9-]+\.svg)\)", page))


def test_the_script_draws_from_the_csv_alone(tmp_path, monkeypatch, capsys):
    write_rows(tmp_path / "rows.csv", grid_rows())
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "rows.csv"), "--out", str(tmp_path), "--format", "png"])
    runpy.run_path(str(ROOT / "benchmarks/plot.py"), run_name="__main__")
    drawn = [tmp_path / name for name in ("rows-speed.png", "rows-memory.png")]
    assert capsys.readouterr().out.split() == [str(path) for path in drawn]
    assert all(path.exists() for path in drawn)


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
