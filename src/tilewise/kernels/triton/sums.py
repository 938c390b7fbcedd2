"""Gradients of a call's operands from what the kernels sum: rows, columns and moments of dS, or dS itself.

O(s) memory beside the gradients. The kernels write one number for each query or key and head, in float32; the rest of
the sum, over what the operand is broadcast along, is torch's, in a fixed order.
"""

import torch

from tilewise.problem import AttentionProblem, Sizes
from tilewise.scores import Operands


class OperandSums:
    """The buffers that the kernels fill, and the gradients made of them.

    Attributes:
        rows: (b, hq, sq), Σ_j dS; for a bias without a key dim. None where it is not needed, as with the others.
        columns: (b, hq, sk), Σ_i dS; for a bias with a key dim, without a query dim.
        moments: (b, hq, sq), −Σ_j dS·distance; for ALiBi's slopes.
        pairs: the gradient itself of a bias with both dims, in its shape and dtype.
    """

    def __init__(self, problem: AttentionProblem, operands: Operands, *, dbias: bool, dalibi_slopes: bool,
                 dsinks: bool) -> None:
        self._problem, self._operands, self._dbias, self._dsinks = problem, operands, dbias, dsinks
        self.rows = self.columns = self.moments = self.pairs = None
        of_queries, of_keys = ((problem.b, problem.hq, length) for length in (problem.sq, problem.sk))
        if dbias and operands.bias is not None:
            shape = operands.bias.shape
            if shape[3] == 1:
                self.rows = _float32(of_queries, operands.bias)
            elif shape[2] == 1:
                self.columns = _float32(of_keys, operands.bias)
            else:
                self.pairs = torch.empty(shape, dtype=operands.bias.dtype, device=operands.bias.device)
        if dalibi_slopes and operands.alibi_slopes is not None:
            self.moments = _float32(of_queries, operands.alibi_slopes)

    def zero_(self) -> None:
        """Fill the buffers for a problem in which no pair is visible."""
        for buffer in (self.rows, self.columns, self.moments, self.pairs):
            if buffer is not None:
                buffer.zero_()

    def gradients(self, lse: torch.Tensor, delta: torch.Tensor,
                  dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return dbias, dalibi_slopes and dsinks; None for what was not asked for. lse, delta, dlse: (b, hq, sq)."""
        return self._of_bias(), self._of_slopes(), self._of_sinks(lse, delta, dlse)

    def _of_bias(self) -> torch.Tensor | None:
        bias = self._operands.bias
        if not self._dbias or bias is None:
            return None
        if self.rows is not None:
            return _summed_to(self.rows.unsqueeze(3), bias)
        return self.pairs if self.columns is None else _summed_to(self.columns.unsqueeze(2), bias)

    def _of_slopes(self) -> torch.Tensor | None:
        slopes = self._operands.alibi_slopes
        return None if self.moments is None or slopes is None else _summed_to(self.moments.sum(2), slopes)

    def _of_sinks(self, lse: torch.Tensor, delta: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor | None:
        """Return −Σ exp(sink − lse)·delta: the sink is a key with v = 0 (maths.md, eq. 22).

        A query that sees no key is left out of the sum, as its dout may hold anything: its lse is the sink, so that
        what arrives through lse is all there is.
        """
        sinks = self._operands.sinks
        if not self._dsinks or sinks is None:
            return None
        start, stop = self._problem.seeing_queries.start, self._problem.seeing_queries.stop
        probs = torch.exp(sinks.float()[:, None] - lse[:, :, start:stop])
        total = -(probs * delta[:, :, start:stop]).sum((0, 2))
        if dlse is not None:
            total = total + dlse[:, :, :start].sum((0, 2)) + dlse[:, :, max(start, stop):].sum((0, 2))
        return total.to(sinks.dtype)


def _float32(shape: Sizes, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _summed_to(sums: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sum along the dims that ``like`` has once, and round to its dtype."""
    along = [dim for dim, (size, own) in enumerate(zip(sums.shape, like.shape, strict=True)) if own == 1 and size != 1]
    return (sums.sum(along, keepdim=True) if along else sums).to(like.dtype)
