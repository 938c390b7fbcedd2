"""Backward on Hopper: a tile of keys stays, the queries that see it stream past (maths.md, section 6).

One warp loads; each consumer, a warpgroup, owns 64 keys and sums their dK and dV in registers. It computes its scores
turned, Sᵀ = K·Qᵀ, so that P and dS come out as left operands of dV = Pᵀ·dO and dK = dSᵀ·Q. Only dQ = dS·K needs the
keys of all: dS goes through shared memory, and each warpgroup makes its part of dQ from the whole of it. That part is
added in global memory to the sums of the other tiles (hopper_dq_sums.py), in float32 and in the order in which threads
hold it; hopper_dq.py brings it into dq's. The query heads of a group pass one after another while the keys stay.

With C.S_AHEAD, S of the next step is computed while this step's dQ and dK are: a step then begins with its softmax.

With C.PERSISTENT a program draws one tile of keys after another. The next one's values, keys and first queries come
while the last step is computed and dK and dV are written, by way of what dS and the parts of dQ are staged in. With
C.HEAD_PERSISTENT it has all tiles of a head instead, from the last one on, and nobody else adds to this head's dQ: the
first tile that sees a step sets its sums, and the last one begins from them and writes dq.

Where lengths are data, rows of other sequences come into the tiles. Their probabilities are 0 and enter products, and
0 · NaN is NaN: the loading warp zeroes them, before it says that the tile is there.
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

from tilewise.kernels.gluon import dropout
from tilewise.kernels.gluon.backward_products import dscores_slot, issue_dq, issue_pairs
from tilewise.kernels.gluon.compat import reinterpret, tma_store, tma_store_wait
from tilewise.kernels.gluon.hopper_backward_load import load
from tilewise.kernels.gluon.hopper_dq_sums import (
    add_in_order,
    await_sums_before,
    hand_over,
    keep_half,
    make_stage,
    start_of_half,
)
from tilewise.kernels.gluon.hopper_tails import TAIL, make_picks
from tilewise.kernels.gluon.lengths import (
    key_rows_of,
    key_tile_of,
    load_tile_metadata,
    locate_keys,
    parts_of,
    sequence_at,
    store_some,
    store_tile_metadata,
)
from tilewise.kernels.gluon.pipeline import (
    CONTIGUOUS,
    NO_TILE,
    TileQueue,
    consumer_release,
    consumer_wait,
    get_tile,
    make_barriers,
    named_barrier_sync,
    optimization_barrier,
    pad_code,
    scheduling_fence_of,
)
from tilewise.kernels.gluon.softmax import cap
from tilewise.kernels.gluon.tiles import (
    QUERIES,
    MaskBounds,
    TileGrid,
    key_tile_at,
    phases_of,
    q_block_start,
    q_blocks_of,
    queries_to_and_fro,
)

PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # of a step: 64 keys by 64 queries


class Shape(NamedTuple):
    """What is fixed when the kernel is compiled: HopperBackwardConfig's fields, and what of the mask there is.

    STAYS: of calls with tails whose dQ is staged. ALONE: of programs that stay. LENGTHS, PACKED, SHIFTED: as in the
    forward kernel. DROPS: whether there is dropout.
    """

    WIDTH: int
    CONSUMERS: int
    KV_STAGES: int
    OUT_STAGES: int
    S_AHEAD: bool
    DQ_FROM_REGISTERS: bool
    DETERMINISTIC: bool
    AUGMENTED_K: bool
    PERSISTENT: bool
    HEAD_PERSISTENT: bool
    HAS_LOWER: bool
    HAS_UPPER: bool
    VARLEN: bool
    HAS_CU_SEQLENS: bool
    BOTTOM_RIGHT: bool
    HAS_DROPOUT: bool
    CODE_PADDING: tuple[int, int]


@gluon.jit
def hide_probs(probs, first_query, first_key, band, C: gl.constexpr):
    """Set the probabilities of pairs that do not take part to 0 (eq. 12)."""
    LAYOUT: gl.constexpr = probs.type.layout
    _sq, sk, lower, upper = band
    queries = first_query + gl.arange(0, QUERIES, layout=gl.SliceLayout(0, LAYOUT))
    keys = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    start = gl.full([64], -2**31, gl.int32, layout=gl.SliceLayout(1, LAYOUT))
    if C.HAS_UPPER:
        start = keys - upper
    start = gl.where(keys < sk, start, 2**31 - 1)
    probs = gl.where(queries[None, :] >= start[:, None], probs, 0.0)
    if C.HAS_LOWER:
        probs = gl.where(queries[None, :] <= (keys - lower)[:, None], probs, 0.0)
    return probs


@gluon.jit
def sum_steps(begin, end, turn, scores, dk, dv, tiles, queries, douts, rows, target, stage, spans, band, first_part,
              key, scaling, drawn, member, leaving, OWN: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Steps ``begin`` to ``end`` of one query head: add to dk and dv, and to dQ in memory.

    target: what dQ is added to, with C.HEAD_PERSISTENT as start_of_half takes it, else as hand_over does. drawn: the
    seed's halves, the number of the group's first head, of which this is number ``member``, the threshold in the upper
    half of a word, and the positions of the first query and key that are read. leaving: with C.PERSISTENT what gives
    the keys back, and the values, and the turn of the tile's last step.
    """
    k_tiles, v_tiles, dscores_tiles = tiles
    q_tiles, q_full, q_empty = queries
    dout_tiles, dout_full, dout_empty = douts
    scale_log2, squash = scaling
    start, at_head, masked, _steps = spans
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, PAIRS)
    DTYPE: gl.constexpr = k_tiles.dtype
    NC: gl.constexpr = C.CONSUMERS
    BEGUN: gl.constexpr = 1 if C.AUGMENTED_K else 0  # products of S and dP beside those with K and V
    unmasked = start + (at_head - masked) * QUERIES
    if C.VARLEN:
        turn = optimization_barrier(turn)
    for step in range(begin, end):
        slot = turn % C.KV_STAGES
        own = OWN
        if C.PERSISTENT:  # else what all operands' places are made of stands in registers from tile to tile, and spills
            own = optimization_barrier(own)
        k = k_tiles.index(own).reshape([64, C.WIDTH])
        v = v_tiles.index(own).reshape([64, C.WIDTH])
        if C.HEAD_PERSISTENT:
            first_query = queries_to_and_fro(step, key - OWN * 64, spans, C)
        elif MASKED or C.DETERMINISTIC:
            first_query = q_block_start(step, spans, C)
        else:  # behind those at the head
            first_query = unmasked + step * QUERIES
        if not C.S_AHEAD:
            consumer_wait(q_full, turn, C.KV_STAGES)
            scores_pending = issue_pairs(k, q_tiles, rows, turn, slot, 0, C)
        if C.HAS_DROPOUT:
            seed, first_row, threshold, origin_q, origin_k = drawn
            low, high = seed
            words = dropout.draw(optimization_barrier(low), optimization_barrier(high), first_row + member,
                                 origin_q + first_query, origin_k + key)
        consumer_wait(dout_full, turn, C.OUT_STAGES)
        q = q_tiles.index(slot).reshape([QUERIES, C.WIDTH])
        dout = dout_tiles.index(turn % C.OUT_STAGES).reshape([QUERIES, C.WIDTH])
        dprobs_pending = issue_pairs(v, dout_tiles, rows, turn, turn % C.OUT_STAGES, 1, C)
        if not C.AUGMENTED_K:
            lse = rows.index(2 * slot).load(ROW)
        if not C.S_AHEAD:
            scores = warpgroup_mma_wait(1 + BEGUN, deps=(scores_pending,))
        if C.AUGMENTED_K:
            probs = gl.exp2(scores * scale_log2)
        else:
            scores = cap(scores, squash)
            probs = gl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            probs = hide_probs(probs, first_query, key, band, C)
        if C.HAS_DROPOUT:
            probs = dropout.signed(probs, words, threshold)
            left_probs = gl.convert_layout(dropout.kept_alone(probs, DTYPE), LEFT)
        else:
            left_probs = gl.convert_layout(probs.to(DTYPE), LEFT)
        if squash is not None:  # scores are tanh's; its derivative is the factor of dS
            probs = probs * (1.0 - scores * scores)
        if not C.AUGMENTED_K:
            delta = rows.index(2 * slot + 1).load(ROW)
        if C.AUGMENTED_K and not C.S_AHEAD:  # above the wait, beside dP
            probs, turn = scheduling_fence_of(probs, turn)
        dprobs = warpgroup_mma_wait(0, deps=(dprobs_pending,))
        if C.PERSISTENT:
            k_empty, v_empty, last = leaving
            if turn == last:
                mbarrier.arrive(v_empty.index(OWN), count=1)
        if C.HAS_DROPOUT:
            dscores = dropout.score_gradient(probs, dprobs, delta[None, :]).to(DTYPE)
        elif C.AUGMENTED_K:
            dscores = (probs * dprobs).to(DTYPE)
        else:
            dscores = (probs * (dprobs - delta[None, :])).to(DTYPE)
        half = turn & 1
        dscores_tiles.index(dscores_slot(half, OWN, C)).store(dscores)
        dv_pending = warpgroup_mma(left_probs, dout, dv, is_async=True)
        fence_async_shared()
        if C.HEAD_PERSISTENT:
            await_sums_before()
        named_barrier_sync(C.CONSUMERS)
        begun = None
        if C.HEAD_PERSISTENT:
            part = first_part + first_query // 32
            begun = start_of_half(target, part, first_query, key - OWN * 64, band, C)
        dq_pending = issue_dq(k_tiles, dscores_tiles, half, 0, OWN, NC, C, begun)
        if C.S_AHEAD:  # the registers of P are free before those of the next S are taken
            dv = warpgroup_mma_wait(NC, deps=(dv_pending,))
            consumer_release(dout_empty, turn, C.OUT_STAGES)
            consumer_wait(q_full, turn + 1, C.KV_STAGES)
            scores_pending = issue_pairs(k, q_tiles, rows, turn + 1, (turn + 1) % C.KV_STAGES, 0, C)
            dk_pending = warpgroup_mma(gl.convert_layout(dscores, LEFT), q, dk, is_async=True)
            dq = warpgroup_mma_wait(2 + BEGUN, deps=(dq_pending,))
        else:
            dk_pending = warpgroup_mma(gl.convert_layout(dscores, LEFT), q, dk, is_async=True)
            dv = warpgroup_mma_wait(NC + 1, deps=(dv_pending,))
            consumer_release(dout_empty, turn, C.OUT_STAGES)
            dq = warpgroup_mma_wait(1, deps=(dq_pending,))
            if C.PERSISTENT:
                if turn == last:
                    mbarrier.arrive(k_empty.index(0), count=1)
        if C.HEAD_PERSISTENT:
            keep_half(target, dq, stage, part, first_query, key - OWN * 64, band, OWN, C)
        else:
            hand_over(target, dq, stage, turn, first_part + first_query // 32, OWN, C)
        if C.S_AHEAD:
            dk, scores = warpgroup_mma_wait(0, deps=(dk_pending, scores_pending))
        else:
            dk = warpgroup_mma_wait(0, deps=(dk_pending,))
        consumer_release(q_empty, turn, C.KV_STAGES)
        turn += 1
    return turn, scores, dk, dv


@gluon.jit
def write(desc, ptr, staged, gradient, place, left, C: gl.constexpr):
    """Write 64 rows of dK or dV by way of the tile that their keys or values came in.

    ``left``: rows to the end of a packed sequence; the copy engine would write past it.
    """
    batch, head, row, column = place
    staged.reshape(gradient.shape).store(gradient.to(desc.dtype))
    fence_async_shared()
    if C.HAS_CU_SEQLENS:
        if left >= 64:
            tma_store(desc, [batch, head, row, column], staged)
        else:
            store_some(staged, ptr, desc, (batch, head, row), left, 0, C.WIDTH)
    else:
        tma_store(desc, [batch, head, row, column], staged)


@gluon.jit
def gather_tile(gathered, tile, turn, taken, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer: dK and dV of 64 keys of a tile, and its part of dQ of every step. Returns the turn behind them.

    taken: tiles before.
    """
    (targets, sums, keys, queries, douts, rows, dscores_tiles, stage, _tile_source, spot, band, heads, group, count,
     scales, draws) = gathered
    scale, scale_log2, squash = scales
    dk_desc, dv_desc, dk_ptr, dv_ptr, dq_desc, sums_ptr = targets
    if C.PERSISTENT:
        k_tiles, v_tiles, keys_full, k_empty, v_empty = keys
    else:
        k_tiles, v_tiles, keys_full = keys
    q_tiles, q_full, _q_empty = queries
    total, _sk, _lower, _upper = band  # queries of all sequences
    tile, band = key_tile_of(spot, tile, band, 4, C)
    first, head_k, batch = tile
    SUM_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.WIDTH, 16])
    dk = gl.full([64, C.WIDTH], 0.0, gl.float32, layout=SUM_LAYOUT)
    dv = gl.full([64, C.WIDTH], 0.0, gl.float32, layout=SUM_LAYOUT)
    scores = gl.full([64, QUERIES], 0.0, gl.float32, layout=PAIRS)
    spans = q_blocks_of(first, band, C)
    _start, _at_head, _masked, steps = spans
    key = first + OWN * 64
    ends = phases_of(key, spans, band, C)
    FIRST: gl.constexpr = 1 if (C.DETERMINISTIC or C.HEAD_PERSISTENT) and not C.HAS_LOWER else 0
    STOP: gl.constexpr = 3 if C.DETERMINISTIC or C.HEAD_PERSISTENT else 2
    parts, own_part = parts_of(spot, total, count, OWN, C)
    NC: gl.constexpr = C.CONSUMERS
    for i in gl.static_range(NC):
        mbarrier.wait(keys_full.index(i), taken & 1)
    if C.S_AHEAD:
        if steps > 0:
            consumer_wait(q_full, turn, C.KV_STAGES)
            k = k_tiles.index(OWN).reshape([64, C.WIDTH])
            scores = warpgroup_mma_wait(0, deps=(issue_pairs(k, q_tiles, rows, turn, turn % C.KV_STAGES, 0, C),))
    tiles = (k_tiles, v_tiles, dscores_tiles)
    drawn = ()
    if C.HAS_DROPOUT:
        seed, threshold, gain, origin_q, origin_k = draws
        first_row = sequence_at(spot, batch, C) * heads * group + head_k * group
        seed = (load_tile_metadata(seed, 0, 4), load_tile_metadata(seed, 1, 4))
        drawn = (seed, first_row, threshold.to(gl.uint32) << 16, origin_q, origin_k)
    leaving = ()
    if C.PERSISTENT:
        leaving = (k_empty, v_empty, turn + group * steps - 1)
    for member in range(group):
        if C.HEAD_PERSISTENT:
            first_part = (gl.program_id(0) * group + member) * parts + own_part
            target = (sums, sums_ptr, dq_desc, batch, head_k * group + member, scale)
        else:
            first_part = (batch * heads * group + head_k * group + member) * parts + own_part
            target = sums
        for phase in gl.static_range(FIRST, STOP):
            turn, scores, dk, dv = sum_steps(
                ends[phase], ends[phase + 1], turn, scores, dk, dv, tiles, queries, douts, rows, target, stage, spans,
                band, first_part, key, (scale_log2, squash), drawn, member, leaving, OWN, phase != 1, C)
    row, left = key_rows_of(spot, key, C)
    place = (batch, head_k, row, 0)
    if C.HAS_DROPOUT:
        dv = dv * gain
    if C.PERSISTENT:
        tma_store_wait(0)  # the last part of dQ has been read
        room_k = reinterpret(dscores_tiles, dk_desc.dtype, [NC, 1, 1, 64, C.WIDTH], dk_desc.layout).index(OWN)
        room_v = reinterpret(stage, dv_desc.dtype, [NC, 1, 1, 64, C.WIDTH], dv_desc.layout).index(OWN)
    else:
        room_k = k_tiles.index(OWN)
        room_v = v_tiles.index(OWN)
    write(dv_desc, dv_ptr, room_v, dv, place, left, C)
    named_barrier_sync(C.CONSUMERS)  # the other's dQ has read these keys, and dS
    write(dk_desc, dk_ptr, room_k, dk * scale, place, left, C)
    tma_store_wait(0)
    return turn


@gluon.jit
def gather(gathered, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: its keys of one tile, or with C.PERSISTENT of every tile that the producer publishes."""
    (_targets, _sums, _keys, _queries, _douts, _rows, _dscores_tiles, _stage, tile_source, _spot, _band, _heads, _group,
     _count, _scales, _draws) = gathered
    pad_code(C.CODE_PADDING[OWN])
    turn = 0
    taken = 0
    if C.PERSISTENT:
        next_tile, _counter, _order = tile_source
        tile = get_tile(next_tile, taken, 3)
        while tile[0] != NO_TILE:
            turn = gather_tile(gathered, tile, turn, taken, OWN, C)
            taken += 1
            tile = get_tile(next_tile, taken, 3)
    else:
        gather_tile(gathered, tile_source, turn, taken, OWN, C)


@gluon.jit(do_not_specialize=["tiles", "heads", "batches", "section", "sq", "sk", "lower", "upper", "group",
                               "count", "threshold", "origin_q", "origin_k"])
def hopper_backward_kernel(q_desc, k_desc, v_desc, dout_desc, lse_or_tails, delta_ptr, dk_desc, dv_desc, dq_desc,
                           sums, beside, dk_ptr, dv_ptr, cu_q, cu_k, seqlens_q, seqlens_k, seed_ptr,
                           tiles, heads, batches, section, sq, sk, lower, upper, group, scale, scale_log2, squash,
                           count, threshold, share, gain, origin_q, origin_k, C: gl.constexpr):
    """Compute dk and dv, and the sums for dq, which must be zero at first but where C.DETERMINISTIC; or compute dq.

    Grid: (tiles · heads of k · batches,), with C.PERSISTENT so many programs or fewer, with C.HEAD_PERSISTENT up to
    heads of k · batches. sums: (·, 256), a descriptor, or a pointer where C.DQ_FROM_REGISTERS; with C.HEAD_PERSISTENT
    room for a group's steps for each program, and dq_desc is not None. beside, a pointer, is one of three things or
    None: where C.DETERMINISTIC the counters, one for each step of a query head, zero at first; with C.HEAD_PERSISTENT
    the sums, as they lie in memory; else, with C.PERSISTENT, the counter that tiles are drawn by, zero, and left so.
    lse_or_tails: a pointer to lse, or with C.AUGMENTED_K a descriptor of the tails, which hold delta too. dk_ptr,
    dv_ptr, cu_q, cu_k: of packed sequences, else None; seqlens: or None; count: sequences whose lengths are data, or
    None. scale_log2, squash: as in softmax.cap. seed_ptr, and from threshold on: where C.HAS_DROPOUT, else None; the
    first of 2^16 draws that keeps a pair, what delta (share) and dv (gain) are multiplied by, and the positions of the
    first query and key. The sums for dq are then share times as large, and scale makes up for it in dk.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    NC: gl.constexpr = C.CONSUMERS
    k_tiles = gl.allocate_shared_memory(DTYPE, [NC, 1, 1, 64, C.WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [NC, 1, 1, 64, C.WIDTH], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(DTYPE, [C.KV_STAGES, 1, 1, QUERIES, C.WIDTH], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [C.OUT_STAGES, 1, 1, QUERIES, C.WIDTH], dout_desc.layout)
    TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, QUERIES], DTYPE)
    dscores_tiles = gl.allocate_shared_memory(DTYPE, [2 * NC, 64, QUERIES], TURNED)
    if C.AUGMENTED_K:
        rows = make_picks(), gl.allocate_shared_memory(gl.bfloat16, [C.KV_STAGES, 1, 1, QUERIES, TAIL],
                                                        lse_or_tails.layout)
    else:
        rows = gl.allocate_shared_memory(gl.float32, [2 * C.KV_STAGES, QUERIES], CONTIGUOUS)  # lse and delta in turn
    stage = dscores_tiles
    if C.DETERMINISTIC:
        stage = make_stage(sums, NC, C)
    elif not C.DQ_FROM_REGISTERS:
        stage = gl.allocate_shared_memory(gl.float32, [NC, C.WIDTH // 8, 256], sums.layout)
    SPARE: gl.constexpr = 1 if C.VARLEN else 0  # where tiles arrive that are cleared before they are full
    queries = (q_tiles, make_barriers(C.KV_STAGES + SPARE, 1 if C.AUGMENTED_K else 2), make_barriers(C.KV_STAGES, NC))
    douts = (dout_tiles, make_barriers(C.OUT_STAGES + SPARE, 1), make_barriers(C.OUT_STAGES, NC))
    order = TileGrid(tiles, heads, batches, section)
    if C.PERSISTENT:
        keys = (k_tiles, v_tiles, make_barriers(NC, 2), make_barriers(1, NC), make_barriers(NC, 1))
        numbers = gl.allocate_shared_memory(gl.int32, [2 * 3, 1], CONTIGUOUS)
        tile_source = (TileQueue(numbers, make_barriers(2, 1), make_barriers(2, NC)), beside, order)
    else:
        keys = (k_tiles, v_tiles, make_barriers(NC + SPARE * NC, 1))
        tile_source = key_tile_at(gl.program_id(0), order, C)
    fence_async_shared()
    sources = (q_desc, k_desc, v_desc, dout_desc, lse_or_tails, delta_ptr, share)
    targets = (dk_desc, dv_desc, dk_ptr, dv_ptr, dq_desc, beside)
    band = MaskBounds(sq, sk, lower, upper)
    spot = ()
    if C.VARLEN:
        spot = store_tile_metadata(locate_keys(tile_source, band, (cu_q, cu_k, seqlens_q, seqlens_k, count), C))
    seed = ()
    if C.HAS_DROPOUT:
        number = gl.load(seed_ptr)
        seed = store_tile_metadata((number.to(gl.int32), (number >> 32).to(gl.int32)))
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gathered = (targets, sums, keys, queries, douts, rows, dscores_tiles, stage, tile_source, spot, band, heads, group,
                count, (scale, scale_log2, squash), (seed, threshold, gain, origin_q, origin_k))
    loaded = (sources, keys, queries, douts, rows, tile_source, spot, band, heads, group)
    written = (sums, beside, stage, tile_source, band, heads, group)
    if C.DETERMINISTIC:
        gl.warp_specialize([(gather, (gathered, ZERO, C)), (gather, (gathered, ONE, C)), (load, (loaded, C)),
                            (add_in_order, (written, ZERO, NC, C)), (add_in_order, (written, ONE, NC, C))],
                           [4, 1, 1, 1], [240, 24, 24, 24])
    else:
        gl.warp_specialize([(gather, (gathered, ZERO, C)), (gather, (gathered, ONE, C)), (load, (loaded, C))], [4, 1],
                           [240, 24])
