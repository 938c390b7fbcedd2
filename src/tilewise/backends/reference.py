"""Runs the tiled algorithm in plain PyTorch: takes every problem on every device, and defines what is right."""

import torch

from tilewise.backends.base import Gradients, Saved
from tilewise.kernels.reference.backward import attention_backward
from tilewise.kernels.reference.forward import attention_forward
from tilewise.problem import AttentionProblem, dense_strides


class ReferenceBackend:
    """Plain PyTorch, O(s) memory; deterministic as far as torch's matrix product is."""

    name = "reference"

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Return None: there is no limit."""
        return None

    def forward(self, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor,
                v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`tilewise.backends.base.Backend`."""
        shape = (problem.b, problem.hq, problem.sq, problem.dv)
        out = q.new_empty_strided(shape, problem.out_strides)
        lse = q.new_empty(shape[:3], dtype=problem.lse_dtype)
        with _exact_products(problem.device):
            attention_forward(problem, q, k, v, out, lse)
        return out, lse

    def backward(self, problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                 *, need_dq: bool, need_dkv: bool) -> Gradients:
        """See :class:`tilewise.backends.base.Backend`."""
        gradients = Gradients(*(
            t.new_empty_strided(t.shape, dense_strides(t.shape, t.stride())) if needed else None
            for t, needed in ((saved.q, need_dq), (saved.k, need_dkv), (saved.v, need_dkv))
        ))
        with _exact_products(problem.device):
            attention_backward(problem, saved, dout, dlse, gradients)
        return gradients


def _exact_products(device: torch.device) -> torch.autocast:
    """Keep an autocast region of the caller from rounding the float32 tiles to half."""
    return torch.autocast(device.type, enabled=False)


backend = ReferenceBackend()
