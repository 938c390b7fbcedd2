"""What a backend is: a name, a predicate that refuses in words, and two functions."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPERANDS, Operands


class Pending(str):
    """A backend's reason that a later call may not meet: a choice that it decided is not kept."""

    __slots__ = ()


class Needs(NamedTuple):
    """Which gradients a backward pass shall make; dk and dv come together."""

    dq: bool = True
    dkv: bool = True
    dbias: bool = False
    dalibi_slopes: bool = False
    dsinks: bool = False


class Gradients(NamedTuple):
    """Gradients of q, k, v and of the operands that have one; an entry that was not asked for is None."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    dbias: torch.Tensor | None = None
    dalibi_slopes: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None


class Results(NamedTuple):
    """What a forward pass returns; max_logit is None unless the problem wants it."""

    out: torch.Tensor
    lse: torch.Tensor
    max_logit: torch.Tensor | None = None


# A pass bound to its problem: what changes from call to call comes alone. Every address is a multiple of 16, and the
# device is current. Forward: what returns q, k and v (for a first launch), their addresses, the operands -> as Results,
# without what is None.
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
BoundForward = Callable[[Callable[[], Three], tuple[int, int, int], Operands], tuple[torch.Tensor, ...]]
# Backward: (q, k, v, out, lse, dout, dlse or None), and the addresses of those that are there -> dq, dk, dv.
BoundBackward = Callable[[tuple[torch.Tensor | None, ...], tuple[int, ...]], tuple[torch.Tensor | None, ...]]


class Backend(Protocol):
    """One way to compute attention. All of them mean the same (docs/maths.md); they differ in what they take.

    Tensors are (b, h, s, d) with any strides. A backend may be handed the out and lse of another backend. One that is
    a :class:`BindingBackend` has the fast path (autograd/fast_path.py).
    """

    name: str

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Return why this backend refuses the problem, as one sentence, or None if it takes it.

        The only place where a backend's limits are stated: forward and backward trust it. Answers are kept, except a
        :class:`Pending` one.
        """

    def forward(self, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                operands: Operands = NO_OPERANDS) -> "Results":
        """Return out (b, hq, sq, dv), strides ``problem.out_strides``, and lse (b, hq, sq), natural log, contiguous.

        out is of ``problem.out_dtype``.
        max_logit, where wanted, is shaped as lse: the row's largest visible score, the sink not counted; -inf where
        nothing is seen.
        """

    def backward(self, problem: AttentionProblem, saved: "Saved", dout: torch.Tensor, dlse: torch.Tensor | None,
                 needs: Needs = Needs()) -> Gradients:  # noqa: B008 - a value, never changed
        """Return the gradients that are needed, each dense; those of q, k and v with dims stored in their order.

        That is ``dense_strides`` of their own strides, as ``problem.out_strides`` is of q's. They are of
        ``problem.out_dtype``.
        """


@runtime_checkable
class BindingBackend(Backend, Protocol):
    """A backend that binds its launches to a problem, for calls that differ in addresses alone."""

    def bind_forward(self, problem: AttentionProblem) -> BoundForward | None:
        """Return what ``forward`` does for this problem, which ``why_not`` takes; None if that needs no launch."""

    def bind_backward(self, problem: AttentionProblem, saved: "Saved", dout: torch.Tensor, dlse: torch.Tensor | None,
                      needs: Needs) -> BoundBackward | None:
        """The same of ``backward``, without operands, for tensors of the shapes, strides and dtypes of these.

        None of them is kept.
        """


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass: O(s) memory beside the operands."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    operands: Operands = NO_OPERANDS
