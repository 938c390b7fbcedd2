"""Forward on Hopper: one producer warp loads by TMA, one to three consumer warpgroups attend 64 rows each.

maths.md, section 4, has the formulas. A row is a query, or a query of one of the heads that share keys and values
(Config.PACK_GQA).

A persistent CTA computes tiles of queries one after another, and for each goes through its blocks of keys. Iteration j
of the KV pipe holds (K of block j, V of block j - 1), since a warpgroup issues S = Q·Kᵀ of block j and O += P·V of
block j - 1 together, and turns S into P while the second MMA still runs. The pipe does not drain between tiles: with
the last V of a tile comes the first K of the next one, and out is written while the next tile's first S is computed.
docs/hopper-forward.md draws it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from tilewise.kernels.hopper.compat import COPIES_LEFT_OPERANDS, tma_store_wait
from tilewise.kernels.hopper.dropout import draws_of, drop
from tilewise.kernels.hopper.forward.epilogue import Outputs, Rows, floats_per_partial, write
from tilewise.kernels.hopper.forward.producer import load
from tilewise.kernels.hopper.forward.scores import bias_of_step, modify_scores, score_mod_of_tile
from tilewise.kernels.hopper.forward.split_kv import blocks_of_tile
from tilewise.kernels.hopper.forward.types import (
    Args,
    Descriptors,
    KVPipe,
    OverflowRing,
    Q,
    Ring,
    Smem,
    State,
    TileView,
)
from tilewise.kernels.hopper.mask_plan import MaskPlan, bits_of_rows, bits_of_step, keep_by_bits
from tilewise.kernels.hopper.mask_ranges import kv_block_start, masked_blocks_of, sink_block_of
from tilewise.kernels.hopper.pipeline import (
    CONTIGUOUS,
    FOUR_WARPS,
    OVERFLOW_SLOTS,
    allocate_stages,
    as_tuple,
    consumer_release,
    consumer_release_after_mma,
    consumer_wait,
    make_barriers,
    optimization_barrier,
    order_barrier_arrive,
    order_barrier_wait,
    scheduling_fence,
)
from tilewise.kernels.hopper.products import (
    finish,
    issue_out,
    issue_scores,
    rescale,
    zeros,
)
from tilewise.kernels.hopper.softmax import (
    corrects_rounding,
    exponentials,
    hide,
    no_peak,
    overflowed,
    pack_pairs,
    peak_of,
    rounding_of,
    scaled_max_of,
    scaled_sum,
    split_halves,
    split_halves_packed,
    squashed,
    sum_of,
    update_shift,
)
from tilewise.kernels.hopper.tile_scheduler import (
    NO_TILE,
    TileQueue,
    get_tile,
    read_tile,
    release_tile,
)
from tilewise.kernels.hopper.varlen import bounds_of_tile, clear, tile_of_numbers, tile_size


@gluon.jit
def hide_pairs(s, step, words, view, C: gl.constexpr):
    """Set the scores of a step's pairs that do not take part to -inf, by the mask's bounds or by bits."""
    if C.MASK_PLAN:
        return keep_by_bits(s, words, float("-inf"))
    else:
        return hide(s, view.row, kv_block_start(step, view.blocks, C), view.bounds, C)


@gluon.jit
def attend_block(step, count, q, state, view, kv, scaling, WG: gl.constexpr, MASKED: gl.constexpr,
                 FROZEN_MAX: gl.constexpr, FUNCTION: gl.constexpr, C: gl.constexpr):
    """S of a block, and O += P·V of the block before it; ``count``: the KV pipe's iteration.

    With C.PARTS == 2 the first half's exponentials lie above the wait for P·V and run beside it. The second half's
    have the rescaling of O beside them, which must follow P·V and would else run alone.
    """
    DTYPE: gl.constexpr = kv.k_tiles[0].dtype
    probs, acc, shift, row_sum, peak = state
    words = ()
    if MASKED:
        words = bits_of_step(step, view, C.BLOCK_N, C)
    bias = bias_of_step(step, view, MASKED, C)
    consumer_wait(kv.full, count, C.KV_STAGES)
    stage = count % C.KV_STAGES
    order_barrier_wait(WG, C.PING_PONG)
    s_pending = issue_scores(q, kv.k_tiles, stage, C)
    acc_pending = issue_out(probs, kv.v_tiles, stage, acc, C)
    order_barrier_arrive(WG, C.CONSUMERS, C.PING_PONG)
    # P·V stays in flight: an MMA for each chunk of V's columns and part of P.
    s = squashed(warpgroup_mma_wait(len(C.DV) * len(probs), deps=(s_pending,)), scaling.squash, not MASKED)
    s = modify_scores(s, step, count, bias, view, scaling, WG, MASKED, FUNCTION, C)
    if MASKED:
        s = hide_pairs(s, step, words, view, C)
    if FROZEN_MAX:  # in a row that has seen no key exponents are inf here, and it overflows
        subtracted = shift
        factor = None
    else:
        shift, subtracted, factor = update_shift(s, shift, scaling, MASKED or C.HAS_BIAS or C.HAS_FUNCTION)
    PEAKS: gl.constexpr = FROZEN_MAX and corrects_rounding(C, DTYPE)
    if C.PARTS == 2:
        low, high = split_halves(s)
        low = exponentials(low, subtracted, scaling, FROZEN_MAX)
        low_sum = sum_of(low, C)
        if not (COPIES_LEFT_OPERANDS and C.CONSUMERS == 3):  # with the 160 registers of three warpgroups copies spill
            low_sum = scheduling_fence(low_sum)
        low = drop(low, kv_block_start(step, view.blocks, C), view.draws, C)
    else:
        p = exponentials(s, subtracted, scaling, FROZEN_MAX)
        row_sum = scaled_sum(row_sum, factor, p, C)
        p = drop(p, kv_block_start(step, view.blocks, C), view.draws, C)
        if PEAKS:
            peak = gl.maximum(peak, peak_of(p))
    acc = finish(acc_pending, 0)
    consumer_release_after_mma(kv.empty, count, C.KV_STAGES)
    acc = rescale(acc, factor)
    if C.PARTS == 2:
        high = exponentials(high, subtracted, scaling, FROZEN_MAX)
        row_sum = scaled_sum(row_sum, factor, high, C) + low_sum
        high = drop(high, kv_block_start(step, view.blocks, C) + C.BLOCK_N // 2, view.draws, C)
        probs = (pack_pairs(low, DTYPE, C.HAS_DROPOUT), pack_pairs(high, DTYPE, C.HAS_DROPOUT))
        if PEAKS:
            peak = gl.maximum(gl.maximum(peak, peak_of(low)), peak_of(high))
    else:
        probs = split_halves_packed(p, DTYPE, C)
    return State(probs, acc, shift, row_sum, peak)


@gluon.jit
def attend_blocks(begin, end, count, q, state, view, kv, scaling, WG: gl.constexpr, MASKED: gl.constexpr,
                  FROZEN_MAX: gl.constexpr, FUNCTION: gl.constexpr, C: gl.constexpr):
    """Blocks ``begin`` to ``end`` of a tile, the masked ones first; returns the next iteration and the state."""
    for step in range(begin, end):
        state = attend_block(step, count, q, state, view, kv, scaling, WG, MASKED, FROZEN_MAX, FUNCTION, C)
        count += 1
    return count, state


@gluon.jit
def skip_blocks(begin, end, count, kv, WG: gl.constexpr, C: gl.constexpr):
    """Release all blocks but the first of a tile that has no query for this warpgroup; return the next iteration."""
    for _step in range(begin, end):
        consumer_wait(kv.full, count, C.KV_STAGES)
        order_barrier_wait(WG, C.PING_PONG)
        order_barrier_arrive(WG, C.CONSUMERS, C.PING_PONG)
        consumer_release(kv.empty, count, C.KV_STAGES)
        count += 1
    return count


@gluon.jit
def publish_overflow(overflow, tile_count, flags, tile, WG: gl.constexpr, C: gl.constexpr):
    """Tell the producer which rows overflowed; a tile that is computed again has none."""
    if tile.recompute == 0:
        overflow.flags.index((tile_count & (OVERFLOW_SLOTS - 1)) * C.CONSUMERS + WG).store(flags)


@gluon.jit
def await_queries(q_full, stage, tile_count, first, C: gl.constexpr):
    """Wait for the queries of a tile, if there is one; with C.FROZEN_MAX those of NO_TILE are loaded, too."""
    exists = True if C.FROZEN_MAX else first != NO_TILE
    if exists:
        mbarrier.wait(q_full.index(stage), (tile_count // C.Q_STAGES) & 1)


@gluon.jit
def attend(args, smem, WG: gl.constexpr, FUNCTION: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: 64 rows of every tile."""
    if WG == C.CONSUMERS - 1:
        order_barrier_arrive(WG, C.CONSUMERS, C.PING_PONG)  # the first warpgroup begins
    count = 0
    tile_count = 0
    tile = tile_of_numbers(get_tile(smem.queue, tile_count, tile_size(C), C.SPLIT_KV > 0), C)
    if C.FROZEN_MAX:
        while tile.first != NO_TILE:
            count, tile_count = attend_tiles(tile, count, tile_count, args, smem, WG, FUNCTION, C)
            if C.SPLIT_KV > 0:
                release_tile(smem.queue, tile_count)
            consumer_release(smem.q.empty, tile_count * C.CONSUMERS + WG, C.Q_STAGES * C.CONSUMERS)
            tile_count += 1
            mbarrier.arrive(smem.overflow.drained.index(0), count=1)
            tile = tile_of_numbers(get_tile(smem.queue, tile_count, tile_size(C), C.SPLIT_KV > 0), C)
    else:
        attend_tiles(tile, count, tile_count, args, smem, WG, FUNCTION, C)
    tma_store_wait(0)
    if WG == 0:
        order_barrier_wait(WG, C.PING_PONG)  # the last warpgroup has arrived once more than was needed


@gluon.jit
def attend_tiles(tile, count, tile_count, args, smem, WG: gl.constexpr, FUNCTION: gl.constexpr, C: gl.constexpr):
    """Consumer: all tiles up to a NO_TILE; returns the next iteration of the KV pipe, and of the Q pipe and queue."""
    kv = smem.kv
    scaling = args.scaling
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    DTYPE: gl.constexpr = kv.k_tiles[0].dtype
    KEPT: gl.constexpr = C.SPLIT_KV > 0
    q_stage = WG
    kv_stage = 0
    if C.FROZEN_MAX:
        q_stage = optimization_barrier(tile_count % C.Q_STAGES * C.CONSUMERS + WG)
        kv_stage = optimization_barrier(count % C.KV_STAGES)
    if C.VARLEN or C.SPLIT_KV > 0:  # this CTA's tiles may all lie between the sequences, or be splits without a block
        await_queries(smem.q.full, q_stage, tile_count, tile.first, C)
    else:
        consumer_wait(smem.q.full, tile_count * C.CONSUMERS + WG, C.Q_STAGES * C.CONSUMERS)
    q = Q(smem.q.tiles, q_stage)
    consumer_wait(kv.full, count, C.KV_STAGES)
    s = warpgroup_mma_wait(0, deps=(issue_scores(q, kv.k_tiles, kv_stage, C),))
    consumer_release_after_mma(kv.empty, count, C.KV_STAGES)
    count += 1
    while tile.first != NO_TILE:
        bounds = bounds_of_tile(tile, args.bounds, C)
        blocks = blocks_of_tile(tile, bounds, args.splits, args.plan, C)
        row = tile.first + WG * (64 // C.PACK_GQA)
        bits = ()
        if C.MASK_PLAN:
            bits = bits_of_rows(args.plan, tile.batch, tile.head, tile.first // 64 + WG)
        score_mod = score_mod_of_tile(tile, args.operands, smem.bias, args.diagonal, args.function_tensors,
                                      args.first_pair, C)
        view = TileView(row, blocks, bounds, bits, score_mod, args.operands,
                        draws_of(tile, row, args.seed, args.grid.heads, args.dropout, C))
        empty_rows = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        if C.MASK_PLAN:
            # A row that sees a key of full blocks alone overflows with C.FROZEN_MAX. It is rare: of a causal mask the
            # diagonal is partial, and where no block is, the first one is a full one.
            masked = blocks.boundary
            if C.FROZEN_MAX:
                masked = gl.where(tile.recompute != 0, blocks.count, masked)
        elif C.FROZEN_MAX:  # by row - 1 the block of the first row's last key is masked: then every row has seen a key
            masked = masked_blocks_of(row - 1, blocks, bounds, C)
            if C.SINK_BLOCK_FIRST:
                masked = gl.maximum(masked, gl.minimum(blocks.count, sink_block_of(blocks) + 1))
            masked = gl.where(tile.recompute != 0, blocks.count, masked)
        else:
            masked = masked_blocks_of(row, blocks, bounds, C)
        q_stage = tile_count % C.Q_STAGES * C.CONSUMERS + WG
        begin = 1
        if C.SKIP_PADDING:
            if row >= bounds.sq:
                count = skip_blocks(begin, blocks.count, count, kv, WG, C)
                begin = blocks.count
        s = squashed(s, scaling.squash, False)
        s = modify_scores(s, 0, count - 1, bias_of_step(0, view, True, C), view, scaling, WG, True, FUNCTION, C)
        if masked >= begin:
            s = hide_pairs(s, 0, bits_of_step(0, view, C.BLOCK_N, C), view, C)
        before = gl.convert_layout(empty_rows, gl.SliceLayout(1, s.type.layout))
        shift, subtracted, _factor = update_shift(s, before, scaling, True)
        p = exponentials(s, subtracted, scaling, False)
        shift = gl.convert_layout(shift, empty_rows.type.layout)
        row_sum = sum_of(p, C)
        p = drop(p, kv_block_start(0, blocks, C), view.draws, C)
        state = State(split_halves_packed(p, DTYPE, C), zeros(C), shift, row_sum, no_peak())
        if C.VARLEN:
            keep = bounds.sk - kv_block_start(0, blocks, C)
            if (keep < C.BLOCK_N) & (begin == 1):  # the first block alone may reach past the keys
                consumer_wait(kv.full, count, C.KV_STAGES)
                clear(kv.v_tiles, optimization_barrier(count % C.KV_STAGES), keep, C)
        count, state = attend_blocks(begin, masked, count, Q(q.tiles, optimization_barrier(q_stage)), state, view, kv,
                                     scaling, WG, True, False, FUNCTION, C)
        count, state = attend_blocks(gl.maximum(begin, masked), blocks.count, count,
                                     Q(q.tiles, optimization_barrier(q_stage)), state, view, kv, scaling, WG, False,
                                     C.FROZEN_MAX, FUNCTION, C)

        consumer_release(smem.q.empty, tile_count * C.CONSUMERS + WG, C.Q_STAGES * C.CONSUMERS)
        tile_count += 1
        after = tile_of_numbers(get_tile(smem.queue, tile_count, tile_size(C), KEPT), C)
        q_stage = tile_count % C.Q_STAGES * C.CONSUMERS + WG
        if C.Q_STAGES > 1:
            await_queries(smem.q.full, q_stage, tile_count, after.first, C)
        consumer_wait(kv.full, count, C.KV_STAGES)
        kv_stage = count % C.KV_STAGES
        order_barrier_wait(WG, C.PING_PONG)
        # P·V first, unlike in attend_block: out is written while S of the next tile, which may be NO_TILE, is computed.
        acc_pending = issue_out(state.probs, kv.v_tiles, kv_stage, state.acc, C)
        if C.Q_STAGES == 1:  # the next queries could not be loaded before this tile's were released
            await_queries(smem.q.full, q_stage, tile_count, after.first, C)
            q_stage = optimization_barrier(q_stage)  # else ptxas hoists what it has in common with the loops
        q = Q(smem.q.tiles, q_stage)
        s_pending = issue_scores(q, kv.k_tiles, kv_stage, C)
        order_barrier_arrive(WG, C.CONSUMERS, C.PING_PONG)
        acc = finish(acc_pending, len(C.D))  # S stays in flight: an MMA for each chunk of Q's columns
        row_sum = state.row_sum
        if C.PARTS == 2:
            row_sum = gl.convert_layout(gl.sum(row_sum, 1), state.shift.type.layout)
        divisor = row_sum
        if corrects_rounding(C, DTYPE):
            divisor += gl.convert_layout(rounding_of(state.peak, DTYPE), state.shift.type.layout)
        if KEPT:  # read again: during its blocks it takes no registers
            tile = tile_of_numbers(read_tile(smem.queue, tile_count - 1, tile_size(C)), C)
            row = tile.first + WG * (64 // C.PACK_GQA)
        if C.FROZEN_MAX:
            flags = overflowed(row_sum, acc, state.shift, DTYPE)
            if C.VARLEN:  # behind a sequence's queries there may be those of the next one, or padding
                queries = row + gl.arange(0, 64, layout=flags.type.layout) // C.PACK_GQA
                flags = gl.where(queries < bounds.sq, flags, flags * 0)
            publish_overflow(smem.overflow, tile_count - 1, flags, tile, WG, C)
        write(Rows(acc, scaled_max_of(state.shift, scaling), row_sum, divisor), tile, row, args, smem.out_tiles, WG, C)
        if KEPT:
            release_tile(smem.queue, tile_count - 1)
            after = tile_of_numbers(read_tile(smem.queue, tile_count, tile_size(C)), C)
        s = warpgroup_mma_wait(0, deps=(s_pending,))
        consumer_release_after_mma(kv.empty, count, C.KV_STAGES)
        count += 1
        tile = after
    return count, tile_count


@gluon.constexpr_function
def registers(consumers):
    """Registers a thread of each consumer but the first, the default partition: Triton gives it what is left."""
    return 240 if consumers == 2 else 160


@gluon.jit
def hopper_forward_kernel(q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, out_desc, bias_desc, lse_ptr, counter,
                          pointers, operands, lengths, numbers, C: gl.constexpr):
    """Compute out and lse.

    A descriptor for each chunk of columns of q, k and v, the second one None where there is one chunk. bias_desc: with
    C.BIAS_STAGES, else None. counter: int32, 0: the dynamic tile scheduler's. pointers, operands, lengths, numbers: a
    ForwardPointers, a ScoreOperands, a Lengths and a ForwardNumbers (arguments.py).
    """
    NC: gl.constexpr = C.CONSUMERS
    descs = Descriptors(as_tuple(q_desc, q_rest), as_tuple(k_desc, k_rest), as_tuple(v_desc, v_rest), bias_desc)
    q_tiles = allocate_stages(descs.q, C.Q_STAGES * NC)
    k_tiles = allocate_stages(descs.k, C.KV_STAGES)
    v_tiles = allocate_stages(descs.v, C.KV_STAGES)
    out_tiles = allocate_stages((out_desc,), C.OUT_SLOTS * NC)[0]
    tile_values = gl.allocate_shared_memory(gl.int32, [2 * tile_size(C), 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_pipe = Ring(q_tiles, make_barriers(C.Q_STAGES * NC, 1), make_barriers(C.Q_STAGES * NC, 1))
    kv_pipe = KVPipe(k_tiles, v_tiles, make_barriers(C.KV_STAGES, 1), make_barriers(C.KV_STAGES, NC))
    queue = TileQueue(tile_values, make_barriers(2, 1), make_barriers(2, NC))
    bias_pipe = ()
    if C.BIAS_STAGES > 0:
        bias_pipe = Ring(allocate_stages((bias_desc,), C.BIAS_STAGES * NC)[0], make_barriers(C.BIAS_STAGES * NC, 1),
                          make_barriers(C.BIAS_STAGES * NC, 1))
    fence_async_shared()
    overflow = ()
    if C.FROZEN_MAX:
        flags = gl.allocate_shared_memory(gl.int8, [OVERFLOW_SLOTS * NC, 64], CONTIGUOUS)
        for i in gl.static_range(OVERFLOW_SLOTS * NC):
            flags.index(i).store(gl.full([64], 0, gl.int8, layout=FOUR_WARPS))
        overflow = OverflowRing(flags, gl.allocate_shared_memory(gl.int32, [OVERFLOW_SLOTS, 1], CONTIGUOUS),
                                make_barriers(1, NC))
    partial_ptr = pointers.partial
    splits = numbers.splits
    if C.SPLIT_KV > 0:
        partial_ptr += splits.first_row.to(gl.int64) * splits.num_splits * -floats_per_partial(C.DV)
    args = Args(descs, numbers.grid, numbers.bounds, numbers.group, numbers.scaling,
                (lengths.cu_q, lengths.cu_k, lengths.q, lengths.k, numbers.num_sequences), splits,
                MaskPlan(pointers.lists, pointers.bits, numbers.plan), operands, numbers.diagonal,
                pointers.function.tensors, numbers.first_pair, pointers.seed, numbers.dropout, numbers.bias,
                Outputs(out_desc, pointers.out, lse_ptr, pointers.sinks, numbers.sinks_stride, partial_ptr,
                        pointers.max_logit))
    smem = Smem(q_pipe, kv_pipe, queue, overflow, out_tiles, bias_pipe)
    REGISTERS: gl.constexpr = registers(NC)
    FUNCTION: gl.constexpr = pointers.function.call
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    TWO: gl.constexpr = 2
    if NC == 1:
        gl.warp_specialize([(attend, (args, smem, ZERO, FUNCTION, C)), (load, (args, smem, counter, C))], [1], [24])
    elif NC == 2:
        gl.warp_specialize([
            (attend, (args, smem, ZERO, FUNCTION, C)), (attend, (args, smem, ONE, FUNCTION, C)),
            (load, (args, smem, counter, C)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (attend, (args, smem, ZERO, FUNCTION, C)), (attend, (args, smem, ONE, FUNCTION, C)),
            (attend, (args, smem, TWO, FUNCTION, C)), (load, (args, smem, counter, C)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
