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


@triton.jit(do_not_specialize=["new", "hk", "capacity", "tiles"])
def append_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, cache, rotary,
                  stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd,
                  stride_kcb, stride_kch, stride_kcs, stride_vcb, stride_vch, stride_vcs,
                  new, hk, capacity, tiles, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
                  PAGE: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr):
    """Write new keys, rotated by their positions, and new values behind those in the cache.

    Grid: (tiles · b,): a program writes ROWS of a sequence's new · hk rows. What the cache has no room for is not
    written.
    """
    pid = tl.program_id(0)
    batch = pid // tiles
    offs = pid % tiles * ROWS + tl.arange(0, ROWS)
    index = offs // hk
    head = offs % hk
    place = length_before(cache, batch) + index
    inside = (index < new) & (place < capacity)
    if PAGE > 0:
        pages = cache.table + operand_offset(batch, cache.stride_table, True)
        row = tl.load(pages + place // PAGE, mask=inside, other=0)
        within = (place % PAGE).to(tl.int64)
    else:
        row = row_of(cache, batch)
        within = place.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    k_rows = k_ptr + head_offset(batch, head, stride_kb, stride_kh) + index.to(tl.int64) * stride_ks
    k = load_rotated(k_rows, place, inside, rotary, stride_kd, D, BLOCK_D, ROTARY, INTERLEAVED)
    k_places = k_cache_ptr + head_offset(row, head, stride_kcb, stride_kch) + within * stride_kcs
    tl.store(k_places[:, None] + offs_d[None, :], k, mask=inside[:, None] & (offs_d < D)[None, :])
    v_rows = v_ptr + head_offset(batch, head, stride_vb, stride_vh) + index.to(tl.int64) * stride_vs
    v = load_rotated(v_rows, place, inside, rotary, stride_vd, DV, BLOCK_D, 0, INTERLEAVED)
    v_places = v_cache_ptr + head_offset(row, head, stride_vcb, stride_vch) + within * stride_vcs
    tl.store(v_places[:, None] + offs_d[None, :], v, mask=inside[:, None] & (offs_d < DV)[None, :])
