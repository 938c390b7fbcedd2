"""Tell of each family of `tilewise bench --grid families` how tilewise stands beside the fastest other library.

Usage: ``python benchmarks/families.py benchmarks/results/nvidia-h200/families.csv`` prints the section.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from tilewise.bench.families import FAMILIES, Family, family_of
from tilewise.bench.plots import label
from tilewise.bench.providers import is_ours
from tilewise.bench.report import NOT_MEASURED, Comparison, caption, comparisons, describe
from tilewise.bench.rows import Row, read_rows
from tilewise.bench.standing import Standing, fastest_peer

_SAID = (
    "Kinds of calls in which another library was ahead of tilewise on an H200, in bfloat16 and float16 "
    "([which they are](benchmarks.md#what-the-grids-time)): how many times tilewise is as fast as the fastest other "
    "library of each cell, as a geometric mean and in the least favourable cell. 5 of 6 cells: one has no time of "
    "tilewise, or of no other library.")
_COLUMNS = ("family", "pass", "cells", "geometric mean", "least", "least favourable cell", "fastest there")


def table(path: Path) -> str:
    """Return the section of a file of rows, or nothing where there is no such file yet."""
    if not path.is_file():
        return ""
    rows = read_rows(path)
    lines = ["## By family", "", f"{_SAID} {_timed_beside(rows)}", "", caption(rows), "",
             f"| {' | '.join(_COLUMNS)} |", "|---|---|---:|---:|---:|---|---|"]
    lines += [line_of(family, direction, rows) for family in FAMILIES.values() for direction in family.passes]
    return "\n".join(lines)


def _timed_beside(rows: Sequence[Row]) -> str:
    """Say which other libraries have a time in some cell."""
    names = dict.fromkeys(label(row.provider) for row in rows if row.ms_p50 is not None and not is_ours(row.provider))
    return f"Timed beside tilewise: {', '.join(names) or 'nothing'}."


def line_of(family: Family, direction: str, rows: Sequence[Row]) -> str:
    """Return the line of one pass of a family."""
    sides = comparisons(row for row in rows if family_of(row.case) == family.name and row.direction == direction)
    found = [standing for side in sides if (standing := standing_of(side)) is not None]
    start = f"| {family.name} | {direction.replace('_', ' ')} |"
    if not found:
        return f"{start} {f'0 of {len(sides)}' if sides else NOT_MEASURED}{f' | {NOT_MEASURED}' * 4} |"
    cells = f"{len(found)}" if len(found) == len(sides) else f"{len(found)} of {len(sides)}"
    mean, least = statistics.geometric_mean(one.ratio for one in found), min(found, key=lambda one: one.ratio)
    return (f"{start} {cells} | {mean:.3f} | {least.ratio:.3f} | {describe(least.ours)} | "
            f"{label(least.peer.provider)} |")


def standing_of(side: Comparison) -> Standing | None:
    """Return how tilewise stands in a cell, if it and another library have a time."""
    peer = fastest_peer(side)
    return None if side.ours is None or peer is None else Standing(side.ours, peer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    print(table(parser.parse_args().path))
