"""``tilewise tune``: its refusals, and with a search that knows its answers, what it prints and writes."""

import json
from dataclasses import asdict

import pytest

from tilewise.backends.gluon import GluonBackend
from tilewise.cli import session
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.kernels.triton.config import DqConfig, ForwardConfig
from tilewise.tuning.search import Choice, Fault, Finding
from tilewise.tuning.table import read_table

TUNE = ("tune", "--device", "cpu", "--widths", 64, "--lengths", 512, "--masks", "causal")


def test_without_a_gpu_it_exits_with_2_and_says_that_one_is_needed(run):
    finished = run("tune", "--device", "cpu")
    assert finished.status == 2
    assert "allowed is a GPU" in finished.errors
    assert finished.output == ""


@pytest.fixture
def searched(monkeypatch):
    """Let the CPU pass for a GPU, and answer for its kernels; the last task is beyond the budget."""
    def tune(plan):
        searched.plan = plan
        for task in plan.tasks[:2]:
            kind = ForwardConfig if task.kernel == "forward" else DqConfig
            best = Choice(kind(64, 64, 4, 3), 0.5, 0.75, 12)
            yield task, Finding((best,), (Fault(kind(256, 256, 4, 4), "OutOfResources: shared memory"),))

    def searched():
        return searched.plan

    monkeypatch.setattr("tilewise.bench.tuning_runs.demand_gpu", lambda device: None)
    monkeypatch.setattr(session, "tune", tune)
    return searched


def test_it_writes_a_table_a_kernel_and_prints_rows_faults_and_what_is_left(run, searched, tmp_path):
    finished = run(*TUNE, "--kernels", "forward,dq,dk", "--out", tmp_path)
    assert finished.status == 0
    for kernel in ("forward", "dq"):
        path = tmp_path / "interpreter" / f"{kernel}.16bit.json"
        (row,) = read_table(path, kernel)
        assert (row["width"], row["masked"], row["length"], row["block_n"], row["ms"]) == (64, True, 512, 64, 0.5)
        table = json.loads(path.read_text(encoding="utf-8"))
        assert table["faults"][0]["reason"] == "OutOfResources: shared memory"
        assert table["provenance"]["command"].startswith("tilewise")
        assert f"wrote {path}" in finished.output
    assert not (tmp_path / "interpreter" / "dk.16bit.json").exists()
    assert "64 x 64" in finished.output
    assert "0.75" in finished.output
    assert "dq.16bit.json: 1 not used: OutOfResources: shared memory" in finished.output
    assert "left out to keep to the time budget: dk " in finished.output


def test_a_table_carries_the_stated_commit(run, searched, tmp_path):
    assert run(*TUNE, "--kernels", "forward", "--commit", "0123abc", "--out", tmp_path).status == 0
    table = json.loads((tmp_path / "interpreter" / "forward.16bit.json").read_text(encoding="utf-8"))
    assert table["provenance"]["commit"] == "0123abc"


def test_json_holds_rows_faults_left_and_files(run, searched, tmp_path):
    report = run(*TUNE, "--kernels", "forward", "--out", tmp_path, "--json").json
    assert [row["heuristic_ms"] for row in report["rows"]["forward.16bit.json"]] == [0.75]
    assert [fault["block_m"] for fault in report["faults"]["forward.16bit.json"]] == [256]
    assert report["left"] == []
    assert report["files"] == [str(tmp_path / "interpreter" / "forward.16bit.json")]


def test_flags_shape_the_search(run, searched, tmp_path):
    run("tune", "--device", "cpu", "--kernels", "dq", "--widths", "64,128", "--dtypes", "float16,float32", "--masks",
        "none", "--lengths", "256,512", "--candidates", 7, "--budget", 30, "--out", tmp_path, "--json")
    plan = searched()
    assert [str(task) for task in plan.tasks][:2] == [
        "dq b64_h32_s256_d64_none float16", "dq b32_h32_s512_d64_none float16"]
    assert len(plan.tasks) == 8
    assert (plan.most, plan.budget) == (7, 30.0)


def test_of_gluon_it_writes_tables_of_its_own_kernels(run, monkeypatch, tmp_path):
    config = HopperForwardConfig(block_n=128, consumers=3, ping_pong=True)
    monkeypatch.setattr("tilewise.bench.tuning_runs.demand_gpu", lambda device: None)
    monkeypatch.setattr(GluonBackend, "why_not", lambda self, problem: None)
    monkeypatch.setattr(session, "tune", lambda plan: iter([(plan.tasks[0], Finding((Choice(config, 0.5, 0.6, 9),),
                                                                                    ()))]))
    finished = run(*TUNE, "--backend", "gluon", "--out", tmp_path)
    assert finished.status == 0
    (row,) = read_table(tmp_path / "interpreter" / "hopper_forward.16bit.json", "hopper_forward")
    assert row == {"width": 64, "itemsize": 2, "masked": True, "length": 512, **asdict(config), "ms": 0.5,
                   "heuristic": row["heuristic"], "heuristic_ms": 0.6, "candidates": 9}
    words = " ".join(finished.output.split())
    assert "block_n 128" in words
    assert "hopper_backward b32_h32_s512_d64_causal bfloat16" in words


def test_a_flag_that_no_table_knows_exits_with_2(run, searched):
    finished = run(*TUNE, "--kernels", "forwards")
    assert finished.status == 2
    assert "kernels has forwards; allowed are forward, dkdv, dk, dv, dq" in finished.errors
