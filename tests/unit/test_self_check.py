"""The self-check of the Hopper kernels with a Triton that is newer than tilewise: when it runs, and what follows."""

import json
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewise import UnsupportedProblem, dispatch
from tilewise.backends import gluon, reference
from tilewise.backends._support import hopper, self_check, self_check_calls
from tilewise.backends.base import Pending, Saved
from tilewise.backends.triton import TritonBackend
from tilewise.dispatch import explain_problem
from tilewise.kernels.hooks import compile_only
from tilewise.kernels.hopper.backward.launch import HopperBackward
from tilewise.kernels.hopper.backward.launch_d256 import HopperBackwardApart
from tilewise.kernels.hopper.backward.launch_splits import HopperBackwardOfSplits
from tilewise.masks import causal
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands, ScoreSettings
from tilewise.support.caches import clear_caches
from tilewise.testing import oracle
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.select import choose_group_splits, hopper_backward_config

GPU = torch.device("cuda", 0)
PASSED = r"not tested with Triton 3\.10\.0 .* self-check .* on NVIDIA H200 has passed, and backend 'gluon' uses them"
WRONG = "the largest error of dq at head dims 64 and 64 is 0.5, allowed 0.01"


@pytest.fixture(autouse=True)
def a_newer_triton(monkeypatch, tmp_path):
    """Stand for a Hopper GPU, Triton 3.10 and an empty folder, in a process that has just started."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(self_check, "_is_here", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(*versions())
    monkeypatch.setattr(hopper, "triton_version", lambda: (3, 10))
    self_check.forget()
    yield
    self_check.forget()


def versions(**others):
    """What stands for the versions of packages: an attribute and its value."""
    installed = {"triton": "3.10.0", "tilewise": "1.0"} | others
    return self_check, "whole_version", lambda module, name: installed[name]


@pytest.fixture
def checks(monkeypatch):
    """Replace the check by one that finds what the test says; the families that were checked are listed."""
    made = SimpleNamespace(families=[], failure=None)
    monkeypatch.setattr(self_check, "_failure", lambda family, device: made.families.append(family) or made.failure)
    return made


def kept():
    return [json.loads(path.read_text()) for path in sorted(self_check.settings.cache_folder().glob("self-check-*"))]


def told(ask):
    """Return the answer and the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = ask()
    assert {warning.category for warning in caught} <= {RuntimeWarning}
    return answer, [str(warning.message) for warning in caught]


def test_a_check_that_passes_warns_once_for_all_families_and_is_not_run_again(checks):
    with pytest.warns(RuntimeWarning, match=PASSED) as caught:
        assert [self_check.why_not(family, GPU) for family in ("forward", "backward", "dbias", "forward")] == [None] * 4
    assert len(caught) == 1
    assert checks.families == ["forward", "backward", "dbias"]


def test_the_next_process_reads_the_result_and_warns_too(checks):
    assert told(lambda: self_check.why_not("forward", GPU))[0] is None
    self_check.forget()
    with pytest.warns(RuntimeWarning, match=PASSED):
        assert self_check.why_not("forward", GPU) is None
    assert checks.families == ["forward"]
    assert kept() == [{"family": "forward", "gpu": "NVIDIA H200", "triton": "3.10.0", "torch": torch.__version__,
                       "tilewise": "1.0", "failure": None}]


@pytest.mark.parametrize("changed", ["gpu", "triton", "torch", "tilewise"])
def test_a_result_holds_for_its_versions_and_its_kind_of_gpu_alone(checks, monkeypatch, changed):
    told(lambda: self_check.why_not("forward", GPU))
    self_check.forget()
    others = {"gpu": (torch.cuda, "get_device_name", lambda device: "NVIDIA H100"),
              "torch": (torch, "__version__", "9.9"), "triton": versions(triton="3.10.1"),
              "tilewise": versions(tilewise="2.0")}
    monkeypatch.setattr(*others[changed])
    told(lambda: self_check.why_not("forward", GPU))
    assert checks.families == ["forward", "forward"]


def test_a_check_that_fails_is_a_refusal_with_the_figure_in_this_process_and_the_next(checks):
    checks.failure = WRONG
    for _ in range(2):
        reason, texts = told(lambda: self_check.why_not("backward", GPU))
        assert reason == f"the self-check of its backward kernels with Triton 3.10.0 failed on NVIDIA H200: {WRONG}"
        (text,) = texts
        path = Path(text.partition("To check again: remove ")[2].removesuffix("."))
        assert path.is_file(), "the warning names the file that holds the result"
        assert told(lambda: self_check.why_not("backward", GPU)) == (reason, [])
        self_check.forget()
    assert checks.families == ["backward"]
    path.unlink()
    told(lambda: self_check.why_not("backward", GPU))
    assert checks.families == ["backward", "backward"]


def test_one_family_that_fails_leaves_the_others_in_use(checks):
    checks.failure = WRONG
    assert WRONG in told(lambda: self_check.why_not("backward", GPU))[0]
    checks.failure = None
    reason, (text,) = told(lambda: self_check.why_not("forward", GPU))
    assert reason is None
    assert "has passed" in text


@pytest.mark.parametrize(("error", "lasts"), [
    (RuntimeError("PassManager::run failed\n  at tile 3"), True), (TimeoutError("did not end"), True),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"), False),
    (RuntimeError("Triton Error [CUDA]: out of memory"), False),
    (RuntimeError("operation not permitted when stream is capturing"), False),
], ids=["compiler", "hangs", "memory", "memory_of_triton", "capture"])
def test_an_error_is_a_refusal_with_its_text_and_is_kept_unless_it_says_nothing_of_the_kernels(monkeypatch, error,
                                                                                               lasts):
    def deviation(family, dims, device):
        raise error

    fake_streams(monkeypatch)
    monkeypatch.setattr(self_check, "deviation", deviation)
    reason, _ = told(lambda: self_check.why_not("forward", GPU))
    text = " ".join(str(error).split())
    assert reason == ("the self-check of its forward kernels with Triton 3.10.0 failed on NVIDIA H200: "
                      f"{type(error).__name__}: {text}")
    assert [row["failure"] for row in kept()] == ([f"{type(error).__name__}: {text}"] if lasts else [])


def fake_streams(monkeypatch):
    nothing = warnings.catch_warnings  # any context
    monkeypatch.setattr(torch.cuda, "device", lambda device: nothing())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nothing())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)


def test_the_first_call_that_is_wrong_ends_the_check(monkeypatch):
    made = []
    fake_streams(monkeypatch)
    monkeypatch.setattr(self_check, "deviation", lambda family, dims, device: made.append(dims) or (
        WRONG if dims == (128, 128) else None))
    assert WRONG in told(lambda: self_check.why_not("backward", GPU))[0]
    assert made == [(64, 64), (128, 128)]


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def _a_file_in_the_way(folder):
    (folder / "file").write_text("no folder")
    return str(folder / "file" / "results")


@pytest.mark.parametrize("make", [_a_file_in_the_way, None], ids=["folder", "home"])
@pytest.mark.parametrize("failure", [None, WRONG])
def test_without_a_folder_that_can_be_written_each_process_checks(checks, monkeypatch, tmp_path, make, failure):
    checks.failure = failure
    if make is None:
        monkeypatch.delenv("TILEWISE_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", _no_home)
    else:
        monkeypatch.setenv("TILEWISE_CACHE", make(tmp_path))
    for process in (1, 2):
        for _ in range(2):
            reason, texts = told(lambda: self_check.why_not("forward", GPU))
            assert (reason is None) == (failure is None)
            assert all(text.endswith("To check again: the next process does.") for text in texts) or failure is None
        assert len(checks.families) == process
        self_check.forget()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"failure": 3}', b"\xff"])
def test_a_file_that_holds_no_result_is_written_anew(checks, content):
    told(lambda: self_check.why_not("forward", GPU))
    (path,) = self_check.settings.cache_folder().iterdir()
    path.write_bytes(content)
    self_check.forget()
    assert told(lambda: self_check.why_not("forward", GPU))[0] is None
    assert checks.families == ["forward", "forward"]
    assert kept()[0]["failure"] is None


def test_a_triton_that_tells_no_version_is_checked_in_each_process(checks, monkeypatch):
    monkeypatch.setattr(*versions(triton=""))
    for process in (1, 2):
        _, (text,) = told(lambda: self_check.why_not("forward", GPU))
        assert "not tested with a Triton that tells no version before its release" in text
        assert len(checks.families) == process
        self_check.forget()
    assert kept() == []


def test_nothing_is_said_against_a_device_that_is_not_here(checks, monkeypatch):
    monkeypatch.setattr(self_check, "_is_here", lambda device: False)
    assert told(lambda: self_check.why_not("forward", GPU)) == (None, [])
    assert checks.families == []


def test_nothing_is_run_where_kernels_are_only_compiled_for_the_gpu_of_another_machine(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert self_check._is_here(GPU)
    with compile_only(lambda *kernel: None):
        assert not self_check._is_here(GPU)
        assert self_check.why_not("forward", GPU) is None
    assert not self_check._is_here(torch.device("cuda", 1))


def test_threads_that_ask_at_once_share_one_check(checks, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def failure(family, device):
        begun.set()
        assert go_on.wait(10)
        checks.families.append(family)

    monkeypatch.setattr(self_check, "_failure", failure)
    monkeypatch.setattr(self_check, "_warn_once", lambda text: None)
    self_check._warn_once.cache_clear = lambda: None
    threads = [threading.Thread(target=self_check.why_not, args=("forward", GPU)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert checks.families == ["forward"]


def test_the_check_neither_sees_nor_changes_what_the_caller_has_set(monkeypatch):
    """Modes, autocast and whether gradients are enabled belong to a thread, and draws come from a generator."""
    seen = []

    def deviation(family, dims, device):
        inputs = self_check_calls._inputs(dims, with_bias=True)
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
                     {tensor.device.type for tensor in inputs.values()}))

    fake_streams(monkeypatch)
    monkeypatch.setattr(self_check, "deviation", deviation)
    before = torch.random.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        told(lambda: self_check.why_not("dbias", GPU))
        assert torch.is_inference_mode_enabled()
    assert seen == [(False, True, False, {"cpu"})]
    assert torch.equal(torch.random.get_rng_state(), before)


class TestCapture:
    """While a CUDA graph is captured no check can run, and the answer is not for good."""

    @pytest.fixture
    def capture(self, monkeypatch):
        """Say whether a graph is captured."""
        state = SimpleNamespace(runs=True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.runs)
        return state

    @pytest.fixture
    def problem(self, monkeypatch):
        """A long call on a Hopper GPU, which every backend but gluon, triton and reference refuses."""
        for module in (gluon, hopper):
            monkeypatch.setattr(module, "device_spec", lambda device: DeviceSpec.of_arch("sm_90"))
        monkeypatch.setattr(TritonBackend, "why_not", lambda self, problem: None)
        monkeypatch.setattr(dispatch, "order", lambda problem, tf32=None: ("gluon", "triton"))
        monkeypatch.setattr(dispatch, "ON_REQUEST", ())
        q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
        clear_caches()
        yield replace(AttentionProblem.from_tensors(q, q, q, mask=causal()), device=GPU)
        clear_caches()

    def test_the_reason_says_what_to_do(self, checks, capture, problem):
        reason, texts = told(lambda: self_check.why_not("forward", GPU))
        assert reason == ("awaits its self-check with Triton 3.10.0, which cannot run while a CUDA graph is captured: "
                          "make one such call before the capture")
        assert isinstance(reason, Pending)
        assert self_check.is_pending("forward", GPU)
        assert f"  forward  gluon      no: {reason}" in str(explain_problem(problem)).splitlines()
        with pytest.raises(UnsupportedProblem, match="make one such call before the capture"):
            dispatch.choose(problem, "gluon")
        capture.runs = False
        assert told(lambda: dispatch.choose(problem, "gluon").name)[0] == "gluon"
        assert (texts, checks.families) == ([], ["forward"])

    def test_what_the_disk_knows_holds_there_too(self, checks, capture):
        capture.runs = False
        told(lambda: self_check.why_not("forward", GPU))
        self_check.forget()
        capture.runs = True
        assert told(lambda: self_check.why_not("forward", GPU))[0] is None
        assert checks.families == ["forward"]

    @pytest.mark.parametrize("failure", [None, WRONG])
    def test_another_backend_serves_and_the_choice_is_made_anew_after_it(self, checks, capture, problem, monkeypatch,
                                                                        failure):
        served = []
        for backend in (gluon.GluonBackend, TritonBackend):
            monkeypatch.setattr(backend, "forward", lambda self, *call: served.append((self.name, "forward")))
            monkeypatch.setattr(backend, "backward", lambda self, *call: served.append((self.name, "backward")))
        checks.failure, tensor = failure, torch.zeros(1)
        passes = [(dispatch.choose(side), side) for side in (problem, problem.backward(lse_grad=False))]
        assert [chosen.name for chosen, _ in passes] == ["triton", "triton"]

        def call():
            for chosen, side in passes:
                if side.direction == "forward":
                    chosen.forward(side, tensor, tensor, tensor)
                else:
                    chosen.backward(side, Saved(*(tensor,) * 5), tensor, None)

        told(call)
        assert checks.families == []
        capture.runs = False
        told(call)
        told(call)
        assert checks.families == ["forward", "backward"]
        last = "gluon" if failure is None else "triton"
        assert [name for name, _ in served] == ["triton"] * 2 + [last] * 4
        assert [chosen.name for chosen, _ in passes] == [last, last]
        assert dispatch.choose(problem) is passes[0][0], "who asks for the same finds what was kept"
        assert not hasattr(passes[0][0], "bind_forward"), "no launch is bound to a choice that may change"


class TestCalls:
    """What the check computes, with the kernels replaced by others of theirs."""

    @pytest.fixture(autouse=True)
    def on_the_cpu(self, monkeypatch):
        monkeypatch.setattr(self_check_calls, "_wait", lambda device: None)

    @staticmethod
    def launch(monkeypatch, family, change=lambda results: results, dtype=torch.bfloat16):
        """Have dense attention in a dtype serve as the family's kernels."""
        names = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv"), "dbias": ("dbias",)}[family]

        def results(call):
            assert (call.usual.sq, call.usual.d) == (4096, call.problem.d)
            made = self_check_calls.dense(call.tensors, dtype)
            return change({name: made[name].clone() for name in names})

        monkeypatch.setitem(self_check_calls._LAUNCHES, family, results)

    @pytest.mark.parametrize(("family", "dims"), [("forward", (64, 64)), ("backward", (192, 128)),
                                                  ("dbias", (128, 128))])
    def test_results_as_exact_as_the_dtype_pass(self, monkeypatch, family, dims):
        assert dims in self_check_calls.CALLS[family]
        self.launch(monkeypatch, family)
        assert self_check_calls.deviation(family, dims, torch.device("cpu")) is None

    @pytest.mark.parametrize(("value", "what"), [(float("nan"), "largest error of {} at head dims 128 and 128 is nan"),
                                                 (3.0, "largest error of {} at head dims 128 and 128 is 3,")])
    @pytest.mark.parametrize(("family", "name"), [("forward", "lse"), ("backward", "dk"), ("dbias", "dbias")])
    def test_one_wrong_number_fails_and_is_told(self, monkeypatch, family, name, value, what):
        def change(results):
            results[name][-1, -1, -1].view(-1)[0] += value
            return results

        self.launch(monkeypatch, family, change)
        found = self_check_calls.deviation(family, (128, 128), torch.device("cpu"))
        assert what.format(name) in found
        assert ", allowed 0.0" in found

    @pytest.mark.parametrize(("family", "name"), [("forward", "out"), ("backward", "dq"), ("backward", "dv"),
                                                  ("dbias", "dbias")])
    def test_a_tile_of_small_numbers_that_is_left_out_fails(self, monkeypatch, family, name):
        """The last rows of a causal gradient are small: beside the largest error of all rows they could be zero."""
        def change(results):
            results[name][0, -1, -60:] = 0.0
            return results

        self.launch(monkeypatch, family, change)
        assert f"error of {name} at head dims" in self_check_calls.deviation(family, (64, 64), torch.device("cpu"))

    def test_the_dense_reference_is_the_oracle(self):
        inputs = self_check_calls._inputs((24, 16), with_bias=True)
        inputs = {name: tensor[:, :, :50, :50] for name, tensor in inputs.items()}
        q, k, v, dout, bias = inputs.values()
        changes = oracle.Changes(Operands(bias=bias), ScoreSettings())
        got = self_check_calls.dense(inputs, torch.float64)
        out, lse = oracle.attend(q, k, v, causal(), None, changes)
        gradients = oracle.gradients(q, k, v, dout, None, causal(), None, changes)
        for name, exact in {"out": out, "lse": lse, **gradients._asdict()}.items():
            if exact is not None:
                torch.testing.assert_close(got[name], exact, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize(("family", "dims"), [(family, dims) for family, calls in self_check_calls.CALLS.items()
                                                  for dims in calls])
    def test_each_kernel_is_launched_twice_with_the_config_of_a_usual_call_on_few_ctas(self, monkeypatch, family, dims):
        pytest.importorskip("triton", reason="Triton is not installed")
        launched = []
        for kind in (self_check_calls.HopperForward, self_check_calls.HopperDbias, HopperBackward, HopperBackwardApart):
            monkeypatch.setattr(kind, "__call__", lambda self, *tensors: launched.append(self))
        inputs = self_check_calls._inputs(dims, with_bias=family == "dbias")
        exact = self_check_calls.dense(inputs, torch.float64)
        call = self_check_calls._call(inputs | {name: exact[name].float() for name in ("lse", "delta")})
        results = self_check_calls._LAUNCHES[family](call)
        assert {name: result.shape for name, result in results.items()} == {
            name: exact[name].shape for name in results}
        assert all(result.isnan().all() for result in results.values()), "what a kernel does not write is seen"
        first, second = launched
        assert first is second
        if isinstance(first, HopperBackwardApart):
            assert dims == (256, 256)
        else:
            ctas = first.grid[0]
            assert ctas == 4 or dims == (192, 128), "the kernel of these has a CTA for each tile"

    @pytest.mark.parametrize("dims", self_check_calls.CALLS["backward"])
    def test_the_backward_check_covers_every_kernel_whose_groups_are_split(self, monkeypatch, dims):
        """It launched groups as a whole alone, and left out a build of the main kernel and the kernel of the sums."""
        pytest.importorskip("triton", reason="Triton is not installed")
        launched = []
        for kind in (HopperBackward, HopperBackwardApart, HopperBackwardOfSplits):
            monkeypatch.setattr(kind, "__call__", lambda self, *tensors: launched.append(self))
        monkeypatch.setattr(self_check_calls, "_first_wrong", lambda results, exact, rounded: None)
        assert self_check_calls.deviation("backward", dims, torch.device("cpu")) is None
        splits = [launch for launch in launched if isinstance(launch, HopperBackwardOfSplits)]
        assert len(launched) == 2 * (1 + bool(splits))
        usual = replace(self_check_calls._call(self_check_calls._inputs(dims, with_bias=False)).usual,
                        direction="backward")
        config = hopper_backward_config(usual, DeviceSpec.of_arch("sm_90"))
        few = replace(usual, b=1, hq=16, hk=2)
        assert bool(splits) == (choose_group_splits(few, config, 132) > 1)

    def test_splits_that_are_wrong_fail_and_are_told(self, monkeypatch):
        def change(call, results):
            if call.group_splits > 1:
                results["dk"][0, 0, 100] += 3.0
            return results

        monkeypatch.setitem(self_check_calls._LAUNCHES, "backward", lambda call: change(call, {
            name: self_check_calls.dense(call.tensors, torch.bfloat16)[name].clone() for name in ("dq", "dk", "dv")}))
        found = self_check_calls.deviation("backward", (128, 128), torch.device("cpu"))
        assert "largest error of dk at head dims 128 and 128, and 2 splits of a group, is 3, allowed 0.0" in found

    def test_a_kernel_that_does_not_end_is_given_up(self, monkeypatch):
        event = SimpleNamespace(record=lambda stream: None, query=lambda: False)
        monkeypatch.undo()
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(self_check_calls, "_LONGEST_WAIT", 0.01)
        with pytest.raises(TimeoutError, match=r"the kernels did not end within 0\.01 s"):
            self_check_calls._wait(GPU)


def test_the_reference_backend_is_not_asked_for_a_check(checks):
    q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    assert reference.backend.why_not(AttentionProblem.from_tensors(q, q, q)) is None
    assert checks.families == []
