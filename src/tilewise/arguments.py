"""Arguments that an operator's schema would refuse in torch's words, or take for another: refused by name."""

from collections.abc import Mapping
from typing import Any

import torch

from tilewise.errors import InvalidInput
from tilewise.problem import checked_scale
from tilewise.scores import check_layout


def check_inputs(q: Any, k: Any, v: Any) -> None:
    """Raise :class:`InvalidInput` for what is no tensor, and for a tensor that has no strides."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInput(f"{name} is a {type(tensor).__name__}; allowed is a torch.Tensor.")
        if tensor.is_nested:
            raise InvalidInput(f"{name} is a nested tensor; allowed is a dense one. attention_varlen takes sequences "
                               "of several lengths: the values, packed, and where each begins.")
        check_layout(name, tensor)


def check_choices(scale: Any, deterministic: Any, backend: Any) -> None:
    """Raise :class:`InvalidInput` for a factor, a switch or a name of another type; what else is wrong comes later."""
    if scale is not None:
        checked_scale(scale, 1)
    if deterministic is not None:
        check_switch("deterministic", deterministic, ", or None to follow torch.use_deterministic_algorithms")
    if not (backend is None or (isinstance(backend, str) and backend)):  # to a graph, '' is a name of its own
        raise InvalidInput(f"backend is {backend!r}; allowed is the name of a backend, or None to choose.")


def check_switch(name: str, value: Any, otherwise: str = "") -> None:
    """Raise :class:`InvalidInput` for what is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is {value!r}; allowed are True and False{otherwise}.")


def check_packed(packed: Mapping[str, Any], padded: Mapping[str, Any]) -> bool:
    """Return whether a call's sequences are packed, which ``cu_seqlens_q`` says; None is what is not given.

    Raises:
        InvalidInput: another argument of packed sequences is given without it, or one of padded ones beside it.
    """
    is_packed = packed["cu_seqlens_q"] is not None
    for name, value in (padded if is_packed else packed).items():
        if value is not None and is_packed:
            raise InvalidInput(f"{name} is given beside cu_seqlens_q; allowed is one of them: of packed sequences, "
                               f"{name.replace('seqlens', 'seqused')} says how many rows take part.")
        if value is not None:
            raise InvalidInput(f"{name} is given without cu_seqlens_q, which says where packed queries begin; allowed "
                               "are both, or neither.")
    return is_packed
