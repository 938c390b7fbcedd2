"""A cost model of the Hopper forward kernel under a window: how many queries a tile has, and how wide its blocks are.

A tile computes the keys from the first one of its first query to the last one of its last query, in whole blocks. With
a window of 128 keys a tile of 128 queries computes 256 keys, of which each query sees half. A tile whose 128 rows are 8
heads at 16 queries computes 192, in blocks of 64. Against that, a wide block costs less a key than a narrow one.

The numbers are fits to 84 cells on an H200, with 8192 queries of 16 and 32 heads, windows of 64 to 4096 keys, groups of
1 to 8 heads and head dims of 64, 128 and 256. The tile that the model chooses was the fastest, or within 1 % of it, in
all of them (benchmarks/journal/hopper-forward.md).
"""

import math

from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.problem import AttentionProblem

# Microseconds, with two warpgroups: of a tile beside its blocks, and of it for each column of d and dv.
_TILE, _TILE_COLUMN = 1.4, 0.0061
# Of a block, whatever its width; of 128 keys the softmax's, or those of each column of d and dv.
_BLOCK, _SOFTMAX, _COLUMN = 0.15, 0.75, 0.0038
# The time of a tile and of its blocks with three warpgroups, in that of two.
_TILE_OF_THREE, _BLOCK_OF_THREE = 2.1, 1.3


def has_window(problem: AttentionProblem) -> bool:
    """Whether a query sees no keys but those from some number before it to some number behind it."""
    return problem.is_banded and problem.mask.left is not None and problem.mask.right is not None


def tile_time(problem: AttentionProblem, config: HopperForwardConfig, pack_gqa: int) -> float:
    """Estimate the microseconds of a tile under a window.

    Args:
        problem: the call; where its lengths are data, all are taken for longer than the window.
        config: its tile, of two warpgroups or three.
        pack_gqa: how many of a tile's rows are heads of one group at the same query.
    """
    assert problem.mask.left is not None
    assert problem.mask.right is not None
    queries, around = 64 * config.consumers // pack_gqa, problem.mask.left + problem.mask.right
    keys = around + queries
    if not problem.sequences.are_data:
        keys = min(around + min(queries, problem.sq), problem.sk)
    columns = sum(map(sum, config.head_dim_chunks(problem)))
    tile, block = _TILE + _TILE_COLUMN * columns, _BLOCK + config.block_n / 128 * max(_SOFTMAX, _COLUMN * columns)
    if config.consumers == 3:
        tile, block = tile * _TILE_OF_THREE, block * _BLOCK_OF_THREE
    blocks = math.ceil(keys / config.block_n)
    if blocks > 1:  # of several the first one takes as long again
        blocks += 1
    return tile + blocks * block
