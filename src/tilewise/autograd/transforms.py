"""The operators under torch's transforms: vmap's rules, and refusals by name of a tangent and a gradient in torch.func.

Without these refusals torch makes zeros of them, which nobody is told of, or a warning tells.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewise.errors import InvalidInput, UnsupportedProblem

_IN_FUNCTORCH = (
    "torch.func (grad, vjp, jacrev, or vmap of a call with a gradient), and an operator by its own name, have no "
    "gradient of fused kernels. Pass double_backward=True, or take the gradient by backward() or torch.autograd.grad.")
_unpack: Any = forward_ad.unpack_dual  # has no types
_in_functorch = torch._C._are_functorch_transforms_active
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped: Any = torch._C._functorch.get_unwrapped
_batched = torch._C._dispatch_key_parse("Batched")
is_mapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_batchedtensor


def refuse_tangents(tensors: Iterable[torch.Tensor | None], instead: str) -> None:
    """Refuse tensors with a tangent, of which an operator without a rule for it keeps none: the result's would be 0.

    Worth asking only where forward mode is on, ``forward_ad._current_level >= 0``; callers look at that first.

    Args:
        tensors: those of a call.
        instead: the last sentence of the error, what the caller can do.

    Raises:
        UnsupportedProblem: forward mode has given one of them a tangent.
    """
    # What a tensor that torch.func.vmap maps has is seen outside of it alone, where its rule asks.
    if any(tensor is not None and not is_mapped(tensor) and _unpack(tensor).tangent is not None for tensor in tensors):
        raise UnsupportedProblem(f"forward mode (torch.func.jvp, jacfwd, make_dual) asks for a tangent, which fused "
                                 f"kernels have none of. {instead}", {})


def refuse_functional_gradient() -> None:
    """Refuse a call with a gradient inside a transform of torch.func, which saves nothing on an autograd Function.

    Raises:
        UnsupportedProblem: one is active.
    """
    if _in_functorch():
        raise UnsupportedProblem(_IN_FUNCTORCH, {})


def refuse_second_gradient() -> None:
    """Refuse a gradient that is itself recorded inside a transform of torch.func.

    Raises:
        UnsupportedProblem: one is active.
    """
    if _in_functorch():
        raise UnsupportedProblem("create_graph=True inside a transform of torch.func (vmap) asks for a gradient of "
                                 "attention that has one itself, and fused kernels' has none. Pass "
                                 "double_backward=True, or leave create_graph out.", {})


class OnceDifferentiable(torch.autograd.Function):
    """The backward op in a graph that may be differentiated again, which raises instead of giving a wrong zero.

    torch's own ``once_differentiable`` raises only where dout needs a gradient, and that of a plain sum does not.
    """

    @staticmethod
    def forward(ctx: Any, op: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """Run the backward op, plain or not."""
        return tuple(op(*arguments))

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> None:
        """Refuse."""
        raise UnsupportedProblem(
            "a second derivative of attention was asked for; only the first is there. Pass double_backward=True to "
            "the call that shall be differentiated twice, or detach its gradient.", {})


apply_once: Any = OnceDifferentiable.apply


def refuse_lost_gradient(tensors: Iterable[torch.Tensor | None]) -> None:
    """Refuse an operator itself, and not what gives it a gradient, called with a tensor that needs one.

    That is what torch.func.vmap does with each entry, outside of which alone it is seen who needs a gradient: one of
    backward(), or of a transform around it.

    Raises:
        UnsupportedProblem: gradients are enabled, and a tensor needs one.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise UnsupportedProblem(_IN_FUNCTORCH, {})


def entry_by_entry(op: Callable[..., Any]) -> Callable[..., tuple[list[torch.Tensor], list[int]]]:
    """Return the rule of torch.func.vmap for an operator: a call for each entry, whose results are stacked.

    So an entry's result is to the last bit that of the call without vmap, with every option. torch has no rule of its
    own for an operator with lists of tensors; for others it does the same, and warns.
    """
    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[list[torch.Tensor], list[int]]:
        if not info.batch_size:
            raise InvalidInput("torch.func.vmap maps attention over 0 entries; allowed is one or more: skip the call.")
        made = [op(*_entry(arguments, in_dims, number)) for number in range(info.batch_size)]
        stacked = [_stacked(results) for results in zip(*made, strict=True)]
        return stacked, [0] * len(stacked)

    return rule


def _stacked(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Stack the entries' results, each with its dims in the memory order that it has."""
    strides = results[0].stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    stacked = torch.stack([result.permute(order) for result in results])
    return stacked.permute(0, *(order.index(dim) + 1 for dim in range(len(order))))


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor without what transforms of torch.func have put around it; None if torch.func.vmap maps it."""
    while _is_wrapped(tensor):
        if is_mapped(tensor):
            return None
        tensor = _unwrapped(tensor)
    return tensor


def tensors_in(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments, and in lists of theirs."""
    return [tensor for given in arguments for tensor in (given if isinstance(given, (list, tuple)) else (given,))
            if isinstance(tensor, torch.Tensor)]


def is_batched(given: Any) -> bool:
    """Whether torch.autograd.grad(..., is_grads_batched=True) maps it: by an older vmap, told by a key alone."""
    return isinstance(given, torch.Tensor) and torch._C._dispatch_keys(given).has(_batched)


def one_gradient_after_another(op: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    """Return what an operator of a backward pass does for ``is_grads_batched=True``: a call for each gradient.

    Only gradients are mapped, which are no lists.
    """
    def rule(*arguments: Any) -> list[torch.Tensor]:
        whole = {place: torch._remove_batch_dim(given, 1, 1, 0)
                 for place, given in enumerate(arguments) if is_batched(given)}
        if any(map(is_batched, whole.values())):
            raise UnsupportedProblem("is_grads_batched=True inside of another one maps a gradient of attention twice; "
                                     "allowed is once. Use torch.func.vmap for one of them.", {})
        count = len(next(iter(whole.values())))
        made = [op(*[whole[place][number] if place in whole else given for place, given in enumerate(arguments)])
                for number in range(count)]
        return [torch._add_batch_dim(_stacked(results), 0, 1) for results in zip(*made, strict=True)]

    return rule


def _entry(arguments: Iterable[Any], dims: Iterable[Any], number: int) -> list[Any]:
    """Return an operator's arguments for one entry; lists of tensors have lists of dims."""
    return [_entry(given, dim, number) if isinstance(dim, list) else given if dim is None else given.select(dim, number)
            for given, dim in zip(arguments, dims, strict=True)]
