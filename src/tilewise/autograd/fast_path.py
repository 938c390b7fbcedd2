"""The fast path of a call: from the public function to the launch in one look-up.

A call of equal specs (shapes, strides, dtypes, device, options) was checked, and its backend chosen, the first time.
From then on what torch's dispatcher, the checks and the plans cost the host, more than a small problem costs the
device, is a look-up of a :class:`LaunchPlan` by these specs. The operators (op.py) remain the definition: a call goes
to them whenever somebody may want to see an operator, a tensor is no plain one, or the backend has no launch bound to
its problem. An equal call computes the same on either path, and what one refuses the other never takes: specs become
a launch by the same functions.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import forward_ad, profiler

from tilewise import settings
from tilewise.autograd.function import AttentionFunction, OutFunction, is_plain
from tilewise.autograd.guards import IsLike, guard_of
from tilewise.autograd.op import backward_op, differentiate, resolve
from tilewise.backends._support.current import allows_tf32, autocast_dtype, is_current
from tilewise.backends.base import BindingBackend, BoundBackward, BoundForward, Needs, Saved
from tilewise.masks import Mask
from tilewise.problem.options import NO_OPERANDS, Operands, OperatorOptions
from tilewise.problem.problem import specs_of_inputs, specs_of_operands
from tilewise.support.caches import registered
from tilewise.validate.tensors import SpecKey

KEPT = 1024  # launch plans; more are dropped together: each is made again from a backend's plan, of which as many stay
# Memory starts higher: less is an offset into a storage that was emptied (FSDP), or none at all (no element, meta).
_LOWEST_ADDRESS = 1 << 32
_Tensor, _float32 = torch.Tensor, torch.float32
# Bound once: each look-up of a chain is a twentieth of a microsecond.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_dispatch_modes, _has_function_mode = torch._C._len_torch_dispatch_stack, torch._C._is_torch_function_mode_enabled
_in_functorch, _in_autocast = torch._C._are_functorch_transforms_active, torch._C._is_any_autocast_enabled
_in_profiler, _tracing = torch._C._autograd._profiler_enabled, torch._C._get_tracing_state
_follows_determinism = torch.are_deterministic_algorithms_enabled

Key = tuple[Any, ...]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v
# A guard, its tensors' device, for float32 what allows_tf32 said, and the plan or the bound backward pass.
Recent = tuple[IsLike, torch.device, bool | None, Any]
_Kept = TypeVar("_Kept")


class LaunchPlan(NamedTuple):
    """A bound forward pass, and what the operators of the same call take behind their tensors.

    backward: its backward passes for the tensors that came last, by what is needed, whether dlse is there, and the
        backend's name.
    """

    forward: BoundForward
    options: tuple[Any, ...]
    backward: "dict[Key, tuple[Recent, ...]]"

    def differentiate(self, saved: Sequence[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor | None,
                      needs: tuple[bool, bool]) -> tuple[torch.Tensor | None, ...] | None:
        """Return dq, dk and dv of a plain call; None if its backward pass has to go to the operators.

        Hooks may have handed back other tensors than were saved, so every spec that a launch counts on is looked up.
        """
        if _is_watched():
            return None
        q, k, v, out, lse = saved
        there: tuple[torch.Tensor, ...] = (q, k, v, out, lse, dout)
        addresses: tuple[int, ...]
        try:
            at_q, at_k, at_v, at_out, at_lse, at_dout = addresses = (
                q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), dout.data_ptr())
            either = at_q | at_k | at_v | at_out | at_lse | at_dout
            if dlse is not None:
                there, addresses = (*there, dlse), (*addresses, dlse.data_ptr())
                either |= addresses[-1]
        except RuntimeError:  # as in attend
            return None
        if either & 15 or min(addresses) < _LOWEST_ADDRESS:
            return None
        *options, named = self.options
        name = named or settings.default_backend()
        key = (*needs, dlse is None, name)
        bound: BoundBackward | None = _recalled(self.backward, key, there)
        if bound is None:
            bound = _backward_for((*options, name), there, needs)
            if bound is None:
                return None
            _remember(self.backward, key, there, bound)
        return bound((q, k, v, out, lse, dout, dlse), addresses)


_NO_BAND = (None, None, None)
# By the specs of a call, forward and backward; None: such a call has no launch plan.
_plans: dict[Key, LaunchPlan | None] = registered({})
_backward_plans: dict[Key, BoundBackward | None] = registered({})
# By the shape of q and the options, for the last few kinds of tensors that came with them.
_recent: dict[Key, tuple[Recent, ...]] = registered({})
_RECENT = 4
_TWIN = 1 << len(Operands._fields)
_UNKNOWN: Any = object()


def attend(q: Any, k: Any, v: Any, mask: Mask | None, numbers: tuple[Any, Any, Any],
           with_lse: bool) -> Sequence[torch.Tensor] | None:
    """Return out and lse of a call without operands; None if it has to go to the operators.

    Args:
        q, k, v, mask: as the user gave them, the mask a :class:`Mask` or None.
        numbers: scale, deterministic and backend, as the user gave them.
        with_lse: whether lse is taken; where it is not, it may lack.
    """
    scale, deterministic, backend = numbers
    if scale.__class__ is int:
        scale = float(scale)
    if (_is_watched() or not q.__class__ is k.__class__ is v.__class__ is _Tensor
            # Of other types are equal keys, as 1 and True, of which one is refused.
            or not (scale is None or scale.__class__ is float) or not (backend is None or backend.__class__ is str)
            or not (deterministic is None or deterministic.__class__ is bool)):
        return None
    name = backend or settings.default_backend()
    band = _NO_BAND if mask is None else _band_of(mask)
    if band is None or backend == "":
        return None
    if deterministic is None:
        deterministic = _follows_determinism()
    options = (scale, *band, deterministic, name)
    try:
        at_q, at_k, at_v = addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        key = (q.shape, options)
    except RuntimeError:  # no memory, or no shape: sparse, nested, what a transform of functorch wraps
        return None
    if (at_q | at_k | at_v) & 15 or min(addresses) < _LOWEST_ADDRESS:
        return None
    tensors, in_autocast = (q, k, v), _in_autocast()
    plan: LaunchPlan | None = None if in_autocast else _recalled(_recent, key, tensors)
    if plan is None:
        plan = _plan_for(options, tensors, in_autocast)
        if plan is None:
            return None
        if not in_autocast:  # a guard does not tell one of its dtypes from another
            _remember(_recent, key, tensors, plan)
    if _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        made: tuple[torch.Tensor, ...] = (_apply(q, k, v, plan, addresses) if with_lse
                                          else (_apply_for_out(q, k, v, plan, addresses),))
        return made
    return plan.forward(lambda: (q, k, v), addresses, NO_OPERANDS)


def attend_with(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Operands, options: OperatorOptions,
                inputs: Callable[[], Inputs] | None = None) -> Sequence[torch.Tensor] | None:
    """Return out, lse and, where it is wanted, max_logit; None if the call has to go to the operators.

    So has a plain one: :func:`attend` has been asked before.

    Args:
        q, k, v: of the user's.
        operands, options: what the operators take, checked as far as the public function does.
        inputs: returns q, k and v as the operators take them, where those are views of the user's; such a call has a
            gradient by the operators alone.
    """
    # The first question is the one that a compiler knows the answer to: what it traces behind it, it compiles again.
    if (_is_watched() or is_plain(operands, options) or not q.__class__ is k.__class__ is v.__class__ is _Tensor
            or _in_autocast() or operands.score_tensors or operands.mask_tensors):
        return None
    name = options.backend or settings.default_backend()
    # Which operands are there, a bit each. Lengths of queries and of keys may be one tensor, a guard is for different
    # ones: such a twin is left out, and has a bit of its own.
    there, pattern, last = [q, k, v], 0, None
    for place, tensor in enumerate(operands.alone):
        if tensor is not None:
            pattern |= 1 << place
            if tensor is last:
                pattern |= _TWIN << place
            else:
                there.append(tensor)
            last = tensor
    tensors, chosen = tuple(there), (*options[:-1], name)
    try:
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (q.shape, chosen, pattern)
    except RuntimeError:  # as in attend
        return None
    if functools.reduce(operator.or_, addresses) & 15 or min(addresses) < _LOWEST_ADDRESS:
        return None
    has_gradient = False
    if _is_grad_enabled():
        for tensor in tensors:
            has_gradient = has_gradient or tensor.requires_grad
        if has_gradient and inputs is not None:
            return None
    plan: LaunchPlan | None = _recalled(_recent, key, tensors)
    if plan is None:
        plan = _plan_with(chosen, (q, k, v) if inputs is None else inputs(), operands)
        if plan is None:
            return None
        _remember(_recent, key, tensors, plan)
    at_inputs = (addresses[0], addresses[1], addresses[2])
    if has_gradient:
        made: tuple[torch.Tensor, ...] = _apply(q, k, v, *operands, plan, at_inputs)
        return made
    return plan.forward(inputs or (lambda: (q, k, v)), at_inputs, operands)


def differentiate_with(tensors: Sequence[torch.Tensor | None], operands: Operands, options: OperatorOptions,
                       needs: list[bool]) -> list[torch.Tensor]:
    """Return what the backward operator does, and leave torch's dispatcher out where nobody may want to see it.

    Args:
        tensors: q, k, v, out, lse, dout and dlse or None.
        operands, options, needs: what the operator takes behind them.
    """
    seen = _is_watched() or any(tensor is not None and (tensor.__class__ is not _Tensor or tensor.is_neg())
                                for tensor in (*tensors, *operands.alone))
    run: Any = backward_op if seen else differentiate
    made: list[torch.Tensor] = run(*tensors, *operands, *options, needs)
    return made


def _plan_with(options: tuple[Any, ...], inputs: Inputs, operands: Operands) -> LaunchPlan | None:
    """Return the plan of a call with operands by every spec of it; None if it has none."""
    q, k, v = inputs
    dtype, device = q.dtype, q.device
    if (not dtype is k.dtype is v.dtype or not is_current(device)
            or any(tensor.__class__ is not _Tensor or tensor.is_neg() for tensor in (*inputs, *operands.present))):
        return None
    key = (specs_of_inputs(q, k, v), specs_of_operands(operands), options, allows_tf32(dtype))
    plan = _plans.get(key, _UNKNOWN)
    return _keep(_plans, key, _plan_of(options, inputs, key[1])) if plan is _UNKNOWN else plan


def _plan_for(options: tuple[Any, ...], tensors: Inputs,
             in_autocast: bool) -> LaunchPlan | None:
    """Return the plan of a plain call by every spec of it; None if it has none."""
    q, k, v = tensors
    dtype, device = q.dtype, q.device
    if (not dtype is k.dtype is v.dtype or (in_autocast and _is_cast(dtype, device)) or not is_current(device)
            or q.is_neg() or k.is_neg() or v.is_neg()):
        return None
    try:
        key = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), k.get_device(), v.get_device(), dtype,
               device, options, allows_tf32(dtype))
    except RuntimeError:  # none of strides
        return None
    plan = _plans.get(key, _UNKNOWN)
    return _keep(_plans, key, _plan_of(options, tensors)) if plan is _UNKNOWN else plan


def _recalled(recent: dict[Key, tuple[Recent, ...]], key: Key, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Return what was remembered for this key and tensors like these, if it was."""
    for is_like, device, tf32, kept in recent.get(key, ()):
        if is_like(*tensors) and (tf32 is None or tf32 is allows_tf32(_float32)) and is_current(device):
            return kept
    return None


def _remember(recent: dict[Key, tuple[Recent, ...]], key: Key, tensors: tuple[torch.Tensor, ...], kept: Any) -> None:
    """Keep it for later calls, which are told by one question to torch then."""
    dtype, is_like = tensors[0].dtype, guard_of(tensors)
    if is_like is not None:
        known = (is_like, tensors[0].device, allows_tf32(dtype) if dtype is _float32 else None, kept)
        _keep(recent, key, (known, *recent.get(key, ()))[:_RECENT])


def _is_watched() -> bool:
    """Whether somebody may want to see an operator: a compiler, a mode, a transform, a profiler, a tracer, the user."""
    return bool(_is_compiling() or not settings.takes_fast_path() or _dispatch_modes() or _has_function_mode()
                # One that is asked to profile every thread is not this thread's own.
                or _in_functorch() or _in_profiler() or profiler._is_profiler_enabled
                or forward_ad._current_level >= 0 or _tracing() is not None)


def _band_of(mask: Mask) -> tuple[int | None, int | None, str | None] | None:
    """Return the mask's part of a key; None if it is one for the operator of all options."""
    corner = mask.alignment
    return None if mask.has_exceptions or isinstance(corner, int) else (mask.left, mask.right, corner)


def _is_cast(dtype: torch.dtype, device: torch.device) -> bool:
    return autocast_dtype(device.type) not in (None, dtype)


def _plan_of(options: tuple[Any, ...], tensors: Inputs,
            operands: tuple[SpecKey, ...] = ()) -> LaunchPlan | None:
    """Check and choose as the operator does, and ask the backend for a bound launch; raises as the operator does."""
    problem, backend = resolve(specs_of_inputs(*tensors), operands, options, None, True, allows_tf32(tensors[0].dtype))
    forward = backend.bind_forward(problem) if isinstance(backend, BindingBackend) else None
    return None if forward is None else LaunchPlan(forward, options, {})


def _keep(plans: dict[Key, _Kept], key: Key, plan: _Kept) -> _Kept:
    if len(plans) >= KEPT:
        plans.clear()
    plans[key] = plan
    return plan


def _backward_for(options: tuple[Any, ...], there: tuple[torch.Tensor, ...],
                  needs: tuple[bool, bool]) -> BoundBackward | None:
    """Return the bound backward pass of a call by every spec of it; None if it has none.

    ``there``: q, k, v, out, lse, dout and, where it is there, dlse.
    """
    q, k, v, out, lse, dout, *more = there
    dtype, device = q.dtype, q.device
    if (any(tensor.__class__ is not _Tensor or tensor.device != device or tensor.is_neg() for tensor in there)
            or not dtype is k.dtype is v.dtype is out.dtype is dout.dtype or lse.dtype is not _float32
            or not is_current(device)):
        return None
    try:
        key = (*[(tensor.shape, tensor.stride()) for tensor in there], dtype, device, allows_tf32(dtype), needs,
               options)
    except RuntimeError:  # as in _plan_for
        return None
    bound: BoundBackward | None = _backward_plans.get(key, _UNKNOWN)
    if bound is not _UNKNOWN:
        return bound
    return _keep(_backward_plans, key, _bound_backward(there[:5], dout, more[0] if more else None, options, needs))


def _bound_backward(saved: Sequence[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor | None,
                    options: tuple[Any, ...], needs: tuple[bool, bool]) -> BoundBackward | None:
    q, k, v, out, lse = saved
    if not lse.is_contiguous():
        return None
    problem, backend = resolve(specs_of_inputs(q, k, v), (), options, None, True, allows_tf32(q.dtype),
                               dlse is not None)
    if not isinstance(backend, BindingBackend):
        return None
    return backend.bind_backward(problem, Saved(q, k, v, out, lse), dout, dlse, Needs(*needs))


# Function.apply in Python looks for transforms of functorch and for what is left of them; both go to the operators.
_apply: Any = super(torch.autograd.Function, AttentionFunction).apply
_apply_for_out: Any = super(torch.autograd.Function, OutFunction).apply
