"""The tile scheduler: which tile of which head and sequence a CTA computes, and where that lies in the tensors."""

import triton
import triton.language as tl

_CHUNK = tl.constexpr(128)  # sequences that are looked through at once


@triton.jit
def locate_tile(tiles, heads, LONGEST_FIRST: tl.constexpr):
    """Split the program id into (tile, head, batch); neighbours share a head, hence its tiles in L2.

    Under a causal mask a tile's work grows (keys of a query tile) with its index: taking the longest first leaves
    the short ones to fill the gaps at the end.
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    if LONGEST_FIRST:
        tile = tiles - 1 - tile
    return tile, (pid // tiles) % heads, (pid // tiles) // heads


@triton.jit
def sequence_of(cu_seqlens, count, slot, BLOCK: tl.constexpr):
    """Find the packed sequence that a slot of BLOCK rows belongs to.

    Sequence n owns the slots from cu_seqlens[n] div BLOCK + n on: no less than its rows need, since
    ceil((b − a) / BLOCK) <= b div BLOCK − a div BLOCK + 1; so no CTA has to add lengths up, and the host need not
    know them. Number ``count`` stands for the rows past the last sequence, and the first sequence has the slots from 0
    on (see sequence_start).
    """
    sequence = 0
    for first in tl.range(1, count + 1, _CHUNK):
        offs = first + tl.arange(0, _CHUNK)
        borders = tl.maximum(tl.load(cu_seqlens + offs, mask=offs <= count, other=0).to(tl.int32), 0)
        sequence += tl.sum(((borders // BLOCK + offs <= slot) & (offs <= count)).to(tl.int32), 0)
    return sequence


@triton.jit
def sequence_start(cu_seqlens, number):
    """Return where a packed sequence begins, 0 if in front of the tensors; 0, too, in place of the first number.

    With another one the rows before it would be of sequence -1, and its lengths be read in front of the tensors.
    """
    return tl.maximum(tl.load(cu_seqlens + number, mask=number > 0, other=0).to(tl.int32), 0)


@triton.jit
def sequence_extent(cu_seqlens, seqlens, sequence, count, total):
    """Return where a sequence begins in its tensor, the rows it has there, and how many of them take part.

    A border behind the tensor's end is taken for it: nothing is read or written there.
    """
    begin = 0
    rows = total
    length = rows
    if cu_seqlens is not None:
        begin = tl.minimum(sequence_start(cu_seqlens, sequence), total)
        stop = tl.minimum(sequence_start(cu_seqlens, tl.minimum(sequence + 1, count)), total)
        rows = tl.where(sequence < count, stop, total) - begin
        length = stop - begin  # 0 past the last sequence
    if seqlens is not None:
        length = tl.minimum(tl.load(seqlens + sequence, mask=sequence < count, other=0).to(tl.int32), rows)
    return begin, rows, length


@triton.jit
def locate_work_tile(own_cu, own_seqlens, other_cu, other_seqlens, count, tiles, heads, own, other, BLOCK: tl.constexpr,
                     LONGEST_FIRST: tl.constexpr, entry=None):
    """Return a CTA's work tile; "own" is the side that the tile is of, queries or keys.

    (first own position, head, sequence, batch, own and other first row, own rows, own length, other length): positions
    count from the sequence's first row, and rows are those of batch entry ``batch``. Rows from ``own length`` on are
    padding: they see nothing, and are to be written as such. ``count`` is None where shapes are the lengths, ``entry``
    where the grid has every batch entry; else it has that one alone.
    """
    slot, head, batch = locate_tile(tiles, heads, LONGEST_FIRST)
    if entry is not None:
        batch += entry
    sequence = batch
    if own_cu is not None:
        sequence = sequence_of(own_cu, count, slot, BLOCK)
    own_row, own_rows, own_length = sequence_extent(own_cu, own_seqlens, sequence, count, own)
    other_row, _rows, other_length = sequence_extent(other_cu, other_seqlens, sequence, count, other)
    first = slot * BLOCK
    if own_cu is not None:
        first -= (own_row // BLOCK + sequence) * BLOCK
    if count is not None:
        other_length = tl.where(first < own_length, other_length, 0)
    return first, head, sequence, batch, own_row, other_row, own_rows, own_length, other_length
