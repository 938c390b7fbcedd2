"""``tilewise compile``: its refusals, what it asks of the library, and what it prints of an answer."""

import json
from pathlib import Path

import pytest
import torch

from tilewise import causal, window
from tilewise.cli import session
from tilewise.compile_ahead import GPUS, CallShape, Kernel, Report

COMPILE = ("compile", "--device", "h200")
PLACE = Path("/caches/triton/KEY")


@pytest.fixture
def asked(monkeypatch):
    """Answer in the library's place: a kernel that was there, one that was compiled, one that failed if it is wanted.

    Returns what was asked for, and takes the failure.
    """
    seen = {"failure": None}

    def compile_ahead(calls, *, device, workers, on_kernel):
        seen.update(calls=calls, device=device, workers=workers)
        texts = tuple(map(str, calls))
        kernels = [Kernel("forward_kernel", texts, PLACE, cached=True),
                   Kernel("backward_kernel", texts[:1], PLACE.with_name("OTHER"), cached=False, seconds=1.26)]
        if seen["failure"]:
            kernels.append(Kernel("dq_kernel", texts[:1], Path("/caches/tilewise/dq.cubin"), cached=False,
                                  failure=seen["failure"]))
        for done, kernel in enumerate(kernels, 1):
            on_kernel(kernel, done, len(kernels))
        return Report(GPUS["h200"], tuple(kernels), ("b1 h8 s16 d128 float64",))

    monkeypatch.setattr(session, "compile_ahead", compile_ahead)
    return seen


def test_it_asks_for_a_call_of_each_length_with_the_flags_of_explain(run, asked):
    finished = run(*COMPILE, "--sq", "512,1024", "--b", 2, "--hq", 16, "--hk", 4, "--d", 64, "--dv", 32, "--dtype",
                   "float16", "--mask", "causal & window:127,0", "--softcap", 30, "--sinks", "--layout", "bshd",
                   "--deterministic", "--backend", "triton", "--forward-only", "--workers", 3, "--json")
    assert finished.status == 0
    fields = {"b": 2, "hq": 16, "hk": 4, "d": 64, "dv": 32, "dtype": torch.float16, "mask": window(127, 0),
              "softcap": 30.0, "sinks": True, "layout": "bshd", "deterministic": True, "backend": "triton",
              "backward": False}
    assert asked["calls"] == [CallShape(512, **fields), CallShape(1024, **fields)]
    assert (asked["device"], asked["workers"]) == ("h200", 3)


def test_defaults_are_the_librarys(run, asked):
    assert run("compile", "--sq", 512, "--packed", 4, "--sk", 256, "--json").status == 0
    assert asked["calls"] == [CallShape(512, packed=4, sk=256)]
    assert (asked["device"], asked["workers"]) == (None, None)


def test_people_read_each_kernel_its_calls_and_the_caches(run, asked):
    finished = run(*COMPILE, "--sq", 512)
    assert finished.status == 0
    lines = finished.output.splitlines()
    (there,) = [line for line in lines if "forward_kernel" in line]
    assert "b1 h8 s512 d128 bfloat16" in there
    assert "was there" in there
    (made,) = [line for line in lines if "backward_kernel" in line]
    assert "1.3" in made
    assert "compiled" in made
    assert "NVIDIA H200, sm_90, 132 multiprocessors" in finished.output
    assert "nothing to compile: b1 h8 s16 d128 float64" in lines
    assert "cache /caches/triton" in lines


def test_a_kernel_that_fails_gives_status_1_and_its_reason(run, asked):
    asked["failure"] = "the compiler ended its process"
    finished = run(*COMPILE, "--sq", 512)
    assert finished.status == 1
    assert "FAILED dq_kernel, of b1 h8 s512 d128 bfloat16: the compiler ended its process" in finished.output
    assert "cache /caches/tilewise" in finished.output
    finished = run(*COMPILE, "--sq", 512, "--json")
    assert finished.status == 1
    assert not finished.json["ok"]
    assert [kernel["failure"] for kernel in finished.json["kernels"]] == [None, None, asked["failure"]]


def test_json_has_all_that_is_known(run, asked):
    facts = run(*COMPILE, "--sq", 512, "--json").json
    assert facts["gpu"] == {"name": "NVIDIA H200", "capability": [9, 0], "multiprocessors": 132}
    assert facts["kernels"][1] == {"name": "backward_kernel", "calls": ["b1 h8 s512 d128 bfloat16"],
                                   "place": "/caches/triton/OTHER", "cached": False, "seconds": 1.26, "failure": None}
    assert facts["folders"] == ["/caches/triton"]
    assert facts["idle"] == ["b1 h8 s16 d128 float64"]
    assert facts["ok"]


@pytest.fixture
def model(tmp_path):
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 1024,
              "head_dim": 64, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_model_gives_heads_head_dims_and_dtype(run, asked, model):
    assert run(*COMPILE, "--model", model, "--sq", "512,1024", "--b", 2, "--json").status == 0
    fields = {"b": 2, "hq": 16, "hk": 4, "d": 64, "dv": 64, "dtype": torch.float16, "mask": causal(), "layout": "bshd"}
    assert asked["calls"] == [CallShape(512, **fields), CallShape(1024, **fields)]
    assert run(*COMPILE, "--model", model, "--sq", 512, "--dtype", "bfloat16", "--forward-only", "--json").status == 0
    assert [(call.dtype, call.backward) for call in asked["calls"]] == [(torch.bfloat16, False)]


@pytest.mark.parametrize(("flag", "value"), [("hq", 8), ("mask", "causal"), ("packed", 2), ("layout", "bhsd")])
def test_a_model_and_what_it_answers_are_refused_together(run, flag, value):
    finished = run(*COMPILE, "--sq", 512, "--model", "nowhere", f"--{flag}", value)
    assert finished.status == 2
    assert f"--model and --{flag} are both given; allowed beside a model are --sq, --b, --dtype" in finished.errors


def test_a_model_that_cannot_be_read_is_refused(run, tmp_path):
    pytest.importorskip("transformers")
    finished = run(*COMPILE, "--sq", 512, "--model", tmp_path)
    assert finished.status == 2
    assert f"--model is '{tmp_path}', and Transformers cannot read its configuration" in finished.errors


def test_lengths_that_are_no_numbers_are_refused(run):
    finished = run(*COMPILE, "--sq", "512,many")
    assert finished.status == 2
    assert "--sq is '512,many'; allowed are integers" in finished.errors


def test_an_unknown_gpu_is_refused(run, monkeypatch):
    finished = run("compile", "--sq", 512, "--device", "h2000")
    assert finished.status == 2
    assert "device is 'h2000'; allowed are a100-40gb" in finished.errors


@pytest.mark.aot
@pytest.mark.slow
def test_what_it_compiles_is_there_the_second_time(run, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = (*COMPILE, "--sq", 256, "--d", 16, "--backend", "triton", "--forward-only", "--workers", 1, "--json")
    first, second = run(*command).json, run(*command).json
    assert [kernel["cached"] for kernel in (*first["kernels"], *second["kernels"])] == [False, True]
    assert [kernel["place"] for kernel in first["kernels"]] == [kernel["place"] for kernel in second["kernels"]]
    assert second["folders"] == [str(tmp_path)]
