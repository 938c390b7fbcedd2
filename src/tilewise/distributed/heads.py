"""The exchange of Ulysses (Jacobs et al., 2023): a part of the sequence with all heads, for all of it with some."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tilewise.distributed.exchange import TensorForm, empty_message, pack, start, unpack
from tilewise.distributed.layouts import Layout
from tilewise.distributed.partial import sum_dtype
from tilewise.masks import Span

Ranges = tuple[Span, ...]  # of each rank, the heads that it computes


@dataclass(frozen=True)
class Exchanged:
    """Where a tensor (b, heads, s, d) goes.

    Attributes:
        layout: of its sequence.
        ranges: heads of each rank; ranks may share some, as of keys that several ranks' query heads read.
        heads: how many there are.
        wide: whether the gradients of a rank's heads come as parts of sums, by a stand-in (:class:`ToHeads`).
    """

    layout: Layout
    ranges: Ranges
    heads: int
    wide: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether several ranks have a head."""
        return sum(map(len, self.ranges)) > self.heads


def head_ranges(heads: int, ranks: int) -> Ranges:
    """Divide query heads, of which the number of ranks is a divisor."""
    each = heads // ranks
    return tuple([Span(rank * each, (rank + 1) * each) for rank in range(ranks)])


def key_ranges(ranges: Ranges, group: int) -> Ranges:
    """Return the heads of keys that query heads read."""
    return tuple([Span(heads.start // group, (heads.stop - 1) // group + 1) for heads in ranges])


class ToHeads(torch.autograd.Function):
    """(b, heads, s of this rank, d) -> (b, heads of this rank, s, d), for several tensors in one message a rank.

    A gradient has the dtype of its tensor: of 16 bits, each rank's part of a shared head's would be rounded before the
    parts are added up. So behind the tensors come, of each that is ``wide``, a stand-in: of its shape, float32 (float64
    of float64), without memory. The tensor itself has no gradient then: StepsFunction returns it for the stand-in.
    """

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, where: Sequence[Exchanged],
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors of this rank's heads, then the stand-ins."""
        ctx.group, ctx.where = group, where
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*[tensor.new_empty(()).expand(tensor.shape) for tensor in tensors])
        made = to_heads(group, where, tensors)
        wide = [own for own, one in zip(made, where, strict=True) if one.wide]
        ctx.mark_non_differentiable(*wide)
        return *made, *[stand_in(own) for own in wide]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Send the gradients back; those of heads that ranks share are summed."""
        rank, of_stand_ins = dist.get_rank(ctx.group), iter(gradients[len(ctx.where):])
        whole = []
        for gradient, like, one in zip(gradients, ctx.saved_tensors, ctx.where, strict=False):
            own = next(of_stand_ins) if one.wide else gradient
            whole.append(own if own is not None else _zeros(
                stand_in(like) if one.wide else like, (one.ranges[rank], one.layout.length)))
        sums = to_sequence(ctx.group, ctx.where, whole)
        return None, None, *[own.to(like.dtype) for own, like in zip(sums, ctx.saved_tensors, strict=True)]


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return what takes a tensor's gradient in its place: zeros of its shape and without memory."""
    return tensor.new_zeros((), dtype=sum_dtype(tensor)).expand(tensor.shape)


class ToSequence(torch.autograd.Function):
    """The way back: (b, heads of this rank, s, d) -> (b, heads, s of this rank, d)."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, where: Sequence[Exchanged],
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors of this rank's part of the sequence."""
        ctx.group, ctx.where = group, where
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*[tensor.new_empty(()).expand(tensor.shape) for tensor in tensors])
        return tuple(to_sequence(group, where, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Send the gradients to the ranks that computed the heads."""
        rank = dist.get_rank(ctx.group)
        whole = [_zeros(like, (Span(0, one.heads), one.layout.shard_length(rank))) if gradient is None else gradient
                 for gradient, like, one in zip(gradients, ctx.saved_tensors, ctx.where, strict=True)]
        return None, None, *to_heads(ctx.group, ctx.where, whole)


def to_heads(group: dist.ProcessGroup, where: Sequence[Exchanged],
             tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Exchange without a gradient; see :class:`ToHeads`."""
    rank, ranks, device = dist.get_rank(group), dist.get_world_size(group), tensors[0].device
    others = [other for other in range(ranks) if other != rank]

    def form(tensor: torch.Tensor, one: Exchanged, other: int) -> TensorForm:
        return TensorForm((tensor.shape[0], len(one.ranges[rank]), one.layout.shard_length(other), tensor.shape[3]),
                          tensor.dtype)

    forms = {other: [form(tensor, one, other) for tensor, one in zip(tensors, where, strict=True)] for other in others}
    sends = {other: pack(_of_heads(tensor, one.ranges[other]) for tensor, one in zip(tensors, where, strict=True))
             for other in others}
    receives = {other: empty_message(forms[other], device) for other in others}
    start(group, sends, receives).wait()
    parts = {other: unpack(receives[other], forms[other]) for other in others}
    parts[rank] = [_of_heads(tensor, one.ranges[rank]) for tensor, one in zip(tensors, where, strict=True)]
    found = []
    for number, (tensor, one) in enumerate(zip(tensors, where, strict=True)):
        whole = tensor.new_empty((tensor.shape[0], len(one.ranges[rank]), one.layout.length, tensor.shape[3]))
        for other in range(ranks):
            for span, rows in one.layout.local_spans(other, Span(0, one.layout.length)):
                whole[:, :, span.start:span.stop] = parts[other][number][:, :, rows.start:rows.stop]
        found.append(whole)
    return found


def to_sequence(group: dist.ProcessGroup, where: Sequence[Exchanged],
                tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Exchange without a gradient; see :class:`ToSequence`.

    Of heads that ranks share, the sum in the order of ranks.
    """
    rank, ranks, device = dist.get_rank(group), dist.get_world_size(group), tensors[0].device
    others = [other for other in range(ranks) if other != rank]
    forms = {other: [TensorForm((tensor.shape[0], len(one.ranges[other]), one.layout.shard_length(rank),
                                 tensor.shape[3]), tensor.dtype) for tensor, one in zip(tensors, where, strict=True)]
             for other in others}
    sends = {other: pack(_of_rows(tensor, one.layout, other) for tensor, one in zip(tensors, where, strict=True))
             for other in others}
    receives = {other: empty_message(forms[other], device) for other in others}
    start(group, sends, receives).wait()
    parts = {other: unpack(receives[other], forms[other]) for other in others}
    parts[rank] = [_of_rows(tensor, one.layout, rank) for tensor, one in zip(tensors, where, strict=True)]
    found = []
    for number, (tensor, one) in enumerate(zip(tensors, where, strict=True)):
        shape = (tensor.shape[0], one.heads, one.layout.shard_length(rank), tensor.shape[3])
        whole = tensor.new_zeros(shape, dtype=sum_dtype(tensor) if one.is_shared else tensor.dtype)
        for other in range(ranks):
            _of_heads(whole, one.ranges[other]).add_(parts[other][number])
        found.append(whole.to(tensor.dtype))
    return found


def _of_heads(tensor: torch.Tensor, heads: Span) -> torch.Tensor:
    return tensor[:, heads.start:heads.stop]


def _of_rows(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    return torch.cat([tensor[:, :, :0], *(tensor[:, :, piece.start:piece.stop] for piece in layout.pieces[rank])], 2)


def _zeros(like: torch.Tensor, sizes: tuple[Span, int]) -> torch.Tensor:
    return like.new_zeros((like.shape[0], len(sizes[0]), sizes[1], like.shape[3]))
