"""Gradient of a bias that batch entries or heads share, on Hopper: dS summed over them (maths.md, eq. 21).

A tile of scores is resident: two consumers, a warpgroup each, own 64 of its queries and accumulate dS in registers. The
members, which are the batch entries and heads that share the bias, stream past. One warp loads Q and dO of a member,
one its K and V, a block of 64 keys at a time; where a mask hides tiles another warp writes their zeros. A consumer
computes S = Q·Kᵀ and dP = dO·Vᵀ of 64 x 64 scores, adds dS = P∘(dP - delta) to the accumulator, and goes on to the next
block. The bias of the tile is read once, to shared memory, and through the same memory dbias is written when the last
member is added.

What limits the kernel is L2: a member of a tile of 128 queries by 128 keys loads 512 rows for 4·128·128·d FLOP. Tiles
of 256 keys load a quarter less for that, and were slower (benchmarks/journal/hopper-backward.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.hopper.backward.dbias_tiles import (
    BLOCKS_PER_TILE,
    TILE_QUERIES,
    find_tile,
    visible_blocks_of,
    visible_tiles_of,
)
from tilewise.kernels.hopper.backward.dbias_types import (
    Args,
    Bias,
    Inputs,
    KVPipe,
    MemberRows,
    QPipe,
    Smem,
    TileView,
)
from tilewise.kernels.hopper.backward.producers import in_base_2
from tilewise.kernels.hopper.compat import tma_load
from tilewise.kernels.hopper.pipeline import (
    CONTIGUOUS,
    consumer_release,
    consumer_wait,
    make_barriers,
    optimization_barrier,
    producer_acquire,
)
from tilewise.kernels.hopper.softmax import LOG2E
from tilewise.kernels.hopper.tile_scheduler import (
    NO_TILE,
    TileQueue,
    get_tile,
    publish_tile,
)

TILE_SIZE = gl.constexpr(3)  # numbers that are published of a tile: bias head, block of queries, block of keys
ZEROED_ROWS = gl.constexpr(4)  # that are zeroed at once


@gluon.jit
def member_of(bias_head, member, sharing):
    """Return (batch, head) of one of the members of a bias head."""
    batch = bias_head // sharing.own_heads + member // sharing.shared_heads
    return batch, bias_head % sharing.own_heads + member % sharing.shared_heads


@gluon.jit
def load_queries(args, smem, C: gl.constexpr):
    """Producer, one warp: publish the tiles; load Q and dO of every member, each consumer's queries by themselves."""
    inputs, sharing, grid = args.inputs, args.sharing, args.grid
    q_tiles, dout_tiles, q_full, dout_full, empty = smem.q
    # Variables, since a literal argument is a constant in the function, and no loop may change it.
    bias_head, m_block = 0, 0
    tile = find_tile(bias_head, m_block, gl.program_id(0), grid, args.bounds, C)
    count = 0
    tile_count = 0
    while tile.bias_head < grid.bias_heads:
        publish_tile(smem.queue, tile_count, (tile.bias_head, tile.m_block, tile.n_block), TILE_SIZE)
        tile_count += 1
        for member in range(sharing.members):
            batch, head = member_of(tile.bias_head, member, sharing)
            for i in gl.static_range(2):
                stage = count % C.Q_STAGES * 2 + i
                mbarrier.wait(empty.index(stage), ((count // C.Q_STAGES) & 1) ^ 1)
                query = tile.m_block * TILE_QUERIES + i * 64
                mbarrier.expect(q_full.index(stage), inputs.q.block_type.nbytes)
                tma_load(inputs.q, [batch, head, query, 0], q_full.index(stage), q_tiles.index(stage))
                mbarrier.expect(dout_full.index(stage), inputs.dout.block_type.nbytes)
                tma_load(inputs.dout, [batch, head, query, 0], dout_full.index(stage), dout_tiles.index(stage))
            count += 1
        tile = find_tile(tile.bias_head, tile.m_block, tile.rank + gl.num_programs(0), grid, args.bounds, C)
    publish_tile(smem.queue, tile_count, (NO_TILE, 0, 0), TILE_SIZE)


@gluon.jit
def load_keys(args, smem, C: gl.constexpr):
    """Producer, one warp: load K and V of every member, block by block of those of the tile that a query sees."""
    inputs, kv, sharing, grid = args.inputs, smem.kv, args.sharing, args.grid
    # Variables, since a literal argument is a constant in the function, and no loop may change it.
    bias_head, m_block = 0, 0
    tile = find_tile(bias_head, m_block, gl.program_id(0), grid, args.bounds, C)
    count = 0
    while tile.bias_head < grid.bias_heads:
        begin, end, _is_full = visible_blocks_of(tile.m_block, tile.n_block, args.bounds, C)
        for member in range(sharing.members):
            batch, head = member_of(tile.bias_head, member, sharing)
            for block in range(begin, end):
                producer_acquire(kv.empty, count, C.KV_STAGES)
                stage = count % C.KV_STAGES
                mbarrier.expect(kv.full.index(stage), inputs.k.block_type.nbytes + inputs.v.block_type.nbytes)
                key = (tile.n_block * BLOCKS_PER_TILE + block) * 64
                tma_load(inputs.k, [batch, head // sharing.group, key, 0], kv.full.index(stage),
                         kv.k_tiles.index(stage))
                tma_load(inputs.v, [batch, head // sharing.group, key, 0], kv.full.index(stage),
                         kv.v_tiles.index(stage))
                count += 1
        tile = find_tile(tile.bias_head, tile.m_block, tile.rank + gl.num_programs(0), grid, args.bounds, C)


@gluon.constexpr_function
def coalesced_layout(bits, warps):
    """Return the layout of rows of 64 numbers in which each thread has 16 bytes of a row."""
    each = 128 // bits
    return gl.BlockedLayout([1, each], [each // 2, 64 // each], [warps, 1], [1, 0])


@gluon.jit
def pointers_to(base, queries, keys, strides, VECTOR: gl.constexpr):
    """Point to scores, of whose keys VECTOR at a time are neighbours: the compiler cannot see it."""
    stride_q, stride_k = strides
    rows = base + queries.to(gl.int64)[:, None] * stride_q
    if VECTOR > 1:
        pointers = gl.max_contiguous(gl.multiple_of(rows + keys[None, :], [1, 16]), [1, VECTOR])
    else:
        pointers = rows + keys.to(gl.int64)[None, :] * stride_k
    return pointers


@gluon.jit
def inside(queries, keys, bounds, VECTOR: gl.constexpr):
    """Whether scores exist: of VECTOR keys all or none."""
    return (queries < bounds.sq)[:, None] & (keys // VECTOR * VECTOR < bounds.sk)[None, :]


@gluon.jit
def zero_hidden_tiles(args, C: gl.constexpr):
    """One warp: write zeros to the tiles of dbias that no query sees a key of."""
    dbias_ptr, grid, bounds = args.dbias_ptr, args.grid, args.bounds
    LAYOUT: gl.constexpr = coalesced_layout(dbias_ptr.dtype.element_ty.primitive_bitwidth, 1)
    zeros = gl.full([ZEROED_ROWS, 64], 0.0, dbias_ptr.dtype.element_ty, layout=LAYOUT)
    own_rows = gl.arange(0, ZEROED_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    own_keys = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    number = gl.program_id(0)
    while number < grid.n_blocks * grid.m_blocks * grid.bias_heads:
        n_block = number % grid.n_blocks
        m_block = number // grid.n_blocks % grid.m_blocks
        first, count = visible_tiles_of(m_block, bounds, C)
        if (n_block < first) | (n_block >= first + count):
            base = dbias_ptr + (number // grid.n_blocks // grid.m_blocks).to(gl.int64) * bounds.sq * bounds.sk
            stop = gl.minimum(m_block * TILE_QUERIES + TILE_QUERIES, bounds.sq)
            for query in range(m_block * TILE_QUERIES, stop, ZEROED_ROWS):
                for block in range(BLOCKS_PER_TILE):
                    queries = query + own_rows
                    keys = (n_block * BLOCKS_PER_TILE + block) * 64 + own_keys
                    gl.store(pointers_to(base, queries, keys, (bounds.sk, 1), C.DBIAS_VECTOR), zeros,
                             mask=inside(queries, keys, bounds, C.DBIAS_VECTOR))
        number += gl.num_programs(0)


@gluon.jit
def load_bias(args, bias_tiles, view, WG: gl.constexpr, C: gl.constexpr):
    """Consumer: bring the bias of its scores to shared memory; 0 past the last query and key.

    All loads come before the first store, which waits for one.
    """
    bias, bounds = args.bias, args.bounds
    own_heads = args.sharing.own_heads
    LAYOUT: gl.constexpr = coalesced_layout(bias.ptr.dtype.element_ty.primitive_bitwidth, 4)
    queries = view.first_query + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    base = bias.ptr + (view.bias_head // own_heads).to(gl.int64) * bias.strides.b
    base += (view.bias_head % own_heads).to(gl.int64) * bias.strides.h
    loaded = ()
    for i in gl.static_range(BLOCKS_PER_TILE):
        keys = view.first_key + i * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        pointers = pointers_to(base, queries, keys, (bias.strides.q, bias.strides.k), C.BIAS_VECTOR)
        loaded = loaded + (gl.load(pointers, mask=inside(queries, keys, bounds, C.BIAS_VECTOR), other=0.0),)
    for i in gl.static_range(BLOCKS_PER_TILE):
        bias_tiles.index(WG * BLOCKS_PER_TILE + i).store(loaded[i])


@gluon.jit
def write_dbias(args, bias_tiles, acc, view, WG: gl.constexpr, C: gl.constexpr):
    """Consumer: write its accumulators, rounded, through the memory of their bias: whole rows of 16 bytes a thread."""
    dbias_ptr, bounds = args.dbias_ptr, args.bounds
    DTYPE: gl.constexpr = dbias_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = coalesced_layout(DTYPE.primitive_bitwidth, 4)
    queries = view.first_query + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    base = dbias_ptr + view.bias_head.to(gl.int64) * bounds.sq * bounds.sk
    for i in gl.static_range(BLOCKS_PER_TILE):
        bias_tiles.index(WG * BLOCKS_PER_TILE + i).store(acc[i].to(DTYPE))
    for i in gl.static_range(BLOCKS_PER_TILE):
        keys = view.first_key + i * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        gl.store(pointers_to(base, queries, keys, (bounds.sk, 1), C.DBIAS_VECTOR),
                 bias_tiles.index(WG * BLOCKS_PER_TILE + i).load(LAYOUT),
                 mask=inside(queries, keys, bounds, C.DBIAS_VECTOR))


@gluon.jit
def add_block(acc, rows, count, bias_tile, first_key, view, args, smem, FIRST: gl.constexpr, MASKED: gl.constexpr,
              C: gl.constexpr):
    """Consumer: add dS of a member's 64 queries and 64 keys (eq. 7 and 9); scores as the Triton kernels have them.

    count: the KV pipe's iteration. FIRST: whether this may be the member's first block: dO is waited for behind the MMA
    of S, which needs Q alone.
    """
    kv, bounds = smem.kv, args.bounds
    LAYOUT: gl.constexpr = acc.type.layout
    zero = gl.full([64, 64], 0.0, gl.float32, layout=LAYOUT)
    consumer_wait(kv.full, count, C.KV_STAGES)
    k = kv.k_tiles.index(count % C.KV_STAGES).reshape([64, C.WIDTH])
    v = kv.v_tiles.index(count % C.KV_STAGES).reshape([64, C.WIDTH])
    scores_pending = warpgroup_mma(rows.q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if FIRST:
        mbarrier.wait(smem.q.dout_full.index(rows.stage), rows.phase)
    dprobs_pending = warpgroup_mma(rows.dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    bias = bias_tile.load(LAYOUT).to(gl.float32) * LOG2E
    scores = warpgroup_mma_wait(1, deps=(scores_pending,))
    probs = gl.exp2(scores * args.scale_log2 + bias - rows.lse[:, None])
    dprobs = warpgroup_mma_wait(0, deps=(dprobs_pending,))
    consumer_release(kv.empty, count, C.KV_STAGES)
    dscores = probs * (dprobs - rows.delta[:, None])
    if MASKED:
        queries = view.first_query + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        own_keys = optimization_barrier(first_key) + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        if C.HAS_UPPER:
            dscores = gl.where(own_keys[None, :] <= (queries + bounds.upper)[:, None], dscores, 0.0)
        if C.HAS_LOWER:
            dscores = gl.where(own_keys[None, :] >= (queries + bounds.lower)[:, None], dscores, 0.0)
    return acc + dscores


@gluon.jit
def add_members(acc, members, count, q_count, view, args, smem, WG: gl.constexpr, MASKED: gl.constexpr,
                C: gl.constexpr):
    """Consumer: add dS of every member of the tile's bias head; where MASKED some blocks of keys may be skipped.

    count, q_count: iterations of the KV and the Q pipe. Returns the accumulators, and the next iterations.
    """
    inputs, bounds, q_pipe = args.inputs, args.bounds, smem.q
    LAYOUT: gl.constexpr = acc[0].type.layout
    offsets = view.first_query + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    count = optimization_barrier(count)
    q_count = optimization_barrier(q_count)
    for member in range(members):
        batch, head = member_of(view.bias_head, member, args.sharing)
        lse_row = (batch * args.heads + head).to(gl.int64) * bounds.sq
        lse = gl.load(inputs.lse + lse_row + offsets, mask=offsets < bounds.sq, other=float("-inf"))
        delta = gl.load(inputs.delta + lse_row + offsets, mask=offsets < bounds.sq, other=0.0)
        lse = in_base_2(lse)
        stage = q_count % C.Q_STAGES * 2 + WG
        phase = (q_count // C.Q_STAGES) & 1
        mbarrier.wait(q_pipe.q_full.index(stage), phase)
        rows = MemberRows(q_pipe.q_tiles.index(stage).reshape([64, C.WIDTH]),
                          q_pipe.dout_tiles.index(stage).reshape([64, C.WIDTH]), stage, phase, lse, delta)
        added = ()
        for i in gl.static_range(BLOCKS_PER_TILE):
            total = acc[i]
            if (i >= view.begin) & (i < view.end):
                total = add_block(total, rows, count, smem.bias_tiles.index(WG * BLOCKS_PER_TILE + i),
                                  view.first_key + i * 64, view, args, smem, MASKED or i == 0, MASKED, C)
                count += 1
            added = added + (total,)
        acc = added
        mbarrier.arrive(q_pipe.empty.index(stage), count=1)
        q_count += 1
    return acc, count, q_count


@gluon.jit
def accumulate(args, smem, WG: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: sum dS of 64 queries of every tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    PHASES: gl.constexpr = 2 if C.HAS_LOWER or C.HAS_UPPER else 1
    count = 0
    q_count = 0
    tile_count = 0
    bias_head, m_block, n_block = get_tile(smem.queue, tile_count, TILE_SIZE)
    while bias_head != NO_TILE:
        first_query = m_block * TILE_QUERIES + WG * 64
        first_key = n_block * (BLOCKS_PER_TILE * 64)
        begin, end, is_full = visible_blocks_of(m_block, n_block, args.bounds, C)
        view = TileView(bias_head, first_query, first_key, begin, end)
        load_bias(args, smem.bias_tiles, view, WG, C)
        acc = ()
        for _ in gl.static_range(BLOCKS_PER_TILE):
            acc = acc + (gl.full([64, 64], 0.0, gl.float32, layout=LAYOUT),)
        for MASKED in gl.static_range(PHASES):
            members = gl.where(is_full == (MASKED == 1), 0, args.sharing.members)
            acc, count, q_count = add_members(acc, members, count, q_count, view, args, smem, WG, MASKED == 1, C)
        write_dbias(args, smem.bias_tiles, acc, view, WG, C)
        tile_count += 1
        bias_head, m_block, n_block = get_tile(smem.queue, tile_count, TILE_SIZE)


@gluon.jit(do_not_specialize=["heads"])
def hopper_dbias_kernel(q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr, bias_ptr, dbias_ptr, strides, bounds,
                        sharing, grid, heads, scale_log2, C: gl.constexpr):
    """Compute dbias, all of it.

    Grid: any number of CTAs, which share the visible tiles. strides, bounds, sharing, grid: a BiasStrides, a
    MaskBounds, a Sharing and a BiasGrid (arguments.py), whose bias_heads are own_batches · own_heads. dbias:
    (own_batches, own_heads, sq, sk), dense, in the bias's dtype. heads: query heads.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    BIAS: gl.constexpr = bias_ptr.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(DTYPE, [2 * C.Q_STAGES, 1, 1, 64, C.WIDTH], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [2 * C.Q_STAGES, 1, 1, 64, C.WIDTH], dout_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [C.KV_STAGES, 1, 1, 64, C.WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [C.KV_STAGES, 1, 1, 64, C.WIDTH], v_desc.layout)
    BIAS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], BIAS)
    bias_tiles = gl.allocate_shared_memory(BIAS, [2 * BLOCKS_PER_TILE, 64, 64], BIAS_LAYOUT)
    numbers = gl.allocate_shared_memory(gl.int32, [2 * TILE_SIZE, 1], CONTIGUOUS)
    q_pipe = QPipe(q_tiles, dout_tiles, make_barriers(2 * C.Q_STAGES, 1), make_barriers(2 * C.Q_STAGES, 1),
                   make_barriers(2 * C.Q_STAGES, 1))
    kv_pipe = KVPipe(k_tiles, v_tiles, make_barriers(C.KV_STAGES, 1), make_barriers(C.KV_STAGES, 2))
    queue = TileQueue(numbers, make_barriers(2, 1), make_barriers(2, 2))
    fence_async_shared()
    args = Args(Inputs(q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr), Bias(bias_ptr, strides), dbias_ptr, grid,
                bounds, heads, sharing, scale_log2)
    smem = Smem(q_pipe, kv_pipe, queue, bias_tiles)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    if C.HAS_LOWER or C.HAS_UPPER:
        gl.warp_specialize([
            (accumulate, (args, smem, ZERO, C)), (accumulate, (args, smem, ONE, C)), (load_queries, (args, smem, C)),
            (load_keys, (args, smem, C)), (zero_hidden_tiles, (args, C)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])
    else:
        gl.warp_specialize([
            (accumulate, (args, smem, ZERO, C)), (accumulate, (args, smem, ONE, C)), (load_queries, (args, smem, C)),
            (load_keys, (args, smem, C)),
        ], [4, 1, 1], [240, 24, 24])
