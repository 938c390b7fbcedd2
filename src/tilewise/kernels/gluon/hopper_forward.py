"""Forward on Hopper: one warp loads, two or three warpgroups attend 64 rows each (maths.md, section 4).

A row is a query, or where queries are few a query of one of the heads that share keys and values: Shape.PACK.

The stream of a program: tiles of queries one after another, and for each its steps over keys. What is loaded for step
j is the pair (K of step j, V of step j - 1), since a warpgroup issues S = Q·Kᵀ of step j and O += P·V of step j - 1
together, then turns S into P while the second product still runs. The stream does not stop between tiles: with the
last V of a tile comes the first K of the next one, and out is written while the next tile's first S is computed.
docs/hopper.md draws it.
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

from tilewise.kernels.gluon.compat import tma_load, tma_store, tma_store_wait
from tilewise.kernels.gluon.lengths import band_of, blank, clear, locate, rows_of, store_some, tile_size
from tilewise.kernels.gluon.pipeline import (
    hand_out,
    leave,
    leave_own,
    make_barriers,
    make_own,
    opaque,
    pass_turn,
    slots_for,
    take_tile,
    take_turn,
    wait_empty,
    wait_full,
    wait_own,
)
from tilewise.kernels.gluon.softmax import add_sink, as_operand, cap, hide, hide_by_columns, in_pairs, soften, top_of
from tilewise.kernels.gluon.tiles import hides_first_step, keys_at, masked_of, steps_of

LN2 = gl.constexpr(0.6931471805599453)
END = gl.constexpr(-1)  # in place of a first query: no more tiles


class Shape(NamedTuple):
    """What is fixed when the kernel is compiled: HopperForwardConfig's fields, and what of the mask there is.

    PACK: rows of a tile that are heads of one group at one query, a power of two; 1: rows are queries of one head.
    D, DV: the columns of q and k, and of v and out, in one or two pieces: the sides of a tile are powers of two, and a
    head is as wide as the sum of them. Each piece has buffers, descriptors and products of its own.
    OUT, OUT_SLOTS: columns of out that leave together, and how many such buffers a warpgroup has to stage them in.
    SKIPS: whether a warpgroup looks if a tile's first step hides all from its own queries, as in tiles longer than a
    step under an upper bound alone.
    LENGTHS, PACKED, SHIFTED: whether lengths are data; the sequences lie one behind the other in one batch entry; the
    diagonal runs through the last query and key of each.
    """

    PACK: int
    D: tuple[int, ...]
    DV: tuple[int, ...]
    OUT: int
    OUT_SLOTS: int
    KEYS: int
    CONSUMERS: int
    STAGES: int
    Q_STAGES: int
    PING_PONG: bool
    LOWER: bool
    UPPER: bool
    SKIPS: bool
    LENGTHS: bool
    PACKED: bool
    SHIFTED: bool
    TRY: str = ""
    DIAGONAL: bool = False


@gluon.constexpr_function
def bytes_of(rows, widths):
    """Bytes of some rows with all their pieces."""
    return 2 * rows * sum(widths)


@gluon.constexpr_function
def tries(flags, letter):
    """Whether a variant is on: see hopper_forward_config."""
    return letter in flags


@gluon.jit
def load_rows(descs, place, barrier, tiles, slot):
    """Producer: load every piece of some rows into a slot; the second begins where the first ends."""
    batch, head, row = place
    RANK: gl.constexpr = len(descs[0].block_type.shape)
    for i in gl.static_range(len(descs)):
        if RANK == 5:  # (b, hk, sq, group, d)
            at = [batch, head, row, 0, i * descs[0].block_type.shape[4]]
        else:
            at = [batch, head, row, i * descs[0].block_type.shape[3]]
        tma_load(descs[i], at, barrier, tiles[i].index(slot))


@gluon.jit
def load_pair(sources, pairs, turn, place_k, place_v, C: gl.constexpr):
    """Producer: load K and V of one turn; a place outside the tensor gives zeros and moves nothing."""
    _q_descs, k_descs, v_descs, _out_desc = sources
    k_tiles, v_tiles, full, empty, v_full, v_empty = pairs
    slot = turn % C.STAGES
    if tries(C.TRY, "N") and turn >= C.STAGES:  # ablation: what is there stays
        wait_room(empty, 0, turn, C)
        mbarrier.arrive(full.index(slot), count=1)
        if tries(C.TRY, "k"):
            wait_room(v_empty, 1, turn, C)
            mbarrier.arrive(v_full.index(slot), count=1)
    else:
        wait_room(empty, 0, turn, C)
        if tries(C.TRY, "k"):
            mbarrier.expect(full.index(slot), bytes_of(C.KEYS, C.D))
            load_rows(k_descs, place_k, full.index(slot), k_tiles, slot)
            wait_room(v_empty, 1, turn, C)
            mbarrier.expect(v_full.index(slot), bytes_of(C.KEYS, C.DV))
            load_rows(v_descs, place_v, v_full.index(slot), v_tiles, slot)
        else:
            mbarrier.expect(full.index(slot), bytes_of(C.KEYS, C.D) + bytes_of(C.KEYS, C.DV))
            load_rows(k_descs, place_k, full.index(slot), k_tiles, slot)
            load_rows(v_descs, place_v, full.index(slot), v_tiles, slot)


@gluon.jit
def wait_room(empty, RING: gl.constexpr, turn, C: gl.constexpr):
    """Producer: wait until a slot of K and V (RING 0), or of V alone (1), has been left."""
    if tries(C.TRY, "e"):
        wait_own(RING, turn, C.STAGES)
    else:
        wait_empty(empty, turn, C.STAGES)


@gluon.jit
def release(empty, RING: gl.constexpr, turn, C: gl.constexpr):
    """Consumer: leave a slot of K and V (RING 0), or of V alone (1)."""
    if tries(C.TRY, "e"):
        leave_own(RING, turn, C.STAGES)
    else:
        leave(empty, turn, C.STAGES)


@gluon.jit
def draw(counter, total):
    """Producer: take the next tile's number."""
    drawn = gl.atomic_add(counter, 1, sem="relaxed")
    if drawn == total - 1:
        gl.store(counter, 0)  # the launch's last draw leaves the counter as it was found
    return drawn + gl.num_programs(0)


@gluon.jit
def load(sources, queries, pairs, next_tile, counter, order, band, lengths, group, C: gl.constexpr):
    """Producer, one warp: fetch tile numbers, and keep the rings full."""
    q_descs, _k_descs, _v_descs, _out_desc = sources
    q_tiles, q_full, q_empty = queries
    tiles, heads, batches, _section = order
    CONSUMERS: gl.constexpr = C.CONSUMERS
    total = tiles * heads * batches
    turn = 0
    taken = 0
    number = gl.program_id(0)
    batch = number * 0
    head_k = batch
    row = batch - C.KEYS  # nowhere
    while number < total:
        tile, row_k, exists = locate(number, order, band, lengths, C)
        if exists:
            v_place = (batch, head_k, row)
            first = tile[0]
            head = tile[1]
            batch = tile[2]
            head_k = head if C.PACK > 1 else head // group
            hand_out(next_tile, taken, tile, tile_size(C))
            spans = steps_of(first, band_of(tile, band, C), C)
            row = row_k + keys_at(0, spans, C)
            load_pair(sources, pairs, turn, (batch, head_k, row), v_place, C)
            turn += 1
            row_q = rows_of(tile, band[0], C)[0]
            for i in gl.static_range(CONSUMERS):
                slot = taken % C.Q_STAGES * C.CONSUMERS + i
                mbarrier.wait(q_empty.index(slot), ((taken // C.Q_STAGES) & 1) ^ 1)
                mbarrier.expect(q_full.index(slot), bytes_of(64, C.D))
                q_place = (batch, head, row_q + first + i * (64 // C.PACK))
                load_rows(q_descs, q_place, q_full.index(slot), q_tiles, slot)
            for step in range(1, spans[3]):
                before = row
                row = row_k + keys_at(step, spans, C)
                load_pair(sources, pairs, turn, (batch, head_k, row), (batch, head_k, before), C)
                turn += 1
            taken += 1
        number = draw(counter, total)
    hand_out(next_tile, taken, (END, 0, 0), tile_size(C))
    nowhere = batch * 0 - C.KEYS
    load_pair(sources, pairs, turn, (batch, head_k, nowhere), (batch, head_k, row), C)


@gluon.constexpr_function
def held(width, flags):
    """Columns of Q that a warpgroup holds in registers."""
    return min(width, 128 if "q" in flags else 64 if "h" in flags else 0)


@gluon.jit
def hold_queries(q_tiles, q_slot, C: gl.constexpr):
    """Take the last columns of Q into registers, as far as they are to be held."""
    HELD: gl.constexpr = held(C.D[0], C.TRY)
    if HELD > 0:
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.KEYS, 16]), 2)
        q = q_tiles[0].index(q_slot).reshape([64, C.D[0]])
        return (q.slice(C.D[0] - HELD, HELD, 1).load(LAYOUT),)
    else:
        return ()


@gluon.jit
def issue_scores(q_tiles, q_slot, k_tiles, slot, q_held, C: gl.constexpr, HALF: gl.constexpr = False):
    """Begin S = Q·Kᵀ, a product a piece of the columns; HALF: of the first half of the keys."""
    KEYS: gl.constexpr = C.KEYS // 2 if HALF else C.KEYS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    s = gl.full([64, KEYS], 0.0, gl.float32, layout=S_LAYOUT)
    HELD: gl.constexpr = held(C.D[0], C.TRY)
    if HELD > 0:
        WIDTH: gl.constexpr = C.D[0]
        q = q_tiles[0].index(q_slot).reshape([64, WIDTH])
        k = k_tiles[0].index(slot).reshape([C.KEYS, WIDTH]).slice(0, KEYS, 0).permute((1, 0))
        PARTS: gl.constexpr = (WIDTH - HELD) // 64
        for i in gl.static_range(PARTS):
            s = warpgroup_mma(q.slice(64 * i, 64, 1), k.slice(64 * i, 64, 0), s, use_acc=i > 0, is_async=True)
        own = gl.convert_layout(q_held[0], gl.DotOperandLayout(0, S_LAYOUT, 2))
        s = warpgroup_mma(own, k.slice(WIDTH - HELD, HELD, 0), s, use_acc=PARTS > 0, is_async=True)
    for i in gl.static_range(1 if HELD > 0 else 0, len(C.D)):
        q = q_tiles[i].index(q_slot).reshape([64, C.D[i]])
        k = k_tiles[i].index(slot).reshape([C.KEYS, C.D[i]]).slice(0, KEYS, 0)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.constexpr_function
def _kinds(values):
    return ",".join(["=r"] * values + ["r"] * (2 * values))


@gluon.constexpr_function
def _skipping(values):
    """PTX: multiply a thread's values by factors, two of them in turn, unless those of a warp are 1."""
    moves = "".join(f"mov.b32 ${i}, ${values + i};" for i in range(values))
    factors = [2 * values + i for i in (0, 2)]
    products = "".join(f"mul.f32 ${i}, ${values + i}, ${2 * values + i};" for i in range(values))
    return (f"{{.reg .pred some, other;setp.neu.f32 some, ${factors[0]}, 0f3F800000;"
            f"setp.neu.or.f32 some, ${factors[1]}, 0f3F800000, some;vote.sync.any.pred some, some, -1;{moves}"
            f"@!some bra WHOLE_${{:uid}};{products}WHOLE_${{:uid}}:}}")


@gluon.jit
def rescale_piece(acc, factor):
    """Some columns of O times a number a row, but in warps where all of them are 1."""
    own = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))
    VALUES: gl.constexpr = acc.shape[1] // 2
    LINES: gl.constexpr = _skipping(VALUES)
    KINDS: gl.constexpr = _kinds(VALUES)
    return gl.inline_asm_elementwise(LINES, KINDS, [acc, gl.zeros_like(acc) + own[:, None]], dtype=gl.float32,
                                     is_pure=False, pack=VALUES)


@gluon.jit
def rescale_some(acc, factor):
    """Every piece of O times a number a row, but in warps where all of them are 1."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (rescale_piece(acc[i], factor),)
    return scaled


@gluon.constexpr_function
def sum_layout(keys, flags):
    """The layout of a tile's sums."""
    scores = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, 16])
    if "s" not in flags:
        return gl.SliceLayout(1, scores)
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.jit
def halves(s):
    """The first and the last keys of a step's scores."""
    HALF: gl.constexpr = s.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    low, high = s.reshape([64, 2, HALF]).permute((0, 2, 1)).split()
    return gl.convert_layout(low, LAYOUT), gl.convert_layout(high, LAYOUT)


@gluon.jit
def top_and_shift(s, row_max, scaling, HIDES: gl.constexpr, LAZY: gl.constexpr):
    """The new maximum, what it shifts exponents by, and the factor for what came before."""
    scale_log2, _squash = scaling
    new_max = top_of(s, row_max, scaling, LAZY)
    shift = new_max * scale_log2
    if HIDES:
        shift = gl.where(new_max == float("-inf"), 0.0, shift)
    return new_max, shift, gl.exp2(row_max * scale_log2 - shift)


@gluon.jit
def powers(s, shift, scaling):
    """P of some keys."""
    own = gl.convert_layout(shift, gl.SliceLayout(1, s.type.layout))
    return gl.exp2(s * scaling[0] - own[:, None])


@gluon.jit
def side_by_side(low, high, LIKE: gl.constexpr):
    """Pairs of neighbouring keys as one tensor: a matter of names, nothing moves."""
    both = gl.join(low, high).permute((0, 2, 1)).reshape([64, low.shape[1] * 2])
    return gl.convert_layout(both, LIKE)


@gluon.jit
def pairs_side_by_side(low, high, DTYPE: gl.constexpr):
    """Pairs of two quarters' P as those of a half."""
    N: gl.constexpr = low.shape[1] * 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    like = in_pairs(gl.full([64, N], 0.0, gl.float32, layout=LAYOUT), DTYPE)
    LIKE: gl.constexpr = like.type.layout
    return side_by_side(in_pairs(low, DTYPE), in_pairs(high, DTYPE), LIKE)


@gluon.jit
def pairs_of(p, DTYPE: gl.constexpr, C: gl.constexpr):
    """P of a whole step as the loops carry it."""
    if tries(C.TRY, "m"):
        low, high = halves(p)
        return (in_pairs(low, DTYPE), in_pairs(high, DTYPE))
    else:
        return in_pairs(p, DTYPE)


@gluon.jit
def hidden(s, first_row, first_key, band, C: gl.constexpr):
    """Set the scores of pairs that do not take part to -inf."""
    if tries(C.TRY, "w"):
        return hide_by_columns(s, first_row, first_key, band, C)
    else:
        return hide(s, first_row, first_key, band, C)


@gluon.jit
def widened(low, C: gl.constexpr):
    """P of a whole step from that of the first half of its keys: zeros for the others."""
    zero = low * 0
    if tries(C.TRY, "m"):
        return (low, zero)
    else:
        S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.KEYS, 16])
        both = gl.join(low, zero).permute((0, 2, 1)).reshape([64, C.KEYS // 2])
        like = in_pairs(gl.full([64, C.KEYS], 0.0, gl.float32, layout=S_LAYOUT), gl.bfloat16)
        return gl.convert_layout(both, like.type.layout)


@gluon.jit
def sum_of(p, C: gl.constexpr):
    """Sum of a row; under "s" of each thread's part of it, a number for each of the four threads that share a row."""
    if tries(C.TRY, "s"):
        total = gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), 3), 1)
    else:
        total = gl.sum(p, 1)
    return gl.convert_layout(total, sum_layout(C.KEYS, C.TRY))


@gluon.jit
def scaled_sum(row_sum, factor, p, C: gl.constexpr):
    """The sum of a row so far."""
    new = sum_of(p, C)
    if tries(C.TRY, "s"):
        own = gl.convert_layout(factor, gl.SliceLayout(1, new.type.layout))
        return row_sum * own[:, None] + new
    else:
        return row_sum * gl.convert_layout(factor, new.type.layout) + new


@gluon.jit
def stay(number):
    """Keep what follows behind what makes this number: a branch that nothing takes ends a block of ptxas's schedule.

    Else the wait for O += P·V moves up to that for S. As a sum the number is no such NaN.
    """
    return gl.inline_asm_elementwise("""{
        .reg .pred never;
        mov.b32 $0, $2;
        mov.b32 $1, $3;
        setp.eq.b32 never, $2, 0x7FC12345;
        @never nanosleep.u32 20;
    }""", "=r,=r,r,r", [number], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def add_product(probs, v, acc, C: gl.constexpr, HALF: gl.constexpr):
    """Begin O += P·V of some columns."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    KEYS: gl.constexpr = C.KEYS // 2
    if HALF:
        return warpgroup_mma(as_operand(probs, v.dtype, LAYOUT), v.slice(0, KEYS, 0), acc, is_async=True)
    elif tries(C.TRY, "m"):
        acc = warpgroup_mma(as_operand(probs[0], v.dtype, LAYOUT), v.slice(0, KEYS, 0), acc, is_async=True)
        return warpgroup_mma(as_operand(probs[1], v.dtype, LAYOUT), v.slice(KEYS, KEYS, 0), acc, is_async=True)
    else:
        return warpgroup_mma(as_operand(probs, v.dtype, LAYOUT), v, acc, is_async=True)


@gluon.jit
def issue_out(probs, v_tiles, slot, acc, C: gl.constexpr, HALF: gl.constexpr = False):
    """Begin O += P·V, a product a piece of the columns; HALF: P is that of the first half of the keys."""
    pending = ()
    for i in gl.static_range(len(C.DV)):
        v = v_tiles[i].index(slot).reshape([C.KEYS, C.DV[i]])
        pending = pending + (add_product(probs, v, acc[i], C, HALF),)
    return pending


@gluon.jit
def finish(pending, LEFT: gl.constexpr):
    """Wait until all products but the last LEFT are done, and return the results of those that were asked for."""
    if len(pending) == 1:
        return (warpgroup_mma_wait(LEFT, deps=pending),)
    else:
        return warpgroup_mma_wait(LEFT, deps=pending)


@gluon.jit
def rescale(acc, factor):
    """Every piece of O times a number a row."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        own = gl.convert_layout(factor, gl.SliceLayout(1, acc[i].type.layout))
        scaled = scaled + (acc[i] * own[:, None],)
    return scaled


@gluon.jit
def attend_step(step, turn, q_tiles, q_slot, q_held, pairs, probs, acc, row_max, row_sum, row, spans, band, scaling,
                OWN: gl.constexpr, MASKED: gl.constexpr, HALF: gl.constexpr, C: gl.constexpr):
    """S of a step, and O += P·V of the one before it; HALF: whose P is that of the first half of its keys."""
    k_tiles, v_tiles, full, empty, v_full, v_empty = pairs
    DTYPE: gl.constexpr = k_tiles[0].dtype
    LAZY: gl.constexpr = tries(C.TRY, "y")
    wait_full(full, turn, C.STAGES)
    slot = turn % C.STAGES
    take_turn(OWN, C.PING_PONG)
    s_pending = issue_scores(q_tiles, q_slot, k_tiles, slot, q_held, C)
    if tries(C.TRY, "k"):
        wait_full(v_full, turn, C.STAGES)
    acc_pending = issue_out(probs, v_tiles, slot, acc, C, HALF)
    pass_turn(OWN, C.CONSUMERS, C.PING_PONG)
    s = cap(warpgroup_mma_wait(out_products(C.DV, C.TRY, HALF), deps=(s_pending,)), scaling)
    if tries(C.TRY, "k"):
        release(empty, 0, turn, C)
    if MASKED:
        s = hidden(s, row, keys_at(step, spans, C), band, C)
    if tries(C.TRY, "X"):  # ablation: no softmax
        p = s
        factor = row_max
    elif tries(C.TRY, "m"):
        row_max, shift, factor = top_and_shift(s, row_max, scaling, MASKED, LAZY)
        low, high = halves(s)
        if tries(C.TRY, "v"):  # a quarter of the exponentials before the wait
            low, second = halves(low)
            low = powers(low, shift, scaling)
            part = stay(sum_of(low, C))
        elif tries(C.TRY, "u"):  # three quarters
            high, last = halves(high)
            low = powers(low, shift, scaling)
            high = powers(high, shift, scaling)
            part = stay(sum_of(low, C) + sum_of(high, C))
        else:
            low = powers(low, shift, scaling)
            part = stay(sum_of(low, C))
    else:
        p, row_max, factor = soften(s, row_max, scaling, MASKED, LAZY)
        row_sum = scaled_sum(row_sum, factor, p, C)
        if tries(C.TRY, "f"):
            probs = in_pairs(p, DTYPE)
        if tries(C.TRY, "l"):
            row_sum = stay(row_sum)
    acc = finish(acc_pending, 0)
    if tries(C.TRY, "k"):
        release(v_empty, 1, turn, C)
    else:
        release(empty, 0, turn, C)
    if tries(C.TRY, "z") or tries(C.TRY, "y"):
        acc = rescale_some(acc, factor)
    elif not tries(C.TRY, "X"):
        acc = rescale(acc, factor)
    if tries(C.TRY, "m"):
        if tries(C.TRY, "v"):
            second = powers(second, shift, scaling)
            high = powers(high, shift, scaling)
            row_sum = scaled_sum(row_sum, factor, high, C) + (part + sum_of(second, C))
            probs = (pairs_side_by_side(low, second, DTYPE), in_pairs(high, DTYPE))
        elif tries(C.TRY, "u"):
            last = powers(last, shift, scaling)
            row_sum = scaled_sum(row_sum, factor, last, C) + part
            probs = (in_pairs(low, DTYPE), pairs_side_by_side(high, last, DTYPE))
        else:
            high = powers(high, shift, scaling)
            row_sum = scaled_sum(row_sum, factor, high, C) + part
            probs = (in_pairs(low, DTYPE), in_pairs(high, DTYPE))
    elif not tries(C.TRY, "f"):
        probs = in_pairs(p, DTYPE)
    return probs, acc, row_max, row_sum


@gluon.jit
def attend_steps(begin, end, turn, q_tiles, q_slot, q_held, pairs, probs, acc, row_max, row_sum, row, spans, band,
                 scaling, OWN: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Steps ``begin`` to ``end`` of a tile: S of each, and O += P·V of the one before it."""
    for step in range(begin, end):
        probs, acc, row_max, row_sum = attend_step(step, turn, q_tiles, q_slot, q_held, pairs, probs, acc, row_max,
                                                   row_sum, row, spans, band, scaling, OWN, MASKED, False, C)
        turn += 1
    return turn, probs, acc, row_max, row_sum


@gluon.jit
def scores_of(q_tiles, q_slot, q_held, pairs, turn, OWN: gl.constexpr, C: gl.constexpr):
    """S of a turn whose V nobody needs: of the first step in which these queries see a key."""
    k_tiles, _v_tiles, full, empty, v_full, v_empty = pairs
    wait_full(full, turn, C.STAGES)
    take_turn(OWN, C.PING_PONG)
    pending = issue_scores(q_tiles, q_slot, k_tiles, turn % C.STAGES, q_held, C)
    pass_turn(OWN, C.CONSUMERS, C.PING_PONG)
    s = warpgroup_mma_wait(0, deps=(pending,))
    release(empty, 0, turn, C)
    if tries(C.TRY, "k"):
        wait_full(v_full, turn, C.STAGES)
        release(v_empty, 1, turn, C)
    return s


@gluon.jit
def zeros(C: gl.constexpr):
    """O before the first step."""
    acc = ()
    for i in gl.static_range(len(C.DV)):
        acc = acc + (gl.full([64, C.DV[i]], 0.0, gl.float32,
                             layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV[i], 16])),)
    return acc


@gluon.jit
def store_columns(acc, place, left, out_desc, out_ptr, out_tiles, OWN: gl.constexpr, FIRST: gl.constexpr,
                  C: gl.constexpr):
    """Write some columns of out through the warpgroup's buffers, in the order of those, halving what is too wide.

    ``left``: rows to the end of a packed sequence; the copy engine would write past it.
    """
    if acc.shape[1] > C.OUT:
        HALF: gl.constexpr = acc.shape[1] // 2
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        low, high = acc.reshape([64, 2, HALF]).permute((0, 2, 1)).split()
        store_columns(gl.convert_layout(low, LAYOUT), place, left, out_desc, out_ptr, out_tiles, OWN, FIRST, C)
        store_columns(gl.convert_layout(high, LAYOUT), place, left, out_desc, out_ptr, out_tiles, OWN, FIRST + HALF, C)
    else:
        batch, head, row = place
        out_tile = out_tiles.index(OWN * C.OUT_SLOTS + FIRST // C.OUT % C.OUT_SLOTS)
        tma_store_wait(C.OUT_SLOTS - 1)
        out_tile.reshape([64, C.OUT]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        if C.PACKED:
            if left >= 64:
                tma_store(out_desc, [batch, head, row, FIRST], out_tile)
            else:
                store_some(out_tile, out_ptr, out_desc, place, left, FIRST, C.OUT)
        elif C.PACK > 1:
            tma_store(out_desc, [batch, head, row, 0, FIRST], out_tile)
        else:
            tma_store(out_desc, [batch, head, row, FIRST], out_tile)


@gluon.jit
def write(acc, row_max, row_sum, tile, row, out_desc, out_tiles, results, sq, heads, group, scaling,
          OWN: gl.constexpr, C: gl.constexpr):
    """Write out and lse of 64 rows (eq. 6)."""
    head = tile[1]
    batch = 0 if C.PACKED else tile[2]
    out_ptr, lse_ptr, sinks_ptr, sinks_stride = results
    begin, stop, length = rows_of(tile, sq, C)
    place = (batch, head, begin + row)
    rows = gl.arange(0, 64, layout=row_sum.type.layout)
    inside = row + rows // C.PACK < stop
    line = (batch * heads + head).to(gl.int64) * sq
    if C.PACK > 1:
        inside = inside & (rows % C.PACK < group)
        line = (line * group) + (rows % C.PACK) * sq
        head = head * group + gl.minimum(rows % C.PACK, group - 1)
    top = row_max * scaling[0]
    if sinks_ptr is not None:
        top, row_sum, decay = add_sink(top, row_sum, sinks_ptr, sinks_stride, head)
    sum_or_one = gl.where(row_sum == 0.0, 1.0, row_sum)
    lse = (top + gl.log2(sum_or_one)) * LN2
    if C.LENGTHS:
        lse = gl.where(row + rows < length, lse, float("-inf"))
    gl.store(lse_ptr + line + (begin + row + rows // C.PACK), lse, mask=inside)
    share = 1.0 / sum_or_one
    if sinks_ptr is not None:
        share = share * decay
    acc = rescale(acc, share)
    if C.LENGTHS:
        acc = blank(acc, length - row)
    if C.PACKED and C.OUT_SLOTS > 1:
        if stop - row < 64:
            tma_store_wait(0)  # what goes by other ways is not counted when a buffer is used again
    for i in gl.static_range(len(C.DV)):
        store_columns(acc[i], place, stop - row, out_desc, out_ptr, out_tiles, OWN, i * C.DV[0], C)


@gluon.constexpr_function
def out_products(widths, flags, half):
    """Products that O is added to in."""
    return len(widths) * (2 if "m" in flags and not half else 1)


@gluon.constexpr_function
def products_of(widths, flags):
    """Products that S is issued in."""
    return len(widths) + (widths[0] - held(widths[0], flags)) // 64 if held(widths[0], flags) else len(widths)


@gluon.jit
def await_queries(q_full, slot, taken, first, C: gl.constexpr):
    """Wait for the queries of a tile, if there is one."""
    if first != END:
        mbarrier.wait(q_full.index(slot), (taken // C.Q_STAGES) & 1)


@gluon.jit
def attend(sources, queries, pairs, next_tile, out_tiles, results, order, band, group, scaling, OWN: gl.constexpr,
           C: gl.constexpr):
    """Consumer, one warpgroup: 64 rows of every tile."""
    _q_descs, _k_descs, _v_descs, out_desc = sources
    q_tiles, q_full, q_empty = queries
    k_tiles, v_tiles, full, empty, v_full, v_empty = pairs
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.KEYS, 16])
    DTYPE: gl.constexpr = k_tiles[0].dtype
    if OWN == C.CONSUMERS - 1:
        pass_turn(OWN, C.CONSUMERS, C.PING_PONG)  # the first warpgroup begins
    turn = 0
    taken = 0
    tile = take_tile(next_tile, taken, tile_size(C))
    if C.LENGTHS:
        await_queries(q_full, OWN, taken, tile[0], C)  # this program's tiles may all lie between the sequences
    else:
        wait_full(q_full, taken * C.CONSUMERS + OWN, C.Q_STAGES * C.CONSUMERS)
    q_held = hold_queries(q_tiles, OWN, C)
    wait_full(full, turn, C.STAGES)
    HALF: gl.constexpr = C.DIAGONAL and OWN == 0  # of a tile's first step these queries see half the keys
    s = warpgroup_mma_wait(0, deps=(issue_scores(q_tiles, OWN, k_tiles, 0, q_held, C, HALF),))
    release(empty, 0, turn, C)
    if tries(C.TRY, "k"):
        wait_full(v_full, turn, C.STAGES)
        release(v_empty, 1, turn, C)
    turn += 1
    while tile[0] != END:
        first = tile[0]
        own_band = band_of(tile, band, C)
        spans = steps_of(first, own_band, C)
        row = first + OWN * (64 // C.PACK)
        acc = zeros(C)
        nothing = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        masked = masked_of(row, spans, own_band, C)
        q_slot = taken % C.Q_STAGES * C.CONSUMERS + OWN
        begin = first * 0 + 1
        if C.SKIPS:
            if hides_first_step(keys_at(0, spans, C), spans[3], row, own_band[3], C):
                s = scores_of(q_tiles, opaque(q_slot), q_held, pairs, turn, OWN, C)
                turn += 1
                begin += 1
        s = cap(s, scaling)
        if C.DIAGONAL:
            s = hidden(s, row, keys_at(0, spans, C), own_band, C)
        elif masked >= begin:
            s = hidden(s, row, keys_at(begin - 1, spans, C), own_band, C)
        p, row_max, _factor = soften(s, gl.convert_layout(nothing, gl.SliceLayout(1, s.type.layout)), scaling, True)
        row_max = gl.convert_layout(row_max, nothing.type.layout)
        row_sum = sum_of(p, C)
        if HALF:
            low = in_pairs(p, DTYPE)
            probs = widened(low, C)
            if spans[3] > 1:
                probs, acc, row_max, row_sum = attend_step(
                    1, turn, q_tiles, opaque(q_slot), q_held, pairs, low, acc, row_max, row_sum, row, spans, own_band,
                    scaling, OWN, False, True, C)
                turn += 1
                begin += 1
        else:
            probs = pairs_of(p, DTYPE, C)
        if C.LENGTHS:
            keep = own_band[1] - keys_at(0, spans, C)
            if (keep < C.KEYS) & (begin == 1):  # the first step is the only one that may reach past the keys
                if tries(C.TRY, "k"):
                    wait_full(v_full, turn, C.STAGES)
                else:
                    wait_full(full, turn, C.STAGES)
                clear(v_tiles, opaque(turn % C.STAGES), keep, C)
        if not C.DIAGONAL:
            turn, probs, acc, row_max, row_sum = attend_steps(
                begin, masked, turn, q_tiles, opaque(q_slot), q_held, pairs, probs, acc, row_max, row_sum, row, spans,
                own_band, scaling, OWN, True, C)
        turn, probs, acc, row_max, row_sum = attend_steps(
            gl.maximum(begin, masked), spans[3], turn, q_tiles, opaque(q_slot), q_held, pairs, probs, acc, row_max,
            row_sum, row, spans, own_band, scaling, OWN, False, C)

        leave(q_empty, taken * C.CONSUMERS + OWN, C.Q_STAGES * C.CONSUMERS)
        taken += 1
        after = take_tile(next_tile, taken, tile_size(C))
        next_slot = taken % C.Q_STAGES * C.CONSUMERS + OWN
        if C.Q_STAGES > 1:
            await_queries(q_full, next_slot, taken, after[0], C)
        if tries(C.TRY, "k"):
            wait_full(v_full, turn, C.STAGES)
        else:
            wait_full(full, turn, C.STAGES)
        slot = turn % C.STAGES
        take_turn(OWN, C.PING_PONG)
        acc_pending = issue_out(probs, v_tiles, slot, acc, C)
        if C.Q_STAGES == 1:  # they are still on their way: there was no room before
            await_queries(q_full, next_slot, taken, after[0], C)
            next_slot = opaque(next_slot)  # a constant, like that of the loops
        q_held = hold_queries(q_tiles, next_slot, C)
        if tries(C.TRY, "k"):
            wait_full(full, turn, C.STAGES)
        s_pending = issue_scores(q_tiles, next_slot, k_tiles, slot, q_held, C, HALF)
        pass_turn(OWN, C.CONSUMERS, C.PING_PONG)
        acc = finish(acc_pending, products_of(C.D, C.TRY))
        if tries(C.TRY, "k"):
            release(v_empty, 1, turn, C)
        if tries(C.TRY, "s"):
            row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
        write(acc, row_max, row_sum, tile, row, out_desc, out_tiles, results, band[0], order[1], group, scaling, OWN, C)
        s = warpgroup_mma_wait(0, deps=(s_pending,))
        release(empty, 0, turn, C)
        turn += 1
        tile = after
    tma_store_wait(0)
    if OWN == 0:
        take_turn(OWN, C.PING_PONG)  # the last warpgroup has passed on a turn that nobody needs


@gluon.jit
def joined(desc, rest):
    """The descriptors of a tensor's pieces. A launcher takes none from inside a tuple, so they come one by one."""
    if rest is None:
        return (desc,)
    else:
        return (desc, rest)


@gluon.constexpr_function
def registers(consumers):
    """Registers a thread of a consumer; the rest of 65536 goes to the first one, which the compiler gives it."""
    return 240 if consumers == 2 else 160


@gluon.jit(do_not_specialize=["tiles", "heads", "batches", "section", "sq", "sk", "lower", "upper", "group",
                             "sinks_stride", "cu_q", "cu_k", "seqlens_q", "seqlens_k", "count"])
def hopper_forward_kernel(q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, out_desc, lse_ptr, counter, sinks_ptr,
                          sinks_stride, out_ptr, cu_q, cu_k, seqlens_q, seqlens_k, tiles, heads, batches, section, sq,
                          sk, lower, upper, group, count, scale_log2, squash, C: gl.constexpr):
    """Compute out and lse.

    sinks_ptr, squash: None where there are no sinks and no softcap. With one, scale_log2 is that of what tanh gives,
    and squash what the products are multiplied by before it. out_ptr: None unless sequences are packed. cu_q to
    seqlens_k, count: None but for what says where sequences lie and how many they are (tilewise.sequences).
    """
    q_descs = joined(q_desc, q_rest)
    k_descs = joined(k_desc, k_rest)
    v_descs = joined(v_desc, v_rest)
    NC: gl.constexpr = C.CONSUMERS
    q_tiles = slots_for(q_descs, C.Q_STAGES * NC)
    k_tiles = slots_for(k_descs, C.STAGES)
    v_tiles = slots_for(v_descs, C.STAGES)
    out_tiles = slots_for((out_desc,), C.OUT_SLOTS * NC)[0]
    tile_values = gl.allocate_shared_memory(gl.int32, [2 * tile_size(C), 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queries = (q_tiles, make_barriers(C.Q_STAGES * NC, 1), make_barriers(C.Q_STAGES * NC, 1))
    if tries(C.TRY, "k"):
        pairs = (k_tiles, v_tiles, make_barriers(C.STAGES, 1), make_barriers(C.STAGES, NC),
                 make_barriers(C.STAGES, 1), make_barriers(C.STAGES, NC))
    else:
        pairs = (k_tiles, v_tiles, make_barriers(C.STAGES, 1), make_barriers(C.STAGES, NC), None, None)
    if tries(C.TRY, "e"):
        make_own(C.STAGES, NC)
    next_tile = (tile_values, make_barriers(2, 1), make_barriers(2, NC))
    fence_async_shared()
    sources = (q_descs, k_descs, v_descs, out_desc)
    order = (tiles, heads, batches, section)
    band = (sq, sk, lower, upper)
    scaling = (scale_log2, squash)
    lengths = (cu_q, cu_k, seqlens_q, seqlens_k, count)
    results = (out_ptr, lse_ptr, sinks_ptr, sinks_stride)
    REGISTERS: gl.constexpr = registers(NC)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    TWO: gl.constexpr = 2
    if NC == 2:
        gl.warp_specialize([
            (attend, (sources, queries, pairs, next_tile, out_tiles, results, order, band, group, scaling, ZERO, C)),
            (attend, (sources, queries, pairs, next_tile, out_tiles, results, order, band, group, scaling, ONE, C)),
            (load, (sources, queries, pairs, next_tile, counter, order, band, lengths, group, C)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (attend, (sources, queries, pairs, next_tile, out_tiles, results, order, band, group, scaling, ZERO, C)),
            (attend, (sources, queries, pairs, next_tile, out_tiles, results, order, band, group, scaling, ONE, C)),
            (attend, (sources, queries, pairs, next_tile, out_tiles, results, order, band, group, scaling, TWO, C)),
            (load, (sources, queries, pairs, next_tile, counter, order, band, lengths, group, C)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
