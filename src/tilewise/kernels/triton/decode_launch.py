"""Binds the kernels of decoding to a problem: append, attend and combine."""

from typing import NamedTuple

from tilewise.kernels.triton.cache import AppendNumbers, Cache, CacheConstants, Rotary, append_kernel
from tilewise.kernels.triton.config import DecodeConfig, Splits
from tilewise.kernels.triton.decode import (
    DecodeConstants,
    DecodeNumbers,
    Extras,
    attention_decode_kernel,
    combine_kernel,
)
from tilewise.kernels.triton.launch import Launch
from tilewise.kernels.triton.primitives import LOG2E
from tilewise.problem.decode import CacheOperands, DecodeProblem
from tilewise.problem.options import Sizes, is_large_softcap

APPEND_ROWS = 8  # a position's heads, in most caches; what is written is little


class Strides(NamedTuple):
    """Strides of operands that kernels take with their tensors; a unit stride is None, as in arguments.py."""

    table: int | None
    cos: int | None
    sin: int | None
    slopes_b: int | None
    slopes_h: int | None
    sinks: int | None


def strides_of(problem: DecodeProblem) -> Strides:
    """Collect what the three below put beside the tensors."""
    def stride(name: str, dim: int) -> int | None:
        own = problem.strides_of(name)[dim] if problem.has(name) else None
        return None if own == 1 else own

    return Strides(stride("block_table", 0), stride("rotary_cos", 0), stride("rotary_sin", 0),
                   stride("alibi_slopes", 0), stride("alibi_slopes", 1), stride("sinks", 0))


def cache_of(operands: CacheOperands, strides: Strides) -> Cache:
    """Put what says how a cache is filled into the form that kernels take."""
    return Cache(operands.cache_seqlens, operands.cache_leftpad, operands.cache_batch_idx, operands.block_table,
                 strides.table)


def rotary_of(operands: CacheOperands, strides: Strides) -> Rotary:
    """Put the angles into the form that kernels take."""
    return Rotary(operands.rotary_cos, operands.rotary_sin, strides.cos, strides.sin)


def extras_of(operands: CacheOperands, strides: Strides, softcap: float | None) -> Extras:
    """Put what changes a score or a softmax into the form that kernels take; slopes are (b, hq)."""
    return Extras(softcap, operands.alibi_slopes, strides.slopes_b, strides.slopes_h, operands.sinks, strides.sinks,
                  1.0 if is_large_softcap(softcap) else None)


def append_launch(problem: DecodeProblem) -> Launch:
    """Bind the kernel: call the result with (k, v, k_cache, v_cache, cache, rotary)."""
    tiles = -(-problem.new * problem.hk // APPEND_ROWS)
    scalars = (AppendNumbers(problem.new, problem.hk, problem.capacity, tiles),
               CacheConstants(problem.d, problem.dv, problem.width, problem.page, problem.rotary_dim,
                              problem.interleaved, APPEND_ROWS))
    strides = (*map(problem.strides_of, ("k", "v")),
               *(problem.strides_of(name)[:3] for name in ("k_cache", "v_cache")))
    return Launch(append_kernel, tiles * problem.b, scalars, strides, num_warps=4, num_stages=1)


def decode_launch(problem: DecodeProblem, config: DecodeConfig, splits: Splits, tiles: int,
                  precision: str) -> Launch:
    """Bind the kernel: call the result with (q, k_cache, v_cache, out, lse, cache, rotary, extras)."""
    mask, whole = problem.mask, is_whole(splits)
    dense = (problem.hq * problem.sq, problem.sq, 1)
    out = problem.out_strides[:3] if whole else tuple(stride * splits.count * problem.dv for stride in dense)
    k_strides, v_strides = problem.strides_of("k_cache"), problem.strides_of("v_cache")
    scalars = (
        DecodeNumbers(problem.scale * LOG2E.value, None if mask.left is None else -mask.left, mask.right, problem.sq,
                      problem.hk, problem.group, problem.new, problem.capacity, problem.positions, tiles, splits.count,
                      splits.length),
        DecodeConstants(problem.d, problem.dv, problem.width, problem.page, problem.rotary_dim, problem.interleaved,
                        problem.sq > 1, whole, _needs_int64(problem, k_strides, v_strides), precision,
                        config.overlapped, config.block_m, config.block_n))
    return Launch(attention_decode_kernel, problem.hk * tiles * splits.count * problem.b, scalars,
                  (problem.strides_of("q"), k_strides[:3], v_strides[:3], out), num_warps=config.num_warps,
                  num_stages=config.num_stages)


def combine_launch(problem: DecodeProblem, config: DecodeConfig, splits: Splits) -> Launch:
    """Bind the kernel: call the result with (parts, sums, out, lse, extras)."""
    scalars = (problem.scale * LOG2E.value, problem.sq, problem.hq, splits.count, problem.dv, problem.width,
               config.overlapped)
    return Launch(combine_kernel, problem.b * problem.hq * problem.sq, scalars,
                  (None, None, problem.out_strides[:3]), num_warps=4, num_stages=1,
                  **({"launch_pdl": True} if config.overlapped else {}))


def is_whole(splits: Splits) -> bool:
    """Whether the first kernel's result is the call's.

    Not where a split has a fixed length: bits would depend on how many there are, which the capacity decides.
    """
    return splits.count == 1 and splits.length is None


def _needs_int64(problem: DecodeProblem, *strides: Sizes) -> bool:
    """Whether an offset inside one head of a page, or of a sequence, passes 2^31; a tile reaches past the last row."""
    rows = (problem.page or problem.capacity) + 256
    return any(rows * abs(tensor[2]) + problem.width >= 2**31 for tensor in strides)
