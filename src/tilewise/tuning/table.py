"""Measured configs: flat JSON rows with their provenance, read from tables/<device>/<kernel>.json.

A row says: for this padded head dim, element size, masked or not, and this length, this tile was the fastest. A
problem takes the row that agrees in the first three and is nearest in length (on a logarithmic scale). A row made
with descriptors serves only where the tensors can come through them.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tilewise.problem import AttentionProblem
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics import KINDS, Config, kernel_width, tile_config

TILE_FIELDS = ("block_m", "block_n", "num_warps", "num_stages", "descriptors")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bucket:
    """What of a problem a tile depends on."""

    width: int
    itemsize: int
    masked: bool
    length: int

    @classmethod
    def of(cls, problem: AttentionProblem) -> "Bucket":
        """The bucket of a problem; its length is the longer of the two."""
        return cls(kernel_width(problem), problem.dtype.itemsize, problem.mask.is_bounded,
                   max(problem.sq, problem.sk))


def config_for(kernel: str, problem: AttentionProblem, device: DeviceSpec, *, descriptors: bool) -> Config:
    """Return the table's config for the problem, else the heuristic one; arguments as in ``tile_config``."""
    row = nearest_row(load_rows(device.name, kernel), Bucket.of(problem), descriptors=descriptors)
    if row is not None:
        return KINDS[kernel](*(row[name] for name in TILE_FIELDS))
    return tile_config(kernel, problem, device, descriptors=descriptors)


def nearest_row(rows: tuple[Row, ...], bucket: Bucket, *, descriptors: bool) -> Row | None:
    """Return the row nearest in length among those of the same kind; None without one.

    Of two rows at one length, the one with descriptors was recorded because it is faster, and wins if it may serve.
    """
    alike = [row for row in rows
             if (row["width"], row["itemsize"], row["masked"]) == (bucket.width, bucket.itemsize, bucket.masked)
             and (descriptors or not row["descriptors"])]
    wanted = math.log2(max(bucket.length, 1))
    return min(alike, key=lambda row: (abs(math.log2(row["length"]) - wanted), not row["descriptors"]), default=None)


@cache
def load_rows(device_name: str, kernel: str) -> tuple[Row, ...]:
    """Read one table; a device without tables has no rows."""
    path = resources.files("tilewise.tuning").joinpath("tables", device_name, f"{kernel}.json")
    if not path.is_file():
        return ()
    return tuple(json.loads(path.read_text())["rows"])
