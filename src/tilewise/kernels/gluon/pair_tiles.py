"""Which tiles of pairs the bias's gradient is summed in, and what of each is seen; jit functions of plain numbers.

A tile is ROWS queries by BLOCKS blocks of 64 keys. Seen ones are counted along the keys, then along the queries, then
from line to line (a line is a head of the bias of a batch entry); programs take them in turn, a program's own and then
as many further on as there are programs. Nobody has to divide them: each has as many as any other, or one more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(128)  # queries of a tile, 64 a consumer
BLOCKS = gl.constexpr(2)  # of 64 keys, in a tile


@gluon.jit
def keys_seen(row, band, C: gl.constexpr):
    """Return [start, stop) of the keys that one of a row of tiles' queries sees (eq. 13)."""
    sq, sk, lower, upper = band
    start = 0
    stop = sk
    if C.HAS_LOWER:
        start = gl.maximum(0, row * ROWS + lower)
    if C.HAS_UPPER:
        stop = gl.minimum(sk, gl.minimum(row * ROWS + ROWS, sq) + upper)
    return start, stop


@gluon.jit
def tiles_of(row, band, C: gl.constexpr):
    """Return the first tile of a row that is seen, and how many are."""
    start, stop = keys_seen(row, band, C)
    first = start // (BLOCKS * 64)
    return first, gl.where(stop > start, (stop + (BLOCKS * 64 - 1)) // (BLOCKS * 64) - first, 0)


@gluon.jit
def seek(line, row, place, order, band, C: gl.constexpr):
    """Return (line, row, place, tile) of the ``place``-th seen tile from a row's first on, counted from its own row's.

    Past the last one line is ``lines``.
    """
    rows, lines = order
    first, count = tiles_of(row, band, C)
    while (place >= count) & (line < lines):
        place -= count
        row += 1
        line += gl.where(row == rows, 1, 0)
        row = gl.where(row == rows, 0, row)
        first, count = tiles_of(row, band, C)
    return line, row, place, first + place


@gluon.jit
def blocks_of(row, tile, band, C: gl.constexpr):
    """Return [begin, end) of a tile's blocks that are seen, and whether all its queries see all its keys (eq. 14)."""
    sq, sk, lower, upper = band
    first_key = tile * (BLOCKS * 64)
    whole = row >= 0
    if C.HAS_LOWER:
        whole = whole & (first_key >= gl.minimum(row * ROWS + ROWS, sq) - 1 + lower)
    if C.HAS_UPPER:
        whole = whole & (gl.minimum(first_key + BLOCKS * 64, sk) - 1 <= row * ROWS + upper)
    start, stop = keys_seen(row, band, C)
    begin = gl.where(whole, 0, gl.maximum(0, start - first_key) // 64)
    end = gl.where(whole, BLOCKS, gl.minimum(BLOCKS, (stop - first_key + 63) // 64))
    return begin, end, whole
