"""Among how many tiles the Hopper backward kernels split a group of query heads, by a cost model of an H200."""

import heapq
import math

from tilewise.kernels.hopper.backward.config import BackwardKernel, HopperBackwardConfig
from tilewise.problem import AttentionProblem

# Microseconds of 64 queries by a tile's keys, in the kernel that owns keys; and of a tile besides, in such blocks.
# The kernel of 192 and 128 columns takes whole groups: its split build was never made.
_BLOCK = {BackwardKernel.D64: 1.4, BackwardKernel.D128: 2.3, BackwardKernel.D128_AUGMENTED_K: 2.2,
          BackwardKernel.D256: 2.0}
_BLOCKS_OF_A_TILE = 1.5
# By what time grows for each query head of a tile above four, at up to 4096 keys, times 1 - mean / longest tile: tiles
# of unequal lengths are soon at other heads, whose q, dout and dQ accumulator do not all fit L2.
_EACH_HEAD, _HEADS, _KEYS = 0.06, 4, 4096
# Microseconds that splits must save at least, since short calls wait for their host, which launches a sum more; and
# megabytes of splits that are written and read in one microsecond.
_LEAST_GAIN, _MEGABYTES = 30.0, 2.6
# Tiles for each SM from which it is taken that all SMs end together.
_MANY_TILES = 8
# More splits than that were the fastest of no call timed; the kernel that sums them is compiled for each number, and
# unrolled.
_MOST_SPLITS = 8


def choose_group_splits(problem: AttentionProblem, config: HopperBackwardConfig, num_sms: int) -> int:
    """Return among how many tiles of the same keys the query heads of a group are split: 1, or a divisor of theirs.

    A tile of keys passes through all heads of its group, so that a call with few heads of k has few tiles, under a
    causal mask of very unequal lengths: with 4 heads of 2048 keys and batch 2 there are 128 for 132 SMs, and the
    longest takes twice the mean. Splits are dealt out better, and fewer heads are in flight; but each writes dk and dv
    in float32, and these are summed. In 32 calls on an H200 the choice took 1.001 of the time of the best one, 1.022 at
    most (benchmarks/journal/hopper-backward.md). A deterministic call is left whole, since the bits of a sequence must
    not depend on its batch, and so is one of which queries or keys are not read, since splits have rows of all keys.

    Args:
        problem: the call.
        config: its kernel.
        num_sms: of the device.
    """
    if (problem.group == 1 or problem.deterministic or config.head_persistent or config.kernel not in _BLOCK
            or not problem.is_banded or problem.sequences.are_data
            or (len(problem.seeing_queries), len(problem.seen_keys)) != (problem.sq, problem.sk)):
        return 1
    blocks = _blocks_of_tiles(problem, config.block_n)
    divisors = [splits for splits in range(1, min(problem.group, _MOST_SPLITS) + 1) if problem.group % splits == 0]
    return min(divisors, key=lambda splits: time_of(problem, config, blocks, splits, num_sms))


def time_of(problem: AttentionProblem, config: HopperBackwardConfig, blocks: list[int], splits: int,
            num_sms: int) -> float:
    """Return the microseconds of the kernel that owns keys, and of the sum where there are several splits."""
    heads, each = problem.b * problem.hk * splits, problem.group // splits
    time = _busiest(blocks, each, heads, num_sms) * _BLOCK[config.kernel]
    if config.kernel is not BackwardKernel.D256:  # which accumulates no dQ
        unequal = 1.0 - sum(blocks) / (len(blocks) * max(blocks))
        time *= 1.0 + _EACH_HEAD * max(0, each - _HEADS) * unequal * min(1.0, _KEYS / problem.sk)
    if splits == 1:
        return time
    written = heads * problem.sk * (problem.d + problem.dv) * 4
    return time + _LEAST_GAIN + written / (_MEGABYTES * 1e6)


def _busiest(blocks: list[int], each: int, heads: int, num_sms: int) -> float:
    """Return the blocks of the SM that has the most, where the longest tiles of so many heads are dealt out first."""
    if len(blocks) * heads > _MANY_TILES * num_sms:
        return (sum(blocks) * each + len(blocks) * _BLOCKS_OF_A_TILE) * heads / num_sms
    ends = [0.0] * num_sms
    for count in sorted(blocks, reverse=True):
        for _ in range(heads):
            heapq.heapreplace(ends, ends[0] + count * each + _BLOCKS_OF_A_TILE)
    return max(ends)


def _blocks_of_tiles(problem: AttentionProblem, block_n: int) -> list[int]:
    """Return how many blocks of 64 queries see each tile of keys."""
    band, counts = problem.band, []
    for first in range(0, problem.sk, block_n):
        last = min(first + block_n, problem.sk) - 1
        start = 0 if band.upper is None else max(0, first - band.upper)
        stop = problem.sq if band.lower is None else min(problem.sq, last - band.lower + 1)
        counts.append(max(0, math.ceil(stop / 64) - start // 64))
    return counts
