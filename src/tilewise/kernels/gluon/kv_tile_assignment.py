"""Which tiles of keys a program of hopper_backward_narrow.py has, where it draws none."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon.tiles import key_tile_at


@gluon.jit
def tiles_of_program(order, C: gl.constexpr):
    """Return how many tiles of keys a CTA works on: one, or with C.HEAD_PERSISTENT its share of each head."""
    tiles, heads, batches, _section = order
    number = 1
    if C.HEAD_PERSISTENT:
        N: gl.constexpr = C.PROGRAMS
        lines = (heads * batches - 1 - gl.program_id(0) // N) // (gl.num_programs(0) // N) + 1
        number = lines * own_tiles(tiles, C)
    return number


@gluon.jit
def own_tiles(tiles, C: gl.constexpr):
    """Return how many of a head's tiles a program has: of every C.PROGRAMS tiles one."""
    return tiles // C.PROGRAMS + gl.where(place_in_round(tiles // C.PROGRAMS, C) < tiles % C.PROGRAMS, 1, 0)


@gluon.jit
def place_in_round(number, C: gl.constexpr):
    """Return which of a round's C.PROGRAMS tiles is the program's.

    A bound above makes tiles shorter and shorter: from round to round those that had the longest get the shortest.
    """
    N: gl.constexpr = C.PROGRAMS
    place = gl.program_id(0) % N
    if C.HAS_UPPER and not C.HAS_LOWER:
        place = gl.where(number % 2 == 0, place, N - 1 - place)
    return place


@gluon.jit
def tile_of_program(number, order, C: gl.constexpr):
    """Return (first key, head of k, batch) of one of a program's tiles."""
    tiles, heads, _batches, _section = order
    if C.HEAD_PERSISTENT:
        N: gl.constexpr = C.PROGRAMS
        own = own_tiles(tiles, C)
        line = gl.program_id(0) // N + number // own * (gl.num_programs(0) // N)
        rank = number % own * N + place_in_round(number % own, C)
        tile = (rank * (64 * C.CONSUMERS), line % heads, line // heads)
    else:
        tile = key_tile_at(gl.program_id(0), order, C)
    return tile
