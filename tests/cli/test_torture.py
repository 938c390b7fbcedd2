"""``tilewise check --torture``."""

import csv

import pytest
import torch

from tilewise.bench.torture_rows import TortureRow
from tilewise.cli import session
from tilewise.testing.torture import CHECKS, Result, torture

MODULE = "unit.broken_attention"
FEW = ("ordinary", "one_query", "storage_bshd", "graph_of_training")


@pytest.fixture
def few_checks(monkeypatch):
    """Run four checks, in this process."""
    from tilewise.bench.torture_peers import implementation_named

    chosen = [check for check in CHECKS if check.name in FEW]
    calls = []

    def here(name, device, dtype, on_result, *, checks):
        assert len(checks) == len(CHECKS)
        calls.append((name, device, dtype))
        return torture(implementation_named(name), device, dtype, checks=chosen, on_result=on_result)

    monkeypatch.setattr(session, "torture_apart", here)
    return calls


def test_ours_passes_and_the_table_tells(run, few_checks):
    finished = run("check", "--torture", "--device", "cpu")
    assert finished.status == 0
    assert few_checks == [("tilewise", torch.device("cpu"), torch.bfloat16)]
    lines = finished.output.splitlines()
    assert any("one_query" in line and "pass" in line for line in lines)
    assert any("graph_of_training" in line and "n/a" in line for line in lines)
    assert "0 of 3" in finished.output
    assert "not applicable to tilewise, 1 check: CUDA graphs are for GPUs" in finished.output
    assert "FAILED" not in finished.output


def test_a_failure_of_ones_own_exits_with_1_its_sentence_and_its_issue(run, few_checks):
    finished = run("check", "--torture", "--implementation", f"{MODULE}:WRONG", "--dtype", "float32", "--device", "cpu")
    assert finished.status == 1
    (line,) = (line for line in finished.output.splitlines() if line.startswith("FAILED") and "one_query" in line)
    assert "dq: error" in line
    assert line.endswith("(issue: https://github.com/NVIDIA/cudnn-frontend/issues/1072)")
    assert "3 of 3" in finished.output


def test_a_failure_of_a_peer_is_none_of_ours(run, few_checks, monkeypatch):
    from tilewise.bench import torture_peers
    from unit import broken_attention

    monkeypatch.setattr(torture_peers, "_dense", lambda: broken_attention.WRONG.__class__(
        "naive", broken_attention.WRONG.attention, broken_attention.TAKES))
    finished = run("check", "--torture", "--implementation", "naive", "--dtype", "float32", "--device", "cpu")
    assert finished.status == 0
    assert "FAILED naive, float32, one_query: dq: error" in finished.output


def test_a_failure_of_ours_exits_with_1(run, few_checks, monkeypatch):
    from tilewise.backends.reference import ReferenceBackend

    forward = ReferenceBackend.forward

    def wrong(self, *arguments):
        results = forward(self, *arguments)
        results.out.mul_(1.5)
        return results

    monkeypatch.setattr(ReferenceBackend, "forward", wrong)
    monkeypatch.setenv("TILEWISE_FAST_PATH", "0")
    finished = run("check", "--torture", "--implementation", "tilewise:reference", "--dtype", "float32", "--device",
                   "cpu")
    assert finished.status == 1
    assert "FAILED tilewise:reference, float32, ordinary: out: error" in finished.output


def test_all_are_ours_and_the_peers_that_are_here(run, few_checks):
    finished = run("check", "--torture", "--implementation", "all", "--dtype", "float32,bfloat16", "--device", "cpu")
    assert [name for name, _, _ in few_checks] == [
        name for name in ("tilewise", "naive", "sdpa_math", "sdpa_flash") for _ in range(2)]
    assert [dtype for _, _, dtype in few_checks[:2]] == [torch.float32, torch.bfloat16]
    assert "not here: sdpa_cudnn: torch has this kernel for GPUs only" in finished.output


def test_rows_are_written_with_their_provenance(run, few_checks, tmp_path):
    file = tmp_path / "torture.csv"
    finished = run("check", "--torture", "--device", "cpu", "--csv", file, "--commit", "0123456789ab")
    assert f"wrote {file}" in finished.output
    with file.open(newline="", encoding="utf-8") as text:
        rows = [TortureRow(**record) for record in csv.DictReader(text)]
    assert [(row.check, row.status) for row in rows] == [
        ("ordinary", "pass"), ("one_query", "pass"), ("storage_bshd", "pass"), ("graph_of_training", "n/a")]
    assert {(row.implementation, row.dtype, row.commit, row.torch) for row in rows} == {
        ("tilewise", "bfloat16", "0123456789ab", torch.__version__)}


def test_json_has_the_rows_and_who_is_not_here(run, few_checks):
    written = run("check", "--torture", "--implementation", "all", "--device", "cpu", "--json").json
    assert {row["implementation"] for row in written["rows"]} == {"tilewise", "naive", "sdpa_math", "sdpa_flash"}
    assert "flash_attn2" in written["absent"]


def test_those_that_are_named_run_alone_each_implementation_in_a_process_of_its_own(run):
    chosen = [word for name in FEW[:2] for word in ("--only", name)]
    finished = run("check", "--torture", "--implementation", f"{MODULE}:RIGHT", "--dtype", "float32", "--device", "cpu",
                   *chosen, *chosen)
    assert finished.status == 0
    assert "0 of 2" in finished.output


def test_a_run_that_is_stopped_keeps_the_rows_so_far(run, monkeypatch, tmp_path):
    def stopped(name, device, dtype, on_result, *, checks):
        on_result(Result(checks[0], CHECKS[0].group, name, "pass"))
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "torture_apart", stopped)
    run("check", "--torture", "--device", "cpu", "--csv", tmp_path / "torture.csv")
    with (tmp_path / "torture.csv").open(encoding="utf-8") as file:
        assert [row["check"] for row in csv.DictReader(file)] == [CHECKS[0].name]


@pytest.mark.parametrize(("words", "message"), [
    (("--implementation", "naive"), "--implementation is given without --torture"),
    (("--csv", "rows.csv"), "--csv is given without --torture"),
    (("--only", "ordinary"), "--only is given without --torture"),
    (("--torture", "--only", "extraordinary"), "only is 'extraordinary'; allowed are ordinary, "),
    (("--commit", "0123456"), "--commit is given without --torture"),
    (("--torture", "--case", "gqa"), "--case is given beside --torture"),
    (("--torture", "--backend", "triton"), "--backend is given beside --torture"),
    (("--torture", "--sq", "64", "--d", "32"), "--sq and --d are given beside --torture"),
    (("--torture", "--seed", "3"), "--seed is given beside --torture"),
    (("--torture", "--verbose"), "--verbose is given beside --torture"),
    (("--torture", "--implementation", "flash_attn9"), "implementation is 'flash_attn9'; allowed are tilewise, "),
    (("--torture", "--implementation", "flash_attn2"), "implementation is 'flash_attn2', which cannot run on cpu: "
                                                       "FlashAttention-2 runs on GPUs only"),
    (("--torture", "--dtype", "int8"), "dtype is 'int8'"),
])
def test_misuse_exits_with_2_and_says_what_is_allowed(run, words, message):
    finished = run("check", "--device", "cpu", *words)
    assert finished.status == 2
    assert message in finished.errors


def test_help_lists_the_names(run):
    words = run("check", "--help").output
    assert "sdpa_cudnn" in words
    assert "flash_attn4" in words
