"""``tilewise fuzz``."""

import shlex

import pytest
import torch

from tilewise.backends.reference import ReferenceBackend
from tilewise.cli import session
from tilewise.dispatch import BACKENDS
from tilewise.testing.configurations import draw

FEW = ("--seed", 3, "--count", 4, "--device", "cpu")


@pytest.fixture
def wrong_reference(monkeypatch):
    """The reference backend, wrong by 1 in one element of every output."""
    forward = ReferenceBackend.forward

    def wrong(self, problem, *arguments):
        results = forward(self, problem, *arguments)
        if problem.sq > 2 and problem.sk > 2:
            results.out[0, 0, 2, 0] += 1.0
        return results

    monkeypatch.setattr(ReferenceBackend, "forward", wrong)


def test_each_seed_is_one_configuration_checked_by_each_backend(run):
    finished = run("fuzz", *FEW, "--json")
    assert finished.status == 0
    assert [(check["seed"], check["backend"]) for check in finished.json] == [
        (seed, backend) for seed in range(3, 7) for backend in BACKENDS]
    for check in finished.json:
        configuration = draw(check["seed"], "small")
        assert check["ok"]
        assert check["case"] == f"small_{check['seed']}"
        assert check["configuration"] == str(configuration)
        if check["backend"] == "reference":
            names = [result["name"] for result in check["results"]]
            assert {"out", "lse", "dq", "dk", "dv"} <= set(names)
            assert ("max_logit" in names) == configuration.case.max_logit
            assert ("dbias" in names) == bool(configuration.case.bias)


@pytest.mark.usefixtures("wrong_reference")
def test_a_failure_exits_with_1_and_names_tensor_coordinate_and_command(run):
    finished = run("fuzz", *FEW, "--backend", "reference")
    assert finished.status == 1
    assert "FAILED reference, small_3 " in finished.output
    assert "out OVER BUDGET" in finished.output
    assert "worst at (0, 0, 2, 0)" in " ".join(finished.output.split())
    assert f"\n  {draw(3)}\n" in finished.output
    commands = [line.strip() for line in finished.output.splitlines() if line.startswith("  tilewise fuzz")]
    assert commands[0] == "tilewise fuzz --seed 3 --count 1 --size small --backend reference --device cpu"
    again = run(*shlex.split(commands[0])[1:])
    assert again.status == 1
    assert "FAILED reference, small_3 " in again.output
    assert "small_4" not in again.output


@pytest.fixture
def cut_at_the_second(monkeypatch):
    """The process is cut while it checks its second configuration."""
    check = session.check_configuration

    def cut(configuration, *arguments):
        if configuration.seed > 3:
            raise SystemExit(143)
        return check(configuration, *arguments)

    monkeypatch.setattr(session, "check_configuration", cut)


@pytest.mark.usefixtures("wrong_reference", "cut_at_the_second")
@pytest.mark.parametrize(("arguments", "stream", "other"), [
    ((), "output", "errors"), (("--json",), "errors", "output")], ids=["text", "json"])
def test_a_run_that_is_cut_has_told_the_failures_so_far(run, arguments, stream, other):
    finished = run("fuzz", *FEW, "--backend", "reference", *arguments)
    assert finished.status == 143
    told = getattr(finished, stream)
    assert told.count("FAILED reference, small_3 ") == 1
    assert "\n  tilewise fuzz --seed 3 --count 1 --size small --backend reference --device cpu\n" in told
    assert not getattr(finished, other).strip()


@pytest.mark.usefixtures("wrong_reference")
def test_a_terminal_counts_and_a_file_still_gets_the_failures(run, monkeypatch):
    """rich would write what is printed while a bar stands above that bar, on the other stream."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich take standard error for a terminal
    monkeypatch.setenv("TERM", "xterm")
    finished = run("fuzz", *FEW, "--backend", "reference")
    assert "small_6, 4 of 4, " in finished.errors
    assert "FAILED" not in finished.errors
    assert "FAILED reference, small_3 " in finished.output


@pytest.mark.usefixtures("wrong_reference")
def test_variations_of_a_seed_are_checked_and_named_one_by_one(run):
    finished = run("fuzz", *FEW, "--variations", 3, "--backend", "reference", "--json")
    assert [(check["seed"], check["variation"]) for check in finished.json] == [
        (seed, variation) for seed in range(3, 7) for variation in range(3)]
    assert [check["configuration"] for check in finished.json[:3]] == [str(draw(3, "small", n)) for n in range(3)]
    failed = next(check for check in finished.json if check["variation"] and not check["ok"])
    again = run(*shlex.split(failed["reproduce"])[1:], "--json").json
    assert [(check["configuration"], check["ok"]) for check in again] == [(failed["configuration"], False)]


@pytest.mark.usefixtures("wrong_reference")
def test_a_failure_is_a_value_of_json_too(run):
    finished = run("fuzz", *FEW, "--backend", "reference", "--size", "small", "--json")
    assert finished.status == 1
    check = finished.json[0]
    assert not check["ok"]
    assert check["reproduce"].startswith("tilewise fuzz --seed 3 --count 1 ")
    assert {result["name"]: result["ok"] for result in check["results"]}["out"] is False


def test_a_failure_of_the_interpreter_names_the_setting_it_needs():
    finding = session.Finding(draw(5), session.BackendCheck(None, "triton", "full"), torch.device("cpu"))
    assert finding.reproducer.startswith("TRITON_INTERPRET=1 tilewise fuzz --seed 5 ")
    on_gpu = session.Finding(draw(5, "large"), session.BackendCheck(None, "triton", "full"), torch.device("cuda"))
    assert on_gpu.reproducer == "tilewise fuzz --seed 5 --count 1 --size large --backend triton --device cuda"


def test_a_value_that_no_one_may_look_at_is_looked_at(run, monkeypatch):
    """NaN is planted: a backend that reads a key which no query sees fails though its weight would be 0."""
    forward = ReferenceBackend.forward

    def careless(self, problem, q, k, *rest):
        results = forward(self, problem, q, k, *rest)
        return results._replace(out=results.out + 0 * k.sum())

    hidden = next(seed for seed in range(100) if _hides_keys(draw(seed).case))
    assert run("fuzz", "--seed", hidden, "--count", 1, "--backend", "reference", "--device", "cpu").status == 0
    monkeypatch.setattr(ReferenceBackend, "forward", careless)
    assert run("fuzz", "--seed", hidden, "--count", 1, "--backend", "reference", "--device", "cpu").status == 1


def _hides_keys(case):
    return case.b and case.sq > 2 and case.sk > 2 and not case.mask.visible(case.sq, case.sk).any(0).all()


def test_refusals_are_counted_with_their_sentence_and_are_no_failure(run):
    finished = run("fuzz", "--count", 60, "--backend", "torch", "--device", "cpu")
    assert finished.status == 0
    facts = run("fuzz", "--count", 60, "--backend", "torch", "--device", "cpu", "--json").json
    reasons = [check["refusal"] or check["backward_refusal"] for check in facts]
    assert f"{reasons.count('takes no bias')} × refused by torch: takes no bias\n" in finished.output
    different = len({reason for reason in reasons if reason})
    assert different > 10
    assert f"and {different - 10} sentences more; --json has them all" in finished.output


@pytest.mark.parametrize(("device", "size"), [("cpu", "small"), ("cuda", "large")])
def test_the_device_decides_on_the_size(run, monkeypatch, device, size):
    asked = []
    monkeypatch.setattr("tilewise.cli.inputs.usable_device", torch.device)
    monkeypatch.setattr(session, "fuzz_session", lambda configurations, *_: asked.extend(configurations) or [])
    assert run("fuzz", "--count", 2, "--device", device).status == 0
    assert [configuration.size for configuration in asked] == [size, size]


@pytest.mark.parametrize(("arguments", "words"), [
    (("--seed", 2**31 - 1, "--count", 2), "seed is 2147483648; allowed are 0 to 2147483647"),
    (("--backend", "abacus"), "backend is 'abacus'; allowed are"),
])
def test_bad_input_exits_with_2_before_anything_is_computed(run, arguments, words):
    finished = run("fuzz", *arguments, "--device", "cpu")
    assert finished.status == 2
    assert words in finished.errors
    assert run("fuzz", "--size", "huge").status == 2
