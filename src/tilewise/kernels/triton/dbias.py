"""Gradient of a bias with a query and a key dim: dS itself, summed over the heads that share it (maths.md, eq. 21).

By a kernel of its own, for biases whose gradient the dQ kernel does not make on its way (bias_gradient.py).
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.launch import (
    Launch,
    TileShape,
    bounds,
    constants,
    is_shifted,
    joined,
    needs_int64,
    tile_blocks,
    tile_count,
)
from tilewise.kernels.triton.mask_ranges import document_ids_at, is_visible, visible_keys
from tilewise.kernels.triton.modifiers import load_operand, modify_tile, subtract_delta
from tilewise.kernels.triton.primitives import (
    LOG2E,
    head_offset,
    head_source,
    load_tail,
    load_tile,
    offsets,
    prepared_lse,
    recompute_probs,
    score_gradient,
)
from tilewise.kernels.triton.tile_scheduler import sequence_extent
from tilewise.problem import AttentionProblem, Sizes


@triton.jit
def accumulate_dbias(acc, members, shared_heads, entry_batch, entry_head, q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr,
                     delta_ptr, modifiers, first_q, first_k, bounds, SHIFTED: tl.constexpr, count, sq, sk, hq, group,
                     size_q, size_k, strides_q, strides_k, strides_v, strides_do, scale_log2,
                     D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                     MASKED: tl.constexpr, PRECISION: tl.constexpr, INT64: tl.constexpr, DESCRIPTORS: tl.constexpr,
                     CHANGED: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add dS of the heads that share one tile of the bias, which is read once: the kernel's one loop body."""
    HIDES: tl.constexpr = MASKED or modifiers.mask.ptr is not None or modifiers.mask_function.call is not None
    lengths = modifiers.lengths
    documents = modifiers.documents
    lower, upper, prefix, sink_tokens, chunk, offset, _shift = bounds
    offs_m, offs_n = first_q + tl.arange(0, BLOCK_M), first_k + tl.arange(0, BLOCK_N)
    CLIP: tl.constexpr = count is not None
    bias = None
    if modifiers.bias.ptr is not None:
        bias = tl.zeros([BLOCK_M, BLOCK_N], modifiers.bias.ptr.dtype.element_ty)
        if members > 0:  # else the tile may be one that this loop, which checks nothing, cannot read
            bias = load_operand(modifiers.bias, entry_batch, entry_head, offs_m[:, None], offs_n[None, :], size_q,
                                size_k, INT64, MASKED)
    for member in tl.range(0, members):
        sequence, head = entry_batch + member // shared_heads, entry_head + member % shared_heads
        row_q, _rows_q, length_q = sequence_extent(lengths.cu_q, lengths.q, sequence, count, sq)
        row_k, _rows_k, length_k = sequence_extent(lengths.cu_k, lengths.k, sequence, count, sk)
        batch = sequence if lengths.cu_q is None else sequence * 0
        band = (lower, upper, prefix, sink_tokens, chunk, offset, length_k - length_q if SHIFTED else None)
        q_source = head_source(q_ptr, batch, head, row_q, strides_q[0], strides_q[1], strides_q[2], DESCRIPTORS)
        head_k = head // group
        k_source = head_source(k_ptr, batch, head_k, row_k, strides_k[0], strides_k[1], strides_k[2], DESCRIPTORS)
        v_source = head_source(v_ptr, batch, head_k, row_k, strides_v[0], strides_v[1], strides_v[2], DESCRIPTORS)
        dout_source = head_source(dout_ptr, batch, head, row_q, strides_do[0], strides_do[1], strides_do[2],
                                  DESCRIPTORS)
        place_q, place_k = (batch, head, row_q), (batch, head_k, row_k)
        q = load_tile(q_source, place_q, first_q, length_q, strides_q[2], strides_q[3], BLOCK_M, D, BLOCK_D, True,
                      INT64, DESCRIPTORS, CLIP)
        k = load_tile(k_source, place_k, first_k, length_k, strides_k[2], strides_k[3], BLOCK_N, D, BLOCK_D, True,
                      INT64, DESCRIPTORS, CLIP)
        v = load_tile(v_source, place_k, first_k, length_k, strides_v[2], strides_v[3], BLOCK_N, DV, BLOCK_DV, True,
                      INT64, DESCRIPTORS, CLIP)
        dout = load_tile(dout_source, place_q, first_q, length_q, strides_do[2], strides_do[3], BLOCK_M, DV, BLOCK_DV,
                         True, INT64, DESCRIPTORS, CLIP)
        row_offset = head_offset(batch, head, hq * sq, sq) + row_q
        lse = tl.load(lse_ptr + row_offset + offs_m, mask=offs_m < length_q, other=0.0)
        lse = prepared_lse(lse, q.dtype, CHANGED)
        delta = tl.load(delta_ptr + row_offset + offs_m, mask=offs_m < length_q, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if TAIL:
            q_tail = load_tail(q_source, q, first_q, length_q, strides_q[2], strides_q[3], BLOCK_M, D, TAIL, True,
                               INT64)
            k_tail = load_tail(k_source, k, first_k, length_k, strides_k[2], strides_k[3], BLOCK_N, D, TAIL, True,
                               INT64)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=PRECISION)
        dprobs = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        numbers_q = None
        numbers_k = None
        if documents.q is not None:
            numbers_q = tl.load(document_ids_at(documents.q, documents.batched, batch, row_q, sq) + offs_m,
                                mask=offs_m < length_q, other=-1)[:, None]
            numbers_k = tl.load(document_ids_at(documents.k, documents.batched, batch, row_k, sk) + offs_n,
                                mask=offs_n < length_k, other=-1)[None, :]
        visible = is_visible(offs_m[:, None], offs_n[None, :], length_q, length_k, band, numbers_q, numbers_k)
        scores, visible, _tanh, _capped, kept = modify_tile(
            scores, visible, modifiers, sequence * hq + head, sequence, head,
            band, first_q, first_k, length_q, length_k, scale_log2,
            q.dtype == tl.float32, INT64, CHANGED, BLOCK_M, BLOCK_N, False, MASKED, bias)
        probs = recompute_probs(scores, lse[:, None], visible, None, scale_log2, q.dtype, CHANGED, HIDES)
        difference = subtract_delta(dprobs, delta[:, None], kept, modifiers, False)
        acc += score_gradient(probs, difference, visible, HIDES)
    return acc


@triton.jit(do_not_specialize=["lower", "upper", "prefix", "sink_tokens", "chunk", "offset", "count", "sq", "sk", "hq",
                               "group", "size_q", "size_k", "tiles_q", "tiles_k", "own_heads", "shared_heads",
                               "members"])
def attention_backward_dbias_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dbias_ptr, modifiers,
                                    stride_qb, stride_qh, stride_qs, stride_qd,
                                    stride_kb, stride_kh, stride_ks, stride_kd,
                                    stride_vb, stride_vh, stride_vs, stride_vd,
                                    stride_dob, stride_doh, stride_dos, stride_dod,
                                    scale_log2, lower, upper, prefix, sink_tokens, chunk, offset, count, sq, sk, hq,
                                    group, size_q, size_k, tiles_q, tiles_k, own_heads, shared_heads, members,
                                    SHIFTED: tl.constexpr,
                                    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                                    PRECISION: tl.constexpr, INT64: tl.constexpr, DESCRIPTORS: tl.constexpr,
                                    CHANGED: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr,
                                    BLOCK_N: tl.constexpr):
    """Compute dbias = dS, summed over the heads and batches that share the bias, for one tile of pairs.

    Grid: (tiles_k · tiles_q · own_heads · own_batches,). dbias: (own_batches, own_heads, size_q, size_k), dense;
    ``members`` heads share a tile, ``shared_heads`` of them in each batch. Two products a tile and member, no atomics.
    """
    tile_k = tl.program_id(0) % tiles_k
    tile_q, entry_head, entry_batch = locate_entry(tiles_k, tiles_q, own_heads)
    first_q, first_k = tile_q * BLOCK_M, tile_k * BLOCK_N
    bounds = (lower, upper, prefix, sink_tokens, chunk, offset, None)
    # Of tiles that every member sees alike, a hidden one is written, as zeros, but not computed, and one that is
    # visible whole needs no checks.
    ALIKE: tl.constexpr = (count is None and modifiers.documents.q is None and sink_tokens is None
                           and modifiers.tiles.q is None)
    spans = visible_keys(first_q, tl.minimum(first_q + BLOCK_M, sq) - 1, sk, bounds)
    start, shared_start, shared_stop, stop = spans
    is_hidden = (first_k >= stop) | (first_k + BLOCK_N <= start)
    is_whole = (first_k >= shared_start) & (first_k + BLOCK_N <= shared_stop)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for MASKED in tl.static_range(2):
        if ALIKE:
            own = tl.where(is_hidden | (is_whole == (MASKED == 1)), 0, members)
        else:
            own = members * MASKED
        acc = accumulate_dbias(
            acc, own, shared_heads, entry_batch, entry_head, q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
            modifiers, first_q, first_k, bounds, SHIFTED, count, sq, sk, hq, group,
            size_q, size_k, (stride_qb, stride_qh, stride_qs, stride_qd), (stride_kb, stride_kh, stride_ks, stride_kd),
            (stride_vb, stride_vh, stride_vs, stride_vd), (stride_dob, stride_doh, stride_dos, stride_dod), scale_log2,
            D, DV, BLOCK_D, BLOCK_DV, MASKED, PRECISION, INT64, DESCRIPTORS, CHANGED, TAIL, BLOCK_M, BLOCK_N)
    offs_m, offs_n = first_q + tl.arange(0, BLOCK_M), first_k + tl.arange(0, BLOCK_N)
    pairs = size_q.to(tl.int64) * size_k
    base = dbias_ptr + head_offset(entry_batch, entry_head, own_heads * pairs, pairs)
    ptrs = base + offsets(offs_m, size_k, True)[:, None] + offs_n[None, :]
    tl.store(ptrs, acc.to(dbias_ptr.dtype.element_ty), mask=(offs_m < size_q)[:, None] & (offs_n < size_k)[None, :])


@triton.jit
def locate_entry(tiles_k, tiles_q, heads):
    """Split the program id, whose lowest part is the tile of keys, into (tile of queries, head, batch)."""
    pid = tl.program_id(0) // tiles_k
    return pid % tiles_q, (pid // tiles_q) % heads, (pid // tiles_q) // heads


def dbias_launch(problem: AttentionProblem, config: TileShape, precision: str, dout_strides: Sizes) -> Launch | None:
    """Bind the dbias kernel, or return None where the bias lacks a query or a key dim (sums.py makes its gradient).

    Call the result with (q, k, v, dout, lse, delta, dbias, modifiers).
    """
    bias = problem.scores.bias
    if bias is None or 1 in bias.shape[2:]:
        return None
    inputs = (problem.q_strides, problem.k_strides, problem.v_strides, dout_strides)
    own_batches, own_heads, size_q, size_k = bias.shape
    shared_heads = problem.hq // own_heads
    members = problem.pairs[0] // own_batches * shared_heads
    tiles_q, tiles_k = tile_count(size_q, config.block_m), tile_count(size_k, config.block_n)
    scalars = (
        *joined(*inputs), problem.scale * LOG2E.value, *bounds(problem), problem.sq, problem.sk, problem.hq,
        problem.group, size_q, size_k, tiles_q, tiles_k, own_heads, shared_heads, members, is_shifted(problem),
        *constants(problem, precision, needs_int64(problem, *inputs), config.descriptors), config.block_m,
        config.block_n,
    )
    return Launch(attention_backward_dbias_kernel, tiles_k * tiles_q * own_heads * own_batches, scalars,
                  tile_blocks(problem, config), num_warps=config.num_warps,
                  num_stages=1, **config.limits)
