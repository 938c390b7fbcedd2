"""Which tiles of scores the bias's gradient is summed in, and what of each is visible; jit functions of plain numbers.

A tile is TILE_QUERIES queries by BLOCKS_PER_TILE blocks of 64 keys. Tiles that a query sees a key of are counted along
the keys, then along the queries, then from one bias head to the next (a bias head is a head of the bias in a batch
entry of it). A CTA computes the tile of its own number, and then each one that is as many further on as there are
CTAs. So the division is static, and a CTA has as many tiles as any other, or one more.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE_QUERIES = gl.constexpr(128)  # 64 a consumer
BLOCKS_PER_TILE = gl.constexpr(2)  # of 64 keys


class TileCursor(NamedTuple):
    """A visible tile. m_block, n_block: its number along the queries and the keys.

    rank: how many visible tiles of the same queries come before it. bias_head: past the last tile ``bias_heads``.
    """

    bias_head: Any
    m_block: Any
    rank: Any
    n_block: Any


@gluon.jit
def visible_keys_of(m_block, bounds, C: gl.constexpr):
    """Return [start, stop) of the keys that a query of a tile sees (eq. 13)."""
    start = 0
    stop = bounds.sk
    if C.HAS_LOWER:
        start = gl.maximum(0, m_block * TILE_QUERIES + bounds.lower)
    if C.HAS_UPPER:
        stop = gl.minimum(bounds.sk, gl.minimum(m_block * TILE_QUERIES + TILE_QUERIES, bounds.sq) + bounds.upper)
    return start, stop


@gluon.jit
def visible_tiles_of(m_block, bounds, C: gl.constexpr):
    """Return the number of the first tile along the keys that these queries see a key of, and how many there are."""
    start, stop = visible_keys_of(m_block, bounds, C)
    first = start // (BLOCKS_PER_TILE * 64)
    return first, gl.where(stop > start, (stop + (BLOCKS_PER_TILE * 64 - 1)) // (BLOCKS_PER_TILE * 64) - first, 0)


@gluon.jit
def find_tile(bias_head, m_block, rank, grid, bounds, C: gl.constexpr):
    """Return the visible tile of a rank, counted from the first tile of a bias head and block of queries on."""
    first, count = visible_tiles_of(m_block, bounds, C)
    while (rank >= count) & (bias_head < grid.bias_heads):
        rank -= count
        m_block += 1
        bias_head += gl.where(m_block == grid.m_blocks, 1, 0)
        m_block = gl.where(m_block == grid.m_blocks, 0, m_block)
        first, count = visible_tiles_of(m_block, bounds, C)
    return TileCursor(bias_head, m_block, rank, first + rank)


@gluon.jit
def visible_blocks_of(m_block, n_block, bounds, C: gl.constexpr):
    """Return [begin, end) of a tile's visible blocks, and whether all its queries see all its keys (eq. 14)."""
    first_key = n_block * (BLOCKS_PER_TILE * 64)
    is_full = m_block >= 0
    if C.HAS_LOWER:
        last_query = gl.minimum(m_block * TILE_QUERIES + TILE_QUERIES, bounds.sq) - 1
        is_full = is_full & (first_key >= last_query + bounds.lower)
    if C.HAS_UPPER:
        last_key = gl.minimum(first_key + BLOCKS_PER_TILE * 64, bounds.sk) - 1
        is_full = is_full & (last_key <= m_block * TILE_QUERIES + bounds.upper)
    start, stop = visible_keys_of(m_block, bounds, C)
    begin = gl.where(is_full, 0, gl.maximum(0, start - first_key) // 64)
    end = gl.where(is_full, BLOCKS_PER_TILE, gl.minimum(BLOCKS_PER_TILE, (stop - first_key + 63) // 64))
    return begin, end, is_full
