"""What a bound pass hands its kernels: the addresses of its tensors, and these for a launch's first call."""

import weakref
from dataclasses import replace

import pytest
import torch

from tilewise import causal
from tilewise.backends.base import Needs, Saved
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPERANDS

pytest.importorskip("triton", reason="Triton is not installed")

from tilewise.backends import triton
from tilewise.backends._support.memory import allocator, forms_of_results
from tilewise.kernels.triton.arguments import NO_MODIFIERS
from tilewise.kernels.triton.launch import Launch
from tilewise.kernels.triton.operand_gradients import OperandGradients


class Recorder(Launch):
    """Stands for a launch: keeps the addresses, and the tensors that they stand for."""

    def __init__(self):
        self.handed = []

    def at(self, addresses, tensors):
        self.handed.append((addresses, tensors()))


def tensors_of():
    q, k, v, out, dout = (torch.zeros(1, 2, 8, 16) for _ in range(5))
    return q, k, v, out, torch.zeros(1, 2, 8), dout


def pointers(arguments):
    return [argument.data_ptr() if isinstance(argument, torch.Tensor) else argument for argument in arguments]


@pytest.mark.parametrize("needs", [Needs(), Needs(dq=False), Needs(dkv=False)], ids=["all", "dkv", "dq"])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_backward_hands_each_launch_its_tensors_and_their_addresses(monkeypatch, needs, with_dlse):
    q, k, v, out, lse, dout = tensors_of()
    dlse = torch.zeros(1, 2, 8) if with_dlse else None
    problem = AttentionProblem.from_tensors(q, k, v).backward(lse_grad=with_dlse)
    made = triton._BackwardPlan(needs, q.stride(), k.stride(), v.stride())
    plan = replace(made, delta=Recorder(), dkdv=(Recorder(),), dq=Recorder(),
                   modifiers=triton._planned_modifiers(problem))
    no_sums = OperandGradients(problem, NO_OPERANDS, dbias=False, dalibi_slopes=False, dsinks=False)
    kept = []

    def allocate(sizes, strides, dtype):
        made = torch.empty_strided(sizes, strides, dtype=dtype)
        if sizes == (1, 2, 8):
            kept.append(made)
        return made

    monkeypatch.setattr(triton, "allocator", lambda device: allocate)
    differentiate = plan.bound(problem, no_sums)
    addresses = tuple(pointers(tensor for tensor in (q, k, v, out, lse, dout, dlse) if tensor is not None))
    dq, dk, dv = differentiate((q, k, v, out, lse, dout, dlse), addresses)
    assert [gradient is not None for gradient in (dq, dk, dv)] == [needs.dq, needs.dkv, needs.dkv]
    (delta,) = kept
    inputs = (q, k, v, dout, lse, delta)
    handed = [launch.handed[0] for launch in (plan.delta, *plan.dkdv, plan.dq) if launch.handed]
    wanted = [(out, dout, out if dlse is None else dlse, delta)]
    wanted += [(*inputs, dk, dv, None, None, None)] * needs.dkv
    wanted += [(*inputs, dq, *[None] * 5)] * needs.dq
    assert [list(addresses) for addresses, _ in handed] == [pointers(tensors) for tensors in wanted]
    assert all(got is want for (_, tensors), own in zip(handed, wanted, strict=True)
               for got, want in zip(tensors[:-1], own, strict=True))
    assert all(tensors[-1] == NO_MODIFIERS for _, tensors in handed)


def test_backward_of_one_launch_hands_it_everything_but_a_delta():
    q, k, v, out, lse, dout = tensors_of()
    problem = AttentionProblem.from_tensors(q, k, v).backward(lse_grad=False)
    plan = triton._BackwardPlan(Needs(), q.stride(), k.stride(), v.stride(), single=Recorder(),
                                modifiers=triton._planned_modifiers(problem))
    no_sums = OperandGradients(problem, NO_OPERANDS, dbias=False, dalibi_slopes=False, dsinks=False)
    made = plan.bound(problem, no_sums)((q, k, v, out, lse, dout, None), tuple(pointers((q, k, v, out, lse, dout))))
    dq, dk, dv = made
    ((addresses, tensors),) = plan.single.handed
    wanted = (q, k, v, dout, lse, None, dk, dv, None, out, dq)
    assert list(addresses) == pointers(wanted)
    assert all(got is want for got, want in zip(tensors[:-1], wanted, strict=True))
    assert tensors[-1] == NO_MODIFIERS


def test_forward_hands_its_launch_its_tensors_and_their_addresses():
    q, k, v, *_ = tensors_of()
    problem = AttentionProblem.from_tensors(q, k, v)
    plan = triton._ForwardPlan(allocator(q.device), *forms_of_results(problem), launch=Recorder(),
                               modifiers=triton._planned_modifiers(problem))
    out, lse, max_logit = plan.attend(lambda: (q, k, v), tuple(pointers((q, k, v))), NO_OPERANDS)
    assert max_logit is None
    ((addresses, tensors),) = plan.launch.handed
    assert list(addresses) == pointers((q, k, v, out, lse, None))
    assert all(got is want for got, want in zip(tensors, (q, k, v, out, lse, None), strict=False))


def test_a_pass_that_launches_nothing_is_not_bound():
    q, k, v, out, lse, dout = tensors_of()
    problem = AttentionProblem.from_tensors(q, k[:, :, :0], v[:, :, :0], mask=causal("bottom_right"))
    assert triton.backend.bind_forward(problem) is None
    back = problem.backward(lse_grad=False)
    assert triton.backend.bind_backward(back, Saved(q, k[:, :, :0], v[:, :, :0], out, lse), dout, None, Needs()) is None


def test_what_is_bound_keeps_no_tensor(monkeypatch):
    q, k, v, out, lse, dout = tensors_of()
    problem = AttentionProblem.from_tensors(q, k, v).backward(lse_grad=False)
    plan = triton._BackwardPlan(Needs(), (), (), (), Recorder(), dq=Recorder(),
                                modifiers=triton._planned_modifiers(problem))
    monkeypatch.setattr(triton, "_backward_plan", lambda *_: plan)
    bound = triton.backend.bind_backward(problem, Saved(q, k, v, out, lse), dout, None, Needs())
    kept = [weakref.ref(tensor) for tensor in (q, k, v, out, lse, dout)]
    del q, k, v, out, lse, dout
    assert bound is not None
    assert [tensor() for tensor in kept] == [None] * 6
