"""Among how many tiles the Hopper backward kernels split a group of query heads, by a cost model of an H200."""

import heapq
import math

from tilewise.kernels.hopper.backward.config import BackwardKernel, HopperBackwardConfig
from tilewise.problem import AttentionProblem

# Microseconds of 64 queries by a tile's keys, by the kernel; and of a tile besides, in such blocks.
_BLOCK = {BackwardKernel.D64: 1.4, BackwardKernel.D128: 2.3, BackwardKernel.D128_AUGMENTED_K: 2.2,
          BackwardKernel.D256: 2.0}
_BLOCKS_OF_A_TILE = 1.5
# Microseconds that splits must save at least, since short calls wait for their host, which launches a sum more; and
# megabytes of splits that are written and read in one.
_SUM, _MEGABYTES = 30.0, 2.6
# Tiles for each SM from which they are left whole: even the longest are short beside all.
_MOST_TILES = 4


def choose_group_splits(problem: AttentionProblem, config: HopperBackwardConfig, num_sms: int) -> int:
    """Return among how many tiles of the same keys the query heads of a group are split: 1, or a divisor of theirs.

    A tile of keys passes through all heads of its group, so that a call with few heads of k has few tiles, under a
    causal mask of very unequal lengths: with 4 heads of 2048 keys and batch 2 there are 128 for 132 SMs, and the
    longest takes twice the mean. Splits are dealt out better; but each writes dk and dv in float32, and these are
    summed. A deterministic call is left whole: the bits of a sequence may not depend on its batch.

    Args:
        problem: the call.
        config: its kernel.
        num_sms: of the device.
    """
    if (problem.group == 1 or problem.deterministic or config.head_persistent or config.kernel not in _BLOCK
            or not problem.is_banded or problem.sequences.are_data):
        return 1
    blocks = _blocks_of_tiles(problem, config.block_n)
    if len(blocks) * problem.b * problem.hk > _MOST_TILES * num_sms:
        return 1
    divisors = [splits for splits in range(1, problem.group + 1) if problem.group % splits == 0]
    return min(divisors, key=lambda splits: time_of(problem, config, blocks, splits, num_sms))


def time_of(problem: AttentionProblem, config: HopperBackwardConfig, blocks: list[int], splits: int,
            num_sms: int) -> float:
    """Return the microseconds of the kernel that owns keys, and of the sum where there are several splits."""
    heads = problem.b * problem.hk * splits
    each = problem.group // splits
    ends = [0.0] * num_sms
    for count in sorted(blocks, reverse=True):
        for _ in range(heads):
            heapq.heapreplace(ends, ends[0] + count * each + _BLOCKS_OF_A_TILE)
    time = max(ends) * _BLOCK[config.kernel]
    if splits == 1:
        return time
    written = heads * problem.sk * (problem.d + problem.dv) * 4
    return time + _SUM + written / (_MEGABYTES * 1e6)


def _blocks_of_tiles(problem: AttentionProblem, block_n: int) -> list[int]:
    """Return how many blocks of 64 queries see each tile of keys."""
    queries, keys, band = problem.seeing_queries, problem.seen_keys, problem.band
    counts = []
    for first in range(keys.start, keys.stop, block_n):
        last = min(first + block_n, keys.stop) - 1
        start = queries.start if band.upper is None else max(queries.start, first - band.upper)
        stop = queries.stop if band.lower is None else min(queries.stop, last - band.lower + 1)
        counts.append(max(0, math.ceil(stop / 64) - start // 64))
    return counts
