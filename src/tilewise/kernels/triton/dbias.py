"""Gradient of a bias with a query and a key dim: dS itself, summed over the heads that share it (maths.md, eq. 21).

By a kernel of its own, for biases whose gradient the dQ kernel does not make on its way (bias_gradient.py).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.triton.config import TileConfig
from tilewise.kernels.triton.launch import (
    Launch,
    constants,
    needs_int64,
    numbers,
    tile_blocks,
    tile_count,
)
from tilewise.kernels.triton.mask_ranges import document_ids_at, is_visible, visible_keys
from tilewise.kernels.triton.modifiers import load_operand, modify_tile, subtract_delta
from tilewise.kernels.triton.primitives import (
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
from tilewise.kernels.triton.tile_types import Band, Rows, ScoreBlock
from tilewise.problem import AttentionProblem, Sizes


class BiasNumbers(NamedTuple):
    """The bias's own shape (own_batches, own_heads, size_q, size_k), its tiles, and how many heads share it.

    ``members`` heads share a tile, ``shared_heads`` of them in each batch entry.
    """

    size_q: int
    size_k: int
    tiles_q: int
    tiles_k: int
    own_heads: int
    shared_heads: int
    members: int


class BiasTile(NamedTuple):
    """The tile of a bias that a CTA computes: the first batch entry and head that share it, its first query and key."""

    batch: Any
    head: Any
    first_q: Any
    first_k: Any


@triton.jit
def accumulate_dbias(acc, members, tile, q, k, v, dout, lse_ptr, delta_ptr, modifiers, problem, shape,
                     MASKED: tl.constexpr, C: tl.constexpr):
    """Add dS of the heads that share one tile of the bias, which is read once: the kernel's one loop body."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    HIDES: tl.constexpr = MASKED or modifiers.mask.ptr is not None or modifiers.mask_function.call is not None
    CLIP: tl.constexpr = problem.count is not None
    lengths, documents, sq, sk = modifiers.lengths, modifiers.documents, problem.sq, problem.sk
    first_q, first_k = tile.first_q, tile.first_k
    offs_m, offs_n = first_q + tl.arange(0, BLOCK_M), first_k + tl.arange(0, BLOCK_N)
    bias = None
    if modifiers.bias.ptr is not None:
        bias = tl.zeros([BLOCK_M, BLOCK_N], modifiers.bias.ptr.dtype.element_ty)
        if members > 0:  # else the tile may be one that this loop, which checks nothing, cannot read
            shared = ScoreBlock(None, tile.batch, tile.head, first_q, first_k, shape.size_q, shape.size_k)
            bias = load_operand(modifiers.bias, shared, offs_m[:, None], offs_n[None, :], C.INT64, MASKED)
    for member in tl.range(0, members):
        sequence, head = tile.batch + member // shape.shared_heads, tile.head + member % shape.shared_heads
        row_q, _rows_q, length_q = sequence_extent(lengths.cu_q, lengths.q, sequence, problem.count, sq)
        row_k, _rows_k, length_k = sequence_extent(lengths.cu_k, lengths.k, sequence, problem.count, sk)
        batch = sequence if lengths.cu_q is None else sequence * 0
        band = Band(*problem.bounds, length_k - length_q if C.SHIFTED else None)
        head_k = head // problem.group
        place_q, place_k = (batch, head, row_q), (batch, head_k, row_k)
        q_rows = Rows(head_source(q, batch, head, row_q, C.DESCRIPTORS), place_q, q)
        k_rows = Rows(head_source(k, batch, head_k, row_k, C.DESCRIPTORS), place_k, k)
        v_rows = Rows(head_source(v, batch, head_k, row_k, C.DESCRIPTORS), place_k, v)
        dout_rows = Rows(head_source(dout, batch, head, row_q, C.DESCRIPTORS), place_q, dout)
        q_tile = load_tile(q_rows, first_q, length_q, BLOCK_M, C.D, C.BLOCK_D, True, C.INT64, C.DESCRIPTORS, CLIP)
        k_tile = load_tile(k_rows, first_k, length_k, BLOCK_N, C.D, C.BLOCK_D, True, C.INT64, C.DESCRIPTORS, CLIP)
        v_tile = load_tile(v_rows, first_k, length_k, BLOCK_N, C.DV, C.BLOCK_DV, True, C.INT64, C.DESCRIPTORS, CLIP)
        dout_tile = load_tile(dout_rows, first_q, length_q, BLOCK_M, C.DV, C.BLOCK_DV, True, C.INT64, C.DESCRIPTORS,
                              CLIP)
        row_offset = head_offset(batch, head, problem.hq * sq, sq) + row_q
        lse = tl.load(lse_ptr + row_offset + offs_m, mask=offs_m < length_q, other=0.0)
        lse = prepared_lse(lse, q_tile.dtype, C.CHANGED)
        delta = tl.load(delta_ptr + row_offset + offs_m, mask=offs_m < length_q, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        if C.TAIL:
            q_tail = load_tail(q_rows, q_tile, first_q, length_q, BLOCK_M, C.D, C.TAIL, True, C.INT64)
            k_tail = load_tail(k_rows, k_tile, first_k, length_k, BLOCK_N, C.D, C.TAIL, True, C.INT64)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=C.PRECISION)
        dprobs = tl.dot(dout_tile, tl.trans(v_tile), input_precision=C.PRECISION)
        numbers_q = None
        numbers_k = None
        if documents.q is not None:
            numbers_q = tl.load(document_ids_at(documents.q, documents.batched, batch, row_q, sq) + offs_m,
                                mask=offs_m < length_q, other=-1)[:, None]
            numbers_k = tl.load(document_ids_at(documents.k, documents.batched, batch, row_k, sk) + offs_n,
                                mask=offs_n < length_k, other=-1)[None, :]
        visible = is_visible(offs_m[:, None], offs_n[None, :], length_q, length_k, band, numbers_q, numbers_k)
        block = ScoreBlock(sequence * problem.hq + head, sequence, head, first_q, first_k, length_q, length_k)
        scores, visible, _tanh, _capped, kept = modify_tile(
            scores, visible, block, modifiers, band, problem.scale_log2, q_tile.dtype == tl.float32, False, MASKED, C,
            bias)
        probs = recompute_probs(scores, lse[:, None], visible, None, problem.scale_log2, q_tile.dtype, C.CHANGED, HIDES)
        difference = subtract_delta(dprobs, delta[:, None], kept, modifiers, False)
        acc += score_gradient(probs, difference, visible, HIDES)
    return acc


@triton.jit
def attention_backward_dbias_kernel(q, k, v, dout, lse_ptr, delta_ptr, dbias_ptr, modifiers, problem, shape,
                                    C: tl.constexpr):
    """Compute dbias = dS, summed over the heads and batches that share the bias, for one tile of pairs.

    Grid: (tiles_k · tiles_q · own_heads · own_batches,). dbias: (own_batches, own_heads, size_q, size_k), dense.
    shape: BiasNumbers. Two products a tile and member, no atomics.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    tile_k = tl.program_id(0) % shape.tiles_k
    tile_q, entry_head, entry_batch = locate_entry(shape.tiles_k, shape.tiles_q, shape.own_heads)
    first_q, first_k = tile_q * BLOCK_M, tile_k * BLOCK_N
    # Of tiles that every member sees alike, a hidden one is written, as zeros, but not computed, and one that is
    # visible whole needs no checks.
    ALIKE: tl.constexpr = (problem.count is None and modifiers.documents.q is None
                           and problem.bounds.sink_tokens is None and modifiers.tiles.q is None)
    spans = visible_keys(first_q, tl.minimum(first_q + BLOCK_M, problem.sq) - 1, problem.sk,
                         Band(*problem.bounds, None))
    start, shared_start, shared_stop, stop = spans
    is_hidden = (first_k >= stop) | (first_k + BLOCK_N <= start)
    is_whole = (first_k >= shared_start) & (first_k + BLOCK_N <= shared_stop)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for MASKED in tl.static_range(2):
        if ALIKE:
            own = tl.where(is_hidden | (is_whole == (MASKED == 1)), 0, shape.members)
        else:
            own = shape.members * MASKED
        acc = accumulate_dbias(acc, own, BiasTile(entry_batch, entry_head, first_q, first_k), q, k, v, dout, lse_ptr,
                               delta_ptr, modifiers, problem, shape, MASKED, C)
    offs_m, offs_n = first_q + tl.arange(0, BLOCK_M), first_k + tl.arange(0, BLOCK_N)
    pairs = shape.size_q.to(tl.int64) * shape.size_k
    base = dbias_ptr + head_offset(entry_batch, entry_head, shape.own_heads * pairs, pairs)
    ptrs = base + offsets(offs_m, shape.size_k, True)[:, None] + offs_n[None, :]
    inside = (offs_m < shape.size_q)[:, None] & (offs_n < shape.size_k)[None, :]
    tl.store(ptrs, acc.to(dbias_ptr.dtype.element_ty), mask=inside)


@triton.jit
def locate_entry(tiles_k, tiles_q, heads):
    """Split the program id, whose lowest part is the tile of keys, into (tile of queries, head, batch)."""
    pid = tl.program_id(0) // tiles_k
    return pid % tiles_q, (pid // tiles_q) % heads, (pid // tiles_q) // heads


def dbias_launch(problem: AttentionProblem, config: TileConfig, precision: str, dout_strides: Sizes) -> Launch | None:
    """Bind the dbias kernel, or return None where the bias lacks a query or a key dim.

    Of such a bias operand_gradients.py computes the gradient.
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
    scalars = (numbers(problem, tiles_q),
               BiasNumbers(size_q, size_k, tiles_q, tiles_k, own_heads, shared_heads, members),
               constants(problem, config, precision, needs_int64(problem, *inputs)))
    return Launch(attention_backward_dbias_kernel, tiles_k * tiles_q * own_heads * own_batches, scalars, inputs,
                  tile_blocks(problem, config), num_warps=config.num_warps, num_stages=1, **config.limits)
