"""Backward on Hopper at head dims up to 64: two warpgroups own keys, as in d128.py, and a third makes dQ.

With 64 columns a thread has registers to spare, and the third warpgroup takes dQ and its additions out of the chain of
dependent operations that a block is. The rest is pipelined by half a block: when an iteration begins, a consumer has P
and dP of its last queries. It makes dS of them, and issues four MMAs that follow one another without a pause: dV and dK
of these queries, S and dP of the next. Beside dK and dP it computes the next P. The two consumers do not wait for each
other, but for stages. lse, delta and ALiBi come as extra columns of an MMA's K dim (augmented_k.py).

With C.DYNAMIC_TILES a persistent CTA computes one tile of keys after another: the next one's keys, values and first
queries are loaded while the last blocks of the one before are computed. With C.HEAD_PERSISTENT a CTA goes over all keys
of a head, and no other CTA adds to this head's dQ: its accumulator stays in L2, the first tile that sees a block sets
it, and the last writes dq. Or C.CTAS_PER_HEAD of them share the tiles of a head, and writers add their parts in order,
as with C.DETERMINISTIC: then fewer heads' accumulators are in flight, and waves of CTAs are fuller. CTAs of one head
wait for one another: they are neighbours, and all have started before any behind them. With C.DETERMINISTIC alone a CTA
has one tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.hopper.alibi import slope_of
from tilewise.kernels.hopper.backward.augmented_k import (
    EXTRA_COLUMNS,
    AugmentedK,
    make_selectors,
    slope_times_offset,
)
from tilewise.kernels.hopper.backward.bias import (
    add_bias,
    await_bias,
    load_bias,
    make_bias_pipe,
    read_bias,
    release_bias,
)
from tilewise.kernels.hopper.backward.d64_types import KVPipe, Smem, State, TileView
from tilewise.kernels.hopper.backward.dq_accum import (
    DQStage,
    DQTarget,
    Ends,
    accumulate,
    accumulate_in_order,
    accumulate_or_write,
    await_accum,
    make_stages,
)
from tilewise.kernels.hopper.backward.dq_shared import accumulate_shared, stage_or_write
from tilewise.kernels.hopper.backward.epilogue import write_gradient
from tilewise.kernels.hopper.backward.kv_tile_assignment import tile_of_cta, tiles_of_cta
from tilewise.kernels.hopper.backward.masking import hide_pairs
from tilewise.kernels.hopper.backward.mmas import DPROBS, SCORE_LAYOUT, SCORES, issue_dq, issue_s_or_dp
from tilewise.kernels.hopper.backward.producers import kv_head_of, load_dout, load_queries
from tilewise.kernels.hopper.backward.types import Alibi, Args, Bias, Inputs, Outputs, Pipe
from tilewise.kernels.hopper.compat import tma_load, tma_store_wait
from tilewise.kernels.hopper.mask_plan import (
    MaskPlan,
    bits_of_rows,
    bits_of_step,
    kv_tile_in_list,
    q_blocks_of_tile,
)
from tilewise.kernels.hopper.mask_ranges import (
    QUERIES,
    is_last_of,
    phases_of,
    q_block_start,
    rank_of,
)
from tilewise.kernels.hopper.pipeline import (
    CONTIGUOUS,
    consumer_release,
    consumer_wait,
    make_barriers,
    named_barrier_sync,
    optimization_barrier,
    producer_acquire,
)
from tilewise.kernels.hopper.softmax import LOG2E
from tilewise.kernels.hopper.tile_scheduler import (
    NO_TILE,
    KVTile,
    TileQueue,
    fetch_next_tile,
    get_kv_tile,
    kv_tile_at,
    kv_tile_size,
    publish_kv_tile,
)

ZERO: gl.constexpr = gl.constexpr(0)
ONE: gl.constexpr = gl.constexpr(1)


@gluon.jit
def slope_log2_of(args, tile, member, C: gl.constexpr):
    """With C.HAS_ALIBI, load the slope of a query head of the group, times log2(e)."""
    if C.HAS_ALIBI:
        alibi = args.alibi
        return LOG2E * slope_of(alibi.slopes, tile.batch, tile.head * args.group + member, alibi.stride_b,
                                alibi.stride_h)
    else:
        return ()


@gluon.jit
def overlap_blocks(state, count, step, slope_log2, view, args, smem, ENDS: gl.constexpr, BEGINS: gl.constexpr,
                   MASKED: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """End the block of iteration ``count - 1`` (ENDS), whose P and dP the state has, and begin that of ``count``.

    ``step``: the latter's, in the tile's order of blocks; slope_log2: its head's.
    A tile's first iteration ends no block, and the one behind its last block begins none (BEGINS).
    """
    probs, left_probs, dprobs, dk, dv = state
    kv, q_tiles, dout_tiles = smem.kv, smem.q.tiles, smem.dout.tiles
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    DTYPE: gl.constexpr = kv.k_tiles.dtype
    kv_index = view.kv_index
    last = count - 1
    words = ()
    if BEGINS:
        if C.HAS_ALIBI:
            offset_log2 = slope_times_offset(slope_log2, q_block_start(step, view.blocks, C), view)
        if MASKED:
            words = bits_of_step(step, view, QUERIES, C)
        consumer_wait(smem.q.full, count, C.Q_STAGES)
        consumer_wait(smem.dout.full, count, C.DOUT_STAGES)
    if ENDS:
        dscores = (probs * dprobs).to(DTYPE)
        smem.dscores.tiles.index((last & 1) * C.CONSUMERS + WG).store(dscores)
        fence_async_shared()
        consumer_release(smem.dscores.full, last, 2)
        dout = dout_tiles.index(last % C.DOUT_STAGES).reshape([QUERIES, C.WIDTH])
        dv_pending = warpgroup_mma(left_probs, dout, dv, is_async=True)
        release_bias(smem.bias, last, C)
    if BEGINS:
        await_bias(smem.bias, count, C)
        k = kv.k_tiles.index(kv_index).reshape([64, C.WIDTH])
        scores_pending = issue_s_or_dp(k, q_tiles, smem.row_stats, count, count % C.Q_STAGES, SCORES, C)
    if ENDS:
        q = q_tiles.index(last % C.Q_STAGES).reshape([QUERIES, C.WIDTH])
        dk_pending = warpgroup_mma(gl.convert_layout(dscores, LEFT), q, dk, is_async=True)
    if BEGINS:
        if C.HEAD_PERSISTENT:  # else what K's descriptor shares with V's spills: 144 bytes with 3.9
            kv_index = optimization_barrier(kv_index)
        v = kv.v_tiles.index(kv_index).reshape([64, C.WIDTH])
        dprobs_pending = issue_s_or_dp(v, dout_tiles, smem.row_stats, count, count % C.DOUT_STAGES, DPROBS, C)
        # Of the MMAs behind S two are dP's: it begins with that of the extra columns.
        bias = read_bias(smem.bias, count, WG, C)
        scores = warpgroup_mma_wait(3 if ENDS else 2, deps=(scores_pending,))
        if C.HAS_ALIBI:
            exponents = scores * args.scales.scale_log2 + offset_log2
        else:
            exponents = scores * args.scales.scale_log2
        probs = gl.exp2(add_bias(exponents, bias, C))
        if MASKED:
            probs = hide_pairs(probs, q_block_start(step, view.blocks, C), words, view, C)
        left_probs = gl.convert_layout(probs.to(DTYPE), LEFT)
        producer_acquire(smem.dscores.empty, count, 2)
    if ENDS and BEGINS:
        dk, dv, dprobs = warpgroup_mma_wait(0, deps=(dk_pending, dv_pending, dprobs_pending))
    elif ENDS:
        dk, dv = warpgroup_mma_wait(0, deps=(dk_pending, dv_pending))
    else:
        dprobs = warpgroup_mma_wait(0, deps=(dprobs_pending,))
    if ENDS:
        consumer_release(smem.dout.empty, last, C.DOUT_STAGES)
        consumer_release(smem.q.empty, last, C.Q_STAGES)
    return State(probs, left_probs, dprobs, dk, dv)


@gluon.jit
def attend_blocks(begin, end, count, state, slope_log2, view, args, smem, MASKED: gl.constexpr, WG: gl.constexpr,
                  C: gl.constexpr):
    """Begin blocks ``begin`` to ``end`` of one query head, and end those before them."""
    for step in range(begin, end):
        state = overlap_blocks(state, count, step, slope_log2, view, args, smem, True, True, MASKED, WG, C)
        count += 1
    return count, state


@gluon.jit
def load_tile(args, smem, tile, count, tile_count, C: gl.constexpr):
    """Producer: keys and values of a tile, and behind them the queries of every head of the group."""
    inputs, kv = args.inputs, smem.kv
    NC: gl.constexpr = C.CONSUMERS
    blocks = q_blocks_of_tile(tile, args.bounds, args.plan, C)
    producer_acquire(kv.empty, tile_count, C.KV_STAGES)
    stage = tile_count % C.KV_STAGES
    mbarrier.expect(kv.full.index(stage), NC * (inputs.k.block_type.nbytes + inputs.v.block_type.nbytes))
    head = kv_head_of(tile, inputs)
    for i in gl.static_range(NC):
        index = stage * NC + i
        tma_load(inputs.k, [tile.batch, head, tile.first + i * 64, 0], kv.full.index(stage), kv.k_tiles.index(index))
        tma_load(inputs.v, [tile.batch, head, tile.first + i * 64, 0], kv.full.index(stage), kv.v_tiles.index(index))
    for member in range(args.group):
        for step in range(blocks.count):
            place = (tile.batch, tile.head * args.group + member, q_block_start(step, blocks, C), 0)
            load_queries(inputs, smem, count, place, 0, (), False, C)
            load_dout(inputs, smem, count, place, False, C)
            load_bias(inputs.bias, smem.bias, count, place, tile.first, C)
            count += 1
    return count


@gluon.jit
def load(args, smem, C: gl.constexpr):
    """Producer, one warp: tile after tile; with C.DYNAMIC_TILES it fetches and publishes them."""
    count = 0
    if C.DYNAMIC_TILES:
        total = args.grid.tiles * args.grid.heads * args.grid.batches
        number = gl.program_id(0)
        tile_count = 0
        while number < total:
            tile = kv_tile_at(number, args.grid, C)
            if C.MASK_PLAN:
                tile = kv_tile_in_list(args.plan, tile, C)
            publish_kv_tile(smem.queue, tile_count, tile, C)
            count = load_tile(args, smem, tile, count, tile_count, C)
            tile_count += 1
            number = fetch_next_tile(args.tile_counter, total)
        publish_kv_tile(smem.queue, tile_count, KVTile(NO_TILE, 0, 0, 0, 0), C)
    else:
        for tile_count in range(tiles_of_cta(args.grid, C)):
            count = load_tile(args, smem, tile_of_cta(tile_count, args.grid, C), count, tile_count, C)


@gluon.jit
def attend_tile(args, smem, tile, count, tile_count, WG: gl.constexpr, C: gl.constexpr):
    """Consumer: dK and dV of 64 keys of a tile, and dS of every block for the warpgroup that makes dQ."""
    kv, outputs, bounds = smem.kv, args.outputs, args.bounds
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.WIDTH, 16])
    FIRST: gl.constexpr = 1 if C.DETERMINISTIC and not C.HAS_LOWER else 0
    STOP: gl.constexpr = 3 if C.DETERMINISTIC else 2
    dk = gl.full([64, C.WIDTH], 0.0, gl.float32, layout=ACC_LAYOUT)
    dv = gl.full([64, C.WIDTH], 0.0, gl.float32, layout=ACC_LAYOUT)
    zeros = gl.full([64, QUERIES], 0.0, gl.float32, layout=SCORE_LAYOUT)
    left_zeros = gl.convert_layout(zeros.to(kv.k_tiles.dtype), gl.DotOperandLayout(0, ACC_LAYOUT, 2))
    state = State(zeros, left_zeros, zeros, dk, dv)
    blocks = q_blocks_of_tile(tile, bounds, args.plan, C)
    key = tile.first + WG * 64
    ends = phases_of(key, blocks, bounds, C)
    kv_index = tile_count % C.KV_STAGES * C.CONSUMERS + WG
    bits = ()
    if C.MASK_PLAN:
        bits = bits_of_rows(args.plan, tile.batch, tile.head, key // 64)
    view = TileView(key, kv_index, blocks, bounds, bits, args.alibi.diagonal)
    slope_log2 = slope_log2_of(args, tile, 0, C)
    consumer_wait(kv.full, tile_count, C.KV_STAGES)
    # Each tile has a block: only keys that a query sees are read, and a plan lists one block at least.
    state = overlap_blocks(state, count, 0, slope_log2, view, args, smem, False, True, True, WG, C)
    if tile_count > 0:
        tma_store_wait(0)  # dK and dV of the tile before have been read where its keys and values were
        consumer_release(kv.empty, tile_count - 1, C.KV_STAGES)
    count += 1
    for member in range(args.group):
        slope_log2 = slope_log2_of(args, tile, member, C)
        for phase in gl.static_range(FIRST, STOP):
            begin = gl.where(member == 0, gl.maximum(ends[phase], 1), ends[phase])
            count, state = attend_blocks(begin, ends[phase + 1], count, state, slope_log2, view, args, smem, phase != 1,
                                         WG, C)
    state = overlap_blocks(state, count, 0, (), view, args, smem, True, False, False, WG, C)
    if C.CTAS_PER_HEAD > 1:  # computed anew, not kept in registers through all blocks
        tile = tile_of_cta(optimization_barrier(tile_count), args.grid, C)
    place = (tile.batch, tile.head, tile.first + WG * 64, 0)
    write_gradient(outputs.dv_desc, None, kv.v_tiles.index(kv_index), state.dv, place, 64, C)
    named_barrier_sync(C.CONSUMERS + 1)  # dQ has read these keys
    write_gradient(outputs.dk_desc, None, kv.k_tiles.index(kv_index), state.dk * args.scales.gradient, place, 64, C)
    return count


@gluon.jit
def attend(args, smem, WG: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: its keys of one tile after another."""
    count = 0
    if C.DYNAMIC_TILES:
        tile_count = 0
        tile = get_kv_tile(smem.queue, tile_count, C)
        while tile.first != NO_TILE:
            count = attend_tile(args, smem, tile, count, tile_count, WG, C)
            tile_count += 1
            tile = get_kv_tile(smem.queue, tile_count, C)
    else:
        for tile_count in range(tiles_of_cta(args.grid, C)):
            count = attend_tile(args, smem, tile_of_cta(tile_count, args.grid, C), count, tile_count, WG, C)
    tma_store_wait(0)


@gluon.jit
def make_dq_of_tile(args, smem, tile, count, tile_count, C: gl.constexpr):
    """Third warpgroup: dQ of every block of a tile, added to the accumulator or staged for writers; or all of dq."""
    kv, bounds, group = smem.kv, args.bounds, args.group
    blocks_of_head = (bounds.sq + (QUERIES - 1)) // QUERIES
    SHARED: gl.constexpr = C.CTAS_PER_HEAD > 1
    blocks = q_blocks_of_tile(tile, bounds, args.plan, C)
    consumer_wait(kv.full, tile_count, C.KV_STAGES)
    if C.HEAD_PERSISTENT and not SHARED:
        await_accum()  # of the tiles before
    for member in range(group):
        head = tile.head * group + member
        if C.HEAD_PERSISTENT and not SHARED:
            head_row = gl.program_id(0) * group + member
        else:
            head_row = tile.batch * args.grid.heads * group + head
        for step in range(blocks.count):
            query = q_block_start(step, blocks, C)
            part = head_row * blocks_of_head + query // QUERIES
            consumer_wait(smem.dscores.full, count, 2)
            dq_pending = issue_dq(kv.k_tiles, smem.dscores.tiles, count & 1, tile_count % C.KV_STAGES * C.CONSUMERS, 0,
                                  1, False, C)
            dq = warpgroup_mma_wait(0, deps=(dq_pending,))
            consumer_release(smem.dscores.empty, count, 2)
            place = [tile.batch, head, query, 0]
            if SHARED:
                ends = Ends(rank_of(tile.first, query // QUERIES, bounds, C) == 0,
                            is_last_of(tile.first, query, bounds, C))
                stage_or_write(dq, args.dq, smem.dq_stage, count, place, ends)
            elif C.HEAD_PERSISTENT:
                ends = Ends(rank_of(tile.first, query // QUERIES, bounds, C) == 0,
                            is_last_of(tile.first, query, bounds, C))
                accumulate_or_write(dq, args.dq, smem.dq_stage, part, place, ends, True)
            else:
                accumulate(args.dq.accum, dq, smem.dq_stage, count, part, 0, C)
            count += 1
    named_barrier_sync(C.CONSUMERS + 1)
    return count


@gluon.jit
def make_dq(args, smem, C: gl.constexpr):
    """Third warpgroup: dQ of one tile after another."""
    count = 0
    if C.DYNAMIC_TILES:
        tile_count = 0
        tile = get_kv_tile(smem.queue, tile_count, C)
        while tile.first != NO_TILE:
            count = make_dq_of_tile(args, smem, tile, count, tile_count, C)
            tile_count += 1
            tile = get_kv_tile(smem.queue, tile_count, C)
    else:
        for tile_count in range(tiles_of_cta(args.grid, C)):
            count = make_dq_of_tile(args, smem, tile_of_cta(tile_count, args.grid, C), count, tile_count, C)
    tma_store_wait(0)


@gluon.jit
def hopper_backward_d64_kernel(q_desc, k_desc, v_desc, dout_desc, columns_desc, bias_desc, dk_desc, dv_desc, dq_desc,
                               accum, workspace_ptr, pointers, numbers, C: gl.constexpr):
    """Compute dk and dv, and the dQ accumulator, or with C.HEAD_PERSISTENT dq.

    Grid: (tiles · heads of k · batches,), with C.HEAD_PERSISTENT any multiple of C.CTAS_PER_HEAD up to as many times
    heads of k · batches, with C.DYNAMIC_TILES any number up to its own. columns_desc: the extra columns of queries.
    bias_desc: None without a bias. pointers, numbers: a BackwardPointers and a BackwardNumbers.

    accum: (·, 256), a descriptor. The accumulator must be zero at first, but with C.DETERMINISTIC. Where a CTA has a
    head to itself it has room for a group's blocks for each CTA. dq_desc: with C.HEAD_PERSISTENT, else None.
    workspace_ptr points with C.HEAD_PERSISTENT to the accumulator, behind which the semaphores stand where CTAs share a
    head; else with C.DETERMINISTIC to these semaphores, one for each block of a query head, zero at first; with
    C.DYNAMIC_TILES to the counter of the dynamic tile scheduler, zero at first and in the end.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    NC: gl.constexpr = C.CONSUMERS
    KV_TILES: gl.constexpr = C.KV_STAGES * NC
    k_tiles = gl.allocate_shared_memory(DTYPE, [KV_TILES, 1, 1, 64, C.WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [KV_TILES, 1, 1, 64, C.WIDTH], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(DTYPE, [C.Q_STAGES, 1, 1, QUERIES, C.WIDTH], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [C.DOUT_STAGES, 1, 1, QUERIES, C.WIDTH], dout_desc.layout)
    DSCORES_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, QUERIES], DTYPE)
    dscores_tiles = gl.allocate_shared_memory(DTYPE, [2 * NC, 64, QUERIES], DSCORES_LAYOUT)
    row_stats = AugmentedK(make_selectors(C.HAS_ALIBI), gl.allocate_shared_memory(
        gl.bfloat16, [C.Q_STAGES, 1, 1, QUERIES, EXTRA_COLUMNS], columns_desc.layout))
    kv_pipe = KVPipe(k_tiles, v_tiles, make_barriers(C.KV_STAGES, 1), make_barriers(C.KV_STAGES, NC))
    q_pipe = Pipe(q_tiles, make_barriers(C.Q_STAGES, 1), make_barriers(C.Q_STAGES, NC))
    dout_pipe = Pipe(dout_tiles, make_barriers(C.DOUT_STAGES, 1), make_barriers(C.DOUT_STAGES, NC))
    dscores_pipe = Pipe(dscores_tiles, make_barriers(2, NC), make_barriers(2, 1))
    IN_ORDER: gl.constexpr = C.DETERMINISTIC and not C.HEAD_PERSISTENT
    if IN_ORDER:
        dq_stage = make_stages(accum, 1, C)
    elif C.HEAD_PERSISTENT:
        dq_rows = gl.allocate_shared_memory(dq_desc.dtype, dq_desc.block_type.shape, dq_desc.layout)
        if C.CTAS_PER_HEAD > 1:
            dq_stage = DQStage(make_stages(accum, 1, C), dq_rows)
        else:
            dq_stage = DQStage(gl.allocate_shared_memory(gl.float32, [C.WIDTH // 4, 256], accum.layout), dq_rows)
    else:
        dq_stage = gl.allocate_shared_memory(gl.float32, [1, C.WIDTH // 4, 256], accum.layout)
    bias_pipe = make_bias_pipe(bias_desc, C)
    queue = ()
    if C.DYNAMIC_TILES:
        tile_values = gl.allocate_shared_memory(gl.int32, [2 * kv_tile_size(C), 1], CONTIGUOUS)
        queue = TileQueue(tile_values, make_barriers(2, 1), make_barriers(2, NC + 1))
    fence_async_shared()
    grid, scales = numbers.grid, numbers.scales
    tile = ()
    if IN_ORDER:
        tile = kv_tile_at(gl.program_id(0), grid, C)
    bias = ()
    if C.BIAS_STAGES > 0:
        bias = Bias(bias_desc, numbers.bias.own_batch, numbers.bias.own_head, numbers.bias.first_key)
    args = Args(Inputs(q_desc, k_desc, v_desc, dout_desc, columns_desc, None, None, bias, numbers.group_splits),
                Outputs(dk_desc, dv_desc, None, None),
                DQTarget(accum, workspace_ptr, workspace_ptr, dq_desc, scales.gradient), grid, numbers.bounds,
                numbers.group, scales, None, None, tile, workspace_ptr,
                MaskPlan(pointers.lists, pointers.bits, numbers.plan),
                Alibi(pointers.slopes, numbers.slopes_b, numbers.slopes_h, numbers.diagonal))
    smem = Smem(kv_pipe, q_pipe, dout_pipe, row_stats, dscores_pipe, dq_stage, queue, bias_pipe)
    if IN_ORDER:
        gl.warp_specialize([
            (attend, (args, smem, ZERO, C)), (attend, (args, smem, ONE, C)), (make_dq, (args, smem, C)),
            (load, (args, smem, C)), (accumulate_in_order, (args, dq_stage, (), ZERO, ONE, C)),
            (accumulate_in_order, (args, dq_stage, (), ONE, ONE, C)),
        ], [4, 4, 1, 1, 1], [208, 72, 24, 24, 24])
    elif C.CTAS_PER_HEAD > 1:
        gl.warp_specialize([
            (attend, (args, smem, ZERO, C)), (attend, (args, smem, ONE, C)), (make_dq, (args, smem, C)),
            (load, (args, smem, C)), (accumulate_shared, (args, dq_stage.parts, ZERO, C)),
            (accumulate_shared, (args, dq_stage.parts, ONE, C)),
        ], [4, 4, 1, 1, 1], [200, 88, 24, 24, 24])
    else:
        gl.warp_specialize([
            (attend, (args, smem, ZERO, C)), (attend, (args, smem, ONE, C)), (make_dq, (args, smem, C)),
            (load, (args, smem, C)),
        ], [4, 4, 1], [200, 88, 24] if C.HEAD_PERSISTENT else [208, 72, 24])
