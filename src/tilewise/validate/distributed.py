"""Checks of what calls on several ranks take beside the arguments of one device."""

from collections.abc import Collection
from typing import Any

import torch

from tilewise.errors import InvalidInput
from tilewise.validate.values import is_integer


def check_mesh(mesh: Any, *, is_mesh: bool) -> None:
    """Raise :class:`InvalidInput` for what is no device mesh of one dim or two that this process is a part of."""
    if not is_mesh:
        raise InvalidInput(f"mesh is a {type(mesh).__name__}; allowed is a torch.distributed.device_mesh.DeviceMesh of "
                           "one dim or two.")
    if mesh.ndim not in (1, 2):
        names = ", ".join(map(repr, mesh.mesh_dim_names or range(mesh.ndim)))
        raise InvalidInput(f"mesh has {mesh.ndim} dims ({names}); allowed are one and two: pass those over which the "
                           "sequence is cut, as mesh['cp'].")
    if mesh.get_coordinate() is None:
        raise InvalidInput(f"mesh is of ranks {mesh.mesh.tolist()}, and this process is none of them: call it on these "
                           "alone.")
    if mesh.ndim == 2 and any((mesh.mesh.diff(dim=dim) < 0).any() for dim in (0, 1)):
        raise InvalidInput(f"mesh is of ranks {mesh.mesh.tolist()}; allowed with two dims are ascending ranks along "
                           "each of them.")


def check_layout_name(layout: object, names: Collection[str]) -> None:
    """Raise :class:`InvalidInput` for what names no layout."""
    if layout not in names:
        raise InvalidInput(f"layout is {layout!r}; allowed are {', '.join(map(repr, names))} and a Layout.")


def check_layout(layout: Any, length: int, ranks: int) -> None:
    """Raise :class:`InvalidInput` for a layout of another length or number of ranks."""
    if (layout.length, len(layout.pieces)) != (length, ranks):
        raise InvalidInput(f"layout {layout.name!r} is of {layout.length} positions on {len(layout.pieces)} ranks, and "
                           f"the call has {length} positions on {ranks}: make one for these.")


def check_shard_length(name: str, got: int, layout: Any, rank: int) -> None:
    """Raise :class:`InvalidInput` where a shard has another length than its layout gives it."""
    if got != layout.shard_length(rank):
        raise InvalidInput(f"{name} has {got} positions on rank {rank}; layout {layout.name!r} of {layout.length} "
                           f"positions on {len(layout.pieces)} ranks gives it {layout.shard_length(rank)}. Where ranks "
                           "hold different numbers, pass the length of the whole sequence.")


def checked_dim(x: Any, dim: int) -> int:
    """Return a dim counted from the first; raises :class:`InvalidInput` for no tensor, or a dim that it has not."""
    if not isinstance(x, torch.Tensor):
        raise InvalidInput(f"x is a {type(x).__name__}; allowed is a torch.Tensor.")
    if not -x.dim() <= dim < x.dim():
        raise InvalidInput(f"dim is {dim} and x has {x.dim()} dims; allowed are {-x.dim()} to {x.dim() - 1}.")
    return dim % x.dim()


def check_schedule(schedule: object, names: Collection[str]) -> None:
    """Raise :class:`InvalidInput` for what names no schedule; None chooses."""
    if schedule is not None and schedule not in names:
        raise InvalidInput(f"schedule is {schedule!r}; allowed are {', '.join(map(repr, names))}, and None to choose.")


def check_explained(options: Collection[str], known: Collection[str]) -> None:
    """Raise :class:`InvalidInput` for an argument that explain does not know."""
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise InvalidInput(f"explain has no argument {unknown!r}; allowed are {', '.join(known)}.")


def checked_lengths(lengths: Any) -> tuple[int | None, int | None]:
    """Return the numbers of queries and keys on all ranks; raises :class:`InvalidInput` for no pair of numbers."""
    if lengths is None:
        return None, None
    if isinstance(lengths, tuple) and len(lengths) == 2 and all(is_integer(one) and one >= 0 for one in lengths):
        return int(lengths[0]), int(lengths[1])
    raise InvalidInput(f"lengths is {lengths!r}; allowed is a pair of integers >= 0, the numbers of queries and of "
                       "keys on all ranks together, or None.")


def check_four_dims(name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`InvalidInput` unless a tensor is (b, h, s, d)."""
    if tensor.dim() != 4:
        raise InvalidInput(f"{name} has shape {tuple(tensor.shape)}; allowed on each rank are 4 dims (b, h, s, d).")


def check_mask_to_cut(mask: object, *, has_function: bool, is_tiled: bool) -> None:
    """Raise :class:`InvalidInput` for a mask that cannot be cut to the positions of a rank."""
    if has_function:
        raise InvalidInput(f"mask is {mask}: a function cannot be cut to the positions of a rank; allowed are masks by "
                           "position, documents and a boolean tensor of the rank's queries.")
    if is_tiled:
        raise InvalidInput("mask is tiled() for the whole sequences, and ranks compute parts of them; pass it untiled.")


def check_documents(numbers: torch.Tensor, what: str, b: int, length: int) -> None:
    """Raise :class:`InvalidInput` for documents of another number of tokens; ``what``: "queries" or "keys"."""
    if numbers.shape[0] not in (1, b) or numbers.shape[1] != length:
        raise InvalidInput(f"mask has documents of {numbers.shape[1]} {what} in {numbers.shape[0]} batch entries; "
                           f"allowed are the ids of the whole sequences, of {length} {what} in 1 or {b}.")


def check_padding(mask: Any, q: torch.Tensor, seqlens: dict[str, Any]) -> None:
    """Raise :class:`InvalidInput` for lengths that are no tensor (b,), or a mask whose corner they would move."""
    if mask.is_bounded and mask.alignment != "top_left" and not isinstance(mask.alignment, int):
        raise InvalidInput(f"mask is {mask} and lengths are data ({', '.join(seqlens)}); allowed with them is "
                           "alignment='top_left' or an integer: the corner of 'bottom_right' would be another in each "
                           "batch entry, and masks are cut on the host.")
    for name, own in seqlens.items():
        if not (isinstance(own, torch.Tensor) and own.shape == q.shape[:1] and own.device == q.device
                and own.dtype in (torch.int32, torch.int64)):
            got = f"a {type(own).__name__}"
            if isinstance(own, torch.Tensor):
                got = f"a tensor of {own.dtype} and shape {tuple(own.shape)} on {own.device}"
            raise InvalidInput(f"{name} is {got}; allowed is a tensor of integers of shape ({q.shape[0]},) on q's "
                               "device.")


def check_equal_counts(of_queries: int, of_keys: int) -> None:
    """Raise :class:`InvalidInput` where borders of packed queries and keys are of different numbers of sequences."""
    if of_queries != of_keys:
        raise InvalidInput(f"cu_seqlens_q has {of_queries} entries and cu_seqlens_k {of_keys}; allowed are equal "
                           "numbers: one more than there are sequences.")


def check_balanced(mask: object, ranks: Any, pieces: Any, *, is_kept: bool, documents: int | None, length: int) -> None:
    """Raise :class:`InvalidInput` for what no balanced layout is made of; ``documents``: how many tokens have ids."""
    for name, value in (("ranks", ranks), ("pieces", pieces)):
        if not is_integer(value) or value < 1:
            raise InvalidInput(f"{name} is {value!r}; allowed is an integer of 1 and more.")
    if not is_kept:
        said = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else str(mask)
        raise InvalidInput(f"mask is {said}; allowed for a balanced layout are masks by position and documents, which "
                           "every rank knows as a whole.")
    if documents not in (None, length):
        raise InvalidInput(f"mask has documents of {documents} tokens and length is {length}: they must be equal.")
