"""dK and dV on Hopper where registers hold none of 64 keys: one warpgroup makes P and dS (maths.md, section 6).

Of 256 columns both are twice what a warpgroup's registers hold, beside a step. Two warpgroups share 64 keys, therefore:
each sums some columns of both, half of them or of 192 one 128 and the other 64, and does nothing else. A third one has
the keys in registers, and computes Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, P and dS. These it lends to both in 16 bits, left
operands in shared memory, and begins the next step without waiting for their sums. Of each there is one tile: two are
slower, for the registers that places want. One warp loads. dQ has a kernel of its own (hopper_dq_wide.py); the rest is
hopper_backward.py's.

K, V, Q and dO come in two tiles each, one of each summing warpgroup's columns.
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
from tilewise.kernels.gluon.hopper_backward import hide, write
from tilewise.kernels.gluon.hopper_backward_load import ONE_WARP, fetch_rows, put_rows
from tilewise.kernels.gluon.pipeline import leave, make_barriers, opaque, slots_for, wait_empty, wait_full
from tilewise.kernels.gluon.softmax import as_operand
from tilewise.kernels.gluon.tiles import QUERIES, key_tile_at, phases_of, queries_at, query_steps_of

PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # of a step: 64 keys by 64 queries


class Shape(NamedTuple):
    """What is fixed when this kernel, or that of hopper_backward_pieces.py, is compiled.

    HopperBackwardConfig's fields, and what of the mask there is. COLUMNS, COLUMNS_V: of q and k, and of v, in each
    piece; here what each of two warpgroups sums. CONSUMERS tells tiles.py how many times 64 keys stay, ORDERED and
    ALONE that dQ is added in no order, PACKED that a row's end is the tensor's.
    """

    COLUMNS: tuple[int, int]
    COLUMNS_V: tuple[int, ...]
    CONSUMERS: int
    STAGES: int
    OUT_STAGES: int
    LOWER: bool
    UPPER: bool
    ORDERED: bool = False
    ALONE: bool = False
    PACKED: bool = False


@gluon.jit
def pair_of(desc, rest):
    """The descriptors of both pieces of a tensor: one where they are alike."""
    if rest is None:
        return (desc, desc)
    else:
        return (desc, rest)


@gluon.jit
def load_pieces(descs, tiles, slot, place, full):
    """Producer: load 64 rows, each piece of their columns into a tile of its own."""
    batch, head, row = place
    size: gl.constexpr = descs[0].block_type.nbytes
    if len(descs) == 1:
        mbarrier.expect(full, size)
    else:
        mbarrier.expect(full, size + descs[1].block_type.nbytes)
        tma_load(descs[1], [batch, head, row, descs[0].block_type.shape[3]], full, tiles[1].index(slot))
    tma_load(descs[0], [batch, head, row, 0], full, tiles[0].index(slot))


@gluon.jit
def load(loaded, C: gl.constexpr):
    """Producer, one warp: the keys and values once, then the queries of every head of the group."""
    sources, keys, queries, douts, rows, tile, band, heads, group = loaded
    q_descs, k_descs, v_descs, dout_descs, lse_ptr, delta_ptr = sources
    k_tiles, v_tiles, keys_full = keys
    q_tiles, q_full, q_empty = queries
    dout_tiles, dout_full, dout_empty = douts
    first, head_k, batch = tile
    spans = query_steps_of(first, band, C)
    NC: gl.constexpr = C.CONSUMERS
    for i in gl.static_range(NC):
        place = (batch, head_k, first + i * 64)
        load_pieces(k_descs, k_tiles, i, place, keys_full.index(2 * i))
        load_pieces(v_descs, v_tiles, i, place, keys_full.index(2 * i + 1))
    turn = 0
    for member in range(group):
        head = head_k * group + member
        line = (batch * heads * group + head).to(gl.int64) * band[0]
        for step in range(spans[3]):
            place = (batch, head, queries_at(step, spans, C))
            offsets = place[2] + gl.arange(0, QUERIES, layout=ONE_WARP)
            lse, delta = fetch_rows(lse_ptr, delta_ptr, line, offsets, offsets < band[0])
            wait_empty(q_empty, turn, C.STAGES)
            slot = turn % C.STAGES
            load_pieces(q_descs, q_tiles, slot, place, q_full.index(slot))
            put_rows(rows, slot, lse, delta)
            mbarrier.arrive(q_full.index(slot), count=1)
            wait_empty(dout_empty, turn, C.OUT_STAGES)
            slot = turn % C.OUT_STAGES
            load_pieces(dout_descs, dout_tiles, slot, place, dout_full.index(slot))
            turn += 1


@gluon.jit
def columns_of(tiles, slot, PIECE: gl.constexpr):
    """Return a piece of the columns of 64 rows."""
    return tiles[PIECE].index(slot).reshape([64, tiles[PIECE].shape[4]])


@gluon.jit
def issue_pairs(left_tiles, right_tiles, slot, resident, start=None):
    """Issue Sᵀ = K·Qᵀ, or dPᵀ = V·dOᵀ, of a slot, added to ``start``: a product for each piece of their columns.

    resident: the slot of what stays. Two loops get a number of their own each, see pipeline.opaque.
    """
    pairs = gl.full([64, QUERIES], 0.0, gl.float32, layout=PAIRS) if start is None else start
    for piece in gl.static_range(len(left_tiles)):
        right = columns_of(right_tiles, slot, piece).permute((1, 0))
        pairs = warpgroup_mma(columns_of(left_tiles, resident, piece), right, pairs,
                              use_acc=start is not None or piece > 0, is_async=True)
    return pairs


@gluon.jit
def hold(tile):
    """Take 64 rows into registers as a left operand, two neighbours in one of 32 bits."""
    values = tile.load(gl.DotOperandLayout(0, PAIRS, 2))
    even, odd = values.reshape([64, tile.shape[1] // 2, 2]).split()
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], dtype=gl.int32, is_pure=True,
                                     pack=1)


@gluon.jit
def issue_scores(held, q_tiles, slot):
    """Issue Sᵀ = K·Qᵀ of a slot: a product for each piece of their columns. held: K's."""
    scores = gl.full([64, QUERIES], 0.0, gl.float32, layout=PAIRS)
    for piece in gl.static_range(len(held)):
        left = as_operand(held[piece], q_tiles[0].dtype, gl.DotOperandLayout(0, PAIRS, 2))
        right = columns_of(q_tiles, slot, piece).permute((1, 0))
        scores = warpgroup_mma(left, right, scores, use_acc=piece > 0, is_async=True)
    return scores


@gluon.jit
def lend(pairs, lent, turn):
    """Let the other warpgroups have P or dS of a turn, rounded, when they have done with those of the turn before."""
    tile, full, empty = lent
    wait_empty(empty, turn, 1)
    tile.index(0).store(pairs.to(tile.dtype))
    fence_async_shared()
    leave(full, turn, 1)


@gluon.jit
def score_steps(begin, end, turn, held, memory, spans, band, key, scale_log2, MASKED: gl.constexpr, C: gl.constexpr):
    """Steps ``begin`` to ``end`` of one query head: P and dS. held: K's columns."""
    _k_tiles, v_tiles, _keys_full = memory[0]
    q_tiles, q_full, _q_empty = memory[1]
    dout_tiles, dout_full, _dout_empty = memory[2]
    ROW: gl.constexpr = gl.SliceLayout(0, PAIRS)
    resident = opaque(spans[0] * 0)
    for step in range(begin, end):
        slot = turn % C.STAGES
        wait_full(q_full, turn, C.STAGES)
        lse = memory[3].index(2 * slot).load(ROW)
        scores_pending = issue_scores(held, q_tiles, slot)
        wait_full(dout_full, turn, C.OUT_STAGES)
        dprobs_pending = issue_pairs(v_tiles, dout_tiles, turn % C.OUT_STAGES, resident)
        scores = warpgroup_mma_wait(len(v_tiles), deps=(scores_pending,))
        probs = gl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            probs = hide(probs, queries_at(step, spans, C), key, band, C)
        lend(probs, memory[4], turn)
        delta = memory[3].index(2 * slot + 1).load(ROW)
        dprobs = warpgroup_mma_wait(0, deps=(dprobs_pending,))
        lend(probs * (dprobs - delta[None, :]), memory[5], turn)
        turn += 1
    return turn


@gluon.jit
def score(scored, C: gl.constexpr):
    """Consumer, one warpgroup: P and dS of 64 keys and all queries that see them."""
    memory, tile, band, group, scale_log2 = scored
    k_tiles, _v_tiles, keys_full = memory[0]
    key = tile[0]
    spans = query_steps_of(key, band, C)
    ends = phases_of(key, spans, band, C)
    mbarrier.wait(keys_full.index(0), 0)
    held = ()
    for piece in gl.static_range(len(k_tiles)):
        held = held + (hold(columns_of(k_tiles, 0, piece)),)
    mbarrier.wait(keys_full.index(1), 0)
    turn = spans[0] * 0
    for _member in range(group):
        turn = score_steps(0, ends[1], turn, held, memory, spans, band, key, scale_log2, True, C)
        turn = score_steps(ends[1], ends[2], turn, held, memory, spans, band, key, scale_log2, False, C)


@gluon.jit
def gather(gathered, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: its columns of dK and dV of 64 keys, which one query sees at least."""
    targets, memory, tile, band, group, scale = gathered
    dk_descs, dv_descs = targets
    k_tiles, v_tiles, _keys_full = memory[0]
    q_tiles, q_full, q_empty = memory[1]
    dout_tiles, dout_full, dout_empty = memory[2]
    probs_tile, probs_full, probs_empty = memory[4]
    dscores_tile, dscores_full, dscores_empty = memory[5]
    first, head_k, batch = tile
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.COLUMNS[OWN], 16])
    DV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.COLUMNS_V[OWN], 16])
    dk = gl.full([64, C.COLUMNS[OWN]], 0.0, gl.float32, layout=DK_LAYOUT)
    dv = gl.full([64, C.COLUMNS_V[OWN]], 0.0, gl.float32, layout=DV_LAYOUT)
    for turn in range(group * query_steps_of(first, band, C)[3]):
        wait_full(dout_full, turn, C.OUT_STAGES)
        wait_full(probs_full, turn, 1)
        dout = columns_of(dout_tiles, turn % C.OUT_STAGES, OWN)
        dv_pending = warpgroup_mma(probs_tile.index(0), dout, dv, is_async=True)
        wait_full(q_full, turn, C.STAGES)
        wait_full(dscores_full, turn, 1)
        q = columns_of(q_tiles, turn % C.STAGES, OWN)
        dk_pending = warpgroup_mma(dscores_tile.index(0), q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=(dv_pending,))
        leave(dout_empty, turn, C.OUT_STAGES)  # dP has read it, too: dS is there
        leave(probs_empty, turn, 1)
        dk = warpgroup_mma_wait(0, deps=(dk_pending,))
        leave(q_empty, turn, C.STAGES)
        leave(dscores_empty, turn, 1)
    # The last dS is there: nothing reads keys and values any more.
    write(dv_descs[OWN], None, v_tiles[OWN].index(0), dv, (batch, head_k, first, OWN * C.COLUMNS_V[0]), 64, C)
    write(dk_descs[OWN], None, k_tiles[OWN].index(0), dk * scale, (batch, head_k, first, OWN * C.COLUMNS[0]), 64, C)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "heads", "batches", "section", "sq", "sk", "lower", "upper", "group"])
def hopper_backward_wide_kernel(q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, dout_desc, dout_rest, lse_ptr,
                                delta_ptr, dk_desc, dk_rest, dv_desc, dv_rest, tiles, heads, batches,
                                section, sq, sk, lower, upper, group, scale, scale_log2, C: gl.constexpr):
    """Compute dk and dv; dq has a kernel of its own (hopper_dq_wide.py).

    Grid: (tiles · heads of k · batches,). A descriptor for each summing warpgroup's columns, the second one None where
    they are as many.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, QUERIES], DTYPE)
    q_descs, k_descs = pair_of(q_desc, q_rest), pair_of(k_desc, k_rest)
    v_descs, dout_descs = pair_of(v_desc, v_rest), pair_of(dout_desc, dout_rest)
    k_tiles = slots_for(k_descs, 1)
    v_tiles = slots_for(v_descs, 1)
    q_tiles = slots_for(q_descs, C.STAGES)
    dout_tiles = slots_for(dout_descs, C.OUT_STAGES)
    probs_tile = gl.allocate_shared_memory(DTYPE, [1, 64, QUERIES], TURNED)
    dscores_tile = gl.allocate_shared_memory(DTYPE, [1, 64, QUERIES], TURNED)
    rows = gl.allocate_shared_memory(gl.float32, [2 * C.STAGES, QUERIES], FLAT)  # lse and delta in turn
    keys = (k_tiles, v_tiles, make_barriers(2, 1))
    queries = (q_tiles, make_barriers(C.STAGES, 2), make_barriers(C.STAGES, 2))
    douts = (dout_tiles, make_barriers(C.OUT_STAGES, 1), make_barriers(C.OUT_STAGES, 2))
    probs = (probs_tile, make_barriers(1, 1), make_barriers(1, 2))
    dscores = (dscores_tile, make_barriers(1, 1), make_barriers(1, 2))
    fence_async_shared()
    band = (sq, sk, lower, upper)
    tile = key_tile_at(gl.program_id(0), (tiles, heads, batches, section), C)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    targets = (pair_of(dk_desc, dk_rest), pair_of(dv_desc, dv_rest))
    memory = (keys, queries, douts, rows, probs, dscores)
    scored = (memory, tile, band, group, scale_log2)
    gathered = (targets, memory, tile, band, group, scale)
    sources = (q_descs, k_descs, v_descs, dout_descs, lse_ptr, delta_ptr)
    loaded = (sources, keys, queries, douts, rows, tile, band, heads, group)
    gl.warp_specialize([(score, (scored, C)), (gather, (gathered, ZERO, C)), (gather, (gathered, ONE, C)),
                        (load, (loaded, C))], [4, 4, 1], [160, 160, 24])
