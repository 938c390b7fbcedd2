"""Tiles through tensor descriptors are the tiles through pointers: bit-equal results, under the interpreter."""

from dataclasses import replace

import pytest
import torch

from conformance.calls import operands_of, problem_of
from tilewise.kernels.triton.backward import dkdv_launch
from tilewise.kernels.triton.config import DbiasConfig, DkdvConfig, DqConfig, ForwardConfig
from tilewise.kernels.triton.dbias import dbias_launch
from tilewise.kernels.triton.dq import dq_launch
from tilewise.kernels.triton.forward import forward_launch
from tilewise.kernels.triton.launch import modifiers_of
from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.testing.cases import Case
from tilewise.testing.inputs import make_inputs

MASKS = {"no_mask": Mask(), "causal": causal("bottom_right"), "window": window(20, 3, "top_left")}
TILE = (32, 16, 4, 2)


@pytest.fixture(params=MASKS.values(), ids=MASKS)
def call(request, device):
    """A problem with ragged lengths and padded head dims, and its tensors."""
    case = Case("described", b=2, hq=4, hk=2, sq=70, sk=85, d=40, dv=24, mask=request.param, layout="bshd")
    inputs = make_inputs(case, torch.float16, device)
    problem = AttentionProblem.from_tensors(*inputs[:3], mask=case.mask)
    return problem, inputs


def forward(problem, inputs, *, descriptors):
    shape = (problem.b, problem.hq, problem.sq, problem.dv)
    out, lse = inputs.q.new_empty_strided(shape, problem.out_strides), inputs.dlse.new_empty(shape[:3])
    forward_launch(problem, ForwardConfig(*TILE, descriptors), "ieee")(*inputs[:3], out, lse)
    return out, lse


def test_forward_through_descriptors_is_bit_equal(call):
    through_pointers, through_descriptors = (forward(*call, descriptors=flag) for flag in (False, True))
    for expected, got in zip(through_pointers, through_descriptors, strict=True):
        assert expected.isfinite().any()
        assert torch.equal(expected, got)


def test_backward_through_descriptors_is_bit_equal(call):
    problem, inputs = call
    q, k, v, dout, _ = inputs
    out, lse = forward(problem, inputs, descriptors=False)
    delta = (out.float() * dout.float()).sum(-1)
    problem = replace(problem, direction="backward")
    results = []
    for flag in (False, True):
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
        dkdv_launch(problem, DkdvConfig(*TILE, flag), "ieee", dout.stride(), (dk.stride(), dv.stride()),
                    (True, True))(q, k, v, dout, lse, delta, dk, dv)
        dq_launch(problem, DqConfig(*TILE, flag), "ieee", dout.stride(), dq.stride())(q, k, v, dout, lse, delta, dq)
        results.append((dq, dk, dv))
    for expected, got in zip(*results, strict=True):
        assert expected.isfinite().all()
        assert expected.any()
        assert torch.equal(expected, got)


@pytest.mark.parametrize("shape", ["1hqk", "11qk", "b1qk"])
@pytest.mark.parametrize("lengths", [None, (70, 33)], ids=["dense", "padded"])
def test_gradient_of_a_bias_through_descriptors_is_bit_equal(shape, lengths, device):
    """With registers bounded, too: one that the launch got as an option."""
    case = Case("described_bias", b=2, hq=4, hk=2, sq=70, sk=85, d=40, dv=24, mask=causal("bottom_right"), bias=shape,
                layout="bshd", lengths_q=lengths, lengths_k=lengths)
    inputs = make_inputs(case, torch.float16, device)
    q, k, v, dout, dlse = inputs[:5]
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands).backward(lse_grad=False)
    modifiers, results = modifiers_of(problem, operands), []
    for described, registers in ((False, 0), (True, 0), (True, 168)):
        dbias = torch.full_like(operands.bias, float("nan"))
        launch = dbias_launch(problem, DbiasConfig(*TILE, described, registers), "ieee", dout.stride())
        assert launch.options.get("maxnreg", 0) == registers
        launch(q, k, v, dout, dlse, dlse, dbias, modifiers)
        results.append(dbias)
    assert results[0].isfinite().all()
    assert results[0].any()
    assert all(torch.equal(results[0], result) for result in results[1:])
