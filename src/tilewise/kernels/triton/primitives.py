"""What the kernels are made of: one formula a function (equation numbers are those of docs/maths.md)."""

import triton
import triton.language as tl

from tilewise.kernels.triton.tile_types import Rows
from tilewise.problem import TAIL_WIDTH

# exp(x) = 2^(x·LOG2E): the hardware's exponential is base 2. Natural logarithms at every border.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
BLOCK_TAIL = tl.constexpr(TAIL_WIDTH)
HUGE = tl.constexpr(2.0**28)  # of shifts: see online_softmax_weights
LOST, UNITS = tl.constexpr(2.0**24), tl.constexpr(2.0**-22)  # of an lse: see prepared_lse


@triton.jit
def head_offset(batch, head, stride_b, stride_h):
    """Offset of one head's first element; 64 bits, as batch and heads can pass 2^31 elements."""
    return batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit
def offsets(positions, stride, INT64: tl.constexpr):
    """Offsets inside one head; 64 bits only where the host found that 32 do not do."""
    if INT64:
        positions = positions.to(tl.int64)
    return positions * stride


@triton.jit
def head_source(tensor, batch, head, row, DESCRIPTORS: tl.constexpr):
    """Return where one sequence of a head is: a pointer to its first row, or the descriptor that ``tensor`` is."""
    if DESCRIPTORS:
        source = tensor
    else:
        offset = head_offset(batch, head, tensor.stride_b, tensor.stride_h)
        source = tensor.ptr + offset + row.to(tl.int64) * tensor.stride_s
    return source


@triton.jit
def load_tile(rows, row, stop, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
              CHECK_ROWS: tl.constexpr, INT64: tl.constexpr, DESCRIPTORS: tl.constexpr, CLIP: tl.constexpr):
    """Load rows ``row .. row + ROWS`` of one sequence of a head, [ROWS, BLOCK_DIM]; zero past row ``stop`` and ``DIM``.

    Through a descriptor the TMA loads them, and clips to the shape that the descriptor was made with, which ends where
    nothing further is seen; of lengths that are on the device it knows nothing, and CLIP zeroes what is past ``stop``.
    Through pointers the threads load them, and CHECK_ROWS = False spares the row check.
    """
    if DESCRIPTORS:
        batch, head, first = rows.place
        tile = rows.source.load([batch, head, first + row, 0]).reshape(ROWS, BLOCK_DIM)
        if CLIP and CHECK_ROWS:
            tile = tl.where((row + tl.arange(0, ROWS) < stop)[:, None], tile, 0.0)
    else:
        offs_s = row + tl.arange(0, ROWS)
        offs_d = tl.arange(0, BLOCK_DIM)
        ptrs = rows.source + offsets(offs_s, rows.tensor.stride_s, INT64)[:, None]
        ptrs += offsets(offs_d, rows.tensor.stride_d, INT64)[None, :]
        if CHECK_ROWS and BLOCK_DIM != DIM:
            tile = tl.load(ptrs, mask=(offs_s < stop)[:, None] & (offs_d < DIM)[None, :], other=0.0)
        elif CHECK_ROWS:
            tile = tl.load(ptrs, mask=(offs_s < stop)[:, None], other=0.0)
        elif BLOCK_DIM != DIM:
            tile = tl.load(ptrs, mask=(offs_d < DIM)[None, :], other=0.0)
        else:
            tile = tl.load(ptrs)
    return tile


@triton.jit
def load_row_values(base, row, stop, ROWS: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """Load one number for each of rows ``row .. row + ROWS``, [ROWS], 0 past ``stop``; CHECK_ROWS as in load_tile.

    The pointer moves before the range is added: what a thread adds to it is then a constant of the copy instruction,
    not 64 bits in registers for each of its rows (sm_90, d 128, Triton 3.6.0: 411 instructions a step of dK/dV, not
    614).
    """
    offs = tl.arange(0, ROWS)
    ptrs = base + row + offs
    if CHECK_ROWS:
        values = tl.load(ptrs, mask=row + offs < stop, other=0.0)
    else:
        values = tl.load(ptrs)
    return values


@triton.jit
def skip_dims(base, stride_d, DIM: tl.constexpr):
    """Move a pointer by DIM head dims; 64 bits, as they may be outermost in memory."""
    return base + tl.full([], DIM, tl.int64) * stride_d


@triton.jit
def load_tail(rows, like, row, stop, ROWS: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr,
              CHECK_ROWS: tl.constexpr, INT64: tl.constexpr):
    """Load head dims ``DIM .. DIM + TAIL`` of the rows, [ROWS, BLOCK_TAIL]; unused zeros without a TAIL.

    A head whose dims are not nearly a power of two takes a second tile sooner than one of twice the width.
    """
    if TAIL:
        remainder = Rows(skip_dims(rows.source, rows.tensor.stride_d, DIM), None, rows.tensor)
        tile = load_tile(remainder, row, stop, ROWS, TAIL, BLOCK_TAIL, CHECK_ROWS, INT64, False, False)
    else:
        tile = tl.zeros([ROWS, BLOCK_TAIL], like.dtype)
    return tile


@triton.jit
def store_tile(base, tile, row, stop, stride_s, stride_d, ROWS: tl.constexpr, DIM: tl.constexpr,
               BLOCK_DIM: tl.constexpr, INT64: tl.constexpr):
    """Store a [ROWS, BLOCK_DIM] tile to rows ``row .. stop`` of one head, in the tensor's own dtype."""
    offs_s = row + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_DIM)
    ptrs = base + offsets(offs_s, stride_s, INT64)[:, None] + offsets(offs_d, stride_d, INT64)[None, :]
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=(offs_s < stop)[:, None] & (offs_d < DIM)[None, :])


@triton.jit
def zero_padding_rows(tile, row, length, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Zero the rows from ``length`` on, which are padding, where there may be some (PADDED)."""
    if PADDED:
        tile = tl.where((row + tl.arange(0, ROWS) < length)[:, None], tile, 0.0)
    return tile


@triton.jit
def online_softmax_step(scores, shift, row_sum, acc, scale_log2, GUARD: tl.constexpr):
    """Fold one tile of unscaled scores into the running softmax (eq. 4, base 2 by eq. 7).

    m' = max(m, c·max_j s_j);  l' = l·2^(m−m') + Σ_j 2^(c·s_j−m');  acc' = acc·2^(m−m'),  c = scale·log2 e > 0
    """
    probs, new_shift, decay = online_softmax_weights(scores, shift, scale_log2, GUARD)
    return probs, new_shift, row_sum * decay + tl.sum(probs, 1), acc * decay[:, None]


@triton.jit
def online_softmax_weights(scores, shift, scale_log2, GUARD: tl.constexpr):
    """Return the tile's probabilities, the new shift of each row, and the factor of sums over earlier keys (eq. 4).

    c·max_j s_j is rounded to make the shift, and in c·s_j − m' nothing is before the end: the largest exponent is not
    0, but what the rounding left. That is a factor of all of a row, and of nothing in out, as long as it is finite: it
    is 2^±8 at most where the shift is below HUGE. From there on c is the next power of two, whose products are exact.
    Scores are then equal or 16 apart, so that what another c makes of the second largest is less than 2^-16; and where
    this tile's maximum is below HUGE and the shift so far is not, or the other way round, one of the two is nothing.
    """
    exact_scale = power_of_two_from(scale_log2)
    top = tl.max(scores, 1)  # [BLOCK_M]
    factor = tl.where(tl.abs(top * scale_log2) < HUGE, scale_log2, exact_scale)
    new_shift = tl.maximum(shift, top * factor)
    subtracted = new_shift
    if GUARD:
        # A row with no visible key yet has m' = −inf; −inf − (−inf) is NaN, so shift by 0 there.
        subtracted = tl.where(new_shift == float("-inf"), 0.0, new_shift)
    # By name, though the compiler makes one instruction of it unasked: the interpreter rounds once, too.
    exponents = tl.fma(scores, factor[:, None], -subtracted[:, None])  # [BLOCK_M, keys]
    return tl.exp2(exponents), new_shift, tl.exp2(shift - subtracted)


@triton.jit
def power_of_two_from(scale):
    """The least power of two that is no less than a positive number."""
    bits = tl.full([], scale, tl.float32).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def scaled_max(shift, scale_log2):
    """c·max_j s_j of each row, in base 2, of the shift that :func:`online_softmax_weights` made of it."""
    return tl.where(tl.abs(shift) < HUGE, shift, shift * (scale_log2 / power_of_two_from(scale_log2)))


@triton.jit
def natural_lse(shift, row_sum, scale, scale_log2):
    """Return scale·max_j s_j + ln of a sum under that shift, rounded about once; scale·log2 e was rounded before."""
    scale_log2 = tl.full([], scale_log2, tl.float32)
    rest = tl.fma(-scale_log2, LN2, scale) / scale_log2  # scale / scale_log2 − LN2
    near = tl.abs(shift) < HUGE
    factor = tl.where(near, LN2, scale / power_of_two_from(scale_log2))
    return tl.fma(shift, factor, tl.where(near, shift, 0.0) * rest + tl.log2(row_sum) * LN2)


@triton.constexpr_function
def is_natural(dtype, changed):
    """Whether scores are scaled by scale, to base e: in float32, unless what CHANGED them left them in base 2."""
    return dtype == tl.float32 and not changed


@triton.jit
def recompute_probs(scores, lse, visible, scale, scale_log2, DTYPE: tl.constexpr, CHANGED: tl.constexpr,
                    MASKED: tl.constexpr):
    """P = 2^(c·s − lse·log2 e), 0 where hidden (eq. 7); ``lse``, of :func:`prepared_lse`, broadcasts along the keys.

    In float32 P = 2^((scale·s − lse)·log2 e), unless CHANGED scores are in base 2 already. One product more a pair, but
    none that rounds lse, and the scale, once more: of scores of 1000 that is 1e-4 of P. Nor is P above 1: the minimum
    keeps the compiler from making one instruction of scale·s − lse, too. Where one key counts, lse is scale·s rounded.
    """
    FLOAT32: tl.constexpr = DTYPE == tl.float32
    NATURAL: tl.constexpr = is_natural(DTYPE, CHANGED)
    scaled = scores * (1.0 if CHANGED else scale if NATURAL else scale_log2)
    if FLOAT32:
        scaled = tl.minimum(scaled, lse, propagate_nan=tl.PropagateNan.ALL)
    exponents = scaled - lse
    if NATURAL:
        exponents *= LOG2E
    probs = tl.exp2(exponents)
    if MASKED:
        probs = tl.where(visible, probs, 0.0)
    return probs


@triton.jit
def prepared_lse(lse, DTYPE: tl.constexpr, CHANGED: tl.constexpr):
    """Lse as :func:`recompute_probs` takes it: in base 2 but for float32 scores that nothing CHANGED, +inf for −inf.

    The latter because a bias or a score function may say −inf of every pair of a row, without hiding one.
    2^(−inf − (−inf)) is NaN, and 2^(−inf) is 0.

    From LOST on, where a unit in its last place is 2 and more, exponents that should be 0 may be far above it. In 16
    bits, where to ask every pair takes time, lse is +inf then: a row has no P, and no gradient, that could overflow. In
    float32 P ends at 1. From HUGE on lse is lowered by four units there: P of a row's greatest score is 1, and not 0.
    """
    if not is_natural(DTYPE, CHANGED):
        lse *= LOG2E
    if DTYPE == tl.float32:
        lowered = tl.where(lse == float("-inf"), float("inf"), lse * tl.where(lse > 0.0, 1.0 - UNITS, 1.0 + UNITS))
        return tl.where(tl.abs(lse) >= HUGE, lowered, lse)
    return tl.where(tl.abs(lse) >= LOST, float("inf"), lse)


@triton.jit
def score_gradient(probs, difference, visible, MASKED: tl.constexpr):
    """Return dS = P∘(dP − delta), 0 where hidden (eq. 9)."""
    dscores = probs * difference
    if MASKED:
        # Not by P = 0 alone: dP may be NaN or inf there, and 0·NaN is NaN.
        dscores = tl.where(visible, dscores, 0.0)
    return dscores
