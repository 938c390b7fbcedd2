"""Checks of the tensors of a call against one another, and of what comes only together."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from tilewise.errors import InvalidInput
from tilewise.validate.shape_hints import layout_hint
from tilewise.validate.tensors import INTEGERS, Sizes, TensorSpec, check_operand

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_each(*tensors: TensorSpec) -> None:
    """Check what concerns each tensor, and that all have one dtype and device; raises :class:`InvalidInput`."""
    first = tensors[0]
    for name, shape, _, dtype, device in tensors:
        if len(shape) != 4:
            raise InvalidInput(f"{name} has shape {_text(shape)}; allowed are 4 dims (b, h, s, d).")
        if dtype not in DTYPES:
            raise InvalidInput(f"{name} has dtype {dtype}; allowed are {', '.join(map(str, DTYPES))}.")
        if shape[3] < 1:
            raise InvalidInput(f"{name} has head dim {shape[3]}; allowed are 1 and more.")
        if dtype != first.dtype:
            raise InvalidInput(f"{name} has dtype {dtype} and {first.name} has {first.dtype}: cast them to one dtype.")
        if device != first.device:
            raise InvalidInput(f"{name} is on {device} and {first.name} is on {first.device}: move them to one device.")


def check_together(q: TensorSpec, k: TensorSpec, v: TensorSpec, packed: bool) -> None:
    """Check the sizes of q, k and v against one another; raises :class:`InvalidInput`."""
    for name, own in (("k", k), ("v", v)):
        if own.shape[0] != q.shape[0]:
            raise InvalidInput(f"{name} has batch size {own.shape[0]} and q has {q.shape[0]}: they must be equal.")
    if k.shape[3] != q.shape[3]:
        raise InvalidInput(f"k has head dim {k.shape[3]} and q has {q.shape[3]}: they must be equal (v's may differ).")
    for dim, what in ((1, "heads"), (2, "positions")):
        if v.shape[dim] != k.shape[dim]:
            raise InvalidInput(f"v has {v.shape[dim]} {what} and k has {k.shape[dim]}: they must be equal."
                               + layout_hint("qkv", q.shape, k.shape, v.shape, packed=packed))
    hq, hk = q.shape[1], k.shape[1]
    if hk == 0 or hq % hk:
        hint = (layout_hint("qkv", q.shape, k.shape, v.shape, packed=packed)
                or " Did you transpose (b, h, s, d)?")
        raise InvalidInput(f"k has {hk} heads and q has {hq}: q heads must be a multiple of k heads.{hint}")


def check_alignment(mask: Any, q: TensorSpec, k: TensorSpec, v: TensorSpec) -> None:
    """Raise :class:`InvalidInput` where lengths differ and the mask names no alignment."""
    try:
        mask.band(q.shape[2], k.shape[2])
    except InvalidInput as error:
        hint = layout_hint("qkv", q.shape, k.shape, v.shape)
        raise InvalidInput(f"{str(error).rstrip()}\n{hint.strip()}" if hint else str(error)) from None


def check_distances(mask: Any, sq: int, sk: int, *, are_data: bool) -> None:
    """Raise :class:`InvalidInput` where slopes ask for distances that no alignment makes plain."""
    if mask.alignment is None and (sq != sk or are_data):
        lengths = "lengths that are data" if are_data else f"{sq} queries and {sk} keys"
        raise InvalidInput(f"alibi_slopes are given with {lengths} and no alignment: the "
                           "distance of a query and a key is ambiguous. Pass mask=window(None, None, alignment) or "
                           "another mask with alignment='top_left' or 'bottom_right'.")


def check_lengths(given: Mapping[str, TensorSpec], q: TensorSpec, mask: Any) -> int:
    """Check the operands that hold lengths, one at least; return how many sequences there are.

    Raises:
        InvalidInput: names the operand.
    """
    packed = ("cu_seqlens_q" in given, "cu_seqlens_k" in given)
    if packed[0] != packed[1]:
        raise InvalidInput(f"cu_seqlens_q is {'given' if packed[0] else 'missing'} and cu_seqlens_k is "
                           f"{'given' if packed[1] else 'missing'}: packed sequences need both.")
    count = math.prod(given["cu_seqlens_q"].shape) - 1 if packed[0] else q.shape[0]
    for name, own in given.items():
        is_border = name.startswith("cu")
        said = name if is_border or not packed[0] else name.replace("seqlens", "seqused")
        check_operand(own._replace(name=said), (count + 1 if is_border else count,), INTEGERS, q.device)
        if own.shape[0] > 1 and own.strides[0] != 1:
            raise InvalidInput(f"{said} has stride {own.strides[0]}; allowed is 1: call contiguous() on it.")
    if packed[0] and (count < 0 or q.shape[0] != 1):
        raise InvalidInput(f"cu_seqlens_q has shape {tuple(given['cu_seqlens_q'].shape)} and q a batch size of "
                           f"{q.shape[0]}; "
                           "allowed are (sequences + 1,) and 1: packed sequences have no other batch dim.")
    if isinstance(mask.alignment, int):
        raise InvalidInput(f"mask is {mask} and lengths are data ({', '.join(given)}); allowed with them are "
                           "alignment='top_left' and 'bottom_right', which are each sequence's own.")
    if mask.is_bounded and mask.alignment is None:
        raise InvalidInput(f"mask is {mask} and names no alignment, but lengths are data ({', '.join(given)}): whether "
                           "those of queries and keys are equal, the device alone knows. Pass alignment='top_left' or "
                           "'bottom_right'.")
    return count


def check_longest_dims(name: str, shape: Sizes, longest: tuple[int | None, int | None]) -> None:
    """Packed sequences: a dim of queries or keys says how long the longest may be, and so must the caller."""
    for dim, side, size in ((2, "q", longest[0]), (3, "k", longest[1])):
        if shape[dim] != 1 and size is None:
            raise InvalidInput(f"{name} has shape {_text(shape)} and sequences are packed: pass max_seqlen_{side} as "
                               f"an integer, the size of its dim {dim}.")


def check_companions(names: Collection[str], dropout_p: float, *, are_data: bool) -> None:
    """Raise :class:`InvalidInput` for operands without what they come with; ``names``: of those that are there."""
    if ("documents_q" in names) != ("documents_k" in names):
        raise InvalidInput("documents_q and documents_k: one is given without the other; allowed are both, or none.")
    if "tiles_q" in names and are_data:
        raise InvalidInput("mask is tiled() for lengths of its own, but lengths are data; pass it untiled.")
    if ("seed" in names) != (dropout_p != 0.0):
        raise InvalidInput(f"dropout_p is {dropout_p} and a seed is "
                           f"{'given' if dropout_p == 0.0 else 'missing'}: dropout needs both.")


def check_function_tensors(said: str, tensors: Iterable[TensorSpec], device: torch.device) -> None:
    """Check the tensors of a function of the user's; raises :class:`InvalidInput`."""
    for i, (_, shape, strides, _, own_device) in enumerate(tensors):
        if own_device != device:
            raise InvalidInput(f"{said}: tensors[{i}] is on {own_device} and q is on {device}: move them to one "
                               "device.")
        dense = [math.prod(shape[dim + 1:]) for dim in range(len(shape))]
        if any(size > 1 and own != wanted for size, own, wanted in zip(shape, strides, dense, strict=True)):
            raise InvalidInput(f"{said}: tensors[{i}] has strides {_text(strides)}; allowed are those of a contiguous "
                               "tensor, which a kernel reads by its pointer: call contiguous() on it.")


def _text(shape: Iterable[int]) -> str:
    return "(" + ", ".join(str(size) for size in shape) + ")"
