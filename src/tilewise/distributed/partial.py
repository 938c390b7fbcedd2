"""Partial results over disjoint sets of keys, summed up as they come: the rule of :func:`tilewise.merge` in place."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from tilewise.backends.base import Results
from tilewise.distributed.rows import has_kernels, rows_of, write_rows
from tilewise.distributed.segments import Segment
from tilewise.masks import Span
from tilewise.problem import dense_strides
from tilewise.support.caches import registered

_dense_strides = registered(lru_cache(maxsize=1024)(dense_strides))


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
        rounds: whether the last part of each row writes out in the dtype of q. Not where sinks are added behind.
    """

    def __init__(self, q: torch.Tensor, dv: int, *, max_logit: bool, summed: bool, rounds: bool) -> None:
        self._like, self._max_logit = q, max_logit
        self._shape = torch.Size((*q.shape[:3], dv))
        self._dtype = sum_dtype(q) if summed else q.dtype
        self._rounds = rounds and self._dtype is not q.dtype
        self._sums: torch.Tensor | None = None
        self._rounded: torch.Tensor | None = None
        self._of_rows: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def add(self, heads: Span, part: Results, segments: Sequence[Segment]) -> None:
        """Add a part: the results of some heads and of the segments' rows. The first of all rows is kept, and changed.

        Args:
            heads: of queries.
            part: out, (b, heads, rows, dv), lse and, where it is wanted, max_logit, (b, heads, rows).
            segments: what is the first, and the last, part of its rows.
        """
        if self._of_rows is None and part.out.shape == self._shape and part.out.dtype is self._dtype:
            self._sums, self._of_rows = part.out, (part.lse, part.max_logit)
            if self._rounds and not all(own.is_last for own in segments):
                for own in segments:
                    if own.is_last:
                        write_rows(rows_of(self._final(), own.rows, heads), rows_of(part.out, own.within))
            return
        for own in segments:
            self._add(heads, Results(rows_of(part.out, own.within), rows_of(part.lse, own.within), None if (
                part.max_logit is None) else rows_of(part.max_logit, own.within)), own)

    def leave_empty(self, heads: Span, rows: Span) -> None:
        """Let rows that have no part be 0, and -inf in lse and max_logit."""
        rows_of(self._final() if self._rounds else self._total(), rows, heads).zero_()
        for own in self._rows():
            if own is not None:
                rows_of(own, rows, heads).fill_(float("-inf"))

    def results(self) -> Results:
        """Return what all parts come to, with out in the dtype and the order of strides of q.

        out: (b, hq, s, dv), normalised by the softmax of all keys; lse: (b, hq, s); max_logit: as lse, or None.
        """
        lse, max_logit = self._rows()
        if self._rounded is not None:
            return Results(self._rounded, lse, max_logit)
        out, strides = self._total(), _dense_strides(self._shape, self._like.stride())
        if out.dtype is not self._like.dtype or out.stride() != strides:
            out = self._final().copy_(out)
        return Results(out, lse, max_logit)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Let the sinks, (hq,), enter the denominator, once for all keys."""
        out, (lse, _) = self._total(), self._rows()
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        shift = total.masked_fill(total == float("-inf"), 0.0)
        out.mul_((lse - shift).exp_().unsqueeze(-1))
        lse.copy_(total)

    def clear_lse(self, rows: Span) -> None:
        """Let rows that belong to no sequence have an lse of -inf, though there are sinks."""
        rows_of(self._rows()[0], rows).fill_(float("-inf"))

    def _add(self, heads: Span, part: Results, segment: Segment) -> None:
        rows, (lse, largest) = segment.rows, self._rows()
        lse, largest = rows_of(lse, rows, heads), None if largest is None else rows_of(largest, rows, heads)
        rounded = rows_of(self._final(), rows, heads) if self._rounds and segment.is_last else None
        if not segment.is_first:
            merge_part(Results(rows_of(self._total(), rows, heads), lse, largest), part, rounded)
            return
        write_rows(rows_of(self._total(), rows, heads) if rounded is None else rounded, part.out)
        lse.copy_(part.lse)
        if largest is not None and part.max_logit is not None:
            largest.copy_(part.max_logit)

    def _total(self) -> torch.Tensor:
        if self._sums is None:
            self._sums = self._like.new_empty(self._shape, dtype=self._dtype)
        return self._sums

    def _final(self) -> torch.Tensor:
        if self._rounded is None:
            self._rounded = self._like.new_empty_strided(self._shape, _dense_strides(self._shape, self._like.stride()))
        return self._rounded

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._of_rows is None:
            lse = self._like.new_empty(self._shape[:3], dtype=sum_dtype(self._like))
            self._of_rows = lse, torch.empty_like(lse) if self._max_logit else None
        return self._of_rows


class QueryGradient:
    """The gradient of a rank's queries so far: the first part of each row is taken, the last writes the dtype of q.

    Args:
        q: (b, hq, s, d), of the rank. Parts are float32, or have the dtype of q where they are of different rows.
    """

    def __init__(self, q: torch.Tensor) -> None:
        self._like = q
        self._sum: torch.Tensor | None = None
        self._held = Span(0, q.shape[2])  # the rows that the sum has
        self._rounded: torch.Tensor | None = None

    def add(self, heads: Span, part: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Add a part, (b, heads, rows, d), of some heads of queries.

        The first one is kept, and changed, if it is of all heads and of neighbouring rows, to some of which others are
        added, or of all rows.
        """
        rows = Span(segments[0].rows.start, segments[-1].rows.stop) if segments else Span(0, 0)
        is_whole, is_done = part.shape == self._like.shape, all(own.is_last for own in segments)
        is_kept = self._sum is None and len(heads) == self._like.shape[1] and len(rows) == part.shape[2] and (
            not is_done or (is_whole and self._rounded is None))
        if is_kept:
            self._sum, self._held = part, rows
            if is_done:
                return
        for own in segments:
            if own.is_first and is_kept and not own.is_last:
                continue
            of_rows = rows_of(part, own.within)
            so_far = None if own.is_first and own.is_last else self._so_far(heads, own.rows, part.dtype)
            out = rows_of(self._final(), own.rows, heads) if own.is_last or so_far is None else so_far
            write_rows(out, of_rows, None if own.is_first else so_far)

    def leave_empty(self, heads: Span, rows: Span) -> None:
        """Let rows that have no part be 0."""
        rows_of(self._final(), rows, heads).zero_()

    def get(self) -> torch.Tensor:
        """Return what all parts come to, in the dtype of q."""
        if self._rounded is None and self._sum is not None:
            return self._sum.to(self._like.dtype)
        return self._final()

    def _so_far(self, heads: Span, rows: Span, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of rows of the sum, which has all rows from the first one on that the kept part lacks."""
        if self._sum is None or rows.start < self._held.start or rows.stop > self._held.stop:
            total = torch.empty_like(self._like, dtype=dtype)
            if self._sum is not None:
                rows_of(total, self._held).copy_(self._sum)
            self._sum, self._held = total, Span(0, total.shape[2])
        first = self._held.start
        return rows_of(self._sum, Span(rows.start - first, rows.stop - first), heads)

    def _final(self) -> torch.Tensor:
        if self._rounded is None:
            self._rounded = torch.empty_like(self._like)
        return self._rounded


def merge_part(result: Results, part: Results, rounded: torch.Tensor | None = None) -> None:
    """Merge a part into the result so far, in place: on a GPU by a kernel that reads and writes memory once.

    ``rounded``: where out is written in place of the result's, in any float dtype; the result's is then of no use.
    """
    if not has_kernels(result.out):
        merge_by_torch(result, part, rounded)
        return
    from tilewise.kernels.triton import merge_partial

    with torch.cuda.device(result.out.device):
        merge_partial.merge_partial(result, part, rounded)


def merge_by_torch(result: Results, part: Results, rounded: torch.Tensor | None = None) -> None:
    """Merge a part into the result so far, as :func:`merge_part`, on any device and in any dtype."""
    out, lse = result.out, result.lse
    total = torch.logaddexp(lse, part.lse)
    shift = total.masked_fill(total == float("-inf"), 0.0)  # −inf − (−inf) is NaN
    out.mul_((lse - shift).exp_().unsqueeze(-1))
    out.addcmul_(part.out.to(out.dtype), (part.lse - shift).exp_().unsqueeze(-1))
    if rounded is not None:
        rounded.copy_(out)
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
    delta = (out.to(lse.dtype) * dout).sum(-1)  # dout becomes float32 in the product: one pass over memory less
    if dlse is not None:
        delta = delta - dlse
    empty = lse == float("-inf")
    weight = (sinks.to(lse.dtype)[:, None] - lse.masked_fill(empty, 0.0)).exp().masked_fill(empty, 0.0)
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)
