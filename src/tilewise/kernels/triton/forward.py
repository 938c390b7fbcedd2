"""Forward: a CTA computes out and lse of a tile of queries, in one pass over the keys it sees (maths.md, section 4)."""

import triton
import triton.language as tl

from tilewise.kernels.triton.config import TileConfig
from tilewise.kernels.triton.launch import (
    Launch,
    constants,
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
from tilewise.kernels.triton.tile_types import Band, BlockRange, Rows, ScoreBlock, Tile
from tilewise.problem import AttentionProblem


@triton.jit
def attend_keys(q, q_tail, k_rows, v_rows, tile, blocks, acc, row_sum, shift, band, modifiers, problem,
                MASKED: tl.constexpr, C: tl.constexpr):
    """Attend to the fully visible keys, or (MASKED) to those around them: the kernel's one loop body.

    float32 scores are scaled, and rounded, by themselves, as in the backward kernels (recompute_probs): dS of a row
    sums to 0 where both passes give a key the same P, and a k that is large may magnify what is left of the sum.
    """
    stop = blocks.steps[3]
    CLIP: tl.constexpr = problem.count is not None
    NATURAL: tl.constexpr = is_natural(q.dtype, C.CHANGED)
    COVERED: tl.constexpr = band.sink_tokens is not None
    ROUNDED: tl.constexpr = modifiers.dropout.unaligned is not None or blocks.listed is not None
    ADDED: tl.constexpr = MASKED and (ROUNDED or COVERED)
    HIDES: tl.constexpr = (MASKED or (modifiers.mask.ptr is not None and blocks.listed is None)
                           or modifiers.mask_function.call is not None)
    # Scores of -inf that nothing hides leave a row without a maximum just as well.
    GUARD: tl.constexpr = HIDES or modifiers.bias.ptr is not None or modifiers.score_function.call is not None
    first = loop_begin(blocks.steps, MASKED)
    last = loop_end(blocks.steps, blocks.listed, MASKED)
    # The masked blocks are few: without a pipeline of their own they leave registers to the others (+6 % at d 64). But
    # a tile of queries from two documents masks all the keys of both, and at d 64 there are registers for it (+16 %).
    ALONE: tl.constexpr = MASKED and (tile.numbers is None or C.BLOCK_D > 64)
    for step in tl.range(first, last, C.BLOCK_N, num_stages=1 if ALONE else None):
        n = block_at(step, blocks.steps, blocks.listed, MASKED, COVERED)
        k = load_tile(k_rows, n, stop, C.BLOCK_N, C.D, C.BLOCK_D, MASKED, C.INT64, C.DESCRIPTORS, CLIP)
        k = zero_invisible_rows(k, n, blocks.seen_from, band.sink_tokens, band.chunk, C.BLOCK_N, ADDED)
        scores = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        if C.TAIL:
            k_tail = load_tail(k_rows, k, n, stop, C.BLOCK_N, C.D, C.TAIL, MASKED, C.INT64)
            k_tail = zero_invisible_rows(k_tail, n, blocks.seen_from, band.sink_tokens, band.chunk, C.BLOCK_N, ADDED)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=C.PRECISION)
        offs_n = n + tl.arange(0, C.BLOCK_N)
        numbers_k = tile.numbers
        if tile.numbers is not None:
            numbers_k = tl.load(blocks.documents + offs_n, mask=offs_n < stop, other=-1)[None, :]
        visible = is_visible(tile.offs[:, None], offs_n[None, :], tile.length, stop, band, tile.numbers, numbers_k)
        block = ScoreBlock(tile.row, tile.sequence, tile.head, tile.first, n, tile.length, stop)
        scores, visible, _tanh, _capped, kept = modify_tile(
            scores, visible, block, modifiers, band, problem.scale_log2, q.dtype == tl.float32, False, MASKED, C)
        if NATURAL:
            scores *= problem.scale
        if HIDES:
            scores = tl.where(visible, scores, float("-inf"))
        probs, shift, row_sum, acc = online_softmax_step(
            scores, shift, row_sum, acc, 1.0 if C.CHANGED else LOG2E if NATURAL else problem.scale_log2, GUARD)
        probs = apply_dropout(probs, kept, modifiers)  # after the sum: what is dropped still counts in the denominator
        v = load_tile(v_rows, n, stop, C.BLOCK_N, C.DV, C.BLOCK_DV, MASKED, C.INT64, C.DESCRIPTORS, CLIP)
        v = zero_invisible_rows(v, n, blocks.seen_from, band.sink_tokens, band.chunk, C.BLOCK_N, ADDED)
        acc = tl.dot(probs.to(v.dtype), v, acc, input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_DV]
    return acc, row_sum, shift


@triton.jit
def attention_forward_kernel(q, k, v, out, lse_ptr, max_ptr, modifiers, problem, C: tl.constexpr):
    """Compute out = softmax(scale·q kᵀ + mask) v and lse for BLOCK_M queries of one head (eq. 4 to 6).

    Grid: (tiles · hq · b,). q, k, v, out: (b, h, s, d) by strides, out's last stride 1; q, k and v come as tensor
    descriptors where DESCRIPTORS. lse and, unless None, max: (b, hq, sq), dense. ``problem``, C: ProblemNumbers and
    Constants (arguments.py).
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    lengths, sq, sk, hq = modifiers.lengths, problem.sq, problem.sk, problem.hq
    first, head, sequence, batch, row_q, row_k, rows_q, length_q, length_k = locate_work_tile(
        lengths.cu_q, lengths.q, lengths.cu_k, lengths.k, problem.count, problem.tiles, hq, sq, sk, BLOCK_M,
        problem.bounds.upper is not None)
    PADDED: tl.constexpr = problem.count is not None
    band = Band(*problem.bounds, length_k - length_q if C.SHIFTED else None)
    offs_m = first + tl.arange(0, BLOCK_M)
    head_k = head // problem.group
    q_rows = Rows(head_source(q, batch, head, row_q, C.DESCRIPTORS), (batch, head, row_q), q)
    k_rows = Rows(head_source(k, batch, head_k, row_k, C.DESCRIPTORS), (batch, head_k, row_k), k)
    v_rows = Rows(head_source(v, batch, head_k, row_k, C.DESCRIPTORS), (batch, head_k, row_k), v)
    q_tile = load_tile(q_rows, first, length_q, BLOCK_M, C.D, C.BLOCK_D, True, C.INT64, C.DESCRIPTORS, False)
    q_tail = load_tail(q_rows, q_tile, first, length_q, BLOCK_M, C.D, C.TAIL, True, C.INT64)

    shift = tl.full([BLOCK_M], float("-inf"), tl.float32)  # eq. 5
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
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
    tile = Tile(sequence * hq + head, sequence, head, first, offs_m, length_q, numbers_q)
    blocks = BlockRange(steps, spans[0], listed, documents_k)
    for MASKED in tl.static_range(2):
        acc, row_sum, shift = attend_keys(q_tile, q_tail, k_rows, v_rows, tile, blocks, acc, row_sum, shift, band,
                                          modifiers, problem, MASKED, C)

    row_offset = head_offset(batch, head, hq * sq, sq) + row_q
    inside = offs_m < rows_q
    NATURAL: tl.constexpr = is_natural(q_tile.dtype, C.CHANGED)
    natural_scale = LN2 if C.CHANGED else 1.0 if NATURAL else problem.scale
    own_scale = 1.0 if C.CHANGED else LOG2E if NATURAL else problem.scale_log2
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
    store_tile(head_source(out, batch, head, row_q, False), acc, first, rows_q, out.stride_s, 1, BLOCK_M, C.DV,
               BLOCK_DV, C.INT64)


def forward_launch(problem: AttentionProblem, config: TileConfig, precision: str) -> Launch:
    """Bind the kernel to a problem: call the result with (q, k, v, out, lse, max or None, modifiers or None)."""
    inputs = (problem.q_strides, problem.k_strides, problem.v_strides)
    int64 = needs_int64(problem, *inputs, problem.out_strides)
    tiles = tile_slots(problem, problem.sq, config.block_m)
    scalars = numbers(problem, tiles), constants(problem, config, precision, int64)
    return Launch(attention_forward_kernel, tiles * problem.hq * problem.b, scalars, (*inputs, problem.out_strides[:3]),
                  tile_blocks(problem, config), optional=2, num_warps=config.num_warps, num_stages=config.num_stages)
