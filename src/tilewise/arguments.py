"""Arguments that an operator's schema would refuse in torch's words, or take for another: refused by name."""

from typing import Any

import torch

from tilewise.errors import InvalidInput
from tilewise.problem import checked_scale


def check_inputs(q: Any, k: Any, v: Any) -> None:
    """Raise :class:`InvalidInput` for what is no tensor."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInput(f"{name} is a {type(tensor).__name__}; allowed is a torch.Tensor.")


def check_choices(scale: Any, deterministic: Any, backend: Any) -> None:
    """Raise :class:`InvalidInput` for a factor, a switch or a name of another type; what else is wrong comes later."""
    if scale is not None:
        checked_scale(scale, 1)
    if deterministic is not None:
        check_switch("deterministic", deterministic, ", or None to follow torch.use_deterministic_algorithms")
    if not (backend is None or isinstance(backend, str)):
        raise InvalidInput(f"backend is {backend!r}; allowed is the name of a backend, or None to choose.")


def check_switch(name: str, value: Any, otherwise: str = "") -> None:
    """Raise :class:`InvalidInput` for what is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is {value!r}; allowed are True and False{otherwise}.")
