"""Errors of results against dense float64 attention, and the budgets they are held to.

The oracle's memory and time grow with the square of the length, so a large problem is checked on part of its
key/value heads (each of which is a problem of its own), and a huge one on a shorter twin; ``CheckPlan`` says which.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilewise.bench.grids import Cell
from tilewise.testing import oracle
from tilewise.testing.inputs import Inputs
from tilewise.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, ErrorReport, compare

RESULTS = ("out", "lse", "dq", "dk", "dv")
_FACTOR = {"out": OUTPUT_FACTOR, "lse": OUTPUT_FACTOR, "dq": GRADIENT_FACTOR, "dk": GRADIENT_FACTOR,
           "dv": GRADIENT_FACTOR}
# Scores that are compared, one head at a time. Each is formed in float64 and in every order of the yardsticks:
# about 4 s of one CPU core for a cell of the cpu grid (torch 2.13).
_ORACLE_PAIRS = {"cpu": 2**23, "cuda": 2**31}
_MOST_GROUPS = 16


@dataclass(frozen=True)
class CheckPlan:
    """What is compared.

    Attributes:
        cell: the cell itself, or a shorter one with the same dims, heads, mask, dtype and layout.
        groups: (batch, key/value head) pairs that are compared.
        text: the same as words.
    """

    cell: Cell
    groups: tuple[tuple[int, int], ...]
    text: str

    @property
    def is_full_shape(self) -> bool:
        """Whether the lengths are the cell's own."""
        return not self.text.startswith("shorter")


def check_plan(cell: Cell, device: torch.device) -> CheckPlan:
    """Choose the largest part of a cell that the oracle can afford, at least one key/value head."""
    case = cell.case
    limit = _ORACLE_PAIRS.get(device.type, _ORACLE_PAIRS["cpu"])
    pairs = max(1, case.hq // max(1, case.hk) * case.sq * case.sk)
    total = case.b * case.hk
    if pairs > limit:
        shrink = math.sqrt(limit / pairs)
        sq, sk = (max(1, int(length * shrink)) for length in (case.sq, case.sk))
        shorter = replace(cell, case=replace(case, name=f"{case.name}_check_s{sq}x{sk}", sq=sq, sk=sk))
        return CheckPlan(shorter, ((0, 0),), f"shorter twin s{sq}x{sk}, 1 of {total} key/value heads")
    count = max(1, min(total, limit // pairs, _MOST_GROUPS))  # an empty batch has one group still: an empty slice
    chosen = [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]
    text = "full" if count >= total else f"{count} of {total} key/value heads"
    return CheckPlan(cell, tuple(divmod(index, case.hk) for index in chosen), text)


@dataclass(frozen=True)
class References:
    """Exact results in float64, and the yardsticks: dense attention in the tested dtype; of the plan's groups."""

    plan: CheckPlan
    exact: Mapping[str, torch.Tensor]
    yardsticks: Sequence[Mapping[str, torch.Tensor]]

    @classmethod
    def of(cls, plan: CheckPlan, inputs: Inputs, *, lse_grad: bool) -> "References":
        """Run the oracle and the yardsticks; without ``lse_grad``, no gradient arrives through lse."""
        given = [*inputs[:4], inputs.dlse if lse_grad else torch.zeros_like(inputs.dlse)]
        (exact,) = _by_group(_exact, plan, given)
        return cls(plan, exact, _by_group(_yardsticks, plan, given))

    def reports(self, got: Mapping[str, torch.Tensor]) -> list[ErrorReport]:
        """Compare results, by name, (b, h, s, d) of the whole check cell, each with its budget."""
        per_head = {"out", "lse", "dq"}
        return [
            compare(name, _groups(tensor, self.plan, queries=name in per_head), self.exact[name],
                    [yardstick[name] for yardstick in self.yardsticks], _FACTOR[name])
            for name, tensor in got.items()
        ]


_Five = Sequence[torch.Tensor]


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor,
           cell: Cell) -> Sequence[_Five]:
    mask, scale = cell.case.mask, cell.case.scale
    return [(*oracle.attend(q, k, v, mask, scale), *oracle.gradients(q, k, v, dout, dlse, mask, scale))]


def _yardsticks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor,
                cell: Cell) -> Sequence[_Five]:
    return oracle.yardsticks(q, k, v, dout, dlse, cell.case.mask, cell.case.scale)


def _by_group(compute: Callable[..., Sequence[_Five]], plan: CheckPlan,
              given: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Run dense computations one key/value head at a time; of each one's results, heads are joined along dim 1."""
    queries = (True, False, False, True, True)
    groups = []
    for group in plan.groups:
        alone = replace(plan, groups=(group,))
        sliced = (_groups(tensor.detach(), alone, queries=side) for tensor, side in zip(given, queries, strict=True))
        groups.append(compute(*sliced, plan.cell))
    return [
        {name: torch.cat(parts, dim=1) for name, parts in zip(RESULTS, zip(*heads, strict=True), strict=True)}
        for heads in zip(*groups, strict=True)
    ]


def _groups(tensor: torch.Tensor, plan: CheckPlan, *, queries: bool) -> torch.Tensor:
    """Pick the plan's groups out of a (b, h, ...) tensor with query heads or with key/value heads."""
    width = plan.cell.case.hq // plan.cell.case.hk if queries else 1
    return torch.cat([tensor[b : b + 1, h * width : (h + 1) * width] for b, h in plan.groups], dim=1)
