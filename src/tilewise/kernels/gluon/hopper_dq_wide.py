"""dQ on Hopper at wide heads, in a kernel of its own: a tile of queries stays, the keys it sees stream past.

Each of two warpgroups has 64 queries and all columns of their dQ in registers, 128 a thread at 256 columns. Scores have
queries as rows here, so that dS is a left operand of dQ += dS·K from registers, and neither warpgroup tells the other
anything (maths.md, eq. 10): one's exponentials run beside the other's products. One warp loads. K of a step stays until
its dQ is done, V until its dP is.

Q, dO, K and V come in tiles as in hopper_backward_wide.py.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from tilewise.kernels.gluon.hopper_backward import PAIRS
from tilewise.kernels.gluon.hopper_backward_load import fetch_rows, in_base_2
from tilewise.kernels.gluon.hopper_backward_wide import begin_sums, issue_pairs, issue_sums, load_pieces, write_sums
from tilewise.kernels.gluon.pipeline import (
    allocate_stages,
    as_tuple,
    consumer_release,
    consumer_wait,
    make_barriers,
    optimization_barrier,
    producer_acquire,
)
from tilewise.kernels.gluon.products import finish
from tilewise.kernels.gluon.softmax import hide, pack_pairs
from tilewise.kernels.gluon.tiles import (
    MaskBounds,
    TileGrid,
    first_block_is_masked,
    kv_blocks_of,
    masked_blocks_of,
    n_block_start,
    tile_at,
)

K_STAGES: gl.constexpr = gl.constexpr(2)  # tiles of K in flight; of V one, two gained nothing where there is room


class Shape(NamedTuple):
    """What is fixed when the kernel is compiled.

    What of the mask there is, then what tiles.py, softmax.py and write() ask for.
    """

    HAS_LOWER: bool
    HAS_UPPER: bool
    BLOCK_N: int = 64
    CONSUMERS: int = 2
    PACK_GQA: int = 1
    HAS_CU_SEQLENS: bool = False
    TILES_FROM_END: bool = False


@gluon.jit
def load_step(descs, ring, step, spans, head, batch, KV_STAGES: gl.constexpr, C: gl.constexpr):
    """Producer: load K or V of a step."""
    tiles, full, empty = ring
    producer_acquire(empty, step, KV_STAGES)
    slot = step % KV_STAGES
    load_pieces(descs, tiles, slot, (batch, head, n_block_start(step, spans, C)), full.index(slot))


@gluon.jit
def load(loaded, C: gl.constexpr):
    """Producer, one warp: the queries and their dO once, then the keys and values that they see."""
    sources, queries, keys, values, tile, band, group = loaded
    q_descs, k_descs, v_descs, dout_descs = sources
    q_tiles, dout_tiles, full = queries
    first, head, batch = tile
    head_k = head // group
    spans = kv_blocks_of(first, band, C)
    _start, _at_head, _masked, steps = spans
    load_pieces(q_descs, q_tiles, 0, (batch, head, first), full.index(0))
    load_step(k_descs, keys, 0, spans, head_k, batch, K_STAGES, C)
    load_pieces(q_descs, q_tiles, 1, (batch, head, first + 64), full.index(1))
    load_pieces(dout_descs, dout_tiles, 0, (batch, head, first), full.index(2))
    load_step(v_descs, values, 0, spans, head_k, batch, 1, C)
    load_pieces(dout_descs, dout_tiles, 1, (batch, head, first + 64), full.index(3))
    for step in range(1, steps):
        load_step(k_descs, keys, step, spans, head_k, batch, K_STAGES, C)
        load_step(v_descs, values, step, spans, head_k, batch, 1, C)


@gluon.jit
def sum_steps(begin, end, dq, memory, row, rows, spans, band, scale_log2, OWN: gl.constexpr, MASKED: gl.constexpr,
              C: gl.constexpr):
    """Steps ``begin`` to ``end``: add to dQ of the queries from ``row`` on."""
    queries, keys, values = memory
    q_tiles, dout_tiles, _full = queries
    k_tiles, k_full, k_empty = keys
    v_tiles, v_full, v_empty = values
    lse, delta = rows
    for step in range(begin, end):
        own = optimization_barrier(0) + OWN  # where tiles lie is found anew in each step: registers do not hold it
        slot = step % K_STAGES
        consumer_wait(k_full, step, K_STAGES)
        scores_pending = issue_pairs(q_tiles, k_tiles, slot, own)
        consumer_wait(v_full, step, 1)
        dprobs_pending = issue_pairs(dout_tiles, v_tiles, 0, own)
        scores = warpgroup_mma_wait(len(v_tiles), deps=(scores_pending,))
        if MASKED:
            scores = hide(scores, row, n_block_start(step, spans, C), band, C)
        probs = gl.exp2(scores * scale_log2 - lse[:, None])
        dprobs = warpgroup_mma_wait(0, deps=(dprobs_pending,))
        consumer_release(v_empty, step, 1)
        dscores = pack_pairs(probs * (dprobs - delta[:, None]), k_tiles[0].dtype)
        dq = finish(issue_sums(dq, dscores, k_tiles, slot), 0)
        consumer_release(k_empty, step, K_STAGES)
    return dq


@gluon.jit
def gather(gathered, OWN: gl.constexpr, C: gl.constexpr):
    """Consumer, one warpgroup: dQ of 64 queries."""
    dq_descs, sources, memory, tile, band, heads, scales = gathered
    lse_ptr, delta_ptr = sources
    scale, scale_log2 = scales
    queries, keys, values = memory
    q_tiles, _dout_tiles, full = queries
    _k_tiles, k_full, k_empty = keys
    _v_tiles, v_full, v_empty = values
    first, head, batch = tile
    row = first + OWN * 64
    offsets = row + gl.arange(0, 64, layout=gl.SliceLayout(1, PAIRS))
    sq, _sk, _lower, upper = band
    line = (batch * heads + head).to(gl.int64) * sq
    lse, delta = fetch_rows(lse_ptr, delta_ptr, line, offsets, offsets < sq)
    rows = (in_base_2(lse), delta)
    spans = kv_blocks_of(first, band, C)
    _start, _at_head, _masked, steps = spans
    masked = masked_blocks_of(row, spans, band, C)
    begin = 0
    if C.HAS_UPPER:
        if first_block_is_masked(n_block_start(0, spans, C), steps, row, upper, C):
            consumer_wait(k_full, 0, K_STAGES)
            consumer_release(k_empty, 0, K_STAGES)
            consumer_wait(v_full, 0, 1)
            consumer_release(v_empty, 0, 1)
            begin += 1
    mbarrier.wait(full.index(OWN), 0)
    mbarrier.wait(full.index(2 + OWN), 0)
    dq = begin_sums(dq_descs)
    dq = sum_steps(begin, masked, dq, memory, row, rows, spans, band, scale_log2, OWN, True, C)
    dq = sum_steps(gl.maximum(begin, masked), steps, dq, memory, row, rows, spans, band, scale_log2, OWN, False, C)
    write_sums(dq_descs, q_tiles, OWN, dq, scale, (batch, head, row), C)


@gluon.jit(do_not_specialize=["tiles", "heads", "batches", "section", "sq", "sk", "lower", "upper", "group"])
def hopper_dq_wide_kernel(q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, dout_desc, dout_rest, lse_ptr, delta_ptr,
                          dq_desc, dq_rest, tiles, heads, batches, section, sq, sk, lower, upper, group, scale,
                          scale_log2, C: gl.constexpr):
    """Compute dq. Grid: (tiles of 128 queries · heads · batches,). Descriptors as of hopper_backward_wide_kernel."""
    q_descs, k_descs = as_tuple(q_desc, q_rest), as_tuple(k_desc, k_rest)
    v_descs, dout_descs = as_tuple(v_desc, v_rest), as_tuple(dout_desc, dout_rest)
    queries = (allocate_stages(q_descs, 2), allocate_stages(dout_descs, 2), make_barriers(4, 1))
    keys = (allocate_stages(k_descs, K_STAGES), make_barriers(K_STAGES, 1), make_barriers(K_STAGES, 2))
    values = (allocate_stages(v_descs, 1), make_barriers(1, 1), make_barriers(1, 2))
    fence_async_shared()
    band = MaskBounds(sq, sk, lower, upper)
    tile = tile_at(gl.program_id(0), TileGrid(tiles, heads, batches, section), sq, C)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gathered = (as_tuple(dq_desc, dq_rest), (lse_ptr, delta_ptr), (queries, keys, values), tile, band, heads,
                (scale, scale_log2))
    loaded = ((q_descs, k_descs, v_descs, dout_descs), queries, keys, values, tile, band, group)
    gl.warp_specialize([(gather, (gathered, ZERO, C)), (gather, (gathered, ONE, C)), (load, (loaded, C))], [4, 1],
                       [240, 24])
