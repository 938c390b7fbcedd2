"""Tables fit a terminal of 80 columns, and break no word."""

import csv
from dataclasses import fields
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from tilewise.bench.rows import read_rows
from tilewise.bench.torture_rows import TortureRow
from tilewise.cli import render, session
from tilewise.cli.widths import print_fitted, print_split
from tilewise.compile_ahead import GPUS, Kernel, Report
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.kernels.triton.config import ForwardConfig
from tilewise.tuning.table import Bucket, make_row

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/nvidia-h200"


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def assert_fits(output, *, columns=80):
    lines = output.splitlines()
    table = [line for line in lines if line[:1] in "┏┃┡│├└"]
    assert table
    assert max(map(cell_len, table)) <= columns
    assert not [line for line in table if "…" in line]


@pytest.mark.parametrize("arguments", [
    ("info",), ("explain",), ("explain", "--dtype", "bfloat16", "--mask", "causal & window:127,0"),
    ("check", "--sq", 24, "--d", 8, "--hq", 2, "--device", "cpu", "--verbose"),
    ("check", "--case", "gqa_causal_odd_lengths", "--dtype", "float32", "--device", "cpu"),
    ("fuzz", "--count", 2, "--backend", "reference", "--device", "cpu", "--size", "tiny"),
    ("bench", "--sq", 24, "--hq", 2, "--d", 8, "--device", "cpu", "--no-plots", "--out", "{}"),
    ("bench", "--host", "--providers", "tilewise,sdpa_flash", "--device", "cpu", "--out", "{}"),
], ids=lambda arguments: " ".join(map(str, arguments[:2])))
def test_a_commands_tables_fit(run, tmp_path, monkeypatch, arguments):
    monkeypatch.setattr("tilewise.bench.host._CALLS", 10)
    finished = run(*(str(word).format(tmp_path) for word in arguments))
    assert finished.status == 0
    assert_fits(finished.output)


@pytest.mark.parametrize("grid", ["paper", "options", "packed", "decode"])
def test_the_table_of_a_grid_fits_and_says_what_it_leaves_out(capsys, grid):
    render.bench(session.Outcome(rows=read_rows(RESULTS / f"{grid}.csv")), {})
    output = capsys.readouterr().out
    assert_fits(output)
    assert "left out, as 80 columns have no room for it: " in " ".join(output.split())


def test_the_table_of_the_torture_suite_fits_in_parts(capsys):
    known = {field.name for field in fields(TortureRow)}
    with (RESULTS / "torture.csv").open(encoding="utf-8") as file:
        rows = [TortureRow(**{name: text for name, text in record.items() if name in known})
                for record in csv.DictReader(file)]
    render.torture(rows, {})
    output = capsys.readouterr().out
    assert_fits(output)
    for name in {row.implementation for row in rows}:
        assert name in output


@pytest.mark.parametrize("kernel", ["forward", "hopper_forward"])
def test_the_table_of_tiles_fits(capsys, kernel):
    config = ForwardConfig(64, 64, 4, 3) if kernel == "forward" else HopperForwardConfig(block_n=128, consumers=3,
                                                                                          ping_pong=True)
    row = make_row(Bucket(128, 2, True, 8192), config, config, ms=12.345, heuristic_ms=14.567, candidates=40)
    render.tuning(session.TuningOutcome(rows={f"{kernel}.16bit.json": [row]}))
    assert_fits(capsys.readouterr().out)


def test_the_table_of_compiled_kernels_fits(capsys):
    calls = ("b1 h32/8 s8192 d128 bfloat16 causal", "b1 h32/8 s4096 d128 bfloat16 causal")
    render.compilation(Report(GPUS["h200"], tuple(
        Kernel(name, calls, Path("/caches/triton/KEY"), cached=False, seconds=12.3)
        for name in ("attention_forward_kernel", "attention_backward_dkdv_kernel"))))
    assert_fits(capsys.readouterr().out)


def test_without_a_width_a_file_gets_every_column(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    render.bench(session.Outcome(rows=read_rows(RESULTS / "paper.csv")[:8]), {})
    output = capsys.readouterr().out
    for header in ("20–80 %", "peak MiB", "max error", "mean error"):
        assert header in output
    assert "left out" not in output


def printed(print_table, *more, width):
    table = Table("name", "long text", "number", title="title")
    table.add_row("  indented_name", "several words that can go to lines of their own", "1.25e-06")
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        print_table(console, table, *more)
    return captured.get()


@pytest.mark.parametrize("width", [40, 50, 60, 100])
def test_columns_share_the_room_and_keep_words_whole(width):
    output = printed(print_fitted, width=width)
    assert_fits(output, columns=width)
    for word in ("indented_name", "several", "1.25e-06"):
        assert word in output


def test_a_column_is_left_out_only_where_it_has_no_room():
    assert "number" in printed(print_fitted, ["number"], width=60)
    narrow = printed(print_fitted, ["number"], width=30)
    assert "1.25e-06" not in narrow
    assert "left out, as 30 columns have no room for it: number; --json has all" in " ".join(narrow.split())


def test_a_table_that_is_split_has_its_first_column_in_each_part():
    output = printed(print_split, width=32)
    assert output.count("indented_name") == 2
    assert output.count("title") == 1
    assert "1.25e-06" in output
