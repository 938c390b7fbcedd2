"""Backward: delta, then dK and dV by tiles of keys, then dQ by tiles of queries (maths.md, section 6).

Each output tile has one owner that sums it in registers: no atomics, so the result is the same on every run. The
price is that scores and dP are computed twice: seven matrix products instead of five, eight where dK and dV take a
launch each.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.launch import (
    Launch,
    RowShape,
    TileShape,
    bounds,
    constants,
    joined,
    needs_int64,
    tile_blocks,
    tile_count,
)
from tilewise.kernels.triton.primitives import (
    LOG2E,
    around,
    head_offset,
    head_source,
    load_tile,
    locate_tile,
    offsets,
    see,
    store_tile,
    tile_spans,
)
from tilewise.problem import AttentionProblem, Sizes, padded_dim


@triton.jit(do_not_specialize=["sq", "hq", "tiles"])
def attention_delta_kernel(out_ptr, dout_ptr, dlse_ptr, delta_ptr,
                           stride_ob, stride_oh, stride_os, stride_od, stride_dob, stride_doh, stride_dos, stride_dod,
                           stride_lb, stride_lh, stride_ls, sq, hq, tiles,
                           DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_DLSE: tl.constexpr, INT64: tl.constexpr,
                           BLOCK_M: tl.constexpr):
    """Compute delta = Σ_d out·dout − dlse for BLOCK_M queries of one head (eq. 10).

    Grid: (tiles · hq · b,). out, dout: (b, hq, sq, dv); dlse: (b, hq, sq) by strides; delta: (b, hq, sq), dense.
    """
    tile, head, batch = locate_tile(tiles, hq, False)
    first = tile * BLOCK_M
    out_source = head_source(out_ptr, batch, head, stride_ob, stride_oh, False)
    dout_source = head_source(dout_ptr, batch, head, stride_dob, stride_doh, False)
    out = load_tile(out_source, batch, head, first, sq, stride_os, stride_od, BLOCK_M, DV, BLOCK_DV, True, INT64, False)
    dout = load_tile(dout_source, batch, head, first, sq, stride_dos, stride_dod, BLOCK_M, DV, BLOCK_DV, True, INT64,
                     False)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)  # [BLOCK_M]
    offs_m = first + tl.arange(0, BLOCK_M)
    if HAS_DLSE:
        dlse_base = dlse_ptr + head_offset(batch, head, stride_lb, stride_lh)
        delta -= tl.load(dlse_base + offsets(offs_m, stride_ls, INT64), mask=offs_m < sq, other=0.0)
    tl.store(delta_ptr + head_offset(batch, head, hq * sq, sq) + offs_m, delta, mask=offs_m < sq)


@triton.jit
def recompute_probs(scores, lse, visible, scale_log2, MASKED: tl.constexpr):
    """P = 2^(c·s − lse·log2 e), 0 where hidden (eq. 7); ``lse`` is in base 2 here and broadcasts along the keys."""
    probs = tl.exp2(scores * scale_log2 - lse)
    if MASKED:
        probs = tl.where(visible, probs, 0.0)
    return probs


@triton.jit
def start_of(delta, like, SEEDED: tl.constexpr):
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
def score_gradient(probs, dprobs, delta, visible, SEEDED: tl.constexpr, MASKED: tl.constexpr):
    """Return dS = P∘(dP − delta), 0 where hidden (eq. 9); dP comes with delta already taken off where SEEDED."""
    if not SEEDED:
        dprobs -= delta
    dscores = probs * dprobs
    if MASKED:
        # Not by P = 0 alone: dP may be NaN or inf there, and 0·NaN is NaN.
        dscores = tl.where(visible, dscores, 0.0)
    return dscores


@triton.jit
def sum_over_queries(dk, dv, k, v, q_source, dout_source, batch, head, lse_base, delta_base, offs_n, start, full_start,
                     full_stop, stop, sk, stride_qs, stride_qd, stride_dos, stride_dod, scale_log2, lower, upper,
                     BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
                     BLOCK_DV: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
                     MASKED: tl.constexpr, PRECISION: tl.constexpr, INT64: tl.constexpr, DESCRIPTORS: tl.constexpr,
                     NEED_DK: tl.constexpr, NEED_DV: tl.constexpr):
    """Add the fully visible queries, or (MASKED) those around them, to dK and dV: the kernel's one loop body.

    Score tiles are transposed, keys by queries: P and dS then enter their products without being turned.
    """
    SEEDED: tl.constexpr = HAS_LOWER or HAS_UPPER or BLOCK_D <= 64
    first = start if MASKED else full_start
    last = stop - (full_stop - full_start) if MASKED else full_stop
    for step in tl.range(first, last, BLOCK_M):
        m = around(step, full_start, full_stop) if MASKED else step
        offs_m = m + tl.arange(0, BLOCK_M)
        q = load_tile(q_source, batch, head, m, stop, stride_qs, stride_qd, BLOCK_M, D, BLOCK_D, MASKED, INT64,
                      DESCRIPTORS)
        # Past the last query q, dout, lse and delta are read as 0: P is 1 there, dV adds 1·0 and dK 0·0.
        lse = tl.load(lse_base + offs_m, mask=offs_m < stop, other=0.0) * LOG2E  # [BLOCK_M]
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        dout = load_tile(dout_source, batch, head, m, stop, stride_dos, stride_dod, BLOCK_M, DV, BLOCK_DV, MASKED,
                         INT64, DESCRIPTORS)
        visible = see(offs_m[None, :], offs_n[:, None], stop, sk, lower, upper, HAS_LOWER, HAS_UPPER)
        if NEED_DK:  # before P: the two products then follow one another in the tensor cores
            delta = tl.load(delta_base + offs_m, mask=offs_m < stop, other=0.0)  # [BLOCK_M]
            dprobs = tl.dot(v, tl.trans(dout), start_of(delta[None, :], scores, SEEDED),
                            input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        probs = recompute_probs(scores, lse[None, :], visible, scale_log2, MASKED)
        if NEED_DV:
            dv = tl.dot(probs.to(dout.dtype), dout, dv, input_precision=PRECISION)  # [BLOCK_N, BLOCK_DV], eq. 8
        if NEED_DK:
            dscores = score_gradient(probs, dprobs, delta[None, :], visible, SEEDED, MASKED)
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D], eq. 10
    return dk, dv


@triton.jit(do_not_specialize=["sq", "sk", "lower", "upper", "hq", "hk", "group", "tiles"])
def attention_backward_dkdv_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
                                   stride_qb, stride_qh, stride_qs, stride_qd,
                                   stride_kb, stride_kh, stride_ks, stride_kd,
                                   stride_vb, stride_vh, stride_vs, stride_vd,
                                   stride_dob, stride_doh, stride_dos, stride_dod,
                                   stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
                                   scale, scale_log2, lower, upper, sq, sk, hq, hk, group, tiles,
                                   D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                                   HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr, PRECISION: tl.constexpr,
                                   INT64: tl.constexpr, DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr,
                                   BLOCK_N: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr):
    """Compute dK = scale·dSᵀQ and dV = PᵀdO for BLOCK_N keys of one head (eq. 8 to 10).

    Grid: (tiles · hk · b,). The query heads that share this key/value head are summed here, in float32. Where both
    accumulators do not fit the registers (wide heads), two launches make one gradient each (NEED_DK, NEED_DV).
    """
    tile, head_k, batch = locate_tile(tiles, hk, False)
    first = tile * BLOCK_N
    offs_n = first + tl.arange(0, BLOCK_N)
    k_source = head_source(k_ptr, batch, head_k, stride_kb, stride_kh, DESCRIPTORS)
    v_source = head_source(v_ptr, batch, head_k, stride_vb, stride_vh, DESCRIPTORS)
    k = load_tile(k_source, batch, head_k, first, sk, stride_ks, stride_kd, BLOCK_N, D, BLOCK_D, True, INT64,
                  DESCRIPTORS)
    v = load_tile(v_source, batch, head_k, first, sk, stride_vs, stride_vd, BLOCK_N, DV, BLOCK_DV, True, INT64,
                  DESCRIPTORS)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    last = tl.minimum(first + BLOCK_N, sk) - 1
    start, full_start, full_stop, stop = tile_spans(first, last, sq, -upper, -lower, BLOCK_M, HAS_UPPER, HAS_LOWER)
    for member in tl.range(0, group):
        head = head_k * group + member
        q_source = head_source(q_ptr, batch, head, stride_qb, stride_qh, DESCRIPTORS)
        dout_source = head_source(dout_ptr, batch, head, stride_dob, stride_doh, DESCRIPTORS)
        lse_base = lse_ptr + head_offset(batch, head, hq * sq, sq)
        delta_base = delta_ptr + head_offset(batch, head, hq * sq, sq)
        for MASKED in tl.static_range(2):
            dk, dv = sum_over_queries(
                dk, dv, k, v, q_source, dout_source, batch, head, lse_base, delta_base, offs_n, start, full_start,
                full_stop, stop, sk, stride_qs, stride_qd, stride_dos, stride_dod, scale_log2, lower, upper,
                BLOCK_M, D, BLOCK_D, DV, BLOCK_DV, HAS_LOWER, HAS_UPPER, MASKED, PRECISION, INT64, DESCRIPTORS,
                NEED_DK, NEED_DV)
    if NEED_DK:
        store_tile(dk_ptr + head_offset(batch, head_k, stride_dkb, stride_dkh), dk * scale, first, sk, stride_dks, 1,
                   BLOCK_N, D, BLOCK_D, INT64)
    if NEED_DV:
        store_tile(dv_ptr + head_offset(batch, head_k, stride_dvb, stride_dvh), dv, first, sk, stride_dvs, 1,
                   BLOCK_N, DV, BLOCK_DV, INT64)


@triton.jit
def sum_over_keys(dq, q, dout, lse, delta, k_source, v_source, batch, head_k, offs_m, start, full_start, full_stop,
                  stop, sq, stride_ks, stride_kd, stride_vs, stride_vd, scale_log2, lower, upper,
                  BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
                  BLOCK_DV: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
                  MASKED: tl.constexpr, PRECISION: tl.constexpr, INT64: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """Add the fully visible keys, or (MASKED) those around them, to dQ: the kernel's one loop body."""
    first = start if MASKED else full_start
    last = stop - (full_stop - full_start) if MASKED else full_stop
    for step in tl.range(first, last, BLOCK_N):
        n = around(step, full_start, full_stop) if MASKED else step
        offs_n = n + tl.arange(0, BLOCK_N)
        k = load_tile(k_source, batch, head_k, n, stop, stride_ks, stride_kd, BLOCK_N, D, BLOCK_D, MASKED, INT64,
                      DESCRIPTORS)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        v = load_tile(v_source, batch, head_k, n, stop, stride_vs, stride_vd, BLOCK_N, DV, BLOCK_DV, MASKED, INT64,
                      DESCRIPTORS)
        dprobs = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        visible = see(offs_m[:, None], offs_n[None, :], sq, stop, lower, upper, HAS_LOWER, HAS_UPPER)
        probs = recompute_probs(scores, lse[:, None], visible, scale_log2, MASKED)
        dscores = score_gradient(probs, dprobs, delta[:, None], visible, False, MASKED)
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D], eq. 10
    return dq


@triton.jit(do_not_specialize=["sq", "sk", "lower", "upper", "hq", "group", "tiles"])
def attention_backward_dq_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr,
                                 stride_qb, stride_qh, stride_qs, stride_qd,
                                 stride_kb, stride_kh, stride_ks, stride_kd,
                                 stride_vb, stride_vh, stride_vs, stride_vd,
                                 stride_dob, stride_doh, stride_dos, stride_dod,
                                 stride_dqb, stride_dqh, stride_dqs,
                                 scale, scale_log2, lower, upper, sq, sk, hq, group, tiles,
                                 D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                                 HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr, PRECISION: tl.constexpr,
                                 INT64: tl.constexpr, DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr,
                                 BLOCK_N: tl.constexpr):
    """Compute dQ = scale·dS K for BLOCK_M queries of one head (eq. 9 and 10). Grid: (tiles · hq · b,)."""
    tile, head, batch = locate_tile(tiles, hq, HAS_UPPER)
    first = tile * BLOCK_M
    offs_m = first + tl.arange(0, BLOCK_M)
    head_k = head // group
    q_source = head_source(q_ptr, batch, head, stride_qb, stride_qh, DESCRIPTORS)
    k_source = head_source(k_ptr, batch, head_k, stride_kb, stride_kh, DESCRIPTORS)
    v_source = head_source(v_ptr, batch, head_k, stride_vb, stride_vh, DESCRIPTORS)
    dout_source = head_source(dout_ptr, batch, head, stride_dob, stride_doh, DESCRIPTORS)
    q = load_tile(q_source, batch, head, first, sq, stride_qs, stride_qd, BLOCK_M, D, BLOCK_D, True, INT64,
                  DESCRIPTORS)
    dout = load_tile(dout_source, batch, head, first, sq, stride_dos, stride_dod, BLOCK_M, DV, BLOCK_DV, True, INT64,
                     DESCRIPTORS)
    row_base = head_offset(batch, head, hq * sq, sq)
    lse = tl.load(lse_ptr + row_base + offs_m, mask=offs_m < sq, other=0.0) * LOG2E  # [BLOCK_M]
    delta = tl.load(delta_ptr + row_base + offs_m, mask=offs_m < sq, other=0.0)  # [BLOCK_M]

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last = tl.minimum(first + BLOCK_M, sq) - 1
    start, full_start, full_stop, stop = tile_spans(first, last, sk, lower, upper, BLOCK_N, HAS_LOWER, HAS_UPPER)
    for MASKED in tl.static_range(2):
        dq = sum_over_keys(
            dq, q, dout, lse, delta, k_source, v_source, batch, head_k, offs_m, start, full_start, full_stop,
            stop, sq, stride_ks, stride_kd, stride_vs, stride_vd, scale_log2, lower, upper,
            BLOCK_N, D, BLOCK_D, DV, BLOCK_DV, HAS_LOWER, HAS_UPPER, MASKED, PRECISION, INT64, DESCRIPTORS)
    store_tile(dq_ptr + head_offset(batch, head, stride_dqb, stride_dqh), dq * scale, first, sq, stride_dqs, 1,
               BLOCK_M, D, BLOCK_D, INT64)


def delta_launch(problem: AttentionProblem, config: RowShape, out_strides: Sizes, dout_strides: Sizes,
                 dlse_strides: Sizes | None) -> Launch:
    """Bind the delta kernel: call the result with (out, dout, dlse or any tensor, delta)."""
    tiles = tile_count(problem.sq, config.block_m)
    lse_strides = dlse_strides or (0, 0, 0)
    int64 = needs_int64(problem, out_strides, dout_strides, (*lse_strides, 0))
    scalars = (
        *joined(out_strides, dout_strides, lse_strides), problem.sq, problem.hq, tiles,
        problem.dv, padded_dim(problem.dv), dlse_strides is not None, int64, config.block_m,
    )
    return Launch(attention_delta_kernel, tiles * problem.hq * problem.b, scalars, num_warps=config.num_warps)


def dkdv_launch(problem: AttentionProblem, config: TileShape, precision: str, dout_strides: Sizes,
                gradient_strides: tuple[Sizes, Sizes], needs: tuple[bool, bool]) -> Launch:
    """Bind the dK/dV kernel, which makes those of (dk, dv) that ``needs`` asks for.

    Call the result with (q, k, v, dout, lse, delta, dk, dv).
    """
    dk_strides, dv_strides = gradient_strides
    inputs = (problem.q_strides, problem.k_strides, problem.v_strides, dout_strides)
    int64 = needs_int64(problem, *inputs, dk_strides, dv_strides)
    tiles = tile_count(problem.sk, config.block_n)
    scalars = (
        *joined(*inputs, dk_strides[:3], dv_strides[:3]), problem.scale, problem.scale * LOG2E.value,
        *bounds(problem), problem.sq, problem.sk, problem.hq, problem.hk, problem.group, tiles,
        *constants(problem, precision, int64, config.descriptors), config.block_m, config.block_n, *needs,
    )
    return Launch(attention_backward_dkdv_kernel, tiles * problem.hk * problem.b, scalars,
                  tile_blocks(problem, config), num_warps=config.num_warps, num_stages=config.num_stages)


def dq_launch(problem: AttentionProblem, config: TileShape, precision: str, dout_strides: Sizes,
              dq_strides: Sizes) -> Launch:
    """Bind the dQ kernel: call the result with (q, k, v, dout, lse, delta, dq)."""
    inputs = (problem.q_strides, problem.k_strides, problem.v_strides, dout_strides)
    int64 = needs_int64(problem, *inputs, dq_strides)
    tiles = tile_count(problem.sq, config.block_m)
    scalars = (
        *joined(*inputs, dq_strides[:3]), problem.scale, problem.scale * LOG2E.value,
        *bounds(problem), problem.sq, problem.sk, problem.hq, problem.group, tiles,
        *constants(problem, precision, int64, config.descriptors), config.block_m, config.block_n,
    )
    return Launch(attention_backward_dq_kernel, tiles * problem.hq * problem.b, scalars,
                  tile_blocks(problem, config), num_warps=config.num_warps, num_stages=config.num_stages)
