"""The Hopper backward kernel's producer warp: it loads keys and values, and the queries that see them.

A CTA has one tile of keys. With C.AUGMENTED_K it has tile after tile, as the scheduler gives them or as a head has
them, and the stream of queries does not stop between them: the queries of a tile's first block come while the tile
before is in its last one, and so do its values and its keys, each as soon as the last MMA that needs those before is
done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.kernels.hopper.backward.bias import load_bias
from tilewise.kernels.hopper.compat import tma_load
from tilewise.kernels.hopper.mask_plan import kv_tile_in_list, q_blocks_of_tile
from tilewise.kernels.hopper.mask_ranges import (
    QUERIES,
    q_block_start,
    q_block_start_serpentine,
)
from tilewise.kernels.hopper.pipeline import ONE_WARP, producer_acquire
from tilewise.kernels.hopper.softmax import LOG2E, LOST
from tilewise.kernels.hopper.tile_scheduler import (
    NO_TILE,
    KVTile,
    fetch_next_tile,
    kv_tile_at,
    publish_kv_tile,
)
from tilewise.kernels.hopper.varlen import clear_rows, kv_tile_of, sequence_rows_of


@gluon.jit
def fetch_row_stats(lse_ptr, delta_ptr, lse_row, offsets, inside):
    """Read lse and delta of some queries, which begin at ``lse_row``; -inf and 0 of those that are not inside."""
    lse = gl.load(lse_ptr + lse_row + offsets, mask=inside, other=float("-inf"))
    delta = gl.load(delta_ptr + lse_row + offsets, mask=inside, other=0.0)
    return lse, delta


@gluon.jit
def in_base_2(lse):
    """Turn lse to base 2, and to +inf where there is no query or it sees nothing: the probabilities are 0 there.

    They are, too, where lse is LOST: else they could overflow, and with them the gradients of other rows.
    """
    lse *= LOG2E
    return gl.where(gl.abs(lse) >= LOST, float("inf"), lse)


@gluon.jit
def put_row_stats(row_stats, stage, lse, delta):
    """Producer: write lse and delta of a Q stage's queries to shared memory."""
    row_stats.index(2 * stage).store(in_base_2(lse))
    row_stats.index(2 * stage + 1).store(delta)


@gluon.jit
def load_queries(inputs, smem, count, place, lse_row, rows, clears, C: gl.constexpr):
    """Producer: load Q of one iteration, and lse and delta of the same queries, or with C.AUGMENTED_K extra columns.

    place: batch, head, first query of its sequence, and the sequence's first row. lse_row: where lse of the sequence's
    first query is; rows: which queries see a key. clears: some rows are to be zeroed before the tile is full; it
    arrives at the pipe's spare barrier then, full.index(C.Q_STAGES).
    """
    q_tiles, full, empty = smem.q
    batch, head, first, row = place
    if not C.AUGMENTED_K:
        offsets = first + gl.arange(0, QUERIES, layout=ONE_WARP)
        inside = offsets < rows.q_end
        if C.VARLEN:
            inside = inside & (offsets >= rows.q_begin)
        lse, delta = fetch_row_stats(inputs.lse, inputs.delta, lse_row, offsets, inside)
        if C.HAS_DROPOUT:
            delta *= inputs.delta_scale
    producer_acquire(empty, count, C.Q_STAGES)
    stage = count % C.Q_STAGES
    arrival = stage
    if C.VARLEN:
        arrival = gl.where(clears, C.Q_STAGES, stage)
    at = [batch, head, row + first, 0]
    if C.AUGMENTED_K:
        mbarrier.expect(full.index(arrival), inputs.q.block_type.nbytes + inputs.lse.block_type.nbytes)
        tma_load(inputs.q, at, full.index(arrival), q_tiles.index(stage))
        tma_load(inputs.lse, at, full.index(arrival), smem.row_stats.columns.index(stage))
    else:
        mbarrier.expect(full.index(arrival), inputs.q.block_type.nbytes)
        tma_load(inputs.q, at, full.index(arrival), q_tiles.index(stage))
        put_row_stats(smem.row_stats, stage, lse, delta)
        mbarrier.arrive(full.index(arrival), count=1)


@gluon.jit
def load_dout(inputs, smem, count, place, clears, C: gl.constexpr):
    """Producer: load dO of one iteration; its arguments are those of ``load_queries``."""
    dout_tiles, full, empty = smem.dout
    batch, head, first, row = place
    producer_acquire(empty, count, C.DOUT_STAGES)
    stage = count % C.DOUT_STAGES
    arrival = stage
    if C.VARLEN:
        arrival = gl.where(clears, C.DOUT_STAGES, stage)
    mbarrier.expect(full.index(arrival), inputs.dout.block_type.nbytes)
    tma_load(inputs.dout, [batch, head, row + first, 0], full.index(arrival), dout_tiles.index(stage))


@gluon.jit
def clear_queries(smem, count, cleared, begin, stop, C: gl.constexpr):
    """Producer: zero the rows of Q and dO that see no key, then arrive for both. cleared: how often it has before."""
    mbarrier.wait(smem.q.full.index(C.Q_STAGES), cleared & 1)
    mbarrier.wait(smem.dout.full.index(C.DOUT_STAGES), cleared & 1)
    clear_rows(smem.q.tiles, count % C.Q_STAGES, begin, stop, C.WIDTH)
    clear_rows(smem.dout.tiles, count % C.DOUT_STAGES, begin, stop, C.WIDTH)
    fence_async_shared()
    # What went to the spare barriers arrives here: TMA's bytes, and of Q the copy of lse and delta.
    mbarrier.arrive(smem.q.full.index(count % C.Q_STAGES), count=2)
    mbarrier.arrive(smem.dout.full.index(count % C.DOUT_STAGES), count=1)


@gluon.jit
def kv_head_of(tile, inputs):
    """Return the head of k and v that a tile reads: several heads of dk and dv share it where a group is split."""
    head = tile.head
    if inputs.group_splits is not None:
        head = head // inputs.group_splits
    return head


@gluon.jit
def load_kv(inputs, kv, tile, rows, C: gl.constexpr):
    """Producer: load K and V of each consumer, and zero the rows of those that are not seen."""
    NC: gl.constexpr = C.CONSUMERS
    head = kv_head_of(tile, inputs)
    for i in gl.static_range(NC):
        key = tile.first + i * 64
        arrival = i
        if C.VARLEN:
            clears = (rows.k_begin > key) | (rows.k_end < key + 64)
            arrival = gl.where(clears, NC + i, i)
        place = [tile.batch, head, rows.row_k + key, 0]
        mbarrier.expect(kv.full.index(arrival), inputs.k.block_type.nbytes + inputs.v.block_type.nbytes)
        tma_load(inputs.k, place, kv.full.index(arrival), kv.k_tiles.index(i))
        tma_load(inputs.v, place, kv.full.index(arrival), kv.v_tiles.index(i))
        if C.VARLEN:
            if clears:
                mbarrier.wait(kv.full.index(NC + i), 0)  # the first phase: with C.VARLEN a CTA has one tile
                begin = gl.minimum(rows.k_begin - key, 64)
                stop = gl.maximum(rows.k_end - key, 0)
                clear_rows(kv.k_tiles, i, begin, stop, C.WIDTH)
                clear_rows(kv.v_tiles, i, begin, stop, C.WIDTH)
                fence_async_shared()
                mbarrier.arrive(kv.full.index(i), count=1)


@gluon.jit
def load_next_kv(inputs, kv, tile, row_k, tile_count, C: gl.constexpr):
    """Producer: load V and K of each consumer when those of the tile before have been released, V first."""
    NC: gl.constexpr = C.CONSUMERS
    head = kv_head_of(tile, inputs)
    for i in gl.static_range(NC):
        mbarrier.wait(kv.v_empty.index(i), (tile_count & 1) ^ 1)
        mbarrier.expect(kv.full.index(i), inputs.v.block_type.nbytes)
        tma_load(inputs.v, [tile.batch, head, row_k + tile.first + i * 64, 0], kv.full.index(i), kv.v_tiles.index(i))
    mbarrier.wait(kv.k_empty.index(0), (tile_count & 1) ^ 1)
    for i in gl.static_range(NC):
        mbarrier.expect(kv.full.index(i), inputs.k.block_type.nbytes)
        tma_load(inputs.k, [tile.batch, head, row_k + tile.first + i * 64, 0], kv.full.index(i), kv.k_tiles.index(i))


@gluon.jit
def load_tile(args, smem, tile, count, tile_count, C: gl.constexpr):
    """Producer: a tile's keys and values, and the queries of every head of the group. Returns the next iteration.

    With C.AUGMENTED_K the keys come behind the first block's queries, for which there is room earlier. Every tile has a
    block then: only keys that a query sees are read, and a plan lists one block at least.
    """
    inputs = args.inputs
    total = args.bounds.sq  # queries of all sequences
    tile, bounds = kv_tile_of(smem.metadata, tile, args.bounds, 1, C)
    blocks = q_blocks_of_tile(tile, bounds, args.plan, C)
    rows = sequence_rows_of(smem.metadata, bounds, C)
    begun = count
    if not C.AUGMENTED_K:
        load_kv(inputs, smem.kv, tile, rows, C)
    cleared = 0
    clears = False
    for member in range(args.group):
        head = tile.head * args.group + member
        lse_row = (tile.batch * args.grid.heads * args.group + head).to(gl.int64) * total + rows.row_q
        for step in range(blocks.count):
            if C.HEAD_PERSISTENT:
                query = q_block_start_serpentine(step, tile.first, blocks, C)
            else:
                query = q_block_start(step, blocks, C)
            place = (tile.batch, head, query, rows.row_q)
            if C.VARLEN:
                clears = (query < rows.q_begin) | (query + QUERIES > rows.q_end)
            load_queries(inputs, smem, count, place, lse_row, rows, clears, C)
            load_dout(inputs, smem, count, place, clears, C)
            load_bias(inputs.bias, smem.bias, count, place, tile.first, C)
            if C.AUGMENTED_K:
                if count == begun:
                    load_next_kv(inputs, smem.kv, tile, rows.row_k, tile_count, C)
            if C.VARLEN:
                if clears:
                    clear_queries(smem, count, cleared, rows.q_begin - query, rows.q_end - query, C)
                    cleared += 1
            count += 1
    if C.S_AHEAD:
        if count > 0:  # S is computed ahead in the last block, too
            place = (tile.batch, tile.head * args.group, rows.q_end, rows.row_q)
            load_queries(inputs, smem, count, place, 0, rows, False, C)
    return count


@gluon.jit
def load(args, smem, C: gl.constexpr):
    """Producer, one warp: keep the pipes full. With C.AUGMENTED_K it fetches tiles, else it has one.

    With C.HEAD_PERSISTENT the assignment is static: heads are as long as each other.
    """
    count = 0
    tile_count = 0
    if C.AUGMENTED_K:
        tiles = args.grid.tiles
        total = tiles * args.grid.heads * args.grid.batches
        number = gl.program_id(0)
        if C.HEAD_PERSISTENT:  # its head's last tile
            number = (number + 1) * tiles - 1
        while number < total:
            tile = kv_tile_at(number, args.grid, C)
            if C.MASK_PLAN:
                tile = kv_tile_in_list(args.plan, tile, C)
            publish_kv_tile(smem.queue, tile_count, tile, C)
            count = load_tile(args, smem, tile, count, tile_count, C)
            tile_count += 1
            if C.HEAD_PERSISTENT:  # the one before it, or the last one of the next head
                if number % tiles == 0:
                    number += (gl.num_programs(0) + 1) * tiles
                number -= 1
            else:
                number = fetch_next_tile(args.tile_counter, total)
        publish_kv_tile(smem.queue, tile_count, KVTile(NO_TILE, 0, 0, 0, 0), C)
    else:
        load_tile(args, smem, args.tile, count, tile_count, C)
