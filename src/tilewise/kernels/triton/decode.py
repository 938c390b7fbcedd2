"""Decoding: few queries against a long cache, whose keys are split among CTAs; then the parts are combined.

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
    near_0: float | None = None  # as in arguments.py


class DecodeNumbers(NamedTuple):
    """The numbers of a problem, for which the kernel is not specialised; lower, upper: of the band, or None.

    new: positions that the call appends. capacity: positions of a sequence's cache. positions: rows of the angles.
    per_split: keys of a split, None for an even share.
    """

    scale_log2: float
    lower: int | None
    upper: int | None
    sq: int
    hk: int
    group: int
    new: int
    capacity: int
    positions: int
    tiles: int
    splits: int
    per_split: int | None


class DecodeConstants(NamedTuple):
    """What is fixed when the kernel is compiled.

    PAGE: positions of a page, 0: the cache is not paged. ROTARY: head dims that are rotated. MANY: sq > 1. WHOLE: there
    is one split. OVERLAPPED: the next kernel starts before this one ends.
    """

    D: int
    DV: int
    BLOCK_D: int
    PAGE: int
    ROTARY: int
    INTERLEAVED: bool
    MANY: bool
    WHOLE: bool
    INT64: bool
    PRECISION: str
    OVERLAPPED: bool
    BLOCK_M: int
    BLOCK_N: int


@triton.jit
def keys_of_tile(cache, batch, first, last, length, sq, lower, upper):
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


@triton.jit
def attention_decode_kernel(q, k, v, out, lse_ptr, cache, rotary, extras, problem, C: tl.constexpr):
    """Attend to one split of the keys with BLOCK_M rows (eq. 4 to 6); out is whole or, in float32, a part.

    Grid: (hk · tiles · splits · b,), heads fastest, as they are neighbours in most caches. A split is ``per_split``
    keys, or where that is None an even share. out: (b, hq, sq, dv) by strides, where not WHOLE
    (b, hq, sq, splits, dv), not divided. lse: (b, hq, sq), dense; where not WHOLE (b, hq, sq, splits, 2): shift and sum
    of each part, since an lse far from 0 has no bits for the sum.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    sq, hk, group, tiles, splits = problem.sq, problem.hk, problem.group, problem.tiles, problem.splits
    lower, upper = problem.lower, problem.upper
    pid = tl.program_id(0)
    head_k = pid % hk
    tile = (pid // hk) % tiles
    split = (pid // (hk * tiles)) % splits
    batch = pid // (hk * tiles * splits)
    before, length = filled(cache, batch, problem.new, problem.capacity)

    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    query = offs_m // group
    head = head_k * group + offs_m % group
    inside_m = query < sq
    place = length - sq + query
    last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group, sq - 1)
    start, stop = keys_of_tile(cache, batch, tile * BLOCK_M // group, last_query, length, sq, lower, upper)
    # Tiles begin at multiples of BLOCK_N, so that none lies on two pages, whatever a window or a padding leaves out.
    first = start // BLOCK_N * BLOCK_N
    share = problem.per_split
    if share is None:
        share = tl.cdiv(tl.cdiv(tl.maximum(stop - first, 0), BLOCK_N), splits) * BLOCK_N
    begin = first + split * share
    end = tl.minimum(begin + share, stop)

    q_rows = q.ptr + head_offset(batch, head, q.stride_b, q.stride_h) + query.to(tl.int64) * q.stride_s
    angle = tl.zeros_like(query) + before
    if (lower is not None) or (upper is not None):
        angle = before + query
    angle = tl.minimum(angle, problem.positions - 1)  # behind the last one: as the last one
    q_tile = load_rotated(q_rows, angle, inside_m, rotary, q.stride_d, C.D, BLOCK_D, C.ROTARY, C.INTERLEAVED)
    row = row_of(cache, batch) if C.PAGE == 0 else batch * 0
    k_base = k.ptr + head_offset(row, head_k, k.stride_b, k.stride_h)
    v_base = v.ptr + head_offset(row, head_k, v.stride_b, v.stride_h)
    CHANGED: tl.constexpr = extras.softcap is not None or extras.slopes is not None

    shift = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Summed over the warps once, at the end: each sum over a row is two barriers, and steps are short.
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if C.OVERLAPPED and not C.WHOLE:
        gdc_launch_dependents()
    pages = pages_of(cache, batch, begin, end, C.PAGE, BLOCK_N)
    for n in tl.range(begin, end, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        inside = (offs_n >= start) & (offs_n < end)
        k_tile = load_cached(k_base, pages, n, inside, k.stride_b, k.stride_s, C.D, BLOCK_D, C.PAGE, C.INT64,
                             BLOCK_N)
        v_tile = load_cached(v_base, pages, n, inside, v.stride_b, v.stride_s, C.DV, BLOCK_D, C.PAGE, C.INT64,
                             BLOCK_N)
        # A step ahead: a load that a load waits for.
        pages = pages_of(cache, batch, n + BLOCK_N, end, C.PAGE, BLOCK_N)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        if CHANGED:
            scores = modify_scores(scores, problem.scale_log2, extras, batch, head, place, offs_n, inside_m,
                                   q_tile.dtype == tl.float32)
        visible = inside[None, :]
        if C.MANY and lower is not None:
            visible = visible & (offs_n[None, :] >= place[:, None] + lower)
        if C.MANY and upper is not None:
            visible = visible & (offs_n[None, :] <= place[:, None] + upper)
        scores = tl.where(visible, scores, float("-inf"))
        probs, shift, decay = online_softmax_weights(scores, shift, 1.0 if CHANGED else problem.scale_log2, True)
        sums = sums * decay[:, None] + probs
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc * decay[:, None],
                     input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_D]

    row_sum = tl.sum(sums, 1)
    o_rows = out.ptr + head_offset(batch, head, out.stride_b, out.stride_h) + query.to(tl.int64) * out.stride_s
    lse_row = (batch * hk * group + head).to(tl.int64) * sq + query
    stored = inside_m[:, None] & (offs_d < C.DV)[None, :]
    if C.WHOLE:
        row_max = scaled_max(shift, 1.0 if CHANGED else problem.scale_log2)
        lse, acc = finished(row_max, row_sum, acc, extras.sinks, extras.stride_sinks, head, inside_m)
        tl.store(lse_ptr + lse_row, lse * LN2, mask=inside_m)
    else:
        o_rows += split * C.DV
        stored = stored & (begin < end)
        sums_ptrs = lse_ptr + 2 * (lse_row * splits + split)
        tl.store(sums_ptrs, shift, mask=inside_m)
        tl.store(sums_ptrs + 1, row_sum, mask=inside_m)
    tl.store(o_rows[:, None] + offs_d[None, :], acc.to(out.ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["sq", "hq", "splits"])
def combine_kernel(parts_ptr, sums_ptr, out, lse_ptr, extras, scale_log2, sq, hq, splits, DV: tl.constexpr,
                   BLOCK_D: tl.constexpr, OVERLAPPED: tl.constexpr):
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
    lse, acc = finished(row_max, row_sum, acc, extras.sinks, extras.stride_sinks, heads, heads >= 0)
    tl.store(lse_ptr + pid + tl.arange(0, 1), lse * LN2)
    o_row = out.ptr + head_offset(batch, head, out.stride_b, out.stride_h) + query.to(tl.int64) * out.stride_s
    tl.store(o_row + offs_d[None, :], acc.to(out.ptr.dtype.element_ty), mask=(offs_d < DV)[None, :])
