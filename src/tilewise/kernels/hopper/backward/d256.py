"""dK and dV on Hopper at head dims above 128: two warpgroups share a tile of 64 keys (maths.md, section 6).

At 256 columns dK and dV of 64 keys are twice what the registers of a warpgroup hold beside a block of scores. So two
warpgroups share 64 keys: one computes S and P and accumulates dV, the other computes dP and dS and accumulates dK. All
that passes between them is P in float32 through shared memory, under a softcap times the tanh's derivative, with
dropout negative where a pair is dropped. P and dS are left operands from the registers in which they were computed, and
so are the first columns of K and V. One producer warp loads. dQ has a kernel of its own (dq_d256.py); the rest is as in
d128.py.

The sides of a tile in shared memory are powers of two: K, V, Q and dO of 192 columns come in two chunks of columns.

Where lengths are data, rows of other sequences come into the tiles; the producer warp zeroes them, as in d128.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.hopper.backward.d256_types import Args, Inputs, KVTiles, Outputs, Smem, TileView
from tilewise.kernels.hopper.backward.dropout import Draws, draw, score_gradient, signed
from tilewise.kernels.hopper.backward.epilogue import write_gradient
from tilewise.kernels.hopper.backward.masking import hide_pairs
from tilewise.kernels.hopper.backward.mmas import SCORE_LAYOUT
from tilewise.kernels.hopper.backward.producers import fetch_row_stats, kv_head_of, put_row_stats
from tilewise.kernels.hopper.backward.types import Pipe
from tilewise.kernels.hopper.compat import tma_load, tma_store_wait
from tilewise.kernels.hopper.mask_plan import MaskPlan, bits_of_rows, bits_of_step, kv_tile_in_list, q_blocks_of_tile
from tilewise.kernels.hopper.mask_ranges import QUERIES, phases_of, q_block_start
from tilewise.kernels.hopper.pipeline import (
    CONTIGUOUS,
    ONE_WARP,
    allocate_stages,
    as_tuple,
    consumer_release,
    consumer_wait,
    make_barriers,
    optimization_barrier,
    producer_acquire,
)
from tilewise.kernels.hopper.products import finish
from tilewise.kernels.hopper.softmax import as_operand, pack_pairs, tanh_of, times_tanh_derivative
from tilewise.kernels.hopper.tile_scheduler import kv_tile_at
from tilewise.kernels.hopper.varlen import (
    clear_rows,
    has_rows,
    key_rows_of,
    kv_tile_of,
    locate_keys,
    sequence_at,
    sequence_rows_of,
    store_tile_metadata,
)

# Columns of K or V that a warpgroup holds as register fragments, of 256: a block of scores leaves no room for more.
FRAGMENT_COLUMNS = gl.constexpr(128)


@gluon.jit
def load_chunks(descs, tiles, stage, place, full):
    """Producer: load 64 rows, each chunk of their columns into a tile of its own; place: (batch, head, row)."""
    batch, head, row = place
    size: gl.constexpr = descs[0].block_type.nbytes
    if len(descs) == 1:
        mbarrier.expect(full, size)
    else:
        mbarrier.expect(full, size + descs[1].block_type.nbytes)
        tma_load(descs[1], [batch, head, row, descs[0].block_type.shape[3]], full, tiles[1].index(stage))
    tma_load(descs[0], [batch, head, row, 0], full, tiles[0].index(stage))


@gluon.jit
def clear_chunks(tiles, stage, begin, stop):
    """Producer: zero the rows before ``begin`` and from ``stop`` on of each chunk of the columns of 64 rows."""
    for chunk in gl.static_range(len(tiles)):
        clear_rows(tiles[chunk], stage, begin, stop, tiles[chunk].shape[4])


@gluon.jit
def load_kv(inputs, kv, tile, rows, C: gl.constexpr):
    """Producer: load K and V of each consumer; where lengths are data, zero the rows of those that are not seen.

    Then the copies complete spare barriers, which lie behind those that consumers wait for.
    """
    NC: gl.constexpr = C.CONSUMERS
    for i in gl.static_range(NC):
        key = tile.first + i * 64
        place = (tile.batch, kv_head_of(tile, inputs), rows.row_k + key)
        arrival = 2 * i
        if C.VARLEN:
            clears = (rows.k_begin > key) | (rows.k_end < key + 64)
            arrival = gl.where(clears, 2 * NC + 2 * i, 2 * i)
        load_chunks(inputs.k, kv.k_tiles, i, place, kv.full.index(arrival))
        load_chunks(inputs.v, kv.v_tiles, i, place, kv.full.index(arrival + 1))
        if C.VARLEN:
            if clears:
                mbarrier.wait(kv.full.index(arrival), 0)
                mbarrier.wait(kv.full.index(arrival + 1), 0)
                begin = gl.minimum(rows.k_begin - key, 64)
                stop = gl.maximum(rows.k_end - key, 0)
                clear_chunks(kv.k_tiles, i, begin, stop)
                clear_chunks(kv.v_tiles, i, begin, stop)
                fence_async_shared()
                mbarrier.arrive(kv.full.index(2 * i), count=1)
                mbarrier.arrive(kv.full.index(2 * i + 1), count=1)


@gluon.jit
def clear_queries(q_pipe, dout_pipe, count, cleared, begin, stop, C: gl.constexpr):
    """Producer: zero the rows of Q and dO that see no key, then arrive for both. cleared: how often it has before."""
    mbarrier.wait(q_pipe.full.index(C.Q_STAGES), cleared & 1)
    mbarrier.wait(dout_pipe.full.index(C.DOUT_STAGES), cleared & 1)
    clear_chunks(q_pipe.tiles, count % C.Q_STAGES, begin, stop)
    clear_chunks(dout_pipe.tiles, count % C.DOUT_STAGES, begin, stop)
    fence_async_shared()
    # What went to the spare barriers arrives here: TMA's bytes, and of Q the copy of lse and delta.
    mbarrier.arrive(q_pipe.full.index(count % C.Q_STAGES), count=2)
    mbarrier.arrive(dout_pipe.full.index(count % C.DOUT_STAGES), count=1)


@gluon.jit
def load(args, smem, C: gl.constexpr):
    """Producer, one warp: load K and V once, then Q and dO of every head of the group."""
    inputs = args.inputs
    total = args.bounds.sq  # queries of all sequences
    tile, bounds = kv_tile_of(smem.metadata, args.tile, args.bounds, 1, C)
    q_pipe, dout_pipe = smem.q, smem.dout
    blocks = q_blocks_of_tile(tile, bounds, args.plan, C)
    rows = sequence_rows_of(smem.metadata, bounds, C)
    load_kv(inputs, smem.kv, tile, rows, C)
    count = 0
    cleared = 0
    clears = False
    for member in range(args.group):
        head = tile.head * args.group + member
        lse_row = (tile.batch * args.heads * args.group + head).to(gl.int64) * total + rows.row_q
        for step in range(blocks.count):
            query = q_block_start(step, blocks, C)
            place = (tile.batch, head, rows.row_q + query)
            offsets = query + gl.arange(0, QUERIES, layout=ONE_WARP)
            inside = offsets < rows.q_end
            if C.VARLEN:
                inside = inside & (offsets >= rows.q_begin)
                clears = (query < rows.q_begin) | (query + QUERIES > rows.q_end)
            lse, delta = fetch_row_stats(inputs.lse, inputs.delta, lse_row, offsets, inside)
            if C.HAS_DROPOUT:
                delta *= args.dropout.delta_scale
            producer_acquire(q_pipe.empty, count, C.Q_STAGES)
            stage = count % C.Q_STAGES
            arrival = stage
            if C.VARLEN:
                arrival = gl.where(clears, C.Q_STAGES, stage)
            load_chunks(inputs.q, q_pipe.tiles, stage, place, q_pipe.full.index(arrival))
            put_row_stats(smem.row_stats, stage, lse, delta)
            mbarrier.arrive(q_pipe.full.index(arrival), count=1)
            producer_acquire(dout_pipe.empty, count, C.DOUT_STAGES)
            stage = count % C.DOUT_STAGES
            arrival = stage
            if C.VARLEN:
                arrival = gl.where(clears, C.DOUT_STAGES, stage)
            load_chunks(inputs.dout, dout_pipe.tiles, stage, place, dout_pipe.full.index(arrival))
            if C.VARLEN:
                if clears:
                    clear_queries(q_pipe, dout_pipe, count, cleared, rows.q_begin - query, rows.q_end - query, C)
                    cleared += 1
            count += 1


@gluon.jit
def chunk_of(tiles, stage, CHUNK: gl.constexpr):
    """Return a chunk of the columns of 64 rows."""
    return tiles[CHUNK].index(stage).reshape([64, tiles[CHUNK].shape[4]])


@gluon.jit
def issue_chunk(left, right, scores, ADDS: gl.constexpr, BEGIN: gl.constexpr):
    """Issue the MMA of the columns of a chunk from ``BEGIN`` on, if there are any."""
    REST: gl.constexpr = left.shape[1] - BEGIN
    if BEGIN > 0 and REST > 0:
        left = left.slice(BEGIN, REST, 1)
        right = right.slice(BEGIN, REST, 1)
    if REST > 0:
        scores = warpgroup_mma(left, right.permute((1, 0)), scores, use_acc=ADDS, is_async=True)
    return scores


@gluon.jit
def issue_s_or_dp(left_tiles, right_tiles, stage, resident, start=None, fragments=None):
    """Issue S or dP, 64 rows of the left tiles by 64 of the right ones, added to ``start``: an MMA a chunk of columns.

    stage: of the right tiles. resident: the stage of the left tiles; each of two loops gets a number of its own
    (pipeline.optimization_barrier). fragments: the left tiles' first columns in registers, which then are an MMA of
    their own.
    """
    scores = gl.full([64, QUERIES], 0.0, gl.float32, layout=SCORE_LAYOUT) if start is None else start
    WIDTH: gl.constexpr = left_tiles[0].shape[4]
    BEGIN: gl.constexpr = 0 if fragments is None else (FRAGMENT_COLUMNS if FRAGMENT_COLUMNS < WIDTH else WIDTH)
    if fragments is not None:
        left = as_operand(fragments, right_tiles[0].dtype, gl.DotOperandLayout(0, SCORE_LAYOUT, 2))
        right = chunk_of(right_tiles, stage, 0).slice(0, BEGIN, 1)
        scores = warpgroup_mma(left, right.permute((1, 0)), scores, use_acc=start is not None, is_async=True)
    for chunk in gl.static_range(len(left_tiles)):
        scores = issue_chunk(chunk_of(left_tiles, resident, chunk), chunk_of(right_tiles, stage, chunk), scores,
                             start is not None or fragments is not None or chunk > 0, BEGIN if chunk == 0 else 0)
    return scores


@gluon.jit
def load_fragments(tile):
    """Load rows into registers as a left operand, two neighbours packed in 32 bits."""
    operand = tile.load(gl.DotOperandLayout(0, SCORE_LAYOUT, 2))
    even, odd = operand.reshape([64, tile.shape[1] // 2, 2]).split()
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], dtype=gl.int32, is_pure=True,
                                     pack=1)


@gluon.jit
def load_first_columns(tiles):
    """Load the first columns of the resident rows into register fragments."""
    WIDTH: gl.constexpr = tiles[0].shape[4]
    return load_fragments(chunk_of(tiles, 0, 0).slice(0, FRAGMENT_COLUMNS if FRAGMENT_COLUMNS < WIDTH else WIDTH, 1))


@gluon.jit
def zeros_of_chunk(desc):
    """Return the accumulator of one chunk of the columns of 64 rows."""
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    return gl.full([64, COLUMNS], 0.0, gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))


@gluon.jit
def zeros_of(descs):
    """Return the accumulator of all columns of 64 rows, in the chunks of an input."""
    acc = ()
    for chunk in gl.static_range(len(descs)):
        acc = acc + (zeros_of_chunk(descs[chunk]),)
    return acc


@gluon.jit
def issue_accumulate(acc, left, right_tiles, stage):
    """Issue what a stage adds to an accumulator: Pᵀ·dO, dSᵀ·Q or dS·K. left: P or dS, rounded and packed."""
    pending = ()
    for chunk in gl.static_range(len(acc)):
        operand = as_operand(left, right_tiles[0].dtype, gl.DotOperandLayout(0, acc[chunk].type.layout, 2))
        pending = pending + (warpgroup_mma(operand, chunk_of(right_tiles, stage, chunk), acc[chunk], is_async=True),)
    return pending


@gluon.jit
def write_gradients(descs, ptr, tiles, stage, acc, factor, place, left, C: gl.constexpr):
    """Write the gradient of 64 rows, the accumulator times a factor, by way of the tiles that these rows came in.

    ptr, left: as in epilogue.write_gradient.
    """
    batch, head, row = place
    column = 0
    for chunk in gl.static_range(len(acc)):
        write_gradient(descs[chunk], ptr, tiles[chunk].index(stage), acc[chunk] * factor, (batch, head, row, column),
                       left, C, 0 if chunk == 0 else acc[0].shape[1])
        column += acc[chunk].shape[1]
    tma_store_wait(0)


@gluon.jit
def draws_of_keys(args, metadata, tile, C: gl.constexpr):
    """Return what the random numbers of a tile of keys are drawn by; () without C.HAS_DROPOUT."""
    if C.HAS_DROPOUT:
        settings = args.dropout
        seed = gl.load(args.inputs.seed)
        first_row = (sequence_at(metadata, tile.batch, C) * args.heads + tile.head) * args.group
        return Draws(seed.to(gl.uint32), (seed >> 32).to(gl.uint32), first_row,
                     settings.threshold.to(gl.uint32) << 16, settings.origin_q, settings.origin_k)
    else:
        return ()


@gluon.jit
def accumulate_dv(args, smem, C: gl.constexpr):
    """Consumer, one warpgroup: P of 64 keys and the queries that see them, and dV.

    There is no block of these only where lengths are data.
    """
    tile, bounds = kv_tile_of(smem.metadata, args.tile, args.bounds, 4, C)
    squash = args.scales.squash
    kv, q_pipe, dout_pipe, probs_pipe = smem.kv, smem.q, smem.dout, smem.probs
    DTYPE: gl.constexpr = q_pipe.tiles[0].dtype
    blocks = q_blocks_of_tile(tile, bounds, args.plan, C)
    _begin, masked, _end = phases_of(tile.first, blocks, bounds, C)
    total = args.group * blocks.count
    mbarrier.wait(kv.full.index(0), 0)
    fragments = load_first_columns(kv.k_tiles)
    dv = zeros_of(args.inputs.v)
    draws = draws_of_keys(args, smem.metadata, tile, C)
    bits = ()
    if C.MASK_PLAN:
        bits = bits_of_rows(args.plan, tile.batch, tile.head, tile.first // 64)
    view = TileView(tile.first, blocks, bounds, bits)
    member = 0
    step = 0
    for count in range(total):
        stage = count % C.Q_STAGES
        mask_words = bits_of_step(step, view, QUERIES, C)
        consumer_wait(q_pipe.full, count, C.Q_STAGES)
        scores_pending = issue_s_or_dp(kv.k_tiles, q_pipe.tiles, stage, optimization_barrier(0), fragments=fragments)
        if C.HAS_DROPOUT:
            words = draw(draws.low, draws.high, draws.first_row + member,
                         draws.origin_q + q_block_start(step, blocks, C), draws.origin_k + tile.first)
            member += gl.where(step + 1 == blocks.count, 1, 0)
        lse = smem.row_stats.index(2 * stage).load(gl.SliceLayout(0, SCORE_LAYOUT))
        scores = tanh_of(warpgroup_mma_wait(0, deps=(scores_pending,)), squash)
        probs = gl.exp2(scores * args.scales.scale_log2 - lse[None, :])
        if step < masked:
            probs = hide_pairs(probs, q_block_start(step, blocks, C), mask_words, view, C)
        step = gl.where(step + 1 == blocks.count, 0, step + 1)
        if C.HAS_DROPOUT:
            probs = signed(probs, words, draws.threshold)
        packed = pack_pairs(probs, DTYPE, C.HAS_DROPOUT)
        if squash is not None:  # the tanh's derivative is a factor of dS, and not of dV
            probs = times_tanh_derivative(probs, scores, True)
        consumer_wait(dout_pipe.full, count, C.DOUT_STAGES)
        dv_pending = issue_accumulate(dv, packed, dout_pipe.tiles, count % C.DOUT_STAGES)
        producer_acquire(probs_pipe.empty, count, 1)
        probs_pipe.tiles.index(0).store(probs)
        consumer_release(probs_pipe.full, count, 1)
        consumer_release(q_pipe.empty, count, C.Q_STAGES)
        dv = finish(dv_pending, 0)
        consumer_release(dout_pipe.empty, count, C.DOUT_STAGES)
    # When the last dP is done, nothing reads V any more.
    if C.VARLEN:
        if total > 0:
            producer_acquire(dout_pipe.empty, total - 1 + C.DOUT_STAGES, C.DOUT_STAGES)
        else:  # nor does its copy still write it
            mbarrier.wait(kv.full.index(1), 0)
    else:
        producer_acquire(dout_pipe.empty, total - 1 + C.DOUT_STAGES, C.DOUT_STAGES)
    factor = 1.0
    if C.HAS_DROPOUT:
        factor = args.dropout.dv_scale
    row, left = key_rows_of(smem.metadata, tile.first, C)
    write_gradients(args.outputs.dv, args.outputs.dv_ptr, kv.v_tiles, 0, dv, factor, (tile.batch, tile.head, row), left,
                    C)


@gluon.jit
def accumulate_dk(args, smem, C: gl.constexpr):
    """Consumer, one warpgroup: dS of the same keys and queries, and dK."""
    tile, bounds = kv_tile_of(smem.metadata, args.tile, args.bounds, 4, C)
    kv, q_pipe, dout_pipe, probs_pipe = smem.kv, smem.q, smem.dout, smem.probs
    DTYPE: gl.constexpr = q_pipe.tiles[0].dtype
    mbarrier.wait(kv.full.index(1), 0)
    fragments = load_first_columns(kv.v_tiles)
    dk = zeros_of(args.inputs.k)
    blocks = q_blocks_of_tile(tile, bounds, args.plan, C)
    for count in range(args.group * blocks.count):
        stage = count % C.Q_STAGES
        consumer_wait(q_pipe.full, count, C.Q_STAGES)
        delta = smem.row_stats.index(2 * stage + 1).load(gl.SliceLayout(0, SCORE_LAYOUT))
        start = None
        if not C.HAS_DROPOUT:
            start = gl.full([64, QUERIES], 0.0, gl.float32, layout=SCORE_LAYOUT) - delta[None, :]
        consumer_wait(dout_pipe.full, count, C.DOUT_STAGES)
        dprobs_pending = issue_s_or_dp(kv.v_tiles, dout_pipe.tiles, count % C.DOUT_STAGES, optimization_barrier(0),
                                       start, fragments)
        dprobs = warpgroup_mma_wait(0, deps=(dprobs_pending,))
        consumer_wait(probs_pipe.full, count, 1)
        probs = probs_pipe.tiles.index(0).load(SCORE_LAYOUT)
        if C.HAS_DROPOUT:
            dscores = score_gradient(probs, dprobs, delta[None, :])
        else:
            dscores = probs * dprobs
        dk_pending = issue_accumulate(dk, pack_pairs(dscores, DTYPE), q_pipe.tiles, stage)
        consumer_release(dout_pipe.empty, count, C.DOUT_STAGES)
        consumer_release(probs_pipe.empty, count, 1)
        dk = finish(dk_pending, 0)
        consumer_release(q_pipe.empty, count, C.Q_STAGES)
    # The last P is there: nothing reads K any more.
    if C.VARLEN:
        mbarrier.wait(kv.full.index(0), 0)  # nor does its copy still write it, where there was no P
    row, left = key_rows_of(smem.metadata, tile.first, C)
    write_gradients(args.outputs.dk, args.outputs.dk_ptr, kv.k_tiles, 0, dk, args.scales.gradient,
                    (tile.batch, tile.head, row), left, C)


@gluon.jit
def hopper_backward_d256_kernel(q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, dout_desc, dout_rest, dk_desc, dk_rest,
                                dv_desc, dv_rest, pointers, numbers, C: gl.constexpr):
    """Compute dk and dv; dq has a kernel of its own (dq_d256.py).

    Grid: (tiles · heads of k · batches,). A descriptor for each chunk of columns, the second one None where there is
    one chunk. pointers, numbers: a WideHeadPointers and a BackwardNumbers.
    """
    PROBS_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])  # float32: no bank conflicts
    inputs = Inputs(as_tuple(q_desc, q_rest), as_tuple(k_desc, k_rest), as_tuple(v_desc, v_rest),
                    as_tuple(dout_desc, dout_rest), pointers.lse, pointers.delta, pointers.seed,
                    numbers.group_splits)
    k_tiles = allocate_stages(inputs.k, 1)
    v_tiles = allocate_stages(inputs.v, 1)
    q_tiles = allocate_stages(inputs.q, C.Q_STAGES)
    dout_tiles = allocate_stages(inputs.dout, C.DOUT_STAGES)
    probs_tile = gl.allocate_shared_memory(gl.float32, [1, 64, QUERIES], PROBS_LAYOUT)
    row_stats = gl.allocate_shared_memory(gl.float32, [2 * C.Q_STAGES, QUERIES], CONTIGUOUS)
    SPARE: gl.constexpr = 1 if C.VARLEN else 0  # barriers of tiles in which rows are zeroed before they are full
    kv = KVTiles(k_tiles, v_tiles, make_barriers(2 + 2 * SPARE, 1))
    q_pipe = Pipe(q_tiles, make_barriers(C.Q_STAGES + SPARE, 2), make_barriers(C.Q_STAGES, 2))
    dout_pipe = Pipe(dout_tiles, make_barriers(C.DOUT_STAGES + SPARE, 1), make_barriers(C.DOUT_STAGES, 2))
    probs_pipe = Pipe(probs_tile, make_barriers(1, 1), make_barriers(1, 1))
    fence_async_shared()
    grid = numbers.grid
    tile = kv_tile_at(gl.program_id(0), grid, C)
    plan = MaskPlan(pointers.lists, pointers.bits, numbers.plan)
    if C.MASK_PLAN:
        tile = kv_tile_in_list(plan, tile, C)
    metadata = ()
    lengths = pointers.lengths
    if C.VARLEN:
        metadata = store_tile_metadata(locate_keys(
            tile, numbers.bounds, (lengths.cu_q, lengths.cu_k, lengths.q, lengths.k, numbers.num_sequences), C))
    outputs = Outputs(as_tuple(dk_desc, dk_rest), as_tuple(dv_desc, dv_rest), pointers.first, pointers.second)
    args = Args(inputs, outputs, tile, grid.heads, numbers.bounds, numbers.group, numbers.scales, (), numbers.dropout,
                plan)
    smem = Smem(kv, q_pipe, dout_pipe, row_stats, probs_pipe, (), metadata)
    if C.HAS_CU_SEQLENS:
        if has_rows(metadata):
            specialize(args, smem, C)
    else:
        specialize(args, smem, C)


@gluon.jit
def specialize(args, smem, C: gl.constexpr):
    """Give each warp of the CTA its role."""
    gl.warp_specialize([(accumulate_dv, (args, smem, C)), (accumulate_dk, (args, smem, C)), (load, (args, smem, C))],
                       [4, 1], [240, 24])
