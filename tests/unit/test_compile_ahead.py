"""Compiling ahead: the kernels are those that calls launch, and the caches serve many processes, read-only too."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compiled.compile_process import INSTALLED, VERSIONS
from tilewise import attention, causal, chunk, documents, window
from tilewise.compile_ahead import GPUS, CallShape, Gpu, calls_of_model, compile_ahead
from tilewise.compile_ahead.gpu import gpu_of
from tilewise.errors import InvalidInput, TilewiseError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("launched_kernels.py")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is said where there is no GPU")


def environment_of(version, cache):
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    if version != INSTALLED:
        folder = ROOT / ".triton" / version
        if not folder.is_dir():
            pytest.fail(f"Triton {version} is not at {folder}: run 'make triton-versions'")
        paths.insert(0, str(folder))
    return os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(cache),
                         "TILEWISE_CACHE": str(cache)}


def finished(command, environment):
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_launches_look_up_what_was_compiled_ahead_and_nothing_else(version, tmp_path):
    calls = ("gluon", "triton", "cuda") if version == INSTALLED else ("gluon", "triton")
    seen = finished([sys.executable, str(SCRIPT), str(tmp_path), *calls], environment_of(version, tmp_path))
    assert seen["failures"] == []
    assert seen["ahead"] == seen["launched"]
    assert seen["left"] == []
    assert {"attention_forward_kernel", "attention_backward_dkdv_kernel"} <= set(seen["names"])
    assert any(name.startswith("hopper_backward") for name in seen["names"]), seen["names"]


# Processes that call at once, each with the head dim that an argument names; each tells the size of what it was handed,
# or what was raised.
AT_ONCE = """
import json, os, sys
from tilewise.compile_ahead import GPUS, CallShape
from tilewise.compile_ahead.gpu import Settings, on_fake_gpu, prepare

def told(d):
    sizes = []
    try:
        with on_fake_gpu(lambda name, compile_kernel, file=None: sizes.append(len(compile_kernel().asm["cubin"]))):
            CallShape(128, hq=2, d=d, backend="triton", backward=False)()
    except OSError as error:
        return type(error).__name__
    return sizes

prepare(GPUS["h200"], Settings.here())
pipes = []
for d in map(int, sys.argv[1:]):
    pipes.append(os.pipe())
    if os.fork() == 0:
        os.write(pipes[-1][1], json.dumps(told(d)).encode())
        os._exit(0)
print(json.dumps([json.loads(os.read(read, 1000)) for read, _ in pipes]))
"""


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_processes_write_a_folder_at_once_and_read_one_that_cannot_be_written(version, tmp_path):
    """And one that does not find its kernel there raises, which docs/compile-ahead.md warns of."""
    environment = environment_of(version, tmp_path)
    writer = [sys.executable, "-c", AT_ONCE]
    (size,), *others = finished([*writer, "16", "16"], environment)
    assert size > 1000
    assert others == [[size]]
    with read_only(tmp_path) as around:
        *sizes, missing = finished([*around, *writer, *["16"] * 2, "32"], environment)
    assert sizes == [[size]] * 2
    assert missing in ("OSError", "PermissionError")


class read_only:  # noqa: N801 - a context manager
    """Keep a folder from being written inside the block; gives what commands that read it begin with.

    Root may write where no permission is, so it sees the folder through a mount that is read-only, in a namespace of
    the command's own.
    """

    def __init__(self, folder):
        self.folder = folder

    def __enter__(self):
        if os.geteuid() == 0:
            mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
            around = ["unshare", "--mount", "sh", "-c", mount, str(self.folder)]
            if subprocess.run([*around, "true"], capture_output=True, check=False).returncode:
                pytest.skip("root can write every folder, and may not mount one read-only here")
            return around
        self._set(0o555)
        return []

    def __exit__(self, *exc_info):
        if os.geteuid():
            self._set(0o755)

    def _set(self, mode):
        for folder in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
            folder.chmod(mode)


ON_GPU = """
import json, os, sys, time, torch, tilewise as tw
from pathlib import Path
from tilewise.compile_ahead import CallShape, compile_ahead

def call(sq):
    q, k, v = (torch.randn(2, sq, h, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
               for h in (8, 2, 2))
    out = tw.attention(q, k, v, mask=tw.causal())
    out.backward(torch.randn_like(out))
    torch.cuda.synchronize()

def kept():
    return sorted(str(path) for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))

if __name__ == "__main__":
    report = compile_ahead([CallShape(2048, b=2, hq=8, hk=2, mask=tw.causal(), layout="bshd")])
    before, start = kept(), time.perf_counter()
    call(2048)
    print(json.dumps({"ok": report.ok, "compiled": len(before), "more": sorted(set(kept()) - set(before)),
                      "seconds": time.perf_counter() - start}))
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_a_first_call_on_this_gpu_compiles_nothing_more(tmp_path):
    script = tmp_path / "on_gpu.py"
    script.write_text(ON_GPU)
    seen = finished([sys.executable, str(script)], environment_of(INSTALLED, tmp_path / "cache"))
    assert seen["ok"]
    assert seen["compiled"] > 0
    assert seen["more"] == []


@pytest.mark.aot
@pytest.mark.slow
def test_kernels_of_several_calls_are_compiled_once_and_a_function_is_a_call(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    told = []
    shape = CallShape(256, hq=2, d=64, backend="triton", backward=False)
    report = compile_ahead([shape, own_call, CallShape(16, dtype=torch.float64)], device=GPUS["a100-80gb"], workers=1,
                           on_kernel=lambda *state: told.append(state))
    (kernel,) = report.kernels
    assert kernel.calls == (str(shape), str(own_call))
    assert kernel.place.parent == tmp_path
    assert report.folders == (tmp_path,)
    assert (kernel.cached, kernel.failure) == (False, None)
    assert kernel.seconds > 0
    assert told == [(kernel, 1, 1)]
    assert report.ok
    assert report.idle == ("b1 h8 s16 d128 float64",)
    again = compile_ahead([shape], device="a100-80gb", workers=1)
    assert [(kernel.cached, kernel.seconds) for kernel in again.kernels] == [(True, None)]


# A training step of a model of Transformers, and its calls by their shapes; what each of them looks up.
MODEL = """
import json, torch, transformers
from tilewise.compile_ahead import GPUS, calls_of_model
from tilewise.compile_ahead.gpu import Settings, prepare
from tilewise.compile_ahead.worker import found_in
from tilewise.integrations.transformers import register

prepare(GPUS["h200"], Settings.here())
register()
config = transformers.MistralConfig(
    hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_hidden_layers=2, vocab_size=64,
    intermediate_size=64, sliding_window=256, attn_implementation="tilewise", dtype=torch.bfloat16)

def step():
    with torch.device("cuda"):
        model = transformers.MistralForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(2, 512, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()

(call,) = calls_of_model(config, [512], b=2)
print(json.dumps([sorted({str(kernel.place) for kernel in found_in(one)}) for one in (step, call)]))
"""


@pytest.mark.aot
@pytest.mark.slow
def test_a_models_shapes_launch_what_a_training_step_of_it_launches(tmp_path):
    pytest.importorskip("transformers")
    step, call = finished([sys.executable, "-c", MODEL], environment_of(INSTALLED, tmp_path))
    assert step == call
    assert len(step) > 2


def own_call():
    """The same kernel as the shape's in another way: an alignment is named, and the batch is larger."""
    q = torch.empty(4, 2, 256, 64, dtype=torch.bfloat16, device="cuda")
    attention(q, q, q, backend="triton")


def without_a_kernel():
    raise ValueError("of its own")


@pytest.mark.aot
@pytest.mark.slow
def test_what_fails_in_a_compilation_is_told_of_its_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    report = compile_ahead([fails_later], device="h200", workers=1)
    (kernel,) = report.kernels
    assert (kernel.failure, kernel.seconds) == ("RuntimeError: made a second time", None)
    assert not report.ok


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.skipif(find_spec("cuda") is None, reason="cuda-bindings is not installed")
def test_a_kernel_that_was_compiled_and_not_kept_is_a_failure(monkeypatch, tmp_path):
    """The CUDA kernels' compilation warns where it cannot write, and the report said that all of them were there."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "file" / "kernels"))
    shape = CallShape(64, hq=1, d=64, dtype=torch.float32, backend="cuda_ieee", backward=False)
    report = compile_ahead([shape], device="h200", workers=1)
    assert report.kernels
    for kernel in report.kernels:
        assert kernel.failure == (f"OSError: compiled, and not kept: {kernel.place} cannot be written; set "
                                  "TILEWISE_CACHE to a folder that can be written")
    assert not report.ok


def fails_later(made=[]):  # noqa: B006 - how often a process has made it
    if made:
        raise RuntimeError("made a second time")
    made.append(None)
    own_call()


@pytest.mark.slow
def test_a_process_that_ends_says_how_a_script_is_written(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(TilewiseError, match=r"calls\[0\], <function ends .*call compile_ahead under `if __name__"):
        compile_ahead([ends], device="h200", workers=1)


def ends():
    os._exit(3)


@pytest.mark.parametrize(("calls", "message"), [
    ((), r"calls is \(\); allowed is a sequence of one or more calls"),
    (7, "calls is 7; allowed is a sequence"),
    ((own_call, "own_call"), r"calls\[1\] is a str; allowed is a CallShape, or a function without arguments"),
    ((lambda: None,), r"calls\[0\] is <function <lambda>.*another process cannot be handed.*at the top level"),
], ids=["none", "number", "text", "lambda"])
def test_what_is_no_call_is_refused(calls, message):
    with pytest.raises(InvalidInput, match=message):
        compile_ahead(calls, device="h200")


@pytest.mark.parametrize("workers", [0, True, "2"])
def test_a_number_of_workers_that_has_no_meaning_is_refused(workers):
    with pytest.raises(InvalidInput, match=f"workers is {workers!r}; allowed is an integer of 1 and more"):
        compile_ahead([own_call], device="h200", workers=workers)


def test_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InvalidInput, match=r"TRITON_INTERPRET is 1.*allowed is 0, or unset"):
        compile_ahead([own_call], device="h200")


@pytest.mark.parametrize(("call", "message"), [
    (CallShape(64, hq=4, hk=3), r"calls\[1\] is b1 h4x3 s64 d128 bfloat16, and cannot be made: InvalidInput: k has 3"),
    (CallShape(64, backend="gluon", dtype=torch.float32), "cannot be made: UnsupportedProblem: backend 'gluon'"),
    (without_a_kernel, "cannot be made: ValueError: of its own"),
], ids=["heads", "backend", "function"])
def test_a_call_that_cannot_be_made_is_named_with_its_reason(call, message, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(InvalidInput, match=message):
        compile_ahead([CallShape(16, dtype=torch.float64), call], device="h200", workers=1)


@pytest.mark.parametrize(("fields", "message"), [
    ({"sq": 0}, "sq is 0; allowed is an integer of 1 and more"),
    ({"b": True}, "b is True; allowed is an integer"),
    ({"dv": 64.0}, "dv is 64.0; allowed is an integer"),
    ({"dtype": "bfloat16"}, "dtype is 'bfloat16'; allowed is a torch.dtype"),
    ({"mask": "causal"}, "mask is a str; allowed is causal"),
    ({"mask": documents(torch.zeros(1, 64, dtype=torch.int64))}, "mask is a TensorMask.*pass compile_ahead a function"),
    ({"layout": "sbhd"}, "layout is 'sbhd'; allowed are 'bhsd', 'bshd'"),
    ({"packed": 0}, "packed is 0 and b is 1; allowed are 1 or more packed sequences"),
    ({"packed": 2, "b": 2}, "packed is 2 and b is 2; .*with b=1"),
], ids=str)
def test_a_shape_that_has_no_meaning_is_refused(fields, message):
    with pytest.raises(InvalidInput, match=message):
        CallShape(**{"sq": 64} | fields)


def test_a_shape_prints_as_what_it_is():
    assert str(CallShape(64, sk=128, hq=8, hk=2, d=192, dv=128, mask=causal("top_left"), softcap=30.0, sinks=True,
                         dropout_p=0.1, deterministic=True, backend="triton", backward=False)) == (
        "b1 h8x2 s64x128 d192x128 bfloat16 causal(alignment='top_left') softcap=30.0 sinks dropout_p=0.1 deterministic "
        "backend=triton forward")
    assert str(CallShape(64, packed=3)) == "b1 h8 s64 d128 bfloat16 3 packed"


@pytest.mark.parametrize(("named", "gpu"), [
    ("H200", GPUS["h200"]), (GPUS["b200"], GPUS["b200"]),
    ("sm_90:114:NVIDIA H100 PCIe", Gpu("NVIDIA H100 PCIe", (9, 0), 114)), ("sm_100:140", Gpu("sm_100", (10, 0), 140)),
], ids=str)
def test_a_gpu_has_a_name_or_a_description(named, gpu):
    assert gpu_of(named) == gpu


@pytest.mark.parametrize(("named", "message"), [
    ("h2000", "device is 'h2000'; allowed are a100-40gb, .*, cuda .the GPU that is here., cuda:INDEX, or ARCH"),
    ("cpu", "device is 'cpu'; allowed are"),
    (7.5, "device is 7.5; allowed are"),
    ("cuda:99", "device is 'cuda:99', and torch sees no such GPU of NVIDIA here; allowed beside it are a100-40gb"),
    pytest.param(None, "device is None, and torch sees no such GPU", marks=NO_GPU),
    ("sm_70:80", r"capability is \(7, 0\); allowed are compute capabilities from 7.5 on"),
    ("sm_90:0", "multiprocessors is 0; allowed are 1 and more"),
], ids=str)
def test_a_gpu_that_is_unknown_is_refused(named, message):
    with pytest.raises(InvalidInput, match=message):
        gpu_of(named)


def model(**attributes):
    return SimpleNamespace(**{"num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 2048} | attributes)


def test_a_model_of_two_kinds_of_layers_has_two_calls_where_the_window_hides_something():
    config = model(sliding_window=1024, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                   head_dim=256, attn_logit_softcapping=50.0, query_pre_attn_scalar=144, dtype="float16")
    short, *long = calls_of_model(config, [1024, 2048], b=2)
    both = {"b": 2, "hq": 16, "hk": 4, "d": 256, "dv": 256, "softcap": 50.0, "scale": 144**-0.5, "layout": "bshd",
            "dtype": torch.float16}
    assert short == CallShape(1024, mask=causal(), **both)
    assert long == [CallShape(2048, mask=window(1023, 0), **both), CallShape(2048, mask=causal(), **both)]


def test_a_model_may_have_sinks_chunks_or_no_mask():
    (call,) = calls_of_model(model(model_type="gpt_oss"), [512], backward=False)
    assert (call.sinks, call.backward, call.dtype) == (True, False, torch.bfloat16)
    (call,) = calls_of_model(model(layer_types=["chunked_attention"], attention_chunk_size=256), [512])
    assert call.mask == causal() & chunk(256)
    (call,) = calls_of_model(model(), [512], is_causal=False, dtype=torch.float32)
    assert (call.mask, call.dtype) == (None, torch.float32)
    (call,) = calls_of_model(model(sliding_window=64), [512], is_causal=False)
    assert call.mask == window(63, 63)
    (call,) = calls_of_model(model(sliding_window=64, use_sliding_window=False), [512])
    assert call.mask == causal()


def test_latent_attention_has_its_expanded_heads_and_a_nested_configuration_is_found():
    config = SimpleNamespace(text_config=model(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128))
    (call,) = calls_of_model(config, [512])
    assert (call.hq, call.hk, call.d, call.dv) == (16, 16, 192, 128)


@pytest.mark.parametrize(("attributes", "message"), [
    ({"num_attention_heads": None}, "config, a SimpleNamespace, has no num_attention_heads or n_head; allowed is"),
    ({"hidden_size": None}, "has no hidden_size or n_embd"),
    ({"dtype": "auto"}, "config has dtype 'auto'; allowed is the name of a torch.dtype"),
    ({"layer_types": ["linear_attention"]}, r"config has layer_types \['linear_attention'\]; allowed is at least one"),
], ids=str)
def test_a_configuration_without_attention_is_refused(attributes, message):
    with pytest.raises(InvalidInput, match=message):
        calls_of_model(model(**attributes), [512])
