"""How tilewise stands beside the fastest other library of each cell: a line for each pass of training, and decoding.

Usage: ``python benchmarks/headline.py benchmarks/results/nvidia-h200`` prints the table.
"""

import argparse
import statistics
from pathlib import Path

from tilewise.bench.plots import label
from tilewise.bench.rows import read_rows
from tilewise.bench.standing import Standing, standings

TRAINING = ("paper", "gqa", "seeds")
LINES = {"training, forward": (TRAINING, "forward"), "training, backward": (TRAINING, "backward"),
         "decoding": (("decode",), "forward")}
ON_A_GPU = {"sdpa_flash": "FlashAttention-2 (torch SDPA)"}


def cells(folder: Path, grids: tuple[str, ...], direction: str) -> list[Standing]:
    """Return the cells of these grids and this pass in which tilewise and another library have a time."""
    return [one for grid in grids for one in standings(read_rows(folder / f"{grid}.csv"))
            if one.ours.direction == direction]


def peers(folder: Path, grids: tuple[str, ...], direction: str) -> list[str]:
    """Return who was timed there beside tilewise, in words."""
    names = dict.fromkeys(row.provider for grid in grids for row in read_rows(folder / f"{grid}.csv")
                          if row.direction == direction and not row.provider.startswith(("tilewise", "copy")))
    bare = [name.removesuffix("_folded") for name in names]
    return list(dict.fromkeys(ON_A_GPU.get(name, label(name)) for name in bare))


def table(folder: Path) -> str:
    """Return the Markdown table of a device."""
    lines = ["| | cells | ahead in | geometric mean | least | timed beside it |", "|---|---:|---:|---:|---:|---|"]
    for name, which in LINES.items():
        ratios = [one.ratio for one in cells(folder, *which)]
        lines.append(f"| {name} | {len(ratios)} | {sum(ratio > 1 for ratio in ratios)} | "
                     f"**{statistics.geometric_mean(ratios):.2f}×** | {min(ratios):.2f}× | "
                     f"{', '.join(peers(folder, *which))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    print(table(parser.parse_args().folder))
