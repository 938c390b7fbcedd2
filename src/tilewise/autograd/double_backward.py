"""Attention that torch differentiates again, and in forward mode: what ``double_backward=True`` runs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise import settings
from tilewise.autograd.transforms import values_of
from tilewise.backends._support.current import without_autocast
from tilewise.dispatch import choose, get_backend
from tilewise.errors import UnsupportedProblem
from tilewise.kernels.reference.differentiable import differentiable_attention
from tilewise.kernels.reference.sequences import differentiable_by_sequence
from tilewise.problem import AttentionProblem
from tilewise.problem.length_checks import check_borders
from tilewise.problem.options import Operands, OperatorOptions

_disable: Any = torch.compiler.disable  # has no types


def why_not_twice(name: str) -> str | None:
    """Return why the backend of that name does not serve ``double_backward=True``, or None if it does."""
    if get_backend(name).name == "reference":
        return None
    return ("makes its gradient by fused kernels, which torch cannot differentiate; backend='reference' with "
            "double_backward=True is made of operations that it can")


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Operands,
         options: OperatorOptions) -> Sequence[torch.Tensor]:
    """Attend by operations of torch alone, in place of one operator with a gradient of its own.

    Returns out, lse and, where the options want it, max_logit.

    Raises:
        UnsupportedProblem: the call, or the scope that it stands in, names a backend other than the reference; or
            torch.func.vmap maps its lengths, which are read on the host.
    """
    name = options.backend or settings.default_backend()
    reason = None if name is None else why_not_twice(name)
    if name is not None and reason is not None:
        raise UnsupportedProblem(f"backend {name!r} refuses double_backward=True", {name: reason})
    problem = AttentionProblem.from_call(q, k, v, operands, options)
    if problem.sequences.are_data:
        check_borders(q, k, _lengths_on_host(operands), (options.max_seqlen_q, options.max_seqlen_k))
    choose(problem, "reference")  # raises where it refuses
    compute = differentiable_by_sequence if problem.sequences.are_data else differentiable_attention
    with without_autocast(problem.device.type):
        return compute(problem, (q, k, v), operands)[:2 + problem.scores.max_logit]


def _lengths_on_host(operands: Operands) -> tuple[torch.Tensor | None, ...]:
    found = [None if tensor is None else values_of(tensor) for tensor in operands.lengths]
    if any(values is None and tensor is not None for values, tensor in zip(found, operands.lengths, strict=True)):
        raise UnsupportedProblem(
            "torch.func.vmap maps the lengths of sequences, and with double_backward=True they are read, once for all "
            "entries; allowed are the same lengths in every entry: call entries with others one by one.", {})
    return tuple(found)


# A graph compiled around it would have a gradient that torch refuses to differentiate, and one graph for each length.
run_twice_differentiable: Callable[..., Sequence[torch.Tensor]] = _disable(
    _run, reason="tilewise.attention with double_backward=True stays out of a compiled graph, whose gradient torch "
                 "cannot differentiate")
