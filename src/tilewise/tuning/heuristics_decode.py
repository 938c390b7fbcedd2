"""Decoding: problem and device to tile, and to how often the keys are split. Pure functions of the two."""

from itertools import product

from tilewise.kernels.triton.config import MIN_BLOCK, DecodeConfig, Splits
from tilewise.problem.decode import DecodeProblem
from tilewise.tuning.device import DeviceSpec

MOST_ROWS = 64  # of a tile; a group of 8 heads fills it with 8 queries
RESIDENT = 2  # CTAs that share an SM: one waits for its warps while the other's loads are in flight
# Keys of a split where a sequence's result must not depend on its neighbours: 16 splits of 8192 keys.
FIXED_SPLIT = 512
MOST_SPLITS = 128
# In steps of a split: what a CTA costs before its first key has come, and what combining costs, estimated. What
# was measured (H200, 32 heads on 8, head dim 128, 8192 keys) is how many CTAs to count on at once: with one on
# each SM batches of 4, 8 and 16 are split half as often as with two, and read 3 to 7 % faster; but 22 to 36 % slower in
# pages of 16, which are looked up by the threads that load.
_BEGINNING, _COMBINING = 1.0, 1.5
_NEARLY = 1.05  # fewer splits are worth this much of the reckoned time


def decode_config(problem: DecodeProblem, device: DeviceSpec) -> DecodeConfig:
    """Choose the tile: rows for the queries of a group, and as many keys in flight as two CTAs have room for.

    16 bits, head dim 128, on Hopper: 64 keys, four stages, 103 KiB. On an H200 three were 10 % slower from 64 sequences
    on; 128 keys or 8 warps made -23 to +10 %, more than 2 % with one sequence of 65536 keys alone; to launch the kernel
    that combines early made -1 to +7 %.
    """
    rows = min(MOST_ROWS, max(MIN_BLOCK, 1 << (problem.sq * problem.group - 1).bit_length()))
    if device.arch == "interpreter":
        return DecodeConfig(rows, 64, 4, 1)
    itemsize, is_amd = problem.dtype.itemsize, device.arch.startswith("gfx")
    # Products of float32 are made by threads, which hold more than the tensor cores' rows: twice the warps.
    warps = 8 if itemsize == 4 else 4
    rooms = (device.shared_memory,) if is_amd else (device.shared_memory // RESIDENT, device.shared_memory)
    # Two stages of few rows are one tile in flight, which nothing loads beside.
    depths, overlapped = (2,) if is_amd else (4, 3), device.arch == "sm_90"
    for block_m, room, keys, stages in product((rows, rows // 2, rows // 4), rooms, (64, 32, 16), depths):
        config = DecodeConfig(max(block_m, MIN_BLOCK), keys, warps, stages, overlapped=overlapped)
        if config.shared_bytes(problem.width, itemsize) <= room:
            return config
    return DecodeConfig(MIN_BLOCK, MIN_BLOCK, warps, 2, overlapped=overlapped)


def choose_splits(problem: DecodeProblem, config: DecodeConfig, num_sms: int) -> Splits:
    """Choose how often the keys are split: as it takes the least time with a full cache, for lengths are data.

    All CTAs of a wave take as long as its longest. A deterministic call has splits of a fixed length, however many
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
    ctas = problem.b * problem.hk * config.row_tiles(problem)
    at_once = num_sms * (RESIDENT if 0 < problem.page < config.block_n else 1)

    def cost(splits: int) -> float:
        waves = -(-ctas * splits // at_once)
        return waves * (-(-steps // splits) + _BEGINNING) + (_COMBINING if splits > 1 else 0.0)

    counts = range(1, min(steps, MOST_SPLITS) + 1)
    least = min(map(cost, counts))
    return Splits(next(splits for splits in counts if cost(splits) <= _NEARLY * least))
