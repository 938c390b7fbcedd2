"""Split-KV in the Hopper forward kernel: which split of a tile a number stands for, and its blocks of keys.

Where tiles are fewer than the SMs, or do not fill their last wave, the keys of a tile are split, and each split is a
work tile of its own; another kernel combines their partial results.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.hopper.mask_plan import blocks_in_list, list_of_tile
from tilewise.kernels.hopper.mask_ranges import BlockRange, kv_blocks_of
from tilewise.kernels.hopper.tile_scheduler import tile_at
from tilewise.kernels.hopper.varlen import WorkTile, locate_tile


@gluon.jit
def num_work_tiles(tiles, plan, C: gl.constexpr):
    """Return how many work tiles a launch of so many tiles has."""
    if C.SPLIT_KV > 0:
        tiles = plan.whole + (tiles - plan.whole) * plan.num_splits
    return tiles


@gluon.jit
def split_of(number, plan, C: gl.constexpr):
    """Return a work tile's tile and split, -1 for a tile that is not split. Tiles that are split come last."""
    if C.SPLIT_KV == 2:
        over = gl.maximum(0, number - plan.whole)
        is_whole = number < plan.whole
        tile = gl.where(is_whole, number, plan.whole + over // plan.num_splits)
        return tile, gl.where(is_whole, -1, over % plan.num_splits)
    else:
        return number // plan.num_splits, number % plan.num_splits


@gluon.jit
def blocks_before(split, count, num_splits):
    """Return how many of a tile's ``count`` blocks come before a split; of more splits than blocks some have none."""
    return gl.minimum(count, split * count // gl.minimum(num_splits, count))


@gluon.jit
def blocks_of_split(split, blocks, plan, C: gl.constexpr):
    """Return the blocks of one of a tile's splits: neighbours on the grid, whatever of them needs a mask."""
    begin = blocks_before(split, blocks.count, plan.num_splits)
    end = blocks_before(split + 1, blocks.count, plan.num_splits)
    if C.SPLIT_KV == 2:
        begin = gl.where(split < 0, 0, begin)
        end = gl.where(split < 0, blocks.count, end)
    upper = gl.maximum(0, end - gl.maximum(begin, blocks.count - blocks.upper_boundary))
    lower = gl.maximum(0, gl.minimum(end, blocks.boundary - blocks.upper_boundary) - begin)
    return BlockRange(blocks.start + begin * C.BLOCK_N, upper, upper + lower, end - begin)


@gluon.jit
def blocks_of_tile(tile, bounds, splits, plan, C: gl.constexpr):
    """Return the blocks of keys of a work tile, a whole tile or a split of one; with C.MASK_PLAN those of its list."""
    if C.MASK_PLAN:
        blocks = blocks_in_list(plan, tile.batch, tile.head, tile.first // (64 * C.CONSUMERS), tile.partial,
                                tile.blocks)
    else:
        blocks = kv_blocks_of(tile.first, bounds, C)
    if C.SPLIT_KV > 0:
        blocks = blocks_of_split(tile.split, blocks, splits, C)
    return blocks


@gluon.jit
def locate_work_tile(number, grid, bounds, lengths, splits, plan, C: gl.constexpr):
    """Return what ``locate_tile`` does, of a tile or of a split of it; a split without a block has no row."""
    if C.SPLIT_KV > 0:
        number, split = split_of(number, splits, C)
        first, head, batch = tile_at(number, grid, bounds.sq, C)
        tile = WorkTile(first, head, batch, 0, 0, 0, 0, 0, split, 0, 0, 0)
        return tile, 0, blocks_of_tile(tile, bounds, splits, plan, C).count > 0
    elif C.MASK_PLAN:
        first, head, batch = tile_at(number, grid, bounds.sq, C)
        listed = list_of_tile(plan, batch, head, first // (64 * C.CONSUMERS))
        return WorkTile(first, head, batch, 0, 0, 0, 0, 0, 0, 0, gl.load(listed), gl.load(listed + 1)), 0, True
    else:
        return locate_tile(number, grid, bounds, lengths, C)
