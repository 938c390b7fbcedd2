"""Whether tensors are as others were: one question to torch, where each property asked for costs as much."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

IsLike = Callable[..., bool]


def guard_of(tensors: Sequence[torch.Tensor]) -> IsLike | None:
    """Return what tells whether as many tensors are as these are, here and now; None where torch has no such thing.

    It compares what torch's compiler compares ahead of each compiled call: class, sizes, strides, dtype, device,
    whether a gradient is wanted, and what torch would do first with a call of an operator: for a view that is
    conjugated or negative, for a mode, a transform or autocast that is entered. It keeps none of the tensors alive.
    Tensors of which one comes twice are like none to it, and have no guard.
    """
    return _made(tensors) if _is_as_known() and len(set(map(id, tensors))) == len(tensors) else None


def _made(tensors: Sequence[torch.Tensor]) -> IsLike:
    guards: Any = torch._C._dynamo.guards
    check: IsLike = guards.TensorGuards(*tensors, dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
                                        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors]).check
    return check


@cache
def _is_as_known() -> bool:
    """Whether this torch has guards, and they tell apart what is counted on; they are its own affair."""
    one = torch.zeros(2, 3, device="cpu")
    if not hasattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards"):
        return False
    try:
        check = _made((one, one.clone()))
    except TypeError:  # made of other arguments now
        return False
    others = (one.half(), one.mT.contiguous().mT, one[:1], torch._neg_view(one), one.clone().requires_grad_(),
              one.as_subclass(torch.nn.Parameter), one.to("meta"))
    with torch.inference_mode():
        entered = check(one, one.clone())
    return bool(check(one, one.clone())) and not entered and not any(check(one, other) for other in others)
