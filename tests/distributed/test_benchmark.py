"""benchmarks/context_parallel.py runs on CPU processes, and its rows are of right results."""

import csv
import importlib
import sys

import pytest
import torch

from distributed.conftest import ROOT


def test_the_benchmark_writes_a_row_for_each_call(workers, tmp_path):
    out = tmp_path / "rows.csv"
    workers.run(2, "distributed.behaviour", "benchmark", [
        "--device", "cpu", "--tokens", "32", "--heads", "4", "2", "--dim", "8", "--dtype", "float64",
        "--repetitions", "1", "--window", "9", "--schedules", "ring", "ulysses", "--commit", "0123", "--out", str(out)])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["mask"], row["direction"], row["schedule"]) for row in rows} == {
        (mask, direction, schedule) for mask in ("causal", "window", "documents")
        for direction in ("forward", "forward + backward") for schedule in ("ring", "ulysses")}
    assert len(rows) == 12
    for row in rows:
        assert float(row["largest_difference"]) < 1e-12
        assert float(row["median_ms"]) > 0
        assert float(row["ideal_ms"]) > 0
        assert (row["ranks"], row["head_ranks"], row["commit"], row["tokens_per_rank"]) == ("2", "", "0123", "32")
        assert (row["ideal"], row["queue"], row["repetitions"]) == ("whole / ranks", "1", "1")
        assert row["layout"] == ("zigzag" if row["mask"] == "causal" else "contiguous")


def test_one_cell_is_asked_for_by_flags_and_has_an_ideal_without_the_whole(workers, tmp_path):
    out = tmp_path / "rows.csv"
    workers.run(2, "distributed.behaviour", "benchmark", [
        "--device", "cpu", "--tokens", "32", "--heads", "4", "2", "--dim", "8", "--dtype", "float64", "--masks",
        "window", "--window", "9", "--passes", "both", "--schedules", "all_gather", "--repetitions", "4", "--seconds",
        "0", "--queue", "2", "--whole-tokens", "63", "--out", str(out)])
    with out.open() as file:
        (row,) = csv.DictReader(file)
    assert (row["schedule"], row["mask"], row["direction"]) == ("all_gather", "window", "forward + backward")
    assert (row["ideal"], row["queue"], row["repetitions"], row["largest_difference"]) == ("by pairs", "2", "3", "")
    assert float(row["share_of_ideal"]) == pytest.approx(float(row["ideal_ms"]) / float(row["median_ms"]), abs=2e-3)


def test_in_a_queue_all_backward_passes_come_behind_all_forward_passes():
    seen = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            seen.append("forward")
            return 2.0 * q

        @staticmethod
        def backward(ctx, dout):
            seen.append("backward")
            return 2.0 * dout, dout, dout

    step, one = script("context_parallel").step, torch.ones(3)
    out, *gradients = step(Doubled.apply, (one, one, one), 5.0 * one, count=3)
    assert seen == ["forward"] * 3 + ["backward"] * 3
    assert [tensor[0].item() for tensor in (out, *gradients)] == [2.0, 10.0, 5.0, 5.0]
    seen.clear()
    assert len(step(Doubled.apply, (one, one, one), None, count=2)) == 1
    assert seen == ["forward"] * 2


def test_cells_of_a_length_follow_one_another():
    module = script("context_parallel")
    options = module.parsed(["--tokens", "8", "16", "--masks", "causal", "window", "--passes", "both"])
    assert module.cells_of(options) == [module.Cell(mask, layout, tokens, True) for tokens in (8, 16)
                                        for mask, layout in (("causal", "zigzag"), ("window", "contiguous"))]


@pytest.mark.parametrize("length", [5, 24, 64])
@pytest.mark.parametrize("mask", ["causal", "window", "documents", "full"])
def test_pairs_are_those_that_a_mask_leaves_visible(mask, length):
    module = script("context_parallel")
    options = module.parsed(["--window", "9"])
    cell = module.Cell(mask, "zigzag", 16, False)
    visible = torch.ones(length, length, dtype=torch.bool)
    if mask != "full":
        visible = visible.tril()
    if mask == "window":
        visible = visible.triu(-8)
    if mask == "documents":
        ids = (torch.arange(length) + 4) // 8
        visible &= ids[:, None] == ids
    assert module.pairs_of(cell, length, options) == visible.sum()


def test_an_ideal_is_an_even_share_of_the_pairs_of_all_ranks():
    module = script("context_parallel")
    options = module.parsed(["--window", "9", "--whole-tokens", "64"])
    for mask in ("causal", "window", "documents", "full"):
        assert module.Ideal.of(module.Cell(mask, "zigzag", 16, False), options, 4) == module.Ideal(
            64, 1 / 4, "whole / ranks")
        cell = module.Cell(mask, "zigzag", 512, False)
        found = module.Ideal.of(cell, options, 4)
        assert found.how == "by pairs"
        assert found.tokens == (1024 if mask in ("causal", "full") else 512)
        pairs = [module.pairs_of(cell, length, options) for length in (2048, found.tokens)]
        assert found.times == pytest.approx(pairs[0] / 4 / pairs[1])
    assert found.times == 1.0  # of "full": as many pairs


def test_a_peer_that_takes_no_cell_has_rows_that_say_why(workers, tmp_path):
    out = tmp_path / "rows.csv"
    workers.run(2, "distributed.behaviour", "benchmark", [
        "--device", "cpu", "--tokens", "32", "--heads", "4", "2", "--dim", "8", "--passes", "forward", "--repetitions",
        "1", "--schedules", "ring", "--peers", *script("context_parallel_torch").PEERS, "--out", str(out)])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 5
    refused = {(row["mask"], row["note"]) for row in rows if row["schedule"].startswith("torch_")}
    assert refused == {("causal", "refused: has no kernel for CPUs: it takes those of CUDA alone"), *(
        (mask, f"refused: takes is_causal alone with its load balancing, and no mask: no {mask}")
        for mask in ("window", "documents"))}
    assert {row["median_ms"] for row in rows if row["schedule"] != "ring"} == {""}


def test_torch_shards_as_zigzag_does_and_gives_back_what_it_replaced(workers):
    assert workers.run(2, "distributed.behaviour", "shards_of_torch") == [(True, True, True, True)] * 2


def test_a_peer_is_timed_where_every_rank_finds_its_results_to_be_ours(workers):
    first, second = workers.run(2, "distributed.behaviour", "peers_checked")
    right = pytest.approx(5e-5, rel=1e-2)
    for found in (first, second):
        assert found["right"] == (False, right, "")
        assert found["repeated"] == (True, right, "heads of keys repeated")
        assert found["nan"] == (None, None, "differs from ours by nan")
        assert found["raises"] == (None, None, "RuntimeError: no such kernel")
    assert first["wrong"] == (None, None, "another rank refused")
    assert second["wrong"] == (None, None, "differs from ours by 1.0e+00")


def test_rows_are_not_added_to_older_ones_that_mean_something_else(tmp_path):
    path = written(tmp_path, [{"schedule": "ring", "ideal_ms": "1.0"}])
    before = path.read_text()
    with pytest.raises(SystemExit, match="has other columns"):
        script("context_parallel").write({"schedule": "ring"}, path)
    assert path.read_text() == before


def test_the_benchmark_takes_a_mesh_of_two_dims(workers, tmp_path):
    out = tmp_path / "rows.csv"
    workers.run((2, 2), "distributed.behaviour", "benchmark", [
        "--device", "cpu", "--tokens", "16", "--heads", "4", "2", "--dim", "8", "--dtype", "float64", "--masks",
        "causal", "--repetitions", "1", "--schedules", "ring", "--head-ranks", "2", "--out", str(out)])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["ranks"], row["head_ranks"], row["schedule"]) for row in rows] == [("4", "2", "ring")] * 2
    assert max(float(row["largest_difference"]) for row in rows) < 1e-12


def test_rows_become_tables(tmp_path):
    shape = {"mask": "causal", "layout": "zigzag", "tokens_per_rank": "64", "direction": "forward"}
    rows = [{"schedule": name, **shape, "median_ms": time, "ideal_ms": "1.0", "share_of_ideal": share}
            for name, time, share in (("ring", "1.25", "0.8"), ("ulysses", "2.0", "0.5"))]
    assert script("context_parallel").table(written(tmp_path, rows)).splitlines()[2:] == [
        "| causal, zigzag, 64 tokens a rank, forward | 1.00 ms | 1.25 ms, 0.80 | 2.00 ms, 0.50 |"]
    queued = [row | {"queue": queue} for row, queue in zip(rows, ("1", "4"), strict=True)]
    refused = [rows[0] | {"schedule": "other", "median_ms": "", "share_of_ideal": ""}]
    assert script("context_parallel").table_of(queued + refused).splitlines()[2:] == [
        "| causal, zigzag, 64 tokens a rank, forward | 1.00 ms | 1.25 ms, 0.80 |  |",
        "| causal, zigzag, 64 tokens a rank, forward, 4 behind one another | 1.00 ms |  | 2.00 ms, 0.50 |"]
    rows = [{"schedule": "ring", **shape, "ranks": "4", "slowest_ms": "2.0", "balance": "0.9", "pairs_balance": "1.0",
             "overhead": "0.25"}]
    assert script("context_parallel_balance").table(written(tmp_path, rows)).splitlines()[2:] == [
        "| ring, causal, zigzag, forward | 4 of 64 | 2.00 ms | 0.90 | 1.00 | 25 % |"]


def script(name):
    """Import a script of benchmarks/, as the docs' tables do."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def written(folder, rows):
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path
