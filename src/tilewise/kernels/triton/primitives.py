"""What the kernels are made of: one formula a function (equation numbers are those of docs/maths.md)."""

import triton
import triton.language as tl

# exp(x) = 2^(x·LOG2E): the hardware's exponential is base 2. Natural logarithms at every border.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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
def head_offset(batch, head, stride_b, stride_h):
    """Offset of one head's first element; 64 bits, as batch and heads can pass 2^31 elements."""
    return batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit
def offsets(positions, stride, INT64: tl.constexpr):
    """Offsets inside one head; 64 bits only where the host found that 32 do not do."""
    if INT64:
        positions = positions.to(tl.int64)
    return positions * stride


@triton.jit
def head_source(source, batch, head, stride_b, stride_h, DESCRIPTORS: tl.constexpr):
    """What :func:`load_tile` reads one head from: a pointer moved to it, or the descriptor of the whole tensor."""
    if DESCRIPTORS:
        moved = source
    else:
        moved = source + head_offset(batch, head, stride_b, stride_h)
    return moved


@triton.jit
def load_tile(source, batch, head, row, stop, stride_s, stride_d, ROWS: tl.constexpr, DIM: tl.constexpr,
              BLOCK_DIM: tl.constexpr, CHECK_ROWS: tl.constexpr, INT64: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """Load rows ``row .. row + ROWS`` of one head, [ROWS, BLOCK_DIM]; zero at and past row ``stop`` and dim ``DIM``.

    Through a descriptor the copy engine does it, and clips to the shape the descriptor was made with, which ends
    where nothing further is seen; through pointers the threads do, and CHECK_ROWS = False spares the row check.
    """
    if DESCRIPTORS:
        tile = source.load([batch, head, row, 0]).reshape(ROWS, BLOCK_DIM)
    else:
        offs_s = row + tl.arange(0, ROWS)
        offs_d = tl.arange(0, BLOCK_DIM)
        ptrs = source + offsets(offs_s, stride_s, INT64)[:, None] + offsets(offs_d, stride_d, INT64)[None, :]
        if CHECK_ROWS and BLOCK_DIM != DIM:
            tile = tl.load(ptrs, mask=(offs_s < stop)[:, None] & (offs_d < DIM)[None, :], other=0.0)
        elif CHECK_ROWS:
            tile = tl.load(ptrs, mask=(offs_s < stop)[:, None], other=0.0)
        elif BLOCK_DIM != DIM:
            tile = tl.load(ptrs, mask=(offs_d < DIM)[None, :], other=0.0)
        else:
            tile = tl.load(ptrs)
    return tile


@triton.jit
def store_tile(base, tile, row, stop, stride_s, stride_d, ROWS: tl.constexpr, DIM: tl.constexpr,
               BLOCK_DIM: tl.constexpr, INT64: tl.constexpr):
    """Store a [ROWS, BLOCK_DIM] tile to rows ``row .. stop`` of one head, in the tensor's own dtype."""
    offs_s = row + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_DIM)
    ptrs = base + offsets(offs_s, stride_s, INT64)[:, None] + offsets(offs_d, stride_d, INT64)[None, :]
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=(offs_s < stop)[:, None] & (offs_d < DIM)[None, :])


@triton.jit
def tile_spans(first, last, length, lower, upper, STEP: tl.constexpr, ALIGN: tl.constexpr, HAS_LOWER: tl.constexpr,
               HAS_UPPER: tl.constexpr):
    """Cut the positions that rows ``first .. last`` (inclusive) see into steps of ``STEP`` (eq. 13 and 14).

    Returns (start, full_start, full_stop, stop): steps in [full_start, full_stop) are visible whole and need no
    mask; those before and after need one (:func:`around`); everything outside [start, stop) is skipped. The keys'
    side reads the same band with ``(-upper, -lower)`` (eq. 15). ``start`` is rounded down to a multiple of
    ALIGN; :func:`unseen_as_zero` serves the positions that this adds.
    """
    start = 0
    stop = length
    shared_start = 0
    shared_stop = length
    if HAS_LOWER:
        start = tl.maximum(0, first + lower)
        shared_start = tl.maximum(0, last + lower)
    if HAS_UPPER:
        stop = tl.minimum(length, last + 1 + upper)
        shared_stop = tl.minimum(length, first + upper + 1)
    start = start // ALIGN * ALIGN
    full_start = start + tl.cdiv(tl.maximum(shared_start - start, 0), STEP) * STEP
    full_stop = full_start + tl.maximum(shared_stop - full_start, 0) // STEP * STEP
    return start, full_start, full_stop, stop


@triton.jit
def unseen_as_zero(tile, row, first, lower, ROWS: tl.constexpr, ADDED: tl.constexpr):
    """Zero the rows before the first one that is seen (ADDED: where aligning the start may have added some)."""
    if ADDED:
        tile = tl.where((row + tl.arange(0, ROWS) >= first + lower)[:, None], tile, 0.0)
    return tile


@triton.jit
def around(position, hole_start, hole_stop):
    """Step over the hole that the unmasked loop fills, so that one masked loop serves both of its sides."""
    return tl.where(position < hole_start, position, position + hole_stop - hole_start)


@triton.jit
def see(offs_q, offs_k, stop_q, stop_k, lower, upper, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr):
    """Which pairs of the tile take part (eq. 12), given query and key positions that broadcast to it."""
    visible = (offs_q < stop_q) & (offs_k < stop_k)
    if HAS_LOWER:
        visible &= offs_k - offs_q >= lower
    if HAS_UPPER:
        visible &= offs_k - offs_q <= upper
    return visible


@triton.jit
def online_softmax_step(scores, row_max, row_sum, acc, scale_log2, GUARD: tl.constexpr):
    """Fold one tile of unscaled scores into the running softmax (eq. 4, base 2 by eq. 7).

    m' = max(m, c·max_j s_j);  l' = l·2^(m−m') + Σ_j 2^(c·s_j−m');  acc' = acc·2^(m−m'),  c = scale·log2 e > 0
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)  # [BLOCK_M]
    shift = new_max
    if GUARD:
        # A row with no visible key yet has new_max = −inf; −inf − (−inf) is NaN, so shift by 0 there.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    probs = tl.exp2(scores * scale_log2 - shift[:, None])  # [BLOCK_M, BLOCK_N]
    decay = tl.exp2(row_max - shift)  # [BLOCK_M]
    return probs, new_max, row_sum * decay + tl.sum(probs, 1), acc * decay[:, None]
