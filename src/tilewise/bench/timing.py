"""Time calls side by side in one process, on the same inputs.

A GPU at its power limit lowers its clock, so a time means little without its regime:

==========  ====================================================================================================
``duty``    bursts of about 12 ms with idle gaps four times as long, so that the clock stays near its highest: the
            steadiest way to compare kernels
``dense``   bursts back to back: the card sits at its power limit, and a figure depends on who ran before
``sustained``  each provider alone without a pause after a rest, the second half counted: what a long job gets
``turns``   the CPU's: short turns without gaps
``cold``    a call is many, each on memory of its own that is colder than L2 (cached.py), and all of them one CUDA
            graph, which runs once a turn: how decoding is timed, whatever was asked for
==========  ====================================================================================================

All but ``sustained`` interleave the providers: each gets a turn a round, and the order rotates, so that drift
reaches all of them alike. On a GPU the L2 cache is cleared before every timed call, save in ``sustained`` and ``cold``.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewise.bench.clocks import ClockReading, ClockSampler
from tilewise.validate.choices import check_choice

Call = Callable[[], object]
_MOST_CALLS = 60
_MOST_WARMUPS = 20
_HOST_CALLS = 10
_SUSTAINED_REST, _SUSTAINED_RUN, _SUSTAINED_SLICE = 1.0, 1.5, 0.04
_L2_FILL = 256 * 2**20  # bytes; several times the largest L2 cache


@dataclass(frozen=True)
class Regime:
    """How the turns of the interleaving regimes go; times in milliseconds.

    Attributes:
        turns: rounds in which every provider has one turn.
        warmup: untimed calls before the timed ones, together about this long.
        burst: timed calls, together about this long.
        least_warmups, least_calls: however long a call is.
        idle_factor: idle time before a turn, as a multiple of the turn.
        enough_calls, enough_time: a provider that has been timed for both sits out the turns that are left.
        clears: whether the L2 cache is cleared before every timed call.
    """

    name: str
    turns: int = 1
    warmup: float = 0.0
    burst: float = 0.0
    least_warmups: int = 1
    least_calls: int = 3
    idle_factor: float = 0.0
    enough_calls: int = 3
    enough_time: float = math.inf
    clears: bool = True


HOST = "host"  # the regime of the rows that tell the host's time (host.py)
COLD = Regime("cold", turns=7, least_warmups=0, least_calls=1, clears=False)
REGIMES = {regime.name: regime for regime in (
    Regime("duty", turns=5, warmup=3.0, burst=12.0, idle_factor=4.0),
    Regime("dense", turns=3, warmup=10.0, burst=40.0),
    Regime("sustained"),
    Regime("turns", turns=5, warmup=5.0, burst=40.0, least_warmups=0, least_calls=1, enough_time=1500.0),
)}


def regime_named(name: str | None, device: torch.device) -> Regime:
    """Return a regime, or the device's default. Raises :class:`InvalidInput` for an unknown name."""
    if name is None:
        return REGIMES["duty" if device.type == "cuda" else "turns"]
    check_choice("regime", name, REGIMES)
    return REGIMES[name]


@dataclass(frozen=True)
class Timing:
    """Percentiles in milliseconds over all timed calls, and the clock meanwhile."""

    p20: float
    p50: float
    p80: float
    samples: int
    clocks: ClockReading = field(default_factory=ClockReading)

    @classmethod
    def of(cls, samples: list[float], clocks: ClockReading | None = None) -> "Timing":
        """Summarise one or more times."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(ordered[int(0.2 * last)], statistics.median(ordered), ordered[math.ceil(0.8 * last)], len(ordered),
                   clocks or ClockReading())


def measure(calls: Mapping[str, Call], regime: Regime, device: torch.device,
            clocks: ClockSampler) -> dict[str, Timing]:
    """Time every call, by name; each must have run once before, so that no set-up is left in it."""
    stopwatch: Stopwatch = CudaStopwatch(device, clears=regime.clears) if device.type == "cuda" else Stopwatch()
    if regime.name == "sustained":
        return {name: _sustained(call, stopwatch, clocks) for name, call in calls.items()}
    estimates = {name: _estimate(call, stopwatch) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    start, names = time.monotonic(), list(calls)
    for turn in range(regime.turns):
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            if len(samples[name]) >= regime.enough_calls and sum(samples[name]) >= regime.enough_time:
                continue
            samples[name] += _turn(calls[name], estimates[name], regime, stopwatch)
    reading = clocks.window(start, time.monotonic())
    return {name: Timing.of(times, reading) for name, times in samples.items()}


class Stopwatch:
    """Times calls on the host clock; right where a call returns when its work is done."""

    def time(self, call: Call, count: int) -> list[float]:
        """Return the milliseconds of each of ``count`` calls."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def clear_cache(self) -> None:
        """Evict what the last call left in the device's cache."""

    def synchronize(self) -> None:
        """Wait for the device."""


class CudaStopwatch(Stopwatch):
    """Times calls by events on the device's stream, the L2 cache cold before each unless that is not ``clears``."""

    def __init__(self, device: torch.device, *, clears: bool = True) -> None:
        self._device = device
        self._fill = torch.empty(_L2_FILL, dtype=torch.int8, device=device) if clears else None

    def time(self, call: Call, count: int) -> list[float]:
        """Return the milliseconds of each of ``count`` calls."""
        make: Any = torch.cuda.Event
        events = [(make(enable_timing=True), make(enable_timing=True)) for _ in range(count)]
        for start, stop in events:
            self.clear_cache()
            start.record()
            call()
            stop.record()
        self.synchronize()
        return [start.elapsed_time(stop) for start, stop in events]

    def clear_cache(self) -> None:
        """Overwrite a buffer larger than the L2 cache."""
        if self._fill is not None:
            self._fill.zero_()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


def graphed(build: Callable[[], Call], device: torch.device) -> Call:
    """Capture one call as a CUDA graph and return its replay.

    ``build`` makes the call on the capturing stream: autograd runs a backward pass on the stream of its forward.
    """
    make: Any = torch.cuda.Stream
    stream = make(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call = build()
        for _ in range(3):  # a library's lazy set-up must not fall into the capture
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = call()

    def replay() -> object:
        graph.replay()
        return kept, call  # and what the call holds: the graph reads it

    return replay


def host_samples(call: Call, device: torch.device, count: int, warmups: int = 0) -> list[float]:
    """Return the milliseconds that the host needs to enqueue each of ``count`` calls, the device not waited for."""
    for _ in range(warmups):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    times = Stopwatch().time(call, count)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return times


def host_microseconds(call: Call, device: torch.device) -> float:
    """Return the median host time of one call."""
    return statistics.median(host_samples(call, device, _HOST_CALLS)) * 1e3


def _estimate(call: Call, stopwatch: Stopwatch) -> float:
    stopwatch.synchronize()
    return max(1e-3, stopwatch.time(call, 1)[0])


def _turn(call: Call, estimate: float, regime: Regime, stopwatch: Stopwatch) -> list[float]:
    count = min(_MOST_CALLS, max(regime.least_calls, math.ceil(regime.burst / estimate)))
    warmups = min(_MOST_WARMUPS, max(regime.least_warmups, int(regime.warmup / estimate)))
    if regime.idle_factor:
        time.sleep(min(0.25, max(0.02, regime.idle_factor * (count + warmups) * estimate / 1e3)))
    for _ in range(warmups):
        stopwatch.clear_cache()
        call()
    return stopwatch.time(call, count)


def _sustained(call: Call, stopwatch: Stopwatch, clocks: ClockSampler) -> Timing:
    """Run without a pause in slices of some calls; a sample is a slice's mean, of the second half alone."""
    estimate = _estimate(call, stopwatch)
    count = max(1, math.ceil(_SUSTAINED_SLICE * 1e3 / estimate))
    time.sleep(_SUSTAINED_REST)
    ends = [time.monotonic()]
    while len(ends) < 3 or ends[-1] - ends[0] < _SUSTAINED_RUN:
        for _ in range(count):
            call()
        stopwatch.synchronize()
        ends.append(time.monotonic())
    half = len(ends) // 2
    samples = [(stop - start) * 1e3 / count for start, stop in zip(ends[half - 1:], ends[half:], strict=False)]
    return Timing.of(samples, clocks.window(ends[half - 1], ends[-1]))
