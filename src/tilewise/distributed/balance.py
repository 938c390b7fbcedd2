"""A layout that divides the visible pairs of a mask evenly, from how many keys each query sees."""

import torch

from tilewise.distributed.layouts import Layout, joined, named_layout
from tilewise.masks import Mask
from tilewise.problem.operands import parted
from tilewise.problem.options import AnyMask
from tilewise.validate.distributed import check_balanced


def balanced(mask: AnyMask | None, length: int, ranks: int, *, pieces: int = 4) -> Layout:
    """Lay a sequence out so that ranks have equally many visible pairs, and equally many tokens but for a piece.

    For masks whose work is uneven, as of documents of different lengths, where neither "contiguous" nor "zigzag" is
    even. The sequence is cut into ``ranks · pieces`` pieces; the one with the most pairs goes to the rank that has the
    fewest so far, and so on. All ranks have to make it from the same mask. Documents on a GPU are waited for.

    Args:
        mask: of the whole sequence, of queries and keys of one length: masks by position, and documents.
        length: positions of the sequence, >= 0.
        ranks: how many there are.
        pieces: of each rank; more of them are more even, and make more and smaller local calls.

    Returns:
        The layout, for every call with such a mask.

    Raises:
        InvalidInput: a boolean tensor or a function, which no rank has as a whole; documents of another length.

    >>> import tilewise as tw
    >>> layout = balanced(tw.causal(), 1024, 4)
    >>> [layout.shard_length(rank) for rank in range(4)]
    [256, 256, 256, 256]
    """
    band, visible, lists, function = parted(mask)
    check_balanced(mask, ranks, pieces, is_kept=visible is None and function is None,
                   documents=None if lists[0] is None else lists[0].shape[2], length=length)
    counts = _visible_keys(band, lists[0], length)
    tiles = named_layout("contiguous", length, ranks * pieces).pieces
    work = [(sum(int(counts[span.start:span.stop].sum()) for span in tile), number)
            for number, tile in enumerate(tiles)]
    held: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for pairs, number in sorted(work, key=lambda one: (-one[0], one[1])):
        rank = min((rank for rank in range(ranks) if len(held[rank]) < pieces), key=lambda rank: (loads[rank], rank))
        held[rank].append(number)
        loads[rank] += pairs
    return Layout("balanced", tuple([joined(tuple([span for number in sorted(own) for span in tiles[number]]))
                                     for own in held]))


def _visible_keys(mask: Mask, documents: torch.Tensor | None, length: int) -> torch.Tensor:
    """Return how many keys each query sees, (length,), int64, summed over batch entries.

    Of documents whose tokens do not stand together, it counts what lies between them too.
    """
    band = mask.band(length, length)
    queries = torch.arange(length)[None]
    first, stop = torch.zeros_like(queries), torch.full_like(queries, length)
    if documents is not None:
        of_query = documents.cpu().long()
        first, stop = of_query[:, 1], of_query[:, 2]
    if band.chunk is not None:
        chunk = (queries + band.offset).div(band.chunk, rounding_mode="floor") * band.chunk
        first, stop = torch.maximum(first, chunk), torch.minimum(stop, chunk + band.chunk)
    if band.upper is not None:
        stop = torch.minimum(stop, (queries + band.upper + 1).clamp(min=band.prefix or 0))
    begin = first if band.lower is None else torch.maximum(first, queries + band.lower)
    sinks = (torch.minimum(stop, begin).clamp(max=band.sink_tokens or 0) - first).clamp(min=0)
    return ((stop - begin).clamp(min=0) + sinks).sum(0)
