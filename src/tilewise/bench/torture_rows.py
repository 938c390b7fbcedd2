"""A result of the torture suite as a flat row, with where and with what it came to be, and files of them as CSV."""

import csv
import importlib.metadata
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tilewise.bench.provenance import Provenance
from tilewise.testing.torture import Result

# The distributions that peers come with; torch's own have torch's version, which every row tells.
_DISTRIBUTIONS = {"flash_attn2": "flash-attn", "flash_attn3": "flash-attn-3", "flash_attn3_fwd": "fa3-fwd",
                  "flash_attn4": "flash-attn-4"}


@dataclass(frozen=True)
class TortureRow:
    """One check of one implementation in one dtype.

    Attributes:
        group, check, issue: those of the check.
        version: of the implementation's own package, where it is neither torch nor this one and tells it.
        status: pass, fail or n/a.
        sentence: what failed, or why it does not apply.
        seconds: that the check took, float64 included.
    """

    group: str
    check: str
    implementation: str
    version: str
    dtype: str
    status: str
    sentence: str
    issue: str
    seconds: str
    device_name: str
    driver: str
    torch: str
    triton: str
    python: str
    tilewise: str
    commit: str
    date: str
    command: str


COLUMNS = tuple(field.name for field in fields(TortureRow))


def row_of(result: Result, dtype: str, origin: Provenance) -> TortureRow:
    """Return a result as a row."""
    return TortureRow(
        group=result.group, check=result.check, implementation=result.implementation,
        version=version_of(result.implementation), dtype=dtype, status=result.status,
        sentence=" ".join(result.sentence.split()), issue=result.issue, seconds=f"{result.seconds:.2f}",
        **asdict(origin))


def write_torture_rows(path: Path, rows: Iterable[TortureRow]) -> None:
    """Write rows as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def version_of(implementation: str) -> str:
    """Return the version of an implementation's own package; "" where that is torch, this one or not here."""
    try:
        return importlib.metadata.version(_DISTRIBUTIONS[implementation]) if implementation in _DISTRIBUTIONS else ""
    except importlib.metadata.PackageNotFoundError:
        return ""
