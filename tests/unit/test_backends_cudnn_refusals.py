"""In which words the cuDNN backend refuses, and that it is no one's choice but the caller's; without a GPU."""

import importlib.metadata
import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewise import causal, chunk, dispatch, prefix, window
from tilewise.backends import cudnn, gluon, triton
from tilewise.dispatch import BACKENDS, ON_REQUEST, explain_problem, order
from tilewise.functions import FunctionCode
from tilewise.kernels.cudnn import library
from tilewise.problem import dense_strides
from tilewise.problem.options import FunctionSpec, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning.device import DeviceSpec
from unit.test_backends_gluon import problem_of

SINKS = OperandSpec((4,), (1,), torch.float32)
BIAS = OperandSpec((1, 4, 512, 512), (4 * 512 * 512, 512 * 512, 512, 1), torch.bfloat16)
LENGTHS = Sequences(seqlens_k=OperandSpec((2,), (1,), torch.int32))
BORDERS = OperandSpec((9,), (1,), torch.int64)
PACKED = Sequences(8, BORDERS, BORDERS)
BROADCAST = "takes a bias that has every query and key, and every head if it has every batch entry, got "
STRIDES = "needs a last stride of 1 and the others positive multiples of 8 elements, got "


def scores(**fields):
    return {"scores": ScoreOptions(**fields)}


def bias_of(*shape):
    return OperandSpec(shape, dense_strides(shape, (4, 3, 2, 1)), torch.bfloat16)


def function(name):
    return FunctionSpec(FunctionCode(name, None, None, None, 0), ())


@pytest.fixture(autouse=True)
def a_hopper_gpu(monkeypatch):
    """Answer for device, front end and cuDNN, whatever this machine has; cuDNN itself refuses nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cudnn, "frontend_version", lambda: (1, 28))
    monkeypatch.setattr(cudnn, "library_version", lambda: (9, 19, 0))
    monkeypatch.setattr(cudnn, "graph_refusal", lambda problem: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def refusal(problem):
    """The refusal of a pass, which that of the other pass must not contradict where it is forward's."""
    reason = cudnn.backend.why_not(problem)
    if problem.direction == "forward":
        assert (cudnn.backend.why_not(problem.backward(lse_grad=False)) is None) == (reason is None)
    return reason


@pytest.mark.parametrize("problem", [
    problem_of(), problem_of(dtype=torch.float16), problem_of(dims=(256, 192)), problem_of(dims=(40, 8)),
    problem_of((500, 700), mask=causal("bottom_right")), problem_of(mask=window(100, None)), problem_of((1, 7)),
    problem_of(heads=(6, 1), b=1), problem_of(**scores(sinks=SINKS)), problem_of(**scores(bias=BIAS)),
    problem_of(**scores(bias=bias_of(1, 1, 512, 512))), problem_of(**scores(bias=bias_of(2, 4, 512, 512))),
    problem_of(heads=(1, 1), **scores(bias=bias_of(2, 1, 512, 512))),
    problem_of((1, 512), **scores(bias=bias_of(2, 4, 1, 512))),
    problem_of(mask=causal("bottom_right"), sequences=LENGTHS), problem_of(b=1, sequences=PACKED),
], ids=str)
def test_16_bit_calls_are_taken(problem):
    assert refusal(problem) is None


@pytest.mark.parametrize(("problem", "reason"), [
    (problem_of(dtype=torch.float32), "computes in float16 and bfloat16, got torch.float32"),
    (replace(problem_of(), float32_results=True),
     "writes results in the inputs' dtype, got torch.bfloat16 with results in float32"),
    (problem_of(dims=(60, 64)), "takes head dims that are multiples of 8, got 60 and 64"),
    (problem_of(dims=(64, 63)), "takes head dims that are multiples of 8, got 64 and 63"),
    (problem_of(dims=(264, 64)), "takes head dims up to 256 in its forward pass on this device, got 264 and 64"),
    (problem_of(deterministic=True),
     "promises no bits that are the same in every batch, and a deterministic result was asked for"),
    (problem_of(**scores(dropout_p=0.5)),
     "takes no dropout: cuDNN draws the pairs to drop in its own way, and a seed would mean another draw"),
    (problem_of(**scores(alibi_slopes=SINKS)),
     "takes no ALiBi slopes: cuDNN makes its own of the number of heads; a bias can hold them"),
    (problem_of(**scores(mask=BIAS)), "takes no mask tensor"),
    (problem_of(**scores(documents_q=BIAS)), "takes no documents"),
    (problem_of(**scores(softcap=3.0)), "takes no softcap"),
    (problem_of(**scores(max_logit=True)), "takes no max_logit"),
    (problem_of(**scores(score_function=function("tanh"))), "takes no score function"),
    (problem_of(**scores(mask_function=function("even"))), "takes no mask function"),
    (problem_of(mask=prefix(5)), "takes causal masks and windows, got causal() & prefix(5)"),
    (problem_of(mask=causal() & chunk(64)), "takes causal masks and windows, got causal() & chunk(64)"),
    (problem_of((8, 0)), "needs a pair that is visible, got none"),
    (problem_of((8, 0), sequences=LENGTHS), "needs a pair that is visible, got none"),
    (problem_of(b=1, sequences=PACKED._replace(packed=0)), "needs a pair that is visible, got none"),
    (problem_of((1, 9), **scores(sinks=SINKS)), "takes no sinks with one query"),
    (problem_of(aligned=False), "needs q, k and v at addresses that are multiples of 16 bytes"),
    (problem_of(q_strides=(512 * 4 * 64, 64, 4 * 64, 2)), f"{STRIDES}q with (131072, 64, 256, 2)"),
    (problem_of(k_strides=(512 * 2 * 64, 66, 2 * 64, 1)), f"{STRIDES}k with (65536, 66, 128, 1)"),
    (problem_of(v_strides=(512 * 2 * 64, 0, 2 * 64, 1)), f"{STRIDES}v with (65536, 0, 128, 1)"),
    (problem_of(**scores(bias=BIAS._replace(strides=(4 * 512 * 516, 512 * 516, 516, 1)))),
     "needs a bias with a last stride of 1 and the others positive multiples of 8 elements, got "
     "(1056768, 264192, 516, 1)"),
    (problem_of(**scores(bias=bias_of(2, 1, 1, 512))), f"{BROADCAST}2x1x1x512"),
    (problem_of(**scores(bias=bias_of(1, 4, 1, 512))), f"{BROADCAST}1x4x1x512"),
    (problem_of(**scores(bias=bias_of(1, 4, 512, 1))), f"{BROADCAST}1x4x512x1"),
    (problem_of(**scores(bias=bias_of(2, 1, 512, 512))), f"{BROADCAST}2x1x512x512"),
    (problem_of((512, 2**17 + 1), b=1, heads=(2, 2), k_strides=(2**31, 64, 2**14, 1), sequences=PACKED),
     f"takes packed sequences within 2147483647 elements of memory, got k over {2**31 + 2**14}"),
    (problem_of((512, 2**18), b=1, heads=(1, 1), k_strides=(2**31, 2**31, 2**13, 1), sequences=PACKED),
     "takes packed sequences within 2147483647 elements of memory, got k over 2147483648"),
    (problem_of((512, 512), mask=window(10, 0, "bottom_right"), **scores(bias=BIAS), b=1, sequences=PACKED),
     "takes no bias with packed sequences"),
    (problem_of(mask=causal("bottom_right"), **scores(bias=BIAS), sequences=LENGTHS),
     "takes no bias beside a mask aligned bottom-right where lengths are data, got causal(alignment='bottom_right')"),
], ids=str)
def test_the_rest_is_refused_with_its_reason(problem, reason):
    assert refusal(problem) == reason


def test_a_bias_begins_where_the_engines_can_load_it():
    bias = OperandSpec((1, 4, 24, 64), (6144, 1536, 64, 1), torch.float32)
    for left, first in ((16, None), (14, 26), (20, None)):
        reason = cudnn.backend.why_not(problem_of((24, 64), mask=window(left, 0, "bottom_right"), **scores(bias=bias)))
        assert reason == (None if first is None else
                          f"needs the first key that is seen at a multiple of 4 beside a bias, got {first}")


@pytest.mark.parametrize(("problem", "reason"), [
    (problem_of().backward(lse_grad=True), "has no gradient through lse"),
    (problem_of(**scores(bias=BIAS._replace(dtype=torch.float32))).backward(lse_grad=False),
     "makes the gradient of a bias in the inputs' dtype alone, torch.bfloat16, got a bias in torch.float32"),
    (problem_of((1, 1)).backward(lse_grad=False),
     "needs more than one query or more than one key in its backward pass"),
    (problem_of(**scores(bias=BIAS), sequences=LENGTHS).backward(lse_grad=False),
     "has no gradient beside a bias where lengths are data"),
], ids=str)
def test_a_gradient_that_cudnn_has_not_is_refused(problem, reason):
    assert cudnn.backend.why_not(problem) == reason


@pytest.mark.parametrize(("capability", "problem", "reason"), [
    ((7, 5), problem_of(), "needs CUDA compute capability 8.0 or newer, got 7.5"),
    ((8, 0), problem_of(dims=(256, 256)), None),
    ((8, 0), problem_of(dims=(256, 256)).backward(lse_grad=False),
     "takes head dims up to 128 in its backward pass on this device, got 256 and 256"),
    ((9, 0), problem_of(dims=(256, 256)).backward(lse_grad=False), None),
    ((10, 0), problem_of(dims=(192, 128)).backward(lse_grad=False), None),
    ((10, 0), problem_of(dims=(192, 64)).backward(lse_grad=False),
     "takes head dims up to 128 in its backward pass on this device, got 192 and 64"),
    ((8, 9), problem_of(b=1, sequences=PACKED), None),
    ((8, 9), problem_of(b=1, sequences=PACKED).backward(lse_grad=False),
     "takes packed sequences in its backward pass on devices of compute capability 9 and 10, got 8.9"),
], ids=str)
def test_what_is_taken_depends_on_the_device(monkeypatch, capability, problem, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert cudnn.backend.why_not(problem) == reason


@pytest.mark.parametrize(("name", "found", "reason"), [
    ("frontend_version", None, "needs cuDNN's front end (nvidia-cudnn-frontend), which tilewise[cudnn] brings, and it "
                               "is not installed"),
    ("frontend_version", (1, 27), "needs nvidia-cudnn-frontend 1.28 or newer, got 1.27"),
    ("frontend_version", (0, 0), "needs nvidia-cudnn-frontend 1.28 or newer, got one that tells no version"),
    ("frontend_version", (1, 32), None),
    ("library_version", None, "needs cuDNN 9.19.0 or newer, as CUDA builds of torch bring it, got none"),
    ("library_version", (9, 14, 0), "needs cuDNN 9.19.0 or newer, as CUDA builds of torch bring it, got 9.14.0"),
    ("library_version", (9, 26, 0), None),
])
def test_versions_with_faults_and_what_is_missing_are_refused(monkeypatch, name, found, reason):
    monkeypatch.setattr(cudnn, name, lambda: found)
    assert refusal(problem_of()) == reason


def test_without_triton_and_without_a_gpu_it_says_so(monkeypatch):
    assert refusal(problem_of(device=torch.device("cpu"))) == "runs on CUDA devices, got cpu"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else name)
    assert refusal(problem_of()) == "needs Triton, which CUDA builds of torch bring, and it is not installed"


def test_of_a_front_end_without_metadata_the_version_is_the_modules_own(monkeypatch):
    """What had to answer raised."""
    def without_metadata(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", without_metadata)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(__version__="1.28.0"))
    assert library.frontend_version.__wrapped__() == (1, 28)


def test_versions_are_read_without_an_import(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"nvidia-cudnn-frontend": "1.28.0"}.get)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert library.frontend_version.__wrapped__() == (1, 28)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert library.frontend_version.__wrapped__() is None
    for number, version in ((91900, (9, 19, 0)), (91002, (9, 10, 2)), (None, None)):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda answer=number: answer)
        assert library.library_version.__wrapped__() == version


def test_cudnns_own_refusal_comes_last(monkeypatch):
    monkeypatch.setattr(cudnn, "graph_refusal", lambda problem: "is refused by cuDNN itself: no engine")
    assert cudnn.backend.why_not(problem_of()) == "is refused by cuDNN itself: no engine"
    assert cudnn.backend.why_not(problem_of(dims=(60, 60))) == "takes head dims that are multiples of 8, got 60 and 60"


def test_nothing_but_its_name_chooses_it(monkeypatch):
    problem = problem_of()
    assert "cudnn" in BACKENDS
    assert "cudnn" in ON_REQUEST
    for side in (problem, problem.backward(lse_grad=False)):
        assert "cudnn" not in order(side)
        assert dispatch._chosen.__wrapped__(side, "cudnn", False) is cudnn.backend
    monkeypatch.setattr(gluon, "device_spec", lambda device: DeviceSpec.of_arch("sm_90"))
    monkeypatch.setattr(triton, "device_spec", lambda device: DeviceSpec.of_arch("sm_90"))
    explanation = explain_problem(problem, "cudnn")
    assert (explanation.forward, explanation.backward) == ("cudnn", "cudnn")
    assert explanation.reasons["forward", "cudnn"] is None
