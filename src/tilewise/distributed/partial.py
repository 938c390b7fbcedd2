"""Partial results over disjoint sets of keys, summed up as they come: the rule of :func:`tilewise.merge` in place."""

import torch

from tilewise.backends._support.triton import why_not_at_all
from tilewise.backends.base import Results
from tilewise.masks import Span


def sum_dtype(like: torch.Tensor) -> torch.dtype:
    """Return what parts of a result of this dtype are summed in: float32, or float64 of float64."""
    return torch.float64 if like.dtype is torch.float64 else torch.float32


class PartialResults:
    """The results of some query rows so far.

    Args:
        q: (b, hq, s, d), of the rank.
        dv: head dim of out.
        max_logit: whether it is wanted.
        summed: whether several parts have the same heads and rows. Their sums are float32 (float64 of float64 inputs),
            whatever the dtype of the parts: a result does not depend on the number of parts by more than its own
            rounding. Else each part is the result of its heads and rows, and stays as it is.
    """

    def __init__(self, q: torch.Tensor, dv: int, *, max_logit: bool, summed: bool) -> None:
        self._like, self._max_logit, self._summed = q, max_logit, summed
        self._shape = torch.Size((*q.shape[:3], dv))
        self._dtype = sum_dtype(q) if summed else q.dtype
        self._results: Results | None = None

    @property
    def results(self) -> Results:
        """What there is so far, to be changed in place.

        out: (b, hq, s, dv), normalised by the softmax of the keys so far; 0 where there was none. lse: (b, hq, s); -inf
        where there was none. max_logit: as lse, or None.
        """
        if self._results is None:
            q = self._like
            lse = q.new_full(q.shape[:3], float("-inf"), dtype=sum_dtype(q))
            self._results = Results(q.new_zeros(self._shape, dtype=self._dtype), lse,
                                    lse.clone() if self._max_logit else None)
        return self._results

    def add(self, heads: Span, rows: Span, part: Results) -> None:
        """Add a part: the results of some heads and rows. The first one is kept, and changed, if it has all of them."""
        if self._results is None and part.out.shape == self._shape and part.out.dtype is self._dtype:
            self._results = part
            return
        where = (slice(None), slice(heads.start, heads.stop), slice(rows.start, rows.stop))
        out, lse, max_logit = self.results
        own = Results(out[where], lse[where], None if max_logit is None else max_logit[where])
        if self._summed:
            _merge(own, part)
            return
        own.out.copy_(part.out)
        own.lse.copy_(part.lse)
        if own.max_logit is not None and part.max_logit is not None:
            own.max_logit.copy_(part.max_logit)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Let the sinks, (hq,), enter the denominator, once for all keys."""
        out, lse, _ = self.results
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        shift = total.masked_fill(total == float("-inf"), 0.0)
        out.mul_((lse - shift).exp_().unsqueeze(-1))
        lse.copy_(total)


def _merge(result: Results, part: Results) -> None:
    """Merge a part into the result so far, in place: on a GPU by a kernel that reads and writes memory once."""
    if result.out.device.type != "cuda" or why_not_at_all(result.out.dtype) is not None:
        merge_by_torch(result, part)
        return
    from tilewise.kernels.triton import merge_partial

    with torch.cuda.device(result.out.device):
        merge_partial.merge_partial(result, part)


def merge_by_torch(result: Results, part: Results) -> None:
    """Merge a part into the result so far, in place, on any device and in any dtype."""
    out, lse = result.out, result.lse
    total = torch.logaddexp(lse, part.lse)
    shift = total.masked_fill(total == float("-inf"), 0.0)  # −inf − (−inf) is NaN
    out.mul_((lse - shift).exp_().unsqueeze(-1))
    out.addcmul_(part.out.to(out.dtype), (part.lse - shift).exp_().unsqueeze(-1))
    lse.copy_(total)
    if result.max_logit is not None and part.max_logit is not None:
        torch.maximum(result.max_logit, part.max_logit, out=result.max_logit)


def sinks_gradient(sinks: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, dout: torch.Tensor,
                   dlse: torch.Tensor | None) -> torch.Tensor:
    """Return the sinks' gradient, −Σ exp(sink − lse)·(dout·out − dlse) (maths.md, eq. 22), in the sinks' dtype.

    Args:
        sinks: (hq,).
        lse: (b, hq, s), the sinks' part included.
        out, dout: (b, hq, s, dv).
        dlse: (b, hq, s), or None.
    """
    delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    empty = lse == float("-inf")
    weight = (sinks.to(lse.dtype)[:, None] - lse.masked_fill(empty, 0.0)).exp().masked_fill(empty, 0.0)
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)
