"""The softmax of a warpgroup's scores: 64 queries, a step of keys, each row in four threads (maths.md, section 4)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def hide(s, first_row, first_key, band, C: gl.constexpr):
    """Set the scores of pairs that do not take part to -inf (eq. 12); rows past the last query are not looked at."""
    S_LAYOUT: gl.constexpr = s.type.layout
    _sq, sk, lower, upper = band
    rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    keys = first_key + gl.arange(0, C.KEYS, layout=gl.SliceLayout(0, S_LAYOUT))
    if C.UPPER:
        stop = gl.minimum(rows + (upper + 1), sk)
        s = gl.where(keys[None, :] < stop[:, None], s, float("-inf"))
    else:
        s = gl.where((keys < sk)[None, :], s, float("-inf"))
    if C.LOWER:
        s = gl.where(keys[None, :] >= (rows + lower)[:, None], s, float("-inf"))
    return s


@gluon.jit
def soften(s, row_max, scale_log2, HIDES: gl.constexpr):
    """One online-softmax step (eq. 4 and 7): P of this step, the new maximum, and the factor for what came before."""
    new_max = gl.maximum(row_max, gl.max(s, 1))
    shift = new_max * scale_log2
    if HIDES:  # a row that has seen nothing yet
        shift = gl.where(new_max == float("-inf"), 0.0, shift)
    probs = gl.exp2(s * scale_log2 - shift[:, None])
    return probs, new_max, gl.exp2(row_max * scale_log2 - shift)


@gluon.jit
def in_pairs(p, DTYPE: gl.constexpr):
    """Round P, and hold two neighbours in one 32-bit register: (64, KEYS / 2).

    A loop would carry 16-bit values one by one, and take them apart and put them together in every step.
    """
    even, odd = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    KIND: gl.constexpr = "bf16x2" if DTYPE == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(f"cvt.rn.{KIND}.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32,
                                     is_pure=True, pack=1)


@gluon.jit
def as_operand(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The left operand of a product from rounded pairs; costs nothing."""
    even = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.join(even, odd).reshape([pairs.shape[0], pairs.shape[1] * 2]), LAYOUT)
