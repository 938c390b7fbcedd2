"""The op boundary: schemas, fakes, FLOP formulas, and the autograd Function that calls the two ops.

The problem travels through a schema as scalars and is rebuilt behind it; the backend is chosen inside, on concrete
integers. A compiled graph therefore holds one opaque node a pass and does not depend on the lengths.
"""

from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch.utils.flop_counter import register_flop_formula

from tilewise import settings
from tilewise.backends.base import Backend, Saved
from tilewise.dispatch import choose
from tilewise.errors import UnsupportedProblem
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem, Facts, dense_strides, facts_of, problem_from_facts

_OPTIONS = "float? scale, int? left, int? right, str? alignment, bool deterministic, str? backend"
torch.library.define("tilewise::attention_forward", f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
torch.library.define(
    "tilewise::attention_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, "
    f"{_OPTIONS}, bool need_dq, bool need_dkv) -> (Tensor, Tensor, Tensor)",
)


class Options(NamedTuple):
    """Everything of a call but its tensors, in the order of the schemas."""

    scale: float | None
    left: int | None
    right: int | None
    alignment: str | None
    deterministic: bool
    backend: str | None

    @property
    def mask(self) -> Mask:
        """The mask, put together again."""
        return Mask(self.left, self.right, cast(Any, self.alignment))

    def problem(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionProblem:
        """Rebuild the validated problem; sizes may be symbolic."""
        return AttentionProblem.from_tensors(q, k, v, mask=self.mask, scale=self.scale,
                                             deterministic=self.deterministic)


@lru_cache(maxsize=4096)
def _resolve(q: Facts, k: Facts, v: Facts, options: tuple[Any, ...],
             default_backend: str | None) -> tuple[AttentionProblem, Backend]:
    """Problem and backend of a call: one look-up on the way to a kernel, where every microsecond is the user's."""
    chosen = Options(*options)
    problem = problem_from_facts(q, k, v, chosen.mask, chosen.scale, chosen.deterministic)
    return problem, choose(problem, chosen.backend or default_backend)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    problem, backend = _resolve(facts_of("q", q), facts_of("k", k), facts_of("v", v), options,
                                settings.default_backend())
    return backend.forward(problem, q, k, v)


def _backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
              dout: torch.Tensor, dlse: torch.Tensor | None,
              *options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *chosen_options, need_dq, need_dkv = options
    chosen = Options(*chosen_options)
    problem = chosen.problem(q, k, v).backward(lse_grad=dlse is not None)
    backend = choose(problem, chosen.backend or settings.default_backend())
    gradients = backend.backward(problem, Saved(q, k, v, out, lse), dout, dlse, need_dq=need_dq, need_dkv=need_dkv)
    # A schema has no optional outputs: a gradient that was not asked for travels as an empty tensor.
    dq, dk, dv = (q.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return dq, dk, dv


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    problem = Options(*options).problem(q, k, v)
    shape = (problem.b, problem.hq, problem.sq, problem.dv)
    return (q.new_empty_strided(shape, problem.out_strides), q.new_empty(shape[:3], dtype=problem.lse_dtype))


def _backward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                   dout: torch.Tensor, dlse: torch.Tensor | None,
                   *options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    need_dq, need_dkv = options[-2:]
    dq, dk, dv = (
        t.new_empty_strided(t.shape, dense_strides(t.shape, t.stride())) if needed else q.new_empty(0)
        for t, needed in ((q, need_dq), (k, need_dkv), (v, need_dkv))
    )
    return dq, dk, dv


for _name, _kernel, _fake in (("attention_forward", _forward, _forward_fake),
                              ("attention_backward", _backward, _backward_fake)):
    torch.library.impl(f"tilewise::{_name}", "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(f"tilewise::{_name}", _fake)

# Bound once: the chained look-up would be paid at every call.
forward_op = torch.ops.tilewise.attention_forward.default
backward_op = torch.ops.tilewise.attention_backward.default


def _visible_pairs(q_shape: torch.Size, k_shape: torch.Size, options: Options) -> int:
    mask = Mask(options.left, options.right, cast(Any, options.alignment))
    return int(q_shape[0] * q_shape[1]) * mask.band(q_shape[2], k_shape[2]).visible_pairs(q_shape[2], k_shape[2])


@register_flop_formula(torch.ops.tilewise.attention_forward)
def _forward_flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *options: Any,
                   **_: object) -> int:
    """Two matrix products, each 2 operations per visible pair and head-dim element."""
    return 2 * _visible_pairs(q_shape, k_shape, Options(*options)) * (q_shape[3] + v_shape[3])


@register_flop_formula(torch.ops.tilewise.attention_backward)
def _backward_flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *rest: Any, **_: object) -> int:
    """The mathematics' five products (scores, dP; dQ, dK, dV), not what a kernel recomputes beyond them."""
    options = Options(*rest[4:-2])  # between the shapes of out, lse, dout, dlse and the two flags
    return 2 * _visible_pairs(q_shape, k_shape, options) * (3 * q_shape[3] + 2 * v_shape[3])


class AttentionFunction(torch.autograd.Function):
    """Attention with a gradient for q, k and v, through out and through lse (maths.md, section 6)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward op and keep q, k, v, out and lse: O(s) memory."""
        out, lse = forward_op(q, k, v, *options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the backward op for the inputs that need a gradient."""
        q, k, v, out, lse = ctx.saved_tensors
        nothing = (None,) * (3 + len(ctx.options))
        if dout is None and dlse is None:
            return nothing
        if dout is None:  # only lse was used: a zero of no memory
            dout = out.new_zeros(()).expand(out.shape)
        need_dq, need_dk, need_dv = ctx.needs_input_grad[:3]
        # Gradients are enabled here under create_graph=True alone. A compiled backward pass refuses that by itself.
        twice = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        compute = _apply_once if twice else backward_op
        dq, dk, dv = compute(q, k, v, out, lse, dout, dlse, *ctx.options, need_dq, need_dk or need_dv)
        return (dq if need_dq else None, dk if need_dk else None, dv if need_dv else None, *nothing[3:])


class OnceDifferentiable(torch.autograd.Function):
    """The backward op in a graph that may be differentiated again, which raises instead of giving a wrong zero.

    torch's own ``once_differentiable`` raises only where dout needs a gradient, and that of a plain sum does not.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the backward op."""
        return cast("tuple[torch.Tensor, torch.Tensor, torch.Tensor]", backward_op(*arguments))

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> None:
        """Refuse."""
        raise UnsupportedProblem(
            "a second derivative of attention was asked for; only the first is there. Detach the gradient of "
            "attention, or use torch's math attention for this term.", {})


_apply: Any = AttentionFunction.apply
_apply_once: Any = OnceDifferentiable.apply


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend; through the autograd Function only where a gradient can be asked for (it costs host time)."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return cast("tuple[torch.Tensor, torch.Tensor]", _apply(q, k, v, *options))
    return cast("tuple[torch.Tensor, torch.Tensor]", forward_op(q, k, v, *options))
