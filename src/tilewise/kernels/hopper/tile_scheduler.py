"""The dynamic persistent tile scheduler: which tile a number stands for, who fetches numbers, how warps learn of them.

The producer warp fetches a number from the launch's counter, finds out which tile it stands for, and publishes that in
a queue of two slots; the consumers read it there. forward/split_kv.py and varlen.py turn a number into a tile of the
forward pass where a tile's keys are split and where lengths are data.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.hopper.pipeline import (
    FOUR_WARPS,
    ONE_WARP,
    consumer_release,
    consumer_wait,
    producer_acquire,
)

NO_TILE = gl.constexpr(-1)  # the first number of a work tile that ends the stream of tiles


class TileQueue(NamedTuple):
    """Two work tiles between the producer warp and the warpgroups: a few int32 each, ring of two stages."""

    numbers: Any
    full: Any
    empty: Any


class KVTile(NamedTuple):
    """A tile of keys: its first key, or NO_TILE, which ends a stream of tiles; the head of k; and the batch entry.

    With C.MASK_PLAN, blocks: how many its list has, of which ``partial`` come first.
    """

    first: Any
    head: Any
    batch: Any
    partial: Any = 0
    blocks: Any = 0


@gluon.jit
def tile_at(number, grid, sq, C: gl.constexpr):
    """Return (first query, head, batch) of a tile number.

    Under an upper bound heads are swizzled: the tiles of ``heads_per_swizzle`` heads, whose keys and values fit L2
    together, run side by side. The work of a tile grows with its index there: inside a swizzle the longest tiles come
    first, and the short ones fill the gaps at the end. So it is with C.MASK_PLAN, since most such masks are causal too.
    The remainder of the heads is the first swizzle: as the last one it would have too few short tiles (5 % at 4096 keys
    of width 128). Without an upper bound a head's tiles follow one another.

    With C.TILES_FROM_END tiles are counted back from the last warpgroup that has a query. Rows without a query then
    lie in front of the first tile, which sees the fewest keys, and not behind the last and longest one.
    """
    rank, row = _swizzled(number, grid, C.HAS_UPPER or C.MASK_PLAN)
    ROWS: gl.constexpr = 64 // C.PACK_GQA  # queries of a warpgroup
    if C.TILES_FROM_END:
        first = (sq + (ROWS - 1)) // ROWS * ROWS - (rank + 1) * (ROWS * C.CONSUMERS)
    else:
        first = (grid.tiles - 1 - rank if C.HAS_UPPER or C.MASK_PLAN else rank) * (ROWS * C.CONSUMERS)
    return first, row % grid.heads, row // grid.heads


@gluon.jit
def kv_tile_at(number, grid, C: gl.constexpr):
    """Return the tile of keys of a tile number.

    Heads are swizzled as in ``tile_at``, with C.DETERMINISTIC always; here q, dout and the dQ accumulator fit L2. Under
    an upper bound the first keys are seen by the most queries, and sink tokens by all. With C.DETERMINISTIC tiles of
    one head wait for one another: a swizzle has many heads start together.
    """
    rank, row = _swizzled(number, grid, C.HAS_UPPER or C.DETERMINISTIC or C.MASK_PLAN)
    return KVTile(rank * (64 * C.CONSUMERS), row % grid.heads, row // grid.heads, 0, 0)


@gluon.constexpr_function
def kv_tile_size(c):
    """Return how many numbers a tile of keys has in shared memory."""
    return 5 if c.MASK_PLAN else 3


@gluon.jit
def publish_kv_tile(queue, count, tile, C: gl.constexpr):
    """Producer: publish a tile of keys for the consumers."""
    numbers = (tile.first, tile.head, tile.batch)
    if C.MASK_PLAN:
        numbers = numbers + (tile.partial, tile.blocks)
    publish_tile(queue, count, numbers, kv_tile_size(C))


@gluon.jit
def get_kv_tile(queue, count, C: gl.constexpr):
    """Consumer: wait for the next tile of keys, and read it."""
    numbers = get_tile(queue, count, kv_tile_size(C))
    if C.MASK_PLAN:
        return KVTile(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4])
    else:
        return KVTile(numbers[0], numbers[1], numbers[2], 0, 0)


@gluon.jit
def _swizzled(number, grid, SWIZZLED: gl.constexpr):
    """Return (tile, counted from the longest under a bound; head among those of all batches) of a tile number."""
    tiles, heads, batches, heads_per_swizzle = grid
    rows = heads * batches
    if SWIZZLED:
        width = (rows - 1) % heads_per_swizzle + 1
        begin = 0
        if number >= width * tiles:
            begin = width + (number - width * tiles) // (heads_per_swizzle * tiles) * heads_per_swizzle
            width = heads_per_swizzle
        inside = number - begin * tiles
        rank = inside // width
        row = begin + inside % width
    else:
        row = number // tiles
        rank = number - row * tiles
    return rank, row


@gluon.jit
def fetch_next_tile(counter, total):
    """Producer: take the next tile's number from the launch's counter (dynamic persistent scheduling).

    A CTA's first tile has the CTA's own number. So no tile may wait for another: the CTA that it is the first tile of
    may not have started.
    """
    fetched = gl.atomic_add(counter, 1, sem="relaxed")
    if fetched == total - 1:
        gl.store(counter, 0)  # the launch's last fetch leaves the counter as it was found
    return fetched + gl.num_programs(0)


@gluon.jit
def publish_tile(queue, count, tile, SIZE: gl.constexpr):
    """Producer: write the numbers of a work tile for the consumers; SIZE: the numbers of a tile's slot."""
    producer_acquire(queue.empty, count, 2)
    slot = count % 2
    zero = gl.full([1], 0, gl.int32, layout=ONE_WARP)
    for i in gl.static_range(len(tile)):
        queue.numbers.index(slot * SIZE + i).store(zero + tile[i])
    mbarrier.arrive(queue.full.index(slot), count=1)


@gluon.jit
def read_tile(queue, count, SIZE: gl.constexpr):
    """Consumer: read the work tile of iteration ``count``, which it has waited for and not released."""
    slot = count % 2
    tile = ()
    for i in gl.static_range(SIZE):
        tile = tile + (gl.sum(queue.numbers.index(slot * SIZE + i).load(FOUR_WARPS), 0),)
    return tile


@gluon.jit
def get_tile(queue, count, SIZE: gl.constexpr, KEPT: gl.constexpr = False):
    """Consumer: wait for the next work tile and read it; if it is KEPT, the caller releases it (``release_tile``)."""
    consumer_wait(queue.full, count, 2)
    tile = read_tile(queue, count, SIZE)
    if not KEPT:
        release_tile(queue, count)
    return tile


@gluon.jit
def release_tile(queue, count):
    """Consumer: release the slot of the work tile of iteration ``count``."""
    consumer_release(queue.empty, count, 2)
