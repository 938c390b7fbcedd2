"""Backward on Hopper where q and k have 129 to 192 columns and v at most 128: a tile of 128 keys stays, as with fewer.

dK and dV of 64 keys are 160 registers a thread then, and a warpgroup holds all of them, as in hopper_backward.py: what
the two must tell each other is dS alone, where heads that are wider yet (hopper_backward_wide.py) have probabilities to
lend too. The registers that are left hold S or dP, and not both: P is rounded before dP is asked for, dS is made of it,
dK takes dS from shared memory, and dQ comes when P is done with.

Sides of a tile are powers of two: the columns of q and k come in a piece of 128 and one of 64, and of each a warpgroup
makes half of dQ's. The loading warp, the descriptors' pieces and the Shape are those of hopper_backward_wide.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.compat import tma_store_wait
from tilewise.kernels.gluon.hopper_backward import PAIRS, hide_probs, write
from tilewise.kernels.gluon.hopper_backward_wide import columns_of, issue_pairs, load
from tilewise.kernels.gluon.hopper_dq_sums import add_directly
from tilewise.kernels.gluon.pipeline import (
    CONTIGUOUS,
    allocate_stages,
    consumer_release,
    consumer_wait,
    make_barriers,
    named_barrier_sync,
    optimization_barrier,
)
from tilewise.kernels.gluon.tiles import (
    QUERIES,
    MaskBounds,
    TileGrid,
    key_tile_at,
    phases_of,
    q_block_start,
    q_blocks_of,
)

_TIMES = """{
    .reg .b16 low, high;
    .reg .f32 first, second;
    mov.b32 {low, high}, $1;
    cvt.f32.KIND first, low;
    cvt.f32.KIND second, high;
    mul.f32 first, first, $2;
    mul.f32 second, second, $3;
    cvt.rn.KINDx2.f32 $0, second, first;
}"""
TIMES_BF16, TIMES_F16 = (gl.constexpr(_TIMES.replace("KIND", kind)) for kind in ("bf16", "f16"))


@gluon.jit
def times(probs, slopes, DTYPE: gl.constexpr):
    """Multiply probabilities of 16 bits by numbers of 32, to 16 bits.

    LLVM would turn the probabilities to 32 bits as soon as they are there, registers that a step does not have.
    """
    if DTYPE == gl.bfloat16:
        product = gl.inline_asm_elementwise(TIMES_BF16, "=r,r,r,r", [probs, slopes], dtype=gl.bfloat16, is_pure=False,
                                            pack=2)
    else:
        product = gl.inline_asm_elementwise(TIMES_F16, "=r,r,r,r", [probs, slopes], dtype=gl.float16, is_pure=False,
                                            pack=2)
    return product


@gluon.jit
def issue_dq(k_tiles, dscores_tiles, half, origin, OWN: gl.constexpr, PIECE: gl.constexpr, C: gl.constexpr):
    """Issue a warpgroup's half of the columns of a piece of dQ = dS·K."""
    COLUMNS: gl.constexpr = C.COLUMNS[PIECE] // 2
    dq = gl.full([64, COLUMNS], 0.0, gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
    for i in gl.static_range(2):
        k = columns_of(k_tiles, origin + i, PIECE).slice(OWN * COLUMNS, COLUMNS, 1)
        dq = warpgroup_mma(dscores_tiles.index(half + i).permute((1, 0)), k, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def finish_step(dv_pending, dk, dk_rest, memory, turn, half, origin, place, OWN: gl.constexpr, C: gl.constexpr):
    """A warpgroup's part of dQ, and dK, of one step, whose dS is in shared memory; dV is under way.

    place: where the step's sums begin.
    """
    keys, queries, douts, _rows, dscores_tiles = memory
    k_tiles, _v_tiles, _keys_full = keys
    q_tiles, _q_full, q_empty = queries
    _dout_tiles, _dout_full, dout_empty = douts
    slot = turn % C.Q_STAGES
    dv = warpgroup_mma_wait(0, deps=(dv_pending,))  # the registers of P are free before those of dQ are taken
    consumer_release(dout_empty, turn, C.DOUT_STAGES)
    dq_pending = issue_dq(k_tiles, dscores_tiles, half, origin, OWN, 0, C)
    dq_rest_pending = issue_dq(k_tiles, dscores_tiles, half, origin, OWN, 1, C)
    dscores = dscores_tiles.index(half + OWN)
    dk_pending = warpgroup_mma(dscores, columns_of(q_tiles, slot, 0), dk, is_async=True)
    dk_rest_pending = warpgroup_mma(dscores, columns_of(q_tiles, slot, 1), dk_rest, is_async=True)
    dq = warpgroup_mma_wait(4, deps=(dq_pending,))
    add_directly(place + OWN * 32 * C.COLUMNS[0], dq)
    dq_rest = warpgroup_mma_wait(2, deps=(dq_rest_pending,))
    add_directly(place + (64 * C.COLUMNS[0] + OWN * 32 * C.COLUMNS[1]), dq_rest)
    dk, dk_rest = warpgroup_mma_wait(0, deps=(dk_pending, dk_rest_pending))
    consumer_release(q_empty, turn, C.Q_STAGES)
    return dk, dk_rest, dv


@gluon.jit
def sum_steps(begin, end, turn, dk, dk_rest, dv, memory, sums_ptr, spans, band, first_sum, key, scale_log2,
              OWN: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Steps ``begin`` to ``end`` of one query head: add to dk and dv, and to dQ in memory."""
    keys, queries, douts, rows, dscores_tiles = memory
    k_tiles, v_tiles, _keys_full = keys
    q_tiles, q_full, _q_empty = queries
    dout_tiles, dout_full, _dout_empty = douts
    DTYPE: gl.constexpr = k_tiles[0].dtype
    ROW: gl.constexpr = gl.SliceLayout(0, PAIRS)
    WIDTH: gl.constexpr = C.COLUMNS[0] + C.COLUMNS[1]
    start, at_head, masked, _steps = spans
    unmasked = start + (at_head - masked) * QUERIES
    for step in range(begin, end):
        # Where tiles lie is found anew in each step: registers do not hold it.
        origin = optimization_barrier(0)
        slot, out_slot = turn % C.Q_STAGES, turn % C.DOUT_STAGES
        if MASKED:
            first_query = q_block_start(step, spans, C)
        else:  # behind those at the head
            first_query = unmasked + step * QUERIES
        consumer_wait(q_full, turn, C.Q_STAGES)
        scores_pending = issue_pairs(k_tiles, q_tiles, slot, origin + OWN)
        scores = warpgroup_mma_wait(0, deps=(scores_pending,))
        probs = gl.exp2(scores * scale_log2 - rows.index(2 * slot).load(ROW)[None, :])
        if MASKED:
            probs = hide_probs(probs, first_query, key, band, C)
        left_probs = gl.convert_layout(probs.to(DTYPE), gl.DotOperandLayout(0, dv.type.layout, 2))
        delta = gl.full([64, QUERIES], 0.0, gl.float32, layout=PAIRS) + rows.index(2 * slot + 1).load(ROW)[None, :]
        consumer_wait(dout_full, turn, C.DOUT_STAGES)
        slopes_pending = issue_pairs(v_tiles, dout_tiles, out_slot, origin + OWN, -delta)
        dv_pending = warpgroup_mma(left_probs, columns_of(dout_tiles, out_slot, 0), dv, is_async=True)
        slopes = warpgroup_mma_wait(1, deps=(slopes_pending,))
        half = (turn & 1) * 2 + origin
        dscores_tiles.index(half + OWN).store(times(gl.convert_layout(left_probs, PAIRS), slopes, DTYPE))
        fence_async_shared()
        named_barrier_sync(2)
        place = sums_ptr + (first_sum + first_query).to(gl.int64) * WIDTH
        dk, dk_rest, dv = finish_step(dv_pending, dk, dk_rest, memory, turn, half, origin, place, OWN, C)
        turn += 1
    return turn, dk, dk_rest, dv


@gluon.jit
def gather(gathered, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: dK and dV of 64 keys, and its columns of dQ of every step."""
    targets, sums_ptr, memory, tile, band, heads, group, scales = gathered
    scale, scale_log2 = scales
    dk_descs, dv_desc = targets
    keys, _queries, _douts, _rows, _dscores_tiles = memory
    k_tiles, v_tiles, keys_full = keys
    sq, _sk, _lower, _upper = band
    first, head_k, batch = tile
    FIRST: gl.constexpr = C.COLUMNS[0]
    dk = gl.full([64, C.COLUMNS[0]], 0.0, gl.float32,
                 layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.COLUMNS[0], 16]))
    dk_rest = gl.full([64, C.COLUMNS[1]], 0.0, gl.float32,
                      layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.COLUMNS[1], 16]))
    dv = gl.full([64, C.COLUMNS_V[0]], 0.0, gl.float32,
                 layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.COLUMNS_V[0], 16]))
    spans = q_blocks_of(first, band, C)
    key = first + OWN * 64
    ends = phases_of(key, spans, band, C)
    rows = (sq + (QUERIES - 1)) // QUERIES * QUERIES
    for i in gl.static_range(4):
        mbarrier.wait(keys_full.index(i), 0)
    turn = 0
    for member in range(group):
        first_sum = (batch * heads * group + head_k * group + member) * rows
        for phase in gl.static_range(2):
            turn, dk, dk_rest, dv = sum_steps(ends[phase], ends[phase + 1], turn, dk, dk_rest, dv, memory, sums_ptr,
                                              spans, band, first_sum, key, scale_log2, OWN, phase != 1, C)
    write(dv_desc, None, v_tiles[0].index(OWN), dv, (batch, head_k, key, 0), 64, C)
    named_barrier_sync(2)  # the other's dQ has read these keys
    write(dk_descs[0], None, k_tiles[0].index(OWN), dk * scale, (batch, head_k, key, 0), 64, C)
    write(dk_descs[1], None, k_tiles[1].index(OWN), dk_rest * scale, (batch, head_k, key, FIRST), 64, C)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "heads", "batches", "section", "sq", "sk", "lower", "upper", "group"])
def hopper_backward_pieces_kernel(q_desc, q_rest, k_desc, k_rest, v_desc, dout_desc, lse_ptr, delta_ptr, dk_desc,
                                  dk_rest, dv_desc, sums_ptr, tiles, heads, batches, section, sq, sk, lower, upper,
                                  group, scale, scale_log2, C: gl.constexpr):
    """Compute dk and dv, and add to the sums for dq, which must be zero at first.

    Grid: (tiles · heads of k · batches,). Descriptors of both pieces of q, k and dk.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, QUERIES], DTYPE)
    q_descs, k_descs, v_descs, dout_descs = (q_desc, q_rest), (k_desc, k_rest), (v_desc,), (dout_desc,)
    k_tiles = allocate_stages(k_descs, 2)
    v_tiles = allocate_stages(v_descs, 2)
    q_tiles = allocate_stages(q_descs, C.Q_STAGES)
    dout_tiles = allocate_stages(dout_descs, C.DOUT_STAGES)
    dscores_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, QUERIES], TURNED)
    rows = gl.allocate_shared_memory(gl.float32, [2 * C.Q_STAGES, QUERIES], CONTIGUOUS)  # lse and delta in turn
    keys = (k_tiles, v_tiles, make_barriers(4, 1))
    queries = (q_tiles, make_barriers(C.Q_STAGES, 2), make_barriers(C.Q_STAGES, 2))
    douts = (dout_tiles, make_barriers(C.DOUT_STAGES, 1), make_barriers(C.DOUT_STAGES, 2))
    fence_async_shared()
    band = MaskBounds(sq, sk, lower, upper)
    tile = key_tile_at(gl.program_id(0), TileGrid(tiles, heads, batches, section), C)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gathered = (((dk_desc, dk_rest), dv_desc), sums_ptr, (keys, queries, douts, rows, dscores_tiles), tile, band, heads,
                group, (scale, scale_log2))
    sources = (q_descs, k_descs, v_descs, dout_descs, lse_ptr, delta_ptr)
    loaded = (sources, keys, queries, douts, rows, tile, band, heads, group)
    gl.warp_specialize([(gather, (gathered, ZERO, C)), (gather, (gathered, ONE, C)), (load, (loaded, C))], [4, 1],
                       [240, 24])
