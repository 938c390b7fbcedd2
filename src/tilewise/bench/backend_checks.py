"""Hold one backend of this package against float64, through the public call, lse and its gradient included."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from tilewise.bench.accuracy import CheckPlan, References, check_plan
from tilewise.bench.checking import one_line
from tilewise.bench.grids import Cell
from tilewise.dispatch import FINITE_PADDING, get_backend
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands
from tilewise.testing.cases import Case
from tilewise.testing.configurations import Call, Configuration, make_call
from tilewise.testing.inputs import call, make_inputs, make_operands
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
        return max(self.reports, key=lambda report: report.share, default=None)


def check_backends(cell: Cell, backends: Iterable[str], device: torch.device, seed: int = 0) -> list[BackendCheck]:
    """Check each backend on one cell, on the same inputs."""
    plan = check_plan(cell, device)
    inputs = make_inputs(plan.cell.case, cell.dtype, device, seed, requires_grad=True)
    operands = make_operands(plan.cell.case, cell.dtype, device, seed, requires_grad=True)
    return check_call(cell, plan, Call(inputs, operands, inputs, operands), backends)


def check_configuration(configuration: Configuration, backends: Iterable[str],
                        device: torch.device) -> list[BackendCheck]:
    """Check each backend on one random configuration.

    NaN stands wherever it may, but for the backends that ask for finite padding.
    """
    cell = Cell("random", configuration.case, configuration.dtype)
    plan = check_plan(cell, device)
    drawn, names = replace(configuration, case=plan.cell.case), list(backends)
    finite = [name for name in names if drawn.case.has_lengths and name in FINITE_PADDING]
    others = [name for name in names if name not in finite]
    checks = {check.backend: check for nan, group in ((True, others), (False, finite)) if group
              for check in check_call(cell, plan, make_call(drawn, device, nan=nan), group,
                                      lse_grad=configuration.lse_grad)}
    return [checks[name] for name in names]


def check_call(cell: Cell, plan: CheckPlan, call: Call, backends: Iterable[str], *,
               lse_grad: bool = True) -> list[BackendCheck]:
    """Check each backend on the same tensors.

    Args:
        cell: the problem that the results name.
        plan: the part of it that is compared.
        call: the tensors of that part; q, k, v and the operands with a gradient are leaves.
        backends: by name.
        lse_grad: whether a gradient arrives through lse where a backend has one.
    """
    case = plan.cell.case
    problem = AttentionProblem.from_tensors(*call.inputs[:3], call.operands, mask=case.mask, scale=case.scale,
                                            settings=case.settings)
    references: dict[bool, References] = {}
    results = []
    for name in backends:
        refusal = get_backend(name).why_not(problem)
        if refusal is not None:
            results.append(BackendCheck(cell, name, plan.text, refusal=refusal))
            continue
        through_lse, takes_backward, backward_refusal = _backward_scope(name, problem, lse_grad=lse_grad)
        try:
            got = _compute(name, case, call, takes_backward=takes_backward, lse_grad=through_lse)
        except Exception as error:  # a backend that breaks is a failed check, and the other checks go on
            results.append(BackendCheck(cell, name, plan.text, failure=one_line(error)))
            continue
        if through_lse not in references:
            references[through_lse] = References.of(plan, call.clean_inputs, call.clean_operands,
                                                    lse_grad=through_lse)
        reports = tuple(references[through_lse].reports(got))
        results.append(BackendCheck(cell, name, plan.text, backward_refusal=backward_refusal, reports=reports))
    return results


def _backward_scope(name: str, problem: AttentionProblem, *, lse_grad: bool) -> tuple[bool, bool, str | None]:
    """Return whether lse gets a gradient, whether there is a backward at all, and the first refusal."""
    wanted, without_lse = (get_backend(name).why_not(problem.backward(lse_grad=through))
                           for through in (lse_grad, False))
    return lse_grad and wanted is None, wanted is None or without_lse is None, wanted


def _compute(name: str, case: Case, made: Call, *, takes_backward: bool, lse_grad: bool) -> dict[str, torch.Tensor]:
    (q, k, v, dout, dlse), operands = made.inputs, made.operands
    wanted = ("lse", "max_logit") if case.max_logit else ("lse",)
    result = call(case, (q, k, v), operands, return_aux=wanted, backend=name)
    got = result._asdict()
    if takes_backward:
        outputs, incoming = ((result.out, result.lse), (dout, dlse)) if lse_grad else ((result.out,), (dout,))
        leaves = {"q": q, "k": k, "v": v} | {
            name: operand for name, operand in zip(Operands._fields, operands.alone, strict=False)
            if operand is not None and operand.requires_grad}
        gradients = torch.autograd.grad(outputs, tuple(leaves.values()), incoming)
        got |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {result: tensor.detach() for result, tensor in got.items()}
