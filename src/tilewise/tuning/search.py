"""What `tilewise tune` does with one problem: propose tiles, drop the wrong and the slow, keep the fastest.

Kernels run behind :class:`Trial`, which the caller brings; nothing here is called unless a user asks for it.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol

from tilewise.kernels.triton.config import MAX_BLOCK, MIN_BLOCK, TileConfig
from tilewise.problem import AttentionProblem
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics_triton import shared_bytes, tile_heuristic
from tilewise.tuning.kinds import AnyConfig, TritonConfig

MOST_CANDIDATES = 40
ROUNDS = 5
HOPELESS = 1.5  # times the best of the first round: more rounds would not change the verdict
LEAST_GAIN = 0.02  # what a tile must be faster by to replace the heuristic's


class Trial(Protocol):
    """One kernel on one problem, ready to run with any tile."""

    def fault(self, config: AnyConfig) -> str | None:
        """Run the kernel once; return why this tile cannot be used (it fails, its result is wrong), else None."""

    def time(self, configs: Sequence[AnyConfig]) -> list[float]:
        """Time tiles without a fault one after the other, cache cold; return the milliseconds of each."""


@dataclass(frozen=True)
class Proposals:
    """Tiles to try.

    Attributes:
        tiles: the heuristic's own first, the others by their distance from it: what is cut off promises least.
        plain: the heuristic's tile for tensors that come through pointers.
        described: its tile for tensors that may come through descriptors; None where they may not.
    """

    tiles: tuple[AnyConfig, ...]
    plain: AnyConfig
    described: AnyConfig | None


@dataclass(frozen=True)
class Choice:
    """The tile to record, which is the heuristic's where no other gains enough.

    Attributes:
        ms: median over the rounds.
        heuristic_ms: that of the heuristic's tile; None where that one has a fault.
        candidates: tiles that were timed for this choice.
    """

    config: AnyConfig
    ms: float
    heuristic_ms: float | None
    candidates: int


@dataclass(frozen=True)
class Fault:
    """A tile that cannot be used, and why."""

    config: AnyConfig
    reason: str


@dataclass(frozen=True)
class Finding:
    """What a search found: no choice where every tile has a fault; two where the best one needs descriptors."""

    choices: tuple[Choice, ...]
    faults: tuple[Fault, ...]


def propose(kernel: str, problem: AttentionProblem, device: DeviceSpec, *, descriptors: bool,
            most: int = MOST_CANDIDATES) -> Proposals:
    """Propose tiles around the heuristic's: sides up to twice as long or short, 4 or 8 warps, 1 to 4 stages.

    Args:
        kernel, problem, device: as in :func:`tilewise.tuning.heuristics_triton.tile_heuristic`.
        descriptors: whether the tensors could come through tensor descriptors; 16-bit tiles are then tried both ways.
        most: tiles at most, though never fewer than the heuristic has.
    """
    plain = tile_heuristic(kernel, problem, device, descriptors=False)
    described = None
    origins = [plain]
    if descriptors and problem.dtype.itemsize == 2:
        described = tile_heuristic(kernel, problem, device, descriptors=True)
        origins.append(replace(described, descriptors=True))
    others = [(_distance(config, origin), config) for origin in origins for config in _around(origin)
              if shared_bytes(config, problem, device) <= device.shared_memory]
    own = dict.fromkeys([plain] if described is None else [described, plain])
    tiles = [*own, *(config for _, config in sorted(others, key=lambda pair: pair[0]) if config not in own)]
    return Proposals(tuple(tiles[:max(most, len(own))]), plain, described)


def search(trial: Trial, proposals: Proposals) -> Finding:
    """Check every tile, time the right ones in interleaved rounds, and choose.

    A tile with descriptors serves only where the tensors can come through them; when one wins, the best tile without
    is chosen beside it.
    """
    reasons = {config: trial.fault(config) for config in proposals.tiles}
    faults = tuple(Fault(config, reason) for config, reason in reasons.items() if reason is not None)
    right = [config for config, reason in reasons.items() if reason is None]
    times = _medians(trial, right, keep=(proposals.plain, proposals.described))
    if not times:
        return Finding((), faults)
    best = _choice(times, proposals.described or proposals.plain)
    plain = {config: ms for config, ms in times.items() if not _is_described(config)}
    if _is_described(best.config) and plain:
        return Finding((best, _choice(plain, proposals.plain)), faults)
    return Finding((best,), faults)


def _around(origin: TritonConfig) -> list[TritonConfig]:
    rows, keys = ([side for side in (block // 2, block, 2 * block) if MIN_BLOCK <= side <= MAX_BLOCK]
                  for block in (origin.block_m, origin.block_n))
    return [replace(origin, block_m=m, block_n=n, num_warps=warps, num_stages=stages)
            for m, n, warps, stages in product(rows, keys, (4, 8), (1, 2, 3, 4))]


def _distance(config: TritonConfig, origin: TritonConfig) -> tuple[float, float]:
    """Doublings of the sides and of the work a warp has, half a step a stage; at equal distance, nearer in area.

    So a tile twice as large comes with twice the warps before it comes without.
    """
    m, n, warps = (math.log2(getattr(config, name) / getattr(origin, name))
                   for name in ("block_m", "block_n", "num_warps"))
    stages = abs(config.num_stages - origin.num_stages)
    return abs(m) + abs(n) + abs(m + n - warps) + stages / 2, abs(m + n)


def _is_described(config: AnyConfig) -> bool:
    """Whether tensors may come through pointers too, and with this tile do not."""
    return isinstance(config, TileConfig) and config.descriptors


def _medians(trial: Trial, configs: Sequence[AnyConfig],
             keep: Collection[AnyConfig | None]) -> dict[AnyConfig, float]:
    """Time in rounds, a round's order turned against the last; the hopeless have the first round alone."""
    samples: dict[AnyConfig, list[float]] = {config: [] for config in configs}
    running = list(configs)
    for turn in range(ROUNDS if running else 0):
        first = turn * len(running) // ROUNDS
        order = running[first:] + running[:first]
        for config, ms in zip(order, trial.time(order), strict=True):
            samples[config].append(ms)
        if turn == 0:
            running = [config for config in running if config in keep or not _is_hopeless(config, samples)]
    return {config: statistics.median(times) for config, times in samples.items()}


def _is_hopeless(config: AnyConfig, samples: Mapping[AnyConfig, Sequence[float]]) -> bool:
    """Whether a tile is far behind the best one that loads as it does, by descriptors or pointers."""
    best = min(times[0] for other, times in samples.items() if _is_described(other) == _is_described(config))
    return samples[config][0] > HOPELESS * best


def _choice(times: Mapping[AnyConfig, float], heuristic: AnyConfig) -> Choice:
    best = min(times, key=lambda config: times[config])
    own = times.get(heuristic)
    config = heuristic if own is not None and times[best] > (1 - LEAST_GAIN) * own else best
    return Choice(config, times[config], own, len(times))
