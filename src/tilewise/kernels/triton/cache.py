"""Caches of keys and values: how they are filled, where a position lies, and the writing of new ones.

All that says so (lengths, tables) is data, read here and not by the host, so that a CUDA graph replays with others.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.triton.modifiers import operand_offset
from tilewise.kernels.triton.primitives import head_offset


class Cache(NamedTuple):
    """How a cache is filled, and where its sequences lie; what a call does not use, and a stride of 1, is None."""

    lengths: Any = None  # (b,)
    leftpad: Any = None  # (b,)
    batch_idx: Any = None  # (b,)
    table: Any = None  # (b, pages of a sequence), last stride 1
    stride_table: int | None = None


class Rotary(NamedTuple):
    """Cosines and sines, each (positions, rotary_dim / 2), last stride 1; None as in :class:`Cache`."""

    cos: Any = None
    sin: Any = None
    stride_cos: int | None = None
    stride_sin: int | None = None


class AppendNumbers(NamedTuple):
    """The numbers of a problem, for which the kernel is not specialised: positions that are appended, heads, ..."""

    new: int
    hk: int
    capacity: int
    tiles: int


class CacheConstants(NamedTuple):
    """What is fixed when the kernel is compiled: as in decode.DecodeConstants; ROWS: of a CTA."""

    D: int
    DV: int
    BLOCK_D: int
    PAGE: int
    ROTARY: int
    INTERLEAVED: bool
    ROWS: int


@triton.jit
def length_before(cache, batch):
    """Return how many positions of a sequence were filled before this call; a length below 0 counts as 0."""
    return tl.maximum(tl.load(cache.lengths + batch).to(tl.int32), 0)


@triton.jit
def filled(cache, batch, new, capacity):
    """Return how many positions of a sequence were filled before this call, and how many are now."""
    before = capacity
    if cache.lengths is not None:
        before = length_before(cache, batch)
    return before, tl.minimum(before + new, capacity)


@triton.jit
def row_of(cache, batch):
    """Return the row of an unpaged cache in which a sequence lies."""
    row = batch
    if cache.batch_idx is not None:
        row = tl.load(cache.batch_idx + batch).to(tl.int32)
    return row


@triton.jit
def load_rotated(rows, places, inside, rotary, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr,
                 ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load rows by their pointers, [len(rows), BLOCK_D], the first ROTARY dims rotated by the angles of ``places``.

    Dims 2p and 2p + 1 are a pair where INTERLEAVED, else p and p + ROTARY / 2; in float32,
    x' = x·cos − y·sin,  y' = y·cos + x·sin.
    """
    offs_d = tl.arange(0, BLOCK_D)
    taken = inside[:, None] & (offs_d < D)[None, :]
    tile = tl.load(rows[:, None] + (offs_d * stride_d)[None, :], mask=taken, other=0.0)
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        if INTERLEAVED:
            is_first = offs_d % 2 == 0
            partner = offs_d ^ 1
            pair = offs_d // 2
        else:
            is_first = offs_d < HALF
            partner = tl.where(is_first, offs_d + HALF, offs_d - HALF)
            pair = offs_d % HALF
        turning = inside[:, None] & (offs_d < ROTARY)[None, :]
        other = tl.load(rows[:, None] + (partner * stride_d)[None, :], mask=turning, other=0.0).to(tl.float32)
        angle = places[:, None]
        angle_of = rotary.cos + operand_offset(angle, rotary.stride_cos, True) + pair[None, :]
        cos = tl.load(angle_of, mask=turning, other=1.0).to(tl.float32)
        angle_of = rotary.sin + operand_offset(angle, rotary.stride_sin, True) + pair[None, :]
        sin = tl.load(angle_of, mask=turning, other=0.0).to(tl.float32)
        rotated = tile.to(tl.float32) * cos + tl.where(is_first, -1.0, 1.0)[None, :] * other * sin
        tile = rotated.to(tile.dtype)
    return tile


@triton.jit
def append_kernel(k, v, k_cache, v_cache, cache, rotary, problem, C: tl.constexpr):
    """Write new keys, rotated by their positions, and new values behind those in the cache.

    Grid: (tiles · b,): a CTA writes ROWS of a sequence's new · hk rows. What the cache has no room for is not written.
    """
    pid = tl.program_id(0)
    batch = pid // problem.tiles
    offs = pid % problem.tiles * C.ROWS + tl.arange(0, C.ROWS)
    index = offs // problem.hk
    head = offs % problem.hk
    place = length_before(cache, batch) + index
    inside = (index < problem.new) & (place < problem.capacity)
    if C.PAGE > 0:
        pages = cache.table + operand_offset(batch, cache.stride_table, True)
        row = tl.load(pages + place // C.PAGE, mask=inside, other=0)
        within = (place % C.PAGE).to(tl.int64)
    else:
        row = row_of(cache, batch)
        within = place.to(tl.int64)
    offs_d = tl.arange(0, C.BLOCK_D)
    k_rows = k.ptr + head_offset(batch, head, k.stride_b, k.stride_h) + index.to(tl.int64) * k.stride_s
    k_tile = load_rotated(k_rows, place, inside, rotary, k.stride_d, C.D, C.BLOCK_D, C.ROTARY, C.INTERLEAVED)
    k_ptrs = k_cache.ptr + head_offset(row, head, k_cache.stride_b, k_cache.stride_h) + within * k_cache.stride_s
    tl.store(k_ptrs[:, None] + offs_d[None, :], k_tile, mask=inside[:, None] & (offs_d < C.D)[None, :])
    v_rows = v.ptr + head_offset(batch, head, v.stride_b, v.stride_h) + index.to(tl.int64) * v.stride_s
    v_tile = load_rotated(v_rows, place, inside, rotary, v.stride_d, C.DV, C.BLOCK_D, 0, C.INTERLEAVED)
    v_ptrs = v_cache.ptr + head_offset(row, head, v_cache.stride_b, v_cache.stride_h) + within * v_cache.stride_s
    tl.store(v_ptrs[:, None] + offs_d[None, :], v_tile, mask=inside[:, None] & (offs_d < C.DV)[None, :])
