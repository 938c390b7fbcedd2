"""List the committed cells in which another library is faster than tilewise.

Usage: ``python benchmarks/behind.py benchmarks/results/nvidia-h200`` prints the table.
"""

import argparse
from pathlib import Path

from tilewise.bench.plots import label
from tilewise.bench.report import comparisons, describe
from tilewise.bench.rows import Row, read_rows
from tilewise.bench.standing import fastest_peer
from tilewise.errors import InvalidInput


def compared(path: Path) -> list[tuple[Row, Row, float]]:
    """Return our row, the fastest peer's, and how many times ours is as fast, of each cell of a file that has both.

    None of a file that `tilewise bench` did not write.
    """
    try:
        sides = comparisons(read_rows(path))
    except InvalidInput:
        return []
    found = []
    for side in sides:
        fastest = fastest_peer(side)
        if side.ours is not None and fastest is not None:
            found.append((side.ours, fastest, side.speedup_over(fastest.provider) or 0.0))
    return found


def table(folder: Path) -> str:
    """Return the Markdown table of all files of a device."""
    lines = ["| grid | cell | pass | who is faster | tilewise is |", "|---|---|---|---|---:|"]
    for path in sorted(folder.glob("*.csv")):
        for ours, peer, ratio in sorted(compared(path), key=lambda found: found[2]):
            if ratio >= 1:
                break
            name = "" if ours.provider == "tilewise" else f" (`{ours.provider}`)"
            lines.append(f"| {path.stem} | {describe(ours)}{name} | {ours.direction.replace('_', ' ')} | "
                         f"{label(peer.provider)} | {ratio:.3f}× as fast |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    print(table(parser.parse_args().folder))
