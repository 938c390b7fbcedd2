"""Gradients of a call's operands from what the kernels sum: rows, columns and moments of dS, or dS itself.

O(s) memory beside the gradients, apart from the buffer of bias_gradient.py for a 16-bit bias. The kernels write one
number for each query or key and head, in float32; torch computes the rest of the sum, over the dims that the operand is
broadcast along, in a fixed order.
"""

import torch

from tilewise.problem import AttentionProblem, Sizes
from tilewise.problem.options import Operands


class OperandGradients:
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

    def gradients(self, lse: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dbias, dalibi_slopes and dsinks; None for what was not asked for. lse, delta: (b, hq, sq).

        delta is 0 but for what arrives through lse where a query sees nothing by its position.
        """
        return self._of_bias(), self._of_slopes(), self._of_sinks(lse, delta)

    def _of_bias(self) -> torch.Tensor | None:
        bias = self._operands.bias
        if not self._dbias or bias is None:
            return None
        sums = self.rows if self.columns is None else self.columns
        if sums is None:
            return self.pairs
        by_sequence = self._by_sequence(sums, of_queries=self.columns is None)
        return _summed_to(by_sequence.unsqueeze(3 if self.columns is None else 2), bias)

    def _of_slopes(self) -> torch.Tensor | None:
        slopes = self._operands.alibi_slopes
        if self.moments is None or slopes is None:
            return None
        by_head = self.moments.sum(2) if self._problem.sequences.packed is None or len(slopes) == 1 else (
            self._totals(self.moments, of_queries=True))
        return _summed_to(by_head, slopes)

    def _of_sinks(self, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
        """Return −Σ exp(sink − lse)·delta: the sink is a key with v = 0 (maths.md, eq. 22).

        Of a query that sees no key lse is the sink, and delta what arrives through it; of padding lse is −inf.
        """
        sinks = self._operands.sinks
        if not self._dsinks or sinks is None:
            return None
        probs = torch.exp(sinks.float()[:, None] - lse)
        return -(probs * delta).masked_fill_(lse == float("-inf"), 0.0).sum((0, 2)).to(sinks.dtype)

    def _by_sequence(self, sums: torch.Tensor, *, of_queries: bool) -> torch.Tensor:
        """Turn sums over stored rows, (b, hq, s), into those of each sequence: (sequences, hq, longest or 1)."""
        sequences, bias = self._problem.sequences, self._operands.bias
        if sequences.packed is None or bias is None:
            return sums
        longest = bias.shape[2 if of_queries else 3]
        if longest == 1:
            return self._totals(sums, of_queries=of_queries).unsqueeze(2)
        begins = self._operands.cu_seqlens_q if of_queries else self._operands.cu_seqlens_k
        assert begins is not None
        rows = begins[:-1, None] + torch.arange(longest, device=sums.device)  # [sequences, longest]
        padded = torch.nn.functional.pad(sums[0], (0, 1))  # one more row, which those past a sequence's end read
        rows = torch.where(rows < begins[1:, None], rows, sums.shape[2])
        return padded[:, rows].transpose(0, 1)

    def _totals(self, sums: torch.Tensor, *, of_queries: bool) -> torch.Tensor:
        """Add up each packed sequence's rows: (1, hq, total) to (sequences, hq), in a fixed order."""
        begins = self._operands.cu_seqlens_q if of_queries else self._operands.cu_seqlens_k
        assert begins is not None
        return torch.segment_reduce(sums[0].T.contiguous(), "sum", offsets=begins.long(), axis=0, unsafe=True,
                                    initial=0)


def _float32(shape: Sizes, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _summed_to(sums: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sum along the dims that ``like`` has once, and round to its dtype."""
    along = [dim for dim, (size, own) in enumerate(zip(sums.shape, like.shape, strict=True)) if own == 1 and size != 1]
    return (sums.sum(along, keepdim=True) if along else sums).to(like.dtype)
