"""Checks of a score or mask function of the user's, and of its parts."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tilewise.errors import InvalidInput

Tensors = tuple[torch.Tensor, ...]


def check_parts(said: str, function: Any, derivative: Callable[..., Any] | None, arguments: tuple[str, ...],
                tensors: Tensors) -> None:
    """Check a new function's parts; raises :class:`InvalidInput`.

    Args:
        said: what a message calls it.
        function: has its Triton function as ``triton``, and what it is in torch as ``torch``.
        derivative: of the Triton function.
        arguments: what the Triton function takes before its tensors.
        tensors: what it reads.
    """
    check_tensors(said, tensors)
    if function.triton is None and function.torch is None:
        raise InvalidInput(f"{said} has neither a triton nor a torch function; allowed is one of them, or both.")
    if function.torch is not None and not callable(function.torch):
        raise InvalidInput(f"{said}: torch is a {type(function.torch).__name__}; allowed is a function, or None.")
    for name, part, wanted in (("triton", function.triton, arguments),
                               ("derivative", derivative, ("dscore", *arguments))):
        if part is not None:
            _check_jit(f"{said}: {name}", part, wanted, len(tensors))


def check_tensors(said: str, tensors: Tensors) -> None:
    """Raise :class:`InvalidInput` for what is no tensor."""
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInput(f"{said}: tensors[{i}] is a {type(tensor).__name__}; allowed is a torch.Tensor.")


def check_count(said: str, tensors: Tensors, count: int) -> None:
    """Raise :class:`InvalidInput` for another number of tensors than the function was made with."""
    if len(tensors) != count:
        raise InvalidInput(f"{said}.with_tensors: got {len(tensors)} tensors; allowed are {count}, as "
                           "many as it was made with.")


def check_score_function(score: object, *, is_function: bool) -> None:
    """Raise :class:`InvalidInput` for what is no score function."""
    if score is not None and not is_function:
        raise InvalidInput(f"score_function is a {type(score).__name__}; allowed is a tilewise.functions.ScoreFunction"
                           ", or None.")


def check_without_gradient(said: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise :class:`InvalidInput` for a function's tensor that would need a gradient."""
    for i, tensor in enumerate(tensors):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise InvalidInput(f"{said}: tensors[{i}] requires a gradient, and a function's tensors have none; "
                               "pass it detached, or pass what it adds to the scores as bias.")


def check_picture(function: Any) -> None:
    """Raise :class:`InvalidInput` for a function that cannot be drawn."""
    if function.torch is None:
        raise InvalidInput(f"{function} has no torch function, which is what a picture is made of.")


def check_joined(parts: Iterable[object], *, is_any: bool) -> None:
    """Raise :class:`InvalidInput` for functions that no backend takes together."""
    if not is_any:
        raise InvalidInput(f"cannot combine {' & '.join(map(str, parts))}: one has a triton function alone and another "
                           "a torch function; give one of them both.")


def tensors_of_joined(mask: object) -> InvalidInput:
    """Make the error for other tensors of several functions at once."""
    return InvalidInput(f"cannot give {mask} other tensors: give them to one of its parts, and join these again.")


def check_is_kept(name: str, code: object) -> None:
    """Raise :class:`InvalidInput` for a function that nobody keeps any more."""
    if code is None:
        raise InvalidInput(f"function {name} is no more; keep the ScoreFunction or MaskFunction as long as it is used.")


def _check_jit(said: str, function: Any, arguments: tuple[str, ...], tensors: int) -> None:
    """Check by what it carries, as Triton may not be here: a function that it decorated, and its arguments."""
    if not (hasattr(function, "arg_names") and hasattr(function, "fn")):
        raise InvalidInput(f"{said} is a {type(function).__name__}; allowed is a function decorated with @triton.jit, "
                           "or None.")
    parameters = inspect.signature(function.fn).parameters.values()
    count = len(arguments) + tensors
    if len(parameters) != count and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise InvalidInput(f"{said} takes {len(parameters)} arguments; allowed are {count}: {', '.join(arguments)}, "
                           f"and one for each of the {tensors} tensors.")
