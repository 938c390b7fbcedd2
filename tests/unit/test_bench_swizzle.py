"""benchmarks/swizzle.py: the sizes that it times, and its table."""

import csv
import sys
from dataclasses import fields

import pytest

from compiled.compile_process import ROOT
from tilewise.masks import causal

sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    import swizzle
finally:
    sys.path.pop(0)


@pytest.mark.parametrize("keys", [512, 4096])
def test_a_size_is_that_of_every_call(keys):
    calls = pytest.importorskip("emulation.hopper_calls", reason="Triton is not installed")
    schedules = pytest.importorskip("tilewise.tuning.schedules_hopper")
    problem = calls.problem_of(keys, keys, causal("top_left"), 64, heads=(512, 512))
    with swizzle.of_size(8):
        assert schedules.heads_per_swizzle(problem) == 8 * 2**20 // (keys * 64 * 2 * 2)
    assert schedules.heads_per_swizzle(problem) > 8 * 2**20 // (keys * 64 * 2 * 2)


def test_the_table_holds_each_size_against_that_of_longer_calls(tmp_path):
    path = tmp_path / "swizzle.csv"
    columns = [field.name for field in fields(swizzle.Row)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for case, d, times in (("narrow", 64, (90, 80, 100)), ("wide", 128, (50, 40, 80))):
            for size, us in zip((8, 24, 32), times, strict=True):
                writer.writerow(dict.fromkeys(columns, "x") | {
                    "case": case, "dtype": "bfloat16", "d": d, "keys": 512, "swizzle_mib": size, "us_p50": us})
    assert swizzle.table(path).splitlines() == [
        "| keys | head dim | dtype | 8 MiB | 24 MiB | 32 MiB |",
        "|---:|---:|---|---:|---:|---:|",
        "| 512 | 64 | bfloat16 | 1.111 | 1.250 | 1.000 |",
        "| 512 | 128 | bfloat16 | 0.800 | 1.000 | 0.500 |", "", "x, torch x, Triton x, commit x."]
