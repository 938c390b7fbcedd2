"""The short way of a call: from the public function to the launch in one look-up.

A call of equal facts (shapes, strides, dtypes, device, options) was checked, and its backend chosen, the first time.
From then on what torch's dispatcher, the checks and the plans cost the host, more than a small problem costs the
device, is a look-up of these facts. The operators (attention_op.py) remain the definition: a call goes there whenever
somebody may want to see an operator, a tensor is no plain one, or the backend has no launch bound to its problem. An
equal call computes the same on either way, and what one refuses the other never takes: facts become a launch by the
same functions.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import forward_ad, profiler

from tilewise import settings
from tilewise.autograd.attention_op import gradients_of, is_plain, precompile_backward, resolve
from tilewise.autograd.guards import IsLike, guard_of
from tilewise.backends.base import BindingBackend, BoundBackward, BoundForward, Needs, Saved
from tilewise.backends.current import allows_tf32, autocast_dtype, is_current
from tilewise.caches import registered
from tilewise.kernels.compiling import pending
from tilewise.masks import Mask
from tilewise.problem.options import NO_OPERANDS, Operands, OperatorOptions
from tilewise.problem.problem import facts_of_inputs, facts_of_operands
from tilewise.validate.tensors import SpecKey

KEPT = 1024  # ways; more are forgotten together, since a way is made again from a plan, of which as many are kept
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
_Kept = TypeVar("_Kept")


class Way(NamedTuple):
    """A bound forward pass, and what the operators of the same call take behind their tensors."""

    forward: BoundForward
    options: tuple[Any, ...]


class FirstWay(Way):
    """The way of a first call that has a gradient: it begins the backward pass too, and is not kept."""

    __slots__ = ()


_NO_BAND = (None, None, None)
# By the facts of a call, forward and backward; None: such a call has no short way.
_ways: dict[Key, Way | None] = registered({})
_ways_back: dict[Key, BoundBackward | None] = registered({})
# By the shape of q and the options, for the last few kinds of tensors that came with them: a guard, their device, for
# float32 what allows_tf32 said, and the way or the bound backward pass.
_recent: dict[Key, tuple[tuple[IsLike, torch.device, bool | None, Any], ...]] = registered({})
_RECENT = 4
_UNKNOWN: Any = object()


def attend(q: Any, k: Any, v: Any, mask: Mask | None,
           numbers: tuple[Any, Any, Any]) -> Sequence[torch.Tensor] | None:
    """Return out and lse of a call without operands; None if it has to go the long way.

    Args:
        q, k, v, mask: as the user gave them, the mask a :class:`Mask` or None.
        numbers: scale, deterministic and backend, as the user gave them.
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
    way: Way | None = None if in_autocast else _recalled(key, tensors)
    if way is None:
        way = _way_for(options, tensors, in_autocast)
        if way is None:
            return None
        if not in_autocast and way.__class__ is Way:  # a guard does not tell one of its dtypes from another
            _remember(key, tensors, way)
    if _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        made: tuple[torch.Tensor, torch.Tensor] = _apply(q, k, v, way, addresses)
        return made
    return way.forward(lambda: (q, k, v), addresses, NO_OPERANDS)


def attend_with(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Operands, options: OperatorOptions,
                inputs: Callable[[], Inputs] | None = None) -> Sequence[torch.Tensor] | None:
    """Return out, lse and, where it is wanted, max_logit; None if the call has to go the long way.

    So has a plain one: :func:`attend` has been asked before.

    Args:
        q, k, v: of the user's.
        operands, options: what the operators take, checked as far as the public function does.
        inputs: returns q, k and v as the operators take them, where those are views of the user's; such a call has a
            gradient on the long way alone.
    """
    # The first question is the one that a compiler knows the answer to: what it traces behind it, it compiles again.
    if (_is_watched() or is_plain(operands, options) or not q.__class__ is k.__class__ is v.__class__ is _Tensor
            or _in_autocast() or operands.score_tensors or operands.mask_tensors):
        return None
    name = options.backend or settings.default_backend()
    # One tensor may come twice, as cu_seqlens of queries and keys do: a guard is for different ones.
    there = [tensor for tensor in operands.alone if tensor is not None]
    tensors = (q, k, v, *dict.fromkeys(there))
    pattern = tuple([None if tensor is None else place for place, tensor in enumerate(operands.alone)])
    if operands.cu_seqlens_q is not None:
        pattern = (*pattern, operands.cu_seqlens_q is operands.cu_seqlens_k, operands.seqlens_q is operands.seqlens_k)
    chosen = (*options[:-1], name)
    try:
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (q.shape, chosen, pattern)
    except RuntimeError:  # as in attend
        return None
    if functools.reduce(operator.or_, addresses) & 15 or min(addresses) < _LOWEST_ADDRESS:
        return None
    has_gradient = _is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if has_gradient and inputs is not None:
        return None
    way: Way | None = _recalled(key, tensors)
    if way is None:
        way = _way_with(chosen, (q, k, v) if inputs is None else inputs(), operands)
        if way is None:
            return None
        if way.__class__ is Way:
            _remember(key, tensors, way)
    at_inputs = (addresses[0], addresses[1], addresses[2])
    if has_gradient:
        made: tuple[torch.Tensor, ...] = _apply(q, k, v, *operands, way, at_inputs)
        return made
    return way.forward(inputs or (lambda: (q, k, v)), at_inputs, operands)


def _way_with(options: tuple[Any, ...], inputs: Inputs, operands: Operands) -> Way | None:
    """Return the way of a call with operands by every fact of it; None if it has none."""
    q, k, v = inputs
    dtype, device = q.dtype, q.device
    if (not dtype is k.dtype is v.dtype or not is_current(device)
            or any(tensor.__class__ is not _Tensor or tensor.is_neg() for tensor in (*inputs, *operands.present))):
        return None
    key = (facts_of_inputs(q, k, v), facts_of_operands(operands), options, allows_tf32(dtype))
    way = _ways.get(key, _UNKNOWN)
    return _first(_keep(_ways, key, _way_of(options, inputs, key[1])), inputs, operands) if way is _UNKNOWN else way


def _way_for(options: tuple[Any, ...], tensors: Inputs,
             in_autocast: bool) -> Way | None:
    """Return the way of a plain call by every fact of it; None if it has none."""
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
    way = _ways.get(key, _UNKNOWN)
    return _first(_keep(_ways, key, _way_of(options, tensors)), tensors) if way is _UNKNOWN else way


def _recalled(key: Key, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Return what was remembered for these options and tensors like these, if it was."""
    for is_like, device, tf32, kept in _recent.get(key, ()):
        if is_like(*tensors) and (tf32 is None or tf32 is allows_tf32(_float32)) and is_current(device):
            return kept
    return None


def _remember(key: Key, tensors: tuple[torch.Tensor, ...], kept: Any) -> None:
    """Keep it for later calls, which are told by one question to torch then."""
    dtype, is_like = tensors[0].dtype, guard_of(tensors)
    if is_like is not None:
        known = (is_like, tensors[0].device, allows_tf32(dtype) if dtype is _float32 else None, kept)
        _keep(_recent, key, (known, *_recent.get(key, ()))[:_RECENT])


def _is_watched() -> bool:
    """Whether somebody may want to see an operator: a compiler, a mode, a transform, a profiler, a tracer, the user."""
    return bool(_is_compiling() or not settings.short_ways() or _dispatch_modes() or _has_function_mode()
                # One that is asked to profile every thread is not this thread's own.
                or _in_functorch() or _in_profiler() or profiler._is_profiler_enabled
                or forward_ad._current_level >= 0 or _tracing() is not None)


def _band_of(mask: Mask) -> tuple[int | None, int | None, str | None] | None:
    """Return the mask's part of a key; None if it is one for the operator of all options."""
    return None if mask.has_exceptions else (mask.left, mask.right, mask.alignment)


def _is_cast(dtype: torch.dtype, device: torch.device) -> bool:
    return autocast_dtype(device.type) not in (None, dtype)


def _way_of(options: tuple[Any, ...], tensors: Inputs,
            operands: tuple[SpecKey, ...] = ()) -> Way | None:
    """Check and choose as the operator does, and ask the backend for a bound launch; raises as the operator does."""
    problem, backend = resolve(facts_of_inputs(*tensors), operands, options, None, True, allows_tf32(tensors[0].dtype))
    forward = backend.bind_forward(problem) if isinstance(backend, BindingBackend) else None
    return None if forward is None else Way(forward, options)


def _first(way: Way | None, inputs: Inputs, operands: Operands = NO_OPERANDS) -> Way | None:
    """Return the way that a first call goes in the place of this one, which later calls go."""
    has_gradient = _is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *operands.present))
    if way is None or not has_gradient or not inputs[0].is_cuda:
        return way
    bound, options = way

    def forward(tensors: Callable[[], Inputs], addresses: tuple[int, int, int],
                operands: Operands) -> tuple[torch.Tensor, ...]:
        pending.call = precompile_backward, *tensors(), operands, options
        try:
            return bound(tensors, addresses, operands)
        finally:
            pending.call = None

    return FirstWay(forward, options)


def _keep(ways: dict[Key, _Kept], key: Key, way: _Kept) -> _Kept:
    if len(ways) >= KEPT:
        ways.clear()
    ways[key] = way
    return way


def _differentiate(way: Way, saved: Sequence[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor | None,
                   needs: tuple[bool, bool]) -> tuple[torch.Tensor | None, ...] | None:
    """Return dq, dk and dv; None if the backward pass has to go the long way.

    Hooks may have handed back other tensors than were saved, so every fact that a launch counts on is looked up.
    """
    q, k, v, out, lse = saved
    options = way.options
    name = options[-1] or settings.default_backend()
    there = (q, k, v, out, lse, dout) if dlse is None else (q, k, v, out, lse, dout, dlse)
    try:
        addresses = tuple([tensor.data_ptr() for tensor in there])
        key = (q.shape, options, name, needs, dlse is None)
    except RuntimeError:  # as in attend
        return None
    if functools.reduce(operator.or_, addresses) & 15 or min(addresses) < _LOWEST_ADDRESS:
        return None
    bound: BoundBackward | None = _recalled(key, there)
    if bound is None:
        bound = _backward_for((*options[:-1], name), there, needs)
        if bound is None:
            return None
        _remember(key, there, bound)
    return bound((q, k, v, out, lse, dout, dlse), addresses)


def _backward_for(options: tuple[Any, ...], there: tuple[torch.Tensor, ...],
                  needs: tuple[bool, bool]) -> BoundBackward | None:
    """Return the bound backward pass of a call by every fact of it; None if it has none.

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
    except RuntimeError:  # as in _way_for
        return None
    bound: BoundBackward | None = _ways_back.get(key, _UNKNOWN)
    if bound is not _UNKNOWN:
        return bound
    return _keep(_ways_back, key, _bound_backward(there[:5], dout, more[0] if more else None, options, needs))


def _bound_backward(saved: Sequence[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor | None,
                    options: tuple[Any, ...], needs: tuple[bool, bool]) -> BoundBackward | None:
    q, k, v, out, lse = saved
    if not lse.is_contiguous():
        return None
    problem, backend = resolve(facts_of_inputs(q, k, v), (), options, None, True, allows_tf32(q.dtype),
                               dlse is not None)
    if not isinstance(backend, BindingBackend):
        return None
    return backend.bind_backward(problem, Saved(q, k, v, out, lse), dout, dlse, Needs(*needs))


class AttentionFunction(torch.autograd.Function):
    """Attention by a bound launch, with a gradient for q, k, v and the operands that have one, through out and lse.

    Its node has the name and the results that the operators' has: a graph does not tell which way a call went.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        """Return out, lse and, where it is wanted, max_logit. ``rest``: the operands, if any, a Way, the addresses."""
        *given, way, addresses = rest
        operands = Operands(*given) if given else NO_OPERANDS
        results: tuple[torch.Tensor, ...] = way.forward(lambda: (q, k, v), addresses, operands)
        ctx.set_materialize_grads(False)
        ctx.way, ctx.is_plain = way, not given
        if given:
            ctx.save_for_backward(q, k, v, *results[:2], *operands.alone)
            if len(results) > 2:  # a report, not a function to be differentiated
                ctx.mark_non_differentiable(results[2])
            return results
        ctx.save_for_backward(q, k, v, *results)
        return results

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None,
                 *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return a gradient for each input, or None."""
        wanted = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(wanted)
        way, saved = ctx.way, ctx.saved_tensors
        if not ctx.is_plain:
            return gradients_of(wanted, saved, (dout, dlse), way.options, first_of_mask=0)
        made = None
        # Gradients are enabled here under create_graph=True alone.
        if dout is not None and not _is_grad_enabled() and not _is_watched():
            made = _differentiate(way, saved, dout, dlse, (wanted[0], wanted[1] or wanted[2]))
        if made is None:
            return gradients_of(wanted, saved, (dout, dlse), way.options)
        dq, dk, dv = made
        return (dq if wanted[0] else None, dk if wanted[1] else None, dv if wanted[2] else None, None, None)


# Function.apply in Python looks for transforms of functorch and for what is left of them; both take the long way.
_apply: Any = super(torch.autograd.Function, AttentionFunction).apply
