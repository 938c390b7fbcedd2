"""The schedules: how a call on shards becomes steps and exchanges, and which one is chosen."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tilewise.api import attention, attention_varlen
from tilewise.distributed.arguments import Arguments
from tilewise.distributed.blocks import check_backends, check_block, summed_of
from tilewise.distributed.cost_model import SCHEDULES, Estimate, Links, estimates, groups_of
from tilewise.distributed.function import Planned, StepsFunction
from tilewise.distributed.heads import Exchanged, Ranges, ToHeads, ToSequence, head_ranges, key_ranges, to_heads
from tilewise.distributed.plan import (
    Narrow,
    Step,
    all_gather_plan,
    cached_all_gather_plan,
    cached_ring_plan,
    ring_plan,
)
from tilewise.errors import UnsupportedProblem
from tilewise.masks import Mask, Span, TensorMask
from tilewise.masks.document_ranges import documents_of
from tilewise.problem.options import Operands, OperatorOptions
from tilewise.validate.distributed import check_schedule


@dataclass(frozen=True)
class ScheduleExplanation:
    """The outcome of :func:`tilewise.distributed.explain`; prints as a table.

    Attributes:
        chosen: name of the schedule that a call would use.
        estimates: of each schedule what the cost model says of it, :class:`Estimate`: modelled, not measured.
        reasons: of each schedule why it does not take the call, or None.
        subject: the call in words.
    """

    chosen: str
    estimates: dict[str, Estimate]
    reasons: dict[str, str | None]
    subject: str

    def __str__(self) -> str:
        lines = [self.subject]
        for name, estimate in self.estimates.items():
            reason = self.reasons[name]
            verdict = "chosen" if name == self.chosen else "could serve" if reason is None else f"no: {reason}"
            lines.append(f"  {name:<10} modelled forward {estimate.seconds * 1e6:.0f} us, slowest rank receives "
                         f"{estimate.bytes_received} bytes and computes {estimate.pairs} pairs a head; {verdict}")
        return "\n".join(lines)


def choose_schedule(arguments: Arguments, schedule: str | None) -> str:
    """Return the named schedule, or that of the least estimated time among those that take the call.

    Raises:
        InvalidInput: an unknown name.
        UnsupportedProblem: the named one does not take the call.
    """
    ranks = arguments.problem.ranks
    if schedule is None:
        costs = estimates(arguments.problem, arguments.sizes, Links())
        return min((name for name in SCHEDULES if _why_not(name, arguments, ranks) is None),
                   key=lambda name: costs[name].seconds)
    check_schedule(schedule, SCHEDULES)
    reason = _why_not(schedule, arguments, ranks)
    if reason is not None:
        raise UnsupportedProblem(f"schedule {schedule!r} refuses this call", {schedule: reason})
    return schedule


def explain_schedule(arguments: Arguments, schedule: str | None) -> ScheduleExplanation:
    """Say what :func:`choose_schedule` chooses, and why; raises as it does."""
    reasons = {name: _why_not(name, arguments, arguments.problem.ranks) for name in SCHEDULES}
    return ScheduleExplanation(choose_schedule(arguments, schedule), estimates(
        arguments.problem, arguments.sizes, Links()), reasons, arguments.description(schedule))


def _why_not(name: str, arguments: Arguments, ranks: int) -> str | None:
    """Return why a schedule does not take a call, or None."""
    if name != "ulysses":
        return None
    hq, group = arguments.q.shape[1], arguments.q.shape[1] // arguments.k.shape[1]
    if hq % ranks:
        return f"needs a number of query heads that {ranks} ranks divide, got {hq}"
    each = hq // ranks
    if each % group and group % each:
        return (f"needs ranks that share no part of a group of query heads, got {each} query heads a rank and {group} "
                "for each head of keys")
    if arguments.options.dropout_p:
        return "takes no dropout, whose draws belong to the heads of all ranks"
    return None


def run_schedule(name: str, arguments: Arguments, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Return out, lse and, where the options want it, max_logit of this rank's queries."""
    if name == "ulysses":
        return _ulysses(arguments, group)
    return run_steps(name, arguments, group, dist.get_rank(group))


def run_steps(name: str, arguments: Arguments, group: dist.ProcessGroup, rank: int) -> tuple[torch.Tensor, ...]:
    """Return the same of a schedule of steps, "ring" or "all_gather", as one rank of the group."""
    planned = Planned(group, rank, _steps(name, arguments, rank), arguments.call, arguments.padded_rows(rank))
    operands = arguments.operands
    results: tuple[torch.Tensor, ...] = StepsFunction.apply(  # type: ignore[no-untyped-call]
        planned, arguments.q, arguments.k, arguments.v, operands.bias, operands.alibi_slopes, operands.sinks)
    return results


def _steps(name: str, arguments: Arguments, rank: int) -> tuple[Step, ...]:
    narrow: Narrow | None = arguments.narrow
    if name == "ring":
        return (cached_ring_plan(arguments.problem, rank) if narrow is None
                else ring_plan(arguments.problem, rank, narrow))
    # The draws of dropout belong to a head's number, which a group of heads would not know.
    groups = 1 if arguments.options.dropout_p else groups_of(arguments.k.shape[1])
    return (cached_all_gather_plan(arguments.problem, rank, groups) if narrow is None
            else all_gather_plan(arguments.problem, rank, groups, narrow))


def check_blocks(name: str, arguments: Arguments, group: dist.ProcessGroup) -> None:
    """Raise what a local call would raise where no backend takes it, in either pass: before a message is sent."""
    if name == "ulysses":
        q, k, v = arguments.q, arguments.k, arguments.v
        ranges = head_ranges(q.shape[1], dist.get_world_size(group))
        heads, of_keys = len(ranges[0]), len(key_ranges(ranges, arguments.call.group)[0])
        whole = [own.new_empty((own.shape[0], count, layout.length, own.shape[3])) for own, count, layout in (
            (q, heads, arguments.queries), (k, of_keys, arguments.keys), (v, of_keys, arguments.keys))]
        check_backends(whole, Operands(), OperatorOptions.of_mask(
            arguments.options.scale, arguments.mask, softcap=arguments.options.softcap,
            deterministic=arguments.options.deterministic, backend=arguments.options.backend))
        return
    rank = dist.get_rank(group)
    steps = _steps(name, arguments, rank)
    summed = summed_of(steps, rank)
    for step in steps:
        for block in step.blocks:
            check_block(arguments.call, block, step.heads, (arguments.q, arguments.k, arguments.v), summed)


def _ulysses(arguments: Arguments, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Exchange the sequence for heads, attend to all of it, and exchange back."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    q, k, v, operands = arguments.q, arguments.k, arguments.v, arguments.operands
    queries, keys = arguments.queries, arguments.keys
    ranges = head_ranges(q.shape[1], ranks)
    of_keys = key_ranges(ranges, q.shape[1] // k.shape[1])
    tensors = [q, k, v]
    where = [Exchanged(queries, ranges, q.shape[1]), *[Exchanged(keys, of_keys, k.shape[1])] * 2]
    own, packed = ranges[rank], arguments.sequences is not None  # which has whole operands on each rank
    bias, mask = (None if tensor is None else _of_heads(tensor, own) for tensor in (operands.bias, operands.mask))
    if operands.bias is not None and operands.bias.shape[2] > 1 and not packed:
        tensors.append(operands.bias)
        where.append(_exchanged_rows(operands.bias, queries, ranges))
    q, k, v, *rest = ToHeads.apply(group, where, *tensors)  # type: ignore[no-untyped-call]
    if rest:
        bias = rest[0]
    if operands.mask is not None and operands.mask.shape[2] > 1 and not packed:
        (mask,) = to_heads(group, [_exchanged_rows(operands.mask, queries, ranges)], [operands.mask])
    options = arguments.options
    lengths = arguments.packed_lengths
    # One of overloads, which is decided by a value.
    attend: Any = attention if lengths is None else partial(_attend_packed, lengths)
    result = attend(
        q, k, v, mask=_mask(arguments, mask), scale=options.scale, bias=bias, softcap=options.softcap,
        alibi_slopes=None if operands.alibi_slopes is None else operands.alibi_slopes[:, own.start:own.stop],
        sinks=None if operands.sinks is None else operands.sinks[own.start:own.stop],
        return_aux=("lse", "max_logit") if options.max_logit else ("lse",), deterministic=options.deterministic,
        backend=options.backend)
    out, *rows = result
    back = Exchanged(queries, ranges, arguments.q.shape[1])
    out, *rows = ToSequence.apply(  # type: ignore[no-untyped-call]
        group, [back] * (1 + len(rows)), out, *[row.unsqueeze(-1) for row in rows])
    return out, *[row.squeeze(-1) for row in rows]


def _attend_packed(lengths: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                   **options: Any) -> tuple[torch.Tensor, ...]:
    """Attend to packed sequences (1, h, total, d); return out and rows as they are of one sequence."""
    rows = [own.squeeze(0).transpose(0, 1) for own in (q, k, v)]
    attend: Any = attention_varlen  # of its overloads, as above
    out, *others = attend(*rows, **lengths, **options)
    return out.transpose(0, 1).unsqueeze(0), *[own.unsqueeze(0) for own in others]


def _mask(arguments: Arguments, tensor: torch.Tensor | None) -> Mask | TensorMask:
    """Put the mask of the whole sequences together again."""
    if tensor is None and arguments.documents is None:
        return arguments.mask
    documents = None
    if arguments.documents is not None:
        documents = documents_of(*(own.to(arguments.q.device) for own in arguments.documents))
    return TensorMask(arguments.mask, tensor, documents)


def _of_heads(operand: torch.Tensor, heads: Span) -> torch.Tensor:
    return operand if operand.shape[1] == 1 else operand[:, heads.start:heads.stop]


def _exchanged_rows(operand: torch.Tensor, queries: Any, ranges: Ranges) -> Exchanged:
    """Return where an operand with rows of queries goes: its heads, or the only one to every rank."""
    if operand.shape[1] == 1:
        return Exchanged(queries, tuple([Span(0, 1)] * len(ranges)), 1)
    return Exchanged(queries, ranges, operand.shape[1])
