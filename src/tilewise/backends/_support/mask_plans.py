"""Mask plans that several calls share: the layers of a model have one mask, and its lists and bits are built once.

What a plan is built of must not change while it is kept. That holds for a mask by position, and for tensors that the
library has made itself and no caller writes: the ranges of :func:`tilewise.documents`, the tables of
:func:`tilewise.tree` and its like and of FlexAttention's blocks, and the lists of a mask that was
:meth:`tilewise.masks.TensorMask.tiled`, which are to be made anew when its tensor changes. A plain boolean tensor and
the tensors of a mask function are the caller's own, and may be written at any time, by kernels that no version counter
of torch's notices too: such a plan is built in every call.
"""

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch

from tilewise.backends._support.memory import Allocate
from tilewise.kernels.driver import raw_stream
from tilewise.kernels.hooks import take_of_kernels
from tilewise.kernels.hopper.backward.config import BackwardKernel, HopperBackwardConfig
from tilewise.kernels.hopper.launch import STREAM_OF_THREAD
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
_kept: "dict[Any, _Kept]" = registered({})  # in the order of their last use


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


def planner_of(problem: AttentionProblem, *, rows: int, columns: int, keys_first: bool) -> "MaskPlanner | None":
    """Return what builds the plan of a kernel; None for a mask that bounds describe. The rest: as of MaskPlanner."""
    if problem.is_banded:
        return None
    from tilewise.kernels.triton.mask_plan import MaskPlanner

    queries = problem.seeing_queries if problem.direction == "backward" else Span(0, problem.sq)
    return MaskPlanner(problem, queries, problem.seen_keys, rows=rows, columns=columns, keys_first=keys_first)


def backward_planners(problem: AttentionProblem, config: HopperBackwardConfig) -> "tuple[MaskPlanner, ...]":
    """Return what builds the plans of a backward pass: of tiles of keys, and of queries where dQ has its own kernel."""
    if problem.is_banded:
        return ()
    tiles = [(config.block_n // 64, True)] + [(2, False)] * (config.kernel is BackwardKernel.D256)
    made = [planner_of(problem, rows=rows, columns=1, keys_first=keys_first) for rows, keys_first in tiles]
    return tuple(planner for planner in made if planner is not None)


def mask_plan(planner: "MaskPlanner", operands: Operands, allocate: Allocate) -> Plan:
    """Return the lists and bits of a call's mask: those of an earlier call, or new ones.

    Plans belong to the stream that they were built on, and to none where a handle stands for several streams. A
    captured graph may be replayed when tensors hold something else, and its calls build their own. So do those of
    which kernels are compiled alone: nothing is in such a plan, and every kernel is to be seen.
    """
    sources, stream = _sources(planner.problem, operands), raw_stream()(planner.problem.device.index)
    if (sources is None or stream == STREAM_OF_THREAD or torch.cuda.is_current_stream_capturing()
            or take_of_kernels() is not None):
        return planner(operands, allocate)
    key = planner, stream, tuple(map(id, sources))
    known = _kept.pop(key, None)
    if known is not None and known.is_of(sources):
        _kept[key] = known  # the last one used
        return known.plan
    plan = planner(operands, allocate)
    _keep(key, _Kept(plan, sources))
    return plan


def _sources(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, ...] | None:
    """Return the tensors whose identity stands for the mask's contents; None where none does."""
    function = problem.scores.mask_function
    if (operands.mask is not None and operands.tiles_q is None) or (function is not None and function.may_change):
        return None
    return tuple([tensor for tensor in (operands.tiles_q, operands.documents_q, operands.documents_k,
                                        *operands.mask_tensors) if tensor is not None])


def _keep(key: Any, made: _Kept) -> None:
    """Keep a plan; drop those beside it that were not used for longest and are too much memory, or of dead tensors.

    Threads may come between any two lines: what another one has dropped is no error, and what it misses is built again.
    """
    others = reversed(list(_kept.items()))
    _kept[key] = made
    room = MOST_BYTES - made.bytes
    for other, kept in others:
        is_dead = any(source() is None for source in kept.sources)
        room -= 0 if is_dead else kept.bytes
        if is_dead or room < 0:
            _kept.pop(other, None)
