"""benchmarks/context_parallel.py runs on CPU processes, and its rows are of right results."""

import csv


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
