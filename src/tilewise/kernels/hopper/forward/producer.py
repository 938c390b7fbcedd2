"""The Hopper forward kernel's producer warp: it fetches work tiles, and loads their queries, keys, values and bias.

With C.FROZEN_MAX a tile's overflow flags are looked at when they are complete. The queue has two slots: tile t is
published when every warpgroup has taken tile t - 2, and so has written the flags of tile t - 4 (OVERFLOW_LAG). Those
are looked at next. A tile with an overflowed row is published once more, to be computed with online softmax throughout.
At the end of a CTA no tile follows that would complete the flags: a NO_TILE then has the warpgroups arrive on
``drained``, and more tiles may follow it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.hopper.compat import tma_load
from tilewise.kernels.hopper.forward.split_kv import blocks_of_tile, locate_work_tile, num_work_tiles
from tilewise.kernels.hopper.mask_ranges import kv_block_start
from tilewise.kernels.hopper.pipeline import (
    ONE_WARP,
    OVERFLOW_LAG,
    OVERFLOW_SLOTS,
    producer_acquire,
)
from tilewise.kernels.hopper.tile_scheduler import NO_TILE, fetch_next_tile, publish_tile
from tilewise.kernels.hopper.varlen import bounds_of_tile, numbers_of_tile, rows_of, tile_size


@gluon.constexpr_function
def bytes_of(rows, widths):
    """Bytes of some rows with all their chunks."""
    return 2 * rows * sum(widths)


@gluon.jit
def load_rows(descs, coord, barrier, tiles, stage):
    """Producer: load every chunk of some rows into a stage; ``coord``: (batch, head, row)."""
    batch, head, row = coord
    RANK: gl.constexpr = len(descs[0].block_type.shape)
    for i in gl.static_range(len(descs)):
        if RANK == 5:  # (b, hk, sq, group, d)
            at = [batch, head, row, 0, i * descs[0].block_type.shape[4]]
        else:
            at = [batch, head, row, i * descs[0].block_type.shape[3]]
        tma_load(descs[i], at, barrier, tiles[i].index(stage))


@gluon.jit
def load_kv(args, smem, count, k_coord, v_coord, C: gl.constexpr):
    """Producer: load K and V of one iteration; outside of the tensor TMA fills in zeros, which count as bytes."""
    kv = smem.kv
    producer_acquire(kv.empty, count, C.KV_STAGES)
    stage = count % C.KV_STAGES
    mbarrier.expect(kv.full.index(stage), bytes_of(C.BLOCK_N, C.D) + bytes_of(C.BLOCK_N, C.DV))
    load_rows(args.descs.k, k_coord, kv.full.index(stage), kv.k_tiles, stage)
    load_rows(args.descs.v, v_coord, kv.full.index(stage), kv.v_tiles, stage)


@gluon.jit
def load_queries(args, smem, tile_count, coord, C: gl.constexpr):
    """Producer: load the queries of every warpgroup; ``coord``: of the first of them."""
    batch, head, row = coord
    CONSUMERS: gl.constexpr = C.CONSUMERS
    for i in gl.static_range(CONSUMERS):
        stage = tile_count % C.Q_STAGES * C.CONSUMERS + i
        mbarrier.wait(smem.q.empty.index(stage), ((tile_count // C.Q_STAGES) & 1) ^ 1)
        mbarrier.expect(smem.q.full.index(stage), bytes_of(64, C.D))
        load_rows(args.descs.q, (batch, head, row + i * (64 // C.PACK_GQA)), smem.q.full.index(stage), smem.q.tiles,
                  stage)


@gluon.jit
def load_bias(args, smem, count, tile, step, blocks, C: gl.constexpr):
    """Producer: with C.BIAS_STAGES, load the bias of a block of keys for every warpgroup's queries."""
    if C.BIAS_STAGES > 0:
        NC: gl.constexpr = C.CONSUMERS
        pipe, desc, place = smem.bias, args.descs.bias, args.bias_place
        key = place.first_key + kv_block_start(step, blocks, C)
        for i in gl.static_range(NC):
            number = count * NC + i
            producer_acquire(pipe.empty, number, C.BIAS_STAGES * NC)
            stage = number % (C.BIAS_STAGES * NC)
            mbarrier.expect(pipe.full.index(stage), desc.block_type.nbytes)
            tma_load(desc, [tile.batch * place.own_batch, tile.head * place.own_head, tile.first + i * 64, key],
                     pipe.full.index(stage), pipe.tiles.index(stage))


@gluon.jit
def load_first(args, smem, tile, row_k, tile_count, count, v_coord, C: gl.constexpr):
    """Producer: load the keys of a tile's first block, with the last values of the tile before, and its queries.

    Returns the tile's blocks, and the coordinates of the keys.
    """
    head_k = tile.head if C.PACK_GQA > 1 else tile.head // args.group
    blocks = blocks_of_tile(tile, bounds_of_tile(tile, args.bounds, C), args.splits, args.plan, C)
    row = row_k + kv_block_start(0, blocks, C)
    batch = 0 if C.HAS_CU_SEQLENS else tile.batch
    load_kv(args, smem, count, (batch, head_k, row), v_coord, C)
    first_row = rows_of(tile, args.bounds.sq, C)[0] + tile.first
    load_queries(args, smem, tile_count, (batch, tile.head, first_row), C)
    load_bias(args, smem, count, tile, 0, blocks, C)
    return blocks, batch, head_k, row


@gluon.jit
def load_blocks(args, smem, count, tile, blocks, row_k, batch, head_k, row, C: gl.constexpr):
    """Producer: load the keys of a tile's other blocks, and with each the values of the block before.

    Returns the next iteration, and the row of the values that are still to be loaded.
    """
    for step in range(1, blocks.count):
        before = row
        row = row_k + kv_block_start(step, blocks, C)
        load_kv(args, smem, count, (batch, head_k, row), (batch, head_k, before), C)
        load_bias(args, smem, count, tile, step, blocks, C)
        count += 1
    return count, row


@gluon.jit
def load(args, smem, counter, C: gl.constexpr):
    """Producer, one warp: fetch tile numbers, and keep the pipes full."""
    total = num_work_tiles(args.grid.tiles * args.grid.heads * args.grid.batches, args.splits, C)
    number = gl.program_id(0)
    count = 0
    tile_count = 0
    batch = 0
    head_k = 0
    row = -C.BLOCK_N  # outside of the tensor
    if C.FROZEN_MAX:
        load_with_recompute(number, total, count, tile_count, batch, head_k, row, args, smem, counter, C)
    else:
        while number < total:
            tile, row_k, exists = locate_work_tile(number, args.grid, args.bounds, args.lengths, args.splits, args.plan,
                                                   C)
            if exists:
                publish_tile(smem.queue, tile_count, numbers_of_tile(tile, C), tile_size(C))
                blocks, batch, head_k, row = load_first(args, smem, tile, row_k, tile_count, count,
                                                        (batch, head_k, row), C)
                count, row = load_blocks(args, smem, count + 1, tile, blocks, row_k, batch, head_k, row, C)
                tile_count += 1
            number = fetch_next_tile(counter, total)
        publish_tile(smem.queue, tile_count, (NO_TILE, 0, 0), tile_size(C))
        outside = -C.BLOCK_N
        load_kv(args, smem, count, (batch, head_k, outside), (batch, head_k, row), C)


@gluon.jit
def overflow_of(overflow, checked, C: gl.constexpr):
    """Producer: 1 if some row of a tile overflowed, else 0."""
    CONSUMERS: gl.constexpr = C.CONSUMERS
    flags = gl.full([64], 0, gl.int8, layout=ONE_WARP)
    for i in gl.static_range(CONSUMERS):
        flags |= overflow.flags.index((checked & (OVERFLOW_SLOTS - 1)) * C.CONSUMERS + i).load(ONE_WARP)
    return gl.max(flags.to(gl.int32), 0)


@gluon.jit
def retake_tile(overflow, checked, C: gl.constexpr):
    """Producer: return the number of a tile that overflowed, and clear its flags."""
    CONSUMERS: gl.constexpr = C.CONSUMERS
    slot = checked & (OVERFLOW_SLOTS - 1)
    for i in gl.static_range(CONSUMERS):
        overflow.flags.index(slot * C.CONSUMERS + i).store(gl.full([64], 0, gl.int8, layout=ONE_WARP))
    return gl.sum(overflow.numbers.index(slot).load(ONE_WARP), 0)


@gluon.jit
def load_with_recompute(number, total, count, tile_count, batch, head_k, row, args, smem, counter, C: gl.constexpr):
    """Producer: keep the pipes full, and publish a tile that overflowed once more.

    ``checked``: of the tile whose flags are looked at next, while another tile is loaded, or behind the last number.
    """
    overflow = smem.overflow
    checked = -OVERFLOW_LAG
    last = 1 << 30
    has_overflowed = 0
    drains = 0
    running = number < total
    while running:
        if (has_overflowed != 0) | (number < total):
            recompute = has_overflowed
            own = number
            if recompute != 0:
                own = retake_tile(overflow, checked - 1, C)
            tile, row_k, exists = locate_work_tile(own, args.grid, args.bounds, args.lengths, args.splits, args.plan, C)
            if exists:
                publish_tile(smem.queue, tile_count, numbers_of_tile(tile, C) + (recompute,), tile_size(C))
                overflow.numbers.index(tile_count & (OVERFLOW_SLOTS - 1)).store(
                    gl.full([1], 0, gl.int32, layout=ONE_WARP) + own)
                blocks, batch, head_k, row = load_first(args, smem, tile, row_k, tile_count, count,
                                                        (batch, head_k, row), C)
                has_overflowed = overflow_of(overflow, checked, C)  # now, since no stage is free for more keys yet
                checked += 1
                count, row = load_blocks(args, smem, count + 1, tile, blocks, row_k, batch, head_k, row, C)
                tile_count += 1
            if recompute == 0:
                number = fetch_next_tile(counter, total)
        else:
            last = gl.minimum(last, tile_count)
            if row >= 0:  # values are still to be loaded
                publish_tile(smem.queue, tile_count, (NO_TILE, 0, 0), tile_size(C))
                outside = -256  # the rows of a tile from there on lie outside, too
                load_kv(args, smem, count, (batch, head_k, outside), (batch, head_k, row), C)
                load_queries(args, smem, tile_count, (batch, head_k, outside), C)
                row = -C.BLOCK_N
                count += 1
                tile_count += 1
                mbarrier.wait(overflow.drained.index(0), drains & 1)
                drains += 1
            has_overflowed = overflow_of(overflow, checked, C)
            checked += 1
            running = (checked < last) | (has_overflowed != 0)
    publish_tile(smem.queue, tile_count, (NO_TILE, 0, 0), tile_size(C))
