"""benchmarks/transformers_sweep.py: it runs, it tells outcomes apart, and its committed rows meet the bar."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is not installed: nothing to compare with")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/transformers_sweep.py"
ROWS = ROOT / "benchmarks/results/cpu/transformers.csv"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tiny_transformers
    import transformers_checks
    import transformers_sweep

    return SimpleNamespace(sweep=transformers_sweep, checks=transformers_checks, tiny=tiny_transformers)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The rows of three types, as the command writes them."""
    out = tmp_path_factory.mktemp("sweep") / "rows.csv"
    command = [sys.executable, str(SCRIPT), "run", "--types", "llama", "t5", "vit", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    assert done.stdout.splitlines()[-1] == "3 of 3 types, last vit"
    return out


def test_three_types_give_what_eager_gives(ran, scripts):
    rows = scripts.sweep.read_rows(ran)
    assert {row.outcome for row in rows} == {"same"}
    checks = {model_type: {row.check for row in own} for model_type, own in scripts.sweep.by_type(rows).items()}
    assert checks == {"llama": set(scripts.checks.CHECKS), "t5": set(scripts.checks.CHECKS),
                      "vit": {"forward", "backward"}}
    assert all(0 < float(row.difference) <= scripts.checks.TOLERANCE for row in rows if row.check != "forward")
    assert all(row.torch == torch.__version__ and row.transformers and row.date for row in rows)


def test_rows_of_other_types_stay_when_some_are_run_again(ran, scripts, monkeypatch, tmp_path):
    out = tmp_path / "rows.csv"
    out.write_text(ran.read_text())
    record = {"model_type": "llama", "model": "Llama", "check": "forward", "outcome": "differs", "difference": "1",
              "reason": "", "seconds": "0"}
    monkeypatch.setattr(scripts.sweep, "in_process", lambda types, seconds: [[record]])
    scripts.sweep.sweep(["llama"], out, 1)
    outcomes = {name: scripts.sweep.outcome_of(own)
                for name, own in scripts.sweep.by_type(scripts.sweep.read_rows(out)).items()}
    assert outcomes == {"llama": "differs", "t5": "same", "vit": "same"}


AT = """import os, time
print('{"is": "at", "model_type": "a", "model": "A", "check": "forward"}', flush=True)
"""


@pytest.mark.parametrize(("worker", "reason"), [
    (AT + "os.abort()", "the process ended with status -6"), (AT + "time.sleep(60)", "silent for 2 s")])
def test_a_process_that_ends_or_hangs_costs_the_check_it_was_at(worker, reason, scripts, monkeypatch, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(worker)
    monkeypatch.setattr(scripts.sweep, "HERE", script)
    monkeypatch.setattr(scripts.sweep, "GRACE_SECONDS", 1)
    [rows] = scripts.sweep.in_process(["a", "b"], 1)  # the next process goes on with b
    assert [(row["model_type"], row["check"], row["outcome"], row["reason"]) for row in rows] == [
        ("a", "forward", "fails", reason)]


def test_a_check_has_its_time(scripts):
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(scripts.checks.OutOfTimeError, match=r"^longer than 1 s$"), scripts.checks.limited(1):
        signal.pause()
    assert signal.getsignal(signal.SIGALRM) is before


def test_differences_are_read_against_the_largest_number(scripts):
    difference = scripts.checks.difference
    wanted = {"output": torch.tensor([100.0, 1.0])}
    assert difference({"output": torch.tensor([100.0, 1.5])}, wanted) == pytest.approx(0.005)
    assert difference({"output": torch.tensor([float("nan"), 1.0])}, wanted) == float("inf")
    assert difference({"output": torch.zeros(3)}, wanted) == float("inf")
    assert difference({}, wanted) == float("inf")
    gradients = {"gradient of a": torch.tensor([1.0]), "gradient of b": torch.tensor([1e-9])}
    off = gradients | {"gradient of b": torch.tensor([2e-9])}
    assert difference(off, gradients) == pytest.approx(1e-7)


@pytest.fixture
def subject(scripts):
    """A Llama, and what counts its calls of tilewise."""
    calls = scripts.checks.register()
    found = next(scripts.checks.subjects("llama", 60))
    return found, calls


def test_another_number_differs_and_an_error_fails(scripts, subject, monkeypatch):
    """What a wrong attention function gives is neither eager's, nor SDPA's, nor rounding."""
    from transformers import AttentionInterface

    llama, calls = subject
    own = scripts.checks.integration.attention_forward

    def off(*arguments, **named):
        out, _ = own(*arguments, **named)
        return out * 1.01, None

    def broken(*arguments, **named):
        raise ValueError("broken on purpose")

    for name in ("tilewise", "tilewise_average"):
        AttentionInterface.register(name, calls.counted(off))
    found, _ = scripts.checks.checked(llama, "forward", calls, 60)
    assert found.outcome == "differs"
    AttentionInterface.register("tilewise", broken)
    found, _ = scripts.checks.checked(llama, "forward", calls, 60)
    assert found.outcome == "fails"
    assert "broken on purpose" in found.reason
    assert "sdpa runs" in found.reason


def test_what_tilewise_refuses_is_told_apart_and_so_is_what_eager_does_not_run(scripts, subject):
    llama, calls = subject
    refused = scripts.tiny.Call({**llama.call.arguments, "output_attentions": True}, llama.call.length)
    llama.call = refused
    found, _ = scripts.checks.checked(llama, "forward", calls, 60)
    assert (found.outcome, "UnsupportedProblem" in found.reason) == ("refused", True)
    llama.call = scripts.tiny.Call({"input_ids": "no tokens"})
    found, _ = scripts.checks.checked(llama, "forward", calls, 60)
    assert found.outcome == "eager_fails"


def test_rows_that_see_no_key_are_told_apart(scripts, subject):
    """All of the second entry is padding: each of its rows has eager's average, or 0."""
    llama, calls = subject
    padding = torch.ones(2, 9, dtype=torch.long)
    padding[1] = 0
    llama.call = scripts.tiny.Call(llama.call.arguments | {"attention_mask": padding})
    found, _ = scripts.checks.checked(llama, "forward", calls, 60)
    assert found.outcome == "rows_without_keys"


def test_committed_rows_have_no_wrong_number_and_few_refusals(scripts):
    """At most five types are refused or fail, and each has a sentence."""
    types = scripts.sweep.by_type(scripts.sweep.read_rows(ROWS))
    outcomes = {name: scripts.sweep.outcome_of(own) for name, own in types.items()}
    counts = Counter(outcomes.values())
    assert set(counts) <= set(scripts.sweep.OUTCOMES)
    assert counts["differs"] == 0
    refused = {name for name, outcome in outcomes.items() if outcome in ("refused", "fails")}
    assert len(refused) <= 5
    assert refused <= set(scripts.sweep.SENTENCES)
    assert len(types) > 300
    assert counts["same"] > 250
