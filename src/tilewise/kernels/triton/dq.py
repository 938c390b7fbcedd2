"""Backward: dQ by tiles of queries (maths.md, section 6), and on its way the gradient of a bias (bias_gradient.py)."""

import triton
import triton.language as tl

from tilewise.kernels.triton.bias_gradient import load_pairs_by_halves, pair_rows, pair_strides, store_pairs_by_halves
from tilewise.kernels.triton.config import TileConfig
from tilewise.kernels.triton.launch import Launch, constants, needs_int64, numbers, tile_blocks, tile_slots
from tilewise.kernels.triton.mask_ranges import (
    block_at,
    blocks_of_list,
    blocks_of_range,
    document_ids_at,
    is_visible,
    loop_begin,
    loop_end,
    narrow_to_documents,
    tile_list,
    visible_keys,
    zero_invisible_rows,
)
from tilewise.kernels.triton.modifiers import (
    SPAN,
    distance,
    load_operand,
    modify_tile,
    score_grad_of_function,
    score_grad_of_softcap,
    subtract_delta,
)
from tilewise.kernels.triton.primitives import (
    BLOCK_TAIL,
    head_offset,
    head_source,
    load_tail,
    load_tile,
    prepared_lse,
    recompute_probs,
    score_gradient,
    skip_dims,
    store_tile,
    zero_padding_rows,
)
from tilewise.kernels.triton.tile_scheduler import locate_work_tile
from tilewise.kernels.triton.tile_types import Band, BlockRange, Rows, ScoreBlock, Tile
from tilewise.problem import AttentionProblem, Sizes


@triton.jit
def accumulate_dq(sums, entries, keys, values, pairs_rows, earlier_rows, tile, blocks, band, modifiers, problem,
                  ROWS: tl.constexpr, MOMENTS: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr):
    """Add the fully visible keys, or (MASKED) those around them, to dQ and the sums: the one loop body.

    ``sums`` and ``entries``: a tuple for each batch entry from the tile's on, which share bias, steps and pairs; plain
    ones, as Triton 3.6 loses the names of a tuple's fields where tuples are added.
    """
    stop = blocks.steps[3]
    CLIP: tl.constexpr = problem.count is not None
    ENTRIES: tl.constexpr = C.ENTRIES
    COVERED: tl.constexpr = band.sink_tokens is not None
    ROUNDED: tl.constexpr = modifiers.dropout.unaligned is not None or blocks.listed is not None
    ADDED: tl.constexpr = MASKED and (ROUNDED or COVERED)
    HIDES: tl.constexpr = (MASKED or (modifiers.mask.ptr is not None and blocks.listed is None)
                           or modifiers.mask_function.call is not None)
    first = loop_begin(blocks.steps, MASKED)
    last = loop_end(blocks.steps, blocks.listed, MASKED)
    for step in tl.range(first, last, C.BLOCK_N):
        n = block_at(step, blocks.steps, blocks.listed, MASKED, COVERED)
        offs_n = n + tl.arange(0, C.BLOCK_N)
        made = ()
        pairs = None
        bias = None
        if ENTRIES > 1 and modifiers.bias.ptr is not None:
            shared = ScoreBlock(tile.row, tile.sequence, tile.head, tile.first, n, tile.length, stop)
            bias = load_operand(modifiers.bias, shared, tile.offs[:, None], offs_n[None, :], C.INT64, MASKED)
        for e in tl.static_range(ENTRIES):
            q, q_tail, dout, lse, delta, k_source, v_source, place_k, row = entries[e]
            dq, dq_tail, rows, moments = sums[e]
            k_rows, v_rows = Rows(k_source, place_k, keys), Rows(v_source, place_k, values)
            earlier = None
            if earlier_rows is not None and e == ENTRIES - 1:  # at the sum the CTA would wait for them
                earlier = load_pairs_by_halves(earlier_rows, tile.offs, n, tile.length, stop, C.BLOCK_N, MASKED)
            k = load_tile(k_rows, n, stop, C.BLOCK_N, C.D, C.BLOCK_D, MASKED, C.INT64, C.DESCRIPTORS, CLIP)
            k = zero_invisible_rows(k, n, blocks.seen_from, band.sink_tokens, band.chunk, C.BLOCK_N, ADDED)
            scores = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
            if C.TAIL:
                k_tail = load_tail(k_rows, k, n, stop, C.BLOCK_N, C.D, C.TAIL, MASKED, C.INT64)
                k_tail = zero_invisible_rows(k_tail, n, blocks.seen_from, band.sink_tokens, band.chunk, C.BLOCK_N,
                                             ADDED)
                scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=C.PRECISION)
            v = load_tile(v_rows, n, stop, C.BLOCK_N, C.DV, C.BLOCK_DV, MASKED, C.INT64, C.DESCRIPTORS, CLIP)
            v = zero_invisible_rows(v, n, blocks.seen_from, band.sink_tokens, band.chunk, C.BLOCK_N, ADDED)
            dprobs = tl.dot(dout, tl.trans(v), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
            numbers_k = tile.numbers
            if tile.numbers is not None:
                numbers_k = tl.load(blocks.documents + offs_n, mask=offs_n < stop, other=-1)[None, :]
            visible = is_visible(tile.offs[:, None], offs_n[None, :], tile.length, stop, band, tile.numbers, numbers_k)
            block = ScoreBlock(row, tile.sequence + e, tile.head, tile.first, n, tile.length, stop)
            scores, visible, tanh, capped, kept = modify_tile(
                scores, visible, block, modifiers, band, problem.scale_log2, q.dtype == tl.float32, False, MASKED,
                C, bias)
            probs = recompute_probs(scores, lse[:, None], visible, problem.scale, problem.scale_log2, q.dtype,
                                    C.CHANGED, HIDES)
            difference = subtract_delta(dprobs, delta[:, None], kept, modifiers, False)
            dscores = score_gradient(probs, difference, visible, HIDES)
            if pairs_rows is not None:
                pairs = dscores if pairs is None else pairs + dscores
                if e == ENTRIES - 1:
                    store_pairs_by_halves(pairs_rows, pairs, earlier, tile.offs, n, tile.length, stop, C.BLOCK_N,
                                          MASKED)
            if ROWS:
                rows += tl.sum(dscores, 1)
            if MOMENTS:
                moments -= tl.sum(dscores * distance(tile.offs[:, None], offs_n[None, :], modifiers, band), 1)
            dscores = score_grad_of_function(dscores, capped, visible, block, modifiers, False, MASKED, HIDES, C)
            dscores = score_grad_of_softcap(dscores, tanh, visible, modifiers, HIDES)
            dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_D], eq. 10
            if C.TAIL:
                dq_tail = tl.dot(dscores.to(k.dtype), k_tail, dq_tail, input_precision=C.PRECISION)
            made += ((dq, dq_tail, rows, moments),)
        sums = made
    return sums


@triton.jit(do_not_specialize=["entry"])
def attention_backward_dq_kernel(q, k, v, dout, lse_ptr, delta_ptr, dq_out, rows_ptr, moments_ptr, pairs, earlier_ptr,
                                 entry, modifiers, problem, C: tl.constexpr):
    """Compute dQ = scale·dS K for BLOCK_M queries of one head (eq. 9 and 10).

    Grid: (tiles · hq · b,), or with an ``entry`` (tiles · hq,) for ENTRIES batch entries from that one on: more than
    one only where all have the same lengths, documents and tile lists.
    rows and moments, unless None: (b, hq, sq), dense; receive Σ_j dS, for a bias that all keys share, and
    −Σ_j dS·distance, for ALiBi's slopes. pairs, unless None: (b|1, hq, ≥ sq, ≥ sk); receives dS in the tiles that are
    visible, with what is in ``earlier``, unless that is None, added to it.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_D: tl.constexpr = C.BLOCK_D
    lengths, sq, sk, hq = modifiers.lengths, problem.sq, problem.sk, problem.hq
    first, head, sequence, batch, row_q, row_k, rows_q, length_q, length_k = locate_work_tile(
        lengths.cu_q, lengths.q, lengths.cu_k, lengths.k, problem.count, problem.tiles, hq, sq, sk, BLOCK_M,
        problem.bounds.upper is not None, entry)
    PADDED: tl.constexpr = problem.count is not None
    band = Band(*problem.bounds, length_k - length_q if C.SHIFTED else None)
    offs_m = first + tl.arange(0, BLOCK_M)
    head_k = head // problem.group
    ENTRIES: tl.constexpr = C.ENTRIES
    entries = ()
    sums = ()
    for e in tl.static_range(ENTRIES):
        own = batch + e
        place_q, place_k = (own, head, row_q), (own, head_k, row_k)
        q_rows = Rows(head_source(q, own, head, row_q, C.DESCRIPTORS), place_q, q)
        k_source = head_source(k, own, head_k, row_k, C.DESCRIPTORS)
        v_source = head_source(v, own, head_k, row_k, C.DESCRIPTORS)
        dout_rows = Rows(head_source(dout, own, head, row_q, C.DESCRIPTORS), place_q, dout)
        q_tile = load_tile(q_rows, first, length_q, BLOCK_M, C.D, BLOCK_D, True, C.INT64, C.DESCRIPTORS, False)
        dout_tile = load_tile(dout_rows, first, length_q, BLOCK_M, C.DV, C.BLOCK_DV, True, C.INT64, C.DESCRIPTORS,
                              False)
        q_tail = load_tail(q_rows, q_tile, first, length_q, BLOCK_M, C.D, C.TAIL, True, C.INT64)
        row_offset = head_offset(own, head, hq * sq, sq) + row_q
        lse = tl.load(lse_ptr + row_offset + offs_m, mask=offs_m < length_q, other=0.0)  # [BLOCK_M]
        lse = prepared_lse(lse, q_tile.dtype, C.CHANGED)
        delta = tl.load(delta_ptr + row_offset + offs_m, mask=offs_m < length_q, other=0.0)  # [BLOCK_M]
        entries += ((q_tile, q_tail, dout_tile, lse, delta, k_source, v_source, place_k, (sequence + e) * hq + head),)
        sums += ((tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M, BLOCK_TAIL], tl.float32),
                  tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)),)
    spans = visible_keys(first, tl.minimum(first + BLOCK_M, length_q) - 1, length_k, band)
    numbers_q = None
    documents_k = None
    documents, lists = modifiers.documents, modifiers.tiles
    if documents.q is not None:
        own_numbers, spans = narrow_to_documents(documents.q, documents.batched, batch, row_q, row_k, offs_m, length_q,
                                                 sq, spans)
        numbers_q = own_numbers[:, None]
        documents_k = document_ids_at(documents.k, documents.batched, batch, row_k, sk)
    ALIGN: tl.constexpr = 1 if modifiers.dropout.ptr is None else SPAN
    steps = blocks_of_range(spans, band.sink_tokens, C.BLOCK_N, ALIGN)
    listed = None
    if lists.q is not None:
        listed = tile_list(lists.q, lists.per_batch, lists.per_head, batch, head, hq, first, sq, sk)
        steps = blocks_of_list(listed, spans[3])
    pairs_rows = None
    earlier_rows = None
    if pairs is not None:
        pairs_rows = pair_rows(pairs.ptr, pairs, sequence, head, first, BLOCK_M)
    if earlier_ptr is not None:
        earlier_rows = pair_rows(earlier_ptr, pairs, sequence, head, first, BLOCK_M)
    tile = Tile(sequence * hq + head, sequence, head, first, offs_m, length_q, numbers_q)
    blocks = BlockRange(steps, spans[0], listed, documents_k)
    for MASKED in tl.static_range(2):
        sums = accumulate_dq(sums, entries, k, v, pairs_rows, earlier_rows, tile, blocks, band, modifiers, problem,
                             rows_ptr is not None, moments_ptr is not None, MASKED, C)
    for e in tl.static_range(ENTRIES):
        dq, dq_tail, rows, moments = sums[e]
        dq = zero_padding_rows(dq * problem.scale, first, length_q, BLOCK_M, PADDED)
        dq_base = head_source(dq_out, batch + e, head, row_q, False)
        store_tile(dq_base, dq, first, rows_q, dq_out.stride_s, 1, BLOCK_M, C.D, BLOCK_D, C.INT64)
        if C.TAIL:
            dq_tail = zero_padding_rows(dq_tail * problem.scale, first, length_q, BLOCK_M, PADDED)
            store_tile(skip_dims(dq_base, 1, C.D), dq_tail, first, rows_q, dq_out.stride_s, 1, BLOCK_M, C.TAIL,
                       BLOCK_TAIL, C.INT64)
        own_row = head_offset(batch + e, head, hq * sq, sq) + row_q
        if rows_ptr is not None:
            tl.store(rows_ptr + own_row + offs_m, tl.where(offs_m < length_q, rows, 0.0), mask=offs_m < rows_q)
        if moments_ptr is not None:
            tl.store(moments_ptr + own_row + offs_m, tl.where(offs_m < length_q, moments, 0.0), mask=offs_m < rows_q)


def dq_launch(problem: AttentionProblem, config: TileConfig, precision: str, dout_strides: Sizes,
              dq_strides: Sizes, at_once: int | None = None) -> Launch:
    """Bind the dQ kernel; where it makes the pairs too, ``at_once`` says for how many batch entries, 0 for each apart.

    Call the result with (q, k, v, dout, lse, delta, dq, rows or None, moments or None, pairs or None, earlier pairs or
    None, entry or None, modifiers or None).
    """
    inputs = (problem.q_strides, problem.k_strides, problem.v_strides, dout_strides)
    int64 = needs_int64(problem, *inputs, dq_strides)
    tiles = tile_slots(problem, problem.sq, config.block_m)
    scalars = numbers(problem, tiles), constants(problem, config, precision, int64, ENTRIES=at_once or 1)
    strides = (*inputs, None, None, dq_strides[:3], None, None, pair_strides(problem, at_once))
    return Launch(attention_backward_dq_kernel, tiles * problem.hq * (1 if at_once else problem.b), scalars, strides,
                  tile_blocks(problem, config), optional=6, num_warps=config.num_warps, num_stages=config.num_stages)
