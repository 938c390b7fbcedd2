"""Run one call on one backend, forward and backward, and hold all its results against the oracle.

A case's operands are made anew wherever none are given: they are the same numbers each time.
"""

import pytest
import torch

from tilewise.api import AttentionOutput
from tilewise.backends.base import Gradients, Needs
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands
from tilewise.testing.inputs import call, make_inputs, make_operands, padding_of
from tilewise.testing.oracle import Changes, Results, attend, gradients, visible_pairs, yardsticks
from tilewise.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_within_budget

# Which outputs a loss is made of: the gradient arrives through these.
THROUGH = ("out", "lse", "out_and_lse")
TRAINABLE = ("bias", "alibi_slopes", "sinks")


def operands_of(case, inputs):
    return make_operands(case, inputs[0].dtype, inputs[0].device)


def problem_of(case, inputs, operands=None, *, deterministic=False, max_logit=False):
    operands = operands_of(case, inputs) if operands is None else operands
    return AttentionProblem.from_tensors(*inputs[:3], operands, mask=case.mask, scale=case.scale,
                                         settings=case.settings._replace(max_logit=max_logit),
                                         deterministic=deterministic)


def visible_of(case, device="cpu"):
    """Return which pairs take part, by position and by data: (b, hq, sq, sk), of sequences as of batch entries."""
    inputs = make_inputs(case, torch.float32, device)
    visible = visible_pairs(*inputs[:2], case.mask, make_operands(case, torch.float32, device))
    return visible.expand(case.b, case.hq, -1, -1)


def stored(case, flags, side):
    """Put flags of the positions of each sequence, (b, h, longest), where the tensors have them; False in padding."""
    taking_part = ~padding_of(case, side, flags.device)
    whole = torch.zeros(*taking_part.shape, flags.shape[1], dtype=torch.bool, device=flags.device)
    for number, span in enumerate(case.spans(side)):
        entry = 0 if case.packed else number
        whole[entry, span.start:span.stop] = flags[number, :, :len(span)].mT
    return whole.transpose(1, 2)


def skip_if_refused(backend, problem):
    reason = backend.why_not(problem)
    if reason is not None:
        pytest.skip(reason)


def forward(backend, case, inputs, operands=None, *, deterministic=False):
    operands = operands_of(case, inputs) if operands is None else operands
    skip_if_refused(backend, problem_of(case, inputs, operands, deterministic=deterministic))
    return call(case, inputs[:3], operands, return_aux=("lse",), backend=backend.name, deterministic=deterministic)


def forward_and_backward(backend, case, inputs, through="out", operands=None, *, deterministic=False):
    operands = operands_of(case, inputs) if operands is None else operands
    problem = problem_of(case, inputs, operands, deterministic=deterministic)
    skip_if_refused(backend, problem.backward(lse_grad=through != "out"))
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    given = trainable(operands)
    operands = operands._replace(**given)
    result = forward(backend, case, leaves, operands, deterministic=deterministic)
    dq, dk, dv, *others = backpropagate(result, [*leaves, *given.values()], inputs, through)
    return Results(*result, dq, dk, dv, **{f"d{name}": other for name, other in zip(given, others, strict=True)})


def trainable(operands: Operands) -> dict[str, torch.Tensor]:
    """Return the operands that have a gradient, as leaves."""
    return {name: operand.detach().requires_grad_() for name in TRAINABLE
            if (operand := getattr(operands, name)) is not None}


def needs_of(operands: Operands) -> Needs:
    """Return the needs of a call in which every tensor that can has a gradient."""
    return Needs(True, True, *(getattr(operands, name) is not None for name in TRAINABLE))


def backpropagate(result: AttentionOutput, leaves, inputs, through):
    if through == "out":
        return torch.autograd.grad(result.out, leaves, inputs.dout)
    if through == "lse":
        return torch.autograd.grad(result.lse, leaves, inputs.dlse)
    return torch.autograd.grad((result.out, result.lse), leaves, (inputs.dout, inputs.dlse))


def assert_forward_within_budget(case, inputs, result, operands=None):
    q, k, v, dout, dlse = inputs
    changes = Changes(operands_of(case, inputs) if operands is None else operands, case.settings)
    exact = attend(q, k, v, case.mask, case.scale, changes)
    samples = yardsticks(q, k, v, dout, dlse, case.mask, case.scale, changes)
    _assert_outputs(result, exact, samples)


def assert_gradients_within_budget(case, inputs, got, through="out", operands=None):
    """Hold every gradient against the oracle; one that does not arrive at an output counts as zero there."""
    q, k, v, dout, dlse = inputs
    dout = torch.zeros_like(dout) if through == "lse" else dout
    dlse = None if through == "out" else dlse
    changes = Changes(operands_of(case, inputs) if operands is None else operands, case.settings)
    exact = gradients(q, k, v, dout, dlse, case.mask, case.scale, changes)
    _assert_gradients(got, exact, yardsticks(q, k, v, dout, dlse, case.mask, case.scale, changes))


def assert_both_within_budget(case, inputs, results):
    """Hold out, lse and every gradient, which arrives through out, against one oracle; return its gradients."""
    changes = Changes(operands_of(case, inputs), case.settings)
    terms = (case.mask, case.scale, changes)
    samples = yardsticks(*inputs[:4], None, *terms)
    _assert_outputs(results, attend(*inputs[:3], *terms), samples)
    exact = gradients(*inputs[:4], None, *terms)
    _assert_gradients(results.gradients, exact, samples)
    return exact


def _assert_outputs(got, exact, samples):
    for i, name in enumerate(("out", "lse")):
        assert_within_budget(name, got[i], exact[i], [sample[i] for sample in samples], OUTPUT_FACTOR)


def _assert_gradients(got, exact, samples):
    got = Gradients(*got)
    assert [gradient is None for gradient in got] == [gradient is None for gradient in exact]
    for name, gradient, true in zip(Gradients._fields, got, exact, strict=True):
        if gradient is not None:
            assert_within_budget(name, gradient, true, [getattr(sample, name) for sample in samples], GRADIENT_FACTOR)
