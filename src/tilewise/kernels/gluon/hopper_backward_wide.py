"""dK and dV on Hopper where registers hold none of 64 keys: two warpgroups share a tile (maths.md, section 6).

Of 256 columns both are twice what a warpgroup's registers hold, beside a step. Each therefore sums some columns of
both, half of them or of 192 one 128 and the other 64. The scores are not halved. One warpgroup computes Sᵀ = K·Qᵀ and
the probabilities, and lends these to the other in float32; that one has dPᵀ = V·dOᵀ by then and makes dS of both, which
goes back in 16 bits, an operand of dK. The first one has asked for the next step's S by then. One warp loads. dQ has a
kernel of its own (hopper_dq_wide.py); the rest is hopper_backward.py's.

K, V, Q and dO come in two tiles each, one of each warpgroup's columns.
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
from tilewise.kernels.gluon.hopper_dq_sums import by_threads
from tilewise.kernels.gluon.pipeline import leave, make_barriers, meet, opaque, slots_for, wait_empty, wait_full
from tilewise.kernels.gluon.softmax import as_operand, in_pairs
from tilewise.kernels.gluon.tiles import QUERIES, key_tile_at, phases_of, queries_at, query_steps_of

PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # of a step: 64 keys by 64 queries


class Shape(NamedTuple):
    """What is fixed when this kernel, or that of hopper_backward_pieces.py, is compiled.

    HopperBackwardConfig's fields, and what of the mask there is. COLUMNS, COLUMNS_V: of q and k, and of v, in each
    piece; here what each warpgroup sums. CONSUMERS tells tiles.py how many times 64 keys stay, QUERIES how
    many stream past at once, ORDERED that dQ is added in no order, PACKED that a row's end is the tensor's.
    """

    COLUMNS: tuple[int, int]
    COLUMNS_V: tuple[int, ...]
    CONSUMERS: int
    STAGES: int
    OUT_STAGES: int
    LOWER: bool
    UPPER: bool
    ORDERED: bool = False
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
def issue_dk(dk, memory, turn, resident, OWN: gl.constexpr, C: gl.constexpr):
    """Issue a warpgroup's columns of dK += dSᵀ·Q of a turn, whose dS is in shared memory."""
    q_tiles, _q_full, _q_empty = memory[1]
    _probs_tile, _probs_full, dscores_tiles, _dscores_full = memory[4]
    q = columns_of(q_tiles, turn % C.STAGES, OWN)
    return warpgroup_mma(dscores_tiles.index(resident), q, dk, is_async=True)


@gluon.jit
def issue_dv(probs, dv, memory, turn, OWN: gl.constexpr, C: gl.constexpr):
    """Issue a warpgroup's columns of dV += Pᵀ·dO of a turn; probs: the left operand."""
    dout_tiles, _dout_full, _dout_empty = memory[2]
    return warpgroup_mma(probs, columns_of(dout_tiles, turn % C.OUT_STAGES, OWN), dv, is_async=True)


@gluon.jit
def finish_step(dv_pending, dk, memory, turn, resident, OWN: gl.constexpr, C: gl.constexpr):
    """A warpgroup's columns of dK of one step, whose dS is in shared memory; dV is under way."""
    dv = warpgroup_mma_wait(0, deps=(dv_pending,))
    leave(memory[2][2], turn, C.OUT_STAGES)
    dk = warpgroup_mma_wait(0, deps=(issue_dk(dk, memory, turn, resident, OWN, C),))
    leave(memory[1][2], turn, C.STAGES)
    return dk, dv


@gluon.jit
def lend(scores, turn, step, memory, spans, band, key, scale_log2, MASKED: gl.constexpr, C: gl.constexpr):
    """Make the probabilities of a turn, let the other warpgroup have them, and return them rounded, in pairs."""
    probs_tile, probs_full, _dscores_tiles, _dscores_full = memory[4]
    lse = memory[3].index(2 * (turn % C.STAGES)).load(gl.SliceLayout(0, PAIRS))
    probs = gl.exp2(scores * scale_log2 - lse[None, :])
    if MASKED:
        probs = hide(probs, queries_at(step, spans, C), key, band, C)
    # The other has read those before: it sent dS after that. Neither reads dS any more: dK is done.
    probs_tile.store(by_threads(probs).reshape([QUERIES // 4, 256]))
    leave(probs_full, turn, 1)
    return in_pairs(probs, memory[0][0][0].dtype)


@gluon.jit
def score_steps(begin, end, turn, held, dk, dv, memory, spans, band, key, scale_log2, MASKED: gl.constexpr,
                C: gl.constexpr):
    """Steps ``begin`` to ``end`` of one query head, by the warpgroup that makes the probabilities.

    held: those of the turn before, rounded: S of this turn is asked for beside dV of that one, ahead of its dK.
    """
    k_tiles, _v_tiles, _keys_full = memory[0]
    q_tiles, q_full, q_empty = memory[1]
    _dout_tiles, dout_full, dout_empty = memory[2]
    _probs_tile, _probs_full, _dscores_tiles, dscores_full = memory[4]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    resident = opaque(spans[0] * 0)
    for step in range(begin, end):
        wait_full(q_full, turn, C.STAGES)
        wait_full(dout_full, turn - 1, C.OUT_STAGES)
        dv_pending = issue_dv(as_operand(held, k_tiles[0].dtype, LEFT), dv, memory, turn - 1, 0, C)
        scores_pending = issue_pairs(k_tiles, q_tiles, turn % C.STAGES, resident)
        dv = warpgroup_mma_wait(len(k_tiles), deps=(dv_pending,))
        leave(dout_empty, turn - 1, C.OUT_STAGES)
        wait_full(dscores_full, turn - 1, 1)
        dk_pending = issue_dk(dk, memory, turn - 1, resident, 0, C)
        scores, dk = warpgroup_mma_wait(0, deps=(scores_pending, dk_pending))
        leave(q_empty, turn - 1, C.STAGES)
        held = lend(scores, turn, step, memory, spans, band, key, scale_log2, MASKED, C)
        turn += 1
    return turn, held, dk, dv


@gluon.jit
def gather_by_scores(turns, dk, dv, memory, spans, band, key, group, scale_log2, C: gl.constexpr):
    """The first warpgroup's columns of dK and dV, of one turn at least; it makes the probabilities."""
    k_tiles, _v_tiles, _keys_full = memory[0]
    q_tiles, q_full, _q_empty = memory[1]
    ends = phases_of(key, spans, band, C)
    wait_full(q_full, 0, C.STAGES)
    scores = warpgroup_mma_wait(0, deps=(issue_pairs(k_tiles, q_tiles, 0, opaque(spans[0] * 0)),))
    held = lend(scores, 0, 0, memory, spans, band, key, scale_log2, True, C)
    turn = spans[0] * 0 + 1
    for member in range(group):
        begin = gl.maximum(0, 1 - member)  # the first step of all is done
        turn, held, dk, dv = score_steps(begin, ends[1], turn, held, dk, dv, memory, spans, band, key, scale_log2,
                                         True, C)
        turn, held, dk, dv = score_steps(gl.maximum(begin, ends[1]), ends[2], turn, held, dk, dv, memory, spans, band,
                                         key, scale_log2, False, C)
    wait_full(memory[2][1], turns - 1, C.OUT_STAGES)
    left = as_operand(held, k_tiles[0].dtype, gl.DotOperandLayout(0, dv.type.layout, 2))
    dv_pending = issue_dv(left, dv, memory, turns - 1, 0, C)
    wait_full(memory[4][3], turns - 1, 1)
    return finish_step(dv_pending, dk, memory, turns - 1, opaque(spans[0] * 0), 0, C)


@gluon.jit
def gather_by_slopes(turns, dk, dv, memory, C: gl.constexpr):
    """The second warpgroup's columns of dK and dV; it makes dS."""
    keys, queries, douts, rows, lent = memory
    _k_tiles, v_tiles, _keys_full = keys
    _q_tiles, q_full, _q_empty = queries
    dout_tiles, dout_full, _dout_empty = douts
    probs_tile, probs_full, dscores_tiles, dscores_full = lent
    DTYPE: gl.constexpr = v_tiles[0].dtype
    for turn in range(turns):
        slot = turn % C.STAGES
        wait_full(dout_full, turn, C.OUT_STAGES)
        dprobs_pending = issue_pairs(v_tiles, dout_tiles, turn % C.OUT_STAGES, 0)
        wait_full(q_full, turn, C.STAGES)
        delta = rows.index(2 * slot + 1).load(gl.SliceLayout(0, PAIRS))
        wait_full(probs_full, turn, 1)
        probs = borrow(probs_tile)
        left_probs = gl.convert_layout(probs.to(DTYPE), gl.DotOperandLayout(0, dv.type.layout, 2))
        dv_pending = issue_dv(left_probs, dv, memory, turn, 1, C)
        dprobs = warpgroup_mma_wait(1, deps=(dprobs_pending,))
        dscores = (probs * (dprobs - delta[None, :])).to(DTYPE)
        dscores_tiles.index(0).store(dscores)
        fence_async_shared()
        leave(dscores_full, turn, 1)
        wait_full(dscores_full, turn, 1)  # of all four warps
        dk, dv = finish_step(dv_pending, dk, memory, turn, 0, 1, C)
    return dk, dv


@gluon.jit
def borrow(probs_tile):
    """Read the other warpgroup's probabilities: each thread those that its own pairs have."""
    like = by_threads(gl.full([64, QUERIES], 0.0, gl.float32, layout=PAIRS)).reshape([QUERIES // 4, 256])
    probs = probs_tile.load(like.type.layout).reshape([QUERIES // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(probs.reshape([64, QUERIES]), PAIRS, assert_trivial=True)


@gluon.jit
def gather(gathered, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: its columns of dK and dV of 64 keys."""
    targets, memory, tile, band, group, scales = gathered
    scale, scale_log2 = scales
    dk_descs, dv_descs = targets
    k_tiles, v_tiles, keys_full = memory[0]
    first, head_k, batch = tile
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.COLUMNS[OWN], 16])
    DV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.COLUMNS_V[OWN], 16])
    dk = gl.full([64, C.COLUMNS[OWN]], 0.0, gl.float32, layout=DK_LAYOUT)
    dv = gl.full([64, C.COLUMNS_V[OWN]], 0.0, gl.float32, layout=DV_LAYOUT)
    spans = query_steps_of(first, band, C)
    mbarrier.wait(keys_full.index(0), 0)
    mbarrier.wait(keys_full.index(1), 0)
    if OWN == 0:
        dk, dv = gather_by_scores(group * spans[3], dk, dv, memory, spans, band, first, group, scale_log2, C)
    else:
        dk, dv = gather_by_slopes(group * spans[3], dk, dv, memory, C)
    meet(2)  # the other has read all of these keys and values
    write(dv_descs[OWN], None, v_tiles[OWN].index(0), dv, (batch, head_k, first, OWN * C.COLUMNS_V[0]), 64, C)
    write(dk_descs[OWN], None, k_tiles[OWN].index(0), dk * scale, (batch, head_k, first, OWN * C.COLUMNS[0]), 64, C)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "heads", "batches", "section", "sq", "sk", "lower", "upper", "group"])
def hopper_backward_wide_kernel(q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, dout_desc, dout_rest, lse_ptr,
                                delta_ptr, dk_desc, dk_rest, dv_desc, dv_rest, tiles, heads, batches,
                                section, sq, sk, lower, upper, group, scale, scale_log2, C: gl.constexpr):
    """Compute dk and dv; dq has a kernel of its own (hopper_dq_wide.py).

    Grid: (tiles · heads of k · batches,). A descriptor for each warpgroup's columns, the second one None where they are
    as many.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, QUERIES], DTYPE)
    q_descs, k_descs = pair_of(q_desc, q_rest), pair_of(k_desc, k_rest)
    v_descs, dout_descs = pair_of(v_desc, v_rest), pair_of(dout_desc, dout_rest)
    k_tiles = slots_for(k_descs, 1)
    v_tiles = slots_for(v_descs, 1)
    q_tiles = slots_for(q_descs, C.STAGES)
    dout_tiles = slots_for(dout_descs, C.OUT_STAGES)
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
    targets = (pair_of(dk_desc, dk_rest), pair_of(dv_desc, dv_rest))
    gathered = (targets, (keys, queries, douts, rows, lent), tile, band, group, (scale, scale_log2))
    sources = (q_descs, k_descs, v_descs, dout_descs, lse_ptr, delta_ptr)
    loaded = (sources, keys, queries, douts, rows, tile, band, heads, group)
    gl.warp_specialize([(gather, (gathered, ZERO, C)), (gather, (gathered, ONE, C)), (load, (loaded, C))], [4, 1],
                       [240, 24])
