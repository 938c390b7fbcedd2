"""Compiling a backward pass beside the forward pass: it overlaps, waits, hides no error, and is not done in vain."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import driver as triton_driver

from kernels.compile_process import ENDS, INSTALLED
from tilewise import attention
from tilewise.autograd import fast_path, function, precompile
from tilewise.autograd.fast_path import FirstLaunchPlan, LaunchPlan
from tilewise.backends._support.hopper import RUN_ON_GPU, triton_version
from tilewise.backends.base import Needs
from tilewise.compile_ahead.gpu import _Facts
from tilewise.errors import UnsupportedProblem
from tilewise.kernels import compiling, enqueue
from tilewise.kernels.compiling import pending
from tilewise.kernels.enqueue import Enqueue
from tilewise.kernels.hooks import compile_only
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPERANDS, Operands
from unit.binding_double import binding

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("first_step.py")
LONG = 30  # seconds, that are waited where a test fails alone


class Kernel:
    """A kernel whose compiler does what a test says; what was compiled once is not compiled again."""

    __name__ = "kernel"

    def __init__(self, compile_it=lambda: None):
        self.compile_it, self.threads, self.launches, self.made = compile_it, [], 0, None

    def warmup(self, *arguments, grid, **options):
        if self.made is None:
            self.threads.append(threading.current_thread().name)
            self.compile_it()
            self.made = self
        return self.made

    def __getitem__(self, grid):
        def launch(*arguments):
            self.launches += 1
        return launch


class Backend:
    """A backend whose passes are one kernel each, and that notes what its backward pass is to be of."""

    name = "double"

    def __init__(self, forward, backward):
        self.forward_kernel, self.backward_kernel = (Enqueue(kernel, (1,), (), {}) for kernel in (forward, backward))
        self.asked = []

    def why_not(self, problem):
        return None

    def forward(self, *given):
        self.forward_kernel((), tuple)

    def backward(self, *given):
        self.backward_kernel((), tuple)

    def precompile_backward(self, problem, saved, dout, needs):
        self.asked.append((saved, dout, needs))
        self.backward(problem, saved, dout, None, needs)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """What is asked of torch and Triton about a GPU; a kernel is launched by Triton."""
    state = SimpleNamespace(captures=False)
    monkeypatch.setattr(compiling, "_kinds", set())
    monkeypatch.setattr(precompile, "triton_version", lambda: (3, 7))
    monkeypatch.setattr(precompile, "is_current", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captures)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_driver, "_active", SimpleNamespace(get_current_target=lambda: None))

    def unknown(compiled):
        raise enqueue.driver.UnknownKernel("it is a test's")

    monkeypatch.setattr(enqueue.driver, "image_of", unknown)
    yield state
    joined()
    assert pending.call is None


def joined():
    """Wait for the threads that compile."""
    while threads := [thread for thread in threading.enumerate() if thread.name == "tilewise-precompile"]:
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()


def tensors_of(*, needs=(True, True, True)):
    """q, k and v of a GPU that is not here."""
    return [torch.empty(2, heads, 64, 16, dtype=torch.float16, device="meta", requires_grad=need)
            for heads, need in zip((4, 2, 2), needs, strict=True)]


def first_call(backend, inputs=None, operands=NO_OPERANDS, choose=None):
    """Make a forward pass that has a gradient."""
    inputs = tensors_of() if inputs is None else inputs
    with _Facts():
        problem = AttentionProblem.from_tensors(*inputs, operands).backward(lse_grad=False)
        pending.call = precompile.begin, inputs, operands, choose or (lambda: (problem, backend))
        try:
            backend.forward()
        finally:
            pending.call = None


def test_the_backward_pass_compiles_while_the_forward_pass_does():
    started, ended = threading.Event(), threading.Event()

    def back():
        started.set()
        assert ended.wait(LONG)

    def forth():  # ends where the other has begun
        assert started.wait(LONG)
        ended.set()

    backend = Backend(Kernel(forth), Kernel(back))
    first_call(backend)
    joined()
    assert backend.forward_kernel.kernel.threads == ["MainThread"]
    assert backend.backward_kernel.kernel.threads == ["tilewise-precompile"]
    assert (backend.forward_kernel.kernel.launches, backend.backward_kernel.kernel.launches) == (1, 0)
    backend.backward()
    assert backend.backward_kernel.kernel.threads == ["tilewise-precompile"]
    assert backend.backward_kernel.kernel.launches == 1


def test_a_backward_pass_waits_for_what_is_being_compiled():
    started, ended = threading.Event(), threading.Event()
    backend = Backend(Kernel(), Kernel(lambda: started.set() or ended.wait(LONG)))
    first_call(backend)
    assert started.wait(LONG)
    called = threading.Thread(target=backend.backward)
    called.start()
    called.join(0.2)
    assert called.is_alive()
    ended.set()
    called.join(LONG)
    assert backend.backward_kernel.kernel.threads == ["tilewise-precompile"]
    assert backend.backward_kernel.kernel.launches == 1


def test_an_error_is_raised_where_the_backward_pass_is_called():
    def refuse():
        raise ValueError("the compiler's own words")

    backend = Backend(Kernel(), Kernel(refuse))
    first_call(backend)
    joined()
    assert backend.forward_kernel.kernel.launches == 1
    assert backend.backward_kernel.kernel.threads == ["tilewise-precompile"]
    with pytest.raises(ValueError, match="the compiler's own words"):
        backend.backward()


def test_a_backward_pass_that_nobody_takes_is_refused_where_it_is_called():
    def choose():
        raise UnsupportedProblem("no backend takes this problem", {})

    backend = Backend(Kernel(), Kernel())
    first_call(backend, choose=choose)
    joined()
    assert (backend.forward_kernel.kernel.launches, backend.asked) == (1, [])


@pytest.mark.parametrize(("wanted", "needs"), [
    ((True, True, True), Needs()), ((True, False, False), Needs(dkv=False)), ((False, False, True), Needs(dq=False))])
def test_tensors_without_memory_stand_for_those_of_the_call(wanted, needs):
    backend = Backend(Kernel(), Kernel())
    inputs = [tensor.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(want)
              for tensor, want in zip(tensors_of(needs=(False,) * 3), wanted, strict=True)]
    first_call(backend, inputs)
    joined()
    ((saved, dout, asked),) = backend.asked
    assert asked == needs
    for made, given in zip((*saved[:3], saved.out, dout), (*inputs, inputs[0], inputs[0]), strict=True):
        assert (made.shape, made.stride(), made.dtype, made.device.type) == (
            given.shape, given.stride(), given.dtype, "meta")
    assert (saved.lse.shape, saved.lse.dtype, saved.lse.is_contiguous()) == ((2, 4, 64), torch.float32, True)
    assert saved.operands is NO_OPERANDS


def test_operands_have_their_place_and_their_gradients():
    backend = Backend(Kernel(), Kernel())
    bias = torch.empty(4, 64, 64, dtype=torch.float16, device="meta").mT.requires_grad_()[None]
    sinks, lengths = torch.empty(4, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    first_call(backend, operands=Operands(bias=bias, sinks=sinks, seqlens_k=lengths))
    joined()
    ((saved, _, asked),) = backend.asked
    assert asked == Needs(dbias=True)
    made = saved.operands
    for name, given in (("bias", bias), ("sinks", sinks), ("seqlens_k", lengths)):
        own = getattr(made, name)
        assert (own.shape, own.stride(), own.dtype) == (given.shape, given.stride(), given.dtype)
    assert len(made.present) == 3


class NoPrecompiling:
    name = "double"

    def __init__(self, backend):
        self.why_not, self.forward, self.backward = backend.why_not, backend.forward, backend.backward


@pytest.mark.parametrize("reason", ["captured", "a Triton that is checked first", "ROCm", "no kernels of Triton's",
                                    "an address that is no multiple of 16", "compiled before"])
def test_nothing_is_compiled_where_it_cannot_be_or_is_not_used(monkeypatch, gpu, reason):
    backend, inputs, choose = Backend(Kernel(), Kernel()), None, None
    if reason == "captured":
        gpu.captures = True
    elif reason == "a Triton that is checked first":
        monkeypatch.setattr(precompile, "triton_version", lambda: (9, 9))
    elif reason == "ROCm":
        monkeypatch.setattr(torch.version, "hip", "7.0")
    elif reason == "no kernels of Triton's":
        choose = lambda: (None, NoPrecompiling(backend))  # noqa: E731
    elif reason == "compiled before":  # of another length, say
        backend.forward()
        backend = Backend(backend.forward_kernel.kernel, Kernel())
    else:
        inputs = [torch.empty(2 * 4 * 64 * 16 + 1, dtype=torch.float16, device="meta")[1:].view(2, 4, 64, 16)
                  .requires_grad_() for _ in range(3)]
    first_call(backend, inputs, choose=choose)
    joined()
    assert backend.asked == []
    assert backend.backward_kernel.kernel.threads == []
    assert backend.forward_kernel.kernel.launches >= 1


def test_nothing_is_compiled_beside_a_call_that_is_compiled_alone():
    backend, taken = Backend(Kernel(), Kernel()), []
    with compile_only(lambda name, compile_kernel: taken.append(name)):
        first_call(backend)
    joined()
    assert (taken, backend.asked) == (["kernel"], [])


def test_the_forward_pass_goes_on_where_no_thread_can_be_had(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    backend = Backend(Kernel(), Kernel())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first_call(backend)
    assert (backend.forward_kernel.kernel.launches, backend.asked) == (1, [])


def test_a_backend_by_name_that_has_no_kernels_of_tritons_is_not_asked(monkeypatch):
    """To ask cuDNN builds a graph, on the GPU: not beside a forward pass."""
    begun = []
    monkeypatch.setattr(precompile, "begin", lambda *given: begun.append(given))
    options = (None, None, None, None, False)
    for name in ("cudnn", "cuda", "torch", "reference"):
        function.precompile_backward(*tensors_of(), NO_OPERANDS, (*options, name))
    assert begun == []
    for name in ("gluon", "triton", None):
        function.precompile_backward(*tensors_of(), NO_OPERANDS, (*options, name))
    assert len(begun) == 3


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("where", ["meta", "cpu"])
@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (False, False, False)])
def test_a_first_call_on_the_fast_path_leaves_its_backward_pass_to_be_begun(recorded, where, needs):
    inputs = tensors_of(needs=needs) if where == "meta" else [torch.zeros(1, requires_grad=need) for need in needs]
    seen = []

    def bound(tensors, addresses, operands):
        seen.append(pending.call)
        raise ValueError("a launch that failed")

    way = LaunchPlan(bound, ("options",))
    with _Facts(), torch.set_grad_enabled(recorded):
        first = fast_path._first(way, inputs)
    assert (first is way) != (recorded and where == "meta" and any(needs))
    assert first.options is way.options
    with pytest.raises(ValueError, match="a launch that failed"):
        first.forward(lambda: inputs, (0, 0, 0), NO_OPERANDS)
    begins = (function.precompile_backward, *inputs, NO_OPERANDS, ("options",))
    assert seen == [None if first is way else begins]
    assert pending.call is None


def test_only_the_way_of_later_calls_is_kept(monkeypatch):
    made = []
    monkeypatch.setattr(fast_path, "_first", lambda way, *given: made.append(way) or FirstLaunchPlan(*way))
    tensors = [torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3)]
    for bound in binding(monkeypatch):
        for calls in range(1, 5):
            out = attention(*tensors)
            out.sum().backward()
            assert bound.paths == ["fast", "fast backward"] * calls
            kept = [way for known in fast_path._recent.values() for *_, way in known if isinstance(way, LaunchPlan)]
            assert kept == made * (calls > 1)
    assert [type(way) for way in made] == [LaunchPlan]


def environment(version, cache):
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    if version != INSTALLED:
        paths.insert(0, str(ROOT / ".triton" / version))
    return os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(cache)}


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("version", [INSTALLED, *ENDS])
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_a_first_step_compiles_each_kernel_once_and_those_of_its_backward_pass_beside(version, backend, tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), backend], capture_output=True, text=True, check=True,
                          env=environment(version, tmp_path))
    seen = {name: (sorted(here), sorted(beside)) for name, (here, beside) in json.loads(done.stdout).items()}
    forward = {"triton": ["attention_forward_kernel"], "gluon": ["hopper_forward_kernel"]}[backend]
    backward = {"triton": ["attention_backward_dkdv_kernel", "attention_backward_dq_kernel", "attention_delta_kernel"],
                "gluon": ["hopper_augmented_k_kernel", "hopper_backward_d64_kernel", "hopper_dq_kernel"]}[backend]
    assert seen.pop("no gradient") == (forward, [])
    assert seen.pop("no gradient is recorded") == (forward, [])
    assert seen.pop("forward") == (forward, backward)
    assert seen.pop("backward") == ([], [])
    assert seen.pop("another length") == ([], [])
    assert seen == {}


@pytest.mark.aot
@pytest.mark.slow
def test_a_process_ends_with_kernels_in_the_compiler(tmp_path):
    """It waits for those, and says nothing."""
    done = subprocess.run([sys.executable, str(SCRIPT), "gluon", "exit"], capture_output=True, text=True, check=False,
                          timeout=300, env=environment(INSTALLED, tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"left": True}


# A first step on this GPU: which kernels this thread and which others compile in each pass, the memory that the forward
# pass and what is compiled beside it take at most, and whether a second step has the same results.
ON_GPU = """
import json, sys, torch
from triton import knobs
from tilewise import attention, causal
from tilewise.autograd import precompile
from unit.first_step import compiled_by, note

if sys.argv[1] == "apart":
    precompile.begin = lambda *call: None
knobs.compilation.listener = note
torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, 1024, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
dout = torch.randn_like(q)

def step():
    out = attention(q, k, v, mask=causal(), deterministic=True)
    return out, torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

forward, out = compiled_by(lambda: attention(q, k, v, mask=causal(), deterministic=True))
peak = torch.cuda.max_memory_allocated()
backward, gradients = compiled_by(lambda: torch.autograd.grad(out, (q, k, v), dout))
again, others = step()
same = torch.equal(out, again) and all(map(torch.equal, gradients, others))
print(json.dumps({"forward": forward, "backward": backward, "peak": peak, "same": same}))
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_a_first_step_on_this_gpu(tmp_path):
    if (version := triton_version()) not in RUN_ON_GPU:
        pytest.skip(f"with Triton {version}, which is checked first, nothing is compiled beside")
    seen = {}
    for state in ("beside", "apart"):
        done = subprocess.run([sys.executable, "-c", ON_GPU, state], capture_output=True, text=True, check=False,
                              env=environment(INSTALLED, tmp_path / state))
        assert done.returncode == 0, done.stderr[-4000:]
        seen[state] = json.loads(done.stdout)
    (here, beside), (late, elsewhere) = seen["beside"]["forward"], seen["beside"]["backward"]
    assert len(here) >= 1
    assert sorted(beside) == sorted(name for names in seen["apart"]["backward"] for name in names) != []
    assert (late, elsewhere) == ([], [])
    assert seen["beside"]["peak"] == seen["apart"]["peak"], "what is compiled beside takes memory"
    assert [one["same"] for one in seen.values()] == [True, True]
