"""Backward on Hopper at head dims up to 64: two warpgroups own keys, as in hopper_backward.py, and a third makes dQ.

With 64 columns a thread has registers to spare, and the third warpgroup takes dQ and its additions out of the chain
that a step is. What is left of it is turned by half a step: when a turn begins, a warpgroup has P and dP of its last
queries. It makes dS of them, and asks for four products that follow one another without a pause: dV and dK of these
queries, S and dP of the next. Below dK and dP it computes the next P. The two warpgroups do not wait for each other,
but for slots. lse and delta come as tails (hopper_tails.py).

With C.DYNAMIC_TILES a program draws one tile of keys after another: the next one's keys, values and first queries come
while the last steps of the one before are worked on. With C.HEAD_PERSISTENT a program goes over all keys of a head, and
nobody else adds to this head's dQ: its sums stay with the program, in L2, the first tile that sees a step sets them,
and the last writes dq. Or C.PROGRAMS share the tiles of a head, and add in their order by writers, as with
C.DETERMINISTIC: then fewer heads' sums are in hand, and rounds of programs are fuller. Programs of one head wait for
one another: they are neighbours, and all have started before any behind them. Else a program has one tile.
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

from tilewise.kernels.gluon.backward_products import issue_dq, issue_pairs
from tilewise.kernels.gluon.compat import tma_load, tma_store_wait
from tilewise.kernels.gluon.hopper_backward import PAIRS, hide_probs, write
from tilewise.kernels.gluon.hopper_backward_load import load_dout, load_rows
from tilewise.kernels.gluon.hopper_dq_sums import (
    WRITERS,
    add_in_order,
    add_staged,
    added_to_staged,
    await_sums,
    forget,
    hand_over,
    keep_or_write,
    make_stage,
    stage_part,
    wait_for_tiles_before,
    write_dq,
)
from tilewise.kernels.gluon.hopper_tails import TAIL, make_picks
from tilewise.kernels.gluon.key_shares import tile_of_program, tiles_of_program
from tilewise.kernels.gluon.pipeline import (
    CONTIGUOUS,
    NO_TILE,
    TileQueue,
    consumer_release,
    consumer_wait,
    fetch_next_tile,
    get_tile,
    make_barriers,
    named_barrier_sync,
    optimization_barrier,
    producer_acquire,
    publish_tile,
)
from tilewise.kernels.gluon.tiles import (
    QUERIES,
    MaskBounds,
    TileGrid,
    is_last_of,
    key_tile_at,
    phases_of,
    q_block_start,
    q_blocks_of,
    rank_of,
)

ZERO: gl.constexpr = gl.constexpr(0)
ONE: gl.constexpr = gl.constexpr(1)


class Shape(NamedTuple):
    """What is fixed when the kernel is compiled: HopperBackwardConfig's fields, and what of the mask there is.

    PROGRAMS: those that share a head. KEY_SLOTS: tiles of keys in flight. DRAWN: config.stays. The last ones are what
    hopper_backward.py's functions ask for, the same always.
    """

    WIDTH: int
    KV_STAGES: int
    OUT_STAGES: int
    DETERMINISTIC: bool
    HEAD_PERSISTENT: bool
    PROGRAMS: int
    KEY_SLOTS: int
    DYNAMIC_TILES: bool
    HAS_LOWER: bool
    HAS_UPPER: bool
    CONSUMERS: int = 2
    AUGMENTED_K: bool = True
    DQ_FROM_REGISTERS: bool = False
    VARLEN: bool = False
    HAS_CU_SEQLENS: bool = False
    PERSISTENT: bool = False


@gluon.jit
def pass_turn_on(begun, dk, dv, turn, first_query, key, own, memory, band, scale_log2, ENDS: gl.constexpr,
                 BEGINS: gl.constexpr, MASKED: gl.constexpr, OWN: gl.constexpr, C: gl.constexpr):
    """End the queries of the turn before (ENDS), of which ``begun`` holds P, P as a left operand, and dP; begin others.

    A tile's first turn ends none, and the one behind its last queries begins none (BEGINS). own: the slot of the
    warpgroup's keys, of which ``key`` is the first.
    """
    keys, queries, douts, rows, dscores = memory
    k_tiles, v_tiles, _keys_full, _keys_empty = keys
    q_tiles, q_full, q_empty = queries
    dout_tiles, dout_full, dout_empty = douts
    dscores_tiles, dscores_full, dscores_empty = dscores
    probs, left_probs, slopes = begun
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    DTYPE: gl.constexpr = k_tiles.dtype
    last = turn - 1
    if BEGINS:
        consumer_wait(q_full, turn, C.KV_STAGES)
        consumer_wait(dout_full, turn, C.OUT_STAGES)
    if ENDS:
        gradients = (probs * slopes).to(DTYPE)
        dscores_tiles.index((last & 1) * C.CONSUMERS + OWN).store(gradients)
        fence_async_shared()
        consumer_release(dscores_full, last, 2)
        dout = dout_tiles.index(last % C.OUT_STAGES).reshape([QUERIES, C.WIDTH])
        dv_pending = warpgroup_mma(left_probs, dout, dv, is_async=True)
    if BEGINS:
        k = k_tiles.index(own).reshape([64, C.WIDTH])
        scores_pending = issue_pairs(k, q_tiles, rows, turn, turn % C.KV_STAGES, 0, C)
    if ENDS:
        q = q_tiles.index(last % C.KV_STAGES).reshape([QUERIES, C.WIDTH])
        dk_pending = warpgroup_mma(gl.convert_layout(gradients, LEFT), q, dk, is_async=True)
    if BEGINS:
        if C.HEAD_PERSISTENT:  # else what K's descriptor shares with V's spills: 144 bytes with 3.9
            own = optimization_barrier(own)
        v = v_tiles.index(own).reshape([64, C.WIDTH])
        slopes_pending = issue_pairs(v, dout_tiles, rows, turn, turn % C.OUT_STAGES, 1, C)
        # Of the products behind S two are dP's: it begins with one of tails.
        scores = warpgroup_mma_wait(3 if ENDS else 2, deps=(scores_pending,))
        probs = gl.exp2(scores * scale_log2)
        if MASKED:
            probs = hide_probs(probs, first_query, key, band, C)
        left_probs = gl.convert_layout(probs.to(DTYPE), LEFT)
        producer_acquire(dscores_empty, turn, 2)
    if ENDS and BEGINS:
        dk, dv, slopes = warpgroup_mma_wait(0, deps=(dk_pending, dv_pending, slopes_pending))
    elif ENDS:
        dk, dv = warpgroup_mma_wait(0, deps=(dk_pending, dv_pending))
    else:
        slopes = warpgroup_mma_wait(0, deps=(slopes_pending,))
    if ENDS:
        consumer_release(dout_empty, last, C.OUT_STAGES)
        consumer_release(q_empty, last, C.KV_STAGES)
    return (probs, left_probs, slopes), dk, dv


@gluon.jit
def pass_steps(begin, end, begun, dk, dv, turn, key, own, memory, spans, band, scale_log2, MASKED: gl.constexpr,
               OWN: gl.constexpr, C: gl.constexpr):
    """Begin steps ``begin`` to ``end`` of one query head, and end those before them."""
    first_query = 0  # asked for by the mask alone
    for step in range(begin, end):
        if MASKED:
            first_query = q_block_start(step, spans, C)
        begun, dk, dv = pass_turn_on(begun, dk, dv, turn, first_query, key, own, memory, band, scale_log2, True,
                                     True, MASKED, OWN, C)
        turn += 1
    return begun, dk, dv, turn


@gluon.jit
def load_tile(loaded, number, tile, turn, C: gl.constexpr):
    """Producer: keys and values of a tile, and behind them the queries of every head of the group."""
    sources, keys, queries, douts, rows, _order, band, group, _drawn = loaded
    _q_desc, k_desc, v_desc, _dout_desc, _tails_desc, _delta_ptr, _share = sources
    k_tiles, v_tiles, keys_full, keys_empty = keys
    NC: gl.constexpr = C.CONSUMERS
    first, head_k, batch = tile
    spans = q_blocks_of(first, band, C)
    _start, _at_head, _masked, steps = spans
    producer_acquire(keys_empty, number, C.KEY_SLOTS)
    slot = number % C.KEY_SLOTS
    mbarrier.expect(keys_full.index(slot), NC * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for i in gl.static_range(NC):
        own = slot * NC + i
        tma_load(k_desc, [batch, head_k, first + i * 64, 0], keys_full.index(slot), k_tiles.index(own))
        tma_load(v_desc, [batch, head_k, first + i * 64, 0], keys_full.index(slot), v_tiles.index(own))
    for member in range(group):
        for step in range(steps):
            place = (batch, head_k * group + member, q_block_start(step, spans, C), 0)
            load_rows(sources, queries, rows, turn, place, 0, (0, 0), False, C)
            load_dout(sources, douts, turn, place, False, C)
            turn += 1
    return turn


@gluon.jit
def load(loaded, C: gl.constexpr):
    """Producer, one warp: tile after tile; with C.DYNAMIC_TILES as they are drawn."""
    _sources, _keys, _queries, _douts, _rows, order, _band, _group, drawn = loaded
    turn = 0
    if C.DYNAMIC_TILES:
        next_tile, counter = drawn
        tiles, heads, batches, _section = order
        total = tiles * heads * batches
        number = gl.program_id(0)
        taken = 0
        while number < total:
            tile = key_tile_at(number, order, C)
            publish_tile(next_tile, taken, tile, 3)
            turn = load_tile(loaded, taken, tile, turn, C)
            taken += 1
            number = fetch_next_tile(counter, total)
        publish_tile(next_tile, taken, (NO_TILE, 0, 0), 3)
    else:
        for number in range(tiles_of_program(order, C)):
            turn = load_tile(loaded, number, tile_of_program(number, order, C), turn, C)


@gluon.jit
def gather_tile(gathered, number, tile, turn, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer: dK and dV of 64 keys of a tile, and dS of every step for the one that makes dQ."""
    targets, memory, order, band, group, scales, _next_tile = gathered
    scale, scale_log2 = scales
    dk_desc, dv_desc = targets
    keys, _queries, _douts, _rows, _dscores = memory
    k_tiles, v_tiles, keys_full, keys_empty = keys
    SUM_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.WIDTH, 16])
    FIRST: gl.constexpr = 1 if C.DETERMINISTIC and not C.HAS_LOWER else 0
    STOP: gl.constexpr = 3 if C.DETERMINISTIC else 2
    first, head_k, batch = tile
    dk = gl.full([64, C.WIDTH], 0.0, gl.float32, layout=SUM_LAYOUT)
    dv = gl.full([64, C.WIDTH], 0.0, gl.float32, layout=SUM_LAYOUT)
    pairs = gl.full([64, QUERIES], 0.0, gl.float32, layout=PAIRS)
    begun = (pairs, gl.convert_layout(pairs.to(k_tiles.dtype), gl.DotOperandLayout(0, SUM_LAYOUT, 2)), pairs)
    spans = q_blocks_of(first, band, C)
    key = first + OWN * 64
    ends = phases_of(key, spans, band, C)
    own = number % C.KEY_SLOTS * C.CONSUMERS + OWN
    consumer_wait(keys_full, number, C.KEY_SLOTS)
    # Somebody sees these keys: there is a step.
    begun, dk, dv = pass_turn_on(begun, dk, dv, turn, q_block_start(0, spans, C), key, own, memory, band, scale_log2,
                                 False, True, True, OWN, C)
    if number > 0:
        tma_store_wait(0)  # dK and dV of the tile before have been read where its keys and values were
        consumer_release(keys_empty, number - 1, C.KEY_SLOTS)
    turn += 1
    for member in range(group):
        for phase in gl.static_range(FIRST, STOP):
            begin = gl.where(member == 0, gl.maximum(ends[phase], 1), ends[phase])
            begun, dk, dv, turn = pass_steps(begin, ends[phase + 1], begun, dk, dv, turn, key, own, memory, spans,
                                             band, scale_log2, phase != 1, OWN, C)
    begun, dk, dv = pass_turn_on(begun, dk, dv, turn, 0, key, own, memory, band, scale_log2, True, False, False, OWN,
                                 C)
    if C.PROGRAMS > 1:  # found anew, not kept in registers through all steps
        first, head_k, batch = tile_of_program(optimization_barrier(number), order, C)
    place = (batch, head_k, first + OWN * 64, 0)
    write(dv_desc, None, v_tiles.index(own), dv, place, 64, C)
    named_barrier_sync(C.CONSUMERS + 1)  # dQ has read these keys
    write(dk_desc, None, k_tiles.index(own), dk * scale, place, 64, C)
    return turn


@gluon.jit
def gather(gathered, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: its keys of one tile after another."""
    _targets, _memory, order, _band, _group, _scales, next_tile = gathered
    turn = 0
    if C.DYNAMIC_TILES:
        taken = 0
        tile = get_tile(next_tile, taken, 3)
        while tile[0] != NO_TILE:
            turn = gather_tile(gathered, taken, tile, turn, OWN, C)
            taken += 1
            tile = get_tile(next_tile, taken, 3)
    else:
        for number in range(tiles_of_program(order, C)):
            turn = gather_tile(gathered, number, tile_of_program(number, order, C), turn, OWN, C)
    tma_store_wait(0)


@gluon.jit
def make_dq_of_tile(made, number, tile, turn, C: gl.constexpr):
    """Third warpgroup: dQ of every step of a tile, added to its sums or handed to warps that do it; or all of dq."""
    dq_desc, sums, sums_ptr, keys, dscores, stage, order, band, group, scale, _next_tile = made
    k_tiles, _v_tiles, keys_full, _keys_empty = keys
    dscores_tiles, full, empty = dscores
    _tiles, heads, _batches, _section = order
    sq, _sk, _lower, _upper = band
    all_steps = (sq + (QUERIES - 1)) // QUERIES
    SHARED: gl.constexpr = C.PROGRAMS > 1
    first, head_k, batch = tile
    spans = q_blocks_of(first, band, C)
    _start, _at_head, _masked, steps = spans
    consumer_wait(keys_full, number, C.KEY_SLOTS)
    if C.HEAD_PERSISTENT and not SHARED:
        await_sums()  # of the tiles before
    for member in range(group):
        head = head_k * group + member
        if C.HEAD_PERSISTENT and not SHARED:
            line = gl.program_id(0) * group + member
        else:
            line = batch * heads * group + head
        for step in range(steps):
            query = q_block_start(step, spans, C)
            part = line * all_steps + query // QUERIES
            consumer_wait(full, turn, 2)
            dq_pending = issue_dq(k_tiles, dscores_tiles, turn & 1, number % C.KEY_SLOTS * C.CONSUMERS, 0, 1, C)
            dq = warpgroup_mma_wait(0, deps=(dq_pending,))
            consumer_release(empty, turn, 2)
            if SHARED:
                hand_over_or_write(dq, dq_desc, stage, turn, [batch, head, query, 0],
                                   rank_of(first, query // QUERIES, band, C) == 0,
                                   is_last_of(first, query, band, C), scale)
            elif C.HEAD_PERSISTENT:
                keep_or_write(dq, dq_desc, sums, sums_ptr, stage, part, [batch, head, query, 0],
                              rank_of(first, query // QUERIES, band, C) == 0, is_last_of(first, query, band, C),
                              scale)
            else:
                hand_over(sums, dq, stage, turn, part, 0, C)
            turn += 1
    named_barrier_sync(C.CONSUMERS + 1)
    return turn


@gluon.jit
def make_dq(made, C: gl.constexpr):
    """Third warpgroup: dQ of one tile after another."""
    (_dq_desc, _sums, _sums_ptr, _keys, _dscores, _stage, order, _band, _group, _scale, next_tile) = made
    turn = 0
    if C.DYNAMIC_TILES:
        taken = 0
        tile = get_tile(next_tile, taken, 3)
        while tile[0] != NO_TILE:
            turn = make_dq_of_tile(made, taken, tile, turn, C)
            taken += 1
            tile = get_tile(next_tile, taken, 3)
    else:
        for number in range(tiles_of_program(order, C)):
            turn = make_dq_of_tile(made, number, tile_of_program(number, order, C), turn, C)
    tma_store_wait(0)


@gluon.jit
def counters_behind(sums_ptr, order, steps, WIDTH: gl.constexpr):
    """Return where the counters are, one for each of ``steps`` steps of a head of k: behind all sums."""
    _tiles, heads, batches, _section = order
    # The zero changes nothing but on the CPU: what a program is launched with are numbers there, and have no ``to``.
    all_steps = gl.program_id(0) * 0 + batches * heads * steps
    return sums_ptr + all_steps.to(gl.int64) * (64 * WIDTH)


@gluon.jit
def hand_over_or_write(dq, dq_desc, stage, turn, place, is_first, is_last, scale):
    """Stage a part of dQ for the writer, or add the last one of a step to the sums that it brought, and write dq."""
    staged, rows = stage
    tiles, full, ready = staged
    consumer_wait(ready, turn, WRITERS)
    tile = tiles.index(turn % WRITERS)
    if is_last:
        if not is_first:
            dq = added_to_staged(tile, dq)
        consumer_release(full, turn, WRITERS)
        write_dq(dq, dq_desc, rows, place, scale)
    else:
        stage_part(tile, dq)
        consumer_release(full, turn, WRITERS)


@gluon.jit
def write_parts(written, OWN: gl.constexpr, C: gl.constexpr):
    """Writer, one warp, of a program that shares its heads: every other turn add what ``make_dq`` stages.

    Of a step's last tile it brings the sums instead, once the tiles before have added to them.
    """
    sums, sums_ptr, stage, order, band, group = written
    tiles, full, ready = stage
    _tiles, heads, _batches, _section = order
    sq, _sk, _lower, _upper = band
    all_steps = (sq + (QUERIES - 1)) // QUERIES
    counters = counters_behind(sums_ptr, order, all_steps * group, C.WIDTH)
    turn = 0
    for number in range(tiles_of_program(order, C)):
        first, head_k, batch = tile_of_program(number, order, C)
        spans = q_blocks_of(first, band, C)
        _start, _at_head, _masked, steps = spans
        for member in range(group):
            line = (batch * heads + head_k) * group + member
            for step in range(steps):
                if turn % WRITERS == OWN:
                    query = q_block_start(step, spans, C)
                    part = line * all_steps + query // QUERIES
                    rank = rank_of(first, query // QUERIES, band, C)
                    is_last = is_last_of(first, query, band, C)
                    if is_last & (rank > 0):
                        wait_for_tiles_before(counters + part, rank)
                        mbarrier.expect(ready.index(OWN), sums.block_type.nbytes)
                        tma_load(sums, [part * (C.WIDTH // 4), 0], ready.index(OWN), tiles.index(OWN))
                    else:
                        consumer_release(ready, turn, WRITERS)
                    if is_last:
                        consumer_wait(full, turn, WRITERS)
                        if rank > 0:
                            forget(sums_ptr + part.to(gl.int64) * (64 * C.WIDTH), 64 * C.WIDTH)
                    else:
                        wait_for_tiles_before(counters + part, rank)
                        consumer_wait(full, turn, WRITERS)
                        add_staged(sums, counters + part, tiles, part, rank, OWN, 1)
                turn += 1


@gluon.jit(do_not_specialize=["tiles", "heads", "batches", "section", "sq", "sk", "lower", "upper", "group"])
def hopper_backward_narrow_kernel(q_desc, k_desc, v_desc, dout_desc, tails_desc, dk_desc, dv_desc, dq_desc,
                                  sums, beside, tiles, heads, batches, section, sq, sk, lower, upper, group, scale,
                                  scale_log2, C: gl.constexpr):
    """Compute dk and dv, and the sums for dq, which must be zero at first but where C.DETERMINISTIC; or compute dq.

    Grid: (tiles · heads of k · batches,), with C.HEAD_PERSISTENT any multiple of C.PROGRAMS up to as many times heads
    of k · batches, with C.DYNAMIC_TILES any number up to its own. sums: (·, 256), a descriptor; with C.HEAD_PERSISTENT
    of one program a head room for a group's steps for each program. dq_desc: with C.HEAD_PERSISTENT, else None. beside,
    a pointer, is one of three things or None: with C.HEAD_PERSISTENT the sums, as they lie in memory, behind which the
    counters stand where programs share a head; else, where C.DETERMINISTIC, these counters, one for each step of a
    query head, zero at first; with C.DYNAMIC_TILES the counter that tiles are drawn by, zero at first and in the end.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    NC: gl.constexpr = C.CONSUMERS
    BLOCK_N: gl.constexpr = C.KEY_SLOTS * NC
    k_tiles = gl.allocate_shared_memory(DTYPE, [BLOCK_N, 1, 1, 64, C.WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [BLOCK_N, 1, 1, 64, C.WIDTH], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(DTYPE, [C.KV_STAGES, 1, 1, QUERIES, C.WIDTH], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [C.OUT_STAGES, 1, 1, QUERIES, C.WIDTH], dout_desc.layout)
    TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, QUERIES], DTYPE)
    dscores_tiles = gl.allocate_shared_memory(DTYPE, [2 * NC, 64, QUERIES], TURNED)
    rows = make_picks(), gl.allocate_shared_memory(gl.bfloat16, [C.KV_STAGES, 1, 1, QUERIES, TAIL], tails_desc.layout)
    keys = (k_tiles, v_tiles, make_barriers(C.KEY_SLOTS, 1), make_barriers(C.KEY_SLOTS, NC))
    queries = (q_tiles, make_barriers(C.KV_STAGES, 1), make_barriers(C.KV_STAGES, NC))
    douts = (dout_tiles, make_barriers(C.OUT_STAGES, 1), make_barriers(C.OUT_STAGES, NC))
    dscores = (dscores_tiles, make_barriers(2, NC), make_barriers(2, 1))
    ADDED: gl.constexpr = C.DETERMINISTIC and not C.HEAD_PERSISTENT
    stage = dscores
    if ADDED:
        stage = make_stage(sums, 1, C)
    elif C.HEAD_PERSISTENT:
        rows_of_dq = gl.allocate_shared_memory(DTYPE, [1, 1, 64, C.WIDTH], dq_desc.layout)
        if C.PROGRAMS > 1:
            stage = (make_stage(sums, 1, C), rows_of_dq)
        else:
            stage = (gl.allocate_shared_memory(gl.float32, [C.WIDTH // 4, 256], sums.layout), rows_of_dq)
    else:
        stage = gl.allocate_shared_memory(gl.float32, [1, C.WIDTH // 4, 256], sums.layout)
    next_tile = ()
    if C.DYNAMIC_TILES:
        numbers = gl.allocate_shared_memory(gl.int32, [2 * 3, 1], CONTIGUOUS)
        next_tile = TileQueue(numbers, make_barriers(2, 1), make_barriers(2, NC + 1))
    fence_async_shared()
    band = MaskBounds(sq, sk, lower, upper)
    order = TileGrid(tiles, heads, batches, section)
    sources = (q_desc, k_desc, v_desc, dout_desc, tails_desc, None, None)
    memory = (keys, queries, douts, rows, dscores)
    gathered = ((dk_desc, dv_desc), memory, order, band, group, (scale, scale_log2), next_tile)
    made = (dq_desc, sums, beside, keys, dscores, stage, order, band, group, scale, next_tile)
    loaded = (sources, keys, queries, douts, rows, order, band, group, (next_tile, beside))
    if ADDED:
        tile = key_tile_at(gl.program_id(0), order, C)
        written = (sums, beside, stage, tile, band, heads, group)
        gl.warp_specialize([(gather, (gathered, ZERO, C)), (gather, (gathered, ONE, C)), (make_dq, (made, C)),
                            (load, (loaded, C)), (add_in_order, (written, ZERO, ONE, C)),
                            (add_in_order, (written, ONE, ONE, C))], [4, 4, 1, 1, 1], [208, 72, 24, 24, 24])
    elif C.PROGRAMS > 1:
        staged, _rows_of_dq = stage
        written = (sums, beside, staged, order, band, group)
        gl.warp_specialize([(gather, (gathered, ZERO, C)), (gather, (gathered, ONE, C)), (make_dq, (made, C)),
                            (load, (loaded, C)), (write_parts, (written, ZERO, C)), (write_parts, (written, ONE, C))],
                           [4, 4, 1, 1, 1], [200, 88, 24, 24, 24])
    else:
        gl.warp_specialize([(gather, (gathered, ZERO, C)), (gather, (gathered, ONE, C)), (make_dq, (made, C)),
                            (load, (loaded, C))], [4, 4, 1], [200, 88, 24] if C.HEAD_PERSISTENT else [208, 72, 24])
