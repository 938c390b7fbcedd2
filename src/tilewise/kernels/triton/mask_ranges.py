"""The mask inside a kernel: which blocks of keys or queries are visible, and which pairs (maths.md, 8 and 12).

``band`` is a tile_types.Band; tilewise.masks.Band says what its numbers mean.
"""

import triton
import triton.language as tl

from tilewise.masks.tile_lists import TILE

LIST_TILE = tl.constexpr(TILE)
FAR = tl.constexpr(2**29)  # past every position; a loop's bounds are subtracted in 32 bits, so not the largest integer


@triton.jit
def chunk_start(position, chunk):
    """Where the chunk of a position starts; of one before the first, somewhere before the first."""
    return tl.where(position < 0, -chunk, position // chunk * chunk)


@triton.jit
def visible_keys(first, last, length, band):
    """Return (start, shared_start, shared_stop, stop) of the keys that are visible to queries ``first .. last``.

    Keys in [start, stop) are visible to one query at least, sink tokens apart (eq. 13), those in [shared_start,
    shared_stop) to all of them (eq. 14).
    """
    lower, upper, prefix, sink_tokens, chunk, offset, shift = band
    start = first * 0
    stop = start + length
    shared_start = start
    shared_stop = stop
    if shift is not None:
        first += shift
        last += shift
    if lower is not None:
        start = tl.maximum(0, first + lower)
        shared_start = tl.maximum(0, last + lower)
        if sink_tokens is not None:
            shared_start = tl.where(shared_start <= sink_tokens, 0, shared_start)
    if upper is not None:
        stop = last + 1 + upper
        shared_stop = first + 1 + upper
        if prefix is not None:
            stop = tl.maximum(stop, prefix)
            shared_stop = tl.maximum(shared_stop, prefix)
        stop = tl.minimum(length, stop)
        shared_stop = tl.minimum(length, shared_stop)
    if chunk is not None:
        first_chunk = chunk_start(first + offset, chunk)
        last_chunk = chunk_start(last + offset, chunk)
        start = tl.maximum(start, first_chunk)
        shared_start = tl.maximum(shared_start, last_chunk)
        stop = tl.minimum(stop, last_chunk + chunk)
        shared_stop = tl.minimum(shared_stop, first_chunk + chunk)
    return start, shared_start, shared_stop, stop


@triton.jit
def visible_queries(first, last, length, band):
    """Return (start, shared_start, shared_stop, stop) of the queries that see keys ``first .. last`` (eq. 15)."""
    lower, upper, prefix, sink_tokens, chunk, offset, shift = band
    start = first * 0
    stop = start + length
    shared_start = start
    shared_stop = stop
    if shift is not None:
        if lower is not None:
            lower += shift
        if upper is not None:
            upper += shift
        if offset is not None:
            offset += shift
    if upper is not None:
        start = tl.maximum(0, first - upper)
        shared_start = tl.maximum(0, last - upper)
        if prefix is not None:
            start = tl.where(first < prefix, 0, start)
            shared_start = tl.where(last < prefix, 0, shared_start)
    if lower is not None:
        stop = last + 1 - lower
        shared_stop = first + 1 - lower
        if sink_tokens is not None:
            stop = tl.where(first < sink_tokens, length, stop)
            shared_stop = tl.where(last < sink_tokens, length, tl.maximum(first, sink_tokens) + 1 - lower)
        stop = tl.minimum(length, stop)
        shared_stop = tl.minimum(length, shared_stop)
    if chunk is not None:
        first_chunk = chunk_start(first, chunk) - offset
        last_chunk = chunk_start(last, chunk) - offset
        start = tl.maximum(start, first_chunk)
        shared_start = tl.maximum(shared_start, last_chunk)
        stop = tl.minimum(stop, last_chunk + chunk)
        shared_stop = tl.minimum(shared_stop, first_chunk + chunk)
    return start, shared_start, shared_stop, stop


@triton.jit
def document_ids_at(documents, batched, batch, row, total):
    """Point to the document numbers of a sequence's rows: the first of the four numbers of each token."""
    base = documents + row
    if batched is not None:
        base += batch.to(tl.int64) * 4 * total
    return base


@triton.jit
def narrow_to_documents(documents, batched, batch, row, other_row, offs, length, total, spans):
    """Narrow the spans to the documents of the rows ``offs``, and return the rows' document numbers with them.

    documents: as tilewise.masks.Documents has them, with ``total`` rows in a batch entry.
    """
    start, shared_start, shared_stop, stop = spans
    base = document_ids_at(documents, batched, batch, row, total) + offs
    inside = offs < length
    numbers = tl.load(base, mask=inside, other=-1)
    begins = tl.load(base + total, mask=inside, other=FAR)
    stops = tl.load(base + 2 * total, mask=inside, other=0)
    unbroken = tl.load(base + 3 * total, mask=inside, other=0)
    start = tl.maximum(start, tl.min(begins, 0) - other_row)
    stop = tl.minimum(stop, tl.max(stops, 0) - other_row)
    shared_start = tl.maximum(shared_start, tl.max(unbroken, 0) - other_row)
    shared_stop = tl.minimum(shared_stop, tl.min(tl.where(inside, stops, FAR), 0) - other_row)
    return numbers, (start, shared_start, shared_stop, stop)


@triton.jit
def blocks_of_range(spans, sink_tokens, STEP: tl.constexpr, ALIGN: tl.constexpr):
    """Divide a tile's visible range into blocks of STEP: (start, full_start, full_stop, stop, cover).

    Blocks in [full_start, full_stop) are full: they need no mask. Blocks before and after them are partial, and so are
    those in [0, cover), the sink tokens of a window that starts behind them (:func:`block_at`); all else is skipped.
    ``start`` is rounded down to a multiple of ALIGN; :func:`zero_invisible_rows` serves the positions that this adds.
    """
    start, shared_start, shared_stop, stop = spans
    start = start // ALIGN * ALIGN
    cover = start * 0
    if sink_tokens is not None:
        cover = tl.cdiv(tl.minimum(sink_tokens, stop), STEP) * STEP
        start = tl.minimum(start, stop)  # behind the last key a window leaves the sink tokens alone, which end there
        is_one_span = start <= cover
        start = tl.where(is_one_span, 0, start)
        cover = tl.where(is_one_span, 0, cover)
    full_start = start + tl.cdiv(tl.maximum(shared_start - start, 0), STEP) * STEP
    full_stop = full_start + tl.maximum(shared_stop - full_start, 0) // STEP * STEP
    return start, full_start, full_stop, stop, cover


@triton.jit
def block_at(position, steps, listed, MASKED: tl.constexpr, COVERED: tl.constexpr):
    """Return where the block at a loop's ``position`` begins.

    The masked loop runs from start − cover on: first the blocks of [0, cover), then those from ``start`` on, without
    the full blocks, which the unmasked loop computes. Along a list both loops look their tiles up.
    """
    start, hole_start, hole_stop, _stop, cover = steps
    n = start * 0 + position
    if listed is not None:
        n = tl.load(listed + 2 + n // LIST_TILE) * LIST_TILE + n % LIST_TILE
    elif MASKED:
        n = tl.where(position < hole_start, position, position + hole_stop - hole_start)
        if COVERED:
            n = tl.where(position < start, position - (start - cover), n)
    return n


@triton.jit
def tile_list(numbers, per_batch, per_head, batch, head, heads, first, rows, columns):
    """Point to the list of one tile of rows (masks/tile_lists.py); per_batch, per_head: whether each has its own."""
    tiles = tl.cdiv(rows, LIST_TILE)
    entry = first // LIST_TILE
    if per_head is not None:
        entry += head * tiles
        tiles *= heads
    if per_batch is not None:
        entry += batch * tiles
    return numbers + entry.to(tl.int64) * (2 + tl.cdiv(columns, LIST_TILE))


@triton.jit
def blocks_of_list(listed, stop):
    """Return blocks as :func:`blocks_of_range`, counted along a list: first its partial tiles, then the full ones."""
    partly = tl.load(listed) * LIST_TILE
    whole = tl.load(listed + 1) * LIST_TILE
    return partly * 0, partly, partly + whole, stop, partly * 0


@triton.jit
def loop_begin(steps, MASKED: tl.constexpr):
    """Return where the masked or the unmasked loop begins."""
    start, full_start, _full_stop, _stop, cover = steps
    if MASKED:
        begin = start - cover
    else:
        begin = full_start
    return begin


@triton.jit
def loop_end(steps, listed, MASKED: tl.constexpr):
    """Return where the masked or the unmasked loop ends."""
    _start, full_start, full_stop, stop, _cover = steps
    if not MASKED:
        end = full_stop
    elif listed is None:
        end = stop - (full_stop - full_start)
    else:
        end = full_start
    return end


@triton.jit
def zero_invisible_rows(tile, row, seen_from, sink_tokens, chunk, ROWS: tl.constexpr, ADDED: tl.constexpr):
    """Zero the rows before the first visible one, where blocks contain some (ADDED): NaN may stand there.

    Sink tokens are visible in the chunk of ``seen_from``, the first query's, and behind it. Rows of queries have none.
    """
    if ADDED:
        offs = row + tl.arange(0, ROWS)
        is_seen = offs >= seen_from
        if sink_tokens is not None:
            is_sink = offs < sink_tokens
            if chunk is not None:
                is_sink &= offs >= chunk_start(seen_from, chunk)
            is_seen |= is_sink
        tile = tl.where(is_seen[:, None], tile, 0.0)
    return tile


@triton.jit
def is_visible(offs_q, offs_k, stop_q, stop_k, band, numbers_q, numbers_k):
    """Return which pairs of the tile take part (eq. 12); query and key positions broadcast to it.

    numbers_q, numbers_k: the numbers of their documents, or None.
    """
    lower, upper, prefix, sink_tokens, chunk, offset, shift = band
    visible = (offs_q < stop_q) & (offs_k < stop_k)
    if shift is not None:
        offs_q += shift
    if lower is not None:
        near = offs_k - offs_q >= lower
        if sink_tokens is not None:
            near |= offs_k < sink_tokens
        visible &= near
    if upper is not None:
        known = offs_k - offs_q <= upper
        if prefix is not None:
            known |= offs_k < prefix
        visible &= known
    if chunk is not None:
        visible &= chunk_start(offs_q + offset, chunk) == chunk_start(offs_k, chunk)
    if numbers_q is not None:
        visible &= numbers_q == numbers_k
    return visible


@triton.jit
def sees_any_key(offs_q, length_q, length_k, band):
    """Return which queries see a key, by their position."""
    start, _shared_start, _shared_stop, stop = visible_keys(offs_q, offs_q, length_k, band)
    _lower, _upper, _prefix, sink_tokens, chunk, offset, shift = band
    seeing = start < stop
    if sink_tokens is not None:
        sees_sink = tl.minimum(sink_tokens, stop) > 0
        if chunk is not None:
            position = offs_q + offset if shift is None else offs_q + offset + shift
            sees_sink &= chunk_start(position, chunk) == 0
        seeing |= sees_sink
    return seeing & (offs_q < length_q)
