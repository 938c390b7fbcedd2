"""Forward on Hopper: one warp loads, one to three warpgroups attend 64 rows each (maths.md, section 4).

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
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.compat import COPIES_LEFT_OPERANDS, tma_store_wait
from tilewise.kernels.gluon.cuts import own_steps_of
from tilewise.kernels.gluon.hopper_forward_load import load
from tilewise.kernels.gluon.lengths import band_of, clear, comes_again, tile_size
from tilewise.kernels.gluon.pipeline import (
    END,
    FOUR_WARPS,
    IN_ORDER,
    JUDGED,
    joined,
    leave,
    leave_products,
    leave_tile,
    make_barriers,
    opaque,
    pass_turn,
    read_tile,
    slots_for,
    stay,
    take_tile,
    take_turn,
    wait_full,
)
from tilewise.kernels.gluon.products import finish, hold_queries, issue_out, issue_scores, products_of, rescale, zeros
from tilewise.kernels.gluon.results import record_of, write
from tilewise.kernels.gluon.softmax import (
    are_bad,
    cap,
    halves,
    hide,
    in_pairs,
    in_parts,
    new_shift_of,
    no_peak,
    peak_of,
    powers,
    rounding_of,
    scaled_sum,
    sum_of,
    top_of,
)
from tilewise.kernels.gluon.tiles import early_of, hides_first_step, keys_of, masked_of


class Shape(NamedTuple):
    """What is fixed when the kernel is compiled: HopperForwardConfig's fields, and what of the mask there is.

    PACK: rows of a tile that are heads of one group at one query, a power of two; 1: rows are queries of one head.
    D, DV: the columns of q and k, and of v and out, in one or two pieces: the sides of a tile are powers of two, and a
    head is as wide as the sum of them. Each piece has buffers, descriptors and products of its own.
    OUT, OUT_SLOTS: columns of out that leave together, and how many such buffers a warpgroup has to stage them in.
    FROM_END: whether tiles are counted from the last queries back, as those of three warpgroups under an upper bound
    alone, where lengths are no data and rows are queries (tiles.tile_at).
    RESTS: whether a warpgroup looks if a tile has a query for it, and lets the others have the tensor cores if not.
    SKIPS: whether a warpgroup looks if a tile's first step hides all from its own queries, as in tiles longer than a
    step under an upper bound alone.
    PARTS: parts of a step's keys; with two, the wait for O += P·V lies between the exponentials of the first and those
    of the second.
    DIAGONAL: whether each tile's first step has the diagonal from its first query and key on: the first warpgroup then
    needs half of its keys, and no other step has a mask. Of two warpgroups, steps as long as tiles, one upper bound.
    HELD: how many of q's last columns a warpgroup holds in registers: steps read only the others from shared memory.
    STEADY: whether steps without a mask, behind a tile's first one, take the maximum of a row as it is. A tile in which
    that overflows comes again, and then they do not (hopper_forward_load.py).
    EARLY: whether the step of the first keys comes behind those that need a mask, and does not either. Attention's
    sinks lie there, far above other keys for a shift that is steady in float16.
    CHAINS: chains of comparisons in which a thread looks for the maximum of what it has of a row: 1, 2 or 4.
    CUT: 1 where tiles are cut along their keys into parts, which another kernel combines, 2 where some stay whole. Then
    what says which tile it is takes no registers in its steps, but is read again behind them.
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
    FROM_END: bool
    RESTS: bool
    SKIPS: bool
    PARTS: int
    DIAGONAL: bool
    HELD: int
    STEADY: bool
    EARLY: bool
    CHAINS: int
    CUT: int
    LENGTHS: bool
    PACKED: bool
    SHIFTED: bool


@gluon.jit
def attend_step(step, turn, q, pairs, probs, acc, shift, row_sum, peak, row, spans, band, scaling, OWN: gl.constexpr,
                MASKED: gl.constexpr, STEADY: gl.constexpr, C: gl.constexpr):
    """S of a step, and O += P·V of the one before it.

    In two parts the softmax has half of its exponentials above the wait for that product: they run beside it. The
    others have O's rescaling beside them, which must follow the product and would else run alone.
    """
    k_tiles, v_tiles, full, empty = pairs
    DTYPE: gl.constexpr = k_tiles[0].dtype
    wait_full(full, turn, C.STAGES)
    slot = turn % C.STAGES
    take_turn(OWN, C.PING_PONG)
    s_pending = issue_scores(q, k_tiles, slot, False, C)
    acc_pending = issue_out(probs, v_tiles, slot, acc, C)
    pass_turn(OWN, C.CONSUMERS, C.PING_PONG)
    s = cap(warpgroup_mma_wait(len(C.DV) * len(probs), deps=(s_pending,)), scaling[1])
    if MASKED:
        s = hide(s, row, keys_of(step, spans, C), band, C)
    if STEADY:  # of a row that has seen nothing exponents are inf here, and it is bad
        subtracted = shift
        factor = None
    else:
        shift, subtracted, factor = new_shift_of(s, shift, scaling, MASKED, C)
    PEAKS: gl.constexpr = STEADY and DTYPE == gl.bfloat16
    if C.PARTS == 2:
        low, high = halves(s)
        low = powers(low, subtracted, scaling, STEADY)
        low_sum = sum_of(low, C)
        if not (COPIES_LEFT_OPERANDS and C.CONSUMERS == 3):  # of three warpgroups' 160 registers copies spill some
            low_sum = stay(low_sum)
    else:
        p = powers(s, subtracted, scaling, STEADY)
        row_sum = scaled_sum(row_sum, factor, p, C)
        if PEAKS:
            peak = gl.maximum(peak, peak_of(p))
    acc = finish(acc_pending, 0)
    leave_products(empty, turn, C.STAGES)
    acc = rescale(acc, factor)
    if C.PARTS == 2:
        high = powers(high, subtracted, scaling, STEADY)
        row_sum = scaled_sum(row_sum, factor, high, C) + low_sum
        probs = (in_pairs(low, DTYPE), in_pairs(high, DTYPE))
        if PEAKS:
            peak = gl.maximum(gl.maximum(peak, peak_of(low)), peak_of(high))
    else:
        probs = in_parts(p, DTYPE, C)
    return probs, acc, shift, row_sum, peak


@gluon.jit
def attend_steps(begin, end, turn, q, pairs, probs, acc, shift, row_sum, peak, row, spans, band, scaling,
                 OWN: gl.constexpr, MASKED: gl.constexpr, STEADY: gl.constexpr, C: gl.constexpr):
    """Steps ``begin`` to ``end`` of a tile."""
    for step in range(begin, end):
        probs, acc, shift, row_sum, peak = attend_step(step, turn, q, pairs, probs, acc, shift, row_sum, peak, row,
                                                       spans, band, scaling, OWN, MASKED, STEADY, C)
        turn += 1
    return turn, probs, acc, shift, row_sum, peak


@gluon.jit
def scores_of(q, pairs, turn, OWN: gl.constexpr, C: gl.constexpr):
    """S of a turn whose V nobody needs: of the first step in which these queries see a key."""
    k_tiles, _v_tiles, full, empty = pairs
    wait_full(full, turn, C.STAGES)
    take_turn(OWN, C.PING_PONG)
    pending = issue_scores(q, k_tiles, turn % C.STAGES, False, C)
    pass_turn(OWN, C.CONSUMERS, C.PING_PONG)
    s = warpgroup_mma_wait(0, deps=(pending,))
    leave_products(empty, turn, C.STAGES)
    return s


@gluon.jit
def rest(begin, end, turn, pairs, OWN: gl.constexpr, C: gl.constexpr):
    """Let a tile's steps pass, but for the first, that have no query of this warpgroup; return the next turn.

    C.SKIPS does not apply to it then: its rows lie behind the tile's last query, which sees some of the first step.
    """
    _k_tiles, _v_tiles, full, empty = pairs
    for _step in range(begin, end):
        wait_full(full, turn, C.STAGES)
        take_turn(OWN, C.PING_PONG)
        pass_turn(OWN, C.CONSUMERS, C.PING_PONG)
        leave(empty, turn, C.STAGES)
        turn += 1
    return turn


@gluon.jit
def judge(judged, taken, bad, tile, OWN: gl.constexpr, C: gl.constexpr):
    """Say of each row if the tile must come again for it; of one that has come again nobody does."""
    if not comes_again(tile, C):
        judged[0].index((taken & (JUDGED - 1)) * C.CONSUMERS + OWN).store(bad)


@gluon.jit
def await_queries(q_full, slot, taken, first, C: gl.constexpr):
    """Wait for the queries of a tile, if there is one; with C.STEADY an END has some too."""
    exists = True if C.STEADY else first != END
    if exists:
        mbarrier.wait(q_full.index(slot), (taken // C.Q_STAGES) & 1)


@gluon.jit
def attend(sources, queries, pairs, next_tile, judged, out_tiles, results, order, band, group, scaling,
           OWN: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: 64 rows of every tile."""
    if OWN == C.CONSUMERS - 1:
        pass_turn(OWN, C.CONSUMERS, C.PING_PONG)  # the first warpgroup begins
    turn = 0
    taken = 0
    tile = take_tile(next_tile, taken, tile_size(C), C.CUT > 0)
    if C.STEADY:
        _q_tiles, _q_full, q_empty = queries
        while tile[0] != END:
            turn, taken = attend_tiles(tile, turn, taken, sources, queries, pairs, next_tile, judged, out_tiles,
                                       results, order, band, group, scaling, OWN, C)
            if C.CUT > 0:
                leave_tile(next_tile, taken)
            leave(q_empty, taken * C.CONSUMERS + OWN, C.Q_STAGES * C.CONSUMERS)
            taken += 1
            mbarrier.arrive(judged[2].index(0), count=1)
            tile = take_tile(next_tile, taken, tile_size(C), C.CUT > 0)
    else:
        attend_tiles(tile, turn, taken, sources, queries, pairs, next_tile, judged, out_tiles, results, order, band,
                     group, scaling, OWN, C)
    tma_store_wait(0)
    if OWN == 0:
        take_turn(OWN, C.PING_PONG)  # the last warpgroup has passed on a turn that nobody needs


@gluon.jit
def attend_tiles(tile, turn, taken, sources, queries, pairs, next_tile, judged, out_tiles, results, order, band, group,
                 scaling, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer: all tiles up to an END, from the first one on; returns the turn behind it, and how many were taken."""
    _q_descs, _k_descs, _v_descs, out_desc = sources
    q_tiles, q_full, q_empty = queries
    k_tiles, v_tiles, full, empty = pairs
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.KEYS, 16])
    DTYPE: gl.constexpr = k_tiles[0].dtype
    KEPT: gl.constexpr = C.CUT > 0
    first_slot = OWN
    first_place = 0
    if C.STEADY:
        first_slot = opaque(taken % C.Q_STAGES * C.CONSUMERS + OWN)
        first_place = opaque(turn % C.STAGES)
    if C.LENGTHS or C.CUT > 0:  # this program's tiles may all lie between the sequences, or be parts without a step
        await_queries(q_full, first_slot, taken, tile[0], C)
    else:
        wait_full(q_full, taken * C.CONSUMERS + OWN, C.Q_STAGES * C.CONSUMERS)
    held = hold_queries(q_tiles, first_slot, C)
    wait_full(full, turn, C.STAGES)
    HALF: gl.constexpr = C.DIAGONAL and OWN == 0  # of a tile's first step these queries see half of the keys
    s = warpgroup_mma_wait(0, deps=(issue_scores((q_tiles, first_slot, held), k_tiles, first_place, HALF, C),))
    leave_products(empty, turn, C.STAGES)
    turn += 1
    while tile[0] != END:
        first = tile[0]
        own_band = band_of(tile, band, C)
        spans = own_steps_of(tile, own_band, results[4][1], C)
        row = first + OWN * (64 // C.PACK)
        acc = zeros(C)
        nothing = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        if C.STEADY:  # the step of the first row's last key is among them, so that no row has seen nothing behind them
            masked = masked_of(row - 1, spans, own_band, C)
            if C.EARLY:
                masked = gl.maximum(masked, gl.minimum(spans[3], early_of(spans) + 1))
            masked = gl.where(comes_again(tile, C), spans[3], masked)
        else:
            masked = masked_of(row, spans, own_band, C)
        q_slot = taken % C.Q_STAGES * C.CONSUMERS + OWN
        begin = 1
        if C.RESTS:
            if row >= own_band[0]:
                turn = rest(begin, spans[3], turn, pairs, OWN, C)
                begin = spans[3]
        if C.SKIPS:
            if hides_first_step(keys_of(0, spans, C), spans[3], row, own_band[3], C):
                s = scores_of((q_tiles, opaque(q_slot), held), pairs, turn, OWN, C)
                turn += 1
                begin += 1
        s = cap(s, scaling[1])
        if C.DIAGONAL:
            s = hide(s, row, keys_of(0, spans, C), own_band, C)
        elif masked >= begin:
            s = hide(s, row, keys_of(begin - 1, spans, C), own_band, C)
        own_nothing = gl.convert_layout(nothing, gl.SliceLayout(1, s.type.layout))
        shift, subtracted, _factor = new_shift_of(s, own_nothing, scaling, True, C)
        p = powers(s, subtracted, scaling, False)
        shift = gl.convert_layout(shift, nothing.type.layout)
        row_sum = sum_of(p, C)
        peak = no_peak()
        if HALF:
            low = in_pairs(p, DTYPE)
            probs = (low, low * 0)  # what follows a tile's last step takes all keys, be it the first
            if spans[3] > 1:
                probs, acc, shift, row_sum, peak = attend_step(
                    1, turn, (q_tiles, opaque(q_slot), held), pairs, (low,), acc, shift, row_sum, peak, row, spans,
                    own_band, scaling, OWN, False, False, C)
                turn += 1
                begin += 1
        else:
            probs = in_parts(p, DTYPE, C)
        if C.LENGTHS:
            keep = own_band[1] - keys_of(0, spans, C)
            if (keep < C.KEYS) & (begin == 1):  # the first step is the only one that may reach past the keys
                wait_full(full, turn, C.STAGES)
                clear(v_tiles, opaque(turn % C.STAGES), keep, C)
        if C.STEADY or not C.DIAGONAL:
            turn, probs, acc, shift, row_sum, peak = attend_steps(
                begin, masked, turn, (q_tiles, opaque(q_slot), held), pairs, probs, acc, shift, row_sum, peak, row,
                spans, own_band, scaling, OWN, True, False, C)
        turn, probs, acc, shift, row_sum, peak = attend_steps(
            gl.maximum(begin, masked), spans[3], turn, (q_tiles, opaque(q_slot), held), pairs, probs, acc, shift,
            row_sum, peak, row, spans, own_band, scaling, OWN, False, C.STEADY, C)

        leave(q_empty, taken * C.CONSUMERS + OWN, C.Q_STAGES * C.CONSUMERS)
        taken += 1
        after = take_tile(next_tile, taken, tile_size(C), KEPT)
        next_slot = taken % C.Q_STAGES * C.CONSUMERS + OWN
        if C.Q_STAGES > 1:
            await_queries(q_full, next_slot, taken, after[0], C)
        wait_full(full, turn, C.STAGES)
        slot = turn % C.STAGES
        take_turn(OWN, C.PING_PONG)
        acc_pending = issue_out(probs, v_tiles, slot, acc, C)
        if C.Q_STAGES == 1:  # they are still on their way: there was no room before
            await_queries(q_full, next_slot, taken, after[0], C)
            next_slot = opaque(next_slot)  # a constant, like that of the loops
        held = hold_queries(q_tiles, next_slot, C)
        s_pending = issue_scores((q_tiles, next_slot, held), k_tiles, slot, HALF, C)
        pass_turn(OWN, C.CONSUMERS, C.PING_PONG)
        acc = finish(acc_pending, len(products_of(C.D, C.HELD)))
        if C.PARTS == 2:
            row_sum = gl.convert_layout(gl.sum(row_sum, 1), shift.type.layout)
        weight = row_sum
        if C.STEADY and DTYPE == gl.bfloat16:
            weight += gl.convert_layout(rounding_of(peak, DTYPE), shift.type.layout)
        if KEPT:
            tile = read_tile(next_tile, taken - 1, tile_size(C))
            row = tile[0] + OWN * (64 // C.PACK)
        if C.STEADY:
            judge(judged, taken - 1, are_bad(row_sum, acc, shift, DTYPE), tile, OWN, C)
        write(acc, top_of(shift, scaling), row_sum, weight, tile, row, out_desc, out_tiles, results, band, order[1],
              group, OWN, C)
        if KEPT:
            leave_tile(next_tile, taken - 1)
            after = read_tile(next_tile, taken, tile_size(C))
        s = warpgroup_mma_wait(0, deps=(s_pending,))
        leave_products(empty, turn, C.STAGES)
        turn += 1
        tile = after
    return turn, taken


@gluon.constexpr_function
def registers(consumers):
    """Registers a thread of a consumer; the rest of 65536 goes to the first one, which the compiler gives it."""
    return 240 if consumers == 2 else 160


@gluon.jit(do_not_specialize=["tiles", "heads", "batches", "section", "sq", "sk", "lower", "upper", "group",
                             "sinks_stride", "cu_q", "cu_k", "seqlens_q", "seqlens_k", "count", "whole", "parts",
                             "lead", "first_line"])
def hopper_forward_kernel(q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, out_desc, lse_ptr, counter, sinks_ptr,
                          sinks_stride, out_ptr, cu_q, cu_k, seqlens_q, seqlens_k, parts_ptr, tiles, heads,
                          batches, section, sq, sk, lower, upper, group, count, scale_log2, squash, exact_scale,
                          whole, parts, lead, first_line, C: gl.constexpr):
    """Compute out and lse.

    sinks_ptr, squash: None where there are no sinks and no softcap. With one, scale_log2 is that of what tanh gives,
    and squash what the products are multiplied by before it. exact_scale: the least power of two that is no less than
    scale_log2; it takes that one's place where scores are huge (softmax.shift_for). out_ptr: None unless sequences are
    packed. cu_q to seqlens_k, count: None but for what says where sequences lie and how many they are
    (tilewise.sequences). parts_ptr, whole, parts, lead, first_line: None unless C.CUT. Then ``whole`` tiles are not
    cut, the others into so many parts, the first of which is ``lead`` times as long as each other, and that is the
    first line of lse that is theirs. The sinks enter where parts are combined.
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
    pairs = (k_tiles, v_tiles, make_barriers(C.STAGES, 1), make_barriers(C.STAGES, NC))
    next_tile = (tile_values, make_barriers(2, 1), make_barriers(2, NC))
    fence_async_shared()
    judged = ()
    if C.STEADY:
        verdicts = gl.allocate_shared_memory(gl.int8, [JUDGED * NC, 64], IN_ORDER)
        for i in gl.static_range(JUDGED * NC):
            verdicts.index(i).store(gl.full([64], 0, gl.int8, layout=FOUR_WARPS))
        judged = (verdicts, gl.allocate_shared_memory(gl.int32, [JUDGED, 1], IN_ORDER), make_barriers(1, NC))
    sources = (q_descs, k_descs, v_descs, out_desc)
    order = (tiles, heads, batches, section)
    band = (sq, sk, lower, upper)
    scaling = (scale_log2, squash, exact_scale)
    lengths = (cu_q, cu_k, seqlens_q, seqlens_k, count)
    if C.CUT > 0:
        parts_ptr += first_line.to(gl.int64) * parts * -record_of(C.DV)
    cut = (whole, (parts, lead))
    results = (out_ptr, lse_ptr, sinks_ptr, sinks_stride, (parts_ptr, (parts, lead)))
    REGISTERS: gl.constexpr = registers(NC)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    TWO: gl.constexpr = 2
    if NC == 1:
        gl.warp_specialize([
            (attend, (sources, queries, pairs, next_tile, judged, out_tiles, results, order, band, group, scaling,
                      ZERO, C)),
            (load, (sources, queries, pairs, next_tile, judged, counter, order, band, lengths, cut, group, C)),
        ], [1], [24])
    elif NC == 2:
        gl.warp_specialize([
            (attend, (sources, queries, pairs, next_tile, judged, out_tiles, results, order, band, group, scaling,
                      ZERO, C)),
            (attend, (sources, queries, pairs, next_tile, judged, out_tiles, results, order, band, group, scaling,
                      ONE, C)),
            (load, (sources, queries, pairs, next_tile, judged, counter, order, band, lengths, cut, group, C)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (attend, (sources, queries, pairs, next_tile, judged, out_tiles, results, order, band, group, scaling,
                      ZERO, C)),
            (attend, (sources, queries, pairs, next_tile, judged, out_tiles, results, order, band, group, scaling,
                      ONE, C)),
            (attend, (sources, queries, pairs, next_tile, judged, out_tiles, results, order, band, group, scaling,
                      TWO, C)),
            (load, (sources, queries, pairs, next_tile, judged, counter, order, band, lengths, cut, group, C)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
