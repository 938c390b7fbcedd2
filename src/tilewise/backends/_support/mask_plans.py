"""Mask plans that several calls share: the layers of a model have one mask, and its lists and bits are built once.

What a plan is built of must not change while it is kept. That holds for a mask by position, and for tensors that the
library has made itself and nobody else writes: the ranges of :func:`tilewise.documents`, and the lists of a mask that
was :meth:`tilewise.masks.TensorMask.tiled`, which are to be made anew when its tensor changes. A plain boolean tensor
is the caller's own, and may be written at any time: its plan is built in every call.
"""

import math
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from tilewise.backends._support.memory import Allocate
from tilewise.kernels.driver import raw_stream
from tilewise.masks import Span
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands
from tilewise.support.caches import registered

if TYPE_CHECKING:
    from tilewise.kernels.triton.mask_plan import MaskPlanner

MOST_PLAN_BYTES = 2**30  # of a plan's bits: of one mask, 92 thousand queries and keys
MOST_MASKS, MOST_POSITIONS = 2**16 - 1, 2**22  # of a launch's grid
Plan = tuple[torch.Tensor, torch.Tensor]  # lists and bits
MOST_BYTES = 2**29  # of all plans that are kept, but for the last one
_kept: "OrderedDict[Any, _Kept]" = registered(OrderedDict())


class _Kept:
    """A plan, and the tensors that it was built of, which it does not keep alive."""

    def __init__(self, plan: Plan, sources: tuple[torch.Tensor, ...]) -> None:
        self.plan, self.bytes = plan, sum(tensor.nbytes for tensor in plan)
        self.sources = [weakref.ref(tensor) for tensor in sources]

    def is_of(self, sources: tuple[torch.Tensor, ...]) -> bool:
        """Whether it was built of these very tensors."""
        return len(sources) == len(self.sources) and all(
            own() is given for own, given in zip(self.sources, sources, strict=True))


def plan_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of the bits of a plan: one for each pair of the longest tiles, of each mask that differs."""
    batches, heads = problem.distinct_masks
    return batches * heads * (-(-problem.sq // 192) * 192) * (-(-problem.sk // 128) * 128) // 8


def too_large(problem: AttentionProblem) -> str | None:
    """Return why a mask has no plan for its size, None if it has one."""
    size, masks = plan_bytes(problem), math.prod(problem.distinct_masks)
    if size > MOST_PLAN_BYTES:
        return f"takes masks whose plan has up to {MOST_PLAN_BYTES >> 20} MiB, got {size >> 20} MiB"
    if masks > MOST_MASKS or max(problem.sq, problem.sk) > MOST_POSITIONS:
        return (f"takes up to {MOST_MASKS} masks of up to {MOST_POSITIONS} queries and keys, got {masks} of "
                f"{problem.sq} and {problem.sk}")
    return None


def planner_of(problem: AttentionProblem, *, rows: int, columns: int) -> "MaskPlanner | None":
    """Return what builds the plan of a pass; None for a mask that bounds describe. rows, columns: as of MaskPlanner."""
    if problem.is_banded:
        return None
    from tilewise.kernels.triton.mask_plan import MaskPlanner

    is_backward = problem.direction == "backward"
    queries = problem.seeing_queries if is_backward else Span(0, problem.sq)
    return MaskPlanner(problem, queries, problem.seen_keys, rows=rows, columns=columns, keys_first=is_backward)


def mask_plan(planner: "MaskPlanner", operands: Operands, allocate: Allocate) -> Plan:
    """Return the lists and bits of a call's mask: those of an earlier call, or new ones.

    Plans belong to the stream that they were built on. A captured graph may be replayed when tensors hold something
    else, and its calls build their own.
    """
    sources = _sources(operands)
    if sources is None or torch.cuda.is_current_stream_capturing():
        return planner(operands, allocate)
    key = planner, raw_stream()(planner.problem.device.index), tuple(map(id, sources))
    known = _kept.get(key)
    if known is not None and known.is_of(sources):
        _kept.move_to_end(key)
        return known.plan
    plan = planner(operands, allocate)
    _keep(key, _Kept(plan, sources))
    return plan


def _sources(operands: Operands) -> tuple[torch.Tensor, ...] | None:
    """Return the tensors whose identity stands for the mask's contents; None where none does."""
    if operands.mask is not None and operands.tiles_q is None:
        return None
    return tuple([tensor for tensor in (operands.tiles_q, operands.documents_q, operands.documents_k)
                  if tensor is not None])


def _keep(key: Any, made: _Kept) -> None:
    """Keep a plan; drop those beside it that were not used for longest and are too much memory, or of dead tensors."""
    _kept[key] = made
    _kept.move_to_end(key)
    for other, kept in list(_kept.items()):
        if any(source() is None for source in kept.sources):
            _kept.pop(other, None)
    while len(_kept) > 1 and sum(kept.bytes for kept in _kept.values()) > MOST_BYTES:
        _kept.popitem(last=False)
