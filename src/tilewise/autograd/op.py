"""The op boundary: schemas, what the operators compute, and their fakes; flops.py has their FLOP formulas.

The problem travels through a schema as scalars and is rebuilt behind it; the backend is chosen inside, on concrete
integers. A compiled graph therefore holds one opaque node a pass and does not depend on the lengths.
"""

from functools import lru_cache, partial
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewise import settings
from tilewise.autograd.transforms import (
    apply_once,
    entry_by_entry,
    one_gradient_after_another,
    refuse_lost_gradient,
    refuse_tangents,
    tensors_in,
)
from tilewise.backends._support.current import allows_tf32
from tilewise.backends.base import Backend, Needs, Saved
from tilewise.dispatch import choose
from tilewise.errors import UnsupportedProblem
from tilewise.problem import AttentionProblem, are_aligned, dense_strides
from tilewise.problem.length_checks import check_borders
from tilewise.problem.options import (
    NO_OPERANDS,
    PLAIN_FIELDS,
    Operands,
    OperatorOptions,
    schema_of,
)
from tilewise.problem.problem import problem_from_specs, specs_of_inputs, specs_of_operands
from tilewise.support.caches import registered
from tilewise.validate.tensors import SpecKey

_OPERANDS, _OPTIONS = schema_of(Operands), schema_of(OperatorOptions)
_PLAIN_OPTIONS = schema_of(OperatorOptions, PLAIN_FIELDS)
# out, lse and, where wanted, max_logit.
torch.library.define("tilewise::attention_forward",
                     f"(Tensor q, Tensor k, Tensor v, {_OPERANDS}, {_OPTIONS}) -> Tensor[]")
# The same without operands and rarer options: out and lse. Twins, since every argument costs the host a quarter of a
# microsecond, whatever it is: with kernels stubbed a plain call of the general operator takes 29 us and of this one
# 13 us, and a backward pass 32 us and 18 us (torch 2.13, one core of a Xeon). Calls come here that have no fast path:
# on a CPU, with a subclass of tensors, under a profiler or a mode of torch's.
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
N_OPERANDS = len(Operands._fields)
N_PLAIN = len(PLAIN_FIELDS)
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
    chosen = (OperatorOptions(*options) if len(options) > N_PLAIN
              else OperatorOptions.of_plain(options))
    problem = problem_from_specs(tensors, operands, chosen.mask, chosen.scale, chosen.settings, chosen.deterministic,
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
    operands = Operands(*rest[:N_OPERANDS])
    refuse_lost_gradient((q, k, v, *operands.alone))
    if operands.cu_seqlens_q is not None:
        options = OperatorOptions(*rest[N_OPERANDS:])
        check_borders(q, k, operands.lengths, (options.max_seqlen_q, options.max_seqlen_k))
    inputs = specs_of_inputs(q, k, v)
    problem, backend = resolve(inputs, specs_of_operands(operands), rest[N_OPERANDS:],
                               None if rest[-1] else _in_force(rest[-1]), are_aligned(q, k, v),
                               allows_tf32(inputs[0][3]))
    results = backend.forward(problem, q, k, v, operands)
    return [result for result in results if result is not None]


def _forward_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *plain: Any) -> tuple[torch.Tensor, torch.Tensor]:
    refuse_lost_gradient((q, k, v))
    inputs = specs_of_inputs(q, k, v)
    problem, backend = resolve(inputs, (), plain, None if plain[-1] else _in_force(plain[-1]),
                               are_aligned(q, k, v), allows_tf32(inputs[0][3]))
    results = backend.forward(problem, q, k, v)
    return results[0], results[1]


def _forward_plain_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *plain: Any) -> tuple[torch.Tensor, ...]:
    return tuple(_forward_fake(q, k, v, *NO_OPERANDS, *OperatorOptions.of_plain(plain)))


def differentiate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                  dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> list[torch.Tensor]:
    """Return the gradients that are needed: what the backward operators do, where no dispatcher asks."""
    operands = NO_OPERANDS
    *options, needs = rest
    if len(options) > N_PLAIN:
        operands, options = Operands(*rest[:N_OPERANDS]), options[N_OPERANDS:]
    inputs = specs_of_inputs(q, k, v)
    problem, backend = resolve(inputs, specs_of_operands(operands), tuple(options),
                               None if options[-1] else settings.default_backend(), are_aligned(q, k, v),
                               allows_tf32(inputs[0][3]), dlse is not None)
    lse = lse.contiguous()  # as it was made: a hook of saved tensors may have handed back another layout
    gradients = backend.backward(problem, Saved(q, k, v, out, lse, operands), dout, dlse, Needs(*needs))
    return [gradient for gradient in gradients if gradient is not None]


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    problem = AttentionProblem.from_call(q, k, v, Operands(*rest[:N_OPERANDS]), OperatorOptions(*rest[N_OPERANDS:]))
    shape = (problem.b, problem.hq, problem.sq, problem.dv)
    rows = [q.new_empty(shape[:3], dtype=problem.lse_dtype) for _ in range(1 + problem.scores.max_logit)]
    return [q.new_empty_strided(shape, problem.out_strides, dtype=problem.out_dtype), *rows]


def _backward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                   dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> list[torch.Tensor]:
    operands, needs = Operands(*rest[:N_OPERANDS]), Needs(*rest[-1])
    float32_results = OperatorOptions(*rest[N_OPERANDS:-1]).float32_results
    dtype = torch.promote_types(q.dtype, torch.float32) if float32_results else q.dtype
    inputs = ((q, needs.dq), (k, needs.dkv), (v, needs.dkv))
    others = ((operands.bias, needs.dbias), (operands.alibi_slopes, needs.dalibi_slopes),
              (operands.sinks, needs.dsinks))
    made = [t.new_empty_strided(t.shape, dense_strides(t.shape, t.stride()), dtype=dtype)
            for t, needed in inputs if needed]
    return made + [t.new_empty(t.shape) for t, needed in others if needed and t is not None]


def _backward_plain_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                         dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> list[torch.Tensor]:
    return _backward_fake(q, k, v, out, lse, dout, dlse, *NO_OPERANDS, *OperatorOptions.of_plain(rest[:-1]), rest[-1])


def _gradient_of_entry(op: Any, *arguments: Any) -> Any:
    return apply_once(op, *arguments) if torch.is_grad_enabled() else op(*arguments)


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
                              ("attention_backward", differentiate, _backward_fake),
                              ("attention_backward_plain", differentiate, _backward_plain_fake)):
    torch.library.impl(f"tilewise::{_name}", "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(f"tilewise::{_name}", _fake)
    _op = getattr(torch.ops.tilewise, _name).default
    if _kernel is differentiate:
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
