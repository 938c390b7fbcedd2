"""Implementations by name, the suite in a process of its own, and its rows."""

import csv
import sys
from dataclasses import asdict

import pytest
import torch

from tilewise.bench import torture_peers
from tilewise.bench.provenance import Provenance
from tilewise.bench.torture_peers import implementation_named, implementation_names, is_own, missing, peer_names
from tilewise.bench.torture_rows import COLUMNS, row_of, write_torture_rows
from tilewise.bench.torture_runs import torture_apart
from tilewise.errors import InvalidInput
from tilewise.testing.torture import CHECKS, Result, torture

CPU = torch.device("cpu")
MODULE = "unit.broken_attention"
ORIGIN = Provenance("cpu", "", "2.13", "", "3.11", "0.1", "0123456789ab", "2026-11-25T00:00:00Z", "tilewise check")
BY_NAME = {check.name: check for check in CHECKS}


def test_a_death_and_a_hang_cost_a_check_each():
    told = []
    checks = ("one_query", "one_query_one_key", "length_113", "one_key", "more_keys")
    results = torture_apart(f"{MODULE}:ENDS_ITS_PROCESS", CPU, torch.float32, told.append, checks=checks, limit=4.0)
    assert results == told
    assert [(result.check, result.status, result.sentence) for result in results] == [
        ("one_query", "pass", ""), ("one_query_one_key", "fail", "ended its process (exit code 11)"),
        ("length_113", "pass", ""), ("one_key", "fail", "did not end within 4 s"), ("more_keys", "pass", "")]
    assert results[1].issue == ""
    assert results[0].issue.endswith("/cudnn-frontend/issues/1072")


def test_every_name_is_told_apart():
    names = implementation_names()
    assert {"tilewise", "tilewise:gluon", "naive", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex",
            "flash_attn2", "flash_attn3", "flash_attn3_fwd", "flash_attn4"} <= set(names)
    assert [name for name in names if is_own(name)] == [name for name in names if name.startswith("tilewise")]
    assert is_own("my_module:attention")


@pytest.mark.parametrize("name", ["flash_attn9", "tilewise:fast", "my-module:attention", "module:"])
def test_an_unknown_name_is_refused_with_all_that_are_known(name):
    with pytest.raises(InvalidInput, match=f"implementation is '{name}'; allowed are tilewise, .*flash_attn4, all, or"):
        implementation_named(name)


@pytest.mark.parametrize(("name", "message"), [
    ("no_such_module:attention", "there is none: No module named 'no_such_module'"),
    (f"{MODULE}:nobody", "there is none: module 'unit.broken_attention' has no attribute 'nobody'"),
    (f"{MODULE}:dense", r"which is a function; allowed is a tilewise.testing.torture.Implementation"),
])
def test_what_is_no_implementation_is_refused(name, message):
    with pytest.raises(InvalidInput, match=message):
        implementation_named(name)


def test_what_is_not_installed_is_told_with_what_to_install(monkeypatch):
    for provider in torture_peers.peer_providers():
        monkeypatch.setattr(type(provider), "missing", lambda self, device: f"{self.name} is not installed")
    for name, install in torture_peers._INSTALL.items():
        assert missing(name, torch.device("cuda")) == f"{name} is not installed; {install}"
    assert missing("tilewise", CPU) is None
    assert missing("sdpa_efficient", CPU) == "torch has this kernel for GPUs only"


@pytest.mark.parametrize("name", ["tilewise:torch", "tilewise:reference", "naive", "sdpa_math", "sdpa_flash"])
@pytest.mark.parametrize("check", ["ordinary_causal", "grouped_heads", "mask_of_each_head", "storage_bshd"])
def test_implementations_compute_what_they_declare(name, check):
    (result,) = torture(implementation_named(name), CPU, torch.float32, checks=[BY_NAME[check]])
    if name == "tilewise:torch" and result.status == "n/a":
        assert result.sentence.startswith("forward: ")  # the refusal is the backend's own sentence
        return
    assert (result.status, result.sentence) == ("pass", "")


def test_a_backend_that_refuses_is_not_applicable():
    (result,) = torture(implementation_named("tilewise:gluon"), CPU, torch.float32, checks=[BY_NAME["ordinary"]])
    assert result.status == "n/a"
    assert result.sentence.startswith("forward: ")


def test_all_of_our_own_refuse_what_none_takes(monkeypatch):
    answer = type("Answer", (), {"reasons": {(one, name): f"{name} is tired" for one in ("forward", "backward")
                                             for name in ("triton", "reference")}})
    monkeypatch.setattr(torture_peers, "explain", lambda *tensors, **options: answer)
    (result,) = torture(implementation_named("tilewise"), CPU, torch.float32, checks=[BY_NAME["ordinary"]])
    assert (result.status, result.sentence) == (
        "n/a", "forward, triton: triton is tired; forward, reference: reference is tired")


def test_deterministic_calls_of_flash_attn_ask_for_it(monkeypatch):
    """Each generation has a switch of its own, which torch's is handed on to."""
    calls = []

    class Module:
        @staticmethod
        def flash_attn_func(q, k, v, **options):
            calls.append(options)
            attended = torch.nn.functional.scaled_dot_product_attention(
                *(tensor.transpose(1, 2) for tensor in (q, k, v)), is_causal=options["causal"])
            return (attended.transpose(1, 2), None)

    monkeypatch.setitem(sys.modules, "flash_attn_interface", Module)
    results = torture(implementation_named("flash_attn3"), CPU, torch.bfloat16,
                      checks=[BY_NAME["ordinary_causal"], BY_NAME["same_bits_forward"]])
    assert [result.status for result in results] == ["pass", "pass"]
    assert {"deterministic" in options for options in calls[:1]} == {False}
    assert all(options["deterministic"] for options in calls[1:])
    assert calls[0]["softmax_scale"] == 0.125


def test_torch_is_asked_on_a_gpu_what_it_takes(monkeypatch):
    class Tensor:
        device = torch.device("cuda")

    asked = []
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *given: asked.append(given) or given)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params, debug: False)
    case = BY_NAME["grouped_heads"].case
    call = torture_peers.Call(case, Tensor(), Tensor(), Tensor(), {"causal": True, "scale": 1.0})
    refusal = implementation_named("sdpa_flash").why_not(call)
    assert refusal == "torch says that it does not take the call: without a reason"
    assert asked[0][3:] == (None, 0.0, True, True)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params, debug: True)
    assert implementation_named("sdpa_flash").why_not(call) is None


def test_rows_are_written_with_their_columns(tmp_path):
    result = Result("one_query", "edges", "sdpa_math", "fail", "dk: nan\nat once", "https://example", 0.123, lost=True)
    row = row_of(result, "bfloat16", ORIGIN)
    assert (row.sentence, row.seconds, row.version, row.commit) == ("dk: nan at once", "0.12", "", "0123456789ab")
    write_torture_rows(tmp_path / "new/torture.csv", [row])
    with (tmp_path / "new/torture.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == [asdict(row)]
    assert (tmp_path / "new/torture.csv").read_text("utf-8").splitlines()[0] == ",".join(COLUMNS)


def test_a_row_tells_the_version_of_a_package_that_is_here(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", {"flash-attn": "2.8.3"}.__getitem__)
    result = Result("one_query", "edges", "flash_attn2", "pass")
    assert row_of(result, "bfloat16", ORIGIN).version == "2.8.3"




def test_peers_are_those_of_the_bench():
    assert peer_names()[:2] == ["naive", "sdpa_math"]
