"""The truth: dense attention by definition in float64, and the same in the inputs' own dtype as a yardstick.

Nothing is tiled, recomputed or rescaled here. The float64 gradients come from automatic differentiation of the
definition, the yardstick's from the written-out formula, so that each can be tested against the other.
"""

from typing import NamedTuple

import torch

from tilewise.masks import Mask

_FEW_SCORES = 2**20  # for which a pass over them a head dim costs little


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
    visible = mask.visible(q.shape[2], k.shape[2], q.device)
    scores, blind = _scores(q.double(), k.double(), visible, _scale(scale, q))
    return _reduce(scores, blind, v.double())


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
              mask: Mask, scale: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv) in float64, given the gradients of out and, unless None, of lse."""
    with torch.enable_grad():
        leaves = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
        out, lse = attend(leaves[0], leaves[1], leaves[2], mask, scale)
        if dlse is None:
            dlse = torch.zeros_like(lse)
        dq, dk, dv = torch.autograd.grad((out, lse), leaves, (dout.double(), dlse.double()))
    return dq, dk, dv


def yardsticks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
               mask: Mask, scale: float | None) -> tuple[Results, ...]:
    """Return :func:`dense` in eight orders of summation.

    One order is one throw of the rounding errors. In float32, where a kernel is no more precise than the yardstick,
    the largest error of a small tensor is decided by a few elements, and two equally good results were seen to
    differ there more than threefold; the worst of eight orders says what the dtype costs.
    """
    return tuple(dense(q, k, v, dout, dlse, mask, scale, order) for order in range(8))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
          mask: Mask, scale: float | None, order: int = 0) -> Results:
    """Return all five results from dense attention whose every step is rounded to the inputs' own dtype.

    How far this is from the oracle is what the dtype itself costs: the yardstick of tolerance.py.

    Args:
        q, k, v, dout, dlse: as in :func:`gradients`, in the dtype to be judged.
        mask, scale: as in :func:`attend`.
        order: 0 sums as the tensors lie; another number seeds a shuffle of positions and head dims, which changes
            nothing but the rounding. Odd ones also add the scores up one head dim after another, as a tile kernel
            does (a BLAS may split the sum and round less; seen at d 256 in float32: a third); take delta off dout vᵀ
            before that is rounded, as a product does whose sum starts from −delta; and move delta by one unit in the
            last place, up or down at random (Monte Carlo arithmetic; Parker, Pierce, Eggert, 2000): in a row that
            sees one key the difference is 0, and by luck its rounding errors are too, in all the orders of a small
            sum.
    """
    q, k, v, dout = (tensor.detach() for tensor in (q, k, v, dout))
    dlse = torch.zeros(q.shape[:3], dtype=q.dtype, device=q.device) if dlse is None else dlse.to(q.dtype)
    scale, visible = _scale(scale, q), mask.visible(q.shape[2], k.shape[2], q.device)
    # A backward pass in O(s) memory knows a row's softmax by its lse alone, kept in float32: the rounding of lse,
    # eps · |lse|, enters every probability, and so it does here. The order below is that of another kernel's.
    scores, _ = _scores(q, k, visible, scale)
    saved_lse = torch.logsumexp(scores.to(torch.promote_types(q.dtype, torch.float32)), -1)
    if order == 0:
        return _dense(q, k, v, (dout, dlse, saved_lse), visible, scale, nudge=None)
    generator = torch.Generator().manual_seed(order)
    queries, keys, dims, value_dims = (torch.randperm(size, generator=generator).to(q.device)
                                       for size in (q.shape[2], k.shape[2], q.shape[3], v.shape[3]))
    nudge = None if order % 2 == 0 else 2 * torch.randint(2, q.shape[:3], generator=generator).to(q.device) - 1
    out, lse, dq, dk, dv = _dense(
        q[:, :, queries][..., dims], k[:, :, keys][..., dims], v[:, :, keys][..., value_dims],
        (dout[:, :, queries][..., value_dims], dlse[:, :, queries], saved_lse[:, :, queries]),
        visible[queries][:, keys], scale, nudge)
    queries, keys, dims, value_dims = (shuffled.argsort() for shuffled in (queries, keys, dims, value_dims))
    return Results(out[:, :, queries][..., value_dims], lse[:, :, queries], dq[:, :, queries][..., dims],
                   dk[:, :, keys][..., dims], dv[:, :, keys][..., value_dims])


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, incoming: tuple[torch.Tensor, ...],
           visible: torch.Tensor, scale: float, nudge: torch.Tensor | None) -> Results:
    """Apply the written-out formulas, dscores = probs ∘ (dout vᵀ − delta) with delta = Σ dout ∘ out − dlse.

    Args:
        q, k, v, visible, scale: the problem.
        incoming: dout, dlse and the lse that the forward pass saved.
        nudge: None rounds dout vᵀ before delta is taken off; units in the last place, (b, hq, sq), are added to delta
            before it is taken off the unrounded product.
    """
    dout, dlse, saved_lse = incoming
    scores, blind = _scores(q, k, visible, scale, in_turn=nudge is not None)
    out, lse = _reduce(scores, blind, v)
    probs = torch.exp(scores.to(saved_lse.dtype) - saved_lse.unsqueeze(-1))
    probs = probs.masked_fill(blind.unsqueeze(-1), 0.0).to(q.dtype)
    delta = (dout * out).sum(-1) - dlse
    values = _per_query_head(v, q)
    if nudge is None:
        difference = dout @ values.mT - delta.unsqueeze(-1)
    else:
        nudged = delta.double() * (1.0 + nudge * torch.finfo(q.dtype).eps)
        difference = (dout.double() @ values.double().mT - nudged.unsqueeze(-1)).to(q.dtype)
    dscores = probs * difference
    dq = dscores @ _per_query_head(k, q) * scale
    dk = _per_key_head(dscores.mT @ q * scale, k)
    return Results(out, lse, dq, dk, _per_key_head(probs.mT @ dout, v))


def _scores(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, scale: float, *,
            in_turn: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale · q kᵀ with -inf where hidden, and which queries are blind; a blind row is 0 all along."""
    blind = ~visible.any(-1)
    keys = _per_query_head(k, q)
    if in_turn:
        scores = (_product_in_turn(q, keys) * scale).to(q.dtype)
    else:
        scores = q @ keys.mT * scale
    # A blind row is computed from finite scores and overwritten later: the softmax of nothing has NaN gradients.
    return scores.masked_fill(~visible, float("-inf")).masked_fill(blind.unsqueeze(-1), 0.0), blind


def _product_in_turn(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return q keysᵀ, added up in float32 one head dim after another; eight at a time where there are many scores."""
    wide = torch.promote_types(q.dtype, torch.float32)
    total = torch.zeros(*q.shape[:3], keys.shape[2], dtype=wide, device=q.device)
    step = 1 if total.numel() <= _FEW_SCORES else 8
    for start in range(0, q.shape[3], step):
        part = slice(start, start + step)
        total += q[..., part].to(wide) @ keys[..., part].to(wide).mT
    return total


def _reduce(scores: torch.Tensor, blind: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out = softmax(scores) v and lse = log Σ exp(scores); 0 and -inf in blind rows."""
    probs = torch.softmax(scores, -1).masked_fill(blind.unsqueeze(-1), 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(blind, float("-inf"))
    return probs @ _per_query_head(v, scores), lse


def _scale(scale: float | None, q: torch.Tensor) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def _per_query_head(tensor: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def _per_key_head(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(like.shape[0], like.shape[1], gradient.shape[1] // like.shape[1], *like.shape[2:]).sum(2)
