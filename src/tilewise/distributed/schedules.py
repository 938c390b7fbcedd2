"""The schedules: how a call on shards becomes steps and exchanges, and which one is chosen."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tilewise.distributed.arguments import Arguments
from tilewise.distributed.blocks import check_backends, check_block
from tilewise.distributed.call_plan import call_plan, planned_problem
from tilewise.distributed.cost_model import SCHEDULES, Estimate, Links, estimates, estimates_of_rows
from tilewise.distributed.function import Planned, StepsFunction
from tilewise.distributed.mesh import Ranks
from tilewise.distributed.ulysses import HeadExchange, attend_by_heads, over_rows, why_not_heads
from tilewise.errors import UnsupportedProblem
from tilewise.problem.options import Operands, OperatorOptions
from tilewise.validate.distributed import check_schedule


@dataclass(frozen=True)
class ScheduleExplanation:
    """The outcome of :func:`tilewise.distributed.explain`; prints as a table.

    Attributes:
        chosen: name of the schedule that a call would use.
        estimates: of each schedule that such a mesh can have what the cost model says of it, :class:`Estimate`:
            modelled, not measured.
        reasons: of each schedule why it does not take the call, or None.
        subject: the call in words.
    """

    chosen: str
    estimates: dict[str, Estimate]
    reasons: dict[str, str | None]
    subject: str

    def __str__(self) -> str:
        lines = [self.subject]
        for name, reason in self.reasons.items():
            outcome = "chosen" if name == self.chosen else "could serve" if reason is None else f"no: {reason}"
            estimate = self.estimates.get(name)
            modelled = "" if estimate is None else (
                f"modelled forward {estimate.seconds * 1e6:.0f} us, backward {estimate.backward_seconds * 1e6:.0f} us, "
                f"slowest rank receives {estimate.bytes_received} bytes and computes {estimate.pairs} pairs a head; ")
            lines.append(f"  {name:<10} {modelled}{outcome}")
        return "\n".join(lines)


def choose_schedule(arguments: Arguments, schedule: str | None, mesh: tuple[int, ...]) -> str:
    """Return the named schedule, or that of the least estimated time among those that take the call.

    The time is that of both passes where keys have a gradient, which is alike on all ranks, else of the forward pass.

    Args:
        arguments: the call.
        schedule: a name, or None.
        mesh: sizes of the mesh.

    Raises:
        InvalidInput: an unknown name.
        UnsupportedProblem: the named one, or every one, does not take the call.
    """
    reasons = {name: _why_not(name, arguments, mesh) for name in SCHEDULES}
    if schedule is None:
        taken = [name for name, reason in reasons.items() if reason is None]
        if not taken:
            raise UnsupportedProblem("no schedule takes this call", {name: str(own) for name, own in reasons.items()})
        costs = _estimates(arguments, mesh)
        has_backward = bool(arguments.keys_with_gradient)
        return min(taken, key=lambda name: costs[name].total(with_backward=has_backward))
    check_schedule(schedule, SCHEDULES)
    reason = reasons[schedule]
    if reason is not None:
        raise UnsupportedProblem(f"schedule {schedule!r} refuses this call", {schedule: reason})
    return schedule


def explain_schedule(arguments: Arguments, schedule: str | None, mesh: tuple[int, ...]) -> ScheduleExplanation:
    """Say what :func:`choose_schedule` chooses, and why; raises as it does."""
    reasons = {name: _why_not(name, arguments, mesh) for name in SCHEDULES}
    subject = arguments.description(schedule)
    if len(mesh) == 2:
        subject = f"mesh {mesh}: {mesh[1]} ranks exchange heads, a schedule goes over {mesh[0]}; {subject}"
    return ScheduleExplanation(choose_schedule(arguments, schedule, mesh), _estimates(arguments, mesh), reasons,
                               subject)


def _estimates(arguments: Arguments, mesh: tuple[int, ...]) -> dict[str, Estimate]:
    if len(mesh) == 1:
        return estimates(planned_problem(arguments), arguments.sizes, Links())
    rows = planned_problem(over_rows(arguments, mesh[1]))
    return estimates_of_rows(rows, arguments.queries, arguments.sizes, Links())


def _why_not(name: str, arguments: Arguments, mesh: tuple[int, ...]) -> str | None:
    """Return why a schedule does not take a call, or None."""
    if len(mesh) == 1:
        return why_not_heads(arguments, mesh[0]) if name == "ulysses" else None
    if name == "ulysses":
        return ("needs a mesh of one dim, got one of two: ranks of the second exchange heads with every schedule of "
                "the first")
    reason = why_not_heads(arguments, mesh[1])
    return None if reason is None else f"follows on an exchange of heads over the mesh's second dim, which {reason}"


def run_schedule(name: str, arguments: Arguments, ranks: Ranks) -> tuple[torch.Tensor, ...]:
    """Return out, lse and, where the options want it, max_logit of this rank's queries."""
    if name == "ulysses":
        exchange = _exchange_of_all(arguments, ranks)
        of_heads = exchange.to_heads(arguments, ranks.group)
        if of_heads.stand_ins is None:
            return exchange.to_sequence(attend_by_heads(of_heads), ranks.group)
        return exchange.to_sequence(run_steps("ring", over_rows(of_heads, ranks.count), ranks.group, 0), ranks.group)
    if ranks.heads is None:
        return run_steps(name, arguments, ranks.group, ranks.rank)
    exchange, size = _exchange_in_row(arguments, ranks, ranks.heads), dist.get_world_size(ranks.heads)
    of_row = over_rows(exchange.to_heads(arguments, ranks.heads), size)
    results = run_steps(name, of_row, ranks.group, dist.get_rank(ranks.group))
    return exchange.to_sequence(results, ranks.heads)


def _exchange_of_all(arguments: Arguments, ranks: Ranks) -> HeadExchange:
    return HeadExchange.of(arguments, dist.get_rank(ranks.group), (arguments.queries, arguments.keys))


def _exchange_in_row(arguments: Arguments, ranks: Ranks, row: dist.ProcessGroup) -> HeadExchange:
    return HeadExchange.in_row(arguments, dist.get_rank(ranks.group), dist.get_rank(row), dist.get_world_size(row))


def run_steps(name: str, arguments: Arguments, group: dist.ProcessGroup, rank: int) -> tuple[torch.Tensor, ...]:
    """Return the same of a schedule of steps, "ring" or "all_gather", as one rank of the group."""
    plan, operands = call_plan(name, arguments, rank), arguments.operands
    planned = Planned(group, rank, plan, arguments.call(plan.tensors, packs_documents=plan.packs_documents))
    results: tuple[torch.Tensor, ...] = StepsFunction.apply(  # type: ignore[no-untyped-call]
        planned, arguments.q, arguments.k, arguments.v, operands.bias, operands.alibi_slopes, operands.sinks,
        *(arguments.stand_ins or ()))
    return results


def check_blocks(name: str, arguments: Arguments, ranks: Ranks) -> None:
    """Raise what a local call would raise where no backend takes it, in either pass: before a message is sent."""
    rank = dist.get_rank(ranks.group)
    if name == "ulysses":
        arguments = _exchange_of_all(arguments, ranks).to_heads(arguments, None)
        if arguments.stand_ins is None:
            check_backends((arguments.q, arguments.k, arguments.v), Operands(), OperatorOptions.of_mask(
                arguments.options.scale, arguments.mask, softcap=arguments.options.softcap,
                deterministic=arguments.options.deterministic, backend=arguments.options.backend))
            return
        name, rank, arguments = "ring", 0, over_rows(arguments, ranks.count)
    if ranks.heads is not None:
        size = dist.get_world_size(ranks.heads)
        arguments = over_rows(_exchange_in_row(arguments, ranks, ranks.heads).to_heads(arguments, None), size)
    plan = call_plan(name, arguments, rank)
    call = arguments.call(plan.tensors, packs_documents=plan.packs_documents)
    for step in plan.steps:
        for block in step.blocks:
            check_block(call, block, step.heads, (arguments.q, arguments.k, arguments.v), plan.summed)
