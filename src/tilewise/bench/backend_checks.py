"""Hold one backend of this package against float64, through the public call, lse and its gradient included."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tilewise.bench.accuracy import References, check_plan
from tilewise.bench.checking import one_line
from tilewise.bench.grids import Cell
from tilewise.dispatch import get_backend
from tilewise.problem import AttentionProblem
from tilewise.scores import Operands
from tilewise.testing.inputs import Inputs, call, make_inputs, make_operands
from tilewise.testing.tolerance import ErrorReport


@dataclass(frozen=True)
class BackendCheck:
    """One backend on one cell.

    Attributes:
        checked: the part of the problem that was compared.
        refusal: why the backend does not take the forward pass; nothing was compared then.
        backward_refusal: why it does not take the backward pass, or not the gradient through lse.
        failure: the error it raised where it should have computed.
        reports: a report a result.
    """

    cell: Cell
    backend: str
    checked: str
    refusal: str | None = None
    backward_refusal: str | None = None
    failure: str | None = None
    reports: tuple[ErrorReport, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing broke and every result keeps its budget; a refusal is no failure."""
        return self.failure is None and all(report.ok for report in self.reports)

    @property
    def worst(self) -> ErrorReport | None:
        """The report that uses most of its budget."""
        return max(self.reports, key=budget_share, default=None)


def budget_share(report: ErrorReport) -> float:
    """Part of the budget that an error uses, by maximum or mean, whichever is more; above 1 it is exceeded."""
    shares = [error / budget if budget else (0.0 if error == 0 else float("inf"))
              for error, budget in ((report.max_error, report.max_budget), (report.mean_error, report.mean_budget))]
    return max(shares)


def check_backends(cell: Cell, backends: Iterable[str], device: torch.device, seed: int = 0) -> list[BackendCheck]:
    """Check each backend on one cell, on the same inputs."""
    plan = check_plan(cell, device)
    inputs = make_inputs(plan.cell.case, cell.dtype, device, seed, requires_grad=True)
    operands = make_operands(plan.cell.case, cell.dtype, device, seed, requires_grad=True)
    problem = AttentionProblem.from_tensors(*inputs[:3], operands, mask=cell.case.mask, scale=cell.case.scale,
                                            settings=cell.case.settings)
    references: dict[bool, References] = {}
    results = []
    for name in backends:
        refusal = get_backend(name).why_not(problem)
        if refusal is not None:
            results.append(BackendCheck(cell, name, plan.text, refusal=refusal))
            continue
        lse_grad, takes_backward, backward_refusal = _backward_scope(name, problem)
        try:
            got = _compute(name, plan.cell, (inputs, operands), takes_backward=takes_backward, lse_grad=lse_grad)
        except Exception as error:  # a backend that breaks is a failed check, and the other checks go on
            results.append(BackendCheck(cell, name, plan.text, failure=one_line(error)))
            continue
        if lse_grad not in references:
            references[lse_grad] = References.of(plan, inputs, operands, lse_grad=lse_grad)
        reports = tuple(references[lse_grad].reports(got))
        results.append(BackendCheck(cell, name, plan.text, backward_refusal=backward_refusal, reports=reports))
    return results


def _backward_scope(name: str, problem: AttentionProblem) -> tuple[bool, bool, str | None]:
    """Return whether lse gets a gradient, whether there is a backward at all, and the first refusal."""
    with_lse, without_lse = (get_backend(name).why_not(problem.backward(lse_grad=lse_grad))
                             for lse_grad in (True, False))
    return with_lse is None, with_lse is None or without_lse is None, with_lse


def _compute(name: str, cell: Cell, tensors: tuple[Inputs, Operands], *, takes_backward: bool,
             lse_grad: bool) -> dict[str, torch.Tensor]:
    (q, k, v, dout, dlse), operands = tensors
    out, lse = call(cell.case, (q, k, v), operands, return_aux=("lse",), backend=name)
    got = {"out": out, "lse": lse}
    if takes_backward:
        outputs, incoming = ((out, lse), (dout, dlse)) if lse_grad else ((out,), (dout,))
        leaves = {"q": q, "k": k, "v": v} | {name: operand for name, operand in operands._asdict().items()
                                             if operand is not None and operand.requires_grad}
        gradients = torch.autograd.grad(outputs, tuple(leaves.values()), incoming)
        got |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {result: tensor.detach() for result, tensor in got.items()}
