"""Draw speed and memory against sequence length, from rows that `tilewise bench` wrote.

Usage: ``python benchmarks/plot.py FILE... --out docs/figures``.
"""

import argparse
from pathlib import Path

from tilewise.bench.plots import FORMATS, draw_figures
from tilewise.bench.rows import read_rows

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder of the figures")
    parser.add_argument("--format", default="svg", choices=FORMATS)
    given = parser.parse_args()
    for file in given.files:
        print(*draw_figures(read_rows(file), given.out, file.stem, given.format), sep="\n")
