"""One backend's call beside the oracle's: what is compared, and through which outputs gradients arrive."""

from dataclasses import replace

import pytest
import torch

from tilewise import causal
from tilewise.backends.reference import ReferenceBackend
from tilewise.bench import accuracy, backend_checks
from tilewise.bench.accuracy import check_plan
from tilewise.bench.backend_checks import check_backends, check_call, check_configuration
from tilewise.bench.grids import Cell
from tilewise.dispatch import FINITE_PADDING
from tilewise.testing.cases import Case, case_named
from tilewise.testing.configurations import Call, draw
from tilewise.testing.inputs import make_inputs, make_operands

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["gqa", "everything"])
def test_max_logit_is_compared_where_a_case_asks_for_it(monkeypatch, name):
    cell = Cell("cases", replace(case_named(name), max_logit=True), torch.float32)
    (check,) = check_backends(cell, ["reference"], CPU)
    assert check.ok
    assert "max_logit" in [report.name for report in check.reports]
    forward = ReferenceBackend.forward

    def wrong(self, *arguments):
        results = forward(self, *arguments)
        return results._replace(max_logit=results.max_logit + 1e-3)

    monkeypatch.setattr(ReferenceBackend, "forward", wrong)
    (check,) = check_backends(cell, ["reference"], CPU)
    assert [report.name for report in check.reports if not report.ok] == ["max_logit"]


@pytest.mark.parametrize("lse_grad", [True, False])
def test_a_gradient_arrives_through_lse_only_where_it_is_asked_for(lse_grad):
    cell = Cell("cases", case_named("gqa"), torch.float32)
    inputs = make_inputs(cell.case, cell.dtype, CPU, requires_grad=True)
    operands = make_operands(cell.case, cell.dtype, CPU)
    nan = inputs._replace(dlse=torch.full_like(inputs.dlse, float("nan")))
    call = Call(nan, operands, inputs, operands)
    (check,) = check_call(cell, check_plan(cell, CPU), call, ["reference"], lse_grad=lse_grad)
    assert check.ok == (not lse_grad)


def test_a_configuration_of_which_the_oracle_can_afford_a_part_is_checked_in_part(monkeypatch):
    for limits in (accuracy._WHOLE_PAIRS, accuracy._ORACLE_PAIRS):
        monkeypatch.setitem(limits, "cpu", 4000)
    one = next(one for one in map(draw, range(100)) if one.case.sq > 100 and one.case.sk > 100)
    (check,) = check_configuration(one, ["reference"], CPU)
    assert check.checked.startswith("shorter twin")
    assert check.ok
    assert check.reports
    assert check.cell.case is one.case


def test_backends_that_ask_for_finite_padding_get_it_and_no_others(monkeypatch):
    """And so of what a mask hides beside lengths; without lengths it is for all of them NaN."""
    given = []

    def forward(self, problem, q, *rest):
        given.append(bool(q.isnan().any()))
        return computed(self, problem, q, *rest)

    computed = ReferenceBackend.forward
    monkeypatch.setattr(ReferenceBackend, "forward", forward)
    padded = Case("padded", b=2, sq=8, sk=8, d=16, dv=16, lengths_q=(3, 8), lengths_k=(8, 5))
    blind = Case("blind", sq=8, sk=5, d=16, dv=16, mask=causal("bottom_right"))
    for finite in ((), ("reference",)):
        monkeypatch.setattr(backend_checks, "FINITE_PADDING", finite)
        for case in (padded, blind):
            one = replace(draw(0), case=case, dtype=torch.float32, shift=0.0, placement="as_laid_out")
            (check,) = check_configuration(one, ["reference"], CPU)
            assert check.ok
    assert given == [True, True, False, True]
    assert FINITE_PADDING == ("cudnn",)


def test_a_configuration_decides_whether_lse_has_a_gradient():
    plain = replace(draw(0), case=case_named("mha"), dtype=torch.float32, shift=0.0, placement="as_laid_out")
    refusals = [check_configuration(replace(plain, lse_grad=lse_grad), ["torch"], CPU)[0].backward_refusal
                for lse_grad in (True, False)]
    assert refusals == ["has no gradient through lse", None]
