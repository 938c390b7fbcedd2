"""Sequences whose lengths are data, one after another: each is a call of its own, on views of the whole one's tensors.

The lengths are read on the host: unlike other backends, this one waits for the device.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch

from tilewise.errors import InvalidInput
from tilewise.kernels.reference.backward import GradientTensors, Saved, attention_backward
from tilewise.kernels.reference.differentiable import Results as DifferentiableResults
from tilewise.kernels.reference.differentiable import differentiable_attention, joined_as, nothing_of
from tilewise.kernels.reference.forward import Inputs, Results, attention_forward
from tilewise.kernels.reference.primitives import tile_dtype
from tilewise.masks import Span
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands
from tilewise.problem.sequences import DENSE


def forward_by_sequence(problem: AttentionProblem, inputs: Inputs, operands: Operands, results: Results) -> None:
    """Do what :func:`attention_forward` does, for lengths that are data.

    Padding gives out 0, and -inf in lse and max_logit.
    """
    out, lse, max_logit = results
    out.zero_()
    lse.fill_(float("-inf"))
    if max_logit is not None:
        max_logit.fill_(float("-inf"))
    for sequence in _sequences(problem, operands):
        q, k, v = sequence.rows(inputs, "qkk")
        own_out, own_lse = sequence.rows((out, lse), "qq")
        own_max = None if max_logit is None else sequence.rows((max_logit,), "q")[0]
        own = own_out, own_lse, own_max
        attention_forward(sequence.problem(problem), (q, k, v), sequence.operands(operands), own,
                          sequence.number * problem.hq)


def backward_by_sequence(problem: AttentionProblem, saved: Saved, operands: Operands, dout: torch.Tensor,
                         dlse: torch.Tensor | None, gradients: GradientTensors) -> None:
    """Do what :func:`attention_backward` does, for lengths that are data; padding has gradients of 0.

    What sequences share (a bias of one batch, slopes, sinks) adds up in the tile's dtype, and is rounded once.
    """
    sums = GradientTensors(*gradients[:3], *(
        None if gradient is None else torch.zeros_like(gradient, dtype=tile_dtype(problem.dtype))
        for gradient in gradients[3:]))
    for gradient in gradients[:3]:
        if gradient is not None:
            gradient.zero_()
    for sequence in _sequences(problem, operands):
        q, k, v, out, lse = sequence.rows(saved, "qkkqq")
        own_dout, own_dlse = sequence.rows((dout,), "q")[0], None if dlse is None else sequence.rows((dlse,), "q")[0]
        places = sequence.gradients(sums)
        made = GradientTensors(*places[:3], *(None if place is None else torch.empty_like(place)
                                              for place in places[3:]))
        attention_backward(sequence.problem(problem), (q, k, v, out, lse), sequence.operands(operands), own_dout,
                           own_dlse, made, sequence.number * problem.hq)
        for place, own in zip(places[3:], made[3:], strict=True):
            if place is not None and own is not None:
                place.add_(own)
    for gradient, total in zip(gradients[3:], sums[3:], strict=True):
        if gradient is not None and total is not None:
            gradient.copy_(total)


def differentiable_by_sequence(problem: AttentionProblem, inputs: Inputs,
                               operands: Operands) -> DifferentiableResults:
    """Do what :func:`differentiable_attention` does, for lengths that are data; padding has derivatives of 0."""
    sequences = list(_sequences(problem, operands))
    parts = []
    for sequence in sequences:
        q, k, v = sequence.rows(inputs, "qkk")
        parts.append(differentiable_attention(sequence.problem(problem), (q, k, v), sequence.operands(operands),
                                              sequence.number * problem.hq))
    outs, lses, max_logits = ([part[i] for part in parts] for i in range(3))
    nothing, shape = nothing_of(problem, inputs, operands), (problem.b, problem.hq, problem.sq)
    padding = torch.full(shape, float("-inf"), dtype=problem.lse_dtype, device=problem.device)
    out = torch.zeros((*shape, problem.dv), dtype=problem.dtype, device=problem.device) + nothing
    out, lse = _with_rows(out, sequences, outs), _with_rows(padding + nothing, sequences, lses).contiguous()
    return joined_as(problem, (out,)), lse, _with_rows(padding, sequences, max_logits).contiguous()


class _Sequence(NamedTuple):
    """One sequence: its number, the batch entry that it lies in, and the rows of that entry that take part."""

    number: int
    entry: int
    queries: Span
    keys: Span

    def problem(self, whole: AttentionProblem) -> AttentionProblem:
        """Describe the sequence as a call whose lengths are its shapes."""
        return replace(whole, b=1, sq=len(self.queries), sk=len(self.keys), sequences=DENSE)

    def rows(self, tensors: tuple[torch.Tensor, ...], sides: str) -> list[torch.Tensor]:
        """Cut the sequence out of (b, h, s, ...) tensors of queries ("q") or keys ("k")."""
        spans = {"q": self.queries, "k": self.keys}
        return [tensor[self.entry:self.entry + 1, :, spans[side].start:spans[side].stop]
                for tensor, side in zip(tensors, sides, strict=True)]

    def operands(self, whole: Operands) -> Operands:
        """Cut every operand to the sequence, and leave out the lengths."""
        bias, mask, slopes = (self._part(operand) for operand in (whole.bias, whole.mask, whole.alibi_slopes))
        documents = [None if ids is None else ids[min(self.entry, len(ids) - 1)][None, :, span.start:span.stop]
                     for ids, span in ((whole.documents_q, self.queries), (whole.documents_k, self.keys))]
        return Operands(bias, slopes, mask, whole.sinks, whole.seed, documents_q=documents[0],
                        documents_k=documents[1], score_tensors=whole.score_tensors, mask_tensors=whole.mask_tensors)

    def gradients(self, whole: GradientTensors) -> GradientTensors:
        """Return the places of the sequence's gradients."""
        dq, dk, dv = (None if gradient is None else self.rows((gradient,), side)[0]
                      for gradient, side in zip(whole[:3], "qkk", strict=True))
        return GradientTensors(dq, dk, dv, self._part(whole.dbias), self._part(whole.dalibi_slopes), whole.dsinks)

    def _part(self, operand: torch.Tensor | None) -> torch.Tensor | None:
        """Cut (n|1, hq|1, queries|1, keys|1), or slopes (n|1, hq), to the sequence; what is broadcast stays 1."""
        if operand is None:
            return None
        if operand.shape[0] > 1:
            operand = operand[self.number:self.number + 1]
        for dim, span in list(enumerate((self.queries, self.keys), start=2))[:operand.dim() - 2]:
            if operand.shape[dim] > 1:
                if len(span) > operand.shape[dim]:
                    raise InvalidInput(f"max_seqlen_{'qk'[dim - 2]} is {operand.shape[dim]}, the size of a bias or a "
                                       f"mask, and a sequence has {len(span)}; allowed is the longest one's or more.")
                operand = operand.narrow(dim, 0, len(span))
        return operand


def _with_rows(padding: torch.Tensor, sequences: list["_Sequence"], parts: list[torch.Tensor]) -> torch.Tensor:
    """Return (b, h, s, ...) padding with each sequence's queries in their place; stored as (b, s, h, ...)."""
    if not sequences:
        return padding
    by_row = padding.transpose(1, 2)
    places = [torch.arange(sequence.queries.start, sequence.queries.stop, device=padding.device)
              + sequence.entry * by_row.shape[1] for sequence in sequences]
    rows = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
    return by_row.flatten(0, 1).index_copy(0, torch.cat(places), rows).reshape(by_row.shape).transpose(1, 2)


def _sequences(problem: AttentionProblem, operands: Operands) -> Iterator[_Sequence]:
    queries = _spans(operands.cu_seqlens_q, operands.seqlens_q, problem.b, problem.sq)
    keys = _spans(operands.cu_seqlens_k, operands.seqlens_k, problem.b, problem.sk)
    for number, (own_queries, own_keys) in enumerate(zip(queries, keys, strict=True)):
        yield _Sequence(number, number if problem.sequences.packed is None else 0, own_queries, own_keys)


def _spans(borders: torch.Tensor | None, used: torch.Tensor | None, batch: int, rows: int) -> list[Span]:
    """Return which rows of its batch entry each sequence has; those that the entry lacks are left out."""
    if borders is None:
        spans = [Span(0, rows)] * batch
    else:
        ends = [min(max(end, 0), rows) for end in borders.tolist()]
        spans = [Span(start, max(start, stop)) for start, stop in pairwise(ends)]
    if used is not None:
        spans = [Span(span.start, min(span.stop, span.start + max(0, length)))
                 for span, length in zip(spans, used.tolist(), strict=True)]
    return spans
