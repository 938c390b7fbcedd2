"""Measured configs: flat JSON rows with their provenance, read from tables/<device>/<kernel>.json.

A row says: for this head dim (padded), element size, masked or not, and this length, these tiles were fastest. A
problem takes the row that agrees in the first three and is nearest in length (on a logarithmic scale).
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from tilewise.problem import AttentionProblem, padded_dim
from tilewise.tuning import heuristics
from tilewise.tuning.configs import DkdvConfig, DqConfig, ForwardConfig, TileConfig
from tilewise.tuning.device import DeviceSpec

Config = TypeVar("Config", ForwardConfig, DkdvConfig, DqConfig)
KERNELS = {"forward": ForwardConfig, "dkdv": DkdvConfig, "dq": DqConfig}
TILE_FIELDS = ("block_m", "block_n", "num_warps", "num_stages")


@dataclass(frozen=True, slots=True)
class Bucket:
    """What of a problem a tile size depends on."""

    width: int
    itemsize: int
    masked: bool
    length: int

    @classmethod
    def of(cls, problem: AttentionProblem) -> "Bucket":
        """The bucket of a problem: the wider padded head dim, the longer length."""
        return cls(max(padded_dim(problem.d), padded_dim(problem.dv)), problem.dtype.itemsize,
                   problem.mask.is_bounded, max(problem.sq, problem.sk))


def config_for(kernel: str, problem: AttentionProblem, device: DeviceSpec) -> TileConfig:
    """Return the table's config for the problem, else the heuristic one.

    Args:
        kernel: "forward", "dkdv" or "dq".
    """
    row = nearest_row(load_rows(device.name, kernel), Bucket.of(problem))
    if row is not None:
        return KERNELS[kernel](*(row[name] for name in TILE_FIELDS))
    heuristic: Any = getattr(heuristics, f"{kernel}_config")
    config: TileConfig = heuristic(problem, device)
    return config


def nearest_row(rows: tuple[dict[str, Any], ...], bucket: Bucket) -> dict[str, Any] | None:
    """Return the row of the same width, element size and masking whose length is nearest; None without one."""
    alike = [row for row in rows
             if (row["width"], row["itemsize"], row["masked"]) == (bucket.width, bucket.itemsize, bucket.masked)]
    distance = math.log2(max(bucket.length, 1))
    return min(alike, key=lambda row: abs(math.log2(row["length"]) - distance), default=None)


@cache
def load_rows(device_name: str, kernel: str) -> tuple[dict[str, Any], ...]:
    """Read one table; a device without tables has no rows."""
    path = resources.files("tilewise.tuning").joinpath("tables", device_name, f"{kernel}.json")
    if not path.is_file():
        return ()
    return tuple(json.loads(path.read_text())["rows"])
