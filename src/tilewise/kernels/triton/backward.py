"""Backward: delta, then dK and dV by tiles of keys, then dQ by tiles of queries (maths.md, section 6).

Each output tile has one owner that sums it in registers: no atomics, so the result is the same on every run. The
price is that scores and dP are computed twice: seven matrix products instead of five, eight where dK and dV take a
launch each.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.bias_gradient import (
    load_pairs_by_halves,
    pair_rows,
    pair_strides,
    store_pairs_by_halves,
)
from tilewise.kernels.triton.launch import (
    Launch,
    RowShape,
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
    sees_any_key,
    tile_list,
    visible_keys,
    visible_queries,
    zero_invisible_rows,
)
from tilewise.kernels.triton.modifiers import (
    SPAN,
    apply_dropout,
    distance,
    divide_by_keep_prob,
    load_operand,
    modify_tile,
    score_grad_of_function,
    score_grad_of_softcap,
    subtract_delta,
)
from tilewise.kernels.triton.primitives import (
    BLOCK_TAIL,
    LOG2E,
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
from tilewise.problem import AttentionProblem, Sizes, padded_dim


@triton.jit(do_not_specialize=["lower", "upper", "prefix", "sink_tokens", "chunk", "offset", "count", "sq", "sk", "hq",
                               "tiles"])
def attention_delta_kernel(out_ptr, dout_ptr, dlse_ptr, delta_ptr, modifiers,
                           stride_ob, stride_oh, stride_os, stride_od, stride_dob, stride_doh, stride_dos, stride_dod,
                           stride_lb, stride_lh, stride_ls, lower, upper, prefix, sink_tokens, chunk, offset, count,
                           sq, sk, hq, tiles, SHIFTED: tl.constexpr,
                           DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_DLSE: tl.constexpr, INT64: tl.constexpr,
                           BLOCK_M: tl.constexpr):
    """Compute delta = Σ_d out·dout − dlse for BLOCK_M queries of one head (eq. 10).

    Grid: (tiles · hq · b,). out, dout: (b, hq, sq, dv); dlse: (b, hq, sq) by strides; delta: (b, hq, sq), dense.
    The sinks' gradient is a sum over delta, so with sinks what dout holds where nothing is seen must not enter it.
    """
    lengths = modifiers.lengths
    first, head, _sequence, batch, row_q, _row, rows_q, length_q, length_k = locate_work_tile(
        lengths.cu_q, lengths.q, lengths.cu_k, lengths.k, count, tiles, hq, sq, sk, BLOCK_M, False)
    out_source = head_source(out_ptr, batch, head, row_q, stride_ob, stride_oh, stride_os, False)
    dout_source = head_source(dout_ptr, batch, head, row_q, stride_dob, stride_doh, stride_dos, False)
    place = (batch, head, row_q)
    out = load_tile(out_source, place, first, length_q, stride_os, stride_od, BLOCK_M, DV, BLOCK_DV, True, INT64, False,
                    False)
    dout = load_tile(dout_source, place, first, length_q, stride_dos, stride_dod, BLOCK_M, DV, BLOCK_DV, True, INT64,
                     False, False)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)  # [BLOCK_M]
    offs_m = first + tl.arange(0, BLOCK_M)
    if modifiers.sinks.ptr is not None:
        band = (lower, upper, prefix, sink_tokens, chunk, offset, length_k - length_q if SHIFTED else None)
        delta = tl.where(sees_any_key(offs_m, length_q, length_k, band), delta, 0.0)
    if HAS_DLSE:
        dlse_base = dlse_ptr + head_offset(batch, head, stride_lb, stride_lh) + row_q.to(tl.int64) * stride_ls
        delta -= tl.load(dlse_base + offsets(offs_m, stride_ls, INT64), mask=offs_m < length_q, other=0.0)
    tl.store(delta_ptr + head_offset(batch, head, hq * sq, sq) + row_q + offs_m, delta, mask=offs_m < rows_q)


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
def accumulate_dkdv(dk, dk_tail, dv, columns, k, k_tail, v, q_source, dout_source, modifiers, row, sequence, head,
                    place_q, numbers_k, documents_q, listed, lse_base, delta_base, first_key, seen_from, steps,
                    length_k, band, stride_qs, stride_qd, stride_dos, stride_dod, scale, scale_log2,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                    DV: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
                    INT64: tl.constexpr, DESCRIPTORS: tl.constexpr, CHANGED: tl.constexpr, CLIP: tl.constexpr,
                    TAIL: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the fully visible queries, or (MASKED) those around them, to dK, dV and the columns: the one loop body.

    Score tiles are transposed, keys by queries: P and dS then enter their products without a transposition.
    """
    stop = steps[3]
    offs_n = first_key + tl.arange(0, BLOCK_N)
    DROPS: tl.constexpr = modifiers.dropout.ptr is not None
    HIDES: tl.constexpr = (MASKED or (modifiers.mask.ptr is not None and listed is None)
                           or modifiers.mask_function.call is not None)
    ADDED: tl.constexpr = MASKED and (modifiers.dropout.unaligned is not None or listed is not None)
    BOUNDED: tl.constexpr = band[0] is not None or band[1] is not None or numbers_k is not None
    SEEDED: tl.constexpr = (BOUNDED or BLOCK_D <= 64) and not DROPS
    first = loop_begin(steps, MASKED)
    last = loop_end(steps, listed, MASKED)
    for step in tl.range(first, last, BLOCK_M):
        m = block_at(step, steps, listed, MASKED, False)
        offs_m = m + tl.arange(0, BLOCK_M)
        q = load_tile(q_source, place_q, m, stop, stride_qs, stride_qd, BLOCK_M, D, BLOCK_D, MASKED, INT64,
                      DESCRIPTORS, CLIP)
        q = zero_invisible_rows(q, m, seen_from, None, None, BLOCK_M, ADDED)
        # Past the last query q, dout, lse and delta are read as 0: P is 1 there, dV adds 1·0 and dK 0·0.
        lse = prepared_lse(load_row_values(lse_base, m, stop, BLOCK_M, MASKED), q.dtype, CHANGED)  # [BLOCK_M]
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        if TAIL:
            q_tail = load_tail(q_source, q, m, stop, stride_qs, stride_qd, BLOCK_M, D, TAIL, MASKED, INT64)
            q_tail = zero_invisible_rows(q_tail, m, seen_from, None, None, BLOCK_M, ADDED)
            scores = tl.dot(k_tail, tl.trans(q_tail), scores, input_precision=PRECISION)
        dout = load_tile(dout_source, place_q, m, stop, stride_dos, stride_dod, BLOCK_M, DV, BLOCK_DV, MASKED, INT64,
                         DESCRIPTORS, CLIP)
        dout = zero_invisible_rows(dout, m, seen_from, None, None, BLOCK_M, ADDED)
        numbers_q = numbers_k
        if numbers_k is not None:
            numbers_q = tl.load(documents_q + offs_m, mask=offs_m < stop, other=-1)[None, :]
        visible = is_visible(offs_m[None, :], offs_n[:, None], stop, length_k, band, numbers_q, numbers_k)
        scores, visible, tanh, capped, kept = modify_tile(
            scores, visible, modifiers, row, sequence, head, band, m, first_key, stop, length_k, scale_log2,
            q.dtype == tl.float32, INT64, CHANGED, BLOCK_M, BLOCK_N, True, MASKED)
        if NEED_DK:  # before P: the two products then follow one another in the tensor cores
            delta = load_row_values(delta_base, m, stop, BLOCK_M, MASKED)  # [BLOCK_M]
            dprobs = tl.dot(v, tl.trans(dout), initial_dprobs(delta[None, :], scores, SEEDED),
                            input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        probs = recompute_probs(scores, lse[None, :], visible, scale, scale_log2, q.dtype, CHANGED, HIDES)
        if NEED_DV:
            dv = tl.dot(apply_dropout(probs, kept, modifiers).to(dout.dtype), dout, dv,
                        input_precision=PRECISION)  # [BLOCK_N, BLOCK_DV], eq. 8
        if NEED_DK:
            difference = subtract_delta(dprobs, delta[None, :], kept, modifiers, SEEDED)
            dscores = score_gradient(probs, difference, visible, HIDES)
            if COLUMNS:
                columns += tl.sum(dscores, 1)
            dscores = score_grad_of_function(dscores, capped, visible, modifiers, sequence, head, offs_m, first_key,
                                             stop, length_k, INT64, BLOCK_N, True, MASKED, HIDES)
            dscores = score_grad_of_softcap(dscores, tanh, visible, modifiers, HIDES)
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D], eq. 10
            if TAIL:
                dk_tail = tl.dot(dscores.to(q.dtype), q_tail, dk_tail, input_precision=PRECISION)
    return dk, dk_tail, dv, columns


@triton.jit(do_not_specialize=["lower", "upper", "prefix", "sink_tokens", "chunk", "offset", "count", "sq", "sk", "hq",
                               "hk", "group", "tiles"])
def attention_backward_dkdv_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, columns_ptr,
                                   modifiers,
                                   stride_qb, stride_qh, stride_qs, stride_qd,
                                   stride_kb, stride_kh, stride_ks, stride_kd,
                                   stride_vb, stride_vh, stride_vs, stride_vd,
                                   stride_dob, stride_doh, stride_dos, stride_dod,
                                   stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
                                   scale, scale_log2, lower, upper, prefix, sink_tokens, chunk, offset, count,
                                   sq, sk, hq, hk, group, tiles, SHIFTED: tl.constexpr,
                                   D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                                   PRECISION: tl.constexpr, INT64: tl.constexpr, DESCRIPTORS: tl.constexpr,
                                   CHANGED: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr,
                                   BLOCK_N: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr):
    """Compute dK = scale·dSᵀQ and dV = PᵀdO for BLOCK_N keys of one head (eq. 8 to 10).

    Grid: (tiles · hk · b,). The query heads that share this key/value head are summed here, in float32. Where both
    accumulators do not fit the registers (wide heads), two launches make one gradient each (NEED_DK, NEED_DV).
    columns, unless None: (b, hq, sk), dense; receives Σ_i dS of every query head, for a bias that all queries share.
    """
    lengths = modifiers.lengths
    first, head_k, sequence, batch, row_k, row_q, rows_k, length_k, length_q = locate_work_tile(
        lengths.cu_k, lengths.k, lengths.cu_q, lengths.q, count, tiles, hk, sk, sq, BLOCK_N, False)
    PADDED: tl.constexpr = count is not None
    band = (lower, upper, prefix, sink_tokens, chunk, offset, length_k - length_q if SHIFTED else None)
    k_source = head_source(k_ptr, batch, head_k, row_k, stride_kb, stride_kh, stride_ks, DESCRIPTORS)
    v_source = head_source(v_ptr, batch, head_k, row_k, stride_vb, stride_vh, stride_vs, DESCRIPTORS)
    place_k = (batch, head_k, row_k)
    k = load_tile(k_source, place_k, first, length_k, stride_ks, stride_kd, BLOCK_N, D, BLOCK_D, True, INT64,
                  DESCRIPTORS, False)
    v = load_tile(v_source, place_k, first, length_k, stride_vs, stride_vd, BLOCK_N, DV, BLOCK_DV, True, INT64,
                  DESCRIPTORS, False)
    k_tail = load_tail(k_source, k, first, length_k, stride_ks, stride_kd, BLOCK_N, D, TAIL, True, INT64)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk_tail = tl.zeros([BLOCK_N, BLOCK_TAIL], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    offs_n = first + tl.arange(0, BLOCK_N)
    spans = visible_queries(first, tl.minimum(first + BLOCK_N, length_k) - 1, length_q, band)
    numbers_k = None
    documents_q = None
    if modifiers.documents.k is not None:
        numbers, spans = narrow_to_documents(modifiers.documents.k, modifiers.documents.batched, batch, row_k, row_q,
                                             offs_n, length_k, sk, spans)
        numbers_k = numbers[:, None]
        documents_q = document_ids_at(modifiers.documents.q, modifiers.documents.batched, batch, row_q, sq)
    ALIGN: tl.constexpr = 1 if modifiers.dropout.ptr is None else SPAN
    start, full_start, full_stop, stop, cover = blocks_of_range(spans, None, BLOCK_M, ALIGN)
    READS: tl.constexpr = (modifiers.bias.ptr is not None or modifiers.mask.ptr is not None
                           or modifiers.score_function.call is not None or modifiers.mask_function.call is not None)
    if READS:
        # A last tile that reaches past the keys must not read operands unchecked: none of its steps is whole.
        full_stop = tl.where(first + BLOCK_N > length_k, full_start, full_stop)
    steps = (start, full_start, full_stop, stop, cover)
    COLUMNS: tl.constexpr = columns_ptr is not None and NEED_DK  # the launch for dV alone makes no dS
    for member in tl.range(0, group):
        head = head_k * group + member
        q_source = head_source(q_ptr, batch, head, row_q, stride_qb, stride_qh, stride_qs, DESCRIPTORS)
        dout_source = head_source(dout_ptr, batch, head, row_q, stride_dob, stride_doh, stride_dos, DESCRIPTORS)
        row_offset = head_offset(batch, head, hq * sq, sq) + row_q
        columns = tl.zeros([BLOCK_N], tl.float32)
        listed = None
        own_steps = steps
        if modifiers.tiles.k is not None:
            listed = tile_list(modifiers.tiles.k, modifiers.tiles.per_batch, modifiers.tiles.per_head, batch, head, hq,
                               first, sk, sq)
            own_steps = blocks_of_list(listed, stop)
        for MASKED in tl.static_range(2):
            dk, dk_tail, dv, columns = accumulate_dkdv(
                dk, dk_tail, dv, columns, k, k_tail, v, q_source, dout_source, modifiers, sequence * hq + head,
                sequence, head, (batch, head, row_q), numbers_k, documents_q, listed, lse_ptr + row_offset,
                delta_ptr + row_offset, first, spans[0], own_steps, length_k, band, stride_qs, stride_qd, stride_dos,
                stride_dod, scale, scale_log2, BLOCK_M, BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, MASKED, PRECISION, INT64,
                DESCRIPTORS, CHANGED, PADDED, TAIL, NEED_DK, NEED_DV, COLUMNS)
        if COLUMNS:
            columns_base = columns_ptr + head_offset(batch, head, hq * sk, sk) + row_k
            tl.store(columns_base + offs_n, tl.where(offs_n < length_k, columns, 0.0), mask=offs_n < rows_k)
    if NEED_DK:
        dk = zero_padding_rows(dk * scale, first, length_k, BLOCK_N, PADDED)
        dk_base = dk_ptr + head_offset(batch, head_k, stride_dkb, stride_dkh) + row_k.to(tl.int64) * stride_dks
        store_tile(dk_base, dk, first, rows_k, stride_dks, 1, BLOCK_N, D, BLOCK_D, INT64)
        if TAIL:
            dk_tail = zero_padding_rows(dk_tail * scale, first, length_k, BLOCK_N, PADDED)
            store_tile(skip_dims(dk_base, 1, D), dk_tail, first, rows_k, stride_dks, 1, BLOCK_N, TAIL, BLOCK_TAIL,
                       INT64)
    if NEED_DV:
        dv = zero_padding_rows(divide_by_keep_prob(dv, modifiers), first, length_k, BLOCK_N, PADDED)
        dv_base = dv_ptr + head_offset(batch, head_k, stride_dvb, stride_dvh) + row_k.to(tl.int64) * stride_dvs
        store_tile(dv_base, dv, first, rows_k, stride_dvs, 1, BLOCK_N, DV, BLOCK_DV, INT64)


@triton.jit
def accumulate_dq(sums, entries, modifiers, sequence, head, numbers_q, documents_k, listed, own_pairs, earlier_pairs,
                  first_query, offs_m, seen_from, steps, length_q, band, stride_ks, stride_kd, stride_vs, stride_vd,
                  scale, scale_log2, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
                  BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, INT64: tl.constexpr,
                  DESCRIPTORS: tl.constexpr, CHANGED: tl.constexpr, CLIP: tl.constexpr, TAIL: tl.constexpr,
                  ROWS: tl.constexpr, MOMENTS: tl.constexpr, ENTRIES: tl.constexpr):
    """Add the fully visible keys, or (MASKED) those around them, to dQ and the sums: the one loop body.

    ``sums`` and ``entries``: a tuple for each batch entry from ``sequence`` on, which share bias, steps and pairs.
    """
    stop = steps[3]
    COVERED: tl.constexpr = band[3] is not None
    ROUNDED: tl.constexpr = modifiers.dropout.unaligned is not None or listed is not None
    ADDED: tl.constexpr = MASKED and (ROUNDED or COVERED)
    HIDES: tl.constexpr = (MASKED or (modifiers.mask.ptr is not None and listed is None)
                           or modifiers.mask_function.call is not None)
    first = loop_begin(steps, MASKED)
    last = loop_end(steps, listed, MASKED)
    for step in tl.range(first, last, BLOCK_N):
        n = block_at(step, steps, listed, MASKED, COVERED)
        offs_n = n + tl.arange(0, BLOCK_N)
        made = ()
        pairs = None
        bias = None
        if ENTRIES > 1 and modifiers.bias.ptr is not None:
            bias = load_operand(modifiers.bias, sequence, head, offs_m[:, None], offs_n[None, :], length_q, stop, INT64,
                                MASKED)
        for e in tl.static_range(ENTRIES):
            q, q_tail, dout, lse, delta, k_source, v_source, place_k, row = entries[e]
            dq, dq_tail, rows, moments = sums[e]
            earlier = None
            if earlier_pairs is not None and e == ENTRIES - 1:  # at the sum the program would wait for them
                earlier = load_pairs_by_halves(earlier_pairs, offs_m, n, length_q, stop, BLOCK_N, MASKED)
            k = load_tile(k_source, place_k, n, stop, stride_ks, stride_kd, BLOCK_N, D, BLOCK_D, MASKED, INT64,
                          DESCRIPTORS, CLIP)
            k = zero_invisible_rows(k, n, seen_from, band[3], band[4], BLOCK_N, ADDED)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            if TAIL:
                k_tail = load_tail(k_source, k, n, stop, stride_ks, stride_kd, BLOCK_N, D, TAIL, MASKED, INT64)
                k_tail = zero_invisible_rows(k_tail, n, seen_from, band[3], band[4], BLOCK_N, ADDED)
                scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=PRECISION)
            v = load_tile(v_source, place_k, n, stop, stride_vs, stride_vd, BLOCK_N, DV, BLOCK_DV, MASKED, INT64,
                          DESCRIPTORS, CLIP)
            v = zero_invisible_rows(v, n, seen_from, band[3], band[4], BLOCK_N, ADDED)
            dprobs = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            numbers_k = numbers_q
            if numbers_q is not None:
                numbers_k = tl.load(documents_k + offs_n, mask=offs_n < stop, other=-1)[None, :]
            visible = is_visible(offs_m[:, None], offs_n[None, :], length_q, stop, band, numbers_q, numbers_k)
            scores, visible, tanh, capped, kept = modify_tile(
                scores, visible, modifiers, row, sequence + e, head, band, first_query, n, length_q, stop, scale_log2,
                q.dtype == tl.float32, INT64, CHANGED, q.shape[0], BLOCK_N, False, MASKED, bias)
            probs = recompute_probs(scores, lse[:, None], visible, scale, scale_log2, q.dtype, CHANGED, HIDES)
            difference = subtract_delta(dprobs, delta[:, None], kept, modifiers, False)
            dscores = score_gradient(probs, difference, visible, HIDES)
            if own_pairs is not None:
                pairs = dscores if pairs is None else pairs + dscores
                if e == ENTRIES - 1:
                    store_pairs_by_halves(own_pairs, pairs, earlier, offs_m, n, length_q, stop, BLOCK_N, MASKED)
            if ROWS:
                rows += tl.sum(dscores, 1)
            if MOMENTS:
                moments -= tl.sum(dscores * distance(offs_m[:, None], offs_n[None, :], modifiers, band), 1)
            dscores = score_grad_of_function(dscores, capped, visible, modifiers, sequence + e, head, offs_m, n,
                                             length_q, stop, INT64, BLOCK_N, False, MASKED, HIDES)
            dscores = score_grad_of_softcap(dscores, tanh, visible, modifiers, HIDES)
            dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D], eq. 10
            if TAIL:
                dq_tail = tl.dot(dscores.to(k.dtype), k_tail, dq_tail, input_precision=PRECISION)
            made += ((dq, dq_tail, rows, moments),)
        sums = made
    return sums


@triton.jit(do_not_specialize=["lower", "upper", "prefix", "sink_tokens", "chunk", "offset", "count", "sq", "sk", "hq",
                               "group", "tiles", "entry"])
def attention_backward_dq_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, rows_ptr, moments_ptr,
                                 pairs_ptr, earlier_ptr, entry, modifiers,
                                 stride_qb, stride_qh, stride_qs, stride_qd,
                                 stride_kb, stride_kh, stride_ks, stride_kd,
                                 stride_vb, stride_vh, stride_vs, stride_vd,
                                 stride_dob, stride_doh, stride_dos, stride_dod,
                                 stride_dqb, stride_dqh, stride_dqs, stride_pb, stride_ph, stride_pq,
                                 scale, scale_log2, lower, upper, prefix, sink_tokens, chunk, offset, count, sq, sk,
                                 hq, group, tiles, SHIFTED: tl.constexpr,
                                 D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                                 PRECISION: tl.constexpr, INT64: tl.constexpr, DESCRIPTORS: tl.constexpr,
                                 CHANGED: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr,
                                 BLOCK_N: tl.constexpr, ENTRIES: tl.constexpr):
    """Compute dQ = scale·dS K for BLOCK_M queries of one head (eq. 9 and 10).

    Grid: (tiles · hq · b,), or with an ``entry`` (tiles · hq,) for ENTRIES batch entries from that one on: more than
    one only where all have the same lengths, documents and tile lists.
    rows and moments, unless None: (b, hq, sq), dense; receive Σ_j dS, for a bias that all keys share, and
    −Σ_j dS·distance, for ALiBi's slopes. pairs, unless None: (b|1, hq, ≥ sq, ≥ sk); receives dS in the tiles that are
    visible, with what stands in ``earlier``, unless that is None, added to it.
    """
    lengths = modifiers.lengths
    first, head, sequence, batch, row_q, row_k, rows_q, length_q, length_k = locate_work_tile(
        lengths.cu_q, lengths.q, lengths.cu_k, lengths.k, count, tiles, hq, sq, sk, BLOCK_M, upper is not None, entry)
    PADDED: tl.constexpr = count is not None
    band = (lower, upper, prefix, sink_tokens, chunk, offset, length_k - length_q if SHIFTED else None)
    offs_m = first + tl.arange(0, BLOCK_M)
    head_k = head // group
    entries = ()
    sums = ()
    for e in tl.static_range(ENTRIES):
        own = batch + e
        q_source = head_source(q_ptr, own, head, row_q, stride_qb, stride_qh, stride_qs, DESCRIPTORS)
        k_source = head_source(k_ptr, own, head_k, row_k, stride_kb, stride_kh, stride_ks, DESCRIPTORS)
        v_source = head_source(v_ptr, own, head_k, row_k, stride_vb, stride_vh, stride_vs, DESCRIPTORS)
        dout_source = head_source(dout_ptr, own, head, row_q, stride_dob, stride_doh, stride_dos, DESCRIPTORS)
        place_q = (own, head, row_q)
        q = load_tile(q_source, place_q, first, length_q, stride_qs, stride_qd, BLOCK_M, D, BLOCK_D, True, INT64,
                      DESCRIPTORS, False)
        dout = load_tile(dout_source, place_q, first, length_q, stride_dos, stride_dod, BLOCK_M, DV, BLOCK_DV, True,
                         INT64, DESCRIPTORS, False)
        q_tail = load_tail(q_source, q, first, length_q, stride_qs, stride_qd, BLOCK_M, D, TAIL, True, INT64)
        row_offset = head_offset(own, head, hq * sq, sq) + row_q
        lse = tl.load(lse_ptr + row_offset + offs_m, mask=offs_m < length_q, other=0.0)  # [BLOCK_M]
        lse = prepared_lse(lse, q.dtype, CHANGED)
        delta = tl.load(delta_ptr + row_offset + offs_m, mask=offs_m < length_q, other=0.0)  # [BLOCK_M]
        entries += ((q, q_tail, dout, lse, delta, k_source, v_source, (own, head_k, row_k),
                     (sequence + e) * hq + head),)
        sums += ((tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M, BLOCK_TAIL], tl.float32),
                  tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)),)
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
    own_pairs = None
    earlier_pairs = None
    if pairs_ptr is not None:
        own_pairs = pair_rows(pairs_ptr, sequence, head, first, stride_pb, stride_ph, stride_pq, BLOCK_M)
    if earlier_ptr is not None:
        earlier_pairs = pair_rows(earlier_ptr, sequence, head, first, stride_pb, stride_ph, stride_pq, BLOCK_M)
    for MASKED in tl.static_range(2):
        sums = accumulate_dq(
            sums, entries, modifiers, sequence, head, numbers_q, documents_k, listed, own_pairs, earlier_pairs, first,
            offs_m, spans[0], steps, length_q, band, stride_ks, stride_kd, stride_vs, stride_vd, scale, scale_log2,
            BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, MASKED, PRECISION, INT64, DESCRIPTORS, CHANGED, PADDED, TAIL,
            rows_ptr is not None, moments_ptr is not None, ENTRIES)
    for e in tl.static_range(ENTRIES):
        dq, dq_tail, rows, moments = sums[e]
        dq = zero_padding_rows(dq * scale, first, length_q, BLOCK_M, PADDED)
        dq_base = dq_ptr + head_offset(batch + e, head, stride_dqb, stride_dqh) + row_q.to(tl.int64) * stride_dqs
        store_tile(dq_base, dq, first, rows_q, stride_dqs, 1, BLOCK_M, D, BLOCK_D, INT64)
        if TAIL:
            dq_tail = zero_padding_rows(dq_tail * scale, first, length_q, BLOCK_M, PADDED)
            store_tile(skip_dims(dq_base, 1, D), dq_tail, first, rows_q, stride_dqs, 1, BLOCK_M, TAIL, BLOCK_TAIL,
                       INT64)
        own_row = head_offset(batch + e, head, hq * sq, sq) + row_q
        if rows_ptr is not None:
            tl.store(rows_ptr + own_row + offs_m, tl.where(offs_m < length_q, rows, 0.0), mask=offs_m < rows_q)
        if moments_ptr is not None:
            tl.store(moments_ptr + own_row + offs_m, tl.where(offs_m < length_q, moments, 0.0), mask=offs_m < rows_q)


def delta_launch(problem: AttentionProblem, config: RowShape, out_strides: Sizes, dout_strides: Sizes,
                 dlse_strides: Sizes | None) -> Launch:
    """Bind the delta kernel: call the result with (out, dout, dlse or any tensor, delta, modifiers or None)."""
    tiles = tile_slots(problem, problem.sq, config.block_m)
    lse_strides = dlse_strides or (0, 0, 0)
    int64 = needs_int64(problem, out_strides, dout_strides, (*lse_strides, 0))
    scalars = (
        *joined(out_strides, dout_strides, lse_strides), *bounds(problem), problem.sq, problem.sk, problem.hq, tiles,
        is_shifted(problem), problem.dv, padded_dim(problem.dv), dlse_strides is not None, int64, config.block_m,
    )
    return Launch(attention_delta_kernel, tiles * problem.hq * problem.b, scalars, optional=1,
                  num_warps=config.num_warps)


def dkdv_launch(problem: AttentionProblem, config: TileShape, precision: str, dout_strides: Sizes,
                gradient_strides: tuple[Sizes, Sizes], needs: tuple[bool, bool]) -> Launch:
    """Bind the dK/dV kernel, which makes those of (dk, dv) that ``needs`` asks for.

    Call the result with (q, k, v, dout, lse, delta, dk, dv, columns or None, modifiers or None).
    """
    dk_strides, dv_strides = gradient_strides
    inputs = (problem.q_strides, problem.k_strides, problem.v_strides, dout_strides)
    int64 = needs_int64(problem, *inputs, dk_strides, dv_strides)
    tiles = tile_slots(problem, problem.sk, config.block_n)
    scalars = (
        *joined(*inputs, dk_strides[:3], dv_strides[:3]), problem.scale, problem.scale * LOG2E.value,
        *bounds(problem), problem.sq, problem.sk, problem.hq, problem.hk, problem.group, tiles, is_shifted(problem),
        *constants(problem, precision, int64, config.descriptors), config.block_m, config.block_n, *needs,
    )
    return Launch(attention_backward_dkdv_kernel, tiles * problem.hk * problem.b, scalars,
                  tile_blocks(problem, config), optional=2, num_warps=config.num_warps, num_stages=config.num_stages)


def dq_launch(problem: AttentionProblem, config: TileShape, precision: str, dout_strides: Sizes,
              dq_strides: Sizes, at_once: int | None = None) -> Launch:
    """Bind the dQ kernel; where it makes the pairs too, ``at_once`` says for how many batch entries, 0 for each apart.

    Call the result with (q, k, v, dout, lse, delta, dq, rows or None, moments or None, pairs or None, earlier pairs or
    None, entry or None, modifiers or None).
    """
    inputs = (problem.q_strides, problem.k_strides, problem.v_strides, dout_strides)
    int64 = needs_int64(problem, *inputs, dq_strides)
    tiles = tile_slots(problem, problem.sq, config.block_m)
    scalars = (
        *joined(*inputs, dq_strides[:3]), *pair_strides(problem, at_once), problem.scale,
        problem.scale * LOG2E.value, *bounds(problem), problem.sq, problem.sk, problem.hq, problem.group, tiles,
        is_shifted(problem), *constants(problem, precision, int64, config.descriptors), config.block_m,
        config.block_n, at_once or 1,
    )
    return Launch(attention_backward_dq_kernel, tiles * problem.hq * (1 if at_once else problem.b), scalars,
                  tile_blocks(problem, config), optional=6, num_warps=config.num_warps, num_stages=config.num_stages)
