"""Errors against the oracle, on part of a problem where all of it would be too much."""

import pytest
import torch

from tilewise.bench import accuracy
from tilewise.bench.accuracy import References, check_plan
from tilewise.bench.grids import Cell
from tilewise.bench.options import make_tensors
from tilewise.bench.shapes import packed_case, shape_case
from tilewise.masks import causal
from tilewise.testing import oracle
from tilewise.testing.cases import case_named
from tilewise.testing.inputs import make_inputs, make_operands
from tilewise.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, compare

CPU = torch.device("cpu")


def cell(heads=(4, 2), s=32, b=2):
    return Cell("flags", shape_case(b, heads, (s, s), (16, 16), causal()), torch.float32)


def test_a_small_problem_is_checked_whole():
    plan = check_plan(cell(), CPU)
    assert plan.text == "full"
    assert plan.groups == ((0, 0), (0, 1), (1, 0), (1, 1))


def test_a_larger_one_is_checked_on_its_first_and_last_heads(monkeypatch):
    monkeypatch.setitem(accuracy._ORACLE_PAIRS, "cpu", 2 * 2 * 32 * 32)
    plan = check_plan(cell(), CPU)
    assert plan.text == "2 of 4 key/value heads"
    assert plan.groups == ((0, 0), (1, 1))
    assert plan.is_full_shape


def test_heads_are_compared_until_there_are_enough_pairs_and_one_head_is_whole_beyond(monkeypatch):
    monkeypatch.setitem(accuracy._ENOUGH_PAIRS, "cpu", 3 * 2 * 32 * 32)
    assert check_plan(cell(), CPU).text == "3 of 4 key/value heads"
    monkeypatch.setitem(accuracy._ENOUGH_PAIRS, "cpu", 600)
    plan = check_plan(cell(), CPU)
    assert plan.text == "1 of 4 key/value heads"
    assert plan.is_full_shape


def test_a_huge_one_is_checked_on_a_shorter_twin_that_the_limit_allows(monkeypatch):
    monkeypatch.setitem(accuracy._ORACLE_PAIRS, "cpu", 600)
    plan = check_plan(cell(), CPU)
    assert not plan.is_full_shape
    assert 2 * plan.cell.case.sq * plan.cell.case.sk <= 600
    assert plan.text.startswith(f"shorter twin s{plan.cell.case.sq}x{plan.cell.case.sk}")


def test_an_empty_batch_is_checked_whole_and_finds_nothing_wrong():
    empty = cell(b=0)
    inputs = make_inputs(empty.case, empty.dtype, CPU)
    plan = check_plan(empty, CPU)
    assert plan.text == "full"
    references = References.of(plan, inputs, lse_grad=True)
    for report in references.reports({"out": inputs.dout, "lse": inputs.dlse, "dk": inputs.k}):
        assert report.ok
        assert report.worst == ()


def test_budgets_come_from_every_order_of_the_yardsticks():
    """With one order, `tilewise check` called four sound results of the named cases wrong, the worst by 3.5 times its
    budget (CPU, torch 2.13)."""
    whole = cell(heads=(2, 1), b=1)
    inputs = make_inputs(whole.case, whole.dtype, CPU)
    first, *others = oracle.yardsticks(*inputs, whole.case.mask, None)
    references = References.of(check_plan(whole, CPU), inputs, lse_grad=True)
    reports = references.reports(dict(zip(("out", "lse", "dq", "dk", "dv"), first, strict=False)))
    for index, report in enumerate(reports):
        factor = OUTPUT_FACTOR if report.name in ("out", "lse") else GRADIENT_FACTOR
        all_orders = [first[index], *(other[index] for other in others)]
        assert report == compare(report.name, first[index], references.exact[report.name], all_orders, factor)
    assert any(report.max_budget > compare(report.name, got, references.exact[report.name], got, 3.0).max_budget
               for report, got in zip(reports, first[:5], strict=True))


def test_references_of_chosen_heads_are_those_heads_of_the_whole(monkeypatch):
    monkeypatch.setitem(accuracy._ORACLE_PAIRS, "cpu", 2 * 2 * 32 * 32)
    whole = cell()
    inputs = make_inputs(whole.case, whole.dtype, CPU)
    references = References.of(check_plan(whole, CPU), inputs, lse_grad=True)
    out, _ = oracle.attend(*inputs[:3], whole.case.mask, None)
    dq, dk, *_ = oracle.gradients(*inputs, whole.case.mask, None)
    torch.testing.assert_close(references.exact["out"], torch.cat([out[:1, :2], out[1:, 2:]], 1))
    torch.testing.assert_close(references.exact["dq"], torch.cat([dq[:1, :2], dq[1:, 2:]], 1))
    torch.testing.assert_close(references.exact["dk"], torch.cat([dk[:1, :1], dk[1:, 1:]], 1))


def test_a_case_with_options_is_checked_whole_with_every_gradient(monkeypatch):
    case = case_named("everything")
    inputs, operands = (make(case, torch.float32, CPU) for make in (make_inputs, make_operands))
    plan = check_plan(Cell("cases", case, torch.float32), CPU)
    assert (plan.text, plan.groups) == ("full", ())
    references = References.of(plan, inputs, operands, lse_grad=True)
    changes = oracle.Changes(operands, case.settings)
    exact = oracle.gradients(*inputs, case.mask, case.scale, changes)
    got = {name: gradient.float() for name, gradient in exact._asdict().items()}
    assert list(got) == ["dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks"]
    assert all(report.ok for report in references.reports(got))
    got["dbias"][0, 3, 1, 2] += 1.0
    assert [report.worst for report in references.reports(got) if not report.ok] == [(0, 3, 1, 2)]
    monkeypatch.setitem(accuracy._WHOLE_PAIRS, "cpu", 1000)
    shorter = check_plan(Cell("cases", case, torch.float32), CPU)
    assert shorter.cell.case.b * shorter.cell.case.hq * shorter.cell.case.sq * shorter.cell.case.sk <= 1000
    assert shorter.text == f"shorter twin s{shorter.cell.case.sq}x{shorter.cell.case.sk}"


def test_a_larger_case_with_options_is_checked_on_a_twin_of_fewer_heads_and_its_own_lengths(monkeypatch):
    whole = Cell("cases", case_named("everything"), torch.float32, learned=("bias",))
    monkeypatch.setitem(accuracy._WHOLE_PAIRS, "cpu", 2 * 3 * 49 * 70)
    plan = check_plan(whole, CPU)
    case = plan.cell.case
    assert (case.b, case.hq, case.hk, case.sq, case.sk) == (2, 2, 1, 49, 70)
    assert (case.bias, case.settings, plan.cell.learned) == (whole.case.bias, whole.case.settings, ("bias",))
    assert (plan.text, plan.groups) == ("twin of 1 instead of 2 key/value heads", ())
    assert plan.is_full_shape


PACKED = Cell("packed", packed_case((4, 2), (20, 0, 31, 7), 16, causal("top_left")), torch.float32)


def test_large_packed_sequences_are_checked_one_by_one_on_heads_that_the_limit_allows(monkeypatch):
    assert check_plan(PACKED, CPU).text == "full"
    assert not check_plan(PACKED, CPU).by_sequence
    pairs = 2 * (20**2 + 31**2 + 7**2)
    monkeypatch.setitem(accuracy._WHOLE_PAIRS, "cpu", 4 * 4 * 31**2 - 1)
    for heads, text in ((2, "full, by sequence"), (1, "1 of 2 key/value heads, by sequence")):
        monkeypatch.setitem(accuracy._ORACLE_PAIRS, "cpu", heads * pairs)
        plan = check_plan(PACKED, CPU)
        assert (plan.text, plan.cell, plan.by_sequence) == (text, PACKED, True)
        assert plan.groups == ((0, 0), (0, 1))[:heads]
    monkeypatch.setitem(accuracy._ORACLE_PAIRS, "cpu", pairs // 2)
    shorter = check_plan(PACKED, CPU)
    assert (shorter.cell.case.lengths_q, shorter.cell.case.lengths_k, shorter.cell.case.sq) == (
        (14, 0, 21, 4), (14, 0, 21, 4), 21)
    assert shorter.text == "shorter twin s21x21, 1 of 2 key/value heads, by sequence"


@pytest.mark.parametrize("cell", [PACKED, Cell("packed", case_named("packed"), torch.float32)], ids=str)
def test_sequences_one_by_one_are_what_they_are_together(cell, monkeypatch):
    tensors = make_tensors(cell, CPU)
    whole = References.of(check_plan(cell, CPU), *tensors, lse_grad=True)
    monkeypatch.setitem(accuracy._WHOLE_PAIRS, "cpu", 1)
    plan = check_plan(cell, CPU)
    assert plan.text == "full, by sequence"
    references = References.of(plan, *tensors, lse_grad=True)
    assert set(references.exact) == set(whole.exact)
    for name, tensor in references.exact.items():
        torch.testing.assert_close(tensor, whole.exact[name])
    got = {name: tensor.float() for name, tensor in whole.exact.items()}
    assert all(report.ok for report in references.reports(got))
    got["dk"][0, 1, 25, 3] += 0.1
    assert [report.worst for report in references.reports(got) if not report.ok] == [(0, 1, 25, 3)]


def test_packed_sequences_with_another_option_are_checked_whole(monkeypatch):
    monkeypatch.setitem(accuracy._WHOLE_PAIRS, "cpu", 1000)
    for name in ("packed_bias", "packed_everything", "padded", "packed_causal_bottom_right_gaps"):
        plan = check_plan(Cell("cases", case_named(name), torch.float32), CPU)
        assert not plan.by_sequence
        assert plan.text.startswith(("shorter twin", "twin of"))
        assert plan.cell.case.lengths_q is not None


@pytest.mark.parametrize("fault", [1e-3, float("nan")])
def test_one_wrong_element_of_a_chosen_head_is_found_where_it_is(fault):
    whole = cell()
    inputs = make_inputs(whole.case, whole.dtype, CPU)
    references = References.of(check_plan(whole, CPU), inputs, lse_grad=False)
    out = oracle.attend(*inputs[:3], whole.case.mask, None)[0].float()
    (sound,) = references.reports({"out": out})
    out[1, 3, 5, 7] += fault
    (report,) = references.reports({"out": out})
    assert sound.ok
    assert not report.ok
    assert report.worst[2:] == (5, 7)
