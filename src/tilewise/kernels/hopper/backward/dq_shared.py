"""dQ on Hopper where CTAs share a head: the warpgroup that makes it stages parts, writer warps add them in order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.hopper.backward.dq_accum import (
    WRITERS,
    accumulate_staged,
    add_staged,
    discard_from_l2,
    semaphore_wait,
    stage_to_smem,
    write_dq,
)
from tilewise.kernels.hopper.backward.kv_tile_assignment import tile_of_cta, tiles_of_cta
from tilewise.kernels.hopper.compat import tma_load
from tilewise.kernels.hopper.mask_ranges import (
    QUERIES,
    is_last_of,
    q_block_start,
    q_blocks_of,
    rank_of,
)
from tilewise.kernels.hopper.pipeline import consumer_release, consumer_wait


@gluon.jit
def semaphores_behind(accum_ptr, grid, blocks, WIDTH: gl.constexpr):
    """Return where the semaphores are, one for each of ``blocks`` blocks of a head of k: behind the accumulator."""
    # The zero changes nothing but on the CPU: there a launch's numbers are Python's, and have no ``to``.
    all_blocks = gl.program_id(0) * 0 + grid.batches * grid.heads * blocks
    return accum_ptr + all_blocks.to(gl.int64) * (64 * WIDTH)


@gluon.jit
def stage_or_write(dq, target, dq_stage, count, place, ends):
    """Stage a part of dQ for the writer; or add a block's last part to the accumulator that it loaded, and write dq.

    No stage is free at first: the writer frees each (``accumulate_shared``), so the wait is a consumer's.
    """
    parts = dq_stage.parts
    consumer_wait(parts.empty, count, WRITERS)
    tile = parts.tiles.index(count % WRITERS)
    if ends.is_last:
        if not ends.is_first:
            dq = add_staged(tile, dq)
        consumer_release(parts.full, count, WRITERS)
        write_dq(dq, target.dq_desc, dq_stage.dq_rows, place, target.scale)
    else:
        stage_to_smem(tile, dq)
        consumer_release(parts.full, count, WRITERS)


@gluon.jit
def accumulate_shared(args, parts, WRITER: gl.constexpr, C: gl.constexpr):
    """Writer, one warp, of a CTA that shares its heads: add every other part of dQ that ``make_dq`` stages.

    Of a block's last tile it loads the accumulator instead, once the tiles before have added to it. The empty barrier
    of a stage says that the part may be staged, or that the accumulator is there.
    """
    target, grid, bounds, group = args.dq, args.grid, args.bounds, args.group
    blocks_of_head = (bounds.sq + (QUERIES - 1)) // QUERIES
    semaphores = semaphores_behind(target.accum_ptr, grid, blocks_of_head * group, C.WIDTH)
    count = 0
    for tile_count in range(tiles_of_cta(grid, C)):
        tile = tile_of_cta(tile_count, grid, C)
        blocks = q_blocks_of(tile.first, bounds, C)
        for member in range(group):
            head_row = (tile.batch * grid.heads + tile.head) * group + member
            for step in range(blocks.count):
                if count % WRITERS == WRITER:
                    query = q_block_start(step, blocks, C)
                    part = head_row * blocks_of_head + query // QUERIES
                    rank = rank_of(tile.first, query // QUERIES, bounds, C)
                    is_last = is_last_of(tile.first, query, bounds, C)
                    if is_last & (rank > 0):
                        semaphore_wait(semaphores + part, rank)
                        mbarrier.expect(parts.empty.index(WRITER), target.accum.block_type.nbytes)
                        tma_load(target.accum, [part * (C.WIDTH // 4), 0], parts.empty.index(WRITER),
                                 parts.tiles.index(WRITER))
                    else:
                        consumer_release(parts.empty, count, WRITERS)
                    if is_last:
                        consumer_wait(parts.full, count, WRITERS)
                        if rank > 0:
                            discard_from_l2(target.accum_ptr + part.to(gl.int64) * (64 * C.WIDTH), 64 * C.WIDTH)
                    else:
                        semaphore_wait(semaphores + part, rank)
                        consumer_wait(parts.full, count, WRITERS)
                        accumulate_staged(target.accum, semaphores + part, parts.tiles, part, rank, WRITER, 1)
                count += 1
