"""The op boundary: schemas, fakes, FLOP formulas, and the autograd Function that calls the two ops.

The problem travels through a schema as scalars and is rebuilt behind it; the backend is chosen inside, on concrete
integers. A compiled graph therefore holds one opaque node a pass and does not depend on the lengths.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from tilewise import settings
from tilewise.autograd import precompile
from tilewise.autograd.transforms import (
    entry_by_entry,
    is_batched,
    one_gradient_after_another,
    refuse_functional_gradient,
    refuse_lost_gradient,
    refuse_second_gradient,
    refuse_tangents,
    tensors_in,
)
from tilewise.backends.base import Backend, Needs, PrecompilingBackend, Saved
from tilewise.backends.current import allows_tf32
from tilewise.caches import registered
from tilewise.dispatch import choose, get_backend
from tilewise.errors import UnsupportedProblem
from tilewise.kernels.compiling import pending
from tilewise.length_checks import check_borders
from tilewise.problem import AttentionProblem, are_aligned, dense_strides
from tilewise.problem.options import (
    DIFFERENTIABLE,
    NO_OPERANDS,
    PLAIN_FIELDS,
    RARE,
    RARE_PLACES,
    Operands,
    OperatorOptions,
    schema_of,
)
from tilewise.problem.problem import facts_of_inputs, facts_of_operands, problem_from_facts
from tilewise.validate.tensors import SpecKey

_OPERANDS, _OPTIONS = schema_of(Operands), schema_of(OperatorOptions)
_PLAIN_OPTIONS = schema_of(OperatorOptions, PLAIN_FIELDS)
# out, lse and, where wanted, max_logit.
torch.library.define("tilewise::attention_forward",
                     f"(Tensor q, Tensor k, Tensor v, {_OPERANDS}, {_OPTIONS}) -> Tensor[]")
# The same without operands and rarer options: out and lse. Every argument costs the host a quarter of a microsecond.
torch.library.define("tilewise::attention_forward_plain",
                     f"(Tensor q, Tensor k, Tensor v, {_PLAIN_OPTIONS}) -> (Tensor, Tensor)")
# The gradients that were asked for, in the order of Gradients.
torch.library.define(
    "tilewise::attention_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, "
    f"{_OPERANDS}, {_OPTIONS}, bool[] needs) -> Tensor[]",
)
torch.library.define(
    "tilewise::attention_backward_plain",
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, "
    f"{_PLAIN_OPTIONS}, bool[] needs) -> Tensor[]",
)


Incoming = tuple[torch.Tensor | None, torch.Tensor | None]  # dout and dlse
_N_OPERANDS = len(Operands._fields)
_N_PLAIN = len(PLAIN_FIELDS)
# A call that names no backend, in a graph: what is traced cannot ask for a scope, nor save which one there is at a run.
COMPILED_WITH_GRADIENT = ""


@registered
@lru_cache(maxsize=4096)
def resolve(tensors: tuple[SpecKey, SpecKey, SpecKey], operands: tuple[SpecKey, ...], options: tuple[Any, ...],
            default_backend: str | None, aligned: bool, tf32: bool,
            lse_grad: bool | None = None) -> tuple[AttentionProblem, Backend]:
    """Problem and backend of a call: one look-up on the way to a kernel, where every microsecond is the user's.

    Args:
        tensors, operands, options, aligned: as the call has them.
        default_backend: serves where the options name none.
        tf32: whether torch may round the factors of the inputs' products to TF32; an order of preference hangs on it.
        lse_grad: of the backward pass, unless None.
    """
    chosen = (OperatorOptions(*options) if len(options) > _N_PLAIN
              else OperatorOptions.of_plain(options))
    problem = problem_from_facts(tensors, operands, chosen.mask, chosen.scale, chosen.settings, chosen.deterministic,
                                 aligned)
    if lse_grad is not None:
        problem = problem.backward(lse_grad=lse_grad)
    return problem, choose(problem, chosen.backend or default_backend, tf32)


def _in_force(named: str | None) -> str | None:
    """Return the name that serves a forward pass which names no backend.

    Raises:
        UnsupportedProblem: it is that of a scope, and the call is of a compiled graph's that has a gradient.
    """
    if named == COMPILED_WITH_GRADIENT and (scope := settings.scoped_backend()) is not None:
        raise UnsupportedProblem(
            f"use_backend({scope!r}) stands around a compiled call that has a gradient, and its backward pass, which "
            f"runs elsewhere, would not know of it. Pass backend={scope!r} to the call, or set TILEWISE_BACKEND.", {})
    return settings.default_backend()


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    operands = Operands(*rest[:_N_OPERANDS])
    refuse_lost_gradient((q, k, v, *operands.alone))
    if operands.cu_seqlens_q is not None:
        options = OperatorOptions(*rest[_N_OPERANDS:])
        check_borders(q, k, operands.lengths, (options.max_seqlen_q, options.max_seqlen_k))
    inputs = facts_of_inputs(q, k, v)
    problem, backend = resolve(inputs, facts_of_operands(operands), rest[_N_OPERANDS:],
                               None if rest[-1] else _in_force(rest[-1]), are_aligned(q, k, v),
                               allows_tf32(inputs[0][3]))
    results = backend.forward(problem, q, k, v, operands)
    return [result for result in results if result is not None]


def _forward_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *plain: Any) -> tuple[torch.Tensor, torch.Tensor]:
    refuse_lost_gradient((q, k, v))
    inputs = facts_of_inputs(q, k, v)
    problem, backend = resolve(inputs, (), plain, None if plain[-1] else _in_force(plain[-1]),
                               are_aligned(q, k, v), allows_tf32(inputs[0][3]))
    results = backend.forward(problem, q, k, v)
    return results[0], results[1]


def _forward_plain_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *plain: Any) -> tuple[torch.Tensor, ...]:
    return tuple(_forward_fake(q, k, v, *NO_OPERANDS, *OperatorOptions.of_plain(plain)))


def _backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
              dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> list[torch.Tensor]:
    operands = NO_OPERANDS
    *options, needs = rest
    if len(options) > _N_PLAIN:
        operands, options = Operands(*rest[:_N_OPERANDS]), options[_N_OPERANDS:]
    inputs = facts_of_inputs(q, k, v)
    problem, backend = resolve(inputs, facts_of_operands(operands), tuple(options),
                               None if options[-1] else settings.default_backend(), are_aligned(q, k, v),
                               allows_tf32(inputs[0][3]), dlse is not None)
    lse = lse.contiguous()  # as it was made: a hook of saved tensors may have handed back another layout
    gradients = backend.backward(problem, Saved(q, k, v, out, lse, operands), dout, dlse, Needs(*needs))
    return [gradient for gradient in gradients if gradient is not None]


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    problem = AttentionProblem.from_call(q, k, v, Operands(*rest[:_N_OPERANDS]), OperatorOptions(*rest[_N_OPERANDS:]))
    shape = (problem.b, problem.hq, problem.sq, problem.dv)
    rows = [q.new_empty(shape[:3], dtype=problem.lse_dtype) for _ in range(1 + problem.scores.max_logit)]
    return [q.new_empty_strided(shape, problem.out_strides), *rows]


def _backward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                   dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> list[torch.Tensor]:
    operands, needs = Operands(*rest[:_N_OPERANDS]), Needs(*rest[-1])
    inputs = ((q, needs.dq), (k, needs.dkv), (v, needs.dkv))
    others = ((operands.bias, needs.dbias), (operands.alibi_slopes, needs.dalibi_slopes),
              (operands.sinks, needs.dsinks))
    return [t.new_empty_strided(t.shape, dense_strides(t.shape, t.stride())) for t, needed in inputs if needed] + [
        t.new_empty(t.shape) for t, needed in others if needed and t is not None]


def _backward_plain_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                         dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> list[torch.Tensor]:
    return _backward_fake(q, k, v, out, lse, dout, dlse, *NO_OPERANDS, *OperatorOptions.of_plain(rest[:-1]), rest[-1])


def _gradient_of_entry(op: Any, *arguments: Any) -> Any:
    return _apply_once(op, *arguments) if torch.is_grad_enabled() else op(*arguments)


def _of_entry(op: Any) -> Any:
    """Return a forward operator that refuses what is seen where torch.func.vmap has parted its entries, and not within.

    That is a gradient or a tangent that an entry needs.
    """
    def attend(*arguments: Any) -> Any:
        tensors = tensors_in(arguments)
        refuse_lost_gradient(tensors)
        if forward_ad._current_level >= 0:
            refuse_tangents(tensors, "Pass double_backward=True.")
        return op(*arguments)

    return attend


for _name, _kernel, _fake in (("attention_forward", _forward, _forward_fake),
                              ("attention_forward_plain", _forward_plain, _forward_plain_fake),
                              ("attention_backward", _backward, _backward_fake),
                              ("attention_backward_plain", _backward, _backward_plain_fake)):
    torch.library.impl(f"tilewise::{_name}", "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(f"tilewise::{_name}", _fake)
    _op = getattr(torch.ops.tilewise, _name).default
    if _kernel is _backward:
        torch.library.register_vmap(f"tilewise::{_name}", entry_by_entry(_op))
        _by_gradient = one_gradient_after_another(partial(_gradient_of_entry, _op))
        torch.library.impl(f"tilewise::{_name}", "Batched", _by_gradient)
    else:
        torch.library.register_vmap(f"tilewise::{_name}", entry_by_entry(_of_entry(_op)))

# Bound once: the chained look-up would be paid at every call.
forward_op = torch.ops.tilewise.attention_forward.default
forward_plain_op = torch.ops.tilewise.attention_forward_plain.default
backward_op = torch.ops.tilewise.attention_backward.default
backward_plain_op = torch.ops.tilewise.attention_backward_plain.default


def _visible_pairs(q_shape: torch.Size, k_shape: torch.Size, rest: tuple[Any, ...]) -> int:
    """Count the pairs of all heads as far as shapes tell: what a tensor hides is data, and counted as if it did not.

    Packed sequences are counted as if they were of one length.
    """
    operands, options = Operands(*rest[:_N_OPERANDS]), OperatorOptions(*rest[_N_OPERANDS:])
    (b, heads, sq, _), sk = q_shape, k_shape[2]
    if operands.cu_seqlens_q is not None:  # its shape, in a formula
        b = max(1, cast(Any, operands.cu_seqlens_q)[0] - 1)
        sq, sk = sq // b, sk // b
    return int(b * heads) * options.mask.band(sq, sk).visible_pairs(sq, sk)


@register_flop_formula(torch.ops.tilewise.attention_forward)
def _forward_flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *rest: Any,
                   **_: object) -> int:
    """Two matrix products, each 2 operations per visible pair and head-dim element."""
    return 2 * _visible_pairs(q_shape, k_shape, rest) * (q_shape[3] + v_shape[3])


@register_flop_formula(torch.ops.tilewise.attention_forward_plain)
def _forward_plain_flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *plain: Any,
                         **_: object) -> int:
    return _forward_flops(q_shape, k_shape, v_shape, *NO_OPERANDS, *OperatorOptions.of_plain(plain))


@register_flop_formula(torch.ops.tilewise.attention_backward)
def _backward_flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *rest: Any, **_: object) -> int:
    """The mathematics' five products (scores, dP; dQ, dK, dV), not what a kernel recomputes beyond them."""
    of_call = rest[4:-1]  # behind the shapes of out, lse, dout and dlse
    return 2 * _visible_pairs(q_shape, k_shape, of_call) * (3 * q_shape[3] + 2 * v_shape[3])


@register_flop_formula(torch.ops.tilewise.attention_backward_plain)
def _backward_plain_flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *rest: Any,
                          **_: object) -> int:
    return _backward_flops(q_shape, k_shape, v_shape, *rest[:4], *NO_OPERANDS, *OperatorOptions.of_plain(rest[4:-1]),
                           rest[-1])


def _forward_and_keep(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                      rest: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Run the forward op and keep q, k, v, out, lse and the operands: O(s) memory beside the latter.

    ``rest`` is what the forward op takes behind q, k and v, or what the plain one does.
    """
    ctx.set_materialize_grads(False)
    if len(rest) == _N_PLAIN:
        out, lse = forward_plain_op(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options, ctx.first_of_mask = rest, None
        return out, lse
    results = forward_op(q, k, v, *rest)
    operands = Operands(*rest[:_N_OPERANDS])
    ctx.save_for_backward(q, k, v, *results[:2], *operands.alone, *operands.score_tensors, *operands.mask_tensors)
    ctx.options, ctx.first_of_mask = rest[_N_OPERANDS:], len(operands.score_tensors)
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
        alone, of_functions = others[:_N_OPERANDS - 2], others[_N_OPERANDS - 2:]
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
    made = iter(_apply_once(op, *arguments) if twice else op(*arguments))
    for place, was_made in zip(places, (needs[0], needs[1], *needs[1:]), strict=True):
        gradient = next(made) if was_made else None
        gradients[place] = gradient if wanted[place] else None
    return tuple(gradients)


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * len(ctx.needs_input_grad)
    return gradients_of(ctx.needs_input_grad, ctx.saved_tensors, (dout, dlse), ctx.options, ctx.first_of_mask)


class AttentionFunction(torch.autograd.Function):
    """Attention with a gradient for q, k, v, bias, slopes and sinks, through out and lse (maths.md, section 6)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        """Return out, lse and, where the options want it, max_logit."""
        return _forward_and_keep(ctx, q, k, v, rest)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None,
                 *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return a gradient for each input, or None."""
        return _gradients(ctx, dout, dlse)


class OutFunction(torch.autograd.Function):
    """The same for a compiled call whose lse nobody takes.

    A compiler hands a gradient of zeros, not None, to a result that is not used: the backward pass would be one
    through lse, which some backends have not.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return out; lse is kept."""
        return _forward_and_keep(ctx, q, k, v, rest)[0]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return a gradient for each input, or None."""
        return _gradients(ctx, dout, None)


# Which of q, k, v and the operands have a gradient, in the order of Gradients.
_PLACES = (0, 1, 2, *(3 + Operands._fields.index(name) for name in DIFFERENTIABLE))


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


_apply: Any = AttentionFunction.apply
_apply_for_out: Any = OutFunction.apply
_apply_once: Any = OnceDifferentiable.apply


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
        plain = is_plain(operands, options)
        given = (*options[:4], options.deterministic, backend) if plain else (*options[:-1], backend)
        pending.call = precompile_backward, q, k, v, operands, given
        try:
            return cast("tuple[torch.Tensor, ...]",
                        _apply(q, k, v, *given) if plain else _apply(q, k, v, *operands, *given))
        finally:
            pending.call = None
    if is_plain(operands, options):
        return cast("tuple[torch.Tensor, ...]", forward_plain_op(q, k, v, *options[:4], *options[-2:]))
    return cast("list[torch.Tensor]", forward_op(q, k, v, *operands, *options))


def precompile_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Operands,
                        options: tuple[Any, ...]) -> None:
    """Begin to compile the backward pass of a call that has a gradient, ahead of a kernel of its forward pass.

    ``options``: as its operators take them, plain or not.
    """
    if options[-1] is None or isinstance(get_backend(options[-1]), PrecompilingBackend):
        precompile.begin((q, k, v), operands, partial(
            resolve, facts_of_inputs(q, k, v), facts_of_operands(operands), options, None, True, allows_tf32(q.dtype),
            False))


def is_plain(operands: Operands, options: OperatorOptions) -> bool:
    """Whether a call is one for the plain operator: without operands and rarer options."""
    return operands is NO_OPERANDS and options[RARE_PLACES] == RARE


def _trainable(operands: Operands) -> bool:
    return operands is not NO_OPERANDS and any(t is not None and t.requires_grad for t in operands.alone)
