"""What torch's transforms cannot have of the operators, refused by name: a tangent, and a gradient in torch.func.

Without these refusals torch makes zeros of them, which nobody is told of, or a warning tells.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewise.errors import UnsupportedProblem

_IN_FUNCTORCH = (
    "torch.func (grad, vjp, jacrev, or vmap of a call with a gradient), and an operator by its own name, have no "
    "gradient of fused kernels. Pass double_backward=True, or take the gradient by backward() or torch.autograd.grad.")
_unpack: Any = forward_ad.unpack_dual  # has no types
_in_functorch = torch._C._are_functorch_transforms_active


def refuse_tangents(tensors: Iterable[torch.Tensor | None], instead: str) -> None:
    """Refuse tensors with a tangent, of which an operator without a rule for it keeps none: the result's would be 0.

    Worth asking only where forward mode is on, ``forward_ad._current_level >= 0``; callers look at that first.

    Args:
        tensors: those of a call.
        instead: the last sentence of the error, what the caller can do.

    Raises:
        UnsupportedProblem: forward mode has given one of them a tangent.
    """
    if any(tensor is not None and _unpack(tensor).tangent is not None for tensor in tensors):
        raise UnsupportedProblem(f"forward mode (torch.func.jvp, jacfwd, make_dual) asks for a tangent, which fused "
                                 f"kernels have none of. {instead}", {})


def refuse_functional_gradient() -> None:
    """Refuse a call with a gradient inside a transform of torch.func, which saves nothing on an autograd Function.

    Raises:
        UnsupportedProblem: one is active.
    """
    if _in_functorch():
        raise UnsupportedProblem(_IN_FUNCTORCH, {})


def refuse_lost_gradient(tensors: Iterable[torch.Tensor | None]) -> None:
    """Refuse an operator itself, and not what gives it a gradient, called with a tensor that needs one.

    That is what torch.func.vmap does with each entry, outside of which alone it is seen who needs a gradient.

    Raises:
        UnsupportedProblem: gradients are enabled, and a tensor needs one.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise UnsupportedProblem(_IN_FUNCTORCH, {})
