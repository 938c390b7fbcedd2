"""Launches the Triton kernels: every GPU that Triton has, and the interpreter on the CPU.

A call's cost on the host is what a user of short sequences waits for. So all that depends on the problem alone
(configs, grids, scalar arguments, compiled kernels) is a plan, made at the problem's first call; from then on a call
is a look-up, the allocation of its outputs, and the launches.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch

from tilewise.backends._support.bias_gradients import dq_launches
from tilewise.backends._support.current import is_current
from tilewise.backends._support.hopper import awaits_dbias_check
from tilewise.backends._support.memory import Allocate, Form, allocator, forms_of_gradients, forms_of_results
from tilewise.backends._support.triton import PLANS, precision_of, why_not_at_all, why_not_here
from tilewise.backends.base import BoundBackward, BoundForward, Gradients, Needs, Results, Saved, Three
from tilewise.kernels.triton.arguments import Modifiers
from tilewise.kernels.triton.launch import Launch, modifiers_of, operand_addresses, operand_count, takes_descriptors
from tilewise.kernels.triton.operand_gradients import OperandGradients
from tilewise.problem import TAIL_WIDTH, WIDEST, AttentionProblem, Sizes, alignment_of, dense_strides
from tilewise.problem.options import DRAW_SPAN, NO_OPERANDS, Operands
from tilewise.support.caches import registered
from tilewise.tuning.device import device_spec
from tilewise.tuning.heuristics_triton import least_bytes
from tilewise.tuning.select import (
    delta_config,
    single_tile_config,
    split_dkdv,
    triton_config,
    wants_descriptors,
)

if TYPE_CHECKING:
    from tilewise.kernels.hopper.backward.launch_dbias import HopperDbias
    from tilewise.kernels.triton.bias_gradient import BiasGradientSums

_EVERY = Needs()
_Three = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # dq, dk, dv
_Placed = tuple[tuple[torch.Tensor, ...], Sequence[int | None]]  # tensors, and where they lie


class TritonBackend:
    """Forward, delta, dK/dV and dQ kernels; no atomics, so every result is the same on every run."""

    name = "triton"

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Return the reason against, if there is one."""
        reason = why_not_at_all(problem.dtype)
        if reason is not None:
            return reason
        if problem.d > WIDEST + TAIL_WIDTH or problem.dv > WIDEST:
            return (f"takes head dims up to {WIDEST + TAIL_WIDTH} for q and k and up to {WIDEST} for v, got "
                    f"{problem.d} and {problem.dv}; backend='reference' takes them")
        rows = problem.hq * max(problem.sq, problem.sk)
        if rows >= 2**31:  # kernels reckon them in 32 bits
            return (f"takes up to {2**31 - 1} queries, or keys, of all heads of a batch entry, got {rows}; "
                    "backend='reference' takes them")
        origin = problem.scores.dropout_origin_q, problem.scores.dropout_origin_k
        if any(first % DRAW_SPAN or first >= 2**24 for first in origin):
            return (f"takes dropout of a part of a sequence that begins at a multiple of {DRAW_SPAN} below {2**24}, "
                    f"got queries from {origin[0]} on and keys from {origin[1]} on; backend='reference' takes them")
        for facts in problem.scores.functions:
            if facts.code.triton is None:
                return (f"needs a triton function, got {facts.code.name} without one; backend='reference' takes a "
                        "torch function")
        return _too_large(problem) if problem.device.type == "cuda" else why_not_here(problem.dtype, problem.device)

    def forward(self, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                operands: Operands = NO_OPERANDS) -> Results:
        """See :class:`tilewise.backends.base.Backend`."""
        addresses = [tensor.data_ptr() for tensor in (q, k, v, *_present(operands))]
        plan = _forward_plan(problem, alignment_of(addresses), precision_of(problem.dtype))
        with contextlib.nullcontext() if is_current(problem.device) else torch.cuda.device(problem.device):
            if plan.launch is None:
                return _of_nothing(*plan.allocated(), operands)
            return Results(*plan.attend(lambda: (q, k, v), (addresses[0], addresses[1], addresses[2]), operands))

    def bind_forward(self, problem: AttentionProblem) -> BoundForward | None:
        """See :class:`tilewise.backends.base.BindingBackend`."""
        tensors = 3 + operand_count(problem)
        plan = _forward_plan(problem, (True,) * tensors, precision_of(problem.dtype))
        if plan.launch is None:
            return None
        attend = plan.attend
        if plan.max_logit is not None:
            return cast(BoundForward, attend)
        return lambda tensors, addresses, operands: attend(tensors, addresses, operands)[:2]

    def backward(self, problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                 needs: Needs = _EVERY) -> Gradients:
        """See :class:`tilewise.backends.base.Backend`."""
        q, k, v, out, lse, operands = saved
        alignment = alignment_of([tensor.data_ptr() for tensor in (
            q, k, v, dout, out, lse, *(() if dlse is None else (dlse,)), *_present(operands))])
        # A plan holds a choice of kernels, and is kept unless a later call may choose otherwise.
        plan_of = _backward_plan.__wrapped__ if needs.dbias and awaits_dbias_check(problem) else _backward_plan
        plan = plan_of(problem, _strides_of(out, dout, dlse), alignment, precision_of(problem.dtype), needs)
        dtype = problem.out_dtype
        dq, dk, dv = plan.allocated(q, k, v, dtype)
        sums = OperandGradients(problem, operands, dbias=needs.dbias, dalibi_slopes=needs.dalibi_slopes,
                                dsinks=needs.dsinks)
        delta = torch.empty_like(lse)
        if plan.is_empty:
            for gradient in (dq, dk, dv):
                if gradient is not None:
                    gradient.zero_()
            sums.zero_()
            delta.zero_()
            if dlse is not None:
                delta -= dlse
            return Gradients(dq, dk, dv, *sums.gradients(lse, delta))
        made: _Three = (dq, dk, dv)
        # A sum of rows or columns comes with the gradient of q, or of k and v, whether that is wanted or not.
        if not needs.dkv and sums.columns is not None:
            made = (dq, _empty(k, plan.dk_strides, dtype), _empty(v, plan.dv_strides, dtype))
        pairs_on_the_way = sums.pairs if plan.dbias is None else None
        if not needs.dq and any(buffer is not None for buffer in (sums.rows, sums.moments, pairs_on_the_way)):
            made = (_empty(q, plan.dq_strides, dtype), *made[1:])
        with contextlib.nullcontext() if is_current(problem.device) else torch.cuda.device(problem.device):
            plan.differentiate((out, dout, dlse), (q, k, v, dout, lse, delta), made, sums, operands)
        return Gradients(dq, dk, dv, *sums.gradients(lse, delta))

    def bind_backward(self, problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                      needs: Needs) -> BoundBackward | None:
        """See :class:`tilewise.backends.base.BindingBackend`."""
        plan = _backward_plan(problem, _strides_of(saved.out, dout, dlse), (True,) * (6 if dlse is None else 7),
                              precision_of(problem.dtype), needs)
        if plan.is_empty:
            return None
        none = OperandGradients(problem, NO_OPERANDS, dbias=False, dalibi_slopes=False, dsinks=False)
        return plan.bound(problem, none)


def _too_large(problem: AttentionProblem) -> str | None:
    """Say why a device cannot hold wide heads; the least tiles of others fit every device."""
    if problem.width <= 256:
        return None
    spec = device_spec(problem.device)
    needed = least_bytes(problem, spec)
    if needed <= spec.shared_memory:
        return None
    return (f"needs {needed} bytes of shared memory for head dims {problem.d} and {problem.dv} in {problem.dtype}, and "
            f"{spec.arch} has {spec.shared_memory}; backend='reference' takes them")


@dataclass(frozen=True)
class _ForwardPlan:
    """What makes memory, what a problem's results are, the launch (None: no pair is visible), and its modifiers."""

    allocate: Allocate
    out: Form
    rows: Form
    max_logit: Form | None = None
    launch: Launch | None = None
    modifiers: "_PlannedModifiers | None" = None

    def allocated(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return out, lse and, where it is wanted, max_logit, to be filled; on the current device."""
        allocate = self.allocate
        return allocate(*self.out), allocate(*self.rows), self.max_logit and allocate(*self.max_logit)

    def attend(self, tensors: Callable[[], Three], addresses: tuple[int, int, int],
               operands: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Launch on the current device, which is that of the tensors; return what :meth:`allocated` does, filled.

        ``tensors``: returns q, k and v, which lie at the addresses.
        """
        out, lse, max_logit = made = self.allocated()
        launch, modifiers = cast(Launch, self.launch), cast(_PlannedModifiers, self.modifiers)
        launch.at((*addresses, out.data_ptr(), lse.data_ptr(), None if max_logit is None else max_logit.data_ptr(),
                   *modifiers.addresses(operands)), lambda: (*tensors(), *made, modifiers.of(operands)))
        return made


@dataclass(frozen=True)
class _PlannedModifiers:
    """The kernels' modifiers: where their tensors lie in a call, and, for a first launch, they themselves."""

    problem: AttentionProblem
    addresses: Callable[[Operands], tuple[int, ...]]

    def of(self, operands: Operands) -> Modifiers:
        """Return those of a call."""
        return modifiers_of(self.problem, operands)


@dataclass(frozen=True)
class _BackwardPlan:
    """Strides of the gradients, and the launches; None where another does their work.

    Where no pair is visible, none is there. ``single``: where one tile holds all keys, the launch that makes all three
    gradients.
    """

    needs: Needs
    dq_strides: Sizes
    dk_strides: Sizes
    dv_strides: Sizes
    delta: Launch | None = None
    dkdv: tuple[Launch, ...] = ()
    dq: "Launch | BiasGradientSums | None" = None
    dbias: "Launch | HopperDbias | None" = None
    modifiers: _PlannedModifiers | None = None
    single: Launch | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no pair is visible."""
        return self.delta is None and self.single is None

    def allocated(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> _Three:
        """Return dq, dk and dv, to be filled; None for what is not needed."""
        dk, dv = ((_empty(k, self.dk_strides, dtype), _empty(v, self.dv_strides, dtype)) if self.needs.dkv
                  else (None, None))
        return _empty(q, self.dq_strides, dtype) if self.needs.dq else None, dk, dv

    def differentiate(self, results: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
                      inputs: tuple[torch.Tensor, ...], made: _Three, sums: OperandGradients,
                      operands: Operands = NO_OPERANDS) -> None:
        """Launch on the current device, which is that of the tensors.

        Args:
            results: out, dout and dlse or None.
            inputs: q, k, v, dout, lse and delta.
            made: dq, dk and dv; None for what is neither needed nor made on the way of something else.
            sums, operands: of the call.
        """
        modifiers = cast(_PlannedModifiers, self.modifiers)
        out, dout, dlse = results
        if self.single is not None:
            dq, dk, dv = made
            tensors = (*inputs[:5], None, dk, dv, None, out, dq)
            self.single.at((*_addresses(tensors), *modifiers.addresses(operands)),
                           lambda: (*tensors, modifiers.of(operands)))
            return
        of_delta = (out, dout, out if dlse is None else dlse, inputs[5])
        self._launch((of_delta, _addresses(of_delta)), (inputs, _addresses(inputs)), made, sums,
                     lambda: modifiers.of(operands), modifiers.addresses(operands))

    def _launch(self, of_delta: _Placed, inputs: _Placed, made: _Three, sums: OperandGradients,
                modifiers: Callable[[], Modifiers], at_operands: tuple[int, ...]) -> None:
        """Launch the kernels, given tensors and where they lie; ``modifiers`` returns those of the call."""
        dq, dk, dv = made
        for_delta, at_delta = of_delta
        tensors, at_inputs = inputs
        cast(Launch, self.delta).at((*at_delta, *at_operands), lambda: (*for_delta, modifiers()))
        if dk is not None:
            of_keys = (dk, dv, sums.columns, None, None)
            at_keys = (*at_inputs, *_addresses(of_keys), *at_operands)
            for launch in self.dkdv:
                launch.at(at_keys, lambda: (*tensors, *of_keys, modifiers()))
        if dq is not None:
            of_queries = (dq, sums.rows, sums.moments, sums.pairs if self.dbias is None else None, None, None)
            if isinstance(self.dq, Launch):
                self.dq.at((*at_inputs, *_addresses(of_queries), *at_operands),
                           lambda: (*tensors, *of_queries, modifiers()))
            else:
                cast("BiasGradientSums", self.dq)(*tensors, *of_queries, modifiers())
        if sums.pairs is not None and self.dbias is not None:
            self.dbias(*tensors, sums.pairs, modifiers())

    def bound(self, problem: AttentionProblem, no_sums: OperandGradients) -> BoundBackward:
        """Return the whole backward pass of a plain problem."""
        allocate, (_, rows) = allocator(problem.device), forms_of_results(problem)
        of_q, of_k, of_v = forms_of_gradients(problem, (self.dq_strides, self.dk_strides, self.dv_strides))
        of_kv = (of_k, of_v) if self.needs.dkv else (None, None)
        forms = of_q if self.needs.dq else None, *of_kv

        planned = cast(_PlannedModifiers, self.modifiers)
        modifiers, at_operands, launch = planned.of(NO_OPERANDS), planned.addresses(NO_OPERANDS), self._launch
        if self.single is not None:
            return _bound_single(self.single, allocate, (of_q, of_k, of_v), modifiers)

        def differentiate(tensors: tuple[Any, ...], addresses: tuple[int, ...]) -> _Three:
            q, k, v, out, lse, dout, dlse = tensors
            at_q, at_k, at_v, at_out, at_lse, at_dout, *at_dlse = addresses
            made = cast(_Three, tuple([form and allocate(*form) for form in forms]))
            delta = allocate(*rows)
            at_delta = delta.data_ptr()
            launch(((out, dout, out if dlse is None else dlse, delta),
                    (at_out, at_dout, at_dlse[0] if at_dlse else at_out, at_delta)),
                   ((q, k, v, dout, lse, delta), (at_q, at_k, at_v, at_dout, at_lse, at_delta)), made, no_sums,
                   lambda: modifiers, at_operands)
            return made

        return differentiate


def _bound_single(launch: Launch, allocate: Allocate, forms: tuple[Form, Form, Form],
                  modifiers: Modifiers) -> BoundBackward:
    """Return the whole backward pass of a plain problem that takes one launch: it is short, and waits for the host."""
    enqueue, (of_q, of_k, of_v) = launch.at, forms

    def differentiate(tensors: tuple[Any, ...], addresses: tuple[int, ...]) -> _Three:
        at_q, at_k, at_v, at_out, at_lse, at_dout = addresses
        dq, dk, dv = made = allocate(*of_q), allocate(*of_k), allocate(*of_v)

        def arguments() -> tuple[Any, ...]:
            q, k, v, out, lse, dout, _ = tensors
            return q, k, v, dout, lse, None, dk, dv, None, out, dq, modifiers

        enqueue((at_q, at_k, at_v, at_dout, at_lse, None, dk.data_ptr(), dv.data_ptr(), None, at_out, dq.data_ptr()),
                arguments)
        return made

    return differentiate


def _addresses(tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@registered
@lru_cache(maxsize=PLANS)
def _forward_plan(problem: AttentionProblem, alignment: tuple[bool, ...], precision: str) -> _ForwardPlan:
    forms = forms_of_results(problem)
    made = allocator(problem.device), *forms, forms[1] if problem.scores.max_logit else None
    if problem.is_empty:
        return _ForwardPlan(*made)
    from tilewise.kernels.triton.forward import forward_launch

    spec = device_spec(problem.device)
    descriptors = wants_descriptors(problem, spec) and all(alignment) and takes_descriptors(
        problem, problem.q_strides, problem.k_strides, problem.v_strides)
    config = triton_config("forward", problem, spec, descriptors=descriptors)
    return _ForwardPlan(*made, forward_launch(problem, config, precision), _planned_modifiers(problem))


@registered
@lru_cache(maxsize=PLANS)
def _backward_plan(problem: AttentionProblem, incoming: tuple[Sizes, Sizes, Sizes | None],
                   alignment: tuple[bool, ...], precision: str, needs: Needs) -> _BackwardPlan:
    # A launch keeps the kernel of its first call: which results are None belongs to the plan.
    dq, dk, dv = (dense_strides(shape, strides) for shape, strides in (
        ((problem.b, problem.hq, problem.sq, problem.d), problem.q_strides),
        ((problem.b, problem.hk, problem.sk, problem.d), problem.k_strides),
        ((problem.b, problem.hk, problem.sk, problem.dv), problem.v_strides)))
    if problem.is_empty:
        return _BackwardPlan(needs, dq, dk, dv)
    from tilewise.kernels.triton.backward import delta_launch, dkdv_launch

    spec = device_spec(problem.device)
    out_strides, dout_strides, dlse_strides = incoming
    single = single_tile_config(problem, spec) if needs == _EVERY and dlse_strides is None else None
    if single is not None:
        launch = dkdv_launch(problem, single, precision, dout_strides, (dk, dv), (True, True), (out_strides, dq))
        return _BackwardPlan(needs, dq, dk, dv, modifiers=_planned_modifiers(problem), single=launch)
    descriptors = wants_descriptors(problem, spec) and all(alignment) and takes_descriptors(
        problem, problem.q_strides, problem.k_strides, problem.v_strides, dout_strides)
    kernels = {"dk": (True, False), "dv": (False, True)} if split_dkdv(problem, spec) else {"dkdv": (True, True)}
    dkdv_launches = tuple(
        dkdv_launch(problem, triton_config(kernel, problem, spec, descriptors=descriptors), precision, dout_strides,
                    (dk, dv), made)
        for kernel, made in kernels.items())
    return _BackwardPlan(
        needs, dq, dk, dv, delta_launch(problem, delta_config(problem), out_strides, dout_strides, dlse_strides),
        dkdv_launches, *dq_launches(problem, precision, dout_strides, dq, descriptors=descriptors, dbias=needs.dbias),
        _planned_modifiers(problem))


def _planned_modifiers(problem: AttentionProblem) -> _PlannedModifiers:
    return _PlannedModifiers(problem, operand_addresses(problem))


def _of_nothing(out: torch.Tensor, lse: torch.Tensor, max_logit: torch.Tensor | None, operands: Operands) -> Results:
    """Fill the results of a problem in which no pair is visible."""
    if operands.sinks is None:
        lse.fill_(float("-inf"))
    else:
        lse.copy_(operands.sinks[:, None].expand(lse.shape))
    return Results(out.zero_(), lse, None if max_logit is None else max_logit.fill_(float("-inf")))


def _present(operands: Operands) -> tuple[torch.Tensor, ...]:
    return () if operands is NO_OPERANDS else tuple(operands.present)


def _strides_of(out: torch.Tensor, dout: torch.Tensor,
                dlse: torch.Tensor | None) -> tuple[Sizes, Sizes, Sizes | None]:
    return out.stride(), dout.stride(), None if dlse is None else dlse.stride()


def _empty(like: torch.Tensor, strides: Sizes, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(like.shape, strides, dtype=dtype, device=like.device)


backend = TritonBackend()
