"""What lets a mask be joined to a tensor by ``&`` wherever torch is asked first."""

import operator
from typing import Any

import torch

# What torch's compiler makes of ``mask & tensor`` differs by its version and by who asks it.
_AND = (torch.Tensor.__and__, torch.Tensor.__rand__, torch.Tensor.bitwise_and, torch.bitwise_and, operator.and_)


class JoinsTensors:
    """A class whose own ``&`` is meant in ``tensor & mask`` and, where torch.compile traces, in ``mask & tensor``.

    Without it the former is a TypeError of the tensor's and the latter breaks a compiled graph: an operator that is
    handed a tensor is torch's there, and a mask is nothing that one of torch's returns.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        """Join the two of an ``&``, whose order does not matter; nothing else of torch's takes a mask."""
        if function not in _AND:
            return NotImplemented
        mask, other = arguments if isinstance(arguments[0], JoinsTensors) else reversed(arguments)
        return mask.__and__(other)
