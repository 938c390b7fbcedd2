"""Checks of one tensor, by itself or against the shape that it broadcasts to; and what is read of a tensor."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from tilewise.errors import InvalidInput
from tilewise.validate.shape_hints import operand_hint

Sizes = tuple[int, ...]
INTEGERS = (torch.int32, torch.int64)
# What may stand at each place of a broadcast shape: the problem's letters; none where the user's tensor has no dim.
_FOUR = ("b", "hq", "sq", "sk")
_LETTERS = {
    "bias": _FOUR, "mask": _FOUR, "alibi_slopes": ("b", "hq"), "sinks": ("hq",), "seed": ("1",),
    "cu_seqlens_q": ("sequences + 1",), "cu_seqlens_k": ("sequences + 1",), "seqlens_q": ("b",), "seqlens_k": ("b",),
    "seqused_q": ("sequences",), "seqused_k": ("sequences",),
    "documents_q": ("b", "", "sq"), "documents_k": ("b", "", "sk"),
    "tiles_q": ("b", "hq", "tiles of sq", "2 + tiles of sk"), "tiles_k": ("b", "hq", "tiles of sk", "2 + tiles of sq"),
    "k": ("b", "hk", "new", "d"), "v": ("b", "hk", "new", "dv"), "cache_seqlens": ("b",), "cache_batch_idx": ("b",),
    "cache_leftpad": ("b",), "block_table": ("b", "pages a sequence"), "rotary_cos": ("positions", "rotary_dim / 2"),
    "rotary_sin": ("positions", "rotary_dim / 2"),
}
_BROADCAST = {"bias": _FOUR, "mask": _FOUR, "alibi_slopes": ("b",), "documents_q": ("b",), "documents_k": ("b",),
              "tiles_q": ("b", "hq"), "tiles_k": ("b", "hq")}
_NAMES = {"seed": "dropout_seed", "documents_q": "documents: ids", "documents_k": "documents: key_ids"}
_RANKS = {"bias": (2, 3, 4), "mask": (2, 3, 4), "alibi_slopes": (1, 2), "sinks": (1,)}
# What a call is looked up by, of each tensor: a TensorSpec's fields, as a tuple, which is a third of a microsecond
# less to make for three tensors than theirs.
SpecKey = tuple[str, Sizes, Sizes, torch.dtype, torch.device]


class TensorSpec(NamedTuple):
    """What a problem is made of, of one tensor: hashable, without the tensor."""

    name: str
    shape: Sizes
    strides: Sizes
    dtype: torch.dtype
    device: torch.device


def spec_of(name: str, tensor: torch.Tensor) -> SpecKey:
    """Read one tensor; raises :class:`InvalidInput` for anything else."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(f"{name} is a {type(tensor).__name__}; allowed is a torch.Tensor of shape (b, h, s, d).")
    check_layout(name, tensor)
    return name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def check_layout(name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`InvalidInput` for a tensor that has no strides."""
    if tensor.layout is not torch.strided:
        raise InvalidInput(f"{name} has layout {tensor.layout}; allowed is torch.strided: call to_dense() on it.")


def is_causal_bias(value: object) -> bool:
    """Whether it is torch's CausalBias, a tensor without values; told by its name, for its module takes seconds."""
    return type(value).__name__ == "CausalBias"


def with_four_dims(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """View a bias or a mask of 2 to 4 dims as (b|1, hq|1, sq|1, sk|1): dims are added at the front, as torch does."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() not in _RANKS[name]:
        raise InvalidInput(f"{name} is {_what(tensor)}; allowed is a tensor of 2 to 4 dims that broadcasts to "
                           "(b, hq, sq, sk).")
    if is_causal_bias(tensor):
        raise InvalidInput(f"{name} is a CausalBias, a tensor without values; allowed is mask=causal('top_left') or "
                           "mask=causal('bottom_right') in its place.")
    check_layout(name, tensor)
    return tensor[(None,) * (4 - tensor.dim())] if tensor.dim() < 4 else tensor


def with_batch_dim(slopes: torch.Tensor) -> torch.Tensor:
    """View ALiBi slopes (hq,) or (b, hq) as (b|1, hq)."""
    if not isinstance(slopes, torch.Tensor) or slopes.dim() not in _RANKS["alibi_slopes"]:
        raise InvalidInput(f"alibi_slopes is {_what(slopes)}; allowed is a tensor of shape (hq,) or (b, hq).")
    return slopes[None] if slopes.dim() == 1 else slopes


def check_operand(operand: "TensorSpec", full: Sizes, dtypes: tuple[torch.dtype, ...], device: torch.device,
                  q: Sizes | None = None) -> None:
    """Check one operand's shape against the full one it broadcasts to, its dtype and its device.

    ``q``: shape of q, for a hint; None where its dims do not tell, as of packed sequences.

    Raises:
        InvalidInput: names the operand, what was got and what is allowed.
    """
    name, shape, _, dtype, own_device = operand
    once, said = _BROADCAST.get(name, ()), _NAMES.get(name, name)
    if len(shape) != len(full) or any(own != size and not (own == 1 and letter in once)
                                      for own, size, letter in zip(shape, full, _LETTERS[name], strict=True)):
        named = [(letter, size) for letter, size in zip(_LETTERS[name], full, strict=True) if letter]
        allowed = ", ".join(str(size) if letter == str(size) else f"{letter}={size}" for letter, size in named)
        broadcast = "" if not once else f", or 1 in place of {'a size' if once == _FOUR else once[0]}"
        got = tuple(size for place, size in enumerate(shape) if _LETTERS[name][place:place + 1] != ("",))
        hint = operand_hint(name, shape, full, _LETTERS[name], q)
        raise InvalidInput(f"{said} has shape {got}; allowed is ({allowed}){broadcast}.{hint}")
    if dtype not in dtypes:
        allowed = ", ".join(map(str, dict.fromkeys(dtypes)))
        raise InvalidInput(f"{said} has dtype {dtype}; allowed {'are' if ',' in allowed else 'is'} {allowed}."
                           + _dtype_hint(name, dtype))
    if own_device != device:
        raise InvalidInput(f"{said} is on {own_device} and q is on {device}: move them to one device.")


def _dtype_hint(name: str, dtype: torch.dtype) -> str:
    """Say what a mask that is not boolean, or a bias that is, was meant to be, and how to pass it; "" of others."""
    if name == "bias" and dtype is torch.bool:
        return " A boolean tensor, of which True says that a pair takes part, goes to mask=."
    if name != "mask":
        return ""
    if dtype.is_floating_point:
        return " Numbers that are added to the scores go to bias=; a mask says which pairs take part: True, or False."
    return " Of numbers that are not 0 where a pair takes part, pass mask.bool()."


def check_inputs(q: Any, k: Any, v: Any) -> None:
    """Raise :class:`InvalidInput` for what is no tensor, and for a tensor that has no strides."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInput(f"{name} is a {type(tensor).__name__}; allowed is a torch.Tensor.")
        if tensor.is_nested:
            raise InvalidInput(f"{name} is a nested tensor; allowed is a dense one. attention_varlen takes sequences "
                               "of several lengths: the values, packed, and where each begins.")
        check_layout(name, tensor)


def check_packed_rows(q: Any, k: Any, v: Any) -> None:
    """Raise :class:`InvalidInput` for what is no tensor (total, h, d)."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3:
            shape = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else None
            got = shape or f"type {type(tensor).__name__}"
            raise InvalidInput(f"{name} has {got}; allowed is a tensor of 3 dims (total, h, d).")


def check_lengths_are_tensors(names: Iterable[str | None], lengths: Iterable[Any]) -> None:
    """Raise :class:`InvalidInput` for lengths that are no tensor, or that have to be there and are not."""
    for name, tensor in zip(names, lengths, strict=True):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or (name is not None and name[:2] == "cu")):
            raise InvalidInput(f"{name} is a {type(tensor).__name__}; allowed is a tensor of integers on q's device.")


def check_sinks(sinks: Any) -> None:
    """Raise :class:`InvalidInput` for what is no tensor."""
    if not isinstance(sinks, torch.Tensor):
        raise InvalidInput(f"sinks is a {type(sinks).__name__}; allowed is a tensor of shape (hq,), or None.")


def check_optional_tensors(named: Iterable[tuple[str, Any]]) -> None:
    """Raise :class:`InvalidInput` for what is neither a tensor nor None."""
    for name, tensor in named:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise InvalidInput(f"{name} is a {type(tensor).__name__}; allowed is a torch.Tensor, or None.")


def checked_ids(name: str, ids: object) -> torch.Tensor:
    """Return a document's ids as (b|1, s), int64; raises :class:`InvalidInput` for what is none."""
    if isinstance(ids, torch.Tensor) and ids.dim() in (1, 2) and not ids.is_floating_point() and (
            not ids.is_complex() and ids.dtype is not torch.bool):
        return (ids[None] if ids.dim() == 1 else ids).long()
    got = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
    raise InvalidInput(f"documents: {name} is {got}; allowed is a tensor of integers of shape (s,) or (b, s).")


def check_key_ids(queries: torch.Tensor, keys: torch.Tensor) -> None:
    """Raise :class:`InvalidInput` for ids of queries and of keys, (b|1, s), that do not go together."""
    batch = len(keys) if len(queries) == 1 else len(queries)  # one set of ids may serve the whole batch
    if len(keys) not in (1, batch) or keys.device != queries.device:
        raise InvalidInput(f"documents: key_ids have batch size {len(keys)} on {keys.device} and ids {len(queries)} on "
                           f"{queries.device}; allowed are one device and equal batch sizes, or 1.")


def _what(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
