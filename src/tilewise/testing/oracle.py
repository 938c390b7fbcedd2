"""The truth: dense attention by definition in float64, and the same in the inputs' own dtype as a yardstick.

Nothing is tiled, recomputed or rescaled here. The float64 gradients come from automatic differentiation of the
definition, the yardstick's from the written-out formula, so that each can be tested against the other.
"""

from typing import NamedTuple

import torch

from tilewise.masks import Mask


class Results(NamedTuple):
    """Everything an attention call computes in both directions."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask,
           scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) in float64, from dense scores: O(sq x sk) memory.

    Args:
        q: (b, hq, sq, d), any float dtype; k: (b, hk, sk, d); v: (b, hk, sk, dv). All finite.
        mask: who sees whom.
        scale: factor of the scores; None = 1/sqrt(d).
    """
    out, lse, _ = _define(q.double(), k.double(), v.double(), mask, scale)
    return out, lse


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
              mask: Mask, scale: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv) in float64, given the gradients of out and, unless None, of lse."""
    with torch.enable_grad():
        leaves = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
        out, lse, _ = _define(leaves[0], leaves[1], leaves[2], mask, scale)
        if dlse is None:
            dlse = torch.zeros_like(lse)
        dq, dk, dv = torch.autograd.grad((out, lse), leaves, (dout.double(), dlse.double()))
    return dq, dk, dv


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
          mask: Mask, scale: float | None) -> Results:
    """Return all five results from dense attention whose every step is rounded to the inputs' own dtype.

    How far this is from the oracle is what the dtype itself costs: the yardstick of tolerance.py.
    The gradient of the scores is probs ∘ (dout vᵀ − delta) with delta = Σ dout ∘ out − dlse.
    """
    q, k, v, dout = (tensor.detach() for tensor in (q, k, v, dout))
    scale = _scale(scale, q)
    out, lse, probs = _define(q, k, v, mask, scale)
    delta = (dout * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(q.dtype)
    dscores = probs * (dout @ _per_query_head(v, q).mT - delta.unsqueeze(-1))
    dq = dscores @ _per_query_head(k, q) * scale
    dk = _per_key_head(dscores.mT @ q * scale, k)
    dv = _per_key_head(probs.mT @ dout, v)
    return Results(out, lse, dq, dk, dv)


def _define(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask,
            scale: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply the definition, out = softmax(scale · q kᵀ over visible keys) v; return (out, lse, probabilities)."""
    visible = mask.visible(q.shape[2], k.shape[2], q.device)
    blind = ~visible.any(-1)
    scores = q @ _per_query_head(k, q).mT * _scale(scale, q)
    # A blind row is computed from finite scores and then overwritten: the softmax of nothing has NaN gradients.
    scores = scores.masked_fill(~visible, float("-inf")).masked_fill(blind.unsqueeze(-1), 0.0)
    probs = torch.softmax(scores, -1).masked_fill(blind.unsqueeze(-1), 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(blind, float("-inf"))
    return probs @ _per_query_head(v, q), lse, probs


def _scale(scale: float | None, q: torch.Tensor) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def _per_query_head(tensor: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def _per_key_head(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(like.shape[0], like.shape[1], gradient.shape[1] // like.shape[1], *like.shape[2:]).sum(2)
