"""Markdown tables from rows: speeds, memory, and the prices of options, each provider beside ours."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tilewise.bench.providers import AUTOMATIC, DETERMINISTIC, is_ours
from tilewise.bench.rows import COPY, Row, latest
from tilewise.bench.timing import COLD, HOST
from tilewise.errors import InvalidInput

NOT_MEASURED = "–"
View = Callable[[Sequence[Row]], str]
_NO_MORE: Mapping[str, View] = MappingProxyType({})


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


def markdown(rows: Sequence[Row], view: str = "speed", more: Mapping[str, View] = _NO_MORE) -> str:
    """Write a table: a line a case and direction, a column a provider.

    In the speed table a peer's cell ends with how many times ours is as fast as it, and so does that of our
    deterministic call, a choice of its own; the prices of options have a layout of their own.

    Args:
        rows: of any grids.
        view: speed, memory, price, or one of ``more``.
        more: what writes further tables, by their names.

    Raises:
        InvalidInput: no rows, an unknown view, or prices of rows without options.
    """
    views: dict[str, View] = {"speed": _speeds, "memory": _memory, "price": _prices, **more}
    if view not in views:
        raise InvalidInput(f"view is {view!r}; allowed are {', '.join(views)}.")
    if not rows:
        raise InvalidInput("there are no rows to make a table of.")
    return views[view](rows)


def side_by_side(rows: Sequence[Row], title: str, cell: Callable[[Comparison, Row], str]) -> str:
    """Write a table of a line a case and direction, and a column a provider, ``cell`` telling what stands in it."""
    sides = comparisons(rows)
    names = sorted({name for side in sides for name in side.rows}, key=_provider_rank(rows))
    lines = [f"{title}. {caption(rows)}", "", "| case | pass | " + " | ".join(names) + " |",
             "|---|---|" + "---:|" * len(names)]
    for side in sides:
        texts = [cell(side, side.rows[name]) if name in side.rows else NOT_MEASURED for name in names]
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


def held_against(name: str, side: Comparison) -> float | None:
    """Return how many times ours is as fast as a peer or our deterministic call; None for another backend of ours."""
    is_choice = is_ours(name) and (name != DETERMINISTIC or side.ours is side.rows.get(name))
    return None if is_choice else side.speedup_over(name)


def _prices(rows: Sequence[Row]) -> str:
    """Write a line a shape, option and pass: our time, what it is of our plain call's, and the peers' of ours."""
    if not any(row.options for row in rows):
        raise InvalidInput("view is 'price', and no row has an option; allowed are rows of a grid such as options.")
    sides = comparisons(rows)
    plain = {_shape_and_pass(row): row.ms_p50 for side in sides for row in side.rows.values() if not row.options}
    peers = list(dict.fromkeys(row.provider for row in rows if not is_ours(row.provider)))
    columns = ["case", "option", "pass", "tilewise", "price", *peers]
    lines = ["Milliseconds of tilewise; the price: how many times those of its call without the option; of the others, "
             f"how many times tilewise is as fast. {caption(rows)}", "", f"| {' | '.join(columns)} |",
             "|---|---|---|" + "---:|" * (len(columns) - 3)]
    for side in sides:
        first = side.first
        texts = [_shape(first), first.options or "none", first.direction.replace("_", " "), *_own_cells(side, plain)]
        for name in peers:
            ratio, row = side.speedup_over(name), side.rows.get(name)
            texts.append(f"{ratio:.2f}×" if ratio is not None else NOT_MEASURED if row is None else status_cell(row))
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def has_prices(rows: Iterable[Row]) -> bool:
    """Whether some row with an option has the plain call beside it that its price is over."""
    calls = {(_shape_and_pass(row), bool(row.options)) for row in rows}
    return any((shape, False) in calls for shape, has_options in calls if has_options)


def _own_cells(side: Comparison, plain: Mapping[tuple[str, ...], float | None]) -> tuple[str, str]:
    ours = side.ours
    if ours is None or ours.ms_p50 is None:
        status = next((status_cell(row) for row in side.rows.values() if is_ours(row.provider)), NOT_MEASURED)
        return status, NOT_MEASURED
    base = plain.get(_shape_and_pass(ours))
    return f"**{ours.ms_p50:.3g}**", NOT_MEASURED if base is None else f"{ours.ms_p50 / base:.2f}×"


def _shape_and_pass(row: Row) -> tuple[str, ...]:
    """What a call with an option shares with the plain call that it is held against."""
    return _shape(row), row.layout, row.direction, row.regime, row.provider


def _speeds(rows: Sequence[Row]) -> str:
    ratio = "how many times tilewise is as fast"
    on_host = [row for row in rows if row.regime == HOST]
    if 0 < len(on_host) < len(rows):
        return f"{_speeds([row for row in rows if row.regime != HOST])}\n\n{_speeds(on_host)}"
    if on_host:
        return side_by_side(rows, f"Microseconds of the host for one call, and {ratio}",
                            lambda side, row: _speed_cell(side, row, row.host_us))
    if all(row.regime == COLD.name for row in rows):
        return side_by_side(rows, f"TB/s, of ours what it is of a copy's, of the others {ratio}", _bandwidth_cell)
    if counts_in_tflops(rows):
        return side_by_side(rows, f"TFLOP/s, and {ratio}", lambda side, row: _speed_cell(side, row, row.tflops))
    return side_by_side(rows, f"Milliseconds a call, and {ratio}",
                        lambda side, row: _speed_cell(side, row, row.ms_p50))


def _memory(rows: Sequence[Row]) -> str:
    title = "Peak memory above the inputs, MiB (backward: forward and backward together)"
    return side_by_side(rows, title, _memory_cell)


def _speed_cell(side: Comparison, row: Row, value: float | None) -> str:
    if value is None:
        return status_cell(row)
    ratio = held_against(row.provider, side)
    text = f"{value:.3g}" if value < 100 else f"{value:.0f}"
    text = f"**{text}**" if row is side.ours else text
    return text if ratio is None else f"{text} ({ratio:.2f}×)"


def _bandwidth_cell(side: Comparison, row: Row) -> str:
    if row.gb_per_s is None:
        return status_cell(row)
    text, copy = f"{row.gb_per_s / 1e3:.2f}", side.rows.get(COPY)
    if not is_ours(row.provider):
        ratio = side.speedup_over(row.provider)
        return text if ratio is None else f"{text} ({ratio:.2f}×)"
    text = f"**{text}**" if row is side.ours else text
    return text if copy is None or not copy.gb_per_s else f"{text} ({row.gb_per_s / copy.gb_per_s:.0%})"


def _memory_cell(side: Comparison, row: Row) -> str:
    if row.peak_mib is None:
        return status_cell(row)
    return f"**{row.peak_mib:.0f}**" if row is side.ours else f"{row.peak_mib:.0f}"


def status_cell(row: Row) -> str:
    """Return what stands in the cell of a row without the number that its table is of."""
    return NOT_MEASURED if row.status == "ok" else row.status


def _provider_rank(rows: Sequence[Row]) -> Callable[[str], tuple[bool, int]]:
    order = list(dict.fromkeys(row.provider for row in rows))
    return lambda name: (not is_ours(name), order.index(name))


def caption(rows: Sequence[Row], origin: Callable[[Sequence[Row]], list[str]] | None = None) -> str:
    """Say where and with what the rows came to be; ``origin`` tells of which commits, by default :func:`origins`."""
    used = latest(rows)
    newest = max(used, key=lambda row: row.date)
    parts = [newest.device_name, f"driver {newest.driver}" if newest.driver else "", f"torch {newest.torch}",
             f"Triton {newest.triton}" if newest.triton else "",
             f"regime {', '.join(dict.fromkeys(row.regime for row in used))}", *(origin or origins)(used)]
    return "; ".join(part for part in parts if part) + "."


def origins(rows: Sequence[Row]) -> list[str]:
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
