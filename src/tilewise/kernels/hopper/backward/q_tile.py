"""Where a tile of queries lies if lengths are data on the device: for dQ's kernel of its own (dq_d256.py).

As of a tile of keys, its metadata lies in shared memory, the first nine numbers in the same order (varlen.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.hopper.pipeline import FOUR_WARPS
from tilewise.kernels.hopper.tile_scheduler import tile_at
from tilewise.kernels.hopper.varlen import extent, kv_tile_of, load_tile_metadata, sequence_of


class QTile(NamedTuple):
    """A tile of queries: the first one, the query head, the batch entry; where lengths are data, more.

    row_q, row_k: its sequence's first rows of q and k; rows: how many rows it has of q; sequence: its number. Else 0,
    0, the queries, and the batch entry.
    """

    first: Any
    head: Any
    batch: Any
    row_q: Any
    row_k: Any
    rows: Any
    sequence: Any


@gluon.jit
def locate_queries(number, grid, bounds, lengths, C: gl.constexpr):
    """Return the metadata of a tile of queries.

    Keys that no query of its sequence sees count as if they were behind it. A tile without a query sees no key.
    """
    first, head, batch = tile_at(number, grid, bounds.sq, C)
    cu_q, cu_k, seqlens_q, seqlens_k, num_sequences = lengths
    total_q, total_k, lower, upper = bounds
    sequence = batch
    if C.HAS_CU_SEQLENS:
        ROWS: gl.constexpr = 64 * C.CONSUMERS
        sequence = sequence_of(cu_q, num_sequences, first // ROWS, ROWS, FOUR_WARPS)
    row_q, rows, sq = extent(cu_q, seqlens_q, sequence, num_sequences, total_q)
    row_k, _rows, sk = extent(cu_k, seqlens_k, sequence, num_sequences, total_k)
    if C.HAS_CU_SEQLENS:
        first -= (row_q // ROWS + sequence) * ROWS
    if C.BOTTOM_RIGHT:
        lower += sk - sq
        upper += sk - sq
    seen = sk
    if C.HAS_UPPER:
        seen = gl.minimum(sk, sq + upper)
    seen = gl.where(first < sq, seen, 0)
    return (first, head, batch, sq, seen, lower, upper, row_q, row_k, rows, gl.minimum(sequence, num_sequences - 1))


@gluon.jit
def q_tile_of(metadata, tile, bounds, WARPS: gl.constexpr, C: gl.constexpr):
    """Return a tile of queries and its bounds: where lengths are data, its sequence's. WARPS: of the reader."""
    if C.VARLEN:
        place, bounds = kv_tile_of(metadata, tile, bounds, WARPS, C)
        tile = QTile(place.first, place.head, place.batch, load_tile_metadata(metadata, 7, WARPS),
                     load_tile_metadata(metadata, 8, WARPS), load_tile_metadata(metadata, 9, WARPS),
                     load_tile_metadata(metadata, 10, WARPS))
    return tile, bounds


@gluon.jit
def has_query_rows(metadata):
    """Whether a tile of a packed sequence has a row of q; else there is nothing to read or write."""
    return load_tile_metadata(metadata, 0, 4) < load_tile_metadata(metadata, 9, 4)


@gluon.jit
def blank_blind(acc, row, bounds, C: gl.constexpr):
    """Zero the rows of every piece of dQ, from query ``row`` on, that are no query or see no key.

    Their probabilities are 0, but NaN in their dO or delta would make their dS NaN.
    """
    begin = 0
    stop = bounds.sq
    if C.HAS_UPPER:
        begin = gl.maximum(0, -bounds.upper)
    if C.HAS_LOWER:
        stop = gl.minimum(stop, bounds.sk - bounds.lower)
    stop = gl.where(bounds.sk > 0, stop, 0)
    blanked = ()
    for i in gl.static_range(len(acc)):
        rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, acc[i].type.layout))
        blanked = blanked + (gl.where(((rows >= begin) & (rows < stop))[:, None], acc[i], 0.0),)
    return blanked
