"""Markdown tables from rows, and the tables of a document (README.md, docs/results.md) between markers.

A document holds ``<!-- bench:NAME -->`` … ``<!-- /bench:NAME -->``; what stands between is generated. NAME is the path
of a CSV below the results folder without its ending ("nvidia-h200/paper"), or its bare name where that is unique;
":summary", ":memory", ":accuracy" or ":price" behind it asks for another table than the speeds.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewise.bench.providers import AUTOMATIC, DETERMINISTIC, is_ours
from tilewise.bench.rows import COPY, Row, latest, read_rows
from tilewise.bench.timing import COLD
from tilewise.errors import InvalidInput

VIEWS = ("speed", "summary", "memory", "accuracy", "price")
_MARKED = re.compile(r"(<!-- bench:(\S+) -->)(.*?)(<!-- /bench:(\S+) -->)", re.DOTALL)
_START = re.compile(r"<!-- bench:\S+ -->")
_NOT_MEASURED = "–"


@dataclass(frozen=True)
class Comparison:
    """One case in one direction: every provider's row, side by side."""

    rows: dict[str, Row]

    @property
    def first(self) -> Row:
        """A row to read the case from; they agree on it."""
        return next(iter(self.rows.values()))

    @property
    def ours(self) -> Row | None:
        """The row that peers are held against: the automatic choice, else our first backend with a time."""
        timed = [row for row in self.rows.values() if is_ours(row.provider) and row.ms_p50 is not None]
        return min(timed, key=lambda row: row.provider != AUTOMATIC, default=None)

    def speedup_over(self, provider: str) -> float | None:
        """Return how many times ours is as fast as a provider."""
        ours, other = self.ours, self.rows.get(provider)
        if ours is None or other is None or ours.ms_p50 is None or other.ms_p50 is None:
            return None
        return other.ms_p50 / ours.ms_p50


def comparisons(rows: Iterable[Row]) -> list[Comparison]:
    """Put the newest rows of every (case, dtype, direction, regime) side by side."""
    sides: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in latest(rows):
        sides.setdefault((row.case, row.dtype, row.direction, row.regime), {})[row.provider] = row
    return [Comparison(side) for side in sides.values()]


def counts_in_tflops(rows: Iterable[Row]) -> bool:
    """Whether speeds are told in TFLOP/s; where none exceeds 1, as on a CPU, times say more."""
    return any(row.tflops is not None and row.tflops >= 1 for row in rows)


def markdown(rows: Sequence[Row], view: str = "speed") -> str:
    """Write a table: a line a case and direction, a column a provider.

    In the speed table a peer's cell ends with how many times ours is as fast as it, and so does that of our
    deterministic call, a choice of its own; the prices of options have a layout of their own, and so has the summary,
    of how many times ours is as fast over all lengths and masks.

    Raises:
        InvalidInput: no rows, an unknown view, prices of rows without options, or a summary without a peer.
    """
    if view not in VIEWS:
        raise InvalidInput(f"view is {view!r}; allowed are {', '.join(VIEWS)}.")
    if not rows:
        raise InvalidInput("there are no rows to make a table of.")
    if view == "price":
        return _prices(rows)
    if view == "summary":
        return _summary(rows)
    sides = comparisons(rows)
    names = sorted({name for side in sides for name in side.rows}, key=_provider_rank(rows))
    title, cell = _view(view, rows)
    lines = [f"{title}. {_caption(rows)}", "", "| case | pass | " + " | ".join(names) + " |",
             "|---|---|" + "---:|" * len(names)]
    for side in sides:
        texts = [cell(side, side.rows[name]) if name in side.rows else _NOT_MEASURED for name in names]
        lines.append("| " + " | ".join([describe(side.first), side.first.direction.replace("_", " "), *texts]) + " |")
    return "\n".join(lines)


def describe(row: Row) -> str:
    """Name a case in a reader's words."""
    return _shape(row) + (f", {row.options}" if row.options else "")


def _shape(row: Row) -> str:
    pairs = ((row.hq, row.hk, "h"), (row.sq, row.sk, "s"), (row.d, row.dv, "d"))
    sizes = " ".join(f"{letter}{first}" if first == second else f"{letter}{first}/{second}"
                     for first, second, letter in pairs)
    return f"b{row.b} {sizes} {row.dtype} {'full' if row.mask == 'none' else row.mask}"


def updated_readme(text: str, results: Path) -> tuple[str, list[str]]:
    """Make every marked table of a document anew from the CSV files below a folder.

    Returns:
        The new text, and the names that have no rows yet; what stands between their markers is kept.

    Raises:
        InvalidInput: a marker without its end, or a name that fits several files.
    """
    without_rows: list[str] = []

    def table(match: re.Match[str]) -> str:
        start, name, _, end, end_name = match.groups()
        if end_name != name:
            raise InvalidInput(f"the marker bench:{name} is followed by /bench:{end_name}; allowed is its own end.")
        stem, _, view = name.partition(":")
        file = _named_file(results, stem)
        if file is None:
            without_rows.append(name)
            return match[0]
        return f"{start}\n{markdown(read_rows(file), view or 'speed')}\n{end}"

    new, count = _MARKED.subn(table, text)
    if count != len(_START.findall(text)):
        raise InvalidInput("a marker <!-- bench:NAME --> has no end; allowed is <!-- /bench:NAME --> behind it.")
    return new, without_rows


def _summary(rows: Sequence[Row]) -> str:
    """Write a line a pass, number format, head dims and size of groups: the mean ratio to each peer, and the least."""
    sides = [side for side in comparisons(rows) if side.ours is not None]
    peers = [name for name in dict.fromkeys(row.provider for row in rows)
             if any(_held_against(name, side) is not None for side in sides)]
    if not peers:
        raise InvalidInput("view is 'summary', and no row has a peer's time; allowed are rows of several providers.")
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for side in sides:
        groups.setdefault((_group(side.first), side.first.direction.replace("_", " ")), []).append(side)
    lines = ["How many times tilewise is as fast, over all lengths and masks: geometric mean (least), and of how many "
             f"cells. {_caption(rows, origins=_span_of_origins)}", "", f"| heads | pass | {' | '.join(peers)} |",
             "|---|---|" + "---:|" * len(peers)]
    for (heads, direction), members in groups.items():
        cells = (_mean_and_least([ratio for side in members if (ratio := _held_against(name, side)) is not None])
                 for name in peers)
        lines.append(f"| {heads} | {direction} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _held_against(name: str, side: Comparison) -> float | None:
    """How many times ours is as fast as a peer, or as our deterministic call; None for another backend of ours."""
    is_choice = is_ours(name) and (name != DETERMINISTIC or side.ours is side.rows.get(name))
    return None if is_choice else side.speedup_over(name)


def _group(row: Row) -> str:
    dims = f"d{row.d}" if row.d == row.dv else f"d{row.d}/{row.dv}"
    return f"{dims} {row.dtype}" + ("" if row.hq == row.hk else f", {row.hq // row.hk} query heads share one")


def _mean_and_least(ratios: Sequence[float]) -> str:
    if not ratios:
        return _NOT_MEASURED
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"**{mean:.2f}×** ({min(ratios):.3f}) of {len(ratios)}"


def _prices(rows: Sequence[Row]) -> str:
    """Write a line a shape, option and pass: our time, what it is of our plain call's, and the peers' of ours."""
    if not any(row.options for row in rows):
        raise InvalidInput("view is 'price', and no row has an option; allowed are rows of a grid such as options.")
    sides = comparisons(rows)
    plain = {_shape_and_pass(row): row.ms_p50 for side in sides for row in side.rows.values() if not row.options}
    peers = list(dict.fromkeys(row.provider for row in rows if not is_ours(row.provider)))
    columns = ["case", "option", "pass", "tilewise", "price", *peers]
    lines = ["Milliseconds of tilewise; the price: how many times those of its call without the option; of the others, "
             f"how many times tilewise is as fast. {_caption(rows)}", "", f"| {' | '.join(columns)} |",
             "|---|---|---|" + "---:|" * (len(columns) - 3)]
    for side in sides:
        first = side.first
        texts = [_shape(first), first.options or "none", first.direction.replace("_", " "), *_own_cells(side, plain)]
        for name in peers:
            ratio, row = side.speedup_over(name), side.rows.get(name)
            texts.append(f"{ratio:.2f}×" if ratio is not None else _NOT_MEASURED if row is None else _status_cell(row))
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _own_cells(side: Comparison, plain: Mapping[tuple[str, ...], float | None]) -> tuple[str, str]:
    ours = side.ours
    if ours is None or ours.ms_p50 is None:
        status = next((_status_cell(row) for row in side.rows.values() if is_ours(row.provider)), _NOT_MEASURED)
        return status, _NOT_MEASURED
    base = plain.get(_shape_and_pass(ours))
    return f"**{ours.ms_p50:.3g}**", _NOT_MEASURED if base is None else f"{ours.ms_p50 / base:.2f}×"


def _shape_and_pass(row: Row) -> tuple[str, ...]:
    """What a call with an option shares with the plain call that it is held against."""
    return _shape(row), row.layout, row.direction, row.regime, row.provider


def _named_file(results: Path, name: str) -> Path | None:
    files = {file.relative_to(results).with_suffix("").as_posix(): file for file in sorted(results.rglob("*.csv"))}
    fitting = [file for path, file in files.items() if name in (path, path.rpartition("/")[2])]
    if len(fitting) > 1:
        raise InvalidInput(f"the marker bench:{name} fits {len(fitting)} files below {results}; "
                           f"allowed is one of {', '.join(files)}.")
    return fitting[0] if fitting else None


def _view(view: str, rows: Sequence[Row]) -> tuple[str, Callable[[Comparison, Row], str]]:
    if view == "memory":
        return "Peak memory above the inputs, MiB (backward: forward and backward together)", _memory_cell
    if view == "accuracy":
        return "Error against float64: maximum (mean); backward: the worst of dq, dk, dv", _accuracy_cell
    if all(row.regime == "host" for row in rows):
        return ("Microseconds of the host for one call, and how many times tilewise is as fast",
                lambda side, row: _speed_cell(side, row, row.host_us))
    if all(row.regime == COLD.name for row in rows):
        return ("TB/s, of ours what it is of a copy's, of the others how many times tilewise is as fast",
                _bandwidth_cell)
    if counts_in_tflops(rows):
        return "TFLOP/s, and how many times tilewise is as fast", lambda side, row: _speed_cell(side, row, row.tflops)
    return ("Milliseconds a call, and how many times tilewise is as fast",
            lambda side, row: _speed_cell(side, row, row.ms_p50))


def _speed_cell(side: Comparison, row: Row, value: float | None) -> str:
    if value is None:
        return _status_cell(row)
    ratio = _held_against(row.provider, side)
    text = f"{value:.3g}" if value < 100 else f"{value:.0f}"
    text = f"**{text}**" if row is side.ours else text
    return text if ratio is None else f"{text} ({ratio:.2f}×)"


def _bandwidth_cell(side: Comparison, row: Row) -> str:
    if row.gb_per_s is None:
        return _status_cell(row)
    text, copy = f"{row.gb_per_s / 1e3:.2f}", side.rows.get(COPY)
    if not is_ours(row.provider):
        ratio = side.speedup_over(row.provider)
        return text if ratio is None else f"{text} ({ratio:.2f}×)"
    text = f"**{text}**" if row is side.ours else text
    return text if copy is None or not copy.gb_per_s else f"{text} ({row.gb_per_s / copy.gb_per_s:.0%})"


def _memory_cell(side: Comparison, row: Row) -> str:
    if row.peak_mib is None:
        return _status_cell(row)
    return f"**{row.peak_mib:.0f}**" if row is side.ours else f"{row.peak_mib:.0f}"


def _accuracy_cell(side: Comparison, row: Row) -> str:
    if row.max_error is None:
        return _status_cell(row)
    text = f"{row.max_error:.1e} ({row.mean_error:.1e})"
    return f"**{text}**" if row is side.ours else text


def _status_cell(row: Row) -> str:
    return _NOT_MEASURED if row.status == "ok" else row.status


def _provider_rank(rows: Sequence[Row]) -> Callable[[str], tuple[bool, int]]:
    order = list(dict.fromkeys(row.provider for row in rows))
    return lambda name: (not is_ours(name), order.index(name))


def _caption(rows: Sequence[Row], origins: Callable[[Sequence[Row]], list[str]] | None = None) -> str:
    used = latest(rows)
    newest = max(used, key=lambda row: row.date)
    parts = [newest.device_name, f"driver {newest.driver}" if newest.driver else "", f"torch {newest.torch}",
             f"Triton {newest.triton}" if newest.triton else "",
             f"regime {', '.join(dict.fromkeys(row.regime for row in used))}", *(origins or _origins)(used)]
    return "; ".join(part for part in parts if part) + "."


def _origins(rows: Sequence[Row]) -> list[str]:
    """Say which commit the rows are of, and when; of several commits, which passes each of them has."""
    of_commit: dict[str, list[Row]] = {}
    for row in rows:
        of_commit.setdefault(row.commit, []).append(row)
    alone, lines = len(of_commit) == 1, []
    for commit, own in of_commit.items():
        passes = " and ".join(dict.fromkeys(row.direction.replace("_", " ") for row in own))
        day = max(row.date for row in own).partition("T")[0]
        at = ("; " if alone else ", ").join(part for part in (f"commit {commit}" if commit else "", day) if part)
        lines.append(at if alone else f"{passes}: {at}")
    return lines


def _span_of_origins(rows: Sequence[Row]) -> list[str]:
    """Say of how many commits the rows are, and from when to when; their table of cells has each."""
    commits = {row.commit for row in rows}
    days = sorted(row.date.partition("T")[0] for row in rows)
    return _origins(rows) if len(commits) == 1 else [f"{len(commits)} commits, {days[0]} to {days[-1]}"]
