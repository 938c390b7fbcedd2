"""Where a tile's sequence lies if lengths are data on the device, and what of other sequences must be left alone.

A tile of queries carries its sequence with it (``WorkTile``). The metadata of a tile of keys lies in shared memory, one
int32 a field: each warp reads what it needs where it needs it, since registers are scarce. The first three numbers are
those of the tile, the next four its sequence's bounds.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.kernels.hopper.arguments import MaskBounds
from tilewise.kernels.hopper.compat import reinterpret
from tilewise.kernels.hopper.mask_ranges import QUERIES
from tilewise.kernels.hopper.pipeline import CONTIGUOUS, FOUR_WARPS, ONE_WARP
from tilewise.kernels.hopper.tile_scheduler import KVTile, tile_at

_CHUNK = gl.constexpr(128)  # sequences that are looked through at once
_FOUR_A_THREAD = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))  # of one warp
# Where the metadata of a tile of keys has its numbers: first key, head and batch, then the four bounds, then
_ROW_Q = gl.constexpr(7)  # its sequence's first row of q
_ROW_K = gl.constexpr(8)  # and of k
_Q_BEGIN = gl.constexpr(9)  # the first query that sees a key
_K_BEGIN = gl.constexpr(10)  # the first key that is seen
_ROWS = gl.constexpr(11)  # keys that there is a row of
_FIRST_BLOCK = gl.constexpr(12)  # which of a head's blocks of the dQ accumulator is the sequence's first
_ROWS_Q = gl.constexpr(13)  # queries that there is a row of
_SEQUENCE = gl.constexpr(14)  # where C.HAS_DROPOUT, C.HAS_ALIBI or C.HAS_FUNCTION, its number, which these depend on
_DIAGONAL = gl.constexpr(15)  # where C.HAS_ALIBI, the key that its query 0 stands on
_CLEARED = gl.constexpr(32)  # rows that are read and written at once


class WorkTile(NamedTuple):
    """A tile of queries that the producer hands to the consumers; 0: a field that the kernel's config has not.

    first: query of its sequence or batch entry; negative for rows in front of the first one. head: of q, or of k with
    C.PACK_GQA. batch: with C.HAS_CU_SEQLENS its sequence, the last one for rows behind them all. With C.VARLEN,
    row_start and rows: where the sequence lies in its tensor, and how many rows it has there; sq, sk: its queries, and
    its keys that are seen; with C.BOTTOM_RIGHT, diagonal: the key that its query 0 stands on. With C.SPLIT_KV, split:
    which of the tile's splits this is, -1 for a tile that is not split. With C.FROZEN_MAX, recompute: not 0 where the
    tile overflowed and is computed again. With C.MASK_PLAN, blocks: how many its list has, of which ``partial`` come
    first.
    """

    first: Any
    head: Any
    batch: Any
    row_start: Any
    rows: Any
    sq: Any
    sk: Any
    diagonal: Any
    split: Any
    recompute: Any
    partial: Any = 0
    blocks: Any = 0


class SequenceRows(NamedTuple):
    """Where a sequence lies, and which of its rows take part: others' rows are zeroed in the tiles.

    row_q, row_k: its first rows of q and k. Queries ``q_begin`` to ``q_end`` see a key; keys ``k_begin`` to ``k_end``
    are seen.
    """

    row_q: Any
    row_k: Any
    q_begin: Any
    q_end: Any
    k_begin: Any
    k_end: Any


@gluon.constexpr_function
def tile_size(c):
    """Return how many numbers a work tile has in shared memory."""
    return (7 + c.BOTTOM_RIGHT if c.VARLEN else 3 + (c.SPLIT_KV > 0) + 2 * c.MASK_PLAN) + c.FROZEN_MAX


@gluon.jit
def numbers_of_tile(tile, C: gl.constexpr):
    """Return a work tile as the numbers that are published, but for ``recompute``."""
    numbers = (tile.first, tile.head, tile.batch)
    if C.VARLEN:
        numbers = numbers + (tile.row_start, tile.rows, tile.sq, tile.sk)
        if C.BOTTOM_RIGHT:
            numbers = numbers + (tile.diagonal,)
    elif C.SPLIT_KV > 0:
        numbers = numbers + (tile.split,)
    elif C.MASK_PLAN:
        numbers = numbers + (tile.partial, tile.blocks)
    return numbers


@gluon.jit
def tile_of_numbers(numbers, C: gl.constexpr):
    """Return the work tile that was published as these numbers."""
    recompute = numbers[tile_size(C) - 1] if C.FROZEN_MAX else 0
    if C.VARLEN:
        shift = numbers[7] if C.BOTTOM_RIGHT else 0
        return WorkTile(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], shift, 0,
                        recompute, 0, 0)
    else:
        split = numbers[3] if C.SPLIT_KV > 0 else 0
        partial = numbers[3] if C.MASK_PLAN else 0
        blocks = numbers[4] if C.MASK_PLAN else 0
        return WorkTile(numbers[0], numbers[1], numbers[2], 0, 0, 0, 0, 0, split, recompute, partial, blocks)


@gluon.jit
def sequence_of(cu_seqlens, num_sequences, slot, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Find the packed sequence that a slot of ROWS rows belongs to; ``num_sequences`` for the rows past the last one.

    Sequence n owns the slots from cu_seqlens[n] div ROWS + n on: no less than its rows need, since
    ceil((b − a) / ROWS) <= b div ROWS − a div ROWS + 1. The first one owns them from 0 on (see border_at).
    """
    sequence = 0
    for first in range(1, num_sequences + 1, _CHUNK):
        numbers = first + gl.arange(0, _CHUNK, layout=LAYOUT)
        borders = gl.maximum(gl.load(cu_seqlens + numbers, mask=numbers <= num_sequences, other=0).to(gl.int32), 0)
        sequence += gl.sum(((borders // ROWS + numbers <= slot) & (numbers <= num_sequences)).to(gl.int32), 0)
    return sequence


@gluon.jit
def border_at(cu_seqlens, number):
    """Return where a packed sequence begins, 0 if in front of the tensors; 0, too, in place of the first number.

    With another one the rows before it would be of sequence -1, and its lengths be read in front of the tensors.
    """
    return gl.maximum(gl.load(cu_seqlens + number, mask=number > 0, other=0).to(gl.int32), 0)


@gluon.jit
def extent(cu_seqlens, seqlens, sequence, num_sequences, total):
    """Return where a sequence begins in its tensor, the rows it has there, and how many of them take part.

    A border behind the tensor's end is taken for it: nothing is read or written there.
    """
    begin = 0
    rows = total
    length = total
    if cu_seqlens is not None:
        begin = gl.minimum(border_at(cu_seqlens, sequence), total)
        stop = gl.minimum(border_at(cu_seqlens, gl.minimum(sequence + 1, num_sequences)), total)
        rows = gl.where(sequence < num_sequences, stop, total) - begin
        length = stop - begin  # 0 past the last sequence
    if seqlens is not None:
        length = gl.minimum(gl.load(seqlens + sequence, mask=sequence < num_sequences, other=0).to(gl.int32), rows)
    return begin, rows, length


@gluon.jit
def locate_tile(number, grid, bounds, lengths, C: gl.constexpr):
    """Return the work tile of a number, the first row of its keys, and whether the tile has a row at all.

    Keys that no query of the sequence sees are not read: they count as if they were behind it.
    """
    first, head, batch = tile_at(number, grid, bounds.sq, C)
    if C.VARLEN:
        cu_q, cu_k, seqlens_q, seqlens_k, num_sequences = lengths
        sequence = batch
        if C.HAS_CU_SEQLENS:
            ROWS: gl.constexpr = 64 * C.CONSUMERS // C.PACK_GQA  # queries of a tile
            sequence = sequence_of(cu_q, num_sequences, first // ROWS, ROWS, _FOUR_A_THREAD)
        row_q, rows, sq = extent(cu_q, seqlens_q, sequence, num_sequences, bounds.sq)
        row_k, _rows, sk = extent(cu_k, seqlens_k, sequence, num_sequences, bounds.sk)
        if C.HAS_CU_SEQLENS:
            first -= (row_q // ROWS + sequence) * ROWS
            batch = gl.minimum(sequence, num_sequences - 1)
        shift = sk - sq
        seen = sk
        if C.HAS_UPPER:
            seen = gl.minimum(sk, sq + (bounds.upper + shift if C.BOTTOM_RIGHT else bounds.upper))
        seen = gl.where(first < sq, seen, 0)
        return WorkTile(first, head, batch, row_q, rows, sq, seen, shift, 0, 0, 0, 0), row_k, first < rows
    else:
        return WorkTile(first, head, batch, 0, 0, 0, 0, 0, 0, 0, 0, 0), 0, True


@gluon.jit
def waits_for_its_own(first, cu_q, cu_k, sequence, row_q, row_k, sq, num_sequences, ROWS: gl.constexpr):
    """Whether a tile of ROWS keys has all tiles before it, and its blocks of the dQ accumulator are no one else's.

    So it is unless borders decrease; then the tile would wait for another for ever (dq_accum.py).
    """
    first_block = row_q // QUERIES + sequence
    last_block = first_block + gl.maximum(sq - 1, 0) // QUERIES
    has_keys = sequence_of(cu_k, num_sequences, row_k // ROWS + sequence, ROWS, FOUR_WARPS) == sequence
    begins = sequence_of(cu_q, num_sequences, first_block, QUERIES, FOUR_WARPS) == sequence
    ends = sequence_of(cu_q, num_sequences, last_block, QUERIES, FOUR_WARPS) == sequence
    return (first >= 0) & has_keys & begins & ends


@gluon.jit
def locate_keys(tile, bounds, lengths, C: gl.constexpr):
    """Return the metadata of a tile of keys, in the order of its numbers in shared memory.

    Keys that no query sees count as if they were behind the sequence, and queries that see no key too, but for those at
    its beginning: the dQ accumulator lies on a grid from its first query on. A tile without a key has no queries.
    """
    cu_q, cu_k, seqlens_q, seqlens_k, num_sequences = lengths
    total_q, total_k, lower, upper = bounds
    first = tile.first
    sequence = tile.batch
    if C.HAS_CU_SEQLENS:
        ROWS: gl.constexpr = 64 * C.CONSUMERS
        sequence = sequence_of(cu_k, num_sequences, first // ROWS, ROWS, FOUR_WARPS)
    row_q, rows_q, sq = extent(cu_q, seqlens_q, sequence, num_sequences, total_q)
    row_k, rows, sk = extent(cu_k, seqlens_k, sequence, num_sequences, total_k)
    first_block = 0
    if C.HAS_CU_SEQLENS:
        first -= (row_k // ROWS + sequence) * ROWS
        first_block = row_q // QUERIES + sequence
    if C.BOTTOM_RIGHT:
        lower += sk - sq
        upper += sk - sq
    q_begin = 0
    k_begin = 0
    q_end = sq
    k_end = sk
    if C.HAS_UPPER:
        k_end = gl.minimum(sk, sq + upper)
        q_begin = gl.maximum(0, -upper)
    if C.HAS_LOWER:
        q_end = gl.minimum(sq, sk - lower)
        k_begin = gl.maximum(0, lower)
    sees = first < k_end
    if C.DETERMINISTIC and C.HAS_CU_SEQLENS:
        sees = sees & waits_for_its_own(first, cu_q, cu_k, sequence, row_q, row_k, sq, num_sequences, ROWS)
    q_end = gl.where(sees, q_end, 0)
    numbers = (first, tile.head, tile.batch, q_end, k_end, lower, upper, row_q, row_k, q_begin, k_begin, rows,
               first_block, rows_q)
    if C.HAS_DROPOUT or C.HAS_ALIBI or C.HAS_FUNCTION:
        numbers = numbers + (gl.minimum(sequence, num_sequences - 1),)  # behind them all the last one
    if C.HAS_ALIBI:
        numbers = numbers + (sk - sq if C.BOTTOM_RIGHT else 0,)
    return numbers


@gluon.jit
def store_tile_metadata(numbers):
    """Put the metadata of a tile of keys, or other numbers, into shared memory."""
    NUMBERS: gl.constexpr = len(numbers)
    metadata = gl.allocate_shared_memory(gl.int32, [NUMBERS, 1], CONTIGUOUS)
    none = gl.full([1], 0, gl.int32, layout=FOUR_WARPS)
    for i in gl.static_range(NUMBERS):
        metadata.index(i).store(none + numbers[i])
    return metadata


@gluon.jit
def load_tile_metadata(metadata, NUMBER: gl.constexpr, WARPS: gl.constexpr):
    """Read one number of the metadata; WARPS: of the reader."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.sum(metadata.index(NUMBER).load(LAYOUT), 0)


@gluon.jit
def kv_tile_of(metadata, tile, bounds, WARPS: gl.constexpr, C: gl.constexpr):
    """Return a tile of keys and its bounds: where lengths are data, its sequence's."""
    if C.VARLEN:
        tile = KVTile(load_tile_metadata(metadata, 0, WARPS), load_tile_metadata(metadata, 1, WARPS),
                      load_tile_metadata(metadata, 2, WARPS), 0, 0)
        bounds = MaskBounds(load_tile_metadata(metadata, 3, WARPS), load_tile_metadata(metadata, 4, WARPS),
                            load_tile_metadata(metadata, 5, WARPS), load_tile_metadata(metadata, 6, WARPS))
    return tile, bounds


@gluon.jit
def key_rows_of(metadata, key, C: gl.constexpr):
    """Return the row of a consumer's first key, and how many rows its sequence has from there on."""
    if C.VARLEN:
        return key + load_tile_metadata(metadata, _ROW_K, 4), load_tile_metadata(metadata, _ROWS, 4) - key
    else:
        return key, 64


@gluon.jit
def has_all_keys(metadata, first, KEYS: gl.constexpr):
    """Whether a tile of KEYS keys, from ``first`` on, has all of its packed sequence; not one behind them."""
    return (first == 0) & (load_tile_metadata(metadata, _ROWS, 4) <= KEYS)


@gluon.jit
def has_rows(metadata):
    """Whether a tile of a packed sequence is its first one, or has keys; else there is nothing to read or write."""
    return load_tile_metadata(metadata, 0, 4) < gl.maximum(load_tile_metadata(metadata, _ROWS, 4), 1)


@gluon.jit
def query_rows_of(metadata):
    """Return the first row of q of a tile's sequence, and how many rows it has."""
    return load_tile_metadata(metadata, _ROW_Q, 4), load_tile_metadata(metadata, _ROWS_Q, 4)


@gluon.jit
def sequence_at(metadata, batch, C: gl.constexpr):
    """Return, where _SEQUENCE says that it is there, the number of a tile's sequence, for four warps."""
    if C.VARLEN:
        return load_tile_metadata(metadata, _SEQUENCE, 4)
    else:
        return batch


@gluon.jit
def diagonal_at(metadata, diagonal, C: gl.constexpr):
    """Return, where C.HAS_ALIBI, the key that query 0 of a tile's sequence stands on, for four warps."""
    if C.VARLEN:
        return load_tile_metadata(metadata, _DIAGONAL, 4)
    else:
        return diagonal


@gluon.jit
def sequence_rows_of(metadata, bounds, C: gl.constexpr):
    """Return, for one warp, which rows of the tile's sequence take part."""
    if C.VARLEN:
        return SequenceRows(load_tile_metadata(metadata, _ROW_Q, 1), load_tile_metadata(metadata, _ROW_K, 1),
                            load_tile_metadata(metadata, _Q_BEGIN, 1), bounds.sq,
                            load_tile_metadata(metadata, _K_BEGIN, 1), bounds.sk)
    else:
        return SequenceRows(0, 0, 0, bounds.sq, 0, bounds.sk)


@gluon.jit
def dq_blocks_of(metadata, sq, num_sequences, WARPS: gl.constexpr, C: gl.constexpr):
    """Return how many blocks a query head has in the dQ accumulator, and which is the tile's sequence's first.

    sq: rows of a head. WARPS: of the reader.
    """
    blocks = (sq + (QUERIES - 1)) // QUERIES
    first = 0
    if C.HAS_CU_SEQLENS:
        blocks = sq // QUERIES + num_sequences + 1
    if C.VARLEN:
        first = load_tile_metadata(metadata, _FIRST_BLOCK, WARPS)
    return blocks, first


@gluon.jit
def bounds_of_tile(tile, bounds, C: gl.constexpr):
    """Return the mask's bounds for a work tile: where lengths are data, those of its sequence."""
    if C.VARLEN:
        shift = tile.diagonal if C.BOTTOM_RIGHT else 0
        return MaskBounds(tile.sq, tile.sk, bounds.lower + shift, bounds.upper + shift)
    else:
        return bounds


@gluon.jit
def rows_of(tile, sq, C: gl.constexpr):
    """Return a sequence's first row in its tensor, the rows it has there, and how many of these are queries."""
    if C.VARLEN:
        return tile.row_start, tile.rows, tile.sq
    else:
        return 0, sq, sq


@gluon.jit
def _kept(values, below):
    """Where ``below`` is negative the values, else 0: two neighbours at once, which one by one are taken apart."""
    return gl.inline_asm_elementwise("""{
        .reg .pred p;
        setp.lt.s32 p, $2, 0;
        selp.b32 $0, $1, 0, p;
    }""", "=r,r,r,r", [values, below], dtype=values.dtype, is_pure=True, pack=2)


@gluon.jit
def _clear_piece(v, keep):
    WIDTH: gl.constexpr = v.shape[1]
    PARTS: gl.constexpr = v.shape[0] // _CLEARED
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    for part in gl.static_range(PARTS):
        if keep < (part + 1) * _CLEARED:
            lines = v.slice(part * _CLEARED, _CLEARED)
            rows = part * _CLEARED + gl.arange(0, _CLEARED, layout=gl.SliceLayout(1, LAYOUT))
            lines.store(_kept(lines.load(LAYOUT), (rows - keep)[:, None]))


@gluon.jit
def clear(tiles, stage, keep, C: gl.constexpr):
    """Zero the rows from ``keep`` on of a tile of V: they belong to others, and 0 · NaN is NaN.

    Every warpgroup does it for itself, and what it writes is what is there once another one has.
    """
    for i in gl.static_range(len(tiles)):
        _clear_piece(tiles[i].index(stage).reshape([C.BLOCK_N, C.DV[i]]), keep)
    fence_async_shared()


@gluon.jit
def clear_rows(tiles, stage, begin, stop, WIDTH: gl.constexpr):
    """Zero the rows before ``begin`` and from ``stop`` on of a tile of 64; one warp does it.

    A row of 64 columns is a line of 128 bytes, whatever the order inside of it; the next columns lie behind all rows.
    """
    PARTS: gl.constexpr = WIDTH // 64
    lines = reinterpret(tiles, gl.int32, [tiles.shape[0] * PARTS * 64, 32], CONTIGUOUS)
    zero = gl.full([32], 0, gl.int32, layout=ONE_WARP)
    for part in gl.static_range(PARTS):
        top = (stage * PARTS + part) * 64
        for row in range(0, begin):
            lines.index(top + row).store(zero)
        for row in range(stop, 64):
            lines.index(top + row).store(zero)


@gluon.jit
def blank(acc, length):
    """Zero the rows from ``length`` on of every piece of out."""
    blanked = ()
    for i in gl.static_range(len(acc)):
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, acc[i].type.layout))
        blanked = blanked + (gl.where((rows < length)[:, None], acc[i], 0.0),)
    return blanked


@gluon.jit
def store_some(out_tile, out_ptr, out_desc, place, left, FIRST: gl.constexpr, OUT: gl.constexpr):
    """Store the first ``left`` rows of OUT staged columns of out: what is below them is another sequence's.

    Eight columns at once: out's strides and its width are multiples of that.
    """
    _batch, head, row = place
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // OUT, OUT // 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    columns = FIRST + gl.arange(0, OUT, layout=gl.SliceLayout(0, LAYOUT))
    RANK: gl.constexpr = len(out_desc.block_type.shape)
    exists = rows < left
    if RANK == 5:  # (b, hk, s, group, d)
        PACK_GQA: gl.constexpr = out_desc.block_type.shape[3]
        member = rows % PACK_GQA
        exists = exists & (member < out_desc.shape[3])
        offsets = (row + rows // PACK_GQA) * out_desc.strides[2] + member * out_desc.strides[3]
    else:
        offsets = (row + rows) * out_desc.strides[2]
    lines = gl.multiple_of(head * out_desc.strides[1] + offsets, 8)
    inside = exists[:, None] & (columns // 8 < out_desc.shape[RANK - 1] // 8)[None, :]
    values = out_tile.reshape([64, OUT]).load(LAYOUT)
    gl.store((out_ptr + lines)[:, None] + columns[None, :], values, mask=inside)
