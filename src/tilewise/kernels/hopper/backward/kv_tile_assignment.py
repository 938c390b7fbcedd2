"""Which tiles of keys a CTA of d64.py computes, where the assignment is static."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.hopper.tile_scheduler import KVTile, kv_tile_at


@gluon.jit
def tiles_of_cta(grid, C: gl.constexpr):
    """Return how many tiles of keys a CTA computes: with C.HEAD_PERSISTENT its share of each head, else one."""
    number = 1
    if C.HEAD_PERSISTENT:
        N: gl.constexpr = C.CTAS_PER_HEAD
        heads = (grid.heads * grid.batches - 1 - gl.program_id(0) // N) // (gl.num_programs(0) // N) + 1
        number = heads * tiles_of_head(grid.tiles, C)
    return number


@gluon.jit
def tiles_of_head(tiles, C: gl.constexpr):
    """Return how many of a head's tiles a CTA computes: of every C.CTAS_PER_HEAD tiles one."""
    rounds = tiles // C.CTAS_PER_HEAD
    return rounds + gl.where(place_in_round(rounds, C) < tiles % C.CTAS_PER_HEAD, 1, 0)


@gluon.jit
def place_in_round(number, C: gl.constexpr):
    """Return which of a round's C.CTAS_PER_HEAD tiles is the CTA's.

    An upper bound makes tiles shorter and shorter: from round to round those that had the longest get the shortest.
    """
    N: gl.constexpr = C.CTAS_PER_HEAD
    place = gl.program_id(0) % N
    if C.HAS_UPPER and not C.HAS_LOWER:
        place = gl.where(number % 2 == 0, place, N - 1 - place)
    return place


@gluon.jit
def tile_of_cta(number, grid, C: gl.constexpr):
    """Return one of a CTA's tiles of keys, by its number among those that the CTA computes."""
    if C.HEAD_PERSISTENT:
        N: gl.constexpr = C.CTAS_PER_HEAD
        own = tiles_of_head(grid.tiles, C)
        row = gl.program_id(0) // N + number // own * (gl.num_programs(0) // N)
        rank = number % own * N + place_in_round(number % own, C)
        tile = KVTile(rank * (64 * C.CONSUMERS), row % grid.heads, row // grid.heads, 0, 0)
    else:
        tile = kv_tile_at(gl.program_id(0), grid, C)
    return tile
