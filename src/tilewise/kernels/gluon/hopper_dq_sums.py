"""How the backward kernel's parts of dQ reach their sums in global memory (maths.md, eq. 10).

A step of a tile of keys adds a part of each warpgroup that makes dQ. It adds it itself, from registers
(C.DQ_FROM_REGISTERS) or through a staged tile that the copy engine adds; or, for a fixed order (C.DETERMINISTIC),
stages it for warps that do nothing else, and waits for these only when they are two steps behind. Those add in each
step tile of keys after tile of keys, so that every bit of dQ is the same on every run; the first sets the sums. A
counter of the step says how many tiles have added their parts. A tile waits for earlier ones alone, whose programs have
lower numbers and started before: they need not all be running at once. A program that has all keys of a head sets the
sums, adds to them, and writes dq with the last part itself; where some share a head, writers bring what the last part
is added to.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.kernels.gluon.compat import reinterpret, tma_add, tma_store, tma_store_wait
from tilewise.kernels.gluon.pipeline import (
    ONE_WARP,
    WARPGROUP_BARRIER,
    consumer_release,
    consumer_wait,
    make_barriers,
    per_thread_asm,
    producer_acquire,
)
from tilewise.kernels.gluon.tiles import QUERIES, is_last_of, q_block_start, q_blocks_of, rank_of

# Writers take steps in turn, each with a stage of its own: an addition may last as long as two steps.
WRITERS: gl.constexpr = gl.constexpr(2)


@gluon.jit
def make_stage(sums, MAKERS: gl.constexpr, C: gl.constexpr):
    """Allocate what parts of dQ are staged in: for each writer a tile of each warpgroup that makes dQ."""
    tiles = gl.allocate_shared_memory(gl.float32, [WRITERS * MAKERS, C.WIDTH // (4 * MAKERS), 256], sums.layout)
    return tiles, make_barriers(WRITERS, MAKERS), make_barriers(WRITERS, 1)


@gluon.jit
def by_threads(values):
    """Order 64 rows as a warpgroup holds them: each thread's values four by four, neighbours in memory in a warp."""
    COLUMNS: gl.constexpr = values.shape[1]
    return values.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))


@gluon.jit
def add_directly(place, dq):
    """Add a part of dQ to its sums, which begin at ``place``, from registers."""
    flat = by_threads(dq).reshape([64 * dq.shape[1]])
    offsets = gl.arange(0, 64 * dq.shape[1], layout=flat.type.layout)
    gl.atomic_add(place + offsets, flat, sem="relaxed")


@gluon.jit
def stage_part(staged, dq):
    """Put a part of dQ, in the order of its threads, where the copy engine takes it from."""
    staged.store(by_threads(dq).reshape(staged.shape))
    fence_async_shared()


@gluon.jit
def sums_at(sums_ptr, part, like):
    """Return the sums that a part of dQ, or what has its form, is added to. Past L1, where they were added to."""
    COLUMNS: gl.constexpr = like.shape[1]
    LAYOUT: gl.constexpr = by_threads(like).reshape([64 * COLUMNS]).type.layout
    offsets = gl.arange(0, 64 * COLUMNS, layout=LAYOUT)
    sums = gl.load(sums_ptr + part.to(gl.int64) * (64 * COLUMNS) + offsets, cache_modifier=".cg")
    return by_rows(sums, like)


@gluon.jit
def by_rows(sums, like):
    """Order what lies as threads hold a part of dQ as that part is."""
    COLUMNS: gl.constexpr = like.shape[1]
    rows = sums.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, COLUMNS])
    return gl.convert_layout(rows, like.type.layout)


@gluon.jit
def added_to_staged(staged, dq):
    """Return a part of dQ with the sums that the copy engine has brought added."""
    return dq + by_rows(staged.load(by_threads(dq).reshape(staged.shape).type.layout), dq)


@gluon.jit
def keep_or_write(dq, dq_desc, sums, sums_ptr, stage, part, place, is_first, is_last, scale):
    """Set the sums of a step, add a part of dQ to them, or, when the last part is there, write dq.

    sums_ptr: None where the last part has begun from the sums. part: the step's number among those of ``sums``;
    place: of its 64 rows in dq.
    """
    staged, rows = stage
    COLUMNS: gl.constexpr = dq.shape[1]
    if is_last:
        if sums_ptr is not None:
            if not is_first:
                dq += sums_at(sums_ptr, part, dq)
        write_dq(dq, dq_desc, rows, place, scale)
    else:
        tma_store_wait(0)
        stage_part(staged, dq)
        if is_first:
            tma_store(sums, [part * (COLUMNS // 4), 0], staged)
        else:
            tma_add(sums, [part * (COLUMNS // 4), 0], staged)


@gluon.jit
def start_of_half(target, part, first_query, first_key, band, C: gl.constexpr):
    """Consumer of a program that has a head alone: return what its columns of dQ begin from in a step.

    That is the step's sums where this tile of keys is the last to add to them, else nothing. target: the sums, as a
    descriptor and as a pointer, dq, the batch entry and the head, and what dq is multiplied by.
    """
    _sums, sums_ptr, _dq_desc, _batch, _head, _scale = target
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.WIDTH // C.CONSUMERS, 16])
    start = gl.full([64, C.WIDTH // C.CONSUMERS], 0.0, gl.float32, layout=LAYOUT)
    is_first, is_last = _ends_of(first_key, first_query, band, C)
    if is_last and not is_first:
        start = sums_at(sums_ptr, part, start)
    return start


@gluon.jit
def keep_half(target, dq, stage, part, first_query, first_key, band, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer of a program that has a head alone: bring its columns of dQ of a step to their sums, or to dq.

    target: as of start_of_half.
    """
    sums, _sums_ptr, dq_desc, batch, head, scale = target
    NC: gl.constexpr = C.CONSUMERS
    COLUMNS: gl.constexpr = dq.shape[1]
    rooms = reinterpret(stage, dq_desc.dtype, [2 * NC, 1, 1, 64, COLUMNS], dq_desc.layout)
    is_first, is_last = _ends_of(first_key, first_query, band, C)
    keep_or_write(dq, dq_desc, sums, None, (stage.index(OWN), rooms.index(2 * OWN)), part,
                  [batch, head, first_query, OWN * COLUMNS], is_first, is_last, scale)


@gluon.jit
def _ends_of(first_key, first_query, band, C: gl.constexpr):
    """Return whether a tile of keys is the first to add to a step, and whether the last; the last keys come first."""
    is_first = is_last_of(first_key, first_query, band, C)
    return is_first, rank_of(first_key, first_query // QUERIES, band, C) == 0


@gluon.jit
def write_dq(dq, dq_desc, rows, place, scale):
    """Write a step of dq, when the copy engine has read all that this warpgroup gave it before."""
    tma_store_wait(0)
    rows.reshape([64, dq.shape[1]]).store((dq * scale).to(rows.dtype))
    fence_async_shared()
    tma_store(dq_desc, place, rows)


@gluon.jit
def await_sums():
    """Wait until what this warpgroup has set and added has arrived in global memory, for all of its threads."""
    CODE: gl.constexpr = f"cp.async.bulk.wait_group 0; bar.sync {WARPGROUP_BARRIER}, 128; mov.b32 $0, $1;"
    per_thread_asm(CODE)


@gluon.jit
def await_sums_before():
    """Wait until what the tiles of keys before have left of a step's sums has arrived: all copies out but the last.

    For who asks for one copy a step (keep_half), and at a tile's end for two more, of dV and dK
    (hopper_backward.gather_tile). These come between any two tiles, so that a step's sums are never what the last copy
    set or added to, even where a tile begins with the step that the one before has ended with
    (tiles.queries_to_and_fro): there it is dK's. Whoever stores dV and dK otherwise waits for all of them here. The
    warpgroup's other threads know of it behind the next barrier.
    """
    per_thread_asm("cp.async.bulk.wait_group 1; mov.b32 $0, $1;")


@gluon.jit
def hand_over(sums, dq, stage, turn, part, OWN: gl.constexpr, C: gl.constexpr):
    """Add a part of dQ to its sums, or stage it for the writer. part: its number among all. OWN: whose it is.

    sums: a descriptor, or with C.DQ_FROM_REGISTERS a pointer.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    MAKERS: gl.constexpr = C.WIDTH // COLUMNS
    if C.DQ_FROM_REGISTERS:
        add_directly(sums + part.to(gl.int64) * (64 * COLUMNS), dq)
    elif C.DETERMINISTIC:
        tiles, full, empty = stage
        producer_acquire(empty, turn, WRITERS)
        stage_part(tiles.index(turn % WRITERS * MAKERS + OWN), dq)
        consumer_release(full, turn, WRITERS)
    else:
        tma_store_wait(0)
        stage_part(stage.index(OWN), dq)
        tma_add(sums, [part * (COLUMNS // 4), 0], stage.index(OWN))


@gluon.jit
def add_in_order(written, OWN: gl.constexpr, MAKERS: gl.constexpr, C: gl.constexpr):
    """Writer, one warp: add what the consumers stage in every other step of all heads of the group."""
    sums, counters, stage, tile, band, heads, group = written
    tiles, full, empty = stage
    first, head_k, batch = tile
    sq, _sk, _lower, _upper = band
    spans = q_blocks_of(first, band, C)
    _start, _at_head, _masked, steps = spans
    all_steps = (sq + (QUERIES - 1)) // QUERIES
    for turn in range(OWN, group * steps, WRITERS):
        member = turn // steps
        place = q_block_start(turn - member * steps, spans, C) // QUERIES
        step = (batch * heads * group + head_k * group + member) * all_steps + place
        rank = rank_of(first, place, band, C)
        wait_for_tiles_before(counters + step, rank)
        consumer_wait(full, turn, WRITERS)
        add_staged(sums, counters + step, tiles, step, rank, OWN, MAKERS)
        consumer_release(empty, turn, WRITERS)


@gluon.jit
def add_staged(sums, counter, tiles, step, rank, OWN: gl.constexpr, MAKERS: gl.constexpr):
    """Writer: set the sums of a step with the first tile's staged parts, or add others' to them, and count the tile."""
    ROWS: gl.constexpr = sums.block_shape[0]
    for i in gl.static_range(MAKERS):
        place = [(step * MAKERS + i) * ROWS, 0]
        if rank == 0:
            tma_store(sums, place, tiles.index(OWN * MAKERS + i))
        else:
            tma_add(sums, place, tiles.index(OWN * MAKERS + i))
    _let_next_tile_add(counter, rank + 1)
    tma_store_wait(0)


@gluon.jit
def wait_for_tiles_before(counter, rank):
    """Wait until ``rank`` tiles have added to a step. The fence orders the copy engine's accesses behind the wait."""
    _each_lane("{ .reg .pred waits; again: ld.acquire.gpu.global.b32 $0, [$1]; setp.ne.s32 waits, $0, $2; "
               "@waits bra again; fence.proxy.async.global; }", counter, rank)


@gluon.jit
def _let_next_tile_add(counter, tiles):
    """Say how many tiles have added to a step, when all of this one has arrived in global memory.

    The lane that has issued the additions waits for them, the others for it. Gluon's own wait is over when the staged
    tiles have been read.
    """
    _each_lane("{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
               "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; @first st.release.gpu.global.b32 [$1], $2; "
               "mov.b32 $0, $2; }", counter, tiles)


@gluon.jit
def forget(place, COUNT: gl.constexpr):
    """Writer: drop sums from L2 that are read no more, 128 bytes at a time: they need not be written to memory."""
    pointers = place + gl.arange(0, COUNT // 32, layout=ONE_WARP) * 32
    gl.inline_asm_elementwise("discard.global.L2 [$1], 128; mov.b32 $0, 0;", "=r,l", [pointers], dtype=gl.int32,
                              is_pure=False, pack=1)


@gluon.jit
def _each_lane(CODE: gl.constexpr, counter, number):
    """Emit code for each lane of a warp: $1 is a counter's address, $2 a number."""
    pointers = counter + gl.full([32], 0, gl.int32, layout=ONE_WARP)
    numbers = number + gl.full([32], 0, gl.int32, layout=ONE_WARP)
    gl.inline_asm_elementwise(CODE, "=&r,l,r", [pointers, numbers], dtype=gl.int32, is_pure=False, pack=1)
