"""Tell of each grid, pass and peer how many cells tilewise is ahead in, and by how much, from committed rows.

Usage: ``python benchmarks/standing.py benchmarks/results/nvidia-h200`` prints the table.
"""

import argparse
import math
from pathlib import Path

from tilewise.bench.providers import is_ours
from tilewise.bench.report import Comparison, comparisons
from tilewise.bench.rows import read_rows
from tilewise.bench.standing import CUDNN
from tilewise.errors import InvalidInput


def sides_of(path: Path) -> list[Comparison]:
    """Return the cells of a file that have a time of ours; none of a file that `tilewise bench` did not write."""
    try:
        rows = read_rows(path)
    except InvalidInput:
        return []
    return [side for side in comparisons(rows) if side.ours is not None]


def ratios(sides: list[Comparison], *peers: str) -> list[float]:
    """Return how many times ours is as fast as the fastest of these peers, in each cell that one of them has."""
    found = [[ratio for peer in peers if (ratio := side.speedup_over(peer)) is not None] for side in sides]
    return [min(of_cell) for of_cell in found if of_cell]


def mean(found: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, found)) / len(found))


def table(folder: Path) -> str:
    """Return the Markdown table of all files of a device."""
    lines = ["| grid | pass | peer | cells | ahead in | geometric mean | least |", "|---|---|---|---:|---:|---:|---:|"]
    for path in sorted(folder.glob("*.csv")):
        sides = sides_of(path)
        peers = dict.fromkeys(name for side in sides for name in side.rows if not is_ours(name) or name == CUDNN)
        for direction in dict.fromkeys(side.first.direction for side in sides):
            of_pass = [side for side in sides if side.first.direction == direction]
            for peer in peers:
                if found := ratios(of_pass, peer):
                    ahead = sum(ratio > 1 for ratio in found)
                    lines.append(f"| {path.stem} | {direction.replace('_', ' ')} | {peer} | {len(found)} | {ahead} | "
                                 f"{mean(found):.2f}× | {min(found):.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    print(table(parser.parse_args().folder))
