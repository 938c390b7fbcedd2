"""dK and dV on Hopper where registers hold none of 64 keys: a warpgroup for each of them (maths.md, section 6).

Of 256 columns both are twice what a warpgroup's registers hold, beside a step. Two warpgroups share 64 keys, therefore:
one makes S and P and sums dV, the other makes dP and dS and sums dK. P in 16 bits is all that one tells the other: it
and dS are left operands from the registers that they were made in, as are the first columns of keys and values. One
warp loads. dQ has a kernel of its own (hopper_dq_wide.py); the rest is hopper_backward.py's.

Sides of a tile are powers of two: K, V, Q and dO of 192 columns come in two tiles each.
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
from tilewise.kernels.gluon.hopper_backward import PAIRS, hide_probs, write
from tilewise.kernels.gluon.hopper_backward_load import fetch_rows, put_rows
from tilewise.kernels.gluon.pipeline import (
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
from tilewise.kernels.gluon.products import finish
from tilewise.kernels.gluon.softmax import as_operand, pack_pairs
from tilewise.kernels.gluon.tiles import (
    QUERIES,
    MaskBounds,
    TileGrid,
    key_tile_at,
    phases_of,
    q_block_start,
    q_blocks_of,
)

HELD = gl.constexpr(128)  # columns of keys and values in registers, of 256; more want registers that a step has not


class Shape(NamedTuple):
    """What is fixed when this kernel, or that of hopper_backward_pieces.py, is compiled.

    HopperBackwardConfig's fields, and what of the mask there is. COLUMNS, COLUMNS_V: of q and k, and of v, in each
    piece. CONSUMERS tells tiles.py how many times 64 keys stay, ORDERED and ALONE that dQ is added in no order, PACKED
    that a row's end is the tensor's.
    """

    COLUMNS: tuple[int, ...]
    COLUMNS_V: tuple[int, ...]
    CONSUMERS: int
    Q_STAGES: int
    DOUT_STAGES: int
    HAS_LOWER: bool
    HAS_UPPER: bool
    DETERMINISTIC: bool = False
    HEAD_PERSISTENT: bool = False
    HAS_CU_SEQLENS: bool = False


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
    sq, _sk, _lower, _upper = band
    spans = q_blocks_of(first, band, C)
    _start, _at_head, _masked, steps = spans
    NC: gl.constexpr = C.CONSUMERS
    for i in gl.static_range(NC):
        place = (batch, head_k, first + i * 64)
        load_pieces(k_descs, k_tiles, i, place, keys_full.index(2 * i))
        load_pieces(v_descs, v_tiles, i, place, keys_full.index(2 * i + 1))
    turn = 0
    for member in range(group):
        head = head_k * group + member
        line = (batch * heads * group + head).to(gl.int64) * sq
        for step in range(steps):
            query = q_block_start(step, spans, C)
            place = (batch, head, query)
            offsets = query + gl.arange(0, QUERIES, layout=ONE_WARP)
            lse, delta = fetch_rows(lse_ptr, delta_ptr, line, offsets, offsets < sq)
            producer_acquire(q_empty, turn, C.Q_STAGES)
            slot = turn % C.Q_STAGES
            load_pieces(q_descs, q_tiles, slot, place, q_full.index(slot))
            put_rows(rows, slot, lse, delta)
            mbarrier.arrive(q_full.index(slot), count=1)
            producer_acquire(dout_empty, turn, C.DOUT_STAGES)
            slot = turn % C.DOUT_STAGES
            load_pieces(dout_descs, dout_tiles, slot, place, dout_full.index(slot))
            turn += 1


@gluon.jit
def columns_of(tiles, slot, PIECE: gl.constexpr):
    """Return a piece of the columns of 64 rows."""
    return tiles[PIECE].index(slot).reshape([64, tiles[PIECE].shape[4]])


@gluon.jit
def issue_piece(left, right, pairs, ADDS: gl.constexpr, BEGIN: gl.constexpr):
    """Issue the product of the columns of a piece from ``BEGIN`` on, if there are any."""
    REST: gl.constexpr = left.shape[1] - BEGIN
    if BEGIN > 0 and REST > 0:
        left = left.slice(BEGIN, REST, 1)
        right = right.slice(BEGIN, REST, 1)
    if REST > 0:
        pairs = warpgroup_mma(left, right.permute((1, 0)), pairs, use_acc=ADDS, is_async=True)
    return pairs


@gluon.jit
def issue_pairs(left_tiles, right_tiles, slot, resident, start=None, held=None):
    """Issue Sᵀ = K·Qᵀ, or dPᵀ = V·dOᵀ, of a slot, added to ``start``: a product for each piece of their columns.

    resident: the slot of what stays. Two loops get a number of their own each, see pipeline.opaque. held: its first
    columns, which are a product of their own then.
    """
    pairs = gl.full([64, QUERIES], 0.0, gl.float32, layout=PAIRS) if start is None else start
    WIDTH: gl.constexpr = left_tiles[0].shape[4]
    BEGIN: gl.constexpr = 0 if held is None else (HELD if HELD < WIDTH else WIDTH)
    if held is not None:
        left = as_operand(held, right_tiles[0].dtype, gl.DotOperandLayout(0, PAIRS, 2))
        right = columns_of(right_tiles, slot, 0).slice(0, BEGIN, 1)
        pairs = warpgroup_mma(left, right.permute((1, 0)), pairs, use_acc=start is not None, is_async=True)
    for piece in gl.static_range(len(left_tiles)):
        pairs = issue_piece(columns_of(left_tiles, resident, piece), columns_of(right_tiles, slot, piece), pairs,
                            start is not None or held is not None or piece > 0, BEGIN if piece == 0 else 0)
    return pairs


@gluon.jit
def hold(tile):
    """Take rows into registers as a left operand, two neighbours in one of 32 bits."""
    values = tile.load(gl.DotOperandLayout(0, PAIRS, 2))
    even, odd = values.reshape([64, tile.shape[1] // 2, 2]).split()
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], dtype=gl.int32, is_pure=True,
                                     pack=1)


@gluon.jit
def hold_first(tiles):
    """Take the first columns of the rows that stay into registers."""
    WIDTH: gl.constexpr = tiles[0].shape[4]
    return hold(columns_of(tiles, 0, 0).slice(0, HELD if HELD < WIDTH else WIDTH, 1))


@gluon.jit
def begin_sum(desc):
    """Sums of one piece of the columns of 64 rows."""
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    return gl.full([64, COLUMNS], 0.0, gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))


@gluon.jit
def begin_sums(descs):
    """Sums of all columns of 64 rows, for each piece that is written."""
    sums = ()
    for piece in gl.static_range(len(descs)):
        sums = sums + (begin_sum(descs[piece]),)
    return sums


@gluon.jit
def issue_sums(sums, pairs, right_tiles, slot):
    """Issue what is added to the sums of a slot: Pᵀ·dO, dSᵀ·Q or dS·K. pairs: P or dS, rounded."""
    pending = ()
    for piece in gl.static_range(len(sums)):
        left = as_operand(pairs, right_tiles[0].dtype, gl.DotOperandLayout(0, sums[piece].type.layout, 2))
        pending = pending + (warpgroup_mma(left, columns_of(right_tiles, slot, piece), sums[piece], is_async=True),)
    return pending


@gluon.jit
def write_sums(descs, tiles, slot, sums, factor, place, C: gl.constexpr):
    """Write the sums of 64 rows, times a factor, by way of the tiles that these rows came in."""
    batch, head, row = place
    column = 0
    for piece in gl.static_range(len(sums)):
        write(descs[piece], None, tiles[piece].index(slot), sums[piece] * factor, (batch, head, row, column), 64, C)
        column += sums[piece].shape[1]
    tma_store_wait(0)


@gluon.jit
def sum_dv(summed, C: gl.constexpr):
    """Consumer, one warpgroup: P of 64 keys and all queries that see them, of which there is one at least, and dV."""
    descs, memory, tile, band, group, scale_log2 = summed
    keys, queries, douts, rows, lent = memory
    k_tiles, v_tiles, keys_full = keys
    q_tiles, q_full, q_empty = queries
    dout_tiles, dout_full, dout_empty = douts
    probs_tile, probs_full, probs_empty = lent
    key, head_k, batch = tile
    DTYPE: gl.constexpr = probs_tile.dtype
    spans = q_blocks_of(key, band, C)
    _start, _at_head, _masked, steps = spans
    _begin, masked, _end = phases_of(key, spans, band, C)
    turns = group * steps
    mbarrier.wait(keys_full.index(0), 0)
    held = hold_first(k_tiles)
    dv = begin_sums(descs)
    step = 0
    for turn in range(turns):
        slot = turn % C.Q_STAGES
        consumer_wait(q_full, turn, C.Q_STAGES)
        scores_pending = issue_pairs(k_tiles, q_tiles, slot, optimization_barrier(0), held=held)
        lse = rows.index(2 * slot).load(gl.SliceLayout(0, PAIRS))
        scores = warpgroup_mma_wait(0, deps=(scores_pending,))
        probs = gl.exp2(scores * scale_log2 - lse[None, :])
        if step < masked:
            probs = hide_probs(probs, q_block_start(step, spans, C), key, band, C)
        step = gl.where(step + 1 == steps, 0, step + 1)
        pairs = pack_pairs(probs, DTYPE)
        consumer_wait(dout_full, turn, C.DOUT_STAGES)
        pending = issue_sums(dv, pairs, dout_tiles, turn % C.DOUT_STAGES)
        producer_acquire(probs_empty, turn, 1)
        probs_tile.index(0).store(gl.convert_layout(as_operand(pairs, DTYPE, gl.DotOperandLayout(0, PAIRS, 2)), PAIRS))
        consumer_release(probs_full, turn, 1)
        consumer_release(q_empty, turn, C.Q_STAGES)
        dv = finish(pending, 0)
        consumer_release(dout_empty, turn, C.DOUT_STAGES)
    producer_acquire(dout_empty, turns - 1 + C.DOUT_STAGES, C.DOUT_STAGES)  # behind the last dP nothing reads V
    write_sums(descs, v_tiles, 0, dv, 1.0, (batch, head_k, key), C)


@gluon.jit
def sum_dk(summed, C: gl.constexpr):
    """Consumer, one warpgroup: dS of the same, and dK."""
    descs, memory, tile, band, group, scale = summed
    keys, queries, douts, rows, lent = memory
    k_tiles, v_tiles, keys_full = keys
    q_tiles, q_full, q_empty = queries
    dout_tiles, dout_full, dout_empty = douts
    probs_tile, probs_full, probs_empty = lent
    key, head_k, batch = tile
    DTYPE: gl.constexpr = probs_tile.dtype
    mbarrier.wait(keys_full.index(1), 0)
    held = hold_first(v_tiles)
    dk = begin_sums(descs)
    _start, _at_head, _masked, steps = q_blocks_of(key, band, C)
    for turn in range(group * steps):
        slot = turn % C.Q_STAGES
        consumer_wait(q_full, turn, C.Q_STAGES)
        delta = rows.index(2 * slot + 1).load(gl.SliceLayout(0, PAIRS))
        start = gl.full([64, QUERIES], 0.0, gl.float32, layout=PAIRS) - delta[None, :]
        consumer_wait(dout_full, turn, C.DOUT_STAGES)
        slopes_pending = issue_pairs(v_tiles, dout_tiles, turn % C.DOUT_STAGES, optimization_barrier(0), start, held)
        slopes = warpgroup_mma_wait(0, deps=(slopes_pending,))
        consumer_wait(probs_full, turn, 1)
        pairs = hold(probs_tile.index(0))
        probs = gl.convert_layout(as_operand(pairs, DTYPE, gl.DotOperandLayout(0, PAIRS, 2)), PAIRS)
        pending = issue_sums(dk, pack_pairs(probs.to(gl.float32) * slopes, DTYPE), q_tiles, slot)
        consumer_release(dout_empty, turn, C.DOUT_STAGES)
        consumer_release(probs_empty, turn, 1)
        dk = finish(pending, 0)
        consumer_release(q_empty, turn, C.Q_STAGES)
    # The last P is there: nothing reads keys any more.
    write_sums(descs, k_tiles, 0, dk, scale, (batch, head_k, key), C)


@gluon.jit(do_not_specialize=["tiles", "heads", "batches", "section", "sq", "sk", "lower", "upper", "group"])
def hopper_backward_wide_kernel(q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, dout_desc, dout_rest, lse_ptr,
                                delta_ptr, dk_desc, dk_rest, dv_desc, dv_rest, tiles, heads, batches,
                                section, sq, sk, lower, upper, group, scale, scale_log2, C: gl.constexpr):
    """Compute dk and dv; dq has a kernel of its own (hopper_dq_wide.py).

    Grid: (tiles · heads of k · batches,). A descriptor for each piece of columns, the second one None where there is
    one piece.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, QUERIES], DTYPE)
    q_descs, k_descs = as_tuple(q_desc, q_rest), as_tuple(k_desc, k_rest)
    v_descs, dout_descs = as_tuple(v_desc, v_rest), as_tuple(dout_desc, dout_rest)
    k_tiles = allocate_stages(k_descs, 1)
    v_tiles = allocate_stages(v_descs, 1)
    q_tiles = allocate_stages(q_descs, C.Q_STAGES)
    dout_tiles = allocate_stages(dout_descs, C.DOUT_STAGES)
    probs_tile = gl.allocate_shared_memory(DTYPE, [1, 64, QUERIES], TURNED)
    rows = gl.allocate_shared_memory(gl.float32, [2 * C.Q_STAGES, QUERIES], CONTIGUOUS)  # lse and delta in turn
    keys = (k_tiles, v_tiles, make_barriers(2, 1))
    queries = (q_tiles, make_barriers(C.Q_STAGES, 2), make_barriers(C.Q_STAGES, 2))
    douts = (dout_tiles, make_barriers(C.DOUT_STAGES, 1), make_barriers(C.DOUT_STAGES, 2))
    lent = (probs_tile, make_barriers(1, 1), make_barriers(1, 1))
    fence_async_shared()
    band = MaskBounds(sq, sk, lower, upper)
    tile = key_tile_at(gl.program_id(0), TileGrid(tiles, heads, batches, section), C)
    memory = (keys, queries, douts, rows, lent)
    of_v = (as_tuple(dv_desc, dv_rest), memory, tile, band, group, scale_log2)
    of_k = (as_tuple(dk_desc, dk_rest), memory, tile, band, group, scale)
    sources = (q_descs, k_descs, v_descs, dout_descs, lse_ptr, delta_ptr)
    loaded = (sources, keys, queries, douts, rows, tile, band, heads, group)
    gl.warp_specialize([(sum_dv, (of_v, C)), (sum_dk, (of_k, C)), (load, (loaded, C))], [4, 1], [240, 24])
