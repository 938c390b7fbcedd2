"""Gradient of a bias that entries or heads share, on Hopper: dS summed over them (maths.md, eq. 21).

A tile of pairs stays: two consumers, a warpgroup each, own 64 queries of it and hold the sums of their dS in registers.
The entries, which are batch entries and heads that share the bias, stream past. One warp loads Q and dO of an entry,
one its K and V, 64 keys a turn; where a mask hides tiles one more writes their zeros. A consumer makes S = Q·Kᵀ and
dP = dO·Vᵀ of 64 x 64 pairs, adds dS = P∘(dP - delta) to their sum, and goes on to the next keys. The bias of the tile
is read once, to shared memory; by the same way the sums leave when the last entry is added.

What limits it is L2: an entry of a tile of 128 queries by 128 keys loads 512 rows for 4·128·128·d FLOP. Tiles of 256
keys load a quarter less for that, and were slower (docs/hopper.md).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.compat import tma_load
from tilewise.kernels.gluon.pair_tiles import BLOCKS, ROWS, blocks_of, seek, tiles_of
from tilewise.kernels.gluon.pipeline import (
    CONTIGUOUS,
    NO_TILE,
    TileQueue,
    consumer_release,
    consumer_wait,
    get_tile,
    make_barriers,
    optimization_barrier,
    producer_acquire,
    publish_tile,
)
from tilewise.kernels.gluon.softmax import LOG2E

SIZE = gl.constexpr(3)  # numbers that say where a tile is: line, row of tiles, tile of keys
BLANK_ROWS = gl.constexpr(4)  # that are zeroed at once


class Shape(NamedTuple):
    """What is fixed when the kernel is compiled: HopperDbiasConfig's fields, and what of the mask there is.

    WIDTH: columns of a head inside the tiles. READS, WRITES: numbers of the bias and of its gradient, one key after
    another, that lie inside of 16 bytes by themselves; 1 where that cannot be counted on.
    """

    WIDTH: int
    Q_STAGES: int
    KV_STAGES: int
    READS: int
    WRITES: int
    HAS_LOWER: bool
    HAS_UPPER: bool


@gluon.jit
def entry_of(line, member, sharing):
    """Return (batch, head) of one of the entries that share the bias of a line."""
    own_heads, shared_heads, _members, _group = sharing
    return line // own_heads + member // shared_heads, line % own_heads + member % shared_heads


@gluon.jit
def load_queries(loaded, C: gl.constexpr):
    """Producer, one warp: tell the consumers their tiles; load Q and dO of every entry, each consumer's by itself."""
    sources, queries, _keys, next_tile, order, band, sharing = loaded
    q_desc, _k_desc, _v_desc, dout_desc = sources
    q_tiles, dout_tiles, full, dout_full, empty = queries
    _rows, lines = order
    _own_heads, _shared_heads, members, _group = sharing
    line, row = 0, 0  # by their names: what is handed over as a literal is a constant there, which no loop may change
    line, row, place, tile = seek(line, row, gl.program_id(0), order, band, C)
    turn = 0
    taken = 0
    while line < lines:
        publish_tile(next_tile, taken, (line, row, tile), SIZE)
        taken += 1
        for member in range(members):
            batch, head = entry_of(line, member, sharing)
            for i in gl.static_range(2):
                slot = turn % C.Q_STAGES * 2 + i
                mbarrier.wait(empty.index(slot), ((turn // C.Q_STAGES) & 1) ^ 1)
                query = row * ROWS + i * 64
                mbarrier.expect(full.index(slot), q_desc.block_type.nbytes)
                tma_load(q_desc, [batch, head, query, 0], full.index(slot), q_tiles.index(slot))
                mbarrier.expect(dout_full.index(slot), dout_desc.block_type.nbytes)
                tma_load(dout_desc, [batch, head, query, 0], dout_full.index(slot), dout_tiles.index(slot))
            turn += 1
        line, row, place, tile = seek(line, row, place + gl.num_programs(0), order, band, C)
    publish_tile(next_tile, taken, (NO_TILE, 0, 0), SIZE)


@gluon.jit
def load_keys(loaded, C: gl.constexpr):
    """Producer, one warp: load K and V of every entry, block by block of those of the tile that somebody sees."""
    sources, _queries, keys, _next_tile, order, band, sharing = loaded
    _q_desc, k_desc, v_desc, _dout_desc = sources
    k_tiles, v_tiles, full, empty = keys
    _rows, lines = order
    _own_heads, _shared_heads, members, group = sharing
    line, row = 0, 0  # by their names: what is handed over as a literal is a constant there, which no loop may change
    line, row, place, tile = seek(line, row, gl.program_id(0), order, band, C)
    turn = 0
    while line < lines:
        begin, end, _whole = blocks_of(row, tile, band, C)
        for member in range(members):
            batch, head = entry_of(line, member, sharing)
            for block in range(begin, end):
                producer_acquire(empty, turn, C.KV_STAGES)
                slot = turn % C.KV_STAGES
                mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
                key = (tile * BLOCKS + block) * 64
                tma_load(k_desc, [batch, head // group, key, 0], full.index(slot), k_tiles.index(slot))
                tma_load(v_desc, [batch, head // group, key, 0], full.index(slot), v_tiles.index(slot))
                turn += 1
        line, row, place, tile = seek(line, row, place + gl.num_programs(0), order, band, C)


@gluon.constexpr_function
def plain_layout(bits, warps):
    """A row of 64 numbers in as few threads as move 16 bytes each."""
    each = 128 // bits
    return gl.BlockedLayout([1, each], [each // 2, 64 // each], [warps, 1], [1, 0])


@gluon.jit
def places_of(base, queries, keys, strides, VECTOR: gl.constexpr):
    """Point to pairs, of whose keys VECTOR at a time lie side by side; a partition's arguments do not tell so."""
    stride_q, stride_k = strides
    rows = base + queries.to(gl.int64)[:, None] * stride_q
    if VECTOR > 1:
        places = gl.max_contiguous(gl.multiple_of(rows + keys[None, :], [1, 16]), [1, VECTOR])
    else:
        places = rows + keys.to(gl.int64)[None, :] * stride_k
    return places


@gluon.jit
def inside(queries, keys, band, VECTOR: gl.constexpr):
    """Whether pairs are there: VECTOR keys all or none."""
    sq, sk, _lower, _upper = band
    return (queries < sq)[:, None] & (keys // VECTOR * VECTOR < sk)[None, :]


@gluon.jit
def blank_tiles(blanked, C: gl.constexpr):
    """One warp: zeros for the tiles of pairs that no query sees."""
    dbias_ptr, order, band, columns = blanked
    rows, lines = order
    sq, sk, _lower, _upper = band
    LAYOUT: gl.constexpr = plain_layout(dbias_ptr.dtype.element_ty.primitive_bitwidth, 1)
    zeros = gl.full([BLANK_ROWS, 64], 0.0, dbias_ptr.dtype.element_ty, layout=LAYOUT)
    own_rows = gl.arange(0, BLANK_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    own_keys = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    number = gl.program_id(0)
    while number < columns * rows * lines:
        tile = number % columns
        row = number // columns % rows
        first, count = tiles_of(row, band, C)
        if (tile < first) | (tile >= first + count):
            base = dbias_ptr + (number // columns // rows).to(gl.int64) * sq * sk
            for query in range(row * ROWS, gl.minimum(row * ROWS + ROWS, sq), BLANK_ROWS):
                for block in range(BLOCKS):
                    queries = query + own_rows
                    keys = (tile * BLOCKS + block) * 64 + own_keys
                    gl.store(places_of(base, queries, keys, (sk, 1), C.WRITES), zeros,
                             mask=inside(queries, keys, band, C.WRITES))
        number += gl.num_programs(0)


@gluon.jit
def fetch_bias(bias_tiles, source, line, first_query, first_key, band, own_heads, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer: bring the bias of its pairs to shared memory; 0 past the last query and key.

    All loads come before the first store, which waits for one.
    """
    bias_ptr, stride_b, stride_h, stride_q, stride_k = source
    LAYOUT: gl.constexpr = plain_layout(bias_ptr.dtype.element_ty.primitive_bitwidth, 4)
    queries = first_query + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    base = bias_ptr + (line // own_heads).to(gl.int64) * stride_b + (line % own_heads).to(gl.int64) * stride_h
    fetched = ()
    for i in gl.static_range(BLOCKS):
        keys = first_key + i * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        places = places_of(base, queries, keys, (stride_q, stride_k), C.READS)
        bias = gl.load(places, mask=inside(queries, keys, band, C.READS), other=0.0)
        fetched = fetched + (bias,)
    for i in gl.static_range(BLOCKS):
        bias_tiles.index(OWN * BLOCKS + i).store(fetched[i])


@gluon.jit
def write_dbias(dbias_ptr, bias_tiles, sums, line, first_query, first_key, band, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer: write its sums, in the gradient's dtype, by way of the memory of their bias: whole rows of 16 bytes."""
    sq, sk, _lower, _upper = band
    DTYPE: gl.constexpr = dbias_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = plain_layout(DTYPE.primitive_bitwidth, 4)
    queries = first_query + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    base = dbias_ptr + line.to(gl.int64) * sq * sk
    for i in gl.static_range(BLOCKS):
        bias_tiles.index(OWN * BLOCKS + i).store(sums[i].to(DTYPE))
    for i in gl.static_range(BLOCKS):
        keys = first_key + i * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        gl.store(places_of(base, queries, keys, (sk, 1), C.WRITES), bias_tiles.index(OWN * BLOCKS + i).load(LAYOUT),
                 mask=inside(queries, keys, band, C.WRITES))


@gluon.jit
def add_block(total, q, dout, arrival, keys, turn, bias_tile, lse, delta, first_query, first_key, band, scale_log2,
              FIRST: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Consumer: add dS of 64 queries and 64 keys of an entry (eq. 7 and 9); scores as the Triton kernels have them.

    arrival: the barrier of dO and its phase, waited for where this may be the entry's FIRST block: S needs Q alone.
    """
    k_tiles, v_tiles, full, empty = keys
    LAYOUT: gl.constexpr = total.type.layout
    zero = gl.full([64, 64], 0.0, gl.float32, layout=LAYOUT)
    consumer_wait(full, turn, C.KV_STAGES)
    k = k_tiles.index(turn % C.KV_STAGES).reshape([64, C.WIDTH])
    v = v_tiles.index(turn % C.KV_STAGES).reshape([64, C.WIDTH])
    scores_pending = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if FIRST:
        dout_full, phase = arrival
        mbarrier.wait(dout_full, phase)
    dprobs_pending = warpgroup_mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    bias = bias_tile.load(LAYOUT).to(gl.float32) * LOG2E
    scores = warpgroup_mma_wait(1, deps=(scores_pending,))
    probs = gl.exp2(scores * scale_log2 + bias - lse[:, None])
    dprobs = warpgroup_mma_wait(0, deps=(dprobs_pending,))
    consumer_release(empty, turn, C.KV_STAGES)
    dscores = probs * (dprobs - delta[:, None])
    if MASKED:
        _sq, _sk, lower, upper = band
        queries = first_query + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        own_keys = optimization_barrier(first_key) + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        if C.HAS_UPPER:
            dscores = gl.where(own_keys[None, :] <= (queries + upper)[:, None], dscores, 0.0)
        if C.HAS_LOWER:
            dscores = gl.where(own_keys[None, :] >= (queries + lower)[:, None], dscores, 0.0)
    return total + dscores


@gluon.jit
def add_entries(sums, members, turn, q_turn, line, first_query, first_key, blocks, rows, queries, keys, bias_tiles,
                band, heads, sharing, scale_log2, OWN: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Consumer: add dS of every entry that shares the tile; where MASKED some blocks of keys may be left out."""
    lse_ptr, delta_ptr = rows
    q_tiles, dout_tiles, q_full, dout_full, q_empty = queries
    begin, end = blocks
    sq, _sk, _lower, _upper = band
    LAYOUT: gl.constexpr = sums[0].type.layout
    offsets = first_query + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    turn = optimization_barrier(turn)
    q_turn = optimization_barrier(q_turn)
    for member in range(members):
        batch, head = entry_of(line, member, sharing)
        start = (batch * heads + head).to(gl.int64) * sq
        lse = gl.load(lse_ptr + start + offsets, mask=offsets < sq, other=float("-inf"))
        delta = gl.load(delta_ptr + start + offsets, mask=offsets < sq, other=0.0)
        lse = gl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        slot = q_turn % C.Q_STAGES * 2 + OWN
        phase = (q_turn // C.Q_STAGES) & 1
        mbarrier.wait(q_full.index(slot), phase)
        q = q_tiles.index(slot).reshape([64, C.WIDTH])
        dout = dout_tiles.index(slot).reshape([64, C.WIDTH])
        added = ()
        for i in gl.static_range(BLOCKS):
            total = sums[i]
            if (i >= begin) & (i < end):
                total = add_block(total, q, dout, (dout_full.index(slot), phase), keys, turn,
                                  bias_tiles.index(OWN * BLOCKS + i), lse, delta, first_query, first_key + i * 64,
                                  band, scale_log2, MASKED or i == 0, MASKED, C)
                turn += 1
            added = added + (total,)
        sums = added
        mbarrier.arrive(q_empty.index(slot), count=1)
        q_turn += 1
    return sums, turn, q_turn


@gluon.jit
def add_up(summed, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: the sums of dS of 64 queries of every tile."""
    rows, source, dbias_ptr, queries, keys, next_tile, bias_tiles, band, heads, sharing, scale_log2 = summed
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    own_heads, _shared_heads, shared, _group = sharing
    PHASES: gl.constexpr = 2 if C.HAS_LOWER or C.HAS_UPPER else 1
    turn = 0
    q_turn = 0
    taken = 0
    line, row, tile = get_tile(next_tile, taken, SIZE)
    while line != NO_TILE:
        first_query = row * ROWS + OWN * 64
        first_key = tile * (BLOCKS * 64)
        begin, end, whole = blocks_of(row, tile, band, C)
        fetch_bias(bias_tiles, source, line, first_query, first_key, band, own_heads, OWN, C)
        sums = ()
        for _ in gl.static_range(BLOCKS):
            sums = sums + (gl.full([64, 64], 0.0, gl.float32, layout=LAYOUT),)
        for MASKED in gl.static_range(PHASES):
            members = gl.where(whole == (MASKED == 1), 0, shared)
            sums, turn, q_turn = add_entries(
                sums, members, turn, q_turn, line, first_query, first_key, (begin, end), rows, queries, keys,
                bias_tiles, band, heads, sharing, scale_log2, OWN, MASKED == 1, C)
        write_dbias(dbias_ptr, bias_tiles, sums, line, first_query, first_key, band, OWN, C)
        taken += 1
        line, row, tile = get_tile(next_tile, taken, SIZE)


@gluon.jit(do_not_specialize=["stride_b", "stride_h", "stride_q", "stride_k", "sq", "sk", "heads", "group",
                              "own_heads", "shared_heads", "members", "lines", "rows", "columns", "lower", "upper"])
def hopper_dbias_kernel(q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr, bias_ptr, dbias_ptr, stride_b, stride_h,
                        stride_q, stride_k, sq, sk, heads, group, own_heads, shared_heads, members, lines, rows,
                        columns, lower, upper, scale_log2, C: gl.constexpr):
    """Compute dbias, all of it.

    Grid: any number of programs, which share the tiles that are seen. bias by strides; dbias: (own_batches, own_heads,
    sq, sk), dense, in the bias's dtype; lines: own_batches · own_heads; rows, columns: tiles of queries and of keys.
    ``members`` batch entries and heads share a line's bias, ``shared_heads`` of them in each batch entry.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    BIAS: gl.constexpr = bias_ptr.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(DTYPE, [2 * C.Q_STAGES, 1, 1, 64, C.WIDTH], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [2 * C.Q_STAGES, 1, 1, 64, C.WIDTH], dout_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [C.KV_STAGES, 1, 1, 64, C.WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [C.KV_STAGES, 1, 1, 64, C.WIDTH], v_desc.layout)
    BIAS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], BIAS)
    bias_tiles = gl.allocate_shared_memory(BIAS, [2 * BLOCKS, 64, 64], BIAS_LAYOUT)
    numbers = gl.allocate_shared_memory(gl.int32, [2 * SIZE, 1], CONTIGUOUS)
    queries = (q_tiles, dout_tiles, make_barriers(2 * C.Q_STAGES, 1), make_barriers(2 * C.Q_STAGES, 1),
               make_barriers(2 * C.Q_STAGES, 1))
    keys = (k_tiles, v_tiles, make_barriers(C.KV_STAGES, 1), make_barriers(C.KV_STAGES, 2))
    next_tile = TileQueue(numbers, make_barriers(2, 1), make_barriers(2, 2))
    fence_async_shared()
    order = (rows, lines)
    band = (sq, sk, lower, upper)
    sharing = (own_heads, shared_heads, members, group)
    source = (bias_ptr, stride_b, stride_h, stride_q, stride_k)
    summed = ((lse_ptr, delta_ptr), source, dbias_ptr, queries, keys, next_tile, bias_tiles, band, heads, sharing,
              scale_log2)
    loaded = ((q_desc, k_desc, v_desc, dout_desc), queries, keys, next_tile, order, band, sharing)
    blanked = (dbias_ptr, order, band, columns)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    if C.HAS_LOWER or C.HAS_UPPER:
        gl.warp_specialize([(add_up, (summed, ZERO, C)), (add_up, (summed, ONE, C)), (load_queries, (loaded, C)),
                            (load_keys, (loaded, C)), (blank_tiles, (blanked, C))], [4, 1, 1, 1], [240, 24, 24, 24])
    else:
        gl.warp_specialize([(add_up, (summed, ZERO, C)), (add_up, (summed, ONE, C)), (load_queries, (loaded, C)),
                            (load_keys, (loaded, C))], [4, 1, 1], [240, 24, 24])
