"""A bound pass hands its kernels what an unbound one does: tensors at first, their addresses from then on."""

import weakref
from dataclasses import replace

import pytest
import torch

from tilewise import causal
from tilewise.backends.base import Needs, Saved
from tilewise.problem import AttentionProblem
from tilewise.scores import NO_OPERANDS

pytest.importorskip("triton", reason="Triton is not installed")

from tilewise.backends import triton
from tilewise.backends.memory import allocator, forms_of_results
from tilewise.kernels.triton.sums import OperandSums


class Recorder:
    """Stands for a launch; it takes addresses from its second call on, as one without descriptors does."""

    def __init__(self):
        self.handed = []

    @property
    def takes_pointers(self):
        return bool(self.handed)

    def __call__(self, *arguments):
        self.handed.append(arguments)


def tensors_of():
    q, k, v, out, dout = (torch.zeros(1, 2, 8, 16) for _ in range(5))
    return q, k, v, out, torch.zeros(1, 2, 8), dout


def pointers(arguments):
    return [argument.data_ptr() if isinstance(argument, torch.Tensor) else argument for argument in arguments]


@pytest.mark.parametrize("needs", [Needs(), Needs(dq=False), Needs(dkv=False)], ids=["all", "dkv", "dq"])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_backward_hands_the_same_in_the_same_places(monkeypatch, needs, with_dlse):
    q, k, v, out, lse, dout = tensors_of()
    dlse = torch.zeros(1, 2, 8) if with_dlse else None
    problem = AttentionProblem.from_tensors(q, k, v).backward(lse_grad=with_dlse)
    made = triton._BackwardPlan(needs, q.stride(), k.stride(), v.stride())
    plan = replace(made, delta=Recorder(), dkdv=(Recorder(),), dq=Recorder())
    no_sums = OperandSums(problem, NO_OPERANDS, dbias=False, dalibi_slopes=False, dsinks=False)
    kept = []

    def allocate(sizes, strides, dtype):
        made = torch.empty_strided(sizes, strides, dtype=dtype)
        if sizes == (1, 2, 8):
            kept.append(made)
        return made

    monkeypatch.setattr(triton, "allocator", lambda device: allocate)
    differentiate = plan.bound(problem, no_sums)
    addresses = tuple(pointers(tensor for tensor in (q, k, v, out, lse, dout, dlse) if tensor is not None))
    results = [differentiate((q, k, v, out, lse, dout, dlse), addresses) for _ in range(2)]
    for result in results:
        assert [gradient is not None for gradient in result] == [needs.dq, needs.dkv, needs.dkv]
    for call, (dq, dk, dv), delta in zip(range(2), results, kept, strict=True):
        inputs = pointers((q, k, v, dout, lse, delta))
        handed = [pointers(launch.handed[call]) for launch in (plan.delta, *plan.dkdv, plan.dq) if launch.handed]
        wanted = [pointers((out, dout, out if dlse is None else dlse, delta, None))]
        wanted += [[*inputs, *pointers((dk, dv)), None, None]] * needs.dkv
        wanted += [[*inputs, dq.data_ptr(), *[None] * 6]] if needs.dq else []
        assert handed == wanted
    assert all(not isinstance(argument, torch.Tensor) for argument in plan.delta.handed[1])


def test_forward_hands_addresses_once_it_may():
    q, k, v, *_ = tensors_of()
    forms = forms_of_results(AttentionProblem.from_tensors(q, k, v))
    plan = triton._ForwardPlan(allocator(q.device), *forms, launch=Recorder())
    for _ in range(2):
        out, lse, max_logit = plan.attend(q, k, v, tuple(pointers((q, k, v))), None)
        assert max_logit is None
        assert pointers(plan.launch.handed[-1]) == pointers((q, k, v, out, lse, None, None))
    assert not any(isinstance(argument, torch.Tensor) for argument in plan.launch.handed[1])


def test_a_pass_that_launches_nothing_is_not_bound():
    q, k, v, out, lse, dout = tensors_of()
    problem = AttentionProblem.from_tensors(q, k[:, :, :0], v[:, :, :0], mask=causal("bottom_right"))
    assert triton.backend.bind_forward(problem) is None
    back = problem.backward(lse_grad=False)
    assert triton.backend.bind_backward(back, Saved(q, k[:, :, :0], v[:, :, :0], out, lse), dout, None, Needs()) is None


def test_what_is_bound_keeps_no_tensor(monkeypatch):
    monkeypatch.setattr(triton, "_backward_plan", lambda *_: triton._BackwardPlan(
        Needs(), (), (), (), Recorder(), dq=Recorder()))
    q, k, v, out, lse, dout = tensors_of()
    problem = AttentionProblem.from_tensors(q, k, v).backward(lse_grad=False)
    bound = triton.backend.bind_backward(problem, Saved(q, k, v, out, lse), dout, None, Needs())
    kept = [weakref.ref(tensor) for tensor in (q, k, v, out, lse, dout)]
    del q, k, v, out, lse, dout
    assert bound is not None
    assert [tensor() for tensor in kept] == [None] * 6
