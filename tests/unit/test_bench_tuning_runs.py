"""Which problems are tuned, and a search through the interpreter: the kernels run, and a wrong one is caught."""

from dataclasses import replace

import pytest
import torch

from tilewise.backends.base import Saved
from tilewise.backends.gluon import GluonBackend
from tilewise.backends.reference import ReferenceBackend
from tilewise.backends.triton import backend
from tilewise.bench import accuracy, tuning_runs
from tilewise.bench.compile_ahead import Task
from tilewise.bench.grids import Cell
from tilewise.bench.provenance import provenance
from tilewise.bench.shapes import shape_case
from tilewise.bench.timing import Regime
from tilewise.bench.tuning_runs import TuningPlan, Wanted, demand_gpu, rows_of, table_provenance, tasks, tune
from tilewise.compile_ahead.pool import DIED, AheadCompiler
from tilewise.errors import InvalidInput
from tilewise.kernels.triton.config import ForwardConfig
from tilewise.masks import causal
from tilewise.problem.options import NO_OPERANDS
from tilewise.tuning import search
from tilewise.tuning.table import Bucket, fields_of

CPU = torch.device("cpu")
QUICK = Regime("quick", turns=1, least_warmups=0, least_calls=1)
TINY = Wanted(widths=(64,), dtypes=(torch.float16,), masks=("causal",), lengths=(48,), tokens=48, hidden=128)


def test_a_task_is_a_kernel_that_calls_launch_on_16384_tokens_of_2048_elements():
    found = tasks(Wanted(widths=(64, 256), lengths=(512, 1024)), CPU)
    assert [task.kernel for task in found] == ["forward", "dkdv", "dq"] * 8
    case = found[-1].cell.case
    assert (case.b, case.hq, case.hk, case.sq, case.sk, case.d, case.dv) == (16, 8, 8, 1024, 1024, 256, 256)
    assert (case.layout, case.mask, found[-1].cell.dtype) == ("bshd", causal(), torch.bfloat16)
    assert len({(task.kernel, Bucket.of(task.problem(CPU))) for task in found}) == len(found)
    assert found[0].problem(CPU).direction == "forward"
    assert found[1].problem(CPU).direction == "backward"


def test_a_sequence_longer_than_all_tokens_is_one_sequence():
    (task, *_) = tasks(replace(TINY, lengths=(100,)), CPU)
    assert (task.cell.case.b, task.cell.case.sq) == (1, 100)


def test_kernels_that_are_named_are_tuned_for_every_width():
    assert [task.kernel for task in tasks(replace(TINY, kernels=("dk", "dv"), widths=(64, 128)), CPU)] == [
        "dk", "dv"] * 2


def test_where_dk_and_dv_take_a_launch_each_they_are_tuned_apart(monkeypatch):
    monkeypatch.setattr(tuning_runs, "split_dkdv", lambda problem, device: True)
    assert [task.kernel for task in tasks(TINY, CPU)] == ["forward", "dk", "dv", "dq"]


@pytest.mark.parametrize(("change", "words"), [
    ({"kernels": ("fwd",)}, "kernels has fwd; allowed are forward, dkdv, dk, dv, dq"),
    ({"widths": (96,)}, "widths has 96; allowed are 64, 128, 256"),
    ({"dtypes": (torch.float64,)}, "dtypes has float64; allowed are bfloat16, float16, float32"),
    ({"masks": ("window",)}, "masks has window; allowed are none, causal"),
    ({"lengths": (0,)}, "lengths has 0; allowed are 1 and more"),
    ({"lengths": ()}, "nothing to tune: widths, dtypes, masks and lengths need one value each"),
    ({"dtypes": (torch.float16, torch.bfloat16)}, "float16 and bfloat16, whose problems share their rows"),
])
def test_what_no_row_could_serve_is_refused(change, words):
    with pytest.raises(InvalidInput, match=words):
        tasks(replace(TINY, **change), CPU)


def test_gluon_has_kernels_of_its_own_on_the_same_problems(monkeypatch):
    monkeypatch.setattr(GluonBackend, "why_not", lambda self, problem: None)
    wanted = replace(TINY, backend="gluon", widths=(64, 128))
    assert [str(task) for task in tasks(wanted, CPU)] == [
        f"{kernel} b1_h{128 // width}_s48_d{width}_causal float16" for width in (64, 128)
        for kernel in ("hopper_forward", "hopper_backward")]
    (task,) = tasks(replace(wanted, widths=(64,), kernels=("hopper_backward",)), CPU)
    assert task.problem(CPU).direction == "backward"
    assert Task("hopper_forward", task.cell).problem(CPU).direction == "forward"
    with pytest.raises(InvalidInput, match="kernels has dq; allowed are hopper_forward, hopper_backward"):
        tasks(replace(wanted, kernels=("dq",)), CPU)
    with pytest.raises(InvalidInput, match=r"kernels has hopper_forward; allowed are forward, dkdv, dk, dv, dq\."):
        tasks(replace(TINY, kernels=("hopper_forward",)), CPU)


def test_gluon_is_not_tuned_where_it_does_not_run():
    with pytest.raises(InvalidInput, match="backend is 'gluon', which runs on Hopper GPUs"):
        tasks(replace(TINY, backend="gluon"), CPU)


def test_a_backend_without_a_table_is_not_tuned():
    with pytest.raises(InvalidInput, match="backend is 'cudnn'; allowed are triton, gluon, which have tables"):
        tasks(replace(TINY, backend="cudnn"), CPU)


def test_a_gluon_kernel_is_checked_and_timed_as_any_other(monkeypatch):
    """The reference stands for the kernels; the second tile's dk is wrong."""
    monkeypatch.setattr(GluonBackend, "why_not", lambda self, problem: None)
    monkeypatch.setattr(search, "ROUNDS", 2)
    monkeypatch.setattr(tuning_runs, "get_backend", lambda name: ReferenceBackend())
    seen = []

    def launch(kernel, problem, config):
        seen.append(config)
        number = len(seen)

        def forward(q, k, v, out, lse):
            made = ReferenceBackend().forward(problem, q, k, v)
            out.copy_(made.out)
            lse.copy_(made.lse)

        def backward(q, k, v, dout, lse, delta, dq, dk, dv):
            made = ReferenceBackend().forward(task_forward, q, k, v)
            for target, gradient in zip((dq, dk, dv), ReferenceBackend().backward(
                    problem, Saved(q, k, v, made.out, made.lse, NO_OPERANDS), dout, None)[:3], strict=True):
                target.copy_(gradient)
            dk.mul_(1.5 if number == 2 else 1.0)

        return forward if kernel == "hopper_forward" else backward

    monkeypatch.setattr(tuning_runs, "tile_launch", launch)
    wanted = replace(TINY, backend="gluon")
    task_forward = tasks(wanted, CPU)[0].problem(CPU)
    for kernel, faults in (("hopper_forward", 0), ("hopper_backward", 1)):
        seen.clear()
        ((task, finding),) = tune(TuningPlan(CPU, tasks(replace(wanted, kernels=(kernel,)), CPU), most=3, regime=QUICK))
        assert len(finding.faults) == faults
        rows, faulty = rows_of(task, finding, CPU)
        assert rows[0] | {"width": 64, "itemsize": 2, "masked": True, "length": 48, "candidates": 3 - faults} == rows[0]
        assert all("dk OVER BUDGET" in row["reason"] for row in faulty)
        chosen = fields_of(finding.choices[0].config)
        assert {name: rows[0][name] for name in chosen} == chosen
        assert rows[0]["heuristic"] == fields_of(seen[0])


def test_a_length_that_cannot_be_checked_is_refused(monkeypatch):
    monkeypatch.setitem(accuracy._ORACLE_PAIRS, "cpu", 48 * 47)
    with pytest.raises(InvalidInput, match="lengths has 48, too long to be checked"):
        tasks(TINY, CPU)


def test_without_a_gpu_it_says_that_one_is_needed():
    with pytest.raises(InvalidInput, match=r"device is 'cpu'.*allowed is a GPU"):
        demand_gpu(CPU)


def test_interpreted_kernels_are_not_tuned(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InvalidInput, match=r"TRITON_INTERPRET is 1.*unset it"):
        demand_gpu(torch.device("cuda"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    demand_gpu(torch.device("cuda"))


@pytest.fixture
def quick(device, monkeypatch):
    """A plan maker: two tiles a task, two rounds of one call."""
    if device.type == "cpu" and (reason := backend.why_not(tasks(TINY, CPU)[0].problem(CPU))):
        pytest.skip(reason)
    monkeypatch.setattr(search, "ROUNDS", 2)
    return lambda **wanted: TuningPlan(device, tasks(replace(TINY, **wanted), device), most=2, regime=QUICK)


@pytest.mark.interpret
def test_every_kernel_runs_with_every_tile_and_gives_the_right_result(quick, device):
    steps = []
    plan = replace(quick(kernels=("forward", "dkdv", "dk", "dv", "dq")), on_step=steps.append)
    found = list(tune(plan))
    assert [task for task, _ in found] == list(plan.tasks)
    for task, finding in found:
        rows, faults = rows_of(task, finding, device)
        assert faults == []
        assert len(rows) == 1
        assert rows[0] | {"width": 64, "itemsize": 2, "masked": True, "length": 48, "candidates": 2} == rows[0]
        assert rows[0]["ms"] > 0 < rows[0]["heuristic_ms"]
    assert any(step.startswith("dq ") and "timing 2 tiles" in step for step in steps)


@pytest.mark.interpret
@pytest.mark.parametrize(("kernel", "result"), [("forward", "out"), ("dkdv", "dk"), ("dk", "dk"), ("dv", "dv"),
                                                ("dq", "dq")])
def test_a_tile_whose_result_is_wrong_is_not_chosen(quick, device, monkeypatch, kernel, result):
    """The second tile's launch covers one program less than it should, so that a part stays unwritten."""
    right = tuning_runs.tile_launch
    plan = quick(kernels=(kernel,))
    made = []

    def wrong(name, problem, config):
        launch = right(name, problem, config)
        if config not in made:
            made.append(config)
        if len(made) == 2:
            launch.enqueue.grid = (launch.grid[0] - 1, 1, 1)
        return launch

    monkeypatch.setattr(tuning_runs, "tile_launch", wrong)
    ((task, finding),) = tune(plan)
    rows, faults = rows_of(task, finding, device)
    assert len(faults) == 1
    assert f"{result} OVER BUDGET" in faults[0]["reason"]
    assert [(row["block_m"], row["candidates"]) for row in rows] == [(made[0].block_m, 1)]


@pytest.mark.interpret
def test_a_tile_that_breaks_is_recorded_with_its_words(quick, device, monkeypatch):
    def broken(name, problem, config):
        def launch(*tensors):
            raise RuntimeError("out of registers")

        return launch

    monkeypatch.setattr(tuning_runs, "tile_launch", broken)
    ((task, finding),) = tune(quick(kernels=("forward",)))
    rows, faults = rows_of(task, finding, device)
    assert rows == []
    assert [fault["reason"] for fault in faults] == ["RuntimeError: out of registers"] * 2


@pytest.mark.interpret
def test_a_tile_that_ends_its_compiler_is_not_run(quick, monkeypatch):
    monkeypatch.setattr(AheadCompiler, "fault", lambda self, request: DIED)
    ((_, finding),) = tune(quick(kernels=("forward",)))
    assert finding.choices == ()
    assert {fault.reason for fault in finding.faults} == {DIED}


@pytest.mark.interpret
def test_a_spent_budget_starts_no_task(quick):
    assert list(tune(replace(quick(), budget=-1.0))) == []


def test_rows_hold_six_digits_and_no_time_for_a_heuristic_that_failed():
    config = ForwardConfig(64, 64, 4, 1)
    task = Task("forward", Cell("tune", shape_case(1, (2, 2), (48, 48), (64, 64), causal(), "bshd"), torch.float16))
    finding = search.Finding((search.Choice(config, 0.123456789, None, 3),), ())
    rows, _ = rows_of(task, finding, CPU)
    assert (rows[0]["ms"], rows[0]["heuristic_ms"]) == (0.123457, None)


def test_a_tables_provenance_says_on_what_with_what_and_how():
    facts = table_provenance(provenance(CPU, "tilewise tune"), CPU)
    assert list(facts) == ["device", "arch", "driver", "torch", "triton", "tilewise", "commit", "date", "command"]
    assert (facts["arch"], facts["torch"], facts["command"]) == ("interpreter", torch.__version__, "tilewise tune")
