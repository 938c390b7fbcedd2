"""Check first, then time: one row per (cell, provider, direction). A wrong result is never timed."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from tilewise.bench.cached import CachedRun
from tilewise.bench.checking import Checker, Prepared, one_line
from tilewise.bench.clocks import ClockSampler
from tilewise.bench.grids import Cell
from tilewise.bench.host import run_host
from tilewise.bench.memory import peak_mib
from tilewise.bench.options import make_tensors
from tilewise.bench.plan import Plan, blank_row, timed_row
from tilewise.bench.roofline import Direction, flops
from tilewise.bench.rows import Row
from tilewise.bench.timing import Call, graphed, host_microseconds, measure

_LEAST_WORK = 1e8
# Beyond both a call outlasts its launch, and a replay measures the same: 50 GFLOP take a large GPU 0.1 ms.
_GRAPH_MAX_LENGTH, _GRAPH_MAX_FLOPS = 1024, 5e10


def run(cells: Iterable[Cell], plan: Plan) -> Iterator[tuple[Cell, list[Row]]]:
    """Yield each cell with its rows, as they come; stops early when the budget does not reach for the next.

    The next cell is expected to take as long as the last one did for its share of the work.
    """
    start = end = time.monotonic()
    pace = 0.0
    with ClockSampler(plan.device) as clocks:
        for cell in cells:
            if plan.budget is not None and end - start + pace * work(cell) > plan.budget:
                return
            rows = _rows_of(cell, plan, clocks)
            begin, end = end, time.monotonic()
            pace = (end - begin) / work(cell)
            yield cell, rows


def _rows_of(cell: Cell, plan: Plan, clocks: ClockSampler) -> list[Row]:
    if cell.on_host:
        return list(run_host(cell, plan))
    return (CachedRun if cell.cached else _CellRun)(cell, plan, clocks).rows()


def work(cell: Cell) -> float:
    """Share of a cell in a run's time: its scores, as dense attention forms them, and what every cell costs."""
    case = cell.case
    return case.hq * case.dense_pairs * case.d + _LEAST_WORK


def is_short(cell: Cell) -> bool:
    """Whether the host may take longer to launch a call of the cell than the device to compute it."""
    return cell.case.sq <= _GRAPH_MAX_LENGTH or flops(cell.case, "forward") <= _GRAPH_MAX_FLOPS


class _CellRun:
    """All providers on one cell."""

    def __init__(self, cell: Cell, plan: Plan, clocks: ClockSampler) -> None:
        self._cell, self._plan, self._clocks = cell, plan, clocks
        self._directions = [direction for direction in plan.directions if direction in cell.directions]
        self._on_graph = plan.graph and plan.device.type == "cuda" and is_short(cell)
        self._regime = plan.regime.name + ("+graph" if self._on_graph else "")

    def rows(self) -> list[Row]:
        """Check every provider, time those that are right, and measure their memory."""
        cell, plan = self._cell, self._plan
        tensors = make_tensors(cell, plan.device)
        self._step("float64 oracle")
        checker = Checker(cell, tensors, plan.device)
        rows: list[Row] = []
        for provider in plan.providers:
            self._step(f"checking {provider.name}")
            for direction in self._directions:
                row = blank_row(cell, provider.name, direction, self._regime, plan.origin)
                rows.append(checker.checked(row, provider, direction))
        del checker
        right = {row.provider for row in rows if row.status == "ok"}
        prepared = {provider.name: Prepared(provider, cell, tensors, plan.device)
                    for provider in plan.providers if provider.name in right}
        return [done for direction in self._directions
                for done in self._timed([row for row in rows if row.direction == direction], direction, prepared)]

    def _timed(self, rows: list[Row], direction: Direction, prepared: Mapping[str, Prepared]) -> list[Row]:
        """Fill in the rows of one direction that are right; the others stay as they are."""
        self._step(f"timing {direction}")
        calls: dict[str, Call] = {}
        broken: dict[str, str] = {}
        for row in rows:
            if row.status == "ok":
                try:
                    calls[row.provider] = self._first_call(prepared[row.provider], direction)
                except Exception as error:  # as in the check; out of memory at the full size is the usual one
                    broken[row.provider] = one_line(error)
        times = measure(calls, self._plan.regime, self._plan.device, self._clocks)
        host_us = {name: host_microseconds(call, self._plan.device) for name, call in calls.items()
                   if self._plan.device.type == "cuda"}
        calls.clear()  # their graphs hold memory that the next measurement must not see
        self._step(f"memory of {direction}")
        done = []
        for row in rows:
            if row.provider in times:
                row = replace(timed_row(row, self._cell, direction, times[row.provider]),
                              host_us=host_us.get(row.provider))
                entry = prepared[row.provider]
                call = entry.forward if direction == "forward" else entry.training_step
                row = replace(row, peak_mib=peak_mib(call, self._plan.device))
            elif row.provider in broken:
                row = replace(row, status="failed", reason=broken[row.provider])
            done.append(row)
        return done

    def _first_call(self, entry: Prepared, direction: Direction) -> Call:
        call = graphed(partial(entry.call, direction), self._plan.device) if self._on_graph else entry.call(direction)
        call()
        return call

    def _step(self, text: str) -> None:
        self._plan.on_step(f"{self._cell}: {text}")
