"""Which calls with a score function the Gluon backend takes; tests/compiled/test_inlining.py asks the compiler."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tilewise.backends import gluon
from tilewise.backends._support import hopper
from tilewise.functions import FunctionCode
from tilewise.kernels.hopper import inlining
from tilewise.masks import causal, window
from tilewise.problem import AttentionProblem, dense_strides
from tilewise.problem.options import FunctionSpec, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.select import hopper_backward_config

TRUE_QUESTION = inlining.why_not_inlined
LENGTHS = OperandSpec((2,), (1,), torch.int32)
BIAS = OperandSpec((1, 4, 512, 512), (2**20, 2**18, 512, 1), torch.bfloat16)
SLOPES = OperandSpec((1, 4), (4, 1), torch.float32)


def nothing(*_):
    """Stands for a function of Triton's."""


RELATIVE = FunctionSpec(FunctionCode("relative", nothing, None, None, 1), (torch.bfloat16,))
BENT = FunctionSpec(FunctionCode("bent", nothing, None, nothing, 0), ())


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """What the compiler was asked, which takes everything."""
    questions = []

    def answer(code, dtypes, *, backward, int64):
        questions.append((code, dtypes, backward, int64))

    monkeypatch.setattr(inlining, "why_not_inlined", answer)
    return questions


@pytest.fixture(autouse=True)
def a_hopper_gpu(monkeypatch):
    monkeypatch.setattr(gluon, "device_spec", lambda device: DeviceSpec.of_arch("sm_90"))
    monkeypatch.setattr(hopper, "triton_version", lambda: (3, 6))


def problem_of(function, d=64, mask=None, length=512, scores=(), **fields):
    """A call with a score function; ``scores``: what else changes them."""
    strides = {f"{name}_strides": dense_strides((2, heads, length, d), (4, 2, 3, 1)) for name, heads in zip(
        "qkv", (4, 2, 2), strict=True)}
    options = ScoreOptions(score_function=function, **dict(scores))
    return AttentionProblem(b=2, hq=4, hk=2, sq=length, sk=length, d=d, dv=d, dtype=torch.bfloat16, scale=1.0,
                            mask=causal() if mask is None else mask, device=torch.device("cuda", 0), scores=options,
                            **(strides | fields))


@pytest.mark.parametrize("problem", [
    problem_of(RELATIVE), problem_of(BENT, d=128), problem_of(RELATIVE, mask=window(100, 3, "top_left")),
    problem_of(BENT, deterministic=True), problem_of(RELATIVE, sequences=Sequences(seqlens_k=LENGTHS)),
    problem_of(BENT, scores={"bias": BIAS, "alibi_slopes": SLOPES, "softcap": 30.0, "max_logit": True}),
    problem_of(RELATIVE, scores={"dropout_p": 0.5}),
    problem_of(BENT, scores={f"documents_{side}": OperandSpec((1, 4, 512), (2048, 512, 1), torch.int32)
                             for side in "qk"})], ids=str)
def test_both_passes_inline_a_function_beside_all_other_options(problem):
    assert gluon.backend.why_not(problem) is None
    backward = problem.backward(lse_grad=True)
    assert gluon.backend.why_not(backward) is None
    assert not hopper_backward_config(backward, DeviceSpec.of_arch("sm_90")).augmented_k


def test_forward_takes_wide_heads_and_a_derivative_beside_dropout():
    for problem, reason in (
            (problem_of(RELATIVE, d=256),
             "takes, in its backward pass, head dims up to 128 with a score function, got 256 and 256"),
            (problem_of(BENT, scores={"dropout_p": 0.5}), "takes, in its backward pass, dropout beside score functions "
             "without a derivative, got dropout 0.5, score function bent")):
        assert gluon.backend.why_not(problem) is None
        assert gluon.backend.why_not(problem.backward(lse_grad=False)) == reason


def test_the_compiler_is_asked_with_the_derivative_in_the_backward_pass_alone(asked):
    large = problem_of(BENT._replace(is_large=True))
    for problem in (large, large.backward(lse_grad=False), problem_of(RELATIVE)):
        gluon.backend.why_not(problem)
    assert asked == [(BENT.code, (), False, True), (BENT.code, (), True, True),
                     (RELATIVE.code, (torch.bfloat16,), False, False)]


def test_what_the_compiler_does_not_take_is_refused(monkeypatch):
    monkeypatch.setattr(inlining, "why_not_inlined", lambda *_, **__: "cannot")
    assert gluon.backend.why_not(problem_of(BENT)) == "cannot"


@pytest.mark.parametrize("code", [BENT.code, replace(BENT.code, derivative=None)], ids=["bent", "alone"])
def test_a_function_that_triton_does_not_compile_is_refused(code):
    reason = "needs score functions that Triton compiles, got bent, a function"
    assert TRUE_QUESTION(code, (), backward=True, int64=False) == reason
