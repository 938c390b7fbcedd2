"""Errors of results against dense float64 attention, and the budgets they are held to.

The oracle's memory and time grow with the square of the length, so a large problem is checked on part of its
key/value heads (each of which is a problem of its own), and a huge one on a shorter twin; ``CheckPlan`` says which.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilewise.bench.grids import Cell
from tilewise.bench.options import options_of
from tilewise.problem.options import NO_OPERANDS, Operands
from tilewise.testing import oracle
from tilewise.testing.inputs import Inputs
from tilewise.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, ErrorReport, compare

_OUTPUTS = ("out", "lse", "max_logit")
_PER_QUERY_HEAD = ("out", "lse", "max_logit", "dq")
# Scores that are compared, one head at a time. Each is formed in float64 and in every order of the yardsticks:
# about 4 s of one CPU core for a cell of the cpu grid (torch 2.13).
_ORACLE_PAIRS = {"cpu": 2**23, "cuda": 2**31}
# Of several heads, as many as have these together: enough to meet every kind of tile. 16 heads of 4096 tokens on a GPU.
_ENOUGH_PAIRS = {"cpu": 2**23, "cuda": 2**28}
# A case with options is in memory whole: up to 90 bytes a score (dropout, s 1024, torch 2.13), 48 GB here.
_WHOLE_PAIRS = {"cpu": 2**23, "cuda": 2**29}
_MOST_GROUPS = 16


@dataclass(frozen=True)
class CheckPlan:
    """What is compared.

    Attributes:
        cell: the cell itself, or a twin with fewer heads or, where one is too many, shorter lengths; the same else.
        groups: (batch, key/value head) pairs that are compared, each by itself; none of a case with options, which is
            compared whole: heads and batch may share an operand.
        text: the same as words.
        by_sequence: whether each of the packed sequences is a problem of its own, without operands.
    """

    cell: Cell
    groups: tuple[tuple[int, int], ...]
    text: str
    by_sequence: bool = False

    @property
    def is_full_shape(self) -> bool:
        """Whether the lengths are the cell's own."""
        return not self.text.startswith("shorter")


def check_plan(cell: Cell, device: torch.device) -> CheckPlan:
    """Choose the largest part of a cell that the oracle can afford, at least one key/value head."""
    whole, by_head, enough = (limits.get(device.type, limits["cpu"])
                              for limits in (_WHOLE_PAIRS, _ORACLE_PAIRS, _ENOUGH_PAIRS))
    if not cell.case.has_options:
        return _plan_by_head(cell, by_head, enough)
    plan = _whole_plan(cell, whole)
    if plan.cell == cell or cell.case.packed != "tight" or options_of(cell.case) != ("packed",):
        return plan
    # Whole, every sequence would be as long as the longest.
    plan = _plan_by_head(cell, by_head, enough)
    return replace(plan, text=f"{plan.text}, by sequence", by_sequence=True)


def _plan_by_head(cell: Cell, limit: int, enough: int) -> CheckPlan:
    case = cell.case
    entries, _ = case.stored("q")
    pairs = max(1, case.hq // max(1, case.hk) * case.dense_pairs // max(1, entries))
    total = entries * case.hk
    if pairs > limit:
        shorter = _shorter(cell, limit / pairs)
        lengths = f"s{shorter.case.sq}x{shorter.case.sk}"
        return CheckPlan(shorter, ((0, 0),), f"shorter twin {lengths}, 1 of {total} key/value heads")
    # An empty batch has one group still: an empty slice.
    count = max(1, min(total, min(limit, enough) // pairs, _MOST_GROUPS))
    chosen = [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]
    text = "full" if count >= total else f"{count} of {total} key/value heads"
    return CheckPlan(cell, tuple(divmod(index, case.hk) for index in chosen), text)


def _whole_plan(cell: Cell, limit: int) -> CheckPlan:
    """Keep the lengths as long as one key/value head of every batch is not too much: kernels differ by lengths."""
    case = cell.case
    pairs = case.b * case.hq * case.sq * case.sk
    if pairs <= limit:
        return CheckPlan(cell, (), "full")
    hk = limit * case.hk // pairs
    if hk:
        fewer = replace(case, name=f"{case.name}_check_hk{hk}", hq=hk * case.hq // case.hk, hk=hk)
        return CheckPlan(replace(cell, case=fewer), (), f"twin of {hk} instead of {case.hk} key/value heads")
    shorter = _shorter(cell, limit / pairs)
    return CheckPlan(shorter, (), f"shorter twin s{shorter.case.sq}x{shorter.case.sk}")


def _shorter(cell: Cell, share: float) -> Cell:
    """Return the cell with lengths that leave this share of its pairs."""
    case = cell.case
    (sq, *lengths_q), (sk, *lengths_k) = (
        [int(length * math.sqrt(share)) or min(length, 1) for length in (longest, *(lengths or ()))]
        for longest, lengths in ((case.sq, case.lengths_q), (case.sk, case.lengths_k)))
    return replace(cell, case=replace(
        case, name=f"{case.name}_check_s{sq}x{sk}", sq=sq, sk=sk,
        lengths_q=None if case.lengths_q is None else tuple(lengths_q),
        lengths_k=None if case.lengths_k is None else tuple(lengths_k)))


@dataclass(frozen=True)
class References:
    """Exact results in float64, and the yardsticks: dense attention in the tested dtype; of the plan's groups."""

    plan: CheckPlan
    exact: Mapping[str, torch.Tensor]
    yardsticks: Sequence[Mapping[str, torch.Tensor]]

    @classmethod
    def of(cls, plan: CheckPlan, inputs: Inputs, operands: Operands = NO_OPERANDS, *, lse_grad: bool) -> "References":
        """Run the oracle and the yardsticks; without ``lse_grad``, no gradient arrives through lse."""
        given = [*inputs[:4], inputs.dlse if lse_grad else torch.zeros_like(inputs.dlse)]
        (exact,) = _by_group(_exact, plan, given, operands)
        return cls(plan, exact, _by_group(_yardsticks, plan, given, operands))

    def reports(self, got: Mapping[str, torch.Tensor]) -> list[ErrorReport]:
        """Compare results, by name, (b, h, s, d) of the whole check cell, each with its budget."""
        return [
            compare(name, _groups(tensor, self.plan, queries=name in _PER_QUERY_HEAD), self.exact[name],
                    [yardstick[name] for yardstick in self.yardsticks],
                    OUTPUT_FACTOR if name in _OUTPUTS else GRADIENT_FACTOR)
            for name, tensor in got.items()
        ]


_Named = dict[str, torch.Tensor]


def _exact(given: Sequence[torch.Tensor], cell: Cell, operands: Operands) -> list[_Named]:
    q, k, v, dout, dlse = given
    mask, scale, changes = cell.case.mask, cell.case.scale, oracle.Changes(operands, cell.case.settings)
    out, lse = oracle.attend(q, k, v, mask, scale, changes)
    exact = {"out": out, "lse": lse}
    if cell.case.max_logit:
        exact["max_logit"] = oracle.max_logit(q, k, mask, scale, changes)
    return [exact | _present(oracle.gradients(q, k, v, dout, dlse, mask, scale, changes)._asdict())]


def _yardsticks(given: Sequence[torch.Tensor], cell: Cell, operands: Operands) -> list[_Named]:
    q, k, v, dout, dlse = given
    changes = oracle.Changes(operands, cell.case.settings)
    samples = oracle.yardsticks(q, k, v, dout, dlse, cell.case.mask, cell.case.scale, changes)
    return [_present(sample._asdict()) for sample in samples]


def _present(results: Mapping[str, torch.Tensor | None]) -> _Named:
    return {name: tensor for name, tensor in results.items() if tensor is not None}


def _by_group(compute: Callable[[Sequence[torch.Tensor], Cell, Operands], list[_Named]], plan: CheckPlan,
              given: Sequence[torch.Tensor], operands: Operands) -> list[_Named]:
    """Run dense computations one key/value head at a time; of each one's results, heads are joined along dim 1."""
    given = [tensor.detach() for tensor in given]
    if not plan.groups:
        return compute(given, plan.cell, operands)
    queries = (True, False, False, True, True)
    groups = []
    for group in plan.groups:
        alone = replace(plan, groups=(group,))
        sliced = [_groups(tensor, alone, queries=side) for tensor, side in zip(given, queries, strict=True)]
        groups.append(_by_sequence(compute, plan.cell, sliced) if plan.by_sequence
                      else compute(sliced, plan.cell, operands))
    return [{name: torch.cat([part[name] for part in heads], dim=1) for name in heads[0]}
            for heads in zip(*groups, strict=True)]


def _by_sequence(compute: Callable[[Sequence[torch.Tensor], Cell, Operands], list[_Named]], cell: Cell,
                 given: Sequence[torch.Tensor]) -> list[_Named]:
    """Run dense computations one packed sequence at a time; of each one's results, positions are joined along dim 2."""
    sequences = []
    for queries, keys in zip(cell.case.spans("q"), cell.case.spans("k"), strict=True):
        spans = (queries, keys, keys, queries, queries)
        alone = [tensor[:, :, span.start:span.stop] for tensor, span in zip(given, spans, strict=True)]
        sequences.append(compute(alone, cell, NO_OPERANDS))
    return [{name: torch.cat([part[name] for part in parts], dim=2) for name in parts[0]}
            for parts in zip(*sequences, strict=True)]


def _groups(tensor: torch.Tensor, plan: CheckPlan, *, queries: bool) -> torch.Tensor:
    """Pick the plan's groups, or all for none, out of a (b, h, ...) tensor with query or with key/value heads."""
    if not plan.groups:
        return tensor
    width = plan.cell.case.hq // plan.cell.case.hk if queries else 1
    return torch.cat([tensor[b : b + 1, h * width : (h + 1) * width] for b, h in plan.groups], dim=1)
