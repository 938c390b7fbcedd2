"""Backward on Hopper at 129 to 192 columns of q and k and at most 128 of v: a tile of 128 keys a CTA, as below 128.

dK and dV of 64 keys then take 160 registers a thread. So a warpgroup holds all of them, as in d128.py, and
only dS passes between the two; at yet more columns (d256.py) P does, too. The registers that remain
hold S or dP, not both: P is rounded before dP is issued, dS is made of the rounded P, dK takes dS from shared memory,
and the MMA of dQ is issued when P is no longer needed.

The sides of a tile in shared memory are powers of two: the columns of q and k come in a chunk of 128 and one of 64, and
a warpgroup computes half of each for dQ. The producer warp and the types are those of d256.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.hopper.backward.d256 import chunk_of, issue_s_or_dp, load
from tilewise.kernels.hopper.backward.d256_types import (
    Accumulators,
    Args,
    Inputs,
    KVTiles,
    Outputs,
    Smem,
    TileView,
)
from tilewise.kernels.hopper.backward.dq_accum import add_from_registers
from tilewise.kernels.hopper.backward.epilogue import write_gradient
from tilewise.kernels.hopper.backward.masking import hide_probs
from tilewise.kernels.hopper.backward.mmas import SCORE_LAYOUT
from tilewise.kernels.hopper.backward.types import Pipe
from tilewise.kernels.hopper.compat import tma_store_wait
from tilewise.kernels.hopper.mask_ranges import (
    QUERIES,
    phases_of,
    q_block_start,
    q_blocks_of,
)
from tilewise.kernels.hopper.pipeline import (
    CONTIGUOUS,
    allocate_stages,
    consumer_release,
    consumer_wait,
    make_barriers,
    named_barrier_sync,
    optimization_barrier,
)
from tilewise.kernels.hopper.tile_scheduler import kv_tile_at

_MULTIPLY = """{
    .reg .b16 low, high;
    .reg .f32 first, second;
    mov.b32 {low, high}, $1;
    cvt.f32.KIND first, low;
    cvt.f32.KIND second, high;
    mul.f32 first, first, $2;
    mul.f32 second, second, $3;
    cvt.rn.KINDx2.f32 $0, second, first;
}"""
MULTIPLY_BF16, MULTIPLY_F16 = (gl.constexpr(_MULTIPLY.replace("KIND", kind)) for kind in ("bf16", "f16"))


@gluon.jit
def multiply_rounded(probs, dprobs, DTYPE: gl.constexpr):
    """Return P of 16 bits times dP of 32, rounded to 16 bits.

    LLVM would convert P to 32 bits as soon as it is there, and a block has no registers for that.
    """
    if DTYPE == gl.bfloat16:
        product = gl.inline_asm_elementwise(MULTIPLY_BF16, "=r,r,r,r", [probs, dprobs], dtype=gl.bfloat16,
                                            is_pure=False, pack=2)
    else:
        product = gl.inline_asm_elementwise(MULTIPLY_F16, "=r,r,r,r", [probs, dprobs], dtype=gl.float16,
                                            is_pure=False, pack=2)
    return product


@gluon.jit
def issue_dq(k_tiles, dscores_tiles, ds_stage, resident, WG: gl.constexpr, CHUNK: gl.constexpr, C: gl.constexpr):
    """Issue a warpgroup's half of the columns of a chunk of dQ = dS·K; ds_stage: the tile of the first 64 keys' dS."""
    COLUMNS: gl.constexpr = C.D[CHUNK] // 2
    dq = gl.full([64, COLUMNS], 0.0, gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
    for i in gl.static_range(2):
        k = chunk_of(k_tiles, resident + i, CHUNK).slice(WG * COLUMNS, COLUMNS, 1)
        dq = warpgroup_mma(dscores_tiles.index(ds_stage + i).permute((1, 0)), k, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def finish_block(dv_pending, acc, smem, count, ds_stage, resident, accum_ptr, WG: gl.constexpr, C: gl.constexpr):
    """Compute a warpgroup's part of dQ, and dK, of a block whose dS is in shared memory; the MMA of dV is in flight.

    accum_ptr: where the block's dQ accumulator begins. Returns the accumulators.
    """
    stage = count % C.Q_STAGES
    dv = warpgroup_mma_wait(0, deps=(dv_pending,))  # the registers of P are free before those of dQ are taken
    consumer_release(smem.dout.empty, count, C.DOUT_STAGES)
    dq_pending = issue_dq(smem.kv.k_tiles, smem.dscores, ds_stage, resident, WG, 0, C)
    dq_rest_pending = issue_dq(smem.kv.k_tiles, smem.dscores, ds_stage, resident, WG, 1, C)
    dscores = smem.dscores.index(ds_stage + WG)
    dk_pending = warpgroup_mma(dscores, chunk_of(smem.q.tiles, stage, 0), acc.dk, is_async=True)
    dk_rest_pending = warpgroup_mma(dscores, chunk_of(smem.q.tiles, stage, 1), acc.dk_rest, is_async=True)
    dq = warpgroup_mma_wait(4, deps=(dq_pending,))
    add_from_registers(accum_ptr + WG * 32 * C.D[0], dq)
    dq_rest = warpgroup_mma_wait(2, deps=(dq_rest_pending,))
    add_from_registers(accum_ptr + (64 * C.D[0] + WG * 32 * C.D[1]), dq_rest)
    dk, dk_rest = warpgroup_mma_wait(0, deps=(dk_pending, dk_rest_pending))
    consumer_release(smem.q.empty, count, C.Q_STAGES)
    return Accumulators(dk, dk_rest, dv)


@gluon.jit
def attend_blocks(begin, end, count, acc, first_row, view, args, smem, WG: gl.constexpr, MASKED: gl.constexpr,
                  C: gl.constexpr):
    """Blocks ``begin`` to ``end`` of one query head: add to dK and dV in registers, and to dQ in memory.

    count: the Q pipe's iteration; first_row: the head's first row of the dQ accumulator. Returns the next iteration,
    and the accumulators.
    """
    kv, q_pipe, dout_pipe, row_stats, blocks = smem.kv, smem.q, smem.dout, smem.row_stats, view.blocks
    DTYPE: gl.constexpr = kv.k_tiles[0].dtype
    ROW: gl.constexpr = gl.SliceLayout(0, SCORE_LAYOUT)
    WIDTH: gl.constexpr = C.D[0] + C.D[1]
    unmasked = blocks.start + (blocks.upper_boundary - blocks.boundary) * QUERIES
    for step in range(begin, end):
        # Where tiles lie is computed anew in each block, and not kept in registers.
        resident = optimization_barrier(0)
        stage, dout_stage = count % C.Q_STAGES, count % C.DOUT_STAGES
        if MASKED:
            first_query = q_block_start(step, blocks, C)
        else:  # behind those at the first queries
            first_query = unmasked + step * QUERIES
        consumer_wait(q_pipe.full, count, C.Q_STAGES)
        scores_pending = issue_s_or_dp(kv.k_tiles, q_pipe.tiles, stage, resident + WG)
        scores = warpgroup_mma_wait(0, deps=(scores_pending,))
        probs = gl.exp2(scores * args.scales.scale_log2 - row_stats.index(2 * stage).load(ROW)[None, :])
        if MASKED:
            probs = hide_probs(probs, first_query, view.key, view.bounds, C)
        left_probs = gl.convert_layout(probs.to(DTYPE), gl.DotOperandLayout(0, acc.dv.type.layout, 2))
        delta = gl.full([64, QUERIES], 0.0, gl.float32, layout=SCORE_LAYOUT)
        delta += row_stats.index(2 * stage + 1).load(ROW)[None, :]
        consumer_wait(dout_pipe.full, count, C.DOUT_STAGES)
        dprobs_pending = issue_s_or_dp(kv.v_tiles, dout_pipe.tiles, dout_stage, resident + WG, -delta)
        dv_pending = warpgroup_mma(left_probs, chunk_of(dout_pipe.tiles, dout_stage, 0), acc.dv, is_async=True)
        dprobs = warpgroup_mma_wait(1, deps=(dprobs_pending,))
        ds_stage = (count & 1) * 2 + resident
        smem.dscores.index(ds_stage + WG).store(
            multiply_rounded(gl.convert_layout(left_probs, SCORE_LAYOUT), dprobs, DTYPE))
        fence_async_shared()
        named_barrier_sync(2)
        accum_ptr = args.accum_ptr + (first_row + first_query).to(gl.int64) * WIDTH
        acc = finish_block(dv_pending, acc, smem, count, ds_stage, resident, accum_ptr, WG, C)
        count += 1
    return count, acc


@gluon.jit
def attend(args, smem, WG: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: dK and dV of 64 keys, and its columns of dQ of every block."""
    kv, outputs, tile, bounds, group = smem.kv, args.outputs, args.tile, args.bounds, args.group
    FIRST: gl.constexpr = C.D[0]
    dk = gl.full([64, C.D[0]], 0.0, gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D[0], 16]))
    dk_rest = gl.full([64, C.D[1]], 0.0, gl.float32,
                      layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D[1], 16]))
    dv = gl.full([64, C.DV[0]], 0.0, gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV[0], 16]))
    acc = Accumulators(dk, dk_rest, dv)
    blocks = q_blocks_of(tile.first, bounds, C)
    key = tile.first + WG * 64
    ends = phases_of(key, blocks, bounds, C)
    view = TileView(key, blocks, bounds)
    rows = (bounds.sq + (QUERIES - 1)) // QUERIES * QUERIES
    for i in gl.static_range(4):
        mbarrier.wait(kv.full.index(i), 0)
    count = 0
    for member in range(group):
        first_row = (tile.batch * args.heads * group + tile.head * group + member) * rows
        for phase in gl.static_range(2):
            count, acc = attend_blocks(ends[phase], ends[phase + 1], count, acc, first_row, view, args, smem, WG,
                                       phase != 1, C)
    write_gradient(outputs.dv, None, kv.v_tiles[0].index(WG), acc.dv, (tile.batch, tile.head, key, 0), 64, C)
    named_barrier_sync(2)  # the other consumer's dQ has read these keys
    write_gradient(outputs.dk[0], None, kv.k_tiles[0].index(WG), acc.dk * args.scales.gradient,
                   (tile.batch, tile.head, key, 0), 64, C)
    write_gradient(outputs.dk[1], None, kv.k_tiles[1].index(WG), acc.dk_rest * args.scales.gradient,
                   (tile.batch, tile.head, key, FIRST), 64, C)
    tma_store_wait(0)


@gluon.jit
def hopper_backward_d192_kernel(q_desc, q_rest, k_desc, k_rest, v_desc, dout_desc, lse_ptr, delta_ptr, dk_desc,
                                dk_rest, dv_desc, accum_ptr, numbers, C: gl.constexpr):
    """Compute dk and dv, and add to the dQ accumulator, which must be zero at first.

    Grid: (tiles · heads of k · batches,). Descriptors of both chunks of columns of q, k and dk. numbers: a
    BackwardNumbers.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    DSCORES_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, QUERIES], DTYPE)
    inputs = Inputs((q_desc, q_rest), (k_desc, k_rest), (v_desc,), (dout_desc,), lse_ptr, delta_ptr)
    k_tiles = allocate_stages(inputs.k, 2)
    v_tiles = allocate_stages(inputs.v, 2)
    q_tiles = allocate_stages(inputs.q, C.Q_STAGES)
    dout_tiles = allocate_stages(inputs.dout, C.DOUT_STAGES)
    dscores_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, QUERIES], DSCORES_LAYOUT)
    row_stats = gl.allocate_shared_memory(gl.float32, [2 * C.Q_STAGES, QUERIES], CONTIGUOUS)
    kv = KVTiles(k_tiles, v_tiles, make_barriers(4, 1))
    q_pipe = Pipe(q_tiles, make_barriers(C.Q_STAGES, 2), make_barriers(C.Q_STAGES, 2))
    dout_pipe = Pipe(dout_tiles, make_barriers(C.DOUT_STAGES, 1), make_barriers(C.DOUT_STAGES, 2))
    fence_async_shared()
    grid = numbers.grid
    tile = kv_tile_at(gl.program_id(0), grid, C)
    args = Args(inputs, Outputs((dk_desc, dk_rest), dv_desc), tile, grid.heads, numbers.bounds, numbers.group,
                numbers.scales, accum_ptr)
    smem = Smem(kv, q_pipe, dout_pipe, row_stats, (), dscores_tiles)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gl.warp_specialize([
        (attend, (args, smem, ZERO, C)), (attend, (args, smem, ONE, C)), (load, (args, smem, C)),
    ], [4, 1], [240, 24])
