"""Which tile of queries a program works on next, and which keys that tile sees, in the order it takes them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile_at(number, order, C: gl.constexpr):
    """Return (first query, head, batch) of a tile number.

    Heads come in sections whose keys and values fit L2 together. Under an upper bound the work of a tile grows with
    its index: inside a section the longest come first, and the short ones fill the gaps at the end.
    """
    tiles, heads, batches, section = order
    lines = heads * batches
    if C.UPPER:
        begin = number // (section * tiles) * section
        inside = number - begin * tiles
        width = gl.minimum(section, lines - begin)
        tile = tiles - 1 - inside // width
        line = begin + inside % width
    else:
        line = number // tiles
        tile = number - line * tiles
    return tile * (64 * C.CONSUMERS), line % heads, line // heads


@gluon.jit
def steps_of(first, band, C: gl.constexpr):
    """Return (stop, at the head, masked, steps): the keys that a tile of queries sees, in steps of C.KEYS.

    Steps are counted from ``stop`` down. The first ``at the head`` of them, and some at the other end, need a mask:
    ``masked`` in all. There is one step at least, even if nothing is seen.
    """
    sq, sk, lower, upper = band
    last = gl.minimum(first + 64 * C.CONSUMERS, sq) - 1
    start = first * 0
    shared_start = start
    stop = start + sk
    shared_stop = stop
    if C.LOWER:
        start = gl.maximum(0, first + lower)
        shared_start = gl.maximum(0, last + lower)
    if C.UPPER:
        stop = gl.minimum(sk, last + 1 + upper)
        shared_stop = gl.minimum(stop, first + 1 + upper)
    steps = gl.maximum(1, (stop - start + (C.KEYS - 1)) // C.KEYS)
    at_head = gl.minimum(steps, (stop - shared_stop + (C.KEYS - 1)) // C.KEYS)
    whole = gl.maximum(0, stop - shared_start) // C.KEYS  # steps that reach no key before shared_start
    masked = steps - gl.maximum(0, whole - at_head)
    return stop, at_head, masked, steps


@gluon.jit
def keys_at(step, spans, C: gl.constexpr):
    """Return the first key of a step: the masked ones come first, those of both ends."""
    stop, at_head, masked, steps = spans
    place = gl.where(step < masked, steps - 1 - (step - at_head), step - masked + at_head)
    place = gl.where(step < at_head, step, place)
    return stop - (place + 1) * C.KEYS
