"""benchmarks/context_parallel.py runs on CPU processes, and its rows are of right results."""

import csv
import importlib
import sys

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
