"""What a backend is: a name, a predicate that refuses in words, and two functions."""

from typing import NamedTuple, Protocol

import torch

from tilewise.problem import AttentionProblem


class Gradients(NamedTuple):
    """Gradients of q, k and v; an entry that was not asked for is None."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None


class Backend(Protocol):
    """One way to compute attention. All of them mean the same (docs/maths.md); they differ in what they take.

    Tensors are (b, h, s, d) with any strides. A backend may be handed the out and lse of another backend.
    """

    name: str

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Return why this backend refuses the problem, as one sentence, or None if it takes it.

        The only place where a backend's limits are stated: forward and backward trust it.
        """

    def forward(
        self, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out (b, hq, sq, dv), strides ``problem.out_strides``, and lse (b, hq, sq), natural log, contiguous."""

    def backward(
        self, problem: AttentionProblem, saved: "Saved", dout: torch.Tensor, dlse: torch.Tensor | None,
        *, need_dq: bool, need_dkv: bool,
    ) -> Gradients:
        """Return the gradients that are needed, each dense, dims stored in the order of its input's."""


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass: O(s) memory."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
