"""Backward on Hopper: a tile of keys is resident, the queries that see it stream past (maths.md, section 6).

One producer warp loads; each consumer, a warpgroup, owns 64 keys and accumulates their dK and dV in registers. It
computes its scores transposed, Sᵀ = K·Qᵀ, so that P and dS come out as left operands of dV = Pᵀ·dO and dK = dSᵀ·Q. Only
dQ = dS·K needs the keys of all consumers: dS goes through shared memory, and each warpgroup makes its part of dQ from
the whole of it. That part is added to the dQ accumulator in global memory (dq_accum.py), in float32 and in the order in
which threads hold it; dq_postprocess.py brings it into dq's order. The query heads of a group pass one after another
while the keys stay in shared memory.

With C.S_AHEAD, S of the next block is computed while this block's dQ and dK are: a block then begins with its softmax.

With C.AUGMENTED_K a CTA is persistent: it computes one tile of keys after another, as the dynamic scheduler gives them.
The next tile's values, keys and first queries are loaded while the last block is computed and dK and dV are written, by
way of the shared memory in which dS and the parts of dQ are staged. With C.HEAD_PERSISTENT a CTA has all tiles of a
head instead, from the last one on, and no other CTA adds to this head's dQ: the first tile that sees a block sets its
accumulator, and the last one begins from it and writes dq.

Where lengths are data, rows of other sequences come into the tiles. Their probabilities are 0 and enter MMAs, and 0 ·
NaN is NaN: the producer warp zeroes these rows before it completes the tile's barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.hopper.alibi import as_pairs, slope_of, slope_times_distance
from tilewise.kernels.hopper.backward import dropout
from tilewise.kernels.hopper.backward.augmented_k import (
    EXTRA_COLUMNS,
    AugmentedK,
    make_selectors,
    slope_times_offset,
)
from tilewise.kernels.hopper.backward.bias import (
    add_bias,
    await_bias,
    make_bias_pipe,
    read_bias,
    release_bias,
)
from tilewise.kernels.hopper.backward.dq_accum import (
    DQTarget,
    accumulate_in_order,
    accumulate_or_write_part,
    accumulate_or_write_rows,
    await_accum_but_last,
    make_stages,
    start_of_part,
    write_blind_rows,
)
from tilewise.kernels.hopper.backward.epilogue import write_gradient
from tilewise.kernels.hopper.backward.masking import hide_pairs
from tilewise.kernels.hopper.backward.mmas import (
    DPROBS,
    SCORE_LAYOUT,
    SCORES,
    dscores_index,
    issue_dq,
    issue_s_or_dp,
)
from tilewise.kernels.hopper.backward.producers import load
from tilewise.kernels.hopper.backward.types import (
    Alibi,
    Args,
    Bias,
    Inputs,
    KVTiles,
    Outputs,
    Pipe,
    QHead,
    Smem,
    State,
    TileView,
)
from tilewise.kernels.hopper.compat import reinterpret, tma_store_wait
from tilewise.kernels.hopper.mask_plan import (
    MaskPlan,
    bits_of_rows,
    bits_of_step,
    kv_tile_in_list,
    q_blocks_of_tile,
)
from tilewise.kernels.hopper.mask_ranges import (
    QUERIES,
    phases_of,
    q_block_start,
    q_block_start_serpentine,
)
from tilewise.kernels.hopper.pipeline import (
    CONTIGUOUS,
    consumer_release,
    consumer_wait,
    make_barriers,
    named_barrier_sync,
    optimization_barrier,
    scheduling_fence_of,
)
from tilewise.kernels.hopper.score_functions import (
    HeadPlace,
    as_tile,
    function_arguments,
    function_of_pairs,
    gradient_of_pairs,
)
from tilewise.kernels.hopper.softmax import LOG2E, tanh_of, times_tanh_derivative
from tilewise.kernels.hopper.tile_scheduler import (
    NO_TILE,
    TileQueue,
    get_kv_tile,
    kv_tile_at,
    kv_tile_size,
)
from tilewise.kernels.hopper.varlen import (
    diagonal_at,
    dq_blocks_of,
    has_all_keys,
    has_rows,
    key_rows_of,
    kv_tile_of,
    load_tile_metadata,
    locate_keys,
    sequence_at,
    store_tile_metadata,
)


@gluon.jit
def take_off_distances(exponents, first_query, slope_log2, view, C: gl.constexpr):
    """Take ALiBi's slope times the distance off exponents, of keys by queries."""
    corner = first_query + view.diagonal - view.key
    pairs = as_pairs(exponents) - slope_times_distance(exponents, corner, slope_log2, True, C.SEES_AHEAD)
    return as_tile(pairs, exponents)


@gluon.jit
def exponents_of_function(scores, lse, first_query, bits, head, view, args, MASKED: gl.constexpr,
                          FUNCTION: gl.constexpr, DERIVATIVE: gl.constexpr, C: gl.constexpr):
    """Return the exponents of what a function makes of scores, which are products, or tanh, and its derivative, if any.

    The derivative is a factor of dS, 0 where a pair is hidden: there the function may make NaN. It comes with the
    function, not with dS: what the two have in common would else take registers in between. A query that is not there
    has an lse of inf; what the function makes of its score, which is 0, takes no part either.
    """
    place = HeadPlace(view.sequence, head.head, args.function_tensors, args.first_pair)
    corner = (first_query, view.key)
    arguments = function_arguments(scores, corner, place, view.bounds, True, MASKED, C.INT64)
    pairs = as_pairs(scores) * args.scales.to_natural
    made = as_tile(function_of_pairs(pairs, arguments, place.tensors, FUNCTION), scores)
    slopes = ()
    if DERIVATIVE is not None:
        ones = gl.full(pairs.shape, 1.0, gl.float32, layout=pairs.type.layout)
        slopes = as_tile(gradient_of_pairs(ones, pairs, arguments, place.tensors, DERIVATIVE), scores)
        if MASKED:
            slopes = hide_pairs(slopes, first_query, bits, view, C)
        slopes = gl.where((lse < float("inf"))[None, :], slopes, 0.0)
    return gl.where((lse < float("inf"))[None, :], made * LOG2E - lse[None, :], float("-inf")), slopes


@gluon.jit
def attend_blocks(begin, end, count, state, head, view, args, smem, draws, WG: gl.constexpr, MASKED: gl.constexpr,
                  FUNCTION: gl.constexpr, DERIVATIVE: gl.constexpr, C: gl.constexpr):
    """Blocks ``begin`` to ``end`` of a query head: add to dK and dV in registers, and to dQ in memory.

    count: the Q pipe's iteration; returns the next one, and the state.
    """
    scores, dk, dv = state
    kv, q_tiles, dout_tiles, row_stats = smem.kv, smem.q.tiles, smem.dout.tiles, smem.row_stats
    blocks, bounds, key = view.blocks, view.bounds, view.key
    scale_log2 = args.scales.scale_log2
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORE_LAYOUT)
    DTYPE: gl.constexpr = kv.k_tiles.dtype
    unmasked_start = 0 if C.MASK_PLAN else blocks.start + (blocks.upper_boundary - blocks.boundary) * QUERIES
    count = optimization_barrier(count) if C.VARLEN else count
    for step in range(begin, end):
        stage = count % C.Q_STAGES
        # Else what all operands' addresses are made of stays in registers between tiles, and spills.
        wg = optimization_barrier(WG) if C.AUGMENTED_K else WG
        k = kv.k_tiles.index(wg).reshape([64, C.WIDTH])
        v = kv.v_tiles.index(wg).reshape([64, C.WIDTH])
        if C.HEAD_PERSISTENT:
            first_query = q_block_start_serpentine(step, key - WG * 64, blocks, C)
        elif MASKED or C.DETERMINISTIC or C.MASK_PLAN:
            first_query = q_block_start(step, blocks, C)
        else:  # in ascending order, behind the masked ones at the first queries
            first_query = unmasked_start + step * QUERIES
        bits = bits_of_step(step, view, QUERIES, C) if MASKED else ()
        await_bias(smem.bias, count, C)
        if not C.S_AHEAD:
            consumer_wait(smem.q.full, count, C.Q_STAGES)
            scores_pending = issue_s_or_dp(k, q_tiles, row_stats, count, stage, SCORES, C)
        if C.HAS_DROPOUT:
            words = dropout.draw(optimization_barrier(draws.low), optimization_barrier(draws.high),
                                 draws.first_row + head.member, draws.origin_q + first_query, draws.origin_k + key)
        consumer_wait(smem.dout.full, count, C.DOUT_STAGES)
        q = q_tiles.index(stage).reshape([QUERIES, C.WIDTH])
        dout = dout_tiles.index(count % C.DOUT_STAGES).reshape([QUERIES, C.WIDTH])
        dprobs_pending = issue_s_or_dp(v, dout_tiles, row_stats, count, count % C.DOUT_STAGES, DPROBS, C)
        if not C.AUGMENTED_K:
            lse = row_stats.index(2 * stage).load(ROW)
        if not C.S_AHEAD:
            scores = warpgroup_mma_wait(2 if C.AUGMENTED_K else 1, deps=(scores_pending,))  # but not for dP
        if C.AUGMENTED_K:
            if C.HAS_ALIBI:
                exponents = scores * scale_log2 + slope_times_offset(head.slope_log2, first_query, view)
            else:
                exponents = scores * scale_log2
        else:
            scores = tanh_of(scores, args.scales.squash)
            if C.HAS_FUNCTION:
                exponents, slopes = exponents_of_function(scores, lse, first_query, bits, head, view, args, MASKED,
                                                          FUNCTION, DERIVATIVE, C)
            else:
                exponents = scores * scale_log2 - lse[None, :]
            if C.HAS_ALIBI:
                exponents = take_off_distances(exponents, first_query, head.slope_log2, view, C)
        probs = gl.exp2(add_bias(exponents, read_bias(smem.bias, count, WG, C), C))
        if MASKED:
            probs = hide_pairs(probs, first_query, bits, view, C)
        if C.HAS_DROPOUT:
            probs = dropout.signed(probs, words, draws.threshold)
            left_probs = gl.convert_layout(dropout.kept_alone(probs, DTYPE), LEFT)
        else:
            left_probs = gl.convert_layout(probs.to(DTYPE), LEFT)
        if args.scales.squash is not None:  # the derivative of the tanh is a factor of dS
            probs = times_tanh_derivative(probs, scores, MASKED)
        if DERIVATIVE is not None:
            probs = probs * slopes
        if C.AUGMENTED_K:  # above the wait, beside dP
            probs, count = scheduling_fence_of(probs, count)
        else:
            delta = row_stats.index(2 * stage + 1).load(ROW)
        dprobs = warpgroup_mma_wait(0, deps=(dprobs_pending,))
        if C.AUGMENTED_K:
            if count == view.last_count:
                mbarrier.arrive(kv.v_empty.index(WG), count=1)
        if C.HAS_DROPOUT:
            dscores = dropout.score_gradient(probs, dprobs, delta[None, :]).to(DTYPE)
        elif C.AUGMENTED_K:
            dscores = (probs * dprobs).to(DTYPE)
        else:
            dscores = (probs * (dprobs - delta[None, :])).to(DTYPE)
        ds_stage = count & 1
        smem.dscores.index(dscores_index(ds_stage, WG, C.AUGMENTED_K, C)).store(dscores)
        dv_pending = warpgroup_mma(left_probs, dout, dv, is_async=True)
        fence_async_shared()
        if C.HEAD_PERSISTENT:
            await_accum_but_last()
        named_barrier_sync(C.CONSUMERS)
        start = None
        if C.HEAD_PERSISTENT:
            part = head.first_part + first_query // 32  # of 64 queries, each of two consumers has a part
            start = start_of_part(args.dq, part, first_query, key - WG * 64, bounds, C)
        dq_pending = issue_dq(kv.k_tiles, smem.dscores, ds_stage, 0, WG, C.CONSUMERS, C.AUGMENTED_K, C, start)
        release_bias(smem.bias, count, C)
        if C.S_AHEAD:  # the registers of P are free before those of the next S are taken
            dv = warpgroup_mma_wait(C.CONSUMERS, deps=(dv_pending,))  # but not for dQ, an MMA for each consumer's keys
            consumer_release(smem.dout.empty, count, C.DOUT_STAGES)
            consumer_wait(smem.q.full, count + 1, C.Q_STAGES)
            scores_pending = issue_s_or_dp(k, q_tiles, row_stats, count + 1, (count + 1) % C.Q_STAGES, SCORES, C)
            dk_pending = warpgroup_mma(gl.convert_layout(dscores, LEFT), q, dk, is_async=True)
            dq = warpgroup_mma_wait(2, deps=(dq_pending,))  # but not for S and dK
        else:
            dk_pending = warpgroup_mma(gl.convert_layout(dscores, LEFT), q, dk, is_async=True)
            dv = warpgroup_mma_wait(C.CONSUMERS + 1, deps=(dv_pending,))  # but not for dQ and dK
            consumer_release(smem.dout.empty, count, C.DOUT_STAGES)
            dq = warpgroup_mma_wait(1, deps=(dq_pending,))  # but not for dK
            if C.AUGMENTED_K:
                if count == view.last_count:
                    mbarrier.arrive(kv.k_empty.index(0), count=1)
        if C.HEAD_PERSISTENT:
            accumulate_or_write_part(args.dq, dq, smem.dq_stage, part, head, first_query, key - WG * 64, bounds, WG,
                                     C)
        else:
            accumulate_or_write_rows(args, dq, smem, count, head, first_query, view.writes_dq, WG, C)
        if C.S_AHEAD:
            dk, scores = warpgroup_mma_wait(0, deps=(dk_pending, scores_pending))
        else:
            dk = warpgroup_mma_wait(0, deps=(dk_pending,))
        consumer_release(smem.q.empty, count, C.Q_STAGES)
        count += 1
    return count, State(scores, dk, dv)


@gluon.jit
def draws_of(args, metadata, tile, C: gl.constexpr):
    """Return what a tile's random numbers are drawn by: the seed, and the row of its first query head in the batch."""
    group, settings = args.group, args.dropout
    first_row = sequence_at(metadata, tile.batch, C) * args.grid.heads * group + tile.head * group
    low = load_tile_metadata(settings.seed, 0, 4)
    high = load_tile_metadata(settings.seed, 1, 4)
    return dropout.Draws(low, high, first_row, settings.threshold.to(gl.uint32) << 16, settings.origin_q,
                         settings.origin_k)


@gluon.jit
def attend_tile(args, smem, tile, count, tile_count, WG: gl.constexpr, FUNCTION: gl.constexpr,
                DERIVATIVE: gl.constexpr, C: gl.constexpr):
    """Consumer: dK and dV of 64 keys of a tile, and its part of dQ of every block. Returns the next iteration."""
    kv, group, outputs = smem.kv, args.group, args.outputs
    total = args.bounds.sq  # queries of all sequences
    tile, bounds = kv_tile_of(smem.metadata, tile, args.bounds, 4, C)
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.WIDTH, 16])
    dk = gl.full([64, C.WIDTH], 0.0, gl.float32, layout=ACC_LAYOUT)
    dv = gl.full([64, C.WIDTH], 0.0, gl.float32, layout=ACC_LAYOUT)
    scores = gl.full([64, QUERIES], 0.0, gl.float32, layout=SCORE_LAYOUT)
    blocks = q_blocks_of_tile(tile, bounds, args.plan, C)
    key = tile.first + WG * 64
    ends = phases_of(key, blocks, bounds, C)
    # Phases: masked blocks, unmasked ones; in a fixed order those masked by the lower bound, unmasked ones, the rest.
    FIRST: gl.constexpr = 1 if (C.DETERMINISTIC or C.HEAD_PERSISTENT) and not C.HAS_LOWER else 0
    STOP: gl.constexpr = 3 if C.DETERMINISTIC or C.HEAD_PERSISTENT else 2
    blocks_of_head, first_block = dq_blocks_of(smem.metadata, total, args.num_sequences, 4, C)
    NC: gl.constexpr = C.CONSUMERS
    parts = blocks_of_head * NC
    own_part = first_block * NC + WG
    for i in gl.static_range(NC):
        mbarrier.wait(kv.full.index(i), tile_count & 1)
    if C.S_AHEAD:
        if blocks.count > 0:
            consumer_wait(smem.q.full, count, C.Q_STAGES)
            k = kv.k_tiles.index(WG).reshape([64, C.WIDTH])
            scores = warpgroup_mma_wait(0, deps=(
                issue_s_or_dp(k, smem.q.tiles, smem.row_stats, count, count % C.Q_STAGES, SCORES, C),))
    draws = ()
    if C.HAS_DROPOUT:
        draws = draws_of(args, smem.metadata, tile, C)
    last_count = 0
    if C.AUGMENTED_K:
        last_count = count + group * blocks.count - 1
    bits = ()
    if C.MASK_PLAN:
        bits = bits_of_rows(args.plan, tile.batch, tile.head, key // 64)
    diagonal = ()
    sequence = tile.batch
    if C.HAS_ALIBI or C.HAS_FUNCTION:
        sequence = sequence_at(smem.metadata, tile.batch, C)
    if C.HAS_ALIBI:
        diagonal = diagonal_at(smem.metadata, args.alibi.diagonal, C)
    writes_dq = False
    if C.WRITES_DQ:
        writes_dq = has_all_keys(smem.metadata, tile.first, 64 * NC)
    view = TileView(key, blocks, bounds, last_count, bits, diagonal, sequence, writes_dq)
    state = State(scores, dk, dv)
    for member in range(group):
        if C.HEAD_PERSISTENT:
            first_part = (gl.program_id(0) * group + member) * parts + own_part
        else:
            first_part = (tile.batch * args.grid.heads * group + tile.head * group + member) * parts + own_part
        slope_log2 = ()
        if C.HAS_ALIBI:
            slope_log2 = LOG2E * slope_of(args.alibi.slopes, sequence, tile.head * group + member, args.alibi.stride_b,
                                          args.alibi.stride_h)
        head = QHead(tile.batch, tile.head * group + member, member, first_part, slope_log2)
        for phase in gl.static_range(FIRST, STOP):
            count, state = attend_blocks(ends[phase], ends[phase + 1], count, state, head, view, args, smem, draws, WG,
                                         phase != 1, FUNCTION, DERIVATIVE, C)
        if C.WRITES_DQ:
            if writes_dq:
                write_blind_rows(args.dq, smem.metadata, blocks, head.head, args.inputs.q.shape[3], WG, C)
    row, left = key_rows_of(smem.metadata, key, C)
    place = (tile.batch, tile.head, row, 0)
    dv = state.dv
    if C.HAS_DROPOUT:
        dv = dv * args.dropout.dv_scale
    if C.AUGMENTED_K:
        tma_store_wait(0)  # the last part of dQ has been read
        COLUMNS: gl.constexpr = outputs.dk_desc.block_type.shape[3]
        dk_tile = reinterpret(smem.dscores, outputs.dk_desc.dtype, [NC, 1, 1, 64, COLUMNS],
                              outputs.dk_desc.layout).index(WG)
        dv_tile = reinterpret(smem.dq_stage, outputs.dv_desc.dtype, [NC, 1, 1, 64, COLUMNS],
                              outputs.dv_desc.layout).index(WG)
    else:
        dk_tile = kv.k_tiles.index(WG)
        dv_tile = kv.v_tiles.index(WG)
    write_gradient(outputs.dv_desc, outputs.dv_ptr, dv_tile, dv, place, left, C)
    named_barrier_sync(C.CONSUMERS)  # the other consumer's dQ has read these keys, and dS
    write_gradient(outputs.dk_desc, outputs.dk_ptr, dk_tile, state.dk * args.scales.gradient, place, left, C)
    tma_store_wait(0)
    return count


@gluon.jit
def attend(args, smem, WG: gl.constexpr, FUNCTION: gl.constexpr, DERIVATIVE: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: its keys of one tile, with C.AUGMENTED_K of every tile that the producer publishes."""
    count = 0
    tile_count = 0
    if C.AUGMENTED_K:
        tile = get_kv_tile(smem.queue, tile_count, C)
        while tile.first != NO_TILE:
            count = attend_tile(args, smem, tile, count, tile_count, WG, FUNCTION, DERIVATIVE, C)
            tile_count += 1
            tile = get_kv_tile(smem.queue, tile_count, C)
    else:
        attend_tile(args, smem, args.tile, count, tile_count, WG, FUNCTION, DERIVATIVE, C)


@gluon.jit
def hopper_backward_kernel(q_desc, k_desc, v_desc, dout_desc, lse, delta_or_bias, dk_desc, dv_desc, dq_desc, accum,
                           workspace_ptr, pointers, lengths, numbers, C: gl.constexpr):
    """Compute dk and dv, and the dQ accumulator, or with C.HEAD_PERSISTENT dq.

    Grid: (tiles · heads of k · batches,), with C.AUGMENTED_K so many CTAs or fewer, with C.HEAD_PERSISTENT up to heads
    of k · batches.

    accum: (·, 256), a descriptor, or with C.DQ_FROM_REGISTERS a pointer. The accumulator must be zero at first, but
    with C.DETERMINISTIC or C.HEAD_PERSISTENT. The latter needs room for a group's blocks for each CTA, and dq_desc,
    which else is None. workspace_ptr points with C.DETERMINISTIC to the semaphores, one for each block of a query head,
    zero at first; with C.HEAD_PERSISTENT to the accumulator; else with C.AUGMENTED_K to the counter of the dynamic tile
    scheduler, which is zero, and left so; else it is None.

    lse: a pointer, or with C.AUGMENTED_K a descriptor of the extra columns, which hold delta too. delta_or_bias: delta,
    a pointer, or with C.BIAS_STAGES the bias, a descriptor; delta then is among the pointers. pointers, lengths,
    numbers: a BackwardPointers, a Lengths and a BackwardNumbers (arguments.py).
    """
    DTYPE: gl.constexpr = q_desc.dtype
    NC: gl.constexpr = C.CONSUMERS
    k_tiles = gl.allocate_shared_memory(DTYPE, [NC, 1, 1, 64, C.WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [NC, 1, 1, 64, C.WIDTH], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(DTYPE, [C.Q_STAGES, 1, 1, QUERIES, C.WIDTH], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [C.DOUT_STAGES, 1, 1, QUERIES, C.WIDTH], dout_desc.layout)
    DSCORES_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, QUERIES], DTYPE)
    dscores = gl.allocate_shared_memory(DTYPE, [2 * NC, 64, QUERIES], DSCORES_LAYOUT)
    if C.AUGMENTED_K:
        row_stats = AugmentedK(make_selectors(C.HAS_ALIBI), gl.allocate_shared_memory(
            gl.bfloat16, [C.Q_STAGES, 1, 1, QUERIES, EXTRA_COLUMNS], lse.layout))
    else:
        row_stats = gl.allocate_shared_memory(gl.float32, [2 * C.Q_STAGES, QUERIES], CONTIGUOUS)
    dq_stage = ()
    if C.DETERMINISTIC:
        dq_stage = make_stages(accum, NC, C)
    elif not C.DQ_FROM_REGISTERS:
        dq_stage = gl.allocate_shared_memory(gl.float32, [NC, C.WIDTH // 8, 256], accum.layout)
    bias_pipe = make_bias_pipe(delta_or_bias, C)
    SPARE: gl.constexpr = 1 if C.VARLEN else 0  # barriers of tiles in which rows are zeroed before they are full
    # On a full barrier of q arrive the TMA's bytes, and without C.AUGMENTED_K the copy of lse and delta.
    q_pipe = Pipe(q_tiles, make_barriers(C.Q_STAGES + SPARE, 1 if C.AUGMENTED_K else 2),
                  make_barriers(C.Q_STAGES, NC))
    dout_pipe = Pipe(dout_tiles, make_barriers(C.DOUT_STAGES + SPARE, 1), make_barriers(C.DOUT_STAGES, NC))
    grid = numbers.grid
    plan = MaskPlan(pointers.lists, pointers.bits, numbers.plan)
    queue = ()
    tile = ()
    if C.AUGMENTED_K:
        # K and V arrive one by one; dQ of each consumer reads all of K, V is read by its own.
        kv = KVTiles(k_tiles, v_tiles, make_barriers(NC, 2), make_barriers(1, NC), make_barriers(NC, 1))
        tile_values = gl.allocate_shared_memory(gl.int32, [2 * kv_tile_size(C), 1], CONTIGUOUS)
        queue = TileQueue(tile_values, make_barriers(2, 1), make_barriers(2, NC))
    else:
        kv = KVTiles(k_tiles, v_tiles, make_barriers(NC + SPARE * NC, 1), (), ())
        tile = kv_tile_at(gl.program_id(0), grid, C)
        if C.MASK_PLAN:
            tile = kv_tile_in_list(plan, tile, C)
    fence_async_shared()
    metadata = ()
    if C.VARLEN:
        metadata = store_tile_metadata(locate_keys(
            tile, numbers.bounds, (lengths.cu_q, lengths.cu_k, lengths.q, lengths.k, numbers.num_sequences), C))
    seed = ()
    if C.HAS_DROPOUT:
        number = gl.load(pointers.seed)
        seed = store_tile_metadata((number.to(gl.int32), (number >> 32).to(gl.int32)))
    scales, settings = numbers.scales, numbers.dropout
    delta_ptr = delta_or_bias
    bias = ()
    if C.BIAS_STAGES > 0:
        delta_ptr = pointers.delta
        bias = Bias(delta_or_bias, numbers.bias.own_batch, numbers.bias.own_head, numbers.bias.first_key)
    args = Args(Inputs(q_desc, k_desc, v_desc, dout_desc, lse, delta_ptr, settings.delta_scale, bias,
                       numbers.group_splits),
                Outputs(dk_desc, dv_desc, pointers.dk, pointers.dv),
                DQTarget(accum, workspace_ptr, workspace_ptr, dq_desc, scales.gradient, pointers.dq), grid,
                numbers.bounds, numbers.group, scales,
                dropout.Dropout(seed, settings.threshold, settings.dv_scale, settings.origin_q, settings.origin_k),
                numbers.num_sequences, tile, workspace_ptr, plan,
                Alibi(pointers.slopes, numbers.slopes_b, numbers.slopes_h, numbers.diagonal), pointers.function.tensors,
                numbers.first_pair)
    smem = Smem(kv, q_pipe, dout_pipe, row_stats, dscores, dq_stage, queue, metadata, bias_pipe)
    FUNCTION: gl.constexpr = pointers.function.call
    DERIVATIVE: gl.constexpr = pointers.function.derivative
    if C.HAS_CU_SEQLENS:
        if has_rows(metadata):
            specialize(args, smem, FUNCTION, DERIVATIVE, C)
    else:
        specialize(args, smem, FUNCTION, DERIVATIVE, C)


@gluon.jit
def specialize(args, smem, FUNCTION: gl.constexpr, DERIVATIVE: gl.constexpr, C: gl.constexpr):
    """Give each warp of the CTA its role."""
    NC: gl.constexpr = C.CONSUMERS
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    if C.DETERMINISTIC:
        gl.warp_specialize([
            (attend, (args, smem, ZERO, FUNCTION, DERIVATIVE, C)), (attend, (args, smem, ONE, FUNCTION, DERIVATIVE, C)),
            (load, (args, smem, C)),
            (accumulate_in_order, (args, smem.dq_stage, smem.metadata, ZERO, NC, C)),
            (accumulate_in_order, (args, smem.dq_stage, smem.metadata, ONE, NC, C)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])
    else:
        gl.warp_specialize([
            (attend, (args, smem, ZERO, FUNCTION, DERIVATIVE, C)), (attend, (args, smem, ONE, FUNCTION, DERIVATIVE, C)),
            (load, (args, smem, C)),
        ], [4, 1], [240, 24])
