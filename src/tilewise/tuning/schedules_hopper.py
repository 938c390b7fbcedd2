"""How the Hopper kernels go through a call with a tile that was chosen, as timed on an H200 (benchmarks/journal/)."""

import operator

import torch

from tilewise.kernels.hopper.backward.config import BackwardKernel, HopperBackwardConfig, HopperBackwardSchedule
from tilewise.kernels.hopper.forward.config import HopperForwardConfig, HopperForwardSchedule, SplitPlan
from tilewise.problem import AttentionProblem
from tilewise.tuning.problem_traits import deciding_length
from tilewise.tuning.wave_model import grid_plan_of

# Heads are scheduled together that take so much of L2 (50 MiB on an H100, 60 on an H200), by their columns: in the
# forward pass their keys and values, in the backward pass their q, dout and dQ accumulator. Forward, 24 MiB at 64 and
# 256 columns are 0.98 to 1.00 times as fast as 32, and at 128 1.002 to 1.007. Where keys are few, more of q and out
# passes through L2 beside k and v, and the call waits for memory: less is faster there, 12 MiB with 512 keys and 16
# with 1024 (benchmarks/journal/hopper-forward.md).
SWIZZLE_BYTES = {64: 32 * 2**20, 128: 24 * 2**20, 256: 32 * 2**20}
FEW_KEYS, SWIZZLE_BYTES_OF_NONE, SWIZZLE_BYTES_PER_KEY = 1024, 8 * 2**20, 8 * 2**10
# Where dQ is accumulated in a fixed order a tile of keys is a block or two behind the one before. With enough heads in
# a swizzle few of the tiles that start together are of one head: of 132 SMs' tiles, 8. Without an upper bound all tiles
# take as long, stay as far apart as they have come, and L2 is worth more (benchmarks/journal/hopper-backward.md).
_LEAST_DETERMINISTIC = 16
LEAST_FROZEN = 512  # keys from which the row maximum of a tile's first blocks is kept


def forward_schedule(problem: AttentionProblem, config: HopperForwardConfig, num_sms: int) -> HopperForwardSchedule:
    """Choose how the forward kernel goes through a call: the cost model (wave_model.py) has a say in the grid."""
    _time, pack_gqa, split_kv = grid_plan_of(problem, config, num_sms)
    return schedule_on_grid(problem, config, pack_gqa, split_kv)


def schedule_on_grid(problem: AttentionProblem, config: HopperForwardConfig, pack_gqa: int = 1,
                     split_kv: SplitPlan | None = None) -> HopperForwardSchedule:
    """Choose the rest of the schedule where it is known what rows of a tile are, and which tiles are split.

    The 192 queries of three warpgroups divide few lengths: their tiles are counted from the end, or each looks for
    padding, as two do where lengths are data. A tile's first query is negative by multiples of 64 where tiles are
    counted from the end; of packed rows it could be -1, which stands for no tile (tile_scheduler.NO_TILE). Dropout
    draws for 16 queries at once, counted from the first.
    """
    are_data, three, frozen_max = problem.sequences.are_data, config.consumers == 3, _freezes_max(problem, config)
    from_end = (three and pack_gqa == 1 and not are_data and problem.is_banded and problem.band.lower is None
                and problem.band.upper is not None and not problem.scores.dropout_p)
    return HopperForwardSchedule(
        heads_per_swizzle=heads_per_swizzle(problem) // (1 if pack_gqa == 1 else problem.group), pack_gqa=pack_gqa,
        split_kv=split_kv, tiles_from_end=from_end,
        skip_padding=not from_end and (three or (are_data and config.consumers > 1)),
        softmax_parts=_softmax_parts(problem, config, frozen_max), frozen_max=frozen_max,
        sink_block_first=frozen_max and problem.is_banded and problem.dtype is torch.float16)


def backward_schedule(problem: AttentionProblem, config: HopperBackwardConfig,
                      group_splits: int = 1) -> HopperBackwardSchedule:
    """Choose which heads are scheduled together; CTAs that own a head take no others, and no part of its group."""
    if config.head_persistent:
        return HopperBackwardSchedule(kv_heads_per_swizzle=1)
    width = sum(config.columns(problem)[0])
    if config.kernel is BackwardKernel.D256:
        return HopperBackwardSchedule(kv_heads_per_swizzle(problem, width, 0), heads_per_swizzle(problem),
                                      group_splits)
    least = _LEAST_DETERMINISTIC if config.deterministic and problem.mask.right is not None else 1
    return HopperBackwardSchedule(kv_heads_per_swizzle(problem, width, 4, least), group_splits=group_splits)


def _softmax_parts(problem: AttentionProblem, config: HopperForwardConfig, frozen_max: bool) -> int:
    """Return how many parts a block's exponentials are computed in: 2 where that was timed, and faster.

    With an online maximum heads above 128 were not timed in two. With a frozen one 256 columns are 1 to 1.4 % faster
    in two, and 192 0.2 %; v of another width was not timed. With a bias one was 3 % faster at 128 columns, when threads
    loaded it. With a score function blocks have 64 keys, and two parts are 1 to 7 % faster where the maximum is frozen.
    """
    if problem.scores.bias is not None:
        return 1
    if max(problem.d, problem.dv) <= 128 and config.block_n == 128:
        return 2
    return 2 if frozen_max and operator.eq(*config.head_dim_chunks(problem)) else 1


def _freezes_max(problem: AttentionProblem, config: HopperForwardConfig) -> bool:
    """Whether blocks that need no mask keep the row maximum of the blocks before them.

    Timed at 64, 128 and 256 columns from 512 keys on: 1.00 to 1.13 times as fast, the more the longer and the narrower;
    with a softcap 1.03 to 1.14 times, the more the wider; with a score function 1.04 to 1.30 times; packed sequences
    1.02 to 1.18 times, whose length is their mean. The bits of a deterministic call may not depend on that: it keeps
    the maximum whatever its lengths.
    """
    # A window's first blocks are masked at both ends; of a mask plan those of the diagonal come first.
    sees_first = problem.band.lower is None or not problem.is_banded
    # A bias may hide the keys of a tile's first blocks; ALiBi favours other keys where queries see those ahead, or
    # where a slope is negative, which is seldom, and so may a function: then a tile is computed once more.
    falls = problem.scores.bias is None and (problem.scores.alibi_slopes is None or not problem.sees_ahead)
    return (sees_first and falls and not problem.scores.max_logit and config.consumers > 1
            and deciding_length(problem, len(problem.seen_keys)) >= LEAST_FROZEN)


def heads_per_swizzle(problem: AttentionProblem) -> int:
    """Return how many query heads are scheduled together, so that their keys and values stay in L2."""
    bytes_of_head = len(problem.seen_keys) * (problem.d + problem.dv) * problem.dtype.itemsize
    limit = _swizzle_bytes(max(problem.d, problem.dv))
    if len(problem.seen_keys) <= FEW_KEYS:
        limit = SWIZZLE_BYTES_OF_NONE + len(problem.seen_keys) * SWIZZLE_BYTES_PER_KEY
    return max(1, limit // bytes_of_head) * problem.group


def kv_heads_per_swizzle(problem: AttentionProblem, width: int, accum_bytes: int, least: int = 1) -> int:
    """Return how many heads of k have their query heads' q, dout and dQ accumulator in L2 at the same time.

    A group's query heads follow one another. The number is a power of two, so that swizzles end together. (By
    simulation of 132 SMs, causal, 32/8 heads, 4096 tokens, batch 2: one head a swizzle keeps them 0.79 of the time
    busy, 6 heads 0.94, 4 or 8 heads 1.00.) On an H200 4 in place of 8 heads, 24 MiB in place of 32, are 1.04 times as
    fast in that call, and 2 in place of 4 1.02 times with 8192 tokens.

    Args:
        problem: the call.
        width: columns of q inside the tiles.
        accum_bytes: those that an element of the dQ accumulator takes, 0 where there is none.
        least: heads in any case.
    """
    bytes_of_head = problem.sq * (2 * problem.dtype.itemsize + accum_bytes) * width
    fitting = max(1, _swizzle_bytes(width) // bytes_of_head)
    return max(least, 1 << fitting.bit_length() - 1)


def _swizzle_bytes(columns: int) -> int:
    return next(limit for width, limit in SWIZZLE_BYTES.items() if columns <= width)
