"""Decoding by Triton's kernels; a call is a look-up, the allocation of its outputs, and one to three launches."""

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from tilewise.backends._support.current import is_current
from tilewise.backends._support.triton import PLANS, precision_of, why_not_at_all, why_not_here
from tilewise.kernels.triton.launch import Launch
from tilewise.problem import Sizes, alignment_of
from tilewise.problem.decode import CacheOperands, DecodeProblem
from tilewise.support.caches import registered
from tilewise.tuning.device import device_spec
from tilewise.tuning.select import choose_splits, decode_config

if TYPE_CHECKING:
    from tilewise.kernels.triton.decode_launch import Strides

WIDEST = 256  # head dims


def why_not(problem: DecodeProblem) -> str | None:
    """Return the reason against, if there is one."""
    reason = why_not_at_all(problem.dtype) or why_not_here(problem.dtype, problem.device)
    if reason is None and max(problem.d, problem.dv) > WIDEST:
        return f"decodes head dims up to {WIDEST}, got {problem.d} and {problem.dv}; backend='reference' takes them"
    for name, width in (("q", problem.d), ("k", problem.d), ("v", problem.dv)):
        apart = problem.width * problem.strides_of(name)[3] if problem.has(name) else 0
        if reason is None and apart >= 2**31:  # the kernels reckon inside of a row in 32 bits
            return (f"decodes rows of {name} within {2**31 - 1} elements of memory, got {width} head dims, "
                    f"{problem.strides_of(name)[3]} elements apart: call contiguous() on it")
    return reason


def decode(problem: DecodeProblem, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
           operands: CacheOperands) -> tuple[torch.Tensor, torch.Tensor]:
    """Append k and v; return out (b, hq, sq, dv), strides ``problem.out_strides``, and lse (b, hq, sq)."""
    from tilewise.kernels.triton.decode_launch import cache_of, extras_of, rotary_of

    tensors = (q, k_cache, v_cache, *(tensor for tensor in operands if tensor is not None))
    plan = _plan(problem, alignment_of([tensor.data_ptr() for tensor in tensors]), precision_of(problem.dtype))
    rows, device = (problem.b, problem.hq, problem.sq), problem.device
    out = torch.empty_strided((*rows, problem.dv), problem.out_strides, dtype=problem.dtype, device=device)
    lse = torch.empty(rows, dtype=torch.float32, device=device)
    cache, rotary = cache_of(operands, plan.strides), rotary_of(operands, plan.strides)
    extras = extras_of(operands, plan.strides, problem.softcap)
    with contextlib.nullcontext() if is_current(device) else torch.cuda.device(device):
        if plan.append is not None:
            plan.append(operands.k, operands.v, k_cache, v_cache, cache, rotary)
        if plan.combine is None and plan.attend is not None:
            plan.attend(q, k_cache, v_cache, out, lse, cache, rotary, extras)
        elif plan.attend is not None:
            parts = torch.empty(*plan.parts, dtype=torch.float32, device=device)
            sums = torch.empty(*plan.parts[:-1], 2, dtype=torch.float32, device=device)
            plan.attend(q, k_cache, v_cache, parts, sums, cache, rotary, extras)
            plan.combine(parts, sums, out, lse, extras)
    return out, lse


@dataclass(frozen=True)
class _Plan:
    """The launches; None for what is not needed. ``parts``: shape of the parts' buffer."""

    strides: "Strides"
    append: Launch | None
    attend: Any
    combine: Any
    parts: Sizes = ()


@registered
@lru_cache(maxsize=PLANS)
def _plan(problem: DecodeProblem, alignment: tuple[bool, ...], precision: str) -> _Plan:
    # A launch keeps the kernel of its first call, which was compiled for the alignment of its tensors.
    from tilewise.kernels.triton.decode_launch import append_launch, combine_launch, decode_launch, is_whole, strides_of

    strides = strides_of(problem)
    append = append_launch(problem) if problem.new and problem.b else None
    if not problem.b * problem.sq:
        return _Plan(strides, append, None, None)
    config = decode_config(problem, device_spec(problem.device))
    splits = choose_splits(problem, config, _num_sms(problem.device))
    attend = decode_launch(problem, config, splits, config.row_tiles(problem), precision)
    if is_whole(splits):
        return _Plan(strides, append, attend, None)
    return _Plan(strides, append, attend, combine_launch(problem, config, splits),
                 (problem.b, problem.hq, problem.sq, splits.count, problem.dv))


def _num_sms(device: torch.device) -> int:
    """Return how many SMs there are; for the interpreter, which has none, as few as show that keys are split."""
    if device.type == "cpu":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
