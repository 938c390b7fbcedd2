"""dQ on Hopper at head dims above 128, in a kernel of its own: a tile of queries is resident, keys stream past.

Each of two warpgroups has 64 queries and all columns of their dQ in registers, 128 a thread at 256 columns. Scores have
queries as rows here, so that dS is a left operand of dQ += dS·K from registers, and nothing passes between the
warpgroups (maths.md, eq. 10): the exponentials of one run beside the MMAs of the other. One producer warp loads. K of a
block is released when its dQ is done, V when its dP is.

Q, dO, K and V come in chunks of columns as in d256.py. Where lengths are data, keys of other sequences are zeroed in
their tile, and what comes of rows that are no query, or see no key, is not written, or as 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from tilewise.kernels.hopper.backward.d256 import (
    clear_chunks,
    issue_accumulate,
    issue_s_or_dp,
    load_chunks,
    write_gradients,
    zeros_of,
)
from tilewise.kernels.hopper.backward.d256_types import DQArgs, DQSmem, Inputs, QTiles, QView
from tilewise.kernels.hopper.backward.dropout import score_gradient
from tilewise.kernels.hopper.backward.mmas import SCORE_LAYOUT
from tilewise.kernels.hopper.backward.producers import fetch_row_stats, in_base_2
from tilewise.kernels.hopper.backward.q_tile import QTile, blank_blind, has_query_rows, locate_queries, q_tile_of
from tilewise.kernels.hopper.backward.types import Pipe
from tilewise.kernels.hopper.dropout import draws_of, drop
from tilewise.kernels.hopper.mask_plan import MaskPlan, bits_of_rows, bits_of_step, keep_by_bits, kv_blocks_in_list
from tilewise.kernels.hopper.mask_ranges import first_block_is_hidden, kv_block_start, kv_blocks_of, masked_blocks_of
from tilewise.kernels.hopper.pipeline import (
    allocate_stages,
    as_tuple,
    consumer_release,
    consumer_wait,
    make_barriers,
    optimization_barrier,
    producer_acquire,
)
from tilewise.kernels.hopper.products import finish
from tilewise.kernels.hopper.softmax import hide, pack_pairs, tanh_of, times_tanh_derivative
from tilewise.kernels.hopper.tile_scheduler import KVTile, tile_at
from tilewise.kernels.hopper.varlen import store_tile_metadata

K_STAGES: gl.constexpr = gl.constexpr(2)  # tiles of K in flight; of V one: two were no faster where they fit


@gluon.jit
def kv_blocks_of_tile(tile, bounds, plan, C: gl.constexpr):
    """Return the blocks of keys that a tile of queries sees, by the mask's bounds or by its list."""
    if C.MASK_PLAN:
        return kv_blocks_in_list(plan, tile, C)
    else:
        return kv_blocks_of(tile.first, bounds, C)


@gluon.jit
def hide_scores(scores, step, words, view, C: gl.constexpr):
    """Set the scores of a step's pairs that do not take part to -inf, by the mask's bounds or by bits."""
    if C.MASK_PLAN:
        return keep_by_bits(scores, words, float("-inf"))
    else:
        return hide(scores, view.row, kv_block_start(step, view.blocks, C), view.bounds, C)


@gluon.jit
def load_block(descs, pipe, step, blocks, place, stop, STAGES: gl.constexpr, C: gl.constexpr):
    """Producer: load K or V of a block of keys. place: batch, head, row of key 0; stop: the sequence's keys.

    Where lengths are data, keys from ``stop`` on are zeroed. They are in one block, a tile's first one.
    """
    producer_acquire(pipe.empty, step, STAGES)
    batch, head, row = place
    stage = step % STAGES
    key = kv_block_start(step, blocks, C)
    arrival = stage
    if C.VARLEN:
        clears = key + 64 > stop
        arrival = gl.where(clears, STAGES, stage)
    load_chunks(descs, pipe.tiles, stage, (batch, head, row + key), pipe.full.index(arrival))
    if C.VARLEN:
        if clears:
            mbarrier.wait(pipe.full.index(STAGES), 0)
            clear_chunks(pipe.tiles, stage, 0, gl.maximum(stop - key, 0))
            fence_async_shared()
            mbarrier.arrive(pipe.full.index(stage), count=1)


@gluon.jit
def load(args, smem, C: gl.constexpr):
    """Producer, one warp: load the queries and their dO once, then the keys and values that they see."""
    inputs = args.inputs
    q_tiles, dout_tiles, full = smem.q
    tile, bounds = q_tile_of(smem.metadata, args.tile, args.bounds, 1, C)
    batch, head, row = tile.batch, tile.head, tile.row_q + tile.first
    of_keys = (batch, head // args.group, tile.row_k)
    blocks = kv_blocks_of_tile(tile, bounds, args.plan, C)
    load_chunks(inputs.q, q_tiles, 0, (batch, head, row), full.index(0))
    load_block(inputs.k, smem.k, 0, blocks, of_keys, bounds.sk, K_STAGES, C)
    load_chunks(inputs.q, q_tiles, 1, (batch, head, row + 64), full.index(1))
    load_chunks(inputs.dout, dout_tiles, 0, (batch, head, row), full.index(2))
    load_block(inputs.v, smem.v, 0, blocks, of_keys, bounds.sk, 1, C)
    load_chunks(inputs.dout, dout_tiles, 1, (batch, head, row + 64), full.index(3))
    for step in range(1, blocks.count):
        load_block(inputs.k, smem.k, step, blocks, of_keys, bounds.sk, K_STAGES, C)
        load_block(inputs.v, smem.v, step, blocks, of_keys, bounds.sk, 1, C)


@gluon.jit
def accumulate_blocks(begin, end, dq, view, smem, scales, WG: gl.constexpr, MASKED: gl.constexpr,
                      C: gl.constexpr):
    """Blocks ``begin`` to ``end`` of keys: add to dQ of 64 queries."""
    q_tiles, dout_tiles, _full = smem.q
    k_pipe, v_pipe = smem.k, smem.v
    for step in range(begin, end):
        resident = optimization_barrier(0) + WG  # computed anew in each block, and not kept in registers
        stage = step % K_STAGES
        mask_words = ()
        if MASKED:
            mask_words = bits_of_step(step, view, 64, C)
        consumer_wait(k_pipe.full, step, K_STAGES)
        scores_pending = issue_s_or_dp(q_tiles, k_pipe.tiles, stage, resident)
        consumer_wait(v_pipe.full, step, 1)
        dprobs_pending = issue_s_or_dp(dout_tiles, v_pipe.tiles, 0, resident)
        scores = tanh_of(warpgroup_mma_wait(len(v_pipe.tiles), deps=(scores_pending,)), scales.squash)
        tanh = scores
        if MASKED:
            scores = hide_scores(scores, step, mask_words, view, C)
        probs = gl.exp2(scores * scales.scale_log2 - view.lse[:, None])
        probs = drop(probs, kv_block_start(step, view.blocks, C), view.draws, C)
        if scales.squash is not None:
            probs = times_tanh_derivative(probs, tanh, MASKED)
        dprobs = warpgroup_mma_wait(0, deps=(dprobs_pending,))
        consumer_release(v_pipe.empty, step, 1)
        if C.HAS_DROPOUT:
            dscores = score_gradient(probs, dprobs, view.delta[:, None])
        else:
            dscores = probs * (dprobs - view.delta[:, None])
        packed = pack_pairs(dscores, k_pipe.tiles[0].dtype)
        dq = finish(issue_accumulate(dq, packed, k_pipe.tiles, stage), 0)
        consumer_release(k_pipe.empty, step, K_STAGES)
    return dq


@gluon.jit
def attend(args, smem, WG: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: dQ of 64 queries."""
    inputs, scales = args.inputs, args.scales
    k_pipe, v_pipe = smem.k, smem.v
    tile, bounds = q_tile_of(smem.metadata, args.tile, args.bounds, 4, C)
    row = tile.first + WG * 64
    offsets = row + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORE_LAYOUT))
    lse_row = (tile.batch * args.heads + tile.head).to(gl.int64) * args.bounds.sq + tile.row_q
    lse, delta = fetch_row_stats(inputs.lse, inputs.delta, lse_row, offsets, offsets < bounds.sq)
    if C.HAS_DROPOUT:
        delta *= args.dropout.delta_scale
    blocks = kv_blocks_of_tile(tile, bounds, args.plan, C)
    bits = ()
    if C.MASK_PLAN:
        bits = bits_of_rows(args.plan, tile.batch, tile.head, row // 64)
    view = QView(row, in_base_2(lse), delta, blocks, bounds,
                 draws_of(KVTile(tile.first, tile.head, tile.sequence, 0, 0), row, inputs.seed, args.heads,
                          args.dropout, C), bits)
    masked = masked_blocks_of(row, blocks, bounds, C)
    begin = 0
    if C.HAS_UPPER:
        if first_block_is_hidden(kv_block_start(0, blocks, C), blocks.count, row, bounds.upper, C):
            consumer_wait(k_pipe.full, 0, K_STAGES)
            consumer_release(k_pipe.empty, 0, K_STAGES)
            consumer_wait(v_pipe.full, 0, 1)
            consumer_release(v_pipe.empty, 0, 1)
            begin += 1
    mbarrier.wait(smem.q.full.index(WG), 0)
    mbarrier.wait(smem.q.full.index(2 + WG), 0)
    dq = zeros_of(inputs.q)
    dq = accumulate_blocks(begin, masked, dq, view, smem, scales, WG, True, C)
    dq = accumulate_blocks(gl.maximum(begin, masked), blocks.count, dq, view, smem, scales, WG, False, C)
    left = 64
    if C.VARLEN:
        dq = blank_blind(dq, row, bounds, C)
        left = tile.rows - row
    write_gradients(args.dq, args.dq_ptr, smem.q.q_tiles, WG, dq, scales.gradient,
                    (tile.batch, tile.head, tile.row_q + row), left, C)


@gluon.jit
def hopper_dq_d256_kernel(q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, dout_desc, dout_rest, dq_desc, dq_rest,
                          pointers, numbers, C: gl.constexpr):
    """Compute dq. Grid: (tiles of 128 queries · heads · batches,). The rest as in hopper_backward_d256_kernel."""
    inputs = Inputs(as_tuple(q_desc, q_rest), as_tuple(k_desc, k_rest), as_tuple(v_desc, v_rest),
                    as_tuple(dout_desc, dout_rest), pointers.lse, pointers.delta, pointers.seed)
    SPARE: gl.constexpr = 1 if C.VARLEN else 0  # barriers of tiles in which keys are zeroed before they are full
    q = QTiles(allocate_stages(inputs.q, 2), allocate_stages(inputs.dout, 2), make_barriers(4, 1))
    k_pipe = Pipe(allocate_stages(inputs.k, K_STAGES), make_barriers(K_STAGES + SPARE, 1), make_barriers(K_STAGES, 2))
    v_pipe = Pipe(allocate_stages(inputs.v, 1), make_barriers(1 + SPARE, 1), make_barriers(1, 2))
    fence_async_shared()
    grid, bounds = numbers.grid, numbers.bounds
    tile = ()
    metadata = ()
    lengths = pointers.lengths
    if C.VARLEN:
        metadata = store_tile_metadata(locate_queries(
            gl.program_id(0), grid, bounds,
            (lengths.cu_q, lengths.cu_k, lengths.q, lengths.k, numbers.num_sequences), C))
    else:
        first, head, batch = tile_at(gl.program_id(0), grid, bounds.sq, C)
        tile = QTile(first, head, batch, 0, 0, bounds.sq, batch)
    args = DQArgs(inputs, as_tuple(dq_desc, dq_rest), pointers.first, tile, grid.heads, bounds, numbers.group,
                  numbers.scales, numbers.dropout, MaskPlan(pointers.lists, pointers.bits, numbers.plan))
    smem = DQSmem(q, k_pipe, v_pipe, metadata)
    if C.HAS_CU_SEQLENS:
        if has_query_rows(metadata):
            specialize(args, smem, C)
    else:
        specialize(args, smem, C)


@gluon.jit
def specialize(args, smem, C: gl.constexpr):
    """Give each warp of the CTA its role."""
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gl.warp_specialize([
        (attend, (args, smem, ZERO, C)), (attend, (args, smem, ONE, C)), (load, (args, smem, C)),
    ], [4, 1], [240, 24])
