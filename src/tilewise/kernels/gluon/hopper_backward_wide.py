"""Backward on Hopper for heads of more than 128 columns: two warpgroups share a tile of 64 keys (maths.md, section 6).

dK and dV of 64 keys and 256 columns are twice what a warpgroup's registers hold. Each therefore sums half the columns
of both, and makes the same half of dQ: nothing is added twice and no sum changes hands. The scores are not halved. One
warpgroup computes Sᵀ = K·Qᵀ and the probabilities, and lends these to the other in float32; that one has dPᵀ = V·dOᵀ by
then and makes dS of both, which goes back in 16 bits, an operand of dK and dQ. Both then have four products of the same
size behind them. One warp loads. The rest is hopper_backward.py's.

K, V, Q and dO come in two tiles each, the halves of their columns.
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

from tilewise.kernels.gluon.compat import tma_load, tma_store_wait
from tilewise.kernels.gluon.hopper_backward import fetch_rows, hide, put_rows, write
from tilewise.kernels.gluon.hopper_dq_sums import by_threads, hand_over
from tilewise.kernels.gluon.pipeline import leave, make_barriers, meet, opaque, wait_empty, wait_full
from tilewise.kernels.gluon.tiles import QUERIES, key_tile_at, phases_of, queries_at, query_steps_of

PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # of a step: 64 keys by 64 queries


class Shape(NamedTuple):
    """What is fixed when the kernel is compiled: widths in the tiles, HopperBackwardConfig's fields, the mask's.

    CONSUMERS and ORDERED tell tiles.py of 64 keys and of no order; DIRECT tells hopper_dq_sums.py of no staged tiles.
    """

    WIDTH: int
    WIDTH_V: int
    STAGES: int
    OUT_STAGES: int
    LOWER: bool
    UPPER: bool
    CONSUMERS: int = 1
    DIRECT: bool = True
    ORDERED: bool = False


@gluon.jit
def load_halves(desc, tiles, first_tile, place, full):
    """Producer: load 64 rows, each half of their columns into a tile of its own."""
    batch, head, row = place
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    mbarrier.expect(full, 2 * desc.block_type.nbytes)
    for half in gl.static_range(2):
        tma_load(desc, [batch, head, row, half * COLUMNS], full, tiles.index(first_tile + half))


@gluon.jit
def load(loaded, C: gl.constexpr):
    """Producer, one warp: the keys and values once, then the queries of every head of the group."""
    sources, keys, queries, douts, rows, tile, band, heads, group = loaded
    q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr = sources
    k_tiles, v_tiles, keys_full = keys
    q_tiles, q_full, q_empty = queries
    dout_tiles, dout_full, dout_empty = douts
    first, head_k, batch = tile
    spans = query_steps_of(first, band, C)
    load_halves(k_desc, k_tiles, 0, (batch, head_k, first), keys_full.index(0))
    load_halves(v_desc, v_tiles, 0, (batch, head_k, first), keys_full.index(1))
    turn = 0
    for member in range(group):
        head = head_k * group + member
        line = (batch * heads * group + head).to(gl.int64) * band[0]
        for step in range(spans[3]):
            place = (batch, head, queries_at(step, spans, C))
            lse, delta = fetch_rows(lse_ptr, delta_ptr, place[2], line, band[0])
            wait_empty(q_empty, turn, C.STAGES)
            slot = turn % C.STAGES
            load_halves(q_desc, q_tiles, 2 * slot, place, q_full.index(slot))
            put_rows(rows, slot, lse, delta)
            mbarrier.arrive(q_full.index(slot), count=1)
            wait_empty(dout_empty, turn, C.OUT_STAGES)
            slot = turn % C.OUT_STAGES
            load_halves(dout_desc, dout_tiles, 2 * slot, place, dout_full.index(slot))
            turn += 1


@gluon.jit
def half_of(tiles, slot, HALF: gl.constexpr):
    """Return half the columns of 64 rows."""
    return tiles.index(2 * slot + HALF).reshape([64, tiles.shape[4]])


@gluon.jit
def issue_pairs(left_tiles, right_tiles, slot, resident):
    """Issue Sᵀ = K·Qᵀ, or dPᵀ = V·dOᵀ, of a slot: a product for each half of the columns, added up.

    resident: 0, the slot of what stays. Two loops get a number of their own each, see pipeline.opaque.
    """
    pairs = gl.full([64, QUERIES], 0.0, gl.float32, layout=PAIRS)
    for half in gl.static_range(2):
        right = half_of(right_tiles, slot, half).permute((1, 0))
        pairs = warpgroup_mma(half_of(left_tiles, resident, half), right, pairs, use_acc=half > 0, is_async=True)
    return pairs


@gluon.jit
def finish_step(dv_pending, dk, memory, sums, turn, part, resident, OWN: gl.constexpr, C: gl.constexpr):
    """Half the columns of dQ and dK of one step, whose dS is in shared memory; dV is under way."""
    keys, queries, douts, _rows, lent = memory
    k_tiles, _v_tiles, _keys_full = keys
    q_tiles, _q_full, q_empty = queries
    _dout_tiles, _dout_full, dout_empty = douts
    _probs_tile, _probs_full, dscores_tiles, _dscores_full = lent
    dscores = dscores_tiles.index(resident)
    dq = gl.full([64, C.WIDTH // 2], 0.0, gl.float32, layout=dk.type.layout)
    dv = warpgroup_mma_wait(0, deps=(dv_pending,))  # the registers of P are free before those of dQ are taken
    leave(dout_empty, turn, C.OUT_STAGES)
    dq_pending = warpgroup_mma(dscores.permute((1, 0)), half_of(k_tiles, resident, OWN), dq, use_acc=False, is_async=True)
    dk_pending = warpgroup_mma(dscores, half_of(q_tiles, turn % C.STAGES, OWN), dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=(dq_pending,))
    hand_over(sums, dq, sums, turn, part, OWN, C)
    dk = warpgroup_mma_wait(0, deps=(dk_pending,))
    leave(q_empty, turn, C.STAGES)
    return dk, dv


@gluon.jit
def score_steps(begin, end, turn, dk, dv, memory, sums, spans, band, first_part, key, scale_log2,
                MASKED: gl.constexpr, C: gl.constexpr):
    """Steps ``begin`` to ``end`` of one query head, by the warpgroup that makes the probabilities."""
    keys, queries, douts, rows, lent = memory
    k_tiles, _v_tiles, _keys_full = keys
    q_tiles, q_full, _q_empty = queries
    dout_tiles, dout_full, _dout_empty = douts
    probs_tile, probs_full, _dscores_tiles, dscores_full = lent
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    unmasked = spans[0] + (spans[1] - spans[2]) * QUERIES
    resident = opaque(spans[0] * 0)
    for step in range(begin, end):
        slot = turn % C.STAGES
        if MASKED:
            first_query = queries_at(step, spans, C)
        else:  # behind those at the head
            first_query = unmasked + step * QUERIES
        wait_full(q_full, turn, C.STAGES)
        scores_pending = issue_pairs(k_tiles, q_tiles, slot, resident)
        lse = rows.index(2 * slot).load(gl.SliceLayout(0, PAIRS))
        scores = warpgroup_mma_wait(0, deps=(scores_pending,))
        probs = gl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            probs = hide(probs, first_query, key, band, C)
        # The other has read those before: it sent dS after that. Neither reads dS any more: dK and dQ are done.
        probs_tile.store(by_threads(probs).reshape([QUERIES // 4, 256]))
        leave(probs_full, turn, 1)
        wait_full(dout_full, turn, C.OUT_STAGES)
        left_probs = gl.convert_layout(probs.to(k_tiles.dtype), LEFT)
        dout = half_of(dout_tiles, turn % C.OUT_STAGES, 0)
        dv_pending = warpgroup_mma(left_probs, dout, dv, is_async=True)
        wait_full(dscores_full, turn, 1)
        part = first_part + first_query // 32
        dk, dv = finish_step(dv_pending, dk, memory, sums, turn, part, resident, 0, C)
        turn += 1
    return turn, dk, dv


@gluon.jit
def slope_steps(turn, dk, dv, memory, sums, spans, first_part, C: gl.constexpr):
    """All steps of one query head, by the warpgroup that makes dS."""
    keys, queries, douts, rows, lent = memory
    _k_tiles, v_tiles, _keys_full = keys
    _q_tiles, q_full, _q_empty = queries
    dout_tiles, dout_full, _dout_empty = douts
    probs_tile, probs_full, dscores_tiles, dscores_full = lent
    DTYPE: gl.constexpr = v_tiles.dtype
    for step in range(spans[3]):
        slot = turn % C.STAGES
        part = first_part + queries_at(step, spans, C) // 32
        wait_full(dout_full, turn, C.OUT_STAGES)
        dprobs_pending = issue_pairs(v_tiles, dout_tiles, turn % C.OUT_STAGES, 0)
        wait_full(q_full, turn, C.STAGES)
        delta = rows.index(2 * slot + 1).load(gl.SliceLayout(0, PAIRS))
        wait_full(probs_full, turn, 1)
        probs = borrow(probs_tile)
        left_probs = gl.convert_layout(probs.to(DTYPE), gl.DotOperandLayout(0, dv.type.layout, 2))
        dout = half_of(dout_tiles, turn % C.OUT_STAGES, 1)
        dv_pending = warpgroup_mma(left_probs, dout, dv, is_async=True)
        dprobs = warpgroup_mma_wait(1, deps=(dprobs_pending,))
        dscores = (probs * (dprobs - delta[None, :])).to(DTYPE)
        dscores_tiles.index(0).store(dscores)
        fence_async_shared()
        leave(dscores_full, turn, 1)
        wait_full(dscores_full, turn, 1)  # of all four warps
        dk, dv = finish_step(dv_pending, dk, memory, sums, turn, part, 0, 1, C)
        turn += 1
    return turn, dk, dv


@gluon.jit
def borrow(probs_tile):
    """Read the other warpgroup's probabilities: each thread those that its own pairs have."""
    like = by_threads(gl.full([64, QUERIES], 0.0, gl.float32, layout=PAIRS)).reshape([QUERIES // 4, 256])
    probs = probs_tile.load(like.type.layout).reshape([QUERIES // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(probs.reshape([64, QUERIES]), PAIRS, assert_trivial=True)


@gluon.jit
def gather(gathered, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: half the columns of dK and dV of 64 keys, and of dQ of every step."""
    targets, sums, memory, tile, band, heads, group, scales = gathered
    scale, scale_log2 = scales
    dk_desc, dv_desc = targets
    k_tiles, v_tiles, keys_full = memory[0]
    first, head_k, batch = tile
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.WIDTH // 2, 16])
    DV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.WIDTH_V // 2, 16])
    dk = gl.full([64, C.WIDTH // 2], 0.0, gl.float32, layout=DK_LAYOUT)
    dv = gl.full([64, C.WIDTH_V // 2], 0.0, gl.float32, layout=DV_LAYOUT)
    spans = query_steps_of(first, band, C)
    ends = phases_of(first, spans, band, C)
    parts = (band[0] + (QUERIES - 1)) // QUERIES * 2
    mbarrier.wait(keys_full.index(0), 0)
    mbarrier.wait(keys_full.index(1), 0)
    turn = 0
    for member in range(group):
        first_part = (batch * heads * group + head_k * group + member) * parts + OWN
        if OWN == 0:
            turn, dk, dv = score_steps(ends[0], ends[1], turn, dk, dv, memory, sums, spans, band, first_part, first,
                                       scale_log2, True, C)
            turn, dk, dv = score_steps(ends[1], ends[2], turn, dk, dv, memory, sums, spans, band, first_part, first,
                                       scale_log2, False, C)
        else:
            turn, dk, dv = slope_steps(turn, dk, dv, memory, sums, spans, first_part, C)
    meet(2)  # the other has read all of these keys and values
    write(dv_desc, v_tiles.index(OWN), dv, (batch, head_k, first, OWN * (C.WIDTH_V // 2)))
    write(dk_desc, k_tiles.index(OWN), dk * scale, (batch, head_k, first, OWN * (C.WIDTH // 2)))
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "heads", "batches", "section", "sq", "sk", "lower", "upper", "group"])
def hopper_backward_wide_kernel(q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr, dk_desc, dv_desc, sums,
                                counters, tiles, heads, batches, section, sq, sk, lower, upper, group, scale,
                                scale_log2, C: gl.constexpr):
    """Compute dk and dv, and add to the sums for dq, which must be zero at first.

    Grid: (tiles · heads of k · batches,). Descriptors of half the columns of a head. sums: a pointer.
    counters: None, as where the other kernel adds in no order.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    D: gl.constexpr = C.WIDTH // 2
    DV: gl.constexpr = C.WIDTH_V // 2
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, QUERIES], DTYPE)
    k_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, DV], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(DTYPE, [2 * C.STAGES, 1, 1, QUERIES, D], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [2 * C.OUT_STAGES, 1, 1, QUERIES, DV], dout_desc.layout)
    probs_tile = gl.allocate_shared_memory(gl.float32, [QUERIES // 4, 256], ROWS)
    dscores_tiles = gl.allocate_shared_memory(DTYPE, [1, 64, QUERIES], TURNED)
    rows = gl.allocate_shared_memory(gl.float32, [2 * C.STAGES, QUERIES], FLAT)  # lse and delta in turn
    keys = (k_tiles, v_tiles, make_barriers(2, 1))
    queries = (q_tiles, make_barriers(C.STAGES, 2), make_barriers(C.STAGES, 2))
    douts = (dout_tiles, make_barriers(C.OUT_STAGES, 1), make_barriers(C.OUT_STAGES, 2))
    lent = (probs_tile, make_barriers(1, 1), dscores_tiles, make_barriers(1, 1))
    fence_async_shared()
    band = (sq, sk, lower, upper)
    tile = key_tile_at(gl.program_id(0), (tiles, heads, batches, section), C)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gathered = ((dk_desc, dv_desc), sums, (keys, queries, douts, rows, lent), tile, band, heads, group,
                (scale, scale_log2))
    loaded = ((q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr), keys, queries, douts, rows, tile, band, heads,
              group)
    gl.warp_specialize([(gather, (gathered, ZERO, C)), (gather, (gathered, ONE, C)), (load, (loaded, C))], [4, 1],
                       [240, 24])
