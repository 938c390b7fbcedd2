"""ALiBi in the Hopper kernels, and where a thread's scores lie (maths.md, section 11).

Of every eight columns a thread has the same two, in two rows. Where they lie is counted from its own first column, in
numbers that the compiler knows, as in ``softmax.hide``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def as_pairs(scores):
    """Order 64 rows as threads hold them: (row, eight columns, lane, pair)."""
    return scores.reshape([64, scores.shape[1] // 8, 4, 2])


@gluon.jit
def places_of(scores):
    """Return, in the order of ``as_pairs``, each score's row, its thread's first column, and how far it is behind."""
    LAYOUT: gl.constexpr = as_pairs(scores).type.layout
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    lanes = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))) * 2
    eights = gl.arange(0, scores.shape[1] // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    ones = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    place = (eights * 8)[None, :, None, None] + ones[None, None, None, :]
    return rows[:, None, None, None], lanes[None, None, :, None], place


@gluon.jit
def strided(position, stride):
    """The offset of a position along a dim, in 64 bits; None is a stride of 1."""
    if stride is None:
        return position.to(gl.int64)
    else:
        return position.to(gl.int64) * stride


@gluon.jit
def slope_of(slopes, batch, head, stride_b, stride_h):
    """The slope of a head."""
    return gl.load(slopes + (strided(batch, stride_b) + strided(head, stride_h))).to(gl.float32)


@gluon.jit
def slope_times_distance(scores, corner, slope, KEYS_FIRST: gl.constexpr, SEES_AHEAD: gl.constexpr):
    """A slope times |i + diagonal - j|, in the order of ``as_pairs``; corner: i + diagonal - j of the first score.

    KEYS_FIRST: keys are the rows, else queries are. Without the absolute value unless SEES_AHEAD, since no key that is
    seen is ahead then: the product with a thread's first distance serves all its scores of a row. A slope may be
    negative.
    """
    rows, lanes, place = places_of(scores)
    place = place.to(gl.float32)
    if KEYS_FIRST:
        first = (corner + lanes - rows).to(gl.float32)
    else:
        first = (corner + rows - lanes).to(gl.float32)
        place = -place
    if SEES_AHEAD:
        return gl.abs(first + place) * slope
    else:
        return first * slope + place * slope
