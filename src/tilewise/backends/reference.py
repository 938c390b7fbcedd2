"""Runs the tiled algorithm in plain PyTorch: takes nearly every problem on every device, and defines what is right."""

import torch

from tilewise.backends._support.current import without_autocast
from tilewise.backends.base import Gradients, Needs, Results, Saved
from tilewise.kernels.reference.backward import GradientTensors, attention_backward
from tilewise.kernels.reference.forward import attention_forward
from tilewise.kernels.reference.sequences import backward_by_sequence, forward_by_sequence
from tilewise.problem import AttentionProblem, dense_strides
from tilewise.problem.options import NO_OPERANDS, Operands


class ReferenceBackend:
    """Plain PyTorch, O(s) memory; deterministic as far as torch's matrix product is.

    Reads lengths that are data on the host, and waits for the device to do so.
    """

    name = "reference"

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Return a reason against: a function without a torch twin, or products whose bits no batch may change.

        On an H200 torch's batched product gave a sequence other bits beside other neighbours; on CPUs none was seen.
        """
        if problem.deterministic and problem.device.type != "cpu":
            return (f"gives a sequence bits that depend on its batch on {problem.device.type.upper()} devices, and a "
                    "deterministic result was asked for")
        for facts in problem.scores.functions:
            if facts.code.torch is None:
                return f"needs a torch function, got {facts.code.name} without one; backend='triton' takes a triton one"
        return None

    def forward(self, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                operands: Operands = NO_OPERANDS) -> Results:
        """See :class:`tilewise.backends.base.Backend`."""
        shape = (problem.b, problem.hq, problem.sq, problem.dv)
        out = q.new_empty_strided(shape, problem.out_strides, dtype=problem.out_dtype)
        lse = q.new_empty(shape[:3], dtype=problem.lse_dtype)
        results = Results(out, lse, torch.empty_like(lse) if problem.scores.max_logit else None)
        compute = forward_by_sequence if problem.sequences.are_data else attention_forward
        with without_autocast(problem.device.type):
            compute(problem, (q, k, v), operands, results)
        return results

    def backward(self, problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                 needs: Needs = Needs()) -> Gradients:  # noqa: B008 - a value, never changed
        """See :class:`tilewise.backends.base.Backend`."""
        operands = saved.operands
        inputs = ((saved.q, needs.dq), (saved.k, needs.dkv), (saved.v, needs.dkv))
        others = ((operands.bias, needs.dbias), (operands.alibi_slopes, needs.dalibi_slopes),
                  (operands.sinks, needs.dsinks))
        gradients = GradientTensors(
            *(t.new_empty_strided(t.shape, dense_strides(t.shape, t.stride()), dtype=problem.out_dtype)
              if needed else None for t, needed in inputs),
            *(t.new_empty(t.shape) if needed and t is not None else None for t, needed in others))
        compute = backward_by_sequence if problem.sequences.are_data else attention_backward
        with without_autocast(problem.device.type):
            compute(problem, saved[:5], operands, dout, dlse, gradients)
        return Gradients(*gradients)


backend = ReferenceBackend()
