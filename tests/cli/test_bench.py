"""``tilewise bench``."""

import re
import sys
from dataclasses import replace

import pytest
import torch

from tilewise.backends.reference import ReferenceBackend
from tilewise.bench import cached
from tilewise.bench.grids import GRIDS
from tilewise.bench.rows import read_rows
from tilewise.bench.shapes import CAUSAL, FULL, packed_case, priced, shape_case
from tilewise.masks import causal

SHAPE = ("bench", "--sq", 48, "--hq", 2, "--d", 16, "--mask", "causal", "--device", "cpu")


def test_it_writes_rows_table_and_figures_and_prints_them(run, tmp_path):
    finished = run(*SHAPE, "--providers", "tilewise:reference,naive,sdpa_flash", "--out", tmp_path)
    assert finished.status == 0
    rows = read_rows(tmp_path / "flags.csv")
    assert {(row.provider, row.direction) for row in rows} == {
        (provider, direction) for provider in ("tilewise:reference", "naive", "sdpa_flash")
        for direction in ("forward", "backward")}
    assert all(row.status == "ok" and row.ms_p50 > 0 and row.max_error < 1e-4 for row in rows)
    assert "naive" in (tmp_path / "flags.md").read_text(encoding="utf-8")
    last = " ".join(finished.output.split())
    assert re.search(r"On .*, for these shapes: tilewise:reference has [\d.]+× the speed of the fastest other "
                     r"implementation \(geometric mean\), ahead in [0-2] of 2 cells[^×]*(×[^×]*)?\.$", last)
    for name in ("flags.csv", "flags.md", "flags-speed.svg", "flags-memory.svg", "standing.svg"):
        assert (tmp_path / name).stat().st_size > 0
        assert name in finished.output
    assert "peak MiB" in finished.output
    assert "faster than naive" in finished.output


@pytest.mark.parametrize("places", [("--commit", "0123abc", "--out", "{}"), ("--commit=0123abc", "--out={}")])
def test_rows_carry_the_stated_commit_and_the_command_without_what_shapes_no_number(run, tmp_path, monkeypatch, places):
    arguments = [*map(str, SHAPE), "--providers", "naive", *(word.format(tmp_path) for word in places), "--no-plots"]
    monkeypatch.setattr(sys, "argv", ["tilewise", *arguments])
    assert run(*arguments).status == 0
    for row in read_rows(tmp_path / "flags.csv"):
        assert row.commit == "0123abc"
        assert row.command == ("tilewise bench --sq 48 --hq 2 --d 16 --mask causal --device cpu --providers naive "
                               "--no-plots")


def test_without_a_stated_commit_rows_carry_what_git_says(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tilewise.bench.provenance.commit", lambda: "fedcba987654+")
    run(*SHAPE, "--providers", "naive", "--no-plots", "--out", tmp_path)
    assert {row.commit for row in read_rows(tmp_path / "flags.csv")} == {"fedcba987654+"}


@pytest.mark.parametrize("commit", ["main", "0123AB", "0123abc ", "", "0123ab"])
def test_a_commit_that_is_no_hash_exits_with_2(run, tmp_path, commit):
    finished = run(*SHAPE, "--providers", "naive", "--commit", commit, "--out", tmp_path)
    assert finished.status == 2
    assert f"commit is {commit!r}; allowed are 7 to 40 lower-case hexadecimal digits" in finished.errors
    assert not list(tmp_path.iterdir())


def test_json_holds_the_rows_and_nothing_else_is_on_standard_output(run, tmp_path):
    finished = run(*SHAPE, "--providers", "naive,flash_attn3", "--direction", "forward", "--no-plots", "--out",
                   tmp_path, "--json")
    report = finished.json
    assert [(row["provider"], row["direction"], row["status"]) for row in report["rows"]] == [
        ("naive", "forward", "ok")]
    assert "flash_attn3" in report["absent"]
    assert report["standing"].startswith("No cell has a time of tilewise and of another implementation")
    assert report["left"] == []


def test_a_wrong_backend_of_ours_is_not_timed_and_exits_with_1(run, tmp_path, monkeypatch):
    forward = ReferenceBackend.forward
    monkeypatch.setattr(ReferenceBackend, "forward",
                        lambda self, *given: (forward(self, *given)[0] * 1.1, forward(self, *given)[1]))
    finished = run(*SHAPE, "--providers", "tilewise:reference,naive", "--direction", "forward", "--out", tmp_path,
                   "--json")
    assert finished.status == 1
    statuses = {row["provider"]: (row["status"], row["ms_p50"] is None) for row in finished.json["rows"]}
    assert statuses == {"tilewise:reference": ("wrong", True), "naive": ("ok", False)}


def test_a_spent_budget_says_what_is_left(run, tmp_path):
    finished = run("bench", "--grid", "cpu", "--budget", 0.001, "--providers", "sdpa_flash", "--device", "cpu",
                   "--out", tmp_path, "--json")
    assert finished.status == 0
    assert {row["case"] for row in finished.json["rows"]} == {"b1_h8_s512_d64_causal"}
    assert len(finished.json["left"]) == 9
    assert finished.json["left"][-1] == "b1_h8_s4096_d64_none float32"


def test_the_options_grid_gives_a_row_an_option_and_a_table_of_prices(run, tmp_path, monkeypatch):
    small = shape_case(1, (2, 2), (24, 24), (8, 8), CAUSAL)
    monkeypatch.setitem(GRIDS, "options", lambda: [(case, torch.float32, learned) for case, learned in priced(small)])
    finished = run("bench", "--grid", "options", "--providers", "tilewise:reference,sdpa_math", "--device", "cpu",
                   "--no-plots", "--out", tmp_path)
    assert finished.status == 0
    rows = read_rows(tmp_path / "options.csv")
    assert len(rows) == 2 * 2 * 9
    assert all(row.status == "ok" for row in rows if row.provider == "tilewise:reference")
    taken = [row.options for row in rows if row.provider == "sdpa_math" and row.status == "ok"]
    assert taken[::2] == ["", "bias 1hqk", "bias 1hqk with gradient", "dropout 0.1", "boolean mask 11qk",
                          "documents mixed"]
    assert "| case | option | pass | tilewise | price | sdpa_math |" in (tmp_path / "options.md").read_text("utf-8")
    assert "causal, bias 1hqk with gradient" in finished.output
    assert "takes no softcap" in finished.output


def test_the_packed_grid_gives_rows_of_packed_sequences_and_no_prices(run, tmp_path, monkeypatch):
    small = packed_case((2, 1), (9, 15), 8, causal("top_left"))
    monkeypatch.setitem(GRIDS, "packed", lambda: [(small, torch.float32)])
    finished = run("bench", "--grid", "packed", "--device", "cpu", "--out", tmp_path)
    assert finished.status == 0
    rows = read_rows(tmp_path / "packed.csv")
    assert {(row.provider, row.options, row.mask, row.status) for row in rows} == {
        (name, "packed sequences of 24 tokens", "causal:top_left", "ok") for name in ("tilewise", "tilewise:reference")}
    assert "price" not in (tmp_path / "packed.md").read_text("utf-8")
    assert "not timed here: naive: takes no packed sequences" in finished.output
    assert (tmp_path / "packed-speed.svg").stat().st_size > 0


def small_families():
    """A family of a forward pass with an option, one of backward passes, and one of the host."""
    small = shape_case(1, (2, 1), (24, 24), (8, 8), CAUSAL)
    named = [replace(small, name=f"{family}/{small.name}", **options)
             for family, options in (("softcap-d128", {"softcap": 50.0}), ("grouped-heads", {}), ("tiny", {}))]
    return [(named[0], torch.float32, (), False, ("forward",), False),
            (named[1], torch.float32, (), False, ("backward",), False),
            (named[2], torch.float32, (), False, ("backward",), True)]


FAMILIES_RUN = ("bench", "--grid", "families", "--providers", "tilewise:reference,sdpa_math", "--device", "cpu")


def test_the_families_grid_gives_each_family_rows_of_its_own_passes(run, tmp_path, monkeypatch):
    monkeypatch.setitem(GRIDS, "families", small_families)
    monkeypatch.setattr("tilewise.bench.host._CALLS", 2)
    finished = run(*FAMILIES_RUN, "--out", tmp_path)
    assert finished.status == 0
    rows = [row for row in read_rows(tmp_path / "families.csv") if row.provider == "tilewise:reference"]
    assert [(row.case.partition("/")[0], row.direction, row.regime, row.options, row.status) for row in rows] == [
        ("softcap-d128", "forward", "turns", "softcap 50", "ok"), ("grouped-heads", "backward", "turns", "", "ok"),
        *(("tiny", direction, "host", "", "ok") for direction in ("forward_no_grad", "forward", "forward_backward"))]
    text = (tmp_path / "families.md").read_text("utf-8")
    assert "Milliseconds a call" in text
    assert "Microseconds of the host" in text
    assert "price" not in text
    assert (tmp_path / "families-speed.svg").stat().st_size > 0


@pytest.mark.parametrize(("arguments", "families"), [
    (("--family", "tiny,softcap-d128"), {"softcap-d128", "tiny"}), (("--direction", "forward"), {"softcap-d128"}),
    (("--family", "grouped-heads", "--direction", "backward"), {"grouped-heads"})])
def test_a_run_of_families_can_be_split(run, tmp_path, monkeypatch, arguments, families):
    monkeypatch.setitem(GRIDS, "families", small_families)
    monkeypatch.setattr("tilewise.bench.host._CALLS", 2)
    finished = run(*FAMILIES_RUN, *arguments, "--no-plots", "--out", tmp_path, "--json")
    assert {row["case"].partition("/")[0] for row in finished.json["rows"]} == families


@pytest.mark.parametrize(("arguments", "message"), [
    (("--family", "softcap"), "family is 'softcap'; allowed are softcap-d128, softcap-d256, short-window"),
    (("--grid", "gqa", "--family", "bias"),
     "--family is 'bias' without --grid families, which has them; allowed are both, or neither."),
    (("--grid", "families", "--family", "bias", "--direction", "forward"),
     "no case of the grid is left by --seqs, --dims, --family and --direction"),
    (("--sq", 64, "--family", "bias"), "--family is given beside --sq, which is one shape"),
    (("--host", "--family", "bias"), "--family is given beside --host")])
def test_families_that_cannot_be_had_exit_with_2(run, tmp_path, arguments, message):
    finished = run("bench", *arguments, "--device", "cpu", "--out", tmp_path)
    assert finished.status == 2
    assert message in " ".join(finished.errors.split())


def test_the_decode_grid_gives_rows_beside_a_copys_and_no_figures(run, tmp_path, monkeypatch):
    small = shape_case(2, (4, 2), (1, 512), (8, 8), FULL, "bshd")
    monkeypatch.setitem(GRIDS, "decode", lambda: [(small, torch.float32, (), True)])
    monkeypatch.setitem(cached._COPIED, "cpu", 2**16)
    finished = run("bench", "--grid", "decode", "--device", "cpu", "--out", tmp_path)
    assert finished.status == 0
    rows = {row.provider: row for row in read_rows(tmp_path / "decode.csv")}
    assert {"tilewise", "tilewise:reference", "tilewise:pages256", "tilewise:pages16", "tilewise:deterministic",
            "naive", "sdpa_math", "sdpa_flash", "sdpa_flash_folded", "copy"} <= set(rows)
    assert {(row.status, row.regime, row.direction) for row in rows.values()} == {("ok", "cold", "forward")}
    assert "TB/s, of ours what it is of a copy's" in (tmp_path / "decode.md").read_text("utf-8")
    assert "not timed here: tilewise:cudnn: does not decode; backend='triton' and 'reference' do" in finished.output
    assert [path.name for path in tmp_path.glob("*.svg")] == ["standing.svg"]


def test_a_provider_that_was_asked_for_by_name_has_its_rows_even_if_it_takes_nothing(run, tmp_path):
    finished = run("bench", "--sq", 16, "--mask", "window:3,3", "--providers", "sdpa_flash", "--device", "cpu",
                   "--no-plots", "--out", tmp_path, "--json")
    assert {row["status"] for row in finished.json["rows"]} == {"refused"}


def test_the_host_mode_gives_three_calls_a_provider(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tilewise.bench.host._CALLS", 10)
    finished = run("bench", "--host", "--providers", "tilewise,sdpa_flash", "--device", "cpu", "--out", tmp_path,
                   "--json")
    assert [(row["provider"], row["direction"]) for row in finished.json["rows"]] == [
        (provider, direction) for provider in ("tilewise", "sdpa_flash")
        for direction in ("forward_no_grad", "forward", "forward_backward")]
    assert all(row["host_us"] > 0 for row in finished.json["rows"])
