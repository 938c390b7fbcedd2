"""How much of L2 the heads that the forward kernel schedules together should take, in causal calls with few keys.

    PYTHONPATH=src python benchmarks/swizzle.py measure --out swizzle.csv
    python benchmarks/swizzle.py table swizzle.csv

One process launches all sizes on the same tensors, in turn, as replays of CUDA graphs; ``table`` prints speeds relative
to what longer calls of the same head dim take (tilewise.tuning.schedules_hopper).
"""

import argparse
import csv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tilewise.tuning import schedules_hopper

GRIDS, MOST_KEYS = ("paper", "seeds"), 1024
SIZES = (4, 8, 12, 16, 24, 32)  # MiB


@dataclass(frozen=True)
class Row:
    """A causal call with heads of so many MiB of keys and values scheduled together."""

    case: str
    dtype: str
    d: int
    keys: int
    swizzle_mib: int
    us_p50: float
    device_name: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str


def measure(out: Path, commit: str | None) -> None:
    """Time every size in every call; write the rows."""
    from triton_versions import captured, drawn_tensors, timed

    from tilewise import attention
    from tilewise.bench.grids import grid_cells
    from tilewise.bench.provenance import provenance
    from tilewise.support.caches import clear_caches

    origin = provenance(torch.device("cuda", 0), "", commit)
    rows: list[Row] = []
    for cell in grid_cells(GRIDS):
        case = cell.case
        if case.sk > MOST_KEYS or case.mask.right != 0:
            continue
        q, k, v, _ = drawn_tensors(cell)
        graphs = {}
        for size in SIZES:
            with of_size(size):
                clear_caches()
                graphs[str(size)] = captured(lambda: attention(q, k, v, mask=case.mask))  # noqa: B023
        clear_caches()
        rows += [Row(case.name, str(cell.dtype).removeprefix("torch."), case.d, case.sk, int(size), round(ms * 1e3, 2),
                     origin.device_name, origin.driver, origin.torch, origin.triton, origin.commit, origin.date)
                 for size, ms in timed(graphs).items()]
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    print(table(out))


def of_size(mib: int) -> Any:
    """Schedule heads of so many MiB together, whatever the call."""
    return patch.multiple(schedules_hopper, SWIZZLE_BYTES={256: mib * 2**20}, FEW_KEYS=-1)


def table(path: Path) -> str:
    """Return the rows as Markdown: how many times as fast each size is as that of longer calls."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    sizes = list(dict.fromkeys(row["swizzle_mib"] for row in rows))
    lines = [f"| keys | head dim | dtype | {' | '.join(f'{size} MiB' for size in sizes)} |",
             "|---:|---:|---|" + "---:|" * len(sizes)]
    for case in dict.fromkeys(row["case"] for row in rows):
        own = {row["swizzle_mib"]: row for row in rows if row["case"] == case}
        first = next(iter(own.values()))
        longer = schedules_hopper.SWIZZLE_BYTES[int(first["d"])] // 2**20
        base = float(own[str(longer)]["us_p50"])
        ratios = " | ".join(f"{base / float(own[size]['us_p50']):.3f}" for size in sizes)
        lines.append(f"| {first['keys']} | {first['d']} | {first['dtype']} | {ratios} |")
    made_by = dict.fromkeys((row["device_name"], row["torch"], row["triton"], row["commit"]) for row in rows)
    return "\n".join([*lines, "", "; ".join(f"{device}, torch {torch}, Triton {triton}, commit {commit}"
                                           for device, torch, triton, commit in made_by) + "."])


def main() -> None:
    """Measure, or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, default=Path("swizzle.csv"))
    measuring.add_argument("--commit")
    commands.add_parser("table").add_argument("rows", type=Path)
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.out, given.commit)
    else:
        print(table(given.rows))


if __name__ == "__main__":
    main()
