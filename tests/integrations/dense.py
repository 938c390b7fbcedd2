"""Attention as a textbook has it, in float64 and with the whole score matrix: what the faces are compared with."""

import torch


def dense(q, k, v, visible=None, *, scale=None, softcap=None, bias=None, keep=None):
    """Return (out, lse) of (..., h, s, d) tensors; 0 and -inf where a query sees no key.

    ``keep``: what the probabilities are multiplied by after the softmax, dropout's factors.
    """
    q, k, v = q.double(), k.double(), v.double()
    k, v = (tensor.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for tensor in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    # Where nothing is seen, log 0 is right and its gradient is not: such rows are taken out and put back.
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    lse = scores.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
    probs = (scores - lse).exp()
    out = (probs if keep is None else probs * keep) @ v
    return out, lse.masked_fill(empty, float("-inf")).squeeze(-1)


def bottom_right(sq, sk, left=-1, right=-1):
    """Return who sees whom: query i has key i + sk - sq in the middle of its window; -1 is no bound."""
    distance = torch.arange(sk) - torch.arange(sq)[:, None] - (sk - sq)
    visible = torch.ones(sq, sk, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible


def alibi(slopes, sq, sk):
    """Return the bias of ALiBi slopes, (h,) or (b, h): -slope times the distance from the diagonal."""
    distance = torch.arange(sk) - torch.arange(sq)[:, None] - (sk - sq)
    return -slopes.double()[..., None, None] * distance.abs()


def close(found, wanted, tolerance=2e-5):
    """Compare with float64 results, infinities included."""
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=tolerance, atol=tolerance)
