"""Checks of the tensors of a decoding call against one another."""

from collections.abc import Mapping

import torch

from tilewise.errors import InvalidInput
from tilewise.validate.shape_hints import layout_hint
from tilewise.validate.tensors import INTEGERS, Sizes, TensorSpec, check_operand


def check_caches(q: TensorSpec, k: TensorSpec, v: TensorSpec, given: Mapping[str, TensorSpec]) -> None:
    """Check the caches against q, and what says where in them a sequence lies; raises :class:`InvalidInput`."""
    (b, hq, _, d), (rows, hk, page, own_d) = q.shape, k.shape
    names = q.name, k.name, v.name
    if own_d != d:
        raise InvalidInput(f"k_cache has head dim {own_d} and q has {d}: they must be equal (v_cache's may differ).")
    if tuple(v.shape[:3]) != tuple(k.shape[:3]):
        raise InvalidInput(f"v_cache has shape {tuple(v.shape)} and k_cache {tuple(k.shape)}: they may differ in their "
                           f"head dim alone.{layout_hint(names, q.shape, k.shape, v.shape)}")
    if hk == 0 or hq % hk:
        hint = layout_hint(names, q.shape, k.shape, v.shape) or " Did you transpose (b, h, s, d)?"
        raise InvalidInput(f"k_cache has {hk} heads and q has {hq}: q heads must be a multiple of k heads.{hint}")
    for name, shape, strides, _, _ in (k, v):
        if strides[3] != 1:
            raise InvalidInput(f"{name} has stride {strides[3]} along its head dim; allowed is 1: a cache is not "
                               "copied.")
        if "k" in given and any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
            raise InvalidInput(f"{name} is expanded (strides {tuple(strides)}) and k is given, which would be written "
                               "to one place for several of its positions; allowed is memory for each: "
                               f"{name}.clone().")
    if "block_table" in given and "cache_batch_idx" in given:
        raise InvalidInput("cache_batch_idx is given and so is block_table; allowed is one of them: a table says "
                           "already where a sequence lies.")
    if "block_table" in given and page == 0:
        raise InvalidInput(f"k_cache has shape {tuple(k.shape)}: pages of 0 positions; allowed are 1 and more.")
    if rows != b and "block_table" not in given and "cache_batch_idx" not in given:
        raise InvalidInput(f"k_cache has batch size {rows} and q has {b}: they must be equal, unless cache_batch_idx "
                           "or block_table says where a sequence lies.")


def check_cache_operands(q: TensorSpec, given: Mapping[str, TensorSpec], sizes: Mapping[str, int]) -> None:
    """Check shapes, dtypes and devices, and what comes in pairs; raises :class:`InvalidInput`.

    ``sizes``: hk, dv, capacity and new, the number of keys that are appended.
    """
    (b, hq, _, d), dtype, device = q.shape, q.dtype, q.device
    hk, new = sizes["hk"], sizes["new"]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    table = given["block_table"].shape[-1:] if "block_table" in given else (0,)
    allowed: dict[str, tuple[Sizes, tuple[torch.dtype, ...]]] = {
        "k": ((b, hk, new, d), (dtype,)), "v": ((b, hk, new, sizes["dv"]), (dtype,)),
        **dict.fromkeys(("cache_seqlens", "cache_batch_idx", "cache_leftpad"), ((b,), INTEGERS)),
        "block_table": ((b, *table), INTEGERS), "alibi_slopes": ((b, hq), (wide,)), "sinks": ((hq,), (dtype, wide))}
    for name, own in given.items():
        if name in allowed:
            check_operand(own, *allowed[name], device)
            if own.dtype in INTEGERS and own.shape[-1] > 1 and own.strides[-1] != 1:
                raise InvalidInput(f"{name} has stride {own.strides[-1]}; allowed is 1: call contiguous() on it.")
    for one, other in (("k", "v"), ("v", "k"), ("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")):
        if one in given and other not in given:
            raise InvalidInput(f"{one} is given without {other}; allowed are both, or none.")
    for one, other, why in (("k", "cache_seqlens", "where they are to be written"),
                            ("rotary_cos", "k", "which keys turn; those of the cache have turned already")):
        if one in given and other not in given:
            raise InvalidInput(f"{one} is given without {other}, which says {why}.")
    if new > sizes["capacity"]:
        raise InvalidInput(f"k has {new} positions and the cache holds {sizes['capacity']}; allowed are no more.")


def check_angles(cos: TensorSpec, sin: TensorSpec, d: int, capacity: int, device: torch.device) -> None:
    """Check the angles of rotary embeddings; raises :class:`InvalidInput`.

    Args:
        cos, sin: (positions, rotary_dim / 2).
        d: head dim of q.
        capacity: positions that a sequence's cache can hold.
        device: of q.
    """
    name, shape, _, dtype, _ = cos
    if len(shape) != 2 or shape[0] < capacity or not 0 < 2 * shape[1] <= d:
        raise InvalidInput(f"{name} has shape {tuple(shape)}; allowed is (positions, rotary_dim / 2) with at least "
                           f"{capacity} positions, the capacity of the cache, and a rotary_dim of 2 to {d}.")
    if not dtype.is_floating_point:
        raise InvalidInput(f"{name} has dtype {dtype}; allowed are floating-point dtypes.")
    for own in (cos, sin):
        check_operand(own, tuple(shape), (dtype,), device)
        if shape[1] > 1 and own.strides[1] != 1:
            raise InvalidInput(f"{own.name} has stride {own.strides[1]}; allowed is 1: call contiguous() on it.")
