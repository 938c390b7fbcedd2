"""Ulysses (Jacobs et al., 2023): attend to all tokens of some heads, alone or as a rank of the steps' schedules.

On a mesh of one dim a rank attends to the whole sequence. Of two dims the ranks of a row exchange heads for the row's
tokens, and the first dim's schedule goes on from there, with fewer heads and longer shards ("unified sequence
parallelism": Fang and Zhao, 2024).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tilewise.api import attention, attention_varlen
from tilewise.distributed.arguments import Arguments
from tilewise.distributed.call_plan import with_packed_documents
from tilewise.distributed.heads import (
    Exchanged,
    Ranges,
    ToHeads,
    ToSequence,
    head_ranges,
    key_ranges,
    stand_in,
    to_heads,
)
from tilewise.distributed.layouts import Layout, layout_in_row, layout_of_rows
from tilewise.masks import Mask, Span, TensorMask
from tilewise.masks.document_ranges import documents_of

Results = tuple[torch.Tensor, ...]


def why_not_heads(arguments: Arguments, ranks: int) -> str | None:
    """Return why so many ranks cannot divide the heads of a call, or None."""
    hq, group = arguments.q.shape[1], arguments.q.shape[1] // arguments.k.shape[1]
    if hq % ranks:
        return f"needs a number of query heads that {ranks} ranks divide, got {hq}"
    each = hq // ranks
    if each % group and group % each:
        return (f"needs ranks that share no part of a group of query heads, got {each} query heads a rank and {group} "
                "for each head of keys")
    if arguments.options.dropout_p:
        return "takes no dropout, whose draws belong to the heads of all ranks"
    return None


@dataclass(frozen=True)
class HeadExchange:
    """Which heads the ranks of a group compute, and which tokens they exchange for them.

    Attributes:
        rank, ranks: the own one in the group, and how many there are.
        queries, keys: layouts of the group's tokens over its ranks.
        heads, kv_heads: of each rank.
    """

    rank: int
    ranks: int
    queries: Layout
    keys: Layout
    heads: Ranges
    kv_heads: Ranges

    @classmethod
    def of(cls, arguments: Arguments, rank: int, layouts: tuple[Layout, Layout]) -> "HeadExchange":
        """Divide the heads of a call over the ranks of such layouts."""
        ranks, hq = len(layouts[0].pieces), arguments.q.shape[1]
        heads = head_ranges(hq, ranks)
        return cls(rank, ranks, *layouts, heads, key_ranges(heads, hq // arguments.k.shape[1]))

    @classmethod
    def in_row(cls, arguments: Arguments, row: int, rank: int, ranks: int) -> "HeadExchange":
        """Divide the heads of a call over the ranks of a mesh's row."""
        layouts = layout_in_row(arguments.queries, row, ranks), layout_in_row(arguments.keys, row, ranks)
        return cls.of(arguments, rank, layouts)

    def rows_of(self, operand: torch.Tensor) -> Exchanged:
        """Return where an operand with rows of queries goes: its heads, or the only one to every rank."""
        if operand.shape[1] == 1:
            return Exchanged(self.queries, tuple([Span(0, 1)] * self.ranks), 1)
        return Exchanged(self.queries, self.heads, operand.shape[1])

    def to_heads(self, arguments: Arguments, group: dist.ProcessGroup | None) -> Arguments:
        """Return the arguments of this rank's heads and of the group's tokens.

        Args:
            arguments: of this rank's tokens.
            group: the group; None: nothing is sent, and the values are arbitrary.
        """
        q, k, v, operands = arguments.q, arguments.k, arguments.v, arguments.operands
        own, of_keys = self.heads[self.rank], Exchanged(self.keys, self.kv_heads, k.shape[1])
        of_keys = replace(of_keys, wide=of_keys.is_shared and bool(arguments.keys_with_gradient))
        bias, mask = (None if tensor is None else _of_heads(tensor, own) for tensor in (operands.bias, operands.mask))
        slopes, sinks = operands.alibi_slopes, operands.sinks
        tensors, where = [q, k, v], [Exchanged(self.queries, self.heads, q.shape[1]), of_keys, of_keys]
        has_rows = [operand is not None and operand.shape[2] > 1 and arguments.sequences is None  # packed: whole ones
                    for operand in (operands.bias, operands.mask)]
        if operands.bias is not None and has_rows[0]:
            tensors.append(operands.bias)
            where.append(self.rows_of(operands.bias))
        q, k, v, *rest = self._exchanged(tensors, where, None if group is None else partial(ToHeads.apply, group))
        if has_rows[0]:
            bias = rest.pop(0)
        if operands.mask is not None and has_rows[1]:
            (mask,) = self._exchanged([operands.mask], [self.rows_of(operands.mask)], None if group is None else (
                lambda where, tensor: to_heads(group, where, [tensor])))
        cut = operands._replace(bias=bias, mask=mask, sinks=None if sinks is None else sinks[own.start:own.stop],
                                alibi_slopes=None if slopes is None else slopes[:, own.start:own.stop])
        return replace(arguments, q=q, k=k, v=v, operands=cut, stand_ins=(rest[0], rest[1]) if of_keys.wide else None)

    def _exchanged(self, tensors: list[torch.Tensor], where: list[Exchanged], exchange: Any) -> list[torch.Tensor]:
        if exchange is not None:
            return list(exchange(where, *tensors))
        made = [tensor.new_empty((tensor.shape[0], len(one.ranges[self.rank]), one.layout.length, tensor.shape[3]))
                for tensor, one in zip(tensors, where, strict=True)]
        return made + [stand_in(own) for own, one in zip(made, where, strict=True) if one.wide]

    def to_sequence(self, results: Results, group: dist.ProcessGroup) -> Results:
        """Exchange out and rows, lse and max_logit, of this rank's heads for those of its tokens."""
        out, *rows = results
        where = Exchanged(self.queries, self.heads, self.heads[-1].stop)
        out, *rows = ToSequence.apply(  # type: ignore[no-untyped-call]
            group, [where] * (1 + len(rows)), out, *[row.unsqueeze(-1) for row in rows])
        return out, *[row.squeeze(-1) for row in rows]


def over_rows(arguments: Arguments, ranks: int) -> Arguments:
    """Let rows of so many ranks take the place of ranks; tensors are those of the row's tokens already."""
    return replace(arguments, queries=layout_of_rows(arguments.queries, ranks),
                   keys=layout_of_rows(arguments.keys, ranks))


def attend_by_heads(arguments: Arguments) -> Results:
    """Attend to the whole sequence; the arguments are of this rank's heads."""
    arguments = with_packed_documents(arguments)
    operands, options, lengths = arguments.operands, arguments.options, arguments.packed_lengths
    # One of overloads, which is decided by a value.
    attend: Any = attention if lengths is None else partial(_attend_packed, lengths)
    results: Results = attend(
        arguments.q, arguments.k, arguments.v, mask=_mask(arguments), scale=options.scale, bias=operands.bias,
        softcap=options.softcap, alibi_slopes=operands.alibi_slopes, sinks=operands.sinks,
        return_aux=("lse", "max_logit") if options.max_logit else ("lse",), deterministic=options.deterministic,
        backend=options.backend)
    return results


def _attend_packed(lengths: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                   **options: Any) -> tuple[torch.Tensor, ...]:
    """Attend to packed sequences (1, h, total, d); return out and rows as they are of one sequence."""
    rows = [own.squeeze(0).transpose(0, 1) for own in (q, k, v)]
    attend: Any = attention_varlen  # of its overloads, as above
    out, *others = attend(*rows, **lengths, **options)
    return out.transpose(0, 1).unsqueeze(0), *[own.unsqueeze(0) for own in others]


def _mask(arguments: Arguments) -> Mask | TensorMask:
    """Put the mask of the whole sequences together again."""
    if arguments.operands.mask is None and arguments.documents is None:
        return arguments.mask
    documents = None
    if arguments.documents is not None:
        documents = documents_of(*(own.to(arguments.q.device) for own in arguments.documents))
    return TensorMask(arguments.mask, arguments.operands.mask, documents)


def _of_heads(operand: torch.Tensor, heads: Span) -> torch.Tensor:
    return operand if operand.shape[1] == 1 else operand[:, heads.start:heads.stop]
