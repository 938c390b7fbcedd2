"""The table of benchmarks/ablation.py: axes of today and those that went."""

import csv
import sys
from dataclasses import fields

import pytest

from compiled.compile_process import ROOT

pytest.importorskip("triton")


@pytest.fixture
def ablation(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield pytest.importorskip("ablation")
    for name in ("ablation", "triton_versions"):
        sys.modules.pop(name, None)


def written(ablation, path, ratios):
    """Write rows of the backward pass: (case, axis, ratio)."""
    names = [field.name for field in fields(ablation.Row)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for case, axis, ratio in ratios:
            writer.writerow(dict.fromkeys(names, "") | {
                "grid": "paper", "case": case, "direction": "backward", "axis": axis, "ratio": ratio})
    return path


def test_rows_of_axes_that_went_stay_in_the_table(ablation, tmp_path):
    path = written(ablation, tmp_path / "rows.csv", [
        ("a", "none", 1.0), ("a", "code_padding", 1.21), ("a", "augmented_k", 1.5), ("b", "none", 1.0),
        ("b", "augmented_k", 1.5)])
    assert len(ablation.AXES | ablation.ALWAYS | ablation.REMOVED) == sum(
        map(len, (ablation.AXES, ablation.ALWAYS, ablation.REMOVED)))
    assert ablation.table(path).splitlines()[2:] == [
        "| the tensor cores subtract lse and delta | backward | 2 | 1.500 | 1.500 | 1.500 | 1.5000 |  |",
        "| padding in front of each warpgroup's code | backward | 1 | 1.210 | 1.210 | 1.210 | 1.1000 | removed |"]


def test_an_axis_that_never_was_is_no_row_of_the_table(ablation, tmp_path):
    path = written(ablation, tmp_path / "rows.csv", [("a", "none", 1.0), ("a", "luck", 1.5)])
    with pytest.raises(ValueError, match=r"^rows\.csv has rows without luck, which nothing here describes$"):
        ablation.table(path)
