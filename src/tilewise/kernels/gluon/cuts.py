"""Tiles of the Hopper forward kernel that are cut along their keys: which part a number stands for, and its steps.

Where tiles are fewer than the multiprocessors, or a last wave of them is not full, the keys of a tile come in parts, of
which each is a piece of work of its own. A part's tile has its number behind first query, head and batch. Parts are as
long as one another, but of a last wave's tiles the first is ``lead`` times as long: (parts, lead) are a tile's shares.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon.lengths import locate
from tilewise.kernels.gluon.tiles import steps_of, tile_at


@gluon.jit
def numbers_of(tiles, cut, C: gl.constexpr):
    """How many numbers are handed out: one a tile, or one for each part of the tiles that are cut."""
    if C.CUT > 0:
        whole, shares = cut
        parts, _lead = shares
        tiles = whole + (tiles - whole) * parts
    return tiles


@gluon.jit
def part_at(number, tiles, cut, C: gl.constexpr):
    """Return a number's tile, and its part of it; -1 where that is all of it. Those that are cut come last.

    Of a last wave the first parts of all tiles come before the others, which fill its gaps.
    """
    whole, shares = cut
    parts, _lead = shares
    if C.CUT == 2:
        over = gl.maximum(0, number - whole)
        rest = tiles - whole
        is_whole = number < whole
        return gl.where(is_whole, number, whole + over % rest), gl.where(is_whole, -1, over // rest)
    else:
        return number // parts, number % parts


@gluon.jit
def steps_before(part, steps, shares, C: gl.constexpr):
    """Return how many of a tile's steps come before a part; of more parts than steps some have none."""
    parts, lead = shares
    if C.CUT == 2:
        part = gl.where(part > 0, part + lead - 1, 0)
        parts += lead - 1
    return gl.minimum(steps, part * steps // gl.minimum(parts, steps))


@gluon.jit
def cut_steps(part, spans, shares, C: gl.constexpr):
    """Return the steps of one of a tile's parts, in the form of ``steps_of``.

    A part is some steps of the grid in a row, whatever of them needs a mask.
    """
    start, at_head, masked, steps = spans
    begin = steps_before(part, steps, shares, C)
    end = steps_before(part + 1, steps, shares, C)
    if C.CUT == 2:
        begin = gl.where(part < 0, 0, begin)
        end = gl.where(part < 0, steps, end)
    head = gl.maximum(0, end - gl.maximum(begin, steps - at_head))
    tail = gl.maximum(0, gl.minimum(end, masked - at_head) - begin)
    return start + begin * C.KEYS, head, head + tail, end - begin


@gluon.jit
def own_steps_of(tile, band, shares, C: gl.constexpr):
    """Return what ``steps_of`` does, of a tile or of the part that a number stands for."""
    spans = steps_of(tile[0], band, C)
    if C.CUT > 0:
        spans = cut_steps(tile[3], spans, shares, C)
    return spans


@gluon.jit
def locate_part(number, order, band, lengths, cut, C: gl.constexpr):
    """Return what ``locate`` does, of a tile or of a part of it; a part without a step is none."""
    if C.CUT > 0:
        tiles, heads, batches, _section = order
        number, part = part_at(number, tiles * heads * batches, cut, C)
        first, head, batch = tile_at(number, order, band[0], C)
        tile = (first, head, batch, part)
        return tile, 0, own_steps_of(tile, band, cut[1], C)[3] > 0
    else:
        return locate(number, order, band, lengths, C)
