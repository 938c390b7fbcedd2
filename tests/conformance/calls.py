"""Run one call on one backend, forward and backward, and hold all five results against the oracle."""

import pytest
import torch

from tilewise import AttentionOutput, attention
from tilewise.problem import AttentionProblem
from tilewise.testing.oracle import Results, attend, gradients, yardsticks
from tilewise.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_within_budget

# Which outputs a loss is made of: the gradient arrives through these.
THROUGH = ("out", "lse", "out_and_lse")


def problem_of(case, inputs, *, deterministic=False):
    return AttentionProblem.from_tensors(*inputs[:3], mask=case.mask, scale=case.scale, deterministic=deterministic)


def skip_if_refused(backend, problem):
    reason = backend.why_not(problem)
    if reason is not None:
        pytest.skip(reason)


def forward(backend, case, inputs, *, deterministic=False):
    skip_if_refused(backend, problem_of(case, inputs, deterministic=deterministic))
    return attention(*inputs[:3], mask=case.mask, scale=case.scale, return_aux=("lse",), backend=backend.name,
                     deterministic=deterministic)


def forward_and_backward(backend, case, inputs, through="out", *, deterministic=False):
    problem = problem_of(case, inputs, deterministic=deterministic)
    skip_if_refused(backend, problem.backward(lse_grad=through != "out"))
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    result = forward(backend, case, leaves, deterministic=deterministic)
    return Results(*result, *backpropagate(result, leaves, inputs, through))


def backpropagate(result: AttentionOutput, leaves, inputs, through):
    if through == "out":
        return torch.autograd.grad(result.out, leaves, inputs.dout)
    if through == "lse":
        return torch.autograd.grad(result.lse, leaves, inputs.dlse)
    return torch.autograd.grad((result.out, result.lse), leaves, (inputs.dout, inputs.dlse))


def assert_forward_within_budget(case, inputs, result):
    q, k, v, dout, dlse = inputs
    exact = attend(q, k, v, case.mask, case.scale)
    samples = yardsticks(q, k, v, dout, dlse, case.mask, case.scale)
    for i, name in enumerate(("out", "lse")):
        assert_within_budget(name, result[i], exact[i], [sample[i] for sample in samples], OUTPUT_FACTOR)


def assert_gradients_within_budget(case, inputs, got, through="out"):
    """Hold (dq, dk, dv) against the oracle; a gradient that does not arrive counts as zero there."""
    q, k, v, dout, dlse = inputs
    dout = torch.zeros_like(dout) if through == "lse" else dout
    dlse = None if through == "out" else dlse
    exact = gradients(q, k, v, dout, dlse, case.mask, case.scale)
    samples = yardsticks(q, k, v, dout, dlse, case.mask, case.scale)
    for i, name in enumerate(("dq", "dk", "dv")):
        assert_within_budget(name, got[i], exact[i], [sample[i + 2] for sample in samples], GRADIENT_FACTOR)
