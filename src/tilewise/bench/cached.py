"""Decoding on a cache: checked, then timed over so many caches that none is left in L2, beside a plain copy.

A call is over in microseconds, and most of them are spent waiting for memory. So all calls of a turn are one CUDA
graph, each on a cache of its own, and a time is the graph's over their number; what is told of it is bytes a second,
and how many a copy moves.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from tilewise.bench.checking import Checker, Prepared, one_line
from tilewise.bench.clocks import ClockSampler
from tilewise.bench.grids import Cell
from tilewise.bench.memory import peak_mib
from tilewise.bench.options import Tensors
from tilewise.bench.plan import Plan, blank_row, timed_row
from tilewise.bench.rows import COPY, Row
from tilewise.bench.timing import COLD, Call, Timing, graphed, host_microseconds, measure
from tilewise.problem.options import NO_OPERANDS
from tilewise.testing.inputs import Inputs, lay_out

_COLDER = 300e6  # bytes of caches between two reads of one; six times the L2 cache of an H200
_MOST_COPIES = 10
_COPIED = {"cuda": 2**30, "cpu": 2**24}  # bytes
_COPY_CALLS = 4


class CachedRun:
    """All providers on one cached cell, and the row of a copy."""

    def __init__(self, cell: Cell, plan: Plan, clocks: ClockSampler) -> None:
        self._cell, self._plan, self._clocks = cell, plan, clocks

    def rows(self) -> list[Row]:
        """Check every provider, time those that are right, and measure their memory."""
        cell, plan = self._cell, self._plan
        if "forward" not in plan.directions:
            return []
        tensors = draw_caches(cell, plan.device)
        plan.on_step(f"{cell}: checking")
        checker = Checker(cell, tensors, plan.device)
        rows = [checker.checked(self._blank(provider.name), provider, "forward") for provider in plan.providers]
        del checker
        right = {row.provider for row in rows if row.status == "ok"}
        caches = [tensors, *(_again(tensors) for _ in range(copies_of(tensors, plan.device) - 1))]
        entries = {provider.name: [Prepared(provider, cell, one, plan.device) for one in caches]
                   for provider in plan.providers if provider.name in right}
        plan.on_step(f"{cell}: timing")
        rows = self._timed(rows, entries)
        return [*rows, replace(self._blank(COPY), gb_per_s=copy_gb_per_s(plan.device, self._clocks))]

    def _timed(self, rows: list[Row], entries: Mapping[str, Sequence[Prepared]]) -> list[Row]:
        calls: dict[str, Call] = {}
        broken: dict[str, str] = {}
        for name, prepared in entries.items():
            try:
                calls[name] = rounds(prepared, self._plan.device)
            except Exception as error:  # other packages refuse by any exception, a capture too; the row keeps its words
                broken[name] = one_line(error)
        times = measure(calls, COLD, self._plan.device, self._clocks)
        calls.clear()
        return [self._done(row, times.get(row.provider), entries) if row.provider not in broken else
                replace(row, status="failed", reason=broken[row.provider]) for row in rows]

    def _done(self, row: Row, timing: Timing | None, entries: Mapping[str, Sequence[Prepared]]) -> Row:
        if timing is None:
            return row
        call, device, count = entries[row.provider][0].forward, self._plan.device, len(entries[row.provider])
        each = Timing(timing.p20 / count, timing.p50 / count, timing.p80 / count, timing.samples, timing.clocks)
        host_us = host_microseconds(call, device) if device.type == "cuda" else None
        return replace(timed_row(row, self._cell, "forward", each), host_us=host_us, peak_mib=peak_mib(call, device))

    def _blank(self, provider: str) -> Row:
        return blank_row(self._cell, provider, "forward", COLD.name, self._plan.origin)


def draw_caches(cell: Cell, device: torch.device) -> Tensors:
    """Draw q, keys and values on the device itself: caches are large."""
    case, generator = cell.case, torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        lay_out(torch.randn((case.b, h, s, d), generator=generator, dtype=cell.dtype, device=device), case.layout)
        for h, s, d in ((case.hq, case.sq, case.d), (case.hk, case.sk, case.d), (case.hk, case.sk, case.dv),
                        (case.hq, case.sq, case.dv)))
    dlse = torch.zeros(case.b, case.hq, case.sq, device=device)
    return Tensors(Inputs(q, k, v, dout, dlse), NO_OPERANDS)


def copies_of(tensors: Tensors, device: torch.device) -> int:
    """Return how many caches it takes that none is left in a GPU's L2 cache when its turn comes again."""
    size = sum(cache.numel() * cache.element_size() for cache in (tensors.inputs.k, tensors.inputs.v))
    return max(1, min(_MOST_COPIES, math.ceil(_COLDER / max(1, size)))) if device.type == "cuda" else 1


def rounds(entries: Sequence[Prepared], device: torch.device) -> Call:
    """Return a call that runs each entry once: on a GPU the replay of a graph."""
    def call() -> object:
        return [entry.forward() for entry in entries]

    made = graphed(lambda: call, device) if device.type == "cuda" else call
    made()
    return made


@lru_cache(maxsize=1)
def copy_gb_per_s(device: torch.device, clocks: ClockSampler) -> float:
    """Measure, once a run, how many bytes a second a copy reads and writes."""
    source = torch.zeros(_COPIED[device.type] // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)

    def copies() -> object:
        return [torch.add(source, 1, out=target) for _ in range(_COPY_CALLS)]

    call = graphed(lambda: copies, device) if device.type == "cuda" else copies
    call()
    milliseconds = measure({COPY: call}, COLD, device, clocks)[COPY].p50 / _COPY_CALLS
    return 2 * source.numel() * source.element_size() / milliseconds / 1e6


def _again(tensors: Tensors) -> Tensors:
    """The same numbers elsewhere in memory, laid out alike; the query is shared."""
    inputs = tensors.inputs
    return tensors._replace(inputs=inputs._replace(k=inputs.k.clone(), v=inputs.v.clone()))
