"""The autograd Functions of attention, and how a call comes to its operator."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.autograd import forward_ad

from tilewise import settings
from tilewise.autograd import flops
from tilewise.autograd.op import (
    COMPILED_WITH_GRADIENT,
    N_OPERANDS,
    N_PLAIN,
    backward_op,
    backward_plain_op,
    forward_op,
    forward_plain_op,
)
from tilewise.autograd.transforms import (
    apply_once,
    is_batched,
    refuse_functional_gradient,
    refuse_second_gradient,
    refuse_tangents,
)
from tilewise.problem.options import DIFFERENTIABLE, NO_OPERANDS, RARE, RARE_PLACES, Operands, OperatorOptions

# flops is imported for what it registers.
__all__ = ["AttentionFunction", "OutFunction", "flops", "gradients_of", "is_plain", "run"]

_is_grad_enabled = torch.is_grad_enabled  # bound once, for what every step asks
Incoming = tuple[torch.Tensor | None, torch.Tensor | None]  # dout and dlse


def _forward_and_keep(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                      rest: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Run the forward op and keep q, k, v, out, lse and the operands: O(s) memory beside the latter.

    ``rest`` is what the forward op takes behind q, k and v, or what the plain one does.
    """
    ctx.set_materialize_grads(False)
    ctx.plan = None
    if len(rest) == N_PLAIN:
        out, lse = forward_plain_op(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options, ctx.first_of_mask = rest, None
        return out, lse
    results = forward_op(q, k, v, *rest)
    operands = Operands(*rest[:N_OPERANDS])
    ctx.save_for_backward(q, k, v, *results[:2], *operands.alone, *operands.score_tensors, *operands.mask_tensors)
    ctx.options, ctx.first_of_mask = rest[N_OPERANDS:], len(operands.score_tensors)
    if len(results) > 2:  # a report, not a function to be differentiated
        ctx.mark_non_differentiable(results[2])
    return tuple(results)


def gradients_of(wanted: Sequence[bool], saved: Sequence[torch.Tensor], incoming: Incoming, options: tuple[Any, ...],
                 first_of_mask: int | None = None) -> tuple[torch.Tensor | None, ...]:
    """Run the backward op for the inputs that need a gradient.

    Args:
        wanted: which inputs of the autograd Function do.
        saved: what the forward pass kept: q, k, v, out, lse and, of a call that is not plain, the operands.
        incoming: dout and dlse, one of them None where that result was not used.
        options: what the op takes behind the tensors.
        first_of_mask: how many tensors of a score function come before those of a mask's; None of a plain call.
    """
    gradients: list[torch.Tensor | None] = [None] * len(wanted)
    dout, dlse = incoming
    q, k, v, out, lse, *others = saved
    if dout is None:  # only lse was used: a zero of no memory
        dout = out.new_zeros(()).expand(out.shape)
    op, operands, places = backward_plain_op, cast("tuple[Any, ...]", ()), _PLACES[:3]
    if first_of_mask is not None:
        alone, of_functions = others[:N_OPERANDS - 2], others[N_OPERANDS - 2:]
        operands = (*alone, of_functions[:first_of_mask], of_functions[first_of_mask:])
        op, places = backward_op, _PLACES
    needs = [wanted[0], wanted[1] or wanted[2], *[wanted[place] for place in places[3:]]]
    arguments = (q, k, v, out, lse, dout, dlse, *operands, *options, needs)
    # Gradients are enabled here under create_graph=True alone. A compiled backward pass refuses that by itself.
    twice = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if twice:
        refuse_second_gradient()
        # What maps several gradients parts them ahead of autograd: each of them then has a node.
        twice = not (is_batched(dout) or is_batched(dlse))
    made = iter(apply_once(op, *arguments) if twice else op(*arguments))
    for place, was_made in zip(places, (needs[0], needs[1], *needs[1:]), strict=True):
        gradient = next(made) if was_made else None
        gradients[place] = gradient if wanted[place] else None
    return tuple(gradients)


def _launch_and_keep(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                     rest: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Do what :func:`_forward_and_keep` does by a launch: ``rest`` ends with a LaunchPlan and the addresses."""
    *given, plan, addresses = rest
    operands = Operands(*given) if given else NO_OPERANDS
    results: tuple[torch.Tensor, ...] = plan.forward(lambda: (q, k, v), addresses, operands)
    ctx.set_materialize_grads(False)
    ctx.plan = plan
    if not given:
        ctx.first_of_mask = None
        ctx.save_for_backward(q, k, v, *results)
        return results
    ctx.first_of_mask = 0  # functions with tensors have no plan
    ctx.save_for_backward(q, k, v, *results[:2], *operands.alone)
    if len(results) > 2:  # a report, not a function to be differentiated
        ctx.mark_non_differentiable(results[2])
    return results


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return a gradient for each input of a Function, or None."""
    wanted = ctx.needs_input_grad
    if dout is None and dlse is None:
        return (None,) * len(wanted)
    saved, plan = ctx.saved_tensors, ctx.plan
    # Gradients are enabled here under create_graph=True alone.
    if plan is not None and ctx.first_of_mask is None and dout is not None and not _is_grad_enabled():
        made = plan.differentiate(saved, dout, dlse, (wanted[0], wanted[1] or wanted[2]))
        if made is not None:
            dq, dk, dv = made
            return (dq if wanted[0] else None, dk if wanted[1] else None, dv if wanted[2] else None, None, None)
    options = ctx.options if plan is None else plan.options
    return gradients_of(wanted, saved, (dout, dlse), options, ctx.first_of_mask)


class AttentionFunction(torch.autograd.Function):
    """Attention with a gradient for q, k, v, bias, slopes and sinks, through out and lse (maths.md, section 6).

    One for both ways of a call, by the operators and by a launch plan (fast_path.py): a graph does not tell them apart.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        """Return out, lse and, where the options want it, max_logit.

        ``rest``: what the forward op takes behind q, k and v, or the plain one; or the operands, if any, a LaunchPlan
        and the addresses, which are the only tuple that may come last.
        """
        return (_launch_and_keep if isinstance(rest[-1], tuple) else _forward_and_keep)(ctx, q, k, v, rest)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None,
                 *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return a gradient for each input, or None."""
        return _differentiate(ctx, dout, dlse)


class OutFunction(torch.autograd.Function):
    """The same for a plain or compiled call whose lse nobody takes.

    Each result of a Function costs the host. And a compiler hands a gradient of zeros, not None, to a result that is
    not used: the backward pass would be one through lse, which some backends have not.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return out; lse is kept."""
        return (_launch_and_keep if isinstance(rest[-1], tuple) else _forward_and_keep)(ctx, q, k, v, rest)[0]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return a gradient for each input, or None."""
        return _differentiate(ctx, dout, None)


# Which of q, k, v and the operands have a gradient, in the order of Gradients.
_PLACES = (0, 1, 2, *(3 + Operands._fields.index(name) for name in DIFFERENTIABLE))

_apply: Any = AttentionFunction.apply
_apply_for_out: Any = OutFunction.apply


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Operands, options: OperatorOptions,
        with_lse: bool = True) -> Sequence[torch.Tensor]:
    """Attend; through the autograd Function only where a gradient can be asked for (it costs host time).

    Returns out, lse and, where the options want it, max_logit; what follows out may lack where it is not taken, which
    ``with_lse`` says.

    Raises:
        UnsupportedProblem: forward mode, or a gradient inside a transform of torch.func.
    """
    if forward_ad._current_level >= 0:  # asked before the tensors are put together, which every call would pay for
        refuse_tangents((q, k, v, *operands.alone, *operands.score_tensors), "Pass double_backward=True.")
    compiling = torch.compiler.is_compiling()
    trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad
                                           or _trainable(operands))
    if trained or compiling:  # traced, a tensor inside a transform does not say that it needs a gradient
        refuse_functional_gradient()
    if trained:
        if compiling:  # asked whether a call is plain, dynamo starts over
            arguments = (*operands, *options[:-1], options.backend or COMPILED_WITH_GRADIENT)
            if not with_lse:
                return (cast(torch.Tensor, _apply_for_out(q, k, v, *arguments)),)
            return cast("tuple[torch.Tensor, ...]", _apply(q, k, v, *arguments))
        # The backward pass runs in a thread of its own, which does not see a scoped default.
        backend = options.backend or settings.default_backend()
        if is_plain(operands, options):
            plain = (*options[:4], options.deterministic, backend)
            if not with_lse:
                return (cast(torch.Tensor, _apply_for_out(q, k, v, *plain)),)
            return cast("tuple[torch.Tensor, ...]", _apply(q, k, v, *plain))
        return cast("tuple[torch.Tensor, ...]", _apply(q, k, v, *operands, *options[:-1], backend))
    if is_plain(operands, options):
        return cast("tuple[torch.Tensor, ...]", forward_plain_op(q, k, v, *options[:4], *options[-2:]))
    return cast("list[torch.Tensor]", forward_op(q, k, v, *operands, *options))


def is_plain(operands: Operands, options: OperatorOptions) -> bool:
    """Whether a call is one for the plain operator: without operands and rarer options."""
    return operands is NO_OPERANDS and options[RARE_PLACES] == RARE


def _trainable(operands: Operands) -> bool:
    return operands is not NO_OPERANDS and any(t is not None and t.requires_grad for t in operands.alone)
