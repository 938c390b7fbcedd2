"""One measurement as a flat row, and files of them as CSV."""

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from tilewise.errors import InvalidInput

Status = Literal["ok", "wrong", "refused", "failed"]


@dataclass(frozen=True)
class Row:
    """One (case, provider, direction). An empty cell of the CSV is None: not measured, or not known here.

    Attributes:
        direction: forward (a training forward) or backward; in regime "host" also forward_no_grad and
            forward_backward.
        regime: see timing.py; "+graph" where CUDA-graph replays were timed.
        options: what the call has beside mask and scale (options.py); "" = nothing.
        status: ok; wrong = outside its error budget, so not timed; refused = the provider does not take the case;
            failed = it broke. reason tells more.
        ms_p20, ms_p50, ms_p80: percentiles over ``samples`` calls, in milliseconds.
        tflops: credited operations per second (roofline.py), in 10^12.
        gb_per_s: least bytes per second (roofline.py), in 10^9; of a copy, those that it reads and writes.
        peak_mib: most memory held at once above the inputs; a backward row counts forward and backward together.
        max_error, mean_error: against float64; the worst of all gradients in a backward row.
        checked: which part of the problem the errors were taken over, and what was left out of it.
        host_us: time the host takes to enqueue a call.
    """

    grid: str
    case: str
    provider: str
    direction: str
    b: int
    hq: int
    hk: int
    sq: int
    sk: int
    d: int
    dv: int
    dtype: str
    mask: str
    layout: str
    regime: str
    status: Status
    options: str = ""
    reason: str = ""
    ms_p20: float | None = None
    ms_p50: float | None = None
    ms_p80: float | None = None
    samples: int | None = None
    tflops: float | None = None
    gb_per_s: float | None = None
    peak_mib: float | None = None
    host_us: float | None = None
    max_error: float | None = None
    mean_error: float | None = None
    checked: str = ""
    sm_mhz: float | None = None
    power_w: float | None = None
    device_name: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    python: str = ""
    tilewise: str = ""
    commit: str = ""
    date: str = ""
    command: str = ""


COPY = "copy"  # the provider of a row that tells how fast a plain copy moves bytes, and no attention
COLUMNS = tuple(field.name for field in fields(Row))
_LATER = {"options"}  # files written before these columns were thought of stay readable: they have the default
_HINTS = get_type_hints(Row)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as CSV, floats to six significant digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([_text(value) for value in asdict(row).values()] for row in rows)


def read_rows(path: Path) -> list[Row]:
    """Read what :func:`write_rows` wrote.

    Raises:
        InvalidInput: the file is missing, or is not such a file; the message names the file and the columns.
    """
    if not path.is_file():
        raise InvalidInput(f"{path} is no file; allowed is a CSV that `tilewise bench` wrote.")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        unlike = (set(reader.fieldnames or ()) | _LATER) ^ set(COLUMNS)
        if unlike:
            raise InvalidInput(f"{path} is no table of `tilewise bench`: missing or unknown columns "
                               f"{', '.join(sorted(unlike))}.")
        return [Row(**{name: _value(name, text) for name, text in record.items()}) for record in reader]


def latest(rows: Iterable[Row]) -> list[Row]:
    """Keep the newest row of every (grid, case, dtype, provider, direction, regime), in the order of first sight."""
    newest: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = (row.grid, row.case, row.dtype, row.provider, row.direction, row.regime)
        if key not in newest or newest[key].date <= row.date:
            newest[key] = row
    return list(newest.values())


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(name: str, text: str) -> Any:
    hint = _HINTS[name]
    if hint in (int, float):
        return hint(text)
    for kind in (int, float):
        if hint == kind | None:
            return kind(text) if text else None
    return text
