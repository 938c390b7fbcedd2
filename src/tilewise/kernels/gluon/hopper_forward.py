"""Forward on Hopper: one warp loads, two or three warpgroups attend 64 queries each (maths.md, section 4).

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
from tilewise.kernels.gluon.pipeline import (
    leave,
    make_barriers,
    opaque,
    pass_turn,
    take_turn,
    wait_empty,
    wait_full,
)
from tilewise.kernels.gluon.tiles import hides_first_step, keys_at, masked_of, steps_of, tile_at

LN2 = gl.constexpr(0.6931471805599453)
ONE_THREAD: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
EVERY_THREAD: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
END = gl.constexpr(-1)  # in place of a first query: no more tiles


class Shape(NamedTuple):
    """What is fixed when the kernel is compiled: HopperForwardConfig's fields, and what of the mask there is.

    SKIPS: whether a warpgroup looks if a tile's first step hides all from its own queries, as in tiles longer than a
    step under an upper bound alone.
    """

    WIDTH: int
    KEYS: int
    CONSUMERS: int
    STAGES: int
    Q_STAGES: int
    PING_PONG: bool
    LOWER: bool
    UPPER: bool
    SKIPS: bool


@gluon.jit
def hand_out(next_tile, turn, first, head, batch):
    """Producer: tell the consumers their next tile."""
    values, full, empty = next_tile
    wait_empty(empty, turn, 2)
    slot = turn % 2
    none = gl.full([1], 0, gl.int32, layout=ONE_THREAD)
    values.index(slot * 3).store(none + first)
    values.index(slot * 3 + 1).store(none + head)
    values.index(slot * 3 + 2).store(none + batch)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def take_tile(next_tile, turn):
    """Consumer: receive the next tile."""
    values, full, empty = next_tile
    wait_full(full, turn, 2)
    slot = turn % 2
    first = gl.sum(values.index(slot * 3).load(EVERY_THREAD), 0)
    head = gl.sum(values.index(slot * 3 + 1).load(EVERY_THREAD), 0)
    batch = gl.sum(values.index(slot * 3 + 2).load(EVERY_THREAD), 0)
    leave(empty, turn, 2)
    return first, head, batch


@gluon.jit
def load_pair(sources, pairs, turn, place_k, place_v, C: gl.constexpr):
    """Producer: load K and V of one turn; a place outside the tensor gives zeros and moves nothing."""
    _q_desc, k_desc, v_desc, _out_desc = sources
    k_tiles, v_tiles, full, empty = pairs
    wait_empty(empty, turn, C.STAGES)
    slot = turn % C.STAGES
    mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    batch, head, row = place_k
    tma_load(k_desc, [batch, head, row, 0], full.index(slot), k_tiles.index(slot))
    batch, head, row = place_v
    tma_load(v_desc, [batch, head, row, 0], full.index(slot), v_tiles.index(slot))


@gluon.jit
def load(sources, queries, pairs, next_tile, counter, order, band, group, C: gl.constexpr):
    """Producer, one warp: fetch tile numbers, and keep the rings full."""
    q_desc, _k_desc, _v_desc, _out_desc = sources
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
        v_place = (batch, head_k, row)
        first, head, batch = tile_at(number, order, C)
        head_k = head // group
        hand_out(next_tile, taken, first, head, batch)
        spans = steps_of(first, band, C)
        row = keys_at(0, spans, C)
        load_pair(sources, pairs, turn, (batch, head_k, row), v_place, C)
        turn += 1
        for i in gl.static_range(CONSUMERS):
            slot = taken % C.Q_STAGES * C.CONSUMERS + i
            mbarrier.wait(q_empty.index(slot), ((taken // C.Q_STAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma_load(q_desc, [batch, head, first + i * 64, 0], q_full.index(slot), q_tiles.index(slot))
        for step in range(1, spans[3]):
            before = row
            row = keys_at(step, spans, C)
            load_pair(sources, pairs, turn, (batch, head_k, row), (batch, head_k, before), C)
            turn += 1
        taken += 1
        drawn = gl.atomic_add(counter, 1, sem="relaxed")
        if drawn == total - 1:
            gl.store(counter, 0)  # the launch's last draw leaves the counter as it was found
        number = drawn + gl.num_programs(0)
    hand_out(next_tile, taken, END, 0, 0)
    nowhere = batch * 0 - C.KEYS
    load_pair(sources, pairs, turn, (batch, head_k, nowhere), (batch, head_k, row), C)


@gluon.jit
def hide(s, first_row, first_key, band, C: gl.constexpr):
    """Set the scores of pairs that do not take part to -inf (eq. 12); rows past the last query are not looked at."""
    S_LAYOUT: gl.constexpr = s.type.layout
    _sq, sk, lower, upper = band
    rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    keys = first_key + gl.arange(0, C.KEYS, layout=gl.SliceLayout(0, S_LAYOUT))
    if C.UPPER:
        stop = gl.minimum(rows + (upper + 1), sk)
        s = gl.where(keys[None, :] < stop[:, None], s, float("-inf"))
    else:
        s = gl.where((keys < sk)[None, :], s, float("-inf"))
    if C.LOWER:
        s = gl.where(keys[None, :] >= (rows + lower)[:, None], s, float("-inf"))
    return s


@gluon.jit
def soften(s, row_max, scale_log2, HIDES: gl.constexpr):
    """One online-softmax step (eq. 4 and 7): P of this step, the new maximum, and the factor for what came before."""
    new_max = gl.maximum(row_max, gl.max(s, 1))
    shift = new_max * scale_log2
    if HIDES:  # a row that has seen nothing yet
        shift = gl.where(new_max == float("-inf"), 0.0, shift)
    probs = gl.exp2(s * scale_log2 - shift[:, None])
    return probs, new_max, gl.exp2(row_max * scale_log2 - shift)


@gluon.jit
def in_pairs(p, DTYPE: gl.constexpr):
    """Round P, and hold two neighbours in one 32-bit register: (64, KEYS / 2).

    A loop would carry 16-bit values one by one, and take them apart and put them together in every step.
    """
    even, odd = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    KIND: gl.constexpr = "bf16x2" if DTYPE == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(f"cvt.rn.{KIND}.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32,
                                     is_pure=True, pack=1)


@gluon.jit
def as_operand(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The left operand of a product from rounded pairs; costs nothing."""
    even = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.join(even, odd).reshape([pairs.shape[0], pairs.shape[1] * 2]), LAYOUT)


@gluon.jit
def attend_steps(begin, end, turn, q_tiles, q_slot, pairs, probs, acc, row_max, row_sum, row, spans, band,
                 scale_log2, OWN: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Steps ``begin`` to ``end`` of a tile: S of each, and O += P·V of the one before it."""
    k_tiles, v_tiles, full, empty = pairs
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.KEYS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    DTYPE: gl.constexpr = k_tiles.dtype
    zero = gl.full([64, C.KEYS], 0.0, gl.float32, layout=S_LAYOUT)
    q = q_tiles.index(q_slot).reshape([64, C.WIDTH])
    for step in range(begin, end):
        wait_full(full, turn, C.STAGES)
        slot = turn % C.STAGES
        take_turn(OWN, C.PING_PONG)
        k = k_tiles.index(slot).reshape([C.KEYS, C.WIDTH])
        v = v_tiles.index(slot).reshape([C.KEYS, C.WIDTH])
        s_pending = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        acc_pending = warpgroup_mma(as_operand(probs, DTYPE, P_LAYOUT), v, acc, is_async=True)
        pass_turn(OWN, C.CONSUMERS, C.PING_PONG)
        s = warpgroup_mma_wait(1, deps=(s_pending,))
        if MASKED:
            s = hide(s, row, keys_at(step, spans, C), band, C)
        p, row_max, factor = soften(s, row_max, scale_log2, MASKED)
        row_sum = row_sum * factor + gl.sum(p, 1)
        acc = warpgroup_mma_wait(0, deps=(acc_pending,))
        leave(empty, turn, C.STAGES)
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
        probs = in_pairs(p, DTYPE)
        turn += 1
    return turn, probs, acc, row_max, row_sum


@gluon.jit
def scores_of(q_tiles, q_slot, pairs, turn, OWN: gl.constexpr, C: gl.constexpr):
    """S of a turn whose V nobody needs: of the first step in which these queries see a key."""
    k_tiles, _v_tiles, full, empty = pairs
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.KEYS, 16])
    zero = gl.full([64, C.KEYS], 0.0, gl.float32, layout=S_LAYOUT)
    wait_full(full, turn, C.STAGES)
    q = q_tiles.index(q_slot).reshape([64, C.WIDTH])
    k = k_tiles.index(turn % C.STAGES).reshape([C.KEYS, C.WIDTH])
    take_turn(OWN, C.PING_PONG)
    pending = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    pass_turn(OWN, C.CONSUMERS, C.PING_PONG)
    s = warpgroup_mma_wait(0, deps=(pending,))
    leave(empty, turn, C.STAGES)
    return s


@gluon.jit
def write(acc, row_max, row_sum, row, head, batch, out_desc, out_tile, lse_ptr, sq, heads, scale_log2,
          C: gl.constexpr):
    """Write out and lse of 64 queries (eq. 6)."""
    sum_or_one = gl.where(row_sum == 0.0, 1.0, row_sum)
    rows = row + gl.arange(0, 64, layout=row_sum.type.layout)
    line = (batch * heads + head).to(gl.int64) * sq
    lse = (row_max * scale_log2 + gl.log2(sum_or_one)) * LN2
    gl.store(lse_ptr + line + rows, lse, mask=rows < sq)
    acc = acc * gl.convert_layout(1.0 / sum_or_one, gl.SliceLayout(1, acc.type.layout))[:, None]
    tma_store_wait(0)
    out_tile.reshape([64, C.WIDTH]).store(acc.to(out_desc.dtype))
    fence_async_shared()
    tma_store(out_desc, [batch, head, row, 0], out_tile)


@gluon.jit
def attend(sources, queries, pairs, next_tile, out_tiles, lse_ptr, order, band, scale_log2, OWN: gl.constexpr,
           C: gl.constexpr):
    """Consumer, one warpgroup: 64 queries of every tile."""
    _q_desc, _k_desc, _v_desc, out_desc = sources
    q_tiles, q_full, q_empty = queries
    k_tiles, v_tiles, full, empty = pairs
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    DTYPE: gl.constexpr = k_tiles.dtype
    zero = gl.full([64, C.KEYS], 0.0, gl.float32, layout=S_LAYOUT)
    if OWN == C.CONSUMERS - 1:
        pass_turn(OWN, C.CONSUMERS, C.PING_PONG)  # the first warpgroup begins
    turn = 0
    taken = 0
    first, head, batch = take_tile(next_tile, taken)
    wait_full(q_full, taken * C.CONSUMERS + OWN, C.Q_STAGES * C.CONSUMERS)
    wait_full(full, turn, C.STAGES)
    first_q = q_tiles.index(OWN).reshape([64, C.WIDTH])
    first_k = k_tiles.index(0).reshape([C.KEYS, C.WIDTH])
    s = warpgroup_mma(first_q, first_k.permute((1, 0)), zero, use_acc=False)
    leave(empty, turn, C.STAGES)
    turn += 1
    while first != END:
        spans = steps_of(first, band, C)
        row = first + OWN * 64
        acc = gl.full([64, C.WIDTH], 0.0, gl.float32, layout=O_LAYOUT)
        nothing = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        masked = masked_of(row, spans, band, C)
        q_slot = taken % C.Q_STAGES * C.CONSUMERS + OWN
        begin = first * 0 + 1
        if C.SKIPS:
            if hides_first_step(keys_at(0, spans, C), spans[3], row, band[3]):
                s = scores_of(q_tiles, opaque(q_slot), pairs, turn, OWN, C)
                turn += 1
                begin += 1
        if masked >= begin:
            s = hide(s, row, keys_at(begin - 1, spans, C), band, C)
        p, row_max, _factor = soften(s, nothing, scale_log2, True)
        row_sum = gl.sum(p, 1)
        probs = in_pairs(p, DTYPE)
        turn, probs, acc, row_max, row_sum = attend_steps(
            begin, masked, turn, q_tiles, opaque(q_slot), pairs, probs, acc, row_max, row_sum, row, spans, band,
            scale_log2, OWN, True, C)
        turn, probs, acc, row_max, row_sum = attend_steps(
            gl.maximum(begin, masked), spans[3], turn, q_tiles, opaque(q_slot), pairs, probs, acc, row_max, row_sum,
            row, spans, band, scale_log2, OWN, False, C)

        leave(q_empty, taken * C.CONSUMERS + OWN, C.Q_STAGES * C.CONSUMERS)
        taken += 1
        next_first, next_head, next_batch = take_tile(next_tile, taken)
        if next_first != END:
            slot = taken % C.Q_STAGES * C.CONSUMERS + OWN
            mbarrier.wait(q_full.index(slot), (taken // C.Q_STAGES) & 1)
        wait_full(full, turn, C.STAGES)
        slot = turn % C.STAGES
        next_q = q_tiles.index(taken % C.Q_STAGES * C.CONSUMERS + OWN).reshape([64, C.WIDTH])
        k = k_tiles.index(slot).reshape([C.KEYS, C.WIDTH])
        v = v_tiles.index(slot).reshape([C.KEYS, C.WIDTH])
        take_turn(OWN, C.PING_PONG)
        acc_pending = warpgroup_mma(as_operand(probs, DTYPE, P_LAYOUT), v, acc, is_async=True)
        s_pending = warpgroup_mma(next_q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        pass_turn(OWN, C.CONSUMERS, C.PING_PONG)
        acc = warpgroup_mma_wait(1, deps=(acc_pending,))
        write(acc, row_max, row_sum, row, head, batch, out_desc, out_tiles.index(OWN), lse_ptr, band[0], order[1],
              scale_log2, C)
        s = warpgroup_mma_wait(0, deps=(s_pending,))
        leave(empty, turn, C.STAGES)
        turn += 1
        first = next_first
        head = next_head
        batch = next_batch
    tma_store_wait(0)
    if OWN == 0:
        take_turn(OWN, C.PING_PONG)  # the last warpgroup has passed on a turn that nobody needs


@gluon.constexpr_function
def registers(consumers):
    """Registers a thread of a consumer; the rest of 65536 goes to the first one, which the compiler gives it."""
    return 240 if consumers == 2 else 160


@gluon.jit(do_not_specialize=["tiles", "heads", "batches", "section", "sq", "sk", "lower", "upper", "group"])
def hopper_forward_kernel(q_desc, k_desc, v_desc, out_desc, lse_ptr, counter, tiles, heads, batches, section, sq, sk,
                          lower, upper, group, scale_log2, C: gl.constexpr):
    """Compute out and lse."""
    DTYPE: gl.constexpr = q_desc.dtype
    NC: gl.constexpr = C.CONSUMERS
    q_tiles = gl.allocate_shared_memory(DTYPE, [C.Q_STAGES * NC, 1, 1, 64, C.WIDTH], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [C.STAGES, 1, 1, C.KEYS, C.WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [C.STAGES, 1, 1, C.KEYS, C.WIDTH], v_desc.layout)
    out_tiles = gl.allocate_shared_memory(DTYPE, [NC, 1, 1, 64, C.WIDTH], out_desc.layout)
    tile_values = gl.allocate_shared_memory(gl.int32, [6, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queries = (q_tiles, make_barriers(C.Q_STAGES * NC, 1), make_barriers(C.Q_STAGES * NC, 1))
    pairs = (k_tiles, v_tiles, make_barriers(C.STAGES, 1), make_barriers(C.STAGES, NC))
    next_tile = (tile_values, make_barriers(2, 1), make_barriers(2, NC))
    fence_async_shared()
    sources = (q_desc, k_desc, v_desc, out_desc)
    order = (tiles, heads, batches, section)
    band = (sq, sk, lower, upper)
    REGISTERS: gl.constexpr = registers(NC)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    TWO: gl.constexpr = 2
    if NC == 2:
        gl.warp_specialize([
            (attend, (sources, queries, pairs, next_tile, out_tiles, lse_ptr, order, band, scale_log2, ZERO, C)),
            (attend, (sources, queries, pairs, next_tile, out_tiles, lse_ptr, order, band, scale_log2, ONE, C)),
            (load, (sources, queries, pairs, next_tile, counter, order, band, group, C)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (attend, (sources, queries, pairs, next_tile, out_tiles, lse_ptr, order, band, scale_log2, ZERO, C)),
            (attend, (sources, queries, pairs, next_tile, out_tiles, lse_ptr, order, band, scale_log2, ONE, C)),
            (attend, (sources, queries, pairs, next_tile, out_tiles, lse_ptr, order, band, scale_log2, TWO, C)),
            (load, (sources, queries, pairs, next_tile, counter, order, band, group, C)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
