"""What masks of every kind have in common: they join tensors by ``&``, and refuse operators that would mislead."""

import operator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tilewise.errors import InvalidInput
from tilewise.masks.plot import plot_mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What torch's compiler makes of ``mask & tensor`` differs by its version and by who asks it.
_AND = (torch.Tensor.__and__, torch.Tensor.__rand__, torch.Tensor.bitwise_and, torch.bitwise_and, operator.and_)
_OR = (torch.Tensor.__or__, torch.Tensor.__ror__, torch.Tensor.bitwise_or, torch.bitwise_or, operator.or_)


class JoinsTensors:
    """A class whose own ``&`` is meant in ``tensor & mask`` and, where torch.compile traces, in ``mask & tensor``.

    Without it the former is a TypeError of the tensor's and the latter breaks a compiled graph: an operator that is
    handed a tensor is torch's there, and a mask is nothing that one of torch's returns.

    A truth value, which ``mask_a and mask_b`` asks for, a complement, and a union with a tensor raise
    :class:`InvalidInput`.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        """Join the two of an ``&``, whose order does not matter; nothing else of torch's takes a mask."""
        if function in _OR:
            raise refused_union(*arguments)
        if function not in _AND:
            return NotImplemented
        mask, other = arguments if isinstance(arguments[0], JoinsTensors) else reversed(arguments)
        return mask.__and__(other)

    @property
    def has_function(self) -> bool:
        """Whether a function of the user's decides, whose answers no dense mask holds for all heads."""
        return False

    def plot(self, sq: int, sk: int | None = None, *, block: tuple[int, int] = (128, 128),
             ax: "Axes | None" = None) -> "Axes":
        """Draw the mask's tiles with matplotlib: which are computed whole, which pair by pair, and which are skipped.

        A *full* tile hides no pair and is computed without the mask, a *skipped* one hides all of them and costs
        nothing, and of a *partial* one every pair is asked. The legend counts each kind. Where neither length is more
        than 512, the visible pairs are drawn over their tiles. Of a tensor, documents or a function the first batch
        entry and head is drawn, and a tile that reaches past the end counts by the pairs that there are.

        Args:
            sq, sk: numbers of queries and keys; sk is sq unless given.
            block: queries and keys of a tile. Kernels differ in theirs; lists of :meth:`TensorMask.tiled` have 128 x
                128.
            ax: matplotlib axes to draw on; None = those of a new figure.

        Returns:
            The axes.

        Raises:
            InvalidInput: lengths or a block without a meaning, or lengths that the mask's tensors do not have.
            ImportError: matplotlib is not installed.
        """
        lengths = (sq, sq if sk is None else sk)
        return plot_mask(str(self), lambda first, stop: self._visible_rows(first, stop, lengths), lengths, block, ax)

    def _visible_rows(self, first: int, stop: int, lengths: tuple[int, int]) -> torch.Tensor:
        """Return which keys the queries from ``first`` to ``stop`` see, of the first batch entry and head."""
        raise NotImplementedError

    def __bool__(self) -> NoReturn:
        raise InvalidInput(f"the truth value of a mask was asked for ({self}), and it has none: write mask_a & mask_b "
                           "where you wrote 'mask_a and mask_b', and `mask is None` to ask whether there is one.")

    def __invert__(self) -> NoReturn:
        raise InvalidInput(f"cannot invert {self}: a mask has no complement. "
                           + ("Write" if self.has_function else f"Pass the boolean tensor ~{_dense(self, 'mask')}, or "
                              "write") + " a tilewise.functions.MaskFunction that returns the opposite.")

    def __or__(self, other: Any) -> Any:
        if not isinstance(other, (JoinsTensors, torch.Tensor)):
            return NotImplemented
        raise refused_union(self, other)

    def __ror__(self, other: Any) -> Any:
        if not isinstance(other, (JoinsTensors, torch.Tensor)):
            return NotImplemented
        raise refused_union(other, self)


def refused_union(a: Any, b: Any, why: str = "") -> InvalidInput:
    """Make the error of ``a | b``, of which one at least is a mask, and the other a mask or a tensor."""
    why = why or "allowed are two masks by position, such as causal() and window(left, right)."
    says, advice = " | ".join(map(_said, (a, b))), "rite a tilewise.functions.MaskFunction that asks both."
    if any(isinstance(part, JoinsTensors) and part.has_function for part in (a, b)):
        return InvalidInput(f"cannot unite {says}: {why} W{advice}")
    # A sentence that offers another way ends in "or".
    dense = f"{'p' if why.endswith(' or') else 'P'}ass the boolean tensor {_dense(a, 'a')} | {_dense(b, 'b')}"
    return InvalidInput(f"cannot unite {says}: {why} {dense}, or w{advice}")


def _said(part: Any) -> str:
    return f"a tensor of shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else str(part)


def _dense(part: Any, name: str) -> str:
    """How a caller makes the dense mask: of tensors, it is on their device already."""
    if isinstance(part, torch.Tensor):
        return name
    return f"{name}.visible(sq, sk{'' if hasattr(part, 'tensor') else ', q.device'})"
