"""How the backward kernel's parts of dQ reach the dQ accumulator in global memory (maths.md, eq. 10).

A block of queries gets from each tile of keys a part of each warpgroup that makes dQ. The warpgroup adds it itself, by
atomics from registers (C.DQ_FROM_REGISTERS) or by way of shared memory, from which TMA adds it; or, for a fixed order
(C.DETERMINISTIC), it stages the part for warps that do nothing else, and waits for these only when they are two blocks
behind. These writers add in each block tile of keys after tile of keys, so that every bit of dQ is the same on every
run; the first tile sets the accumulator. A semaphore of the block counts the tiles that have added their parts. A tile
waits for earlier ones alone, whose CTAs have lower numbers and started before: they need not all be running at once.

A tile that has all keys of a packed sequence writes dq itself, from registers (C.WRITES_DQ): the accumulator of such a
sequence is neither set to 0 nor read.

A CTA that has all tiles of a head sets the accumulator, adds to it, and writes dq with the last part itself; where CTAs
share a head, writers load what the last part is added to.

A part has 64 queries and the columns of dQ that one warpgroup makes; its number is that of the block, times the
warpgroups that make dQ, plus the warpgroup's. The accumulator has rows of 256 numbers, the longest that a TMA box has:
a part of c columns is c / 4 of them. ``tma_store_wait`` waits until shared memory has been read, ``await_accum`` until
global memory has been written.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.kernels.hopper.backward.types import Pipe
from tilewise.kernels.hopper.compat import reinterpret, tma_add, tma_store, tma_store_wait
from tilewise.kernels.hopper.mask_ranges import (
    QUERIES,
    is_last_of,
    q_block_start,
    q_blocks_of,
    rank_of,
)
from tilewise.kernels.hopper.pipeline import (
    ONE_WARP,
    WARPGROUP_BARRIER,
    consumer_release,
    consumer_wait,
    make_barriers,
    per_thread_asm,
    producer_acquire,
)
from tilewise.kernels.hopper.varlen import dq_blocks_of, kv_tile_of, query_rows_of

# Writers take every other block, each with a stage of its own: an addition may last as long as two blocks.
WRITERS: gl.constexpr = gl.constexpr(2)


class DQTarget(NamedTuple):
    """Where dQ goes. accum: the accumulator's descriptor, or with C.DQ_FROM_REGISTERS a pointer to it.

    accum_ptr, semaphores: the same pointer, the kernel's workspace_ptr. Where CTAs own heads it is accum_ptr, the
    accumulator as it lies in memory; else, with C.DETERMINISTIC, semaphores, an int32 for each block of a query head.
    dq_desc: where CTAs own heads, else None. scale: what dq is multiplied by. rows: with C.WRITES_DQ, dq as a
    StridedRows.
    """

    accum: Any
    accum_ptr: Any
    semaphores: Any
    dq_desc: Any
    scale: Any
    rows: Any = None


class Ends(NamedTuple):
    """Whether a tile of keys is the first to add to a block of queries, and whether it is the last."""

    is_first: Any
    is_last: Any


class DQStage(NamedTuple):
    """Shared memory for a part of dQ: in float32 on its way to the accumulator, and in dq's dtype.

    parts: a tile, or with C.CTAS_PER_HEAD > 1 a Pipe. In d128.py both are the same memory.
    """

    parts: Any
    dq_rows: Any


@gluon.jit
def make_stages(accum, MAKERS: gl.constexpr, C: gl.constexpr):
    """Allocate the stages of parts of dQ: for each writer a tile of each warpgroup that makes dQ."""
    tiles = gl.allocate_shared_memory(gl.float32, [WRITERS * MAKERS, C.WIDTH // (4 * MAKERS), 256], accum.layout)
    return Pipe(tiles, make_barriers(WRITERS, MAKERS), make_barriers(WRITERS, 1))


@gluon.jit
def thread_major(rows):
    """Order 64 rows as a warpgroup holds them: each thread's numbers four by four, neighbours in memory in a warp."""
    COLUMNS: gl.constexpr = rows.shape[1]
    return rows.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))


@gluon.jit
def row_major(flat, like):
    """Undo ``thread_major``: order what lies so as the part of dQ ``like`` is."""
    COLUMNS: gl.constexpr = like.shape[1]
    rows = flat.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, COLUMNS])
    return gl.convert_layout(rows, like.type.layout)


@gluon.jit
def add_from_registers(accum_ptr, dq):
    """Add a part of dQ to the accumulator, which begins at ``accum_ptr`` for it, by atomics."""
    flat = thread_major(dq).reshape([64 * dq.shape[1]])
    offsets = gl.arange(0, 64 * dq.shape[1], layout=flat.type.layout)
    gl.atomic_add(accum_ptr + offsets, flat, sem="relaxed")


@gluon.jit
def stage_to_smem(staged, dq):
    """Write a part of dQ, thread-major, to shared memory, where TMA takes it from."""
    staged.store(thread_major(dq).reshape(staged.shape))
    fence_async_shared()


@gluon.jit
def write_dq_rows(target, dq, metadata, place, width):
    """Write a part of dq from registers, where its tile has all keys of a packed sequence.

    place: query head, first query of the sequence, first column. width: dq's columns.
    """
    head, query, column = place
    LAYOUT: gl.constexpr = dq.type.layout
    first_row, rows = query_rows_of(metadata)
    queries = query + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, dq.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    lines = head.to(gl.int64) * target.rows.stride_h + (first_row + queries).to(gl.int64) * target.rows.stride_s
    inside = (queries < rows)[:, None] & (columns // 8 < width // 8)[None, :]  # eight columns are 16 bytes
    gl.store((target.rows.ptr + gl.multiple_of(lines, 8))[:, None] + columns[None, :],
             (dq * target.scale).to(target.rows.ptr.dtype.element_ty), mask=inside)


@gluon.jit
def accumulate_or_write_rows(args, dq, smem, count, head, first_query, writes_dq, WG: gl.constexpr, C: gl.constexpr):
    """Add a consumer's columns of dQ to the accumulator, or with C.WRITES_DQ write them where the tile does."""
    if C.WRITES_DQ:
        if writes_dq:
            write_dq_rows(args.dq, dq, smem.metadata, (head.head, first_query, WG * dq.shape[1]),
                          args.inputs.q.shape[3])
        else:
            accumulate(args.dq.accum, dq, smem.dq_stage, count, head.first_part + first_query // 32, WG, C)
    else:
        accumulate(args.dq.accum, dq, smem.dq_stage, count, head.first_part + first_query // 32, WG, C)


@gluon.jit
def write_blind_rows(target, metadata, blocks, head, width, WG: gl.constexpr, C: gl.constexpr):
    """Write 0 to a consumer's columns of dq where a sequence's only tile has no block of queries."""
    COLUMNS: gl.constexpr = C.WIDTH // C.CONSUMERS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    _first_row, rows = query_rows_of(metadata)
    for query in range(0, rows, QUERIES):
        if (query < blocks.start) | (query >= blocks.start + blocks.count * QUERIES):
            write_dq_rows(target, gl.full([64, COLUMNS], 0.0, gl.float32, layout=LAYOUT), metadata,
                          (head, query, WG * COLUMNS), width)


@gluon.jit
def load_accum(accum_ptr, part, like):
    """Load the accumulator of a part of dQ, which has the form of ``like``. Past L1: it was added to in L2."""
    COLUMNS: gl.constexpr = like.shape[1]
    LAYOUT: gl.constexpr = thread_major(like).reshape([64 * COLUMNS]).type.layout
    offsets = gl.arange(0, 64 * COLUMNS, layout=LAYOUT)
    flat = gl.load(accum_ptr + part.to(gl.int64) * (64 * COLUMNS) + offsets, cache_modifier=".cg")
    return row_major(flat, like)


@gluon.jit
def add_staged(staged, dq):
    """Return a part of dQ plus the accumulator that TMA has loaded to shared memory, and may load there again."""
    accum = staged.load(thread_major(dq).reshape(staged.shape).type.layout)
    fence_async_shared()
    return dq + row_major(accum, dq)


@gluon.jit
def accumulate_or_write(dq, target, stage, part, place, ends, LOADS: gl.constexpr):
    """Set the accumulator of a part of dQ, add to it, or, when the last tile's part is there, write dq.

    part: its number in the accumulator; place: of its 64 rows in dq. LOADS: the last tile's part is still to be added
    to the accumulator; else its MMA has begun from it.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    if ends.is_last:
        if LOADS:
            if not ends.is_first:
                dq += load_accum(target.accum_ptr, part, dq)
        write_dq(dq, target.dq_desc, stage.dq_rows, place, target.scale)
    else:
        tma_store_wait(0)
        stage_to_smem(stage.parts, dq)
        if ends.is_first:
            tma_store(target.accum, [part * (COLUMNS // 4), 0], stage.parts)
        else:
            tma_add(target.accum, [part * (COLUMNS // 4), 0], stage.parts)


@gluon.jit
def start_of_part(target, part, first_query, first_key, bounds, C: gl.constexpr):
    """Consumer of a head-persistent CTA: return what the MMA of its columns of dQ begins from.

    That is the accumulator where this tile of keys is the last to add to it, else zeros.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.WIDTH // C.CONSUMERS, 16])
    start = gl.full([64, C.WIDTH // C.CONSUMERS], 0.0, gl.float32, layout=LAYOUT)
    ends = _ends_of(first_key, first_query, bounds, C)
    if ends.is_last and not ends.is_first:
        start = load_accum(target.accum_ptr, part, start)
    return start


@gluon.jit
def accumulate_or_write_part(target, dq, dq_stage, part, head, first_query, first_key, bounds, WG: gl.constexpr,
                             C: gl.constexpr):
    """Consumer of a head-persistent CTA: bring its columns of dQ to the accumulator, or to dq."""
    NC: gl.constexpr = C.CONSUMERS
    COLUMNS: gl.constexpr = dq.shape[1]
    TILES: gl.constexpr = 1 if target.dq_desc.dtype == gl.float32 else 2  # of dq, where one of float32 is staged
    dq_rows = reinterpret(dq_stage, target.dq_desc.dtype, [TILES * NC, 1, 1, 64, COLUMNS], target.dq_desc.layout)
    ends = _ends_of(first_key, first_query, bounds, C)
    accumulate_or_write(dq, target, DQStage(dq_stage.index(WG), dq_rows.index(TILES * WG)), part,
                        [head.batch, head.head, first_query, WG * COLUMNS], ends, False)


@gluon.jit
def _ends_of(first_key, first_query, bounds, C: gl.constexpr):
    """Return which ends of a block's additions a tile of keys is in d128.py.

    Its head-persistent CTAs begin with the last keys; those of d64.py with the first.
    """
    is_first = is_last_of(first_key, first_query, bounds, C)
    return Ends(is_first, rank_of(first_key, first_query // QUERIES, bounds, C) == 0)


@gluon.jit
def split_columns(rows):
    """Return the lower and the upper half of the columns of 64 rows."""
    HALF: gl.constexpr = rows.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    low, high = rows.reshape([64, 2, HALF]).permute((0, 2, 1)).split()
    return gl.convert_layout(low, LAYOUT), gl.convert_layout(high, LAYOUT)


@gluon.jit
def write_dq(dq, dq_desc, dq_rows, place, scale):
    """Write 64 rows of dq, when TMA has read all that this warpgroup gave it before.

    A tile that has half of the columns, as one of float32 may, is used for one half behind the other.
    """
    if dq_desc.block_type.shape[3] < dq.shape[1]:
        batch, head, row, column = place
        halves = split_columns(dq)
        for i in gl.static_range(2):
            write_dq(halves[i], dq_desc, dq_rows, [batch, head, row, column + i * halves[i].shape[1]], scale)
    else:
        tma_store_wait(0)
        dq_rows.reshape([64, dq.shape[1]]).store((dq * scale).to(dq_rows.dtype))
        fence_async_shared()
        tma_store(dq_desc, place, dq_rows)


@gluon.jit
def await_accum():
    """Wait until what this warpgroup has set and added has arrived in global memory, for all of its threads."""
    CODE: gl.constexpr = f"cp.async.bulk.wait_group 0; bar.sync {WARPGROUP_BARRIER}, 128; mov.b32 $0, $1;"
    per_thread_asm(CODE)


@gluon.jit
def await_accum_but_last():
    """Wait until all that this warpgroup has set and added, but for the last copy, has arrived in global memory.

    That is enough for what the tiles of keys before have left of a block, if a warpgroup issues one copy a block
    (accumulate_or_write_part), and at a tile's end two more, of dV and dK, or two of each (d128.attend_tile). They come
    between any two tiles, so that a block's accumulator is never what the last copy set or added to, even where a tile
    begins with the block that the one before has ended with (mask_ranges.q_block_start_serpentine): there the last copy
    is dK's. A kernel that stores dV and dK otherwise must wait for all copies here. The warpgroup's other threads know
    of it behind the next barrier.
    """
    per_thread_asm("cp.async.bulk.wait_group 1; mov.b32 $0, $1;")


@gluon.jit
def accumulate(accum, dq, dq_stage, count, part, WG: gl.constexpr, C: gl.constexpr):
    """Add a part of dQ to the accumulator, or stage it for the writer. part: its number there. WG: whose it is.

    accum: a descriptor, or with C.DQ_FROM_REGISTERS a pointer.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    MAKERS: gl.constexpr = C.WIDTH // COLUMNS
    if C.DQ_FROM_REGISTERS:
        add_from_registers(accum + part.to(gl.int64) * (64 * COLUMNS), dq)
    elif C.DETERMINISTIC:
        producer_acquire(dq_stage.empty, count, WRITERS)
        stage_to_smem(dq_stage.tiles.index(count % WRITERS * MAKERS + WG), dq)
        consumer_release(dq_stage.full, count, WRITERS)
    else:
        tma_store_wait(0)
        stage_to_smem(dq_stage.index(WG), dq)
        tma_add(accum, [part * (COLUMNS // 4), 0], dq_stage.index(WG))


@gluon.jit
def accumulate_in_order(args, dq_stage, metadata, WRITER: gl.constexpr, MAKERS: gl.constexpr, C: gl.constexpr):
    """Writer, one warp: add what MAKERS warpgroups stage in every other block of all heads of the group.

    metadata: of the tile, where lengths are data (varlen.py).
    """
    target, group = args.dq, args.group
    tile, bounds = kv_tile_of(metadata, args.tile, args.bounds, 1, C)
    blocks = q_blocks_of(tile.first, bounds, C)
    blocks_of_head, first_block = dq_blocks_of(metadata, args.bounds.sq, args.num_sequences, 1, C)
    for count in range(WRITER, group * blocks.count, WRITERS):
        member = count // blocks.count
        m_block = q_block_start(count - member * blocks.count, blocks, C) // QUERIES
        head = tile.batch * args.grid.heads * group + tile.head * group + member
        number = head * blocks_of_head + first_block + m_block
        rank = rank_of(tile.first, m_block, bounds, C)
        semaphore_wait(target.semaphores + number, rank)
        consumer_wait(dq_stage.full, count, WRITERS)
        accumulate_staged(target.accum, target.semaphores + number, dq_stage.tiles, number, rank, WRITER, MAKERS)
        consumer_release(dq_stage.empty, count, WRITERS)


@gluon.jit
def accumulate_staged(accum, semaphore, tiles, block, rank, WRITER: gl.constexpr, MAKERS: gl.constexpr):
    """Writer: set a block's accumulator to the first tile's staged parts, or add others' to it, and count the tile."""
    ROWS: gl.constexpr = accum.block_shape[0]
    for i in gl.static_range(MAKERS):
        place = [(block * MAKERS + i) * ROWS, 0]
        if rank == 0:
            tma_store(accum, place, tiles.index(WRITER * MAKERS + i))
        else:
            tma_add(accum, place, tiles.index(WRITER * MAKERS + i))
    _semaphore_release(semaphore, rank + 1)
    tma_store_wait(0)


@gluon.jit
def semaphore_wait(semaphore, rank):
    """Wait until ``rank`` tiles have added to a block. The fence orders TMA's accesses behind the wait."""
    _each_lane("{ .reg .pred waits; again: ld.acquire.gpu.global.b32 $0, [$1]; setp.ne.s32 waits, $0, $2; "
               "@waits bra again; fence.proxy.async.global; }", semaphore, rank)


@gluon.jit
def _semaphore_release(semaphore, tiles):
    """Publish how many tiles have added to a block, when all of this one has arrived in global memory.

    The lane that has issued the additions waits for them, the others for it. Gluon's own wait is over when the staged
    tiles have been read.
    """
    _each_lane("{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
               "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; @first st.release.gpu.global.b32 [$1], $2; "
               "mov.b32 $0, $2; }", semaphore, tiles)


@gluon.jit
def discard_from_l2(accum_ptr, COUNT: gl.constexpr):
    """Writer: drop COUNT floats that are read no more from L2, 128 bytes at a time: no write to memory is needed."""
    pointers = accum_ptr + gl.arange(0, COUNT // 32, layout=ONE_WARP) * 32
    gl.inline_asm_elementwise("discard.global.L2 [$1], 128; mov.b32 $0, 0;", "=r,l", [pointers], dtype=gl.int32,
                              is_pure=False, pack=1)


@gluon.jit
def _each_lane(CODE: gl.constexpr, semaphore, number):
    """Emit code for each lane of a warp: $1 is a semaphore's address, $2 a number."""
    pointers = semaphore + gl.full([32], 0, gl.int32, layout=ONE_WARP)
    numbers = number + gl.full([32], 0, gl.int32, layout=ONE_WARP)
    gl.inline_asm_elementwise(CODE, "=&r,l,r", [pointers, numbers], dtype=gl.int32, is_pure=False, pack=1)
