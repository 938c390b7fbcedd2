"""The softmax of a warpgroup's scores: 64 rows, a step of keys, each row in four threads (maths.md, section 4)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
HUGE = gl.constexpr(268435456.0)  # 2^28, of shifts (shift_for)
# 2^24, of an lse to base 2: a unit in its last place is 2 there, so exponents that should be 0 may be far above it.
LOST = gl.constexpr(16777216.0)


@gluon.constexpr_function
def rows_of_quads(columns):
    """The layout of 64 rows of scores in which four registers of a thread, one behind the other, are of one row."""
    reg_bases = [[0, 1], [0, 8], [8, 0], *([0, column] for column in (16, 32, 64) if column < columns)]
    return gl.DistributedLinearLayout(reg_bases, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
                                      [64, columns])


@gluon.jit
def squashed(s, squash, SHARES_RECIPROCAL: gl.constexpr):
    """Under a softcap, u = (tanh(x) - 1) / 2 = -1 / (1 + exp(2x)), with x = s / softcap; else the scores as they are.

    The softcap times tanh(x) is softcap + 2 softcap·u, and the softmax takes no notice of the first term (maths.md,
    section 11). u errs by up to 2^-22, a few roundings of float32; the capped score by up to 2^-21 of the softcap.

    SHARES_RECIPROCAL: four scores of a row share one, of a product, since the unit that makes reciprocals makes the
    exponentials too; exp(2x) then goes to 2^30, where tanh(x) is 1. One NaN makes all four NaN, so this is for blocks
    without a mask alone: a masked key may hold one. Else each has its own.
    """
    if squash is not None:
        if not SHARES_RECIPROCAL:
            s = gl.inline_asm_elementwise("""{
                .reg .f32 a;
                ex2.approx.ftz.f32 a, $1;
                add.f32 a, a, 0f3F800000;
                rcp.approx.ftz.f32 a, a;
                neg.f32 $0, a;
            }""", "=r,r", [s * squash], dtype=gl.float32, is_pure=True, pack=1)
        else:
            quads = gl.convert_layout(s, rows_of_quads(s.shape[1]), assert_trivial=True)
            quads = gl.inline_asm_elementwise("""{
                .reg .f32 a, b, c, d, ab, cd, r;
                min.NaN.f32 a, $4, 0f41F00000;
                min.NaN.f32 b, $5, 0f41F00000;
                min.NaN.f32 c, $6, 0f41F00000;
                min.NaN.f32 d, $7, 0f41F00000;
                ex2.approx.ftz.f32 a, a;
                ex2.approx.ftz.f32 b, b;
                ex2.approx.ftz.f32 c, c;
                ex2.approx.ftz.f32 d, d;
                add.f32 a, a, 0f3F800000;
                add.f32 b, b, 0f3F800000;
                add.f32 c, c, 0f3F800000;
                add.f32 d, d, 0f3F800000;
                mul.f32 ab, a, b;
                mul.f32 cd, c, d;
                mul.f32 r, ab, cd;
                rcp.approx.ftz.f32 r, r;
                neg.f32 r, r;
                mul.f32 cd, r, cd;
                mul.f32 ab, r, ab;
                mul.f32 $0, cd, b;
                mul.f32 $1, cd, a;
                mul.f32 $2, ab, d;
                mul.f32 $3, ab, c;
            }""", "=&r,=&r,=&r,=&r,r,r,r,r", [quads * squash], dtype=gl.float32, is_pure=True, pack=4)
            s = gl.convert_layout(quads, s.type.layout, assert_trivial=True)
    return s


@gluon.jit
def hide(s, first_row, first_key, bounds, C: gl.constexpr):
    """Set the scores of pairs that do not take part to -inf (eq. 12); rows past the last query are not looked at.

    Of every eight keys a thread has the same two. So the bounds of a row are counted from the thread's own first key,
    and compared with numbers that the compiler knows: two instructions a score, where keys that are computed take six.
    """
    _sq, sk, lower, upper = bounds
    N: gl.constexpr = s.shape[1]
    split = s.reshape([64, N // 8, 4, 2])
    LAYOUT: gl.constexpr = split.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    rows = first_row + gl.arange(0, 64, layout=ROWS) // C.PACK_GQA
    lanes = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))) * 2
    eights = gl.arange(0, N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))) * 8
    ones = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    place = eights[None, :, None, None] + ones[None, None, None, :]
    own = lanes[None, None, :, None] + first_key
    if C.HAS_UPPER:
        stop = gl.minimum(rows + (upper + 1), sk)
        split = gl.where(place < stop[:, None, None, None] - own, split, float("-inf"))
    else:
        split = gl.where(place < sk - own, split, float("-inf"))
    if C.HAS_LOWER:
        split = gl.where(place >= (rows + lower)[:, None, None, None] - own, split, float("-inf"))
    return gl.convert_layout(split.reshape([64, N]), s.type.layout)


@gluon.jit
def per_thread_partials(parts):
    """What each of the four threads of a row has of it, (64, 4), in one layout whatever a step's length."""
    LANES: gl.constexpr = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.convert_layout(parts, gl.DistributedLinearLayout([[8, 0]], LANES, [[16, 0], [32, 0]], [], [64, 4]))


@gluon.jit
def needs_exact_scale(shift):
    """Whether a row's shift is so far from 0 that its product with the scale must be exact (``shift_for``)."""
    return gl.abs(shift) >= HUGE


@gluon.jit
def shift_for(top, scaling):
    """The scaled maximum of each row, by which all its exponents are shifted; ``top``: its largest score.

    The product is rounded, and the exponents, an FMA each, are not: the largest of them is that rounding error, up to
    2^-24 of the shift, and not 0. It is a factor of all of a row's P, and cancels in O; but from 2^28 on P could
    overflow float16. There the scale is replaced by the next power of two, whose products are exact. Exponents are then
    equal or at least 16 apart, so that nothing that counts becomes of another scale.
    """
    shift = top * scaling.scale_log2
    return gl.where(needs_exact_scale(shift), top * scaling.exact_scale, shift)


@gluon.jit
def scaled_max_of(shift, scaling):
    """The largest exponent of each row, whatever was its scale; with softcap·log2 e, which ``squashed`` left out."""
    top = gl.where(needs_exact_scale(shift), shift * (scaling.scale_log2 / scaling.exact_scale), shift)
    if scaling.squash is not None and scaling.to_natural is None:  # else it was added to scores
        top += 0.5 * scaling.scale_log2
    return top


@gluon.jit
def update_shift(s, before, scaling, HIDES: gl.constexpr):
    """Return the new shift of each row, what is subtracted for it, and the factor for what came before."""
    shift = gl.maximum(before, shift_for(gl.max(s, 1), scaling))
    subtracted = shift
    if HIDES:  # a row that has seen nothing yet
        subtracted = gl.where(shift == float("-inf"), 0.0, shift)
    return shift, subtracted, gl.exp2(before - subtracted)


@gluon.jit
def overflowed(row_sum, acc, shift, DTYPE: gl.constexpr):
    """Of each row 1 where a frozen shift was wrong, or what is not finite was there before, else 0.

    Where it was too small: in float16 P overflows first, and O is then not finite. In bfloat16 it goes as far as
    float32: there the sum of P is asked, and below 2^64 no O overflows whose values are below 2^63. Where it is huge:
    blocks with a frozen maximum have one scale for all rows.
    """
    if DTYPE == gl.float16:
        nothing = row_sum * 0.0
        for i in gl.static_range(len(acc)):
            nothing += gl.convert_layout(gl.sum(acc[i] * 0.0, 1), row_sum.type.layout)
        sound = nothing == 0.0
    else:
        sound = row_sum <= 18446744073709551616.0
    sound = sound & ((shift == float("-inf")) | (gl.abs(shift) < HUGE))
    return gl.where(sound, 0, 1).to(gl.int8)


@gluon.jit
def exponentials(s, subtracted, scaling, FROZEN_MAX: gl.constexpr):
    """P of some keys (eq. 4 and 7), not yet rounded. FROZEN_MAX: of rows whose shift is not huge."""
    own = gl.convert_layout(subtracted, gl.SliceLayout(1, s.type.layout))
    if FROZEN_MAX:
        return gl.exp2(s * scaling.scale_log2 - own[:, None])
    else:
        scale = gl.where(needs_exact_scale(own), scaling.exact_scale, scaling.scale_log2)
        return gl.exp2(s * scale[:, None] - own[:, None])


@gluon.jit
def split_halves(s):
    """The scores of a step's first keys, and of its last; costs nothing."""
    HALF: gl.constexpr = s.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    low, high = s.reshape([64, 2, HALF]).permute((0, 2, 1)).split()
    return gl.convert_layout(low, LAYOUT), gl.convert_layout(high, LAYOUT)


@gluon.jit
def sum_of(p, C: gl.constexpr):
    """The sum of each row; of a step in two parts, of each of the four threads that share the row.

    What threads have summed is added when the tile is done, and shuffled between them in no step.
    """
    if C.PARTS == 2:
        return per_thread_partials(gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), 3), 1))
    else:
        return gl.sum(p, 1)


@gluon.constexpr_function
def corrects_rounding(c, dtype):
    """Whether blocks with a frozen maximum keep their largest P, whose rounding then enters O's divisor.

    Under a frozen maximum the largest weight of a row is no power of two: it is rounded in P·V and not in the sum. In
    float16 that is as little as the rounding of out, but for wide heads, where it costs nothing either.
    """
    return c.FROZEN_MAX and (dtype == gl.bfloat16 or sum(c.D) > 128)


@gluon.jit
def no_peak():
    """What ``peak_of`` returns of no keys."""
    LANES: gl.constexpr = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.full([64, 4], 0, gl.int32, layout=gl.DistributedLinearLayout([[8, 0]], LANES, [[16, 0], [32, 0]], [],
                                                                           [64, 4]))


@gluon.jit
def peak_of(p):
    """The largest P of each row in each of its four threads, as bits: of these, Hopper compares three at once."""
    return per_thread_partials(gl.max(gl.max(p.to(gl.int32, bitcast=True).reshape([64, p.shape[1] // 8, 4, 2]), 1), 2))


@gluon.jit
def rounding_of(peak, DTYPE: gl.constexpr):
    """What rounding to DTYPE adds to the largest P of each row."""
    largest = gl.max(peak, 1).to(gl.float32, bitcast=True)
    return largest.to(DTYPE).to(gl.float32) - largest


@gluon.jit
def scaled_sum(row_sum, factor, p, C: gl.constexpr):
    """The sums so far times the factor of their row, if there is one, and those of a step's keys, or of some."""
    if factor is None:
        return row_sum + sum_of(p, C)
    else:
        if C.PARTS == 2:
            factor = gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        return row_sum * factor + sum_of(p, C)


@gluon.jit
def in_float32(bias):
    """Turn a bias to float32. Of bfloat16 two neighbours share a register, which Triton would take apart first."""
    if bias.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=&r,=r,r", [bias],
                                         dtype=gl.float32, is_pure=True, pack=2)
    else:
        return bias.to(gl.float32)


@gluon.jit
def pack_pairs(p, DTYPE: gl.constexpr, DROPS: gl.constexpr = False):
    """Round P, and hold two neighbours in one 32-bit register: (64, KEYS / 2). DROPS: negative ones become 0.

    A loop would carry 16-bit values one by one, and take them apart and put them together in every step.
    """
    even, odd = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    KIND: gl.constexpr = ("relu." if DROPS else "") + ("bf16x2" if DTYPE == gl.bfloat16 else "f16x2")
    return gl.inline_asm_elementwise(f"cvt.rn.{KIND}.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32,
                                     is_pure=True, pack=1)


@gluon.jit
def split_halves_packed(p, DTYPE: gl.constexpr, C: gl.constexpr):
    """P of a whole step, rounded, as the loops carry it."""
    if C.PARTS == 2:
        low, high = split_halves(p)
        return (pack_pairs(low, DTYPE, C.HAS_DROPOUT), pack_pairs(high, DTYPE, C.HAS_DROPOUT))
    else:
        return (pack_pairs(p, DTYPE, C.HAS_DROPOUT),)


@gluon.jit
def as_operand(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The left operand of a product from rounded pairs; costs nothing."""
    even = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.join(even, odd).reshape([pairs.shape[0], pairs.shape[1] * 2]), LAYOUT)


@gluon.jit
def add_sink(top, sinks_ptr, sinks_stride, head):
    """Let the sink of a head, or of each row's, enter the softmax (eq. 4 for one more key, with v = 0).

    Returns the new shift, the factor for what came before, and the sink's P.
    """
    stride = 1 if sinks_stride is None else sinks_stride
    sink = gl.load(sinks_ptr + head * stride).to(gl.float32) * LOG2E
    new_top = gl.maximum(top, sink)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, gl.exp2(top - shift), gl.exp2(sink - shift)


@gluon.jit
def times_tanh_derivative(probs, tanh, MASKED: gl.constexpr):
    """P times 1 - tanh². MASKED: a hidden pair has a P of 0, and its score may be NaN, of which the maximum is 0."""
    derivative = 1.0 - tanh * tanh
    if MASKED:
        derivative = gl.maximum(derivative, 0.0)
    return probs * derivative


@gluon.jit
def tanh_of(s, squash):
    """Under a softcap tanh(x), with x = s / softcap, as the backward pass needs it; else the scores as they are."""
    if squash is not None:
        s = 1.0 + 2.0 * squashed(s, squash, False)
    return s
