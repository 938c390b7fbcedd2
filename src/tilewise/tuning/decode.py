"""Decoding: problem and device to tile, and to how often the keys are split. Pure functions of the two."""

from dataclasses import dataclass

from tilewise.decode_problem import DecodeProblem
from tilewise.tuning.configs import MIN_BLOCK, DecodeConfig
from tilewise.tuning.device import DeviceSpec

MOST_ROWS = 64  # of a tile; a group of 8 heads fills it with 8 queries
RESIDENT = 2  # programs that share a multiprocessor: one waits for its warps while the other's loads are in flight
# Keys of a split where a sequence's result must not depend on its neighbours: 16 splits of 8192 keys.
FIXED_SPLIT = 512
MOST_SPLITS = 128
# In steps of a split: what a program costs before its first key has come, and what combining costs. By reckoning (a
# step of 64 keys at head dim 128 takes 2 µs where 264 programs share 4.2 TB/s), not by measurement.
_BEGINNING, _COMBINING = 1.0, 1.5


@dataclass(frozen=True)
class Splits:
    """How the keys are split.

    Attributes:
        count: programs that share the keys of a tile of rows.
        length: keys of each; None = an even share of those there are.
    """

    count: int
    length: int | None = None


def decode_config(problem: DecodeProblem, device: DeviceSpec) -> DecodeConfig:
    """Choose the tile: rows for the queries of a group, and as many keys in flight as two programs have room for.

    16 bits, head dim 128: 64 keys, three stages, 96 KiB.
    """
    rows = min(MOST_ROWS, max(MIN_BLOCK, 1 << (problem.sq * problem.group - 1).bit_length()))
    if device.arch == "interpreter":
        return DecodeConfig(rows, 64, 4, 1)
    width, itemsize = max(64, problem.width), problem.dtype.itemsize
    deepest = 2 if device.arch.startswith("gfx") else 3
    room = device.shared_memory // (1 if device.arch.startswith("gfx") else RESIDENT)
    candidates = [DecodeConfig(rows, keys, 4, stages) for keys in (64, 32, 16) for stages in range(deepest, 1, -1)]
    return next((config for config in candidates if config.shared_bytes(width, itemsize) <= room), candidates[-1])


def choose_splits(problem: DecodeProblem, config: DecodeConfig, multiprocessors: int) -> Splits:
    """Choose how often the keys are split: as it takes the least time with a full cache, for lengths are data.

    All programs of a wave take as long as its longest. A deterministic call has splits of a fixed length, however many
    that makes: then its bits are not the affair of its batch.
    """
    if problem.num_splits is not None:
        return Splits(problem.num_splits)
    keys = problem.capacity
    if problem.mask.left is not None:
        # The first key of a window lies anywhere in its step.
        keys = min(keys, problem.sq + problem.mask.left + config.block_n)
    if problem.deterministic:
        return Splits(max(1, -(-keys // FIXED_SPLIT)), FIXED_SPLIT)
    steps = max(1, -(-keys // config.block_n))
    programs = problem.b * problem.hk * row_tiles(problem, config)

    def cost(splits: int) -> float:
        waves = -(-programs * splits // (multiprocessors * RESIDENT))
        return waves * (-(-steps // splits) + _BEGINNING) + (_COMBINING if splits > 1 else 0.0)

    return Splits(min(range(1, min(steps, MOST_SPLITS) + 1), key=cost))


def row_tiles(problem: DecodeProblem, config: DecodeConfig) -> int:
    """Tiles of rows, a query of a head each, that a key head has."""
    return -(-problem.sq * problem.group // config.block_m)
