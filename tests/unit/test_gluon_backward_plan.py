"""Who makes delta in the backward pass of the Gluon backend: the kernel of the tails, unless somebody else wants it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewise.backends import gluon
from tilewise.masks import causal
from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec, ScoreOptions

SHAPE, STRIDES = (1, 2, 64, 64), (8192, 4096, 64, 1)
PROBLEM = AttentionProblem(b=1, hq=2, hk=2, sq=64, sk=64, d=64, dv=64, dtype=torch.float16,
                           device=torch.device("cuda", 0), scale=0.125, direction="backward", q_strides=STRIDES,
                           k_strides=STRIDES, v_strides=STRIDES)
ALIBI = replace(PROBLEM, mask=causal(), scores=ScoreOptions(alibi_slopes=OperandSpec((1, 2), (2, 1), torch.float32)))
SINKS = replace(PROBLEM, scores=ScoreOptions(sinks=OperandSpec((2,), (1,), torch.float32)))


@pytest.mark.parametrize(("problem", "out_strides", "dlse_strides", "moments", "is_told"), [
    (PROBLEM, STRIDES, None, False, True), (PROBLEM, STRIDES, (128, 64, 1), False, False),
    (SINKS, STRIDES, None, False, False), (ALIBI, STRIDES, None, False, True), (ALIBI, STRIDES, None, True, False),
    (PROBLEM, (8192, 4096, 1, 64), None, False, False)],
    ids=["plain", "lse's gradient", "sinks", "ALiBi", "slopes' gradient", "columns apart"])
def test_the_launch_is_told_of_out_where_nobody_else_wants_delta(problem, out_strides, dlse_strides, moments, is_told,
                                                                 monkeypatch):
    told = []
    monkeypatch.setattr(gluon, "device_spec", lambda device: SimpleNamespace(name="none"))
    monkeypatch.setattr(gluon, "hopper_backward_config", lambda *given: SimpleNamespace(block_n=128))
    monkeypatch.setattr(gluon, "backward_schedule", lambda *given: None)
    monkeypatch.setattr(gluon, "backward_launch", lambda *given: told.append(given[5]))
    monkeypatch.setattr("tilewise.kernels.triton.backward.delta_launch", lambda *given: None)
    monkeypatch.setattr(gluon, "_moments_launch", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(multi_processor_count=132))
    gluon._backward_plan.__wrapped__(problem, (out_strides, STRIDES, dlse_strides), (True,), moments)
    assert told == [(out_strides, STRIDES) if is_told else None]


@pytest.mark.parametrize("takes_out", [True, False])
def test_delta_is_made_where_the_launch_does_not_take_out(takes_out):
    calls = []

    class Launch:
        reads_all = True

        def __call__(self, *tensors):
            calls.append(("backward", tensors[5]))

    class Delta:
        def __call__(self, out, dout, dlse, delta, modifiers):
            calls.append(("delta", delta))

    launch = Launch()
    launch.takes_out = takes_out
    form = (SHAPE, STRIDES, torch.float16)
    plan = gluon._BackwardPlan(lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype),
                               (form, form, form, (SHAPE[:3], STRIDES[:3], torch.float32)), Delta(), launch, None, None,
                               None)
    q, k, v, out, dout = (torch.zeros(SHAPE, dtype=torch.float16) for _ in range(5))
    *_, delta = plan.differentiate((q, k, v, out, torch.zeros(SHAPE[:3]), dout, None), None)
    if takes_out:
        assert delta is None
        assert [(name, one is out) for name, one in calls] == [("backward", True)]
    else:
        assert [(name, one is delta) for name, one in calls] == [("delta", True), ("backward", True)]
