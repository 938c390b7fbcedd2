"""Decoding: few queries against a long cache, whose keys are split among programs; then the parts are combined.

The heads of a group share a tile, since they share the keys: row r of it is query r div group of head r mod group. What
takes the time is reading the cache, once. Lengths, tables and positions are read here, so that a CUDA graph replays
with others. Positions are those of the cache: keys lie from its left padding on to its length, and the last query
stands on the last key.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewise.kernels.triton.cache import filled, load_rotated, row_of
from tilewise.kernels.triton.modifiers import add_sink, hyperbolic_tangent, operand_offset
from tilewise.kernels.triton.primitives import (
    LN2,
    LOG2E,
    head_offset,
    offsets,
    online_softmax_weights,
    scaled_max,
)

PARTS = tl.constexpr(32)  # combined at once; the order of sums must not depend on how many there are


class Extras(NamedTuple):
    """What changes a score or a softmax; what a call does not use, and a stride of 1, is None."""

    softcap: float | None = None
    slopes: Any = None  # (b, hq)
    stride_slopes_b: int | None = None
    stride_slopes_h: int | None = None
    sinks: Any = None  # (hq,)
    stride_sinks: int | None = None
    near_0: float | None = None  # as in launch.py


@triton.jit
def keys_of_tile(cache, batch, capacity, first, last, length, sq, lower, upper):
    """Return where the keys that queries ``first .. last`` see begin and stop."""
    start = first * 0
    if cache.leftpad is not None:
        start = tl.load(cache.leftpad + batch).to(tl.int32)
    if lower is not None:
        start = tl.maximum(start, length - sq + first + lower)
    stop = length
    if upper is not None:
        stop = tl.minimum(length, length - sq + last + upper + 1)
    return tl.maximum(start, 0), stop


@triton.jit
def pages_of(cache, batch, n, stop, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Look up the pages of a tile's keys: one where it divides a page, else one a key; 0 without a table."""
    if cache.table is None:
        pages = n * 0
    elif PAGE % BLOCK_N == 0:
        table = cache.table + operand_offset(batch, cache.stride_table, True)
        pages = tl.load(table + n // PAGE, mask=n < stop, other=0)
    else:
        offs_n = n + tl.arange(0, BLOCK_N)
        table = cache.table + operand_offset(batch, cache.stride_table, True)
        pages = tl.load(table + offs_n // PAGE, mask=offs_n < stop, other=0)
    return pages


@triton.jit
def load_cached(base, pages, n, inside, stride_page, stride_s, D: tl.constexpr, BLOCK_D: tl.constexpr,
                PAGE: tl.constexpr, INT64: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load keys or values ``n .. n + BLOCK_N`` of one head, [BLOCK_N, BLOCK_D], 0 where not ``inside``."""
    offs_d = tl.arange(0, BLOCK_D)
    if PAGE == 0:
        rows = base + offsets(n + tl.arange(0, BLOCK_N), stride_s, INT64)
    elif PAGE % BLOCK_N == 0:
        rows = base + pages.to(tl.int64) * stride_page + offsets(n % PAGE + tl.arange(0, BLOCK_N), stride_s, INT64)
    else:
        rows = base + pages.to(tl.int64) * stride_page + offsets((n + tl.arange(0, BLOCK_N)) % PAGE, stride_s, INT64)
    taken = inside[:, None]
    if BLOCK_D != D:
        taken = taken & (offs_d < D)[None, :]
    return tl.load(rows[:, None] + offs_d[None, :], mask=taken, other=0.0)


@triton.jit
def modify_scores(scores, scale_log2, extras, batch, head, place, offs_n, inside_m, EXACT: tl.constexpr):
    """Return scores in base 2, c·tanh(scale·q·k / c) − slope·distance."""
    scores = scores * scale_log2
    if extras.softcap is not None:
        cap = extras.softcap * LOG2E
        scores = hyperbolic_tangent(scores * (1.0 / cap), EXACT or extras.near_0 is not None) * cap
    if extras.slopes is not None:
        slope = tl.load(extras.slopes + operand_offset(batch, extras.stride_slopes_b, True)
                        + operand_offset(head, extras.stride_slopes_h, True), mask=inside_m, other=0.0)
        apart = tl.abs(place[:, None].to(tl.float32) - offs_n[None, :].to(tl.float32))
        scores -= (slope * LOG2E)[:, None] * apart
    return scores


@triton.jit
def finished(row_max, row_sum, acc, sinks, stride_sinks, head, inside):
    """Let the sinks enter, and return lse in base 2 and out; 0 and −inf where nothing was seen (eq. 6)."""
    if sinks is not None:
        sink = tl.load(sinks + operand_offset(head, stride_sinks, True), mask=inside, other=0.0)
        row_max, row_sum, acc = add_sink(row_max, row_sum, acc, sink.to(tl.float32) * LOG2E)
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    return row_max + tl.log2(divisor), acc / divisor[:, None]


@triton.jit(do_not_specialize=["lower", "upper", "sq", "hk", "group", "new", "capacity", "positions", "tiles",
                               "splits", "per_split"])
def attention_decode_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cache, rotary, extras,
                            stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks,
                            stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os,
                            scale_log2, lower, upper, sq, hk, group, new, capacity, positions, tiles, splits, per_split,
                            D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
                            ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, MANY: tl.constexpr,
                            WHOLE: tl.constexpr, INT64: tl.constexpr, PRECISION: tl.constexpr,
                            OVERLAPPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Attend to one split of the keys with BLOCK_M rows (eq. 4 to 6); out is whole or, in float32, a part.

    Grid: (hk · tiles · splits · b,), heads fastest, as they are neighbours in most caches. A split is ``per_split``
    keys, or where that is None an even share. MANY: sq > 1. out: (b, hq, sq, dv) by strides, where not WHOLE
    (b, hq, sq, splits, dv), not divided. lse: (b, hq, sq), dense; where not WHOLE (b, hq, sq, splits, 2): shift and sum
    of each part, since an lse far from 0 has no bits for the sum.
    """
    pid = tl.program_id(0)
    head_k = pid % hk
    tile = (pid // hk) % tiles
    split = (pid // (hk * tiles)) % splits
    batch = pid // (hk * tiles * splits)
    before, length = filled(cache, batch, new, capacity)

    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    query = offs_m // group
    head = head_k * group + offs_m % group
    inside_m = query < sq
    place = length - sq + query
    start, stop = keys_of_tile(cache, batch, capacity, tile * BLOCK_M // group,
                               tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group, sq - 1), length, sq, lower, upper)
    # Tiles begin at multiples of BLOCK_N, so that none lies on two pages, whatever a window or a padding leaves out.
    first = start // BLOCK_N * BLOCK_N
    share = per_split
    if share is None:
        share = tl.cdiv(tl.cdiv(tl.maximum(stop - first, 0), BLOCK_N), splits) * BLOCK_N
    begin = first + split * share
    end = tl.minimum(begin + share, stop)

    q_rows = q_ptr + head_offset(batch, head, stride_qb, stride_qh) + query.to(tl.int64) * stride_qs
    angle = tl.zeros_like(query) + before
    if (lower is not None) or (upper is not None):
        angle = before + query
    angle = tl.minimum(angle, positions - 1)  # behind the last one: as the last one
    q = load_rotated(q_rows, angle, inside_m, rotary, stride_qd, D, BLOCK_D, ROTARY, INTERLEAVED)  # [BLOCK_M, BLOCK_D]
    row = row_of(cache, batch) if PAGE == 0 else batch * 0
    k_base = k_ptr + head_offset(row, head_k, stride_kb, stride_kh)
    v_base = v_ptr + head_offset(row, head_k, stride_vb, stride_vh)
    CHANGED: tl.constexpr = extras.softcap is not None or extras.slopes is not None

    shift = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Summed over the warps once, at the end: each sum over a row is two barriers, and steps are short.
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if OVERLAPPED and not WHOLE:
        gdc_launch_dependents()
    pages = pages_of(cache, batch, begin, end, PAGE, BLOCK_N)
    for n in tl.range(begin, end, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        inside = (offs_n >= start) & (offs_n < end)
        k = load_cached(k_base, pages, n, inside, stride_kb, stride_ks, D, BLOCK_D, PAGE, INT64, BLOCK_N)
        v = load_cached(v_base, pages, n, inside, stride_vb, stride_vs, DV, BLOCK_D, PAGE, INT64, BLOCK_N)
        pages = pages_of(cache, batch, n + BLOCK_N, end, PAGE, BLOCK_N)  # a step ahead: a load that a load waits for
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if CHANGED:
            scores = modify_scores(scores, scale_log2, extras, batch, head, place, offs_n, inside_m,
                                   q.dtype == tl.float32)
        visible = inside[None, :]
        if MANY and lower is not None:
            visible = visible & (offs_n[None, :] >= place[:, None] + lower)
        if MANY and upper is not None:
            visible = visible & (offs_n[None, :] <= place[:, None] + upper)
        scores = tl.where(visible, scores, float("-inf"))
        probs, shift, decay = online_softmax_weights(scores, shift, 1.0 if CHANGED else scale_log2, True)
        sums = sums * decay[:, None] + probs
        acc = tl.dot(probs.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]

    row_sum = tl.sum(sums, 1)
    o_rows = out_ptr + head_offset(batch, head, stride_ob, stride_oh) + query.to(tl.int64) * stride_os
    line = (batch * hk * group + head).to(tl.int64) * sq + query
    stored = inside_m[:, None] & (offs_d < DV)[None, :]
    if WHOLE:
        row_max = scaled_max(shift, 1.0 if CHANGED else scale_log2)
        lse, acc = finished(row_max, row_sum, acc, extras.sinks, extras.stride_sinks, head, inside_m)
        tl.store(lse_ptr + line, lse * LN2, mask=inside_m)
    else:
        o_rows += split * DV
        stored = stored & (begin < end)
        sums_at = lse_ptr + 2 * (line * splits + split)
        tl.store(sums_at, shift, mask=inside_m)
        tl.store(sums_at + 1, row_sum, mask=inside_m)
    tl.store(o_rows[:, None] + offs_d[None, :], acc.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["sq", "hq", "splits"])
def combine_kernel(parts_ptr, sums_ptr, out_ptr, lse_ptr, extras, stride_ob, stride_oh, stride_os, scale_log2, sq, hq,
                   splits, DV: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAPPED: tl.constexpr):
    """Combine the parts of one query of one head (eq. 11), and let the sink enter.

    Grid: (sq · hq · b,). PARTS at a time, whatever the number of splits, and a part without keys has weight 0: a row's
    bits are its own affair.
    """
    if OVERLAPPED:
        gdc_wait()  # until the parts are there
    pid = tl.program_id(0)
    query = pid % sq
    head = (pid // sq) % hq
    batch = pid // (sq * hq)
    offs_d = tl.arange(0, BLOCK_D)
    row = pid.to(tl.int64) * splits
    shift = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for first in tl.range(0, splits, PARTS):
        offs_p = first + tl.arange(0, PARTS)
        shifts = tl.load(sums_ptr + 2 * (row + offs_p), mask=offs_p < splits, other=float("-inf"))
        sums = tl.load(sums_ptr + 2 * (row + offs_p) + 1, mask=offs_p < splits, other=0.0)
        inside = (offs_p < splits)[:, None] & (offs_d < DV)[None, :]
        parts = tl.load(parts_ptr + (row + offs_p)[:, None] * DV + offs_d[None, :], mask=inside, other=0.0)
        # A part without keys was not written. Asked after the load, which need not wait for shifts then; a NaN stays.
        parts = tl.where((shifts != float("-inf"))[:, None], parts, 0.0)
        weights, shift, decay = online_softmax_weights(shifts[None, :], shift, 1.0, True)  # [1, PARTS]
        row_sum = row_sum * decay + tl.sum(weights * sums[None, :], 1)
        acc = acc * decay[:, None] + tl.sum(tl.trans(weights) * parts, 0)[None, :]
    heads = head + tl.zeros([1], tl.int32)
    CHANGED: tl.constexpr = extras.softcap is not None or extras.slopes is not None
    row_max = scaled_max(shift, 1.0 if CHANGED else scale_log2)
    lse, out = finished(row_max, row_sum, acc, extras.sinks, extras.stride_sinks, heads, heads >= 0)
    tl.store(lse_ptr + pid + tl.arange(0, 1), lse * LN2)
    o_row = out_ptr + head_offset(batch, head, stride_ob, stride_oh) + query.to(tl.int64) * stride_os
    tl.store(o_row + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask=(offs_d < DV)[None, :])
