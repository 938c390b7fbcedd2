"""Forward: out and lse of one tile of queries per program, one pass over the keys it sees (maths.md, section 4)."""

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
    tile_list,
    visible_keys,
    zero_invisible_rows,
)
from tilewise.kernels.triton.modifiers import (
    SPAN,
    add_sink,
    apply_dropout,
    divide_by_keep_prob,
    modify_tile,
    operand_offset,
)
from tilewise.kernels.triton.primitives import (
    LN2,
    LOG2E,
    head_offset,
    head_source,
    is_natural,
    load_tail,
    load_tile,
    natural_lse,
    online_softmax_step,
    scaled_max,
    store_tile,
    zero_padding_rows,
)
from tilewise.kernels.triton.tile_scheduler import locate_work_tile
from tilewise.problem import AttentionProblem


@triton.jit
def attend_keys(q, q_tail, k_source, v_source, modifiers, row, sequence, head, place_k, numbers_q, documents_k, listed,
                acc, row_sum, shift, first_query, offs_m, seen_from, steps, length_q, band, stride_ks, stride_kd,
                stride_vs, stride_vd, scale, scale_log2, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                DV: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
                INT64: tl.constexpr, DESCRIPTORS: tl.constexpr, CHANGED: tl.constexpr, CLIP: tl.constexpr,
                TAIL: tl.constexpr):
    """Attend to the fully visible keys, or (MASKED) to those around them: the kernel's one loop body.

    float32 scores are scaled, and rounded, by themselves, as in the backward kernels (recompute_probs): dS of a row
    sums to 0 where both passes give a key the same P, and a k that is large may magnify what is left of the sum.
    """
    stop = steps[3]
    NATURAL: tl.constexpr = is_natural(q.dtype, CHANGED)
    COVERED: tl.constexpr = band[3] is not None
    ROUNDED: tl.constexpr = modifiers.dropout.unaligned is not None or listed is not None
    ADDED: tl.constexpr = MASKED and (ROUNDED or COVERED)
    HIDES: tl.constexpr = (MASKED or (modifiers.mask.ptr is not None and listed is None)
                           or modifiers.mask_function.call is not None)
    # Scores of -inf that nothing hides leave a row without a maximum just as well.
    GUARD: tl.constexpr = HIDES or modifiers.bias.ptr is not None or modifiers.score_function.call is not None
    first = loop_begin(steps, MASKED)
    last = loop_end(steps, listed, MASKED)
    # The masked tiles are few: without a pipeline of their own they leave registers to the others (+6 % at d 64). But
    # a tile of queries from two documents masks all the keys of both, and at d 64 there are registers for it (+16 %).
    ALONE: tl.constexpr = MASKED and (numbers_q is None or BLOCK_D > 64)
    for step in tl.range(first, last, BLOCK_N, num_stages=1 if ALONE else None):
        n = block_at(step, steps, listed, MASKED, COVERED)
        k = load_tile(k_source, place_k, n, stop, stride_ks, stride_kd, BLOCK_N, D, BLOCK_D, MASKED, INT64,
                      DESCRIPTORS, CLIP)
        k = zero_invisible_rows(k, n, seen_from, band[3], band[4], BLOCK_N, ADDED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if TAIL:
            k_tail = load_tail(k_source, k, n, stop, stride_ks, stride_kd, BLOCK_N, D, TAIL, MASKED, INT64)
            k_tail = zero_invisible_rows(k_tail, n, seen_from, band[3], band[4], BLOCK_N, ADDED)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=PRECISION)
        offs_n = n + tl.arange(0, BLOCK_N)
        numbers_k = numbers_q
        if numbers_q is not None:
            numbers_k = tl.load(documents_k + offs_n, mask=offs_n < stop, other=-1)[None, :]
        visible = is_visible(offs_m[:, None], offs_n[None, :], length_q, stop, band, numbers_q, numbers_k)
        scores, visible, _tanh, _capped, kept = modify_tile(
            scores, visible, modifiers, row, sequence, head, band, first_query, n, length_q, stop, scale_log2,
            q.dtype == tl.float32, INT64, CHANGED, q.shape[0], BLOCK_N, False, MASKED)
        if NATURAL:
            scores *= scale
        if HIDES:
            scores = tl.where(visible, scores, float("-inf"))
        probs, shift, row_sum, acc = online_softmax_step(
            scores, shift, row_sum, acc, 1.0 if CHANGED else LOG2E if NATURAL else scale_log2, GUARD)
        probs = apply_dropout(probs, kept, modifiers)  # after the sum: what is dropped still counts in the denominator
        v = load_tile(v_source, place_k, n, stop, stride_vs, stride_vd, BLOCK_N, DV, BLOCK_DV, MASKED, INT64,
                      DESCRIPTORS, CLIP)
        v = zero_invisible_rows(v, n, seen_from, band[3], band[4], BLOCK_N, ADDED)
        acc = tl.dot(probs.to(v.dtype), v, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_DV]
    return acc, row_sum, shift


@triton.jit(do_not_specialize=["sq", "sk", "lower", "upper", "prefix", "sink_tokens", "chunk", "offset", "count", "hq",
                               "group", "tiles"])
def attention_forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, max_ptr, modifiers,
                             stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
                             stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh, stride_os,
                             scale, scale_log2, lower, upper, prefix, sink_tokens, chunk, offset, count, sq, sk, hq,
                             group, tiles, SHIFTED: tl.constexpr,
                             D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                             PRECISION: tl.constexpr, INT64: tl.constexpr, DESCRIPTORS: tl.constexpr,
                             CHANGED: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr,
                             BLOCK_N: tl.constexpr):
    """Compute out = softmax(scale·q kᵀ + mask) v and lse for BLOCK_M queries of one head (eq. 4 to 6).

    Grid: (tiles · hq · b,). q, k, v, out: (b, h, s, d) by strides, out's last stride 1; q, k and v come as tensor
    descriptors where DESCRIPTORS. lse and, unless None, max: (b, hq, sq), dense. CHANGED: modifiers change scores.
    q and k have D + TAIL head dims. ``count``: of the sequences whose lengths are data, else None.
    """
    lengths = modifiers.lengths
    first, head, sequence, batch, row_q, row_k, rows_q, length_q, length_k = locate_work_tile(
        lengths.cu_q, lengths.q, lengths.cu_k, lengths.k, count, tiles, hq, sq, sk, BLOCK_M, upper is not None)
    PADDED: tl.constexpr = count is not None
    band = (lower, upper, prefix, sink_tokens, chunk, offset, length_k - length_q if SHIFTED else None)
    offs_m = first + tl.arange(0, BLOCK_M)
    head_k = head // group
    q_source = head_source(q_ptr, batch, head, row_q, stride_qb, stride_qh, stride_qs, DESCRIPTORS)
    k_source = head_source(k_ptr, batch, head_k, row_k, stride_kb, stride_kh, stride_ks, DESCRIPTORS)
    v_source = head_source(v_ptr, batch, head_k, row_k, stride_vb, stride_vh, stride_vs, DESCRIPTORS)
    q = load_tile(q_source, (batch, head, row_q), first, length_q, stride_qs, stride_qd, BLOCK_M, D, BLOCK_D, True,
                  INT64, DESCRIPTORS, False)
    q_tail = load_tail(q_source, q, first, length_q, stride_qs, stride_qd, BLOCK_M, D, TAIL, True, INT64)

    shift = tl.full([BLOCK_M], float("-inf"), tl.float32)  # eq. 5
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    spans = visible_keys(first, tl.minimum(first + BLOCK_M, length_q) - 1, length_k, band)
    numbers_q = None
    documents_k = None
    if modifiers.documents.q is not None:
        numbers, spans = narrow_to_documents(modifiers.documents.q, modifiers.documents.batched, batch, row_q, row_k,
                                             offs_m, length_q, sq, spans)
        numbers_q = numbers[:, None]
        documents_k = document_ids_at(modifiers.documents.k, modifiers.documents.batched, batch, row_k, sk)
    ALIGN: tl.constexpr = 1 if modifiers.dropout.ptr is None else SPAN
    steps = blocks_of_range(spans, sink_tokens, BLOCK_N, ALIGN)
    listed = None
    if modifiers.tiles.q is not None:
        listed = tile_list(modifiers.tiles.q, modifiers.tiles.per_batch, modifiers.tiles.per_head, batch, head, hq,
                           first, sq, sk)
        steps = blocks_of_list(listed, spans[3])
    row = sequence * hq + head
    for MASKED in tl.static_range(2):
        acc, row_sum, shift = attend_keys(
            q, q_tail, k_source, v_source, modifiers, row, sequence, head, (batch, head_k, row_k), numbers_q,
            documents_k, listed, acc, row_sum, shift, first, offs_m, spans[0], steps, length_q, band, stride_ks,
            stride_kd, stride_vs, stride_vd, scale, scale_log2, BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, MASKED, PRECISION,
            INT64, DESCRIPTORS, CHANGED, PADDED, TAIL)

    row_offset = head_offset(batch, head, hq * sq, sq) + row_q
    inside = offs_m < rows_q
    NATURAL: tl.constexpr = is_natural(q.dtype, CHANGED)
    natural_scale = LN2 if CHANGED else 1.0 if NATURAL else scale
    own_scale = 1.0 if CHANGED else LOG2E if NATURAL else scale_log2
    if max_ptr is not None:
        largest = natural_lse(shift, 1.0, natural_scale, own_scale)
        largest = tl.where(offs_m < length_q, largest, float("-inf"))
        tl.store(max_ptr + row_offset + offs_m, largest, mask=inside)
    if modifiers.sinks.ptr is not None:
        sink = tl.load(modifiers.sinks.ptr + operand_offset(head, modifiers.sinks.stride_h, True))
        sink = sink.to(tl.float32) * LOG2E
        shift, row_sum, acc = add_sink(scaled_max(shift, own_scale), row_sum, acc, sink)
        natural_scale = LN2
        own_scale = 1.0
    acc = divide_by_keep_prob(acc, modifiers)
    # eq. 6. A row that saw no key has m = −inf, l = 0, acc = 0: with l = 1 its lse is −inf and its out 0.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = zero_padding_rows(acc / row_sum[:, None], first, length_q, BLOCK_M, PADDED)
    lse = natural_lse(shift, row_sum, natural_scale, own_scale)
    if PADDED:
        lse = tl.where(offs_m < length_q, lse, float("-inf"))
    tl.store(lse_ptr + row_offset + offs_m, lse, mask=inside)
    out_base = out_ptr + head_offset(batch, head, stride_ob, stride_oh) + row_q.to(tl.int64) * stride_os
    store_tile(out_base, acc, first, rows_q, stride_os, 1, BLOCK_M, DV, BLOCK_DV, INT64)


def forward_launch(problem: AttentionProblem, config: TileShape, precision: str) -> Launch:
    """Bind the kernel to a problem: call the result with (q, k, v, out, lse, max or None, modifiers or None)."""
    inputs = (problem.q_strides, problem.k_strides, problem.v_strides)
    int64 = needs_int64(problem, *inputs, problem.out_strides)
    tiles = tile_slots(problem, problem.sq, config.block_m)
    scalars = (
        *joined(*inputs), *problem.out_strides[:3], problem.scale, problem.scale * LOG2E.value, *bounds(problem),
        problem.sq, problem.sk, problem.hq, problem.group, tiles, is_shifted(problem),
        *constants(problem, precision, int64, config.descriptors), config.block_m, config.block_n,
    )
    blocks = tile_blocks(problem, config)
    return Launch(attention_forward_kernel, tiles * problem.hq * problem.b, scalars, blocks,
                  optional=2, num_warps=config.num_warps, num_stages=config.num_stages)
