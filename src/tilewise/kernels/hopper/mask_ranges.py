"""Which blocks of the other side a tile visits, in what order, and which of them need a mask.

Forward: the blocks of keys that a tile of queries sees. Backward: the blocks of queries that see a tile of keys. The
mask's bounds alone decide (``masks.bands.Band`` has the same ranges on the host; maths.md, equations 13 to 15).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.problem.options import DRAW_SPAN

SPAN = gl.constexpr(DRAW_SPAN)  # of positions that dropout draws for at once
QUERIES = gl.constexpr(64)  # of a block of queries in the backward pass: of a part of the dQ accumulator


class BlockRange(NamedTuple):
    """The blocks of the other side that a tile needs: of keys in the forward pass, of queries in the backward pass.

    With C.MASK_PLAN ``start`` points to their numbers, ``boundary`` of which are partial (mask_plan.py).

    Blocks lie on a grid from ``start`` on. Boundary blocks need a mask, ``boundary`` of them: ``upper_boundary`` are
    cut by the upper bound, and hold the last keys or the first queries; the rest are cut by the lower bound, at the
    other end.
    """

    start: Any
    upper_boundary: Any
    boundary: Any
    count: Any


@gluon.jit
def kv_blocks_of(first, bounds, C: gl.constexpr):
    """Return the blocks of C.BLOCK_N keys that a tile of queries sees; ``n_block_start`` has their order.

    There is at least one block, even if no key is seen. Its boundary blocks are the last ones, then the first ones.
    """
    last = gl.minimum(first + 64 // C.PACK_GQA * C.CONSUMERS, bounds.sq) - 1
    start = 0
    shared_start = start
    stop = start + bounds.sk
    shared_stop = stop
    if C.HAS_LOWER:
        start = gl.maximum(0, first + bounds.lower)
        if C.HAS_DROPOUT:
            start = start // SPAN * SPAN
        shared_start = gl.maximum(0, last + bounds.lower)
    if C.HAS_UPPER:
        stop = gl.minimum(bounds.sk, last + 1 + bounds.upper)
        shared_stop = gl.minimum(stop, first + 1 + bounds.upper)
    count = gl.maximum(1, (stop - start + (C.BLOCK_N - 1)) // C.BLOCK_N)
    upper_boundary = count - gl.maximum(0, gl.minimum(count, gl.maximum(0, shared_stop - start) // C.BLOCK_N))
    lower_boundary = gl.minimum(count - upper_boundary,
                                gl.maximum(0, shared_start - start + (C.BLOCK_N - 1)) // C.BLOCK_N)
    return BlockRange(start, upper_boundary, upper_boundary + lower_boundary, count)


@gluon.jit
def n_block_start(step, blocks, C: gl.constexpr):
    """Return the first key of the block of a step: boundary blocks come first, those of both ends."""
    start, upper_boundary, boundary, count = blocks
    n_block = gl.where(step < boundary, step - upper_boundary, count - 1 - (step - boundary + upper_boundary))
    n_block = gl.where(step < upper_boundary, count - 1 - step, n_block)
    return start + n_block * C.BLOCK_N


@gluon.jit
def kv_block_start(step, blocks, C: gl.constexpr):
    """Return the first key of a forward step's block; with C.SINK_BLOCK_FIRST that of key 0 follows the masked ones."""
    if C.MASK_PLAN:
        return gl.load(blocks.start + step) * C.BLOCK_N
    else:
        if C.SINK_BLOCK_FIRST:
            sinks = sink_block_of(blocks)
            step = gl.where(step > sinks, step - 1, gl.where(step == sinks, blocks.count - 1, step))
        return n_block_start(step, blocks, C)


@gluon.jit
def sink_block_of(blocks):
    """Return the step of the first keys with C.SINK_BLOCK_FIRST, if there are so many: never a tile's first step."""
    return gl.maximum(blocks.boundary, 1)


@gluon.jit
def masked_blocks_of(row, blocks, bounds, C: gl.constexpr):
    """Return how many blocks need a mask for the queries from ``row`` on; with a lower bound, for those of the tile."""
    masked = blocks.boundary
    if C.HAS_UPPER and not C.HAS_LOWER:
        shared_stop = gl.minimum(bounds.sk, row + 1 + bounds.upper)
        masked = blocks.count - gl.minimum(blocks.count, gl.maximum(0, shared_stop - blocks.start) // C.BLOCK_N)
    return masked


@gluon.jit
def first_block_is_hidden(first_key, count, row, upper, C: gl.constexpr):
    """Whether a warpgroup's queries, from ``row`` on, see no key of a tile's first block, one of several."""
    return (count > 1) & (first_key >= row + 64 // C.PACK_GQA + upper)


@gluon.jit
def q_blocks_of(first, bounds, C: gl.constexpr):
    """Return the blocks of QUERIES queries that see a tile of keys.

    Blocks lie on a grid from query 0 on, since the dQ accumulator is stored by blocks. ``upper_boundary`` of them lie
    at the first queries. In a tile that reaches past the last key all blocks need a mask. Queries past the last one
    need none: their lse is inf, so that their probabilities are 0. There may be no block.
    """
    last = gl.minimum(first + 64 * C.CONSUMERS, bounds.sk) - 1
    start = 0
    shared_start = start
    stop = start + bounds.sq
    shared_stop = stop
    if C.HAS_UPPER:
        start = gl.maximum(0, first - bounds.upper) // QUERIES * QUERIES
        shared_start = gl.maximum(0, last - bounds.upper)
    if C.HAS_LOWER:
        stop = gl.minimum(bounds.sq, last - bounds.lower + 1)
        shared_stop = gl.minimum(bounds.sq, first - bounds.lower + 1)
    count = gl.maximum(0, stop - start + (QUERIES - 1)) // QUERIES
    upper_boundary = gl.minimum(count, (shared_start - start + (QUERIES - 1)) // QUERIES)
    upper_boundary = gl.where(first + 64 * C.CONSUMERS > bounds.sk, count, upper_boundary)
    whole = gl.where(shared_stop == bounds.sq, count, gl.maximum(0, shared_stop - start) // QUERIES)
    lower_boundary = count - gl.maximum(upper_boundary, gl.minimum(count, whole))
    return BlockRange(start, upper_boundary, upper_boundary + lower_boundary, count)


@gluon.jit
def q_block_start(step, blocks, C: gl.constexpr):
    """Return the first query of the block of a step: boundary blocks come first, those of both ends.

    With C.DETERMINISTIC blocks come from the last one down: whatever the mask, of tiles that start together the one of
    the earlier keys is at a block first or at the same time. From the first one up a causal tile would have to wait
    until an earlier one has come to its diagonal.
    """
    start, upper_boundary, boundary, count = blocks
    if C.MASK_PLAN:
        return gl.load(start + step) * QUERIES
    else:
        if C.DETERMINISTIC:
            m_block = count - 1 - step
        else:
            m_block = gl.where(step < boundary, count - 1 - (step - upper_boundary), step - (boundary - upper_boundary))
            m_block = gl.where(step < upper_boundary, step, m_block)
        return start + m_block * QUERIES


@gluon.jit
def q_block_start_serpentine(step, first, blocks, C: gl.constexpr):
    """Return the first query of a step of the tile of keys from ``first`` on, where one CTA has all tiles of a head.

    Blocks come from the last one down, but in every second tile those without a mask come from the first one up: a tile
    begins with what L2 holds of the one before.
    """
    start, upper_boundary, boundary, count = blocks
    lower_boundary = boundary - upper_boundary
    m_block = count - 1 - step
    if (first // (64 * C.CONSUMERS) % 2 != 0) & (step >= lower_boundary) & (step < count - upper_boundary):
        m_block = upper_boundary + step - lower_boundary
    return start + m_block * QUERIES


@gluon.jit
def phases_of(key, blocks, bounds, C: gl.constexpr):
    """Return where phases of steps end for the 64 keys from ``key`` on; all but the second need a mask.

    With C.DETERMINISTIC or C.HEAD_PERSISTENT there are three, of which the first is empty without a lower bound; else
    two.
    """
    _start, upper_boundary, boundary, count = blocks
    masked = boundary if C.MASK_PLAN else masked_q_blocks_of(key, blocks, bounds, C)
    if C.DETERMINISTIC or C.HEAD_PERSISTENT:
        ends = (0, boundary - upper_boundary, count - (masked - (boundary - upper_boundary)), count)
    else:
        ends = (0, masked, count)
    return ends


@gluon.jit
def rank_of(first, m_block, bounds, C: gl.constexpr):
    """Return how many tiles of keys before that from ``first`` on see a block of queries.

    ``m_block``: counted on the grid of all. The first tile that sees a block sees its first query: a bound above only
    ever hides a block from the tiles behind.
    """
    rank = first // (64 * C.CONSUMERS)
    if C.HAS_LOWER:
        rank -= gl.maximum(0, m_block * QUERIES + bounds.lower) // (64 * C.CONSUMERS)
    return rank


@gluon.jit
def is_last_of(first, query, bounds, C: gl.constexpr):
    """Whether no tile of keys behind that from ``first`` on sees the block of queries from ``query`` on."""
    stop = bounds.sk
    if C.HAS_UPPER:
        stop = gl.minimum(bounds.sk, gl.minimum(query + QUERIES, bounds.sq) + bounds.upper)
    return first + 64 * C.CONSUMERS >= stop


@gluon.jit
def masked_q_blocks_of(key, blocks, bounds, C: gl.constexpr):
    """Return how many blocks need a mask for the 64 keys from ``key`` on; with a lower bound, those of the tile."""
    masked = blocks.boundary
    if C.HAS_UPPER and not C.HAS_LOWER:
        own = gl.minimum(blocks.count, gl.maximum(0, key + 63 - bounds.upper - blocks.start + (QUERIES - 1)) // QUERIES)
        masked = gl.where(key + 64 > bounds.sk, blocks.count, own)
    return masked
