"""Which probabilities dropout keeps, as a warpgroup draws it whose rows are queries: 64 of them by keys of a block.

The bits are the same in every backend (maths.md, eq. 19). A thread holds queries i and i + 8, and of every 16 keys
j, j + 1, j + 8 and j + 9. These eight scores share a counter, and Philox is called once for them; nothing passes
between threads.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.hopper.philox import KEY_STEPS, ROUNDS, philox_round
from tilewise.problem.options import DRAW_SPAN

SPAN = gl.constexpr(DRAW_SPAN)


class Draws(NamedTuple):
    """What the random numbers of a work tile are drawn by; () in the place of each without C.HAS_DROPOUT.

    low, high: the seed's halves. row: the number of the query head in the batch. threshold: the first number that keeps
    a score, in the upper half of a word. first_query, first_key: what the positions of rows and keys count from.
    """

    low: Any
    high: Any
    row: Any
    threshold: Any
    first_query: Any
    first_key: Any


@gluon.jit
def draws_of(tile, row, seed_ptr, heads, settings, C: gl.constexpr):
    """Return what a warpgroup's rows of a tile, from ``row`` on, are drawn by."""
    if C.HAS_DROPOUT:
        seed = gl.load(seed_ptr)
        return Draws(seed.to(gl.uint32), (seed >> 32).to(gl.uint32), tile.batch * heads + tile.head,
                     settings.threshold.to(gl.uint32) << 16, settings.origin_q + row, settings.origin_k)
    else:
        return Draws((), (), (), (), (), ())


@gluon.constexpr_function
def layout_of_counters(keys):
    """Who has which counters, (queries, keys): those of the scores that a thread holds."""
    spans = [[0, 4 << i] for i in range((keys // DRAW_SPAN).bit_length() - 1)]
    return gl.DistributedLinearLayout(spans, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [],
                                      [32, keys // 4])


@gluon.jit
def words_of(draws, first_key, KEYS: gl.constexpr):
    """Return the four words of each counter of 64 queries by KEYS keys, (32, KEYS / 4)."""
    COUNTERS: gl.constexpr = layout_of_counters(KEYS)
    keys = gl.arange(0, KEYS // 4, layout=gl.SliceLayout(0, COUNTERS))
    queries = gl.arange(0, 32, layout=gl.SliceLayout(1, COUNTERS))
    c0 = ((draws.first_key + first_key) // 4 + keys).to(gl.uint32)[None, :]
    c1 = (draws.first_query // 2 + queries).to(gl.uint32)[:, None]
    c2 = draws.row.to(gl.uint32)
    c3 = c2 & 0
    k0 = draws.low
    k1 = draws.high
    for _ in gl.static_range(ROUNDS):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0 += KEY_STEPS[0]
        k1 += KEY_STEPS[1]
    return c0, c1, c2, c3


@gluon.jit
def signed(p, words, threshold):
    """Return the probabilities, the dropped ones negative: rounding them takes these for 0 (``softmax.pack_pairs``)."""
    w0, w1, w2, w3 = words
    of_rows = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # (counter, counter, key is odd, query i + 8)
    numbers = gl.join(of_rows << 16, of_rows)  # key j + 8; in the upper half, the lower one then decides nothing
    numbers = numbers.reshape([4, 8, p.shape[1] // SPAN, 4, 2, 2, 2]).permute((0, 5, 1, 2, 6, 3, 4))
    kept = gl.convert_layout(numbers.reshape(p.shape) >= threshold, p.type.layout, assert_trivial=True)
    return gl.where(kept, p, -p)


@gluon.jit
def drop(p, first_key, draws, C: gl.constexpr):
    """With C.HAS_DROPOUT make the probabilities that are dropped, of the keys from ``first_key`` on, negative."""
    if C.HAS_DROPOUT:
        p = signed(p, words_of(draws, first_key, p.shape[1]), draws.threshold)
    return p
