"""Which tile a program works on, and which steps that takes, in what order.

Forward: tiles of queries and the keys they see. Backward: tiles of keys and the queries that see them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

QUERIES = gl.constexpr(64)  # of a part of the sums for dq


@gluon.jit
def tile_at(number, order, sq, C: gl.constexpr):
    """Return (first query, head, batch) of a tile number.

    Heads come in sections whose keys and values fit L2 together. Under an upper bound the work of a tile grows with
    its index: inside a section the longest come first, and the short ones fill the gaps at the end. What is left over
    is the first section: as the last, it would have too few short tiles (5 % at 4096 keys of width 128).

    With C.FROM_END tiles are counted back from the last warpgroup that has a query. Rows that no query is for lie in
    front of the first one then, in the tile that sees the fewest keys, and not behind the last one, in the longest.
    """
    rank, line = _place_of(number, order, C.UPPER)
    tiles, heads, _batches, _section = order
    OWN: gl.constexpr = 64 // C.PACK  # queries of a warpgroup
    if C.FROM_END:
        first = (sq + (OWN - 1)) // OWN * OWN - (rank + 1) * (OWN * C.CONSUMERS)
    else:
        first = (tiles - 1 - rank if C.UPPER else rank) * (OWN * C.CONSUMERS)
    return first, line % heads, line // heads


@gluon.jit
def key_tile_at(number, order, C: gl.constexpr):
    """Return (first key, head of k, batch) of a tile number.

    Heads come in sections as in ``tile_at``; here what fits L2 is q, dout and the sums for dq. Under an upper bound the
    first keys are seen by the most queries. With C.ORDERED tiles of one head wait for one another: in a section those
    that start together are of many heads.
    """
    rank, line = _place_of(number, order, C.UPPER or C.ORDERED)
    _tiles, heads, _batches, _section = order
    return rank * (64 * C.CONSUMERS), line % heads, line // heads


@gluon.jit
def _place_of(number, order, IN_SECTIONS: gl.constexpr):
    """Return (tile, counted from the longest under a bound; line of heads and batches) of a tile number."""
    tiles, heads, batches, section = order
    lines = heads * batches
    if IN_SECTIONS:
        width = (lines - 1) % section + 1
        begin = 0
        if number >= width * tiles:
            begin = width + (number - width * tiles) // (section * tiles) * section
            width = section
        inside = number - begin * tiles
        rank = inside // width
        line = begin + inside % width
    else:
        line = number // tiles
        rank = number - line * tiles
    return rank, line


@gluon.jit
def steps_of(first, band, C: gl.constexpr):
    """Return (start, at the head, masked, steps): the keys that a tile of queries sees, in steps of C.KEYS.

    Steps lie on a grid from ``start`` on and are taken from the last one down. The first ``at the head`` of them, and
    some at the other end, need a mask: ``masked`` in all. There is one step at least, even if nothing is seen.
    """
    sq, sk, lower, upper = band
    last = gl.minimum(first + 64 // C.PACK * C.CONSUMERS, sq) - 1
    start = 0
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
    at_head = steps - gl.maximum(0, gl.minimum(steps, gl.maximum(0, shared_stop - start) // C.KEYS))
    tail = gl.minimum(steps - at_head, gl.maximum(0, shared_start - start + (C.KEYS - 1)) // C.KEYS)
    return start, at_head, at_head + tail, steps


@gluon.jit
def keys_at(step, spans, C: gl.constexpr):
    """Return the first key of a step: the masked ones come first, those of both ends."""
    start, at_head, masked, steps = spans
    place = gl.where(step < masked, step - at_head, steps - 1 - (step - masked + at_head))
    place = gl.where(step < at_head, steps - 1 - step, place)
    return start + place * C.KEYS


@gluon.jit
def keys_of(step, spans, C: gl.constexpr):
    """Return the first key of a forward step; with C.EARLY that of the first keys comes behind the masked ones."""
    if C.EARLY:
        early = early_of(spans)
        step = gl.where(step > early, step - 1, gl.where(step == early, spans[3] - 1, step))
    return keys_at(step, spans, C)


@gluon.jit
def early_of(spans):
    """Return which step is that of the first keys with C.EARLY, if there are so many: never a tile's first one."""
    return gl.maximum(spans[2], 1)


@gluon.jit
def masked_of(row, spans, band, C: gl.constexpr):
    """Return how many steps need a mask for the queries from ``row`` on; with a lower bound, those of the tile."""
    start, _, masked, steps = spans
    if C.UPPER and not C.LOWER:
        _sq, sk, _lower, upper = band
        shared_stop = gl.minimum(sk, row + 1 + upper)
        masked = steps - gl.minimum(steps, gl.maximum(0, shared_stop - start) // C.KEYS)
    return masked


@gluon.jit
def hides_first_step(first_key, steps, row, upper, C: gl.constexpr):
    """Whether a tile's first step, one of several, hides all its keys from a warpgroup's queries, ``row`` and on."""
    return (steps > 1) & (first_key >= row + 64 // C.PACK + upper)


@gluon.jit
def query_steps_of(first, band, C: gl.constexpr):
    """Return (start, at the head, masked, steps): the queries that see a tile of keys, in steps of QUERIES.

    Steps lie on a grid from query 0 on, since the sums for dq are stored by steps. The first ``at the head`` of them
    and some at the other end need a mask: ``masked`` in all; in a tile that reaches past the last key all do. Queries
    past the last one do not: their probabilities are 0. There may be no step.
    """
    sq, sk, lower, upper = band
    last = gl.minimum(first + 64 * C.CONSUMERS, sk) - 1
    start = 0
    shared_start = start
    stop = start + sq
    shared_stop = stop
    if C.UPPER:
        start = gl.maximum(0, first - upper) // QUERIES * QUERIES
        shared_start = gl.maximum(0, last - upper)
    if C.LOWER:
        stop = gl.minimum(sq, last - lower + 1)
        shared_stop = gl.minimum(sq, first - lower + 1)
    steps = gl.maximum(0, stop - start + (QUERIES - 1)) // QUERIES
    at_head = gl.minimum(steps, (shared_start - start + (QUERIES - 1)) // QUERIES)
    at_head = gl.where(first + 64 * C.CONSUMERS > sk, steps, at_head)
    whole = gl.where(shared_stop == sq, steps, gl.maximum(0, shared_stop - start) // QUERIES)
    tail = steps - gl.maximum(at_head, gl.minimum(steps, whole))
    return start, at_head, at_head + tail, steps


@gluon.jit
def queries_at(step, spans, C: gl.constexpr):
    """Return the first query of a step: the masked ones come first, those of both ends.

    With C.ORDERED they come from the last one down: whatever the mask, of tiles that start together the one of the
    earlier keys is at a step first or at the same time. From the first one up a causal tile would have to wait until
    an earlier one has come to its diagonal.
    """
    start, at_head, masked, steps = spans
    if C.ORDERED:
        place = steps - 1 - step
    else:
        place = gl.where(step < masked, steps - 1 - (step - at_head), step - (masked - at_head))
        place = gl.where(step < at_head, step, place)
    return start + place * QUERIES


@gluon.jit
def queries_to_and_fro(step, first, spans, C: gl.constexpr):
    """Return the first query of a step of the tile of keys from ``first`` on, where a program has all tiles of a head.

    From the last one down, but of every second tile those that need no mask from the first one up: a tile begins with
    what L2 holds of the one before.
    """
    start, at_head, masked, steps = spans
    tail = masked - at_head
    place = steps - 1 - step
    if (first // (64 * C.CONSUMERS) % 2 != 0) & (step >= tail) & (step < steps - at_head):
        place = at_head + step - tail
    return start + place * QUERIES


@gluon.jit
def phases_of(key, spans, band, C: gl.constexpr):
    """Return where phases of steps end for the 64 keys from ``key`` on; all but the second need a mask.

    With C.ORDERED or C.ALONE there are three, of which the first is empty without a lower bound; else two.
    """
    _start, at_head, masked, steps = spans
    own = masked_queries_of(key, spans, band, C)
    if C.ORDERED or C.ALONE:
        ends = (0, masked - at_head, steps - (own - (masked - at_head)), steps)
    else:
        ends = (0, own, steps)
    return ends


@gluon.jit
def rank_of(first, step, band, C: gl.constexpr):
    """Return how many tiles of keys before that from ``first`` on see a step: the first that does sees its first query.

    ``step``: counted on the grid of all. A bound above only ever hides a step from the tiles behind.
    """
    _sq, _sk, lower, _upper = band
    rank = first // (64 * C.CONSUMERS)
    if C.LOWER:
        rank -= gl.maximum(0, step * QUERIES + lower) // (64 * C.CONSUMERS)
    return rank


@gluon.jit
def is_last_of(first, query, band, C: gl.constexpr):
    """Whether no tile of keys behind that from ``first`` on sees the step of queries from ``query`` on."""
    sq, sk, _lower, upper = band
    stop = sk
    if C.UPPER:
        stop = gl.minimum(sk, gl.minimum(query + QUERIES, sq) + upper)
    return first + 64 * C.CONSUMERS >= stop


@gluon.jit
def masked_queries_of(key, spans, band, C: gl.constexpr):
    """Return how many steps need a mask for the 64 keys from ``key`` on; with a lower bound, those of the tile."""
    start, _, masked, steps = spans
    if C.UPPER and not C.LOWER:
        _sq, sk, _lower, upper = band
        own = gl.minimum(steps, gl.maximum(0, key + 63 - upper - start + (QUERIES - 1)) // QUERIES)
        masked = gl.where(key + 64 > sk, steps, own)
    return masked
