"""Who makes delta in the backward pass of the Gluon backend: the kernel of the tails, unless somebody else wants it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewise.backends import gluon
from tilewise.kernels.hopper.arguments import NO_BACKWARD_OPERANDS
from tilewise.masks import causal
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands, OperandSpec, ScoreOptions

SHAPE, STRIDES = (1, 2, 64, 64), (8192, 4096, 64, 1)
PROBLEM = AttentionProblem(b=1, hq=2, hk=2, sq=64, sk=64, d=64, dv=64, dtype=torch.float16,
                           device=torch.device("cuda", 0), scale=0.125, direction="backward", q_strides=STRIDES,
                           k_strides=STRIDES, v_strides=STRIDES)
ALIBI = replace(PROBLEM, mask=causal(), scores=ScoreOptions(alibi_slopes=OperandSpec((1, 2), (2, 1), torch.float32)))
BIAS = replace(PROBLEM, scores=ScoreOptions(bias=OperandSpec((1, 2, 64, 64), STRIDES, torch.float16)))
SINKS = replace(PROBLEM, scores=ScoreOptions(sinks=OperandSpec((2,), (1,), torch.float32)))


@pytest.mark.parametrize(("problem", "out_strides", "dlse_strides", "wanted", "is_told"), [
    (PROBLEM, STRIDES, None, (), True), (PROBLEM, STRIDES, (128, 64, 1), (), False),
    (SINKS, STRIDES, None, (), False), (ALIBI, STRIDES, None, (), True), (ALIBI, STRIDES, None, ("moments",), False),
    (BIAS, STRIDES, None, (), True), (BIAS, STRIDES, None, ("dbias",), False),
    (PROBLEM, (8192, 4096, 1, 64), None, (), False)],
    ids=["plain", "lse's gradient", "sinks", "ALiBi", "slopes' gradient", "bias", "bias's gradient", "columns apart"])
def test_the_launch_is_told_of_out_where_nobody_else_wants_delta(problem, out_strides, dlse_strides, wanted, is_told,
                                                                 monkeypatch):
    told = []
    monkeypatch.setattr(gluon, "device_spec", lambda device: SimpleNamespace(name="none"))
    monkeypatch.setattr(gluon, "hopper_backward_config", lambda *given: SimpleNamespace(block_n=128))
    monkeypatch.setattr(gluon, "backward_schedule", lambda *given: None)
    monkeypatch.setattr(gluon, "backward_launch", lambda *given: told.append(given[5]))
    monkeypatch.setattr("tilewise.kernels.triton.backward.delta_launch", lambda *given: None)
    monkeypatch.setattr(gluon, "_launches_of_sums", lambda *given: (None, None))
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(multi_processor_count=132))
    gluon._backward_plan.__wrapped__(problem, (out_strides, STRIDES, dlse_strides), (True,),
                                     **dict.fromkeys(wanted, True))
    assert told == [(out_strides, STRIDES) if is_told else None]


def plan_of(again, dbias):
    return gluon._BackwardPlan(None, (), None, None, None, None, again, dbias)


@pytest.mark.parametrize(("again", "dbias", "slopes", "pairs", "called"), [
    (True, False, True, False, ["again"]), (True, False, True, True, ["again"]), (True, False, False, True, ["again"]),
    (False, True, False, True, ["dbias"]), (True, True, True, True, ["again", "dbias"]),
    (True, True, False, True, ["dbias"]), (True, False, False, False, []), (False, True, False, False, [])], ids=str)
def test_kernels_that_sum_gradients_of_operands_run_where_these_are_wanted(again, dbias, slopes, pairs, called):
    """A bias's gradient is summed on the way of Triton's dQ, with that of the slopes, or by a kernel of its own."""
    calls = []
    plan = plan_of(again and (lambda *given: calls.append(("again", given))),
                   dbias and (lambda *given: calls.append(("dbias", given))))
    plan = replace(plan, again=plan.again or None, dbias=plan.dbias or None)
    inputs, dq, modifiers = tuple("qkvdld"), object(), object()
    sums = SimpleNamespace(moments=object() if slopes else None, pairs=object() if pairs else None)
    plan.sum_up(inputs, dq, sums, modifiers)
    assert [name for name, _ in calls] == called
    by_dq = None if dbias else sums.pairs
    wanted = {"again": (*inputs, dq, None, sums.moments, by_dq, None, None, modifiers),
              "dbias": (*inputs, sums.pairs, modifiers)}
    assert all(given == wanted[name] for name, given in calls)


@pytest.mark.parametrize("shape", [(2, 2, 8, 12), (1, 2, 8, 12)])
def test_a_bias_that_begins_where_the_copy_engine_cannot_is_copied(shape):
    """What is expanded stays so, and rows begin at multiples of 16 bytes; the launch is of the copy's strides."""
    bias = torch.randn(1 + 2 * 8 * 24).half()[1:].view(1, 2, 8, 24)[..., :12].expand(shape)
    assert bias.data_ptr() % 16
    spec = OperandSpec(shape, bias.stride(), bias.dtype)
    problem = replace(BIAS, b=shape[0], sq=8, sk=12, scores=ScoreOptions(softcap=2.0, bias=spec))
    moved, operands = gluon._with_dense_bias(problem, Operands(bias=bias, sinks=torch.zeros(2)), bias)
    made = operands.bias
    assert made.data_ptr() % 16 == 0
    assert torch.equal(made, bias)
    assert (made.stride()[0] == 0) == (shape[0] == 2)
    assert made.stride()[1:] == (128, 16, 1)
    assert operands.sinks is not None
    assert moved.scores == ScoreOptions(softcap=2.0, bias=spec._replace(strides=made.stride()))


def test_the_copy_of_a_view_of_a_large_bias_is_no_larger_than_the_view():
    """It took the memory that the view spans: of 64 by 64 positions of 1024 by 1024 nearly 200 times its own."""
    bias = torch.empty(1, 4, 1024, 1024, dtype=torch.float16)[:, :, 5:69, 3:67].fill_(1.0)
    spec = OperandSpec((1, 4, 64, 64), bias.stride(), bias.dtype)
    problem = replace(BIAS, hq=4, hk=4, scores=ScoreOptions(bias=spec))
    _, operands = gluon._with_dense_bias(problem, Operands(bias=bias), bias)
    assert operands.bias.untyped_storage().nbytes() == 2 * 4 * 64 * 64


@pytest.mark.parametrize("takes_out", [True, False])
def test_delta_is_made_where_the_launch_does_not_take_out(takes_out):
    calls = []

    class Launch:
        reads_all = True

        def __call__(self, *tensors, operands):
            assert operands is NO_BACKWARD_OPERANDS
            calls.append(("backward", tensors[5]))

    class Delta:
        def __call__(self, out, dout, dlse, delta, modifiers):
            calls.append(("delta", delta))

    launch = Launch()
    launch.takes_out = takes_out
    form = (SHAPE, STRIDES, torch.float16)
    plan = gluon._BackwardPlan(lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype),
                               (form, form, form, (SHAPE[:3], STRIDES[:3], torch.float32)), Delta(), launch, None, None,
                               None, None)
    q, k, v, out, dout = (torch.zeros(SHAPE, dtype=torch.float16) for _ in range(5))
    *_, delta = plan.differentiate((q, k, v, out, torch.zeros(SHAPE[:3]), dout, None), None)
    if takes_out:
        assert delta is None
        assert [(name, one is out) for name, one in calls] == [("backward", True)]
    else:
        assert [(name, one is delta) for name, one in calls] == [("delta", True), ("backward", True)]
