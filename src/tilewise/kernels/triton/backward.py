"""Backward: delta, then dK and dV by tiles of keys (maths.md, section 6); dQ by tiles of queries follows (dq.py).

Each output tile has one owner that sums it in registers: no atomics, so the result is the same on every run.

The price is that scores and dP are computed twice: seven matrix products instead of five, eight where dK and dV take a
launch each. Where one tile holds all keys, each tile of dQ has one addend: the dK/dV kernel then makes delta and dQ,
too, and nothing is computed twice.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.triton.config import DeltaConfig, TileConfig
from tilewise.kernels.triton.launch import (
    Launch,
    constants,
    is_shifted,
    needs_int64,
    numbers,
    tile_blocks,
    tile_slots,
)
from tilewise.kernels.triton.mask_ranges import (
    block_at,
    blocks_of_list,
    blocks_of_range,
    document_ids_at,
    is_visible,
    loop_begin,
    loop_end,
    narrow_to_documents,
    sees_any_key,
    tile_list,
    visible_queries,
    zero_invisible_rows,
)
from tilewise.kernels.triton.modifiers import (
    SPAN,
    apply_dropout,
    divide_by_keep_prob,
    modify_tile,
    score_grad_of_function,
    score_grad_of_softcap,
    subtract_delta,
)
from tilewise.kernels.triton.primitives import (
    BLOCK_TAIL,
    head_offset,
    head_source,
    load_row_values,
    load_tail,
    load_tile,
    offsets,
    prepared_lse,
    recompute_probs,
    score_gradient,
    skip_dims,
    store_tile,
    zero_padding_rows,
)
from tilewise.kernels.triton.tile_scheduler import locate_work_tile
from tilewise.kernels.triton.tile_types import Band, BlockRange, Rows, ScoreBlock, Tile
from tilewise.problem import AttentionProblem, Sizes, padded_dim


class KeyTile(NamedTuple):
    """Keys and values of the CTA's tile; k_tail: the head dims of k behind BLOCK_D."""

    k: Any
    k_tail: Any
    v: Any


class QueryRows(NamedTuple):
    """What the dK/dV kernel loads for each block of queries: rows of q and dout, and by pointers lse and delta.

    out, dq: rows of out, of which delta is made, and of the dQ that is stored; None where other kernels do both.
    """

    q: Any
    dout: Any
    lse_ptr: Any
    delta_ptr: Any
    out: Any
    dq: Any


class DkdvSums(NamedTuple):
    """Accumulators of the dK/dV kernel; columns: the sum of dS over the queries of one head."""

    dk: Any
    dk_tail: Any
    dv: Any
    columns: Any


@triton.jit
def attention_delta_kernel(out, dout, dlse, delta_ptr, modifiers, problem, SHIFTED: tl.constexpr, DV: tl.constexpr,
                           BLOCK_DV: tl.constexpr, HAS_DLSE: tl.constexpr, INT64: tl.constexpr, BLOCK_M: tl.constexpr):
    """Compute delta = Σ_d out·dout − dlse for BLOCK_M queries of one head (eq. 10).

    Grid: (tiles · hq · b,). out, dout: (b, hq, sq, dv); dlse: (b, hq, sq) by strides; delta: (b, hq, sq), dense.
    The sinks' gradient is a sum over delta, so with sinks what dout holds where nothing is seen must not enter it.
    """
    lengths = modifiers.lengths
    first, head, _sequence, batch, row_q, _row, rows_q, length_q, length_k = locate_work_tile(
        lengths.cu_q, lengths.q, lengths.cu_k, lengths.k, problem.count, problem.tiles, problem.hq, problem.sq,
        problem.sk, BLOCK_M, False)
    place = (batch, head, row_q)
    out_rows = Rows(head_source(out, batch, head, row_q, False), place, out)
    dout_rows = Rows(head_source(dout, batch, head, row_q, False), place, dout)
    out_tile = load_tile(out_rows, first, length_q, BLOCK_M, DV, BLOCK_DV, True, INT64, False, False)
    dout_tile = load_tile(dout_rows, first, length_q, BLOCK_M, DV, BLOCK_DV, True, INT64, False, False)
    delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)  # [BLOCK_M]
    offs_m = first + tl.arange(0, BLOCK_M)
    if modifiers.sinks.ptr is not None:
        band = Band(*problem.bounds, length_k - length_q if SHIFTED else None)
        delta = tl.where(sees_any_key(offs_m, length_q, length_k, band), delta, 0.0)
    if HAS_DLSE:
        dlse_base = head_source(dlse, batch, head, row_q, False)
        delta -= tl.load(dlse_base + offsets(offs_m, dlse.stride_s, INT64), mask=offs_m < length_q, other=0.0)
    delta_base = delta_ptr + head_offset(batch, head, problem.hq * problem.sq, problem.sq) + row_q
    tl.store(delta_base + offs_m, delta, mask=offs_m < rows_q)


@triton.jit
def initial_dprobs(delta, like, SEEDED: tl.constexpr):
    """What the product that makes dP starts from: −delta (SEEDED) or 0.

    Seeded, delta's registers are free while the product runs, and spills shrink (sm_90, d 128, causal: 280 to 72
    bytes, dK/dV 9 % faster on an H200); but the product must wait for delta, which at d 128 without a mask costs
    more than it gains (the whole backward pass is about 6 % faster unseeded). At d 64 without a mask seeding gained.
    """
    if SEEDED:
        start = tl.broadcast_to(-delta, like.shape)
    else:
        start = tl.zeros_like(like)
    return start


@triton.jit
def accumulate_dkdv(sums, keys, queries, tile, blocks, band, modifiers, problem, COLUMNS: tl.constexpr,
                    MASKED: tl.constexpr, C: tl.constexpr):
    """Add the fully visible queries, or (MASKED) those around them, to dK, dV and the columns: the one loop body.

    Score tiles are transposed, keys by queries: P and dS then enter their products without a transposition.
    """
    dk, dk_tail, dv, columns = sums
    stop = blocks.steps[3]
    CLIP: tl.constexpr = problem.count is not None
    DROPS: tl.constexpr = modifiers.dropout.ptr is not None
    HIDES: tl.constexpr = (MASKED or (modifiers.mask.ptr is not None and blocks.listed is None)
                           or modifiers.mask_function.call is not None)
    ADDED: tl.constexpr = MASKED and (modifiers.dropout.unaligned is not None or blocks.listed is not None)
    BOUNDED: tl.constexpr = band.lower is not None or band.upper is not None or tile.numbers is not None
    SEEDED: tl.constexpr = (BOUNDED or C.BLOCK_D <= 64) and not DROPS
    first = loop_begin(blocks.steps, MASKED)
    last = loop_end(blocks.steps, blocks.listed, MASKED)
    for step in tl.range(first, last, C.BLOCK_M):
        m = block_at(step, blocks.steps, blocks.listed, MASKED, False)
        offs_m = m + tl.arange(0, C.BLOCK_M)
        q = load_tile(queries.q, m, stop, C.BLOCK_M, C.D, C.BLOCK_D, MASKED, C.INT64, C.DESCRIPTORS, CLIP)
        q = zero_invisible_rows(q, m, blocks.seen_from, None, None, C.BLOCK_M, ADDED)
        # Past the last query q, dout, lse and delta are read as 0: P is 1 there, dV adds 1·0 and dK 0·0.
        lse = load_row_values(queries.lse_ptr, m, stop, C.BLOCK_M, MASKED)
        lse = prepared_lse(lse, q.dtype, C.CHANGED)  # [BLOCK_M]
        scores = tl.dot(keys.k, tl.trans(q), input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_M]
        if C.TAIL:
            q_tail = load_tail(queries.q, q, m, stop, C.BLOCK_M, C.D, C.TAIL, MASKED, C.INT64)
            q_tail = zero_invisible_rows(q_tail, m, blocks.seen_from, None, None, C.BLOCK_M, ADDED)
            scores = tl.dot(keys.k_tail, tl.trans(q_tail), scores, input_precision=C.PRECISION)
        dout = load_tile(queries.dout, m, stop, C.BLOCK_M, C.DV, C.BLOCK_DV, MASKED, C.INT64, C.DESCRIPTORS, CLIP)
        dout = zero_invisible_rows(dout, m, blocks.seen_from, None, None, C.BLOCK_M, ADDED)
        numbers_q = tile.numbers
        if tile.numbers is not None:
            numbers_q = tl.load(blocks.documents + offs_m, mask=offs_m < stop, other=-1)[None, :]
        visible = is_visible(offs_m[None, :], tile.offs[:, None], stop, tile.length, band, numbers_q, tile.numbers)
        block = ScoreBlock(tile.row, tile.sequence, tile.head, m, tile.first, stop, tile.length)
        scores, visible, tanh, capped, kept = modify_tile(
            scores, visible, block, modifiers, band, problem.scale_log2, q.dtype == tl.float32, True, MASKED, C)
        if C.NEED_DK:  # before P: the two products then follow one another in the tensor cores
            if queries.out is None:
                delta = load_row_values(queries.delta_ptr, m, stop, C.BLOCK_M, MASKED)  # [BLOCK_M]
            else:
                out = load_tile(queries.out, m, stop, C.BLOCK_M, C.DV, C.BLOCK_DV, MASKED, C.INT64, False, False)
                delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)  # [BLOCK_M], eq. 10
            dprobs = tl.dot(keys.v, tl.trans(dout), initial_dprobs(delta[None, :], scores, SEEDED),
                            input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_M]
        probs = recompute_probs(scores, lse[None, :], visible, problem.scale, problem.scale_log2, q.dtype, C.CHANGED,
                                HIDES)
        if C.NEED_DV:
            dv = tl.dot(apply_dropout(probs, kept, modifiers).to(dout.dtype), dout, dv,
                        input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_DV], eq. 8
        if C.NEED_DK:
            difference = subtract_delta(dprobs, delta[None, :], kept, modifiers, SEEDED)
            dscores = score_gradient(probs, difference, visible, HIDES)
            if COLUMNS:
                columns += tl.sum(dscores, 1)
            dscores = score_grad_of_function(dscores, capped, visible, block, modifiers, True, MASKED, HIDES, C)
            dscores = score_grad_of_softcap(dscores, tanh, visible, modifiers, HIDES)
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_D], eq. 10
            if C.TAIL:
                dk_tail = tl.dot(dscores.to(q.dtype), q_tail, dk_tail, input_precision=C.PRECISION)
            if queries.dq is not None:
                dq = tl.dot(tl.trans(dscores).to(q.dtype), keys.k, input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_D]
                store_tile(queries.dq.source, dq * problem.scale, m, stop, queries.dq.tensor.stride_s, 1, C.BLOCK_M,
                           C.D, C.BLOCK_D, C.INT64)
    return DkdvSums(dk, dk_tail, dv, columns)


@triton.jit
def attention_backward_dkdv_kernel(q, k, v, dout, lse_ptr, delta_ptr, dk_out, dv_out, columns_ptr, out, dq_out,
                                   modifiers, problem, C: tl.constexpr):
    """Compute dK = scale·dSᵀQ and dV = PᵀdO for BLOCK_N keys of one head (eq. 8 to 10).

    Grid: (tiles · hk · b,). The query heads that share this key/value head are summed here, in float32. Where both
    accumulators do not fit the registers (wide heads), two launches compute one gradient each (NEED_DK, NEED_DV).
    columns, unless None: (b, hq, sk), dense; receives Σ_i dS of every query head, for a bias that all queries share.
    out and dq_out, unless None: delta is made of out here, and dQ is stored; one tile holds all keys then, every query
    sees one, delta is None, and head dims have no TAIL.
    """
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    lengths, sq, sk, hq = modifiers.lengths, problem.sq, problem.sk, problem.hq
    first, head_k, sequence, batch, row_k, row_q, rows_k, length_k, length_q = locate_work_tile(
        lengths.cu_k, lengths.k, lengths.cu_q, lengths.q, problem.count, problem.tiles, problem.hk, sk, sq, BLOCK_N,
        False)
    PADDED: tl.constexpr = problem.count is not None
    band = Band(*problem.bounds, length_k - length_q if C.SHIFTED else None)
    place_k = (batch, head_k, row_k)
    k_rows = Rows(head_source(k, batch, head_k, row_k, C.DESCRIPTORS), place_k, k)
    v_rows = Rows(head_source(v, batch, head_k, row_k, C.DESCRIPTORS), place_k, v)
    k_tile = load_tile(k_rows, first, length_k, BLOCK_N, C.D, BLOCK_D, True, C.INT64, C.DESCRIPTORS, False)
    v_tile = load_tile(v_rows, first, length_k, BLOCK_N, C.DV, BLOCK_DV, True, C.INT64, C.DESCRIPTORS, False)
    k_tail = load_tail(k_rows, k_tile, first, length_k, BLOCK_N, C.D, C.TAIL, True, C.INT64)
    keys = KeyTile(k_tile, k_tail, v_tile)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk_tail = tl.zeros([BLOCK_N, BLOCK_TAIL], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    offs_n = first + tl.arange(0, BLOCK_N)
    spans = visible_queries(first, tl.minimum(first + BLOCK_N, length_k) - 1, length_q, band)
    numbers_k = None
    documents_q = None
    documents, lists = modifiers.documents, modifiers.tiles
    if documents.k is not None:
        own_numbers, spans = narrow_to_documents(documents.k, documents.batched, batch, row_k, row_q, offs_n, length_k,
                                                 sk, spans)
        numbers_k = own_numbers[:, None]
        documents_q = document_ids_at(documents.q, documents.batched, batch, row_q, sq)
    ALIGN: tl.constexpr = 1 if modifiers.dropout.ptr is None else SPAN
    start, full_start, full_stop, stop, cover = blocks_of_range(spans, None, C.BLOCK_M, ALIGN)
    READS: tl.constexpr = (modifiers.bias.ptr is not None or modifiers.mask.ptr is not None
                           or modifiers.score_function.call is not None or modifiers.mask_function.call is not None)
    if READS:
        # A last tile that reaches past the keys must not read operands unchecked: none of its steps is whole.
        full_stop = tl.where(first + BLOCK_N > length_k, full_start, full_stop)
    steps = (start, full_start, full_stop, stop, cover)
    COLUMNS: tl.constexpr = columns_ptr is not None and C.NEED_DK  # the launch for dV alone computes no dS
    for member in tl.range(0, problem.group):
        head = head_k * problem.group + member
        place_q = (batch, head, row_q)
        row_offset = head_offset(batch, head, hq * sq, sq) + row_q
        delta_ptrs = None
        out_rows = None
        dq_rows = None
        if dq_out is None:
            delta_ptrs = delta_ptr + row_offset
        else:
            out_rows = Rows(head_source(out, batch, head, row_q, False), place_q, out)
            dq_rows = Rows(head_source(dq_out, batch, head, row_q, False), place_q, dq_out)
        queries = QueryRows(Rows(head_source(q, batch, head, row_q, C.DESCRIPTORS), place_q, q),
                            Rows(head_source(dout, batch, head, row_q, C.DESCRIPTORS), place_q, dout),
                            lse_ptr + row_offset, delta_ptrs, out_rows, dq_rows)
        listed = None
        own_steps = steps
        if lists.k is not None:
            listed = tile_list(lists.k, lists.per_batch, lists.per_head, batch, head, hq, first, sk, sq)
            own_steps = blocks_of_list(listed, stop)
        tile = Tile(sequence * hq + head, sequence, head, first, offs_n, length_k, numbers_k)
        blocks = BlockRange(own_steps, spans[0], listed, documents_q)
        sums = DkdvSums(dk, dk_tail, dv, tl.zeros([BLOCK_N], tl.float32))
        for MASKED in tl.static_range(2):
            sums = accumulate_dkdv(sums, keys, queries, tile, blocks, band, modifiers, problem, COLUMNS, MASKED, C)
        dk, dk_tail, dv, columns = sums
        if COLUMNS:
            columns_base = columns_ptr + head_offset(batch, head, hq * sk, sk) + row_k
            tl.store(columns_base + offs_n, tl.where(offs_n < length_k, columns, 0.0), mask=offs_n < rows_k)
    if C.NEED_DK:
        dk = zero_padding_rows(dk * problem.scale, first, length_k, BLOCK_N, PADDED)
        dk_base = head_source(dk_out, batch, head_k, row_k, False)
        store_tile(dk_base, dk, first, rows_k, dk_out.stride_s, 1, BLOCK_N, C.D, BLOCK_D, C.INT64)
        if C.TAIL:
            dk_tail = zero_padding_rows(dk_tail * problem.scale, first, length_k, BLOCK_N, PADDED)
            store_tile(skip_dims(dk_base, 1, C.D), dk_tail, first, rows_k, dk_out.stride_s, 1, BLOCK_N, C.TAIL,
                       BLOCK_TAIL, C.INT64)
    if C.NEED_DV:
        dv = zero_padding_rows(divide_by_keep_prob(dv, modifiers), first, length_k, BLOCK_N, PADDED)
        store_tile(head_source(dv_out, batch, head_k, row_k, False), dv, first, rows_k, dv_out.stride_s, 1, BLOCK_N,
                   C.DV, BLOCK_DV, C.INT64)


def delta_launch(problem: AttentionProblem, config: DeltaConfig, out_strides: Sizes, dout_strides: Sizes,
                 dlse_strides: Sizes | None) -> Launch:
    """Bind the delta kernel: call the result with (out, dout, dlse or any tensor, delta, modifiers or None)."""
    tiles = tile_slots(problem, problem.sq, config.block_m)
    lse_strides = dlse_strides or (0, 0, 0)
    int64 = needs_int64(problem, out_strides, dout_strides, (*lse_strides, 0))
    scalars = (numbers(problem, tiles), is_shifted(problem), problem.dv, padded_dim(problem.dv),
               dlse_strides is not None, int64, config.block_m)
    return Launch(attention_delta_kernel, tiles * problem.hq * problem.b, scalars,
                  (out_strides, dout_strides, lse_strides), optional=1, num_warps=config.num_warps)


def dkdv_launch(problem: AttentionProblem, config: TileConfig, precision: str, dout_strides: Sizes,
                gradient_strides: tuple[Sizes, Sizes], needs: tuple[bool, bool],
                with_dq: tuple[Sizes, Sizes] | None = None) -> Launch:
    """Bind the dK/dV kernel, which computes those of (dk, dv) that ``needs`` asks for.

    Call the result with (q, k, v, dout, lse, delta, dk, dv, columns or None, out or None, dq or None, modifiers or
    None). ``with_dq``: the strides of out and dq, which both are there then, and no delta.
    """
    need_dk, need_dv = needs
    inputs = (problem.q_strides, problem.k_strides, problem.v_strides, dout_strides)
    int64 = needs_int64(problem, *inputs, *gradient_strides, *(with_dq or ()))
    tiles = tile_slots(problem, problem.sk, config.block_n)
    scalars = (numbers(problem, tiles),
               constants(problem, config, precision, int64, NEED_DK=need_dk, NEED_DV=need_dv))
    strides = (*inputs, None, None, *(own[:3] for own in gradient_strides), None,
               *((with_dq[0], with_dq[1][:3]) if with_dq else ()))
    return Launch(attention_backward_dkdv_kernel, tiles * problem.hk * problem.b, scalars, strides,
                  tile_blocks(problem, config), optional=4, num_warps=config.num_warps, num_stages=config.num_stages)
