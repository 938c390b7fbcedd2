"""Which pairs of a block of queries and a tile of keys take part, in the Hopper backward: P of the others is 0."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.hopper.mask_plan import keep_by_bits
from tilewise.kernels.hopper.mask_ranges import QUERIES


@gluon.jit
def hide_probs(probs, first_query, first_key, bounds, C: gl.constexpr):
    """Set P to 0 where the mask hides the key from the query, or there is no such key (eq. 12)."""
    LAYOUT: gl.constexpr = probs.type.layout
    queries = first_query + gl.arange(0, QUERIES, layout=gl.SliceLayout(0, LAYOUT))
    keys = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    start = gl.full([64], -2**31, gl.int32, layout=gl.SliceLayout(1, LAYOUT))
    if C.HAS_UPPER:
        start = keys - bounds.upper
    start = gl.where(keys < bounds.sk, start, 2**31 - 1)
    probs = gl.where(queries[None, :] >= start[:, None], probs, 0.0)
    if C.HAS_LOWER:
        probs = gl.where(queries[None, :] <= (keys - bounds.lower)[:, None], probs, 0.0)
    return probs


@gluon.jit
def hide_pairs(probs, first_query, words, view, C: gl.constexpr):
    """Set P of pairs that do not take part to 0, by the mask's bounds or by bits."""
    if C.MASK_PLAN:
        return keep_by_bits(probs, words, 0.0)
    else:
        return hide_probs(probs, first_query, view.key, view.bounds, C)
