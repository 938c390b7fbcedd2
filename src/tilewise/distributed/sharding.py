"""Cut tensors into the shards of a layout, and put shards together again; both have a gradient."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed.exchange import TensorForm, empty_message, pack, start, unpack
from tilewise.distributed.layouts import Layout, layout_in_row, layout_of_rows, named_layout
from tilewise.distributed.mesh import check_ranks_agree, ranks_of
from tilewise.validate.distributed import check_shard_length, checked_dim


def shard(x: torch.Tensor, mesh: DeviceMesh, *, dim: int, layout: str | Layout) -> torch.Tensor:
    """Return this rank's shard of a tensor that every rank has whole: its positions in the order of the sequence.

    Nothing is sent. The gradient of ``x`` on a rank is 0 outside of its shard; its sum over the ranks is the whole.

    Args:
        x: any dtype, with ``dim`` the sequence.
        mesh: a device mesh of one dim, or of two, over whose ranks the sequence is cut; of two, row by row.
        dim: of x; negative ones count from the last.
        layout: "contiguous", "zigzag" or a :class:`Layout`, as in :func:`context_parallel_attention`.

    Returns:
        A tensor of x's shape but for ``dim``, where it has this rank's number of positions.

    Raises:
        InvalidInput: x is no tensor or has no such dim, a mesh of more than two dims, an unknown layout or one of
            another length.
    """
    ranks = ranks_of(mesh)
    dim = checked_dim(x, dim)
    pieces = named_layout(layout, x.shape[dim], ranks.count).pieces[ranks.rank]
    parts = [x.narrow(dim, piece.start, len(piece)) for piece in pieces]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def unshard(x: torch.Tensor, mesh: DeviceMesh, *, dim: int, layout: str | Layout,
            length: int | None = None) -> torch.Tensor:
    """Return the whole tensor on every rank, of shards that :func:`shard` made; all ranks call it together.

    Each rank's whole tensor is a result of its own: the gradient of a shard is the sum of what all ranks' losses hand
    back for it. A loss that every rank computes alike of the whole is therefore to be divided by the number of ranks.

    Args:
        x: this rank's shard; all ranks have one dtype, and one shape but for ``dim``.
        mesh, dim, layout: as in :func:`shard`.
        length: positions of the whole; None = those of the layout, if it is a :class:`Layout`, else those of x times
            the number of ranks.

    Raises:
        InvalidInput: as :func:`shard`; x has another number of positions than the layout gives to this rank; ranks
            that disagree.
    """
    ranks = ranks_of(mesh)
    wholes: list[Layout] = []

    def describe() -> str:
        along = checked_dim(x, dim)
        wholes.append(named_layout(layout, whole_length(layout, x.shape[along], length, ranks.count), ranks.count))
        check_shard_length("x", x.shape[along], wholes[0], ranks.rank)
        others = [size for number, size in enumerate(x.shape) if number != along]
        return (f"to unshard dim {along} of {x.dim()}, layout {wholes[0].name!r} of {wholes[0].length} positions, the "
                f"other sizes {others}, {x.dtype}")

    check_ranks_agree(ranks, describe)
    (whole,), apply = wholes, cast("Any", _Unshard.apply)
    if ranks.heads is not None:
        row, size = dist.get_rank(ranks.group), dist.get_world_size(ranks.heads)
        x, whole = apply(x, ranks.heads, dim % x.dim(), layout_in_row(whole, row, size)), layout_of_rows(whole, size)
    result: torch.Tensor = apply(x, ranks.group, dim % x.dim(), whole)
    return result


def positions(mesh: DeviceMesh, *, length: int, layout: str | Layout,
              device: torch.device | str | None = None) -> torch.Tensor:
    """Return the positions of this rank's tokens in the whole sequence, (shard's length,), int64.

    What rotary embeddings need: their angles belong to positions of the sequence, not of the shard.

    Args:
        mesh, layout: as in :func:`shard`.
        length: positions of the whole sequence.
        device: of the result.
    """
    ranks = ranks_of(mesh)
    pieces = named_layout(layout, length, ranks.count).pieces[ranks.rank]
    return torch.cat([torch.arange(0, device=device), *(
        torch.arange(piece.start, piece.stop, device=device) for piece in pieces)])


def whole_length(layout: str | Layout, own: int, length: int | None, ranks: int) -> int:
    """Return how many positions a sequence has, of which a rank has ``own``."""
    if length is not None:
        return length
    return layout.length if isinstance(layout, Layout) else own * ranks


class _Unshard(torch.autograd.Function):
    """All shards to all ranks; back, of each rank's gradient the part that belongs to a shard to its rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int, layout: Layout) -> torch.Tensor:
        """Return the whole."""
        ctx.group, ctx.dim, ctx.layout = group, dim, layout
        rank, ranks = dist.get_rank(group), len(layout.pieces)
        others = [other for other in range(ranks) if other != rank]
        shape = list(x.shape)
        forms = {}
        for other in others:
            shape[dim] = layout.shard_length(other)
            forms[other] = [TensorForm(tuple(shape), x.dtype)]
        messages = {other: empty_message(form, x.device) for other, form in forms.items()}
        own = pack((x,))
        start(group, dict.fromkeys(others, own), messages).wait()
        shape[dim] = layout.length
        whole = x.new_empty(shape)
        for of_rank in range(ranks):
            shard_of_rank = x if of_rank == rank else unpack(messages[of_rank], forms[of_rank])[0]
            at = 0
            for piece in layout.pieces[of_rank]:
                whole.narrow(dim, piece.start, len(piece)).copy_(shard_of_rank.narrow(dim, at, len(piece)))
                at += len(piece)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the sum of what all ranks hand back, in the order of ranks."""
        group, dim, layout = ctx.group, ctx.dim, ctx.layout
        rank, ranks = dist.get_rank(group), len(layout.pieces)
        others = [other for other in range(ranks) if other != rank]

        def of_rank(number: int) -> torch.Tensor:
            return torch.cat([gradient.narrow(dim, 0, 0), *(
                gradient.narrow(dim, piece.start, len(piece)) for piece in layout.pieces[number])], dim)

        own = of_rank(rank)
        form = [TensorForm(tuple(own.shape), own.dtype)]
        messages = {other: empty_message(form, own.device) for other in others}
        start(group, {other: pack((of_rank(other),)) for other in others}, messages).wait()
        parts = [own if number == rank else unpack(messages[number], form)[0] for number in range(ranks)]
        total = parts[0].to(torch.promote_types(own.dtype, torch.float32))
        for part in parts[1:]:
            total = total + part
        return total.to(own.dtype), None, None, None
