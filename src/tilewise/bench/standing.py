"""What a run comes to: how ours stands beside the fastest other implementation, cell by cell and in one sentence."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewise.bench.providers import AUTOMATIC, is_ours
from tilewise.bench.report import Comparison, comparisons, describe
from tilewise.bench.rows import COPY, Row
from tilewise.bench.timing import HOST

CUDNN = f"{AUTOMATIC}:cudnn"  # NVIDIA's engines behind our call: a peer of our kernels


@dataclass(frozen=True)
class Standing:
    """One cell: our time beside that of the fastest other implementation."""

    ours: Row
    peer: Row

    @property
    def ratio(self) -> float:
        """How many times ours is as fast."""
        return (self.peer.ms_p50 or 0.0) / (self.ours.ms_p50 or 1.0)

    def __str__(self) -> str:
        return f"{describe(self.ours)}, {self.ours.direction}"


def standings(rows: Iterable[Row]) -> list[Standing]:
    """Return the cells in which ours and another implementation have a time."""
    found = [(side.ours, fastest_peer(side)) for side in _sides(rows)]
    return [Standing(ours, peer) for ours, peer in found if ours is not None and peer is not None]


def closing_sentence(rows: Sequence[Row]) -> str:
    """Say in one sentence how ours stands beside the fastest other implementation of each cell."""
    found = standings(rows)
    if not found:
        return "No cell has a time of tilewise and of another implementation, so nothing is compared."
    ratios = [one.ratio for one in found]
    worst = min(found, key=lambda one: one.ratio)
    names = ", ".join(dict.fromkeys(one.ours.provider for one in found))
    ahead = sum(ratio > 1 for ratio in ratios)
    parts = [f"On {found[0].ours.device_name}, for these shapes: {names} has {statistics.geometric_mean(ratios):.2f}× "
             f"the speed of the fastest other implementation (geometric mean), ahead in {ahead} of {len(found)} "
             f"cell{'' if len(found) == 1 else 's'}"]
    if worst.ratio < 1:
        parts.append(f"furthest behind at {worst.ratio:.2f}× of {worst.peer.provider} in {worst}")
    if lost := sum(side.ours is None and fastest_peer(side) is not None for side in _sides(rows)):
        parts.append(f"not counted: {lost} cell{'' if lost == 1 else 's'} where others have a time and tilewise has "
                     "none")
    return "; ".join(parts) + "."


def _sides(rows: Iterable[Row]) -> list[Comparison]:
    return comparisons(row for row in rows if row.regime != HOST)  # it times no work


def fastest_peer(side: Comparison) -> Row | None:
    """Return the row of the fastest other implementation, if one has a time."""
    timed = [row for name, row in side.rows.items() if row.ms_p50 is not None and row is not side.ours
             and name != COPY and (not is_ours(name) or name == CUDNN)]
    return min(timed, key=lambda row: row.ms_p50 or 0.0, default=None)
