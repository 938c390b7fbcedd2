"""Rows and their CSV files."""

from dataclasses import replace

import pytest

from tilewise.bench.rows import latest, read_rows, write_rows
from tilewise.errors import InvalidInput
from unit.bench_rows import grid_rows, row


def test_rows_survive_the_round_trip_through_csv(tmp_path):
    rows = [*grid_rows(), row(options="bias 1hqk, softcap 30"),
            row(status="wrong", reason='commas, "quotes"', ms_p20=None, ms_p50=None, ms_p80=None, samples=None,
                tflops=None, peak_mib=None, max_error=float("inf"))]
    write_rows(tmp_path / "deep" / "rows.csv", rows)
    assert read_rows(tmp_path / "deep" / "rows.csv") == rows


def test_a_file_with_other_columns_is_refused_by_name(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("grid,case\ncpu,a\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"other\.csv.*ms_p50"):
        read_rows(path)


def test_files_from_before_rows_had_options_are_read_as_having_none(tmp_path):
    path = tmp_path / "rows.csv"
    write_rows(path, grid_rows())
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    place = header.split(",").index("options")
    old = [",".join(value for index, value in enumerate(line.split(",")) if index != place)
           for line in (header, *lines)]
    path.write_text("\n".join(old) + "\n", encoding="utf-8")
    assert read_rows(path) == grid_rows()
    path.write_text("\n".join(old).replace("ms_p50", "ms"), encoding="utf-8")
    with pytest.raises(InvalidInput, match="columns ms, ms_p50"):
        read_rows(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(InvalidInput, match=r"nothing\.csv"):
        read_rows(tmp_path / "nothing.csv")


def test_the_newest_of_two_measurements_of_the_same_thing_counts():
    old = row(date="2026-01-01T00:00:00Z")
    new = replace(old, date="2026-02-01T00:00:00Z", ms_p50=1.0)
    assert latest([new, old]) == [new]
    assert latest([old, new]) == [new]
