"""What changes the scores of a tile, and the way back to the operands that changed them (maths.md, section 11).

Options belong to query heads. The rows of a tile are heads folded into rows, in their order, so that a tile

    (b·hk, g·BLOCK, BLOCK)   seen as   (b, hq, BLOCK, BLOCK)

is the same memory, and meets there what broadcasts to (b, hq, sq, sk).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tilewise.kernels.reference.dropout import keep_tile
from tilewise.kernels.reference.primitives import tile_dtype, tiles
from tilewise.masks import Band, Span
from tilewise.problem import AttentionProblem
from tilewise.scores import Operands


class Tile(NamedTuple):
    """Some queries and some keys of a call; first_row: as of :func:`tilewise.kernels.reference.dropout.keep_tile`."""

    problem: AttentionProblem
    operands: Operands
    queries: Span
    keys: Span
    first_row: int = 0

    def by_head(self, values: torch.Tensor) -> torch.Tensor:
        """View (b·hk, g·BLOCK, BLOCK) as (b, hq, BLOCK, BLOCK)."""
        return values.view(self.problem.b, self.problem.hq, len(self.queries), len(self.keys))

    def part(self, operand: torch.Tensor) -> torch.Tensor:
        """Cut the tile out of (b|1, hq|1, sq|1, sk|1); what is broadcast stays 1."""
        for dim, span in ((2, self.queries), (3, self.keys)):
            if operand.shape[dim] > 1:
                operand = operand.narrow(dim, span.start, len(span))
        return operand

    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return i, (BLOCK, 1), and j, (BLOCK,)."""
        return (torch.arange(self.queries.start, self.queries.stop, device=self.problem.device)[:, None],
                torch.arange(self.keys.start, self.keys.stop, device=self.problem.device))

    def distance(self) -> torch.Tensor:
        """Return |i + offset − j|, (BLOCK, BLOCK): what ALiBi multiplies by its slopes."""
        problem, (queries, keys) = self.problem, self.positions()
        offset = problem.mask.offset(problem.sq, problem.sk)
        return (queries + offset - keys).abs_().to(tile_dtype(problem.dtype))

    def apart(self) -> torch.Tensor | None:
        """Return which pairs lie in two documents, (b|1, 1, BLOCK, BLOCK), bool; None where the call has none."""
        numbers = self.operands.documents_q, self.operands.documents_k
        if numbers[0] is None or numbers[1] is None:
            return None
        queries, keys = numbers[0][:, 0, self.queries.start:self.queries.stop], numbers[1][
            :, 0, self.keys.start:self.keys.stop]
        return (queries[:, :, None] != keys[:, None, :])[:, None]


def seen_tiles(problem: AttentionProblem, operands: Operands, queries: Span, first_row: int) -> Iterator[Tile]:
    """Walk the keys that some of the queries see by their position (maths.md, section 12).

    A tile whose every pair lies in two documents is left out, where that can be known without a wait for the device.
    """
    for span in problem.band.key_spans(queries, problem.sk):
        for keys in tiles(span):
            tile = Tile(problem, operands, queries, keys, first_row)
            apart = tile.apart() if problem.device.type == "cpu" else None
            if apart is None or not apart.all():
                yield tile


def tile_scores(tile: Tile, q_rows: torch.Tensor, k_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scores of a tile (maths.md, eq. 16), and -inf where a mask hides the pair.

    Args:
        tile: the call and the positions.
        q_rows: (b·hk, g·BLOCK, d).
        k_rows: (b·hk, BLOCK, d).

    Returns:
        The scores, and tanh(x / softcap), for :func:`uncapped`, or None where there is no softcap.
    """
    problem, (bias, slopes, *_) = tile.problem, tile.operands
    softcap = problem.scores.softcap
    # The product scales for nothing; scaling q beforehand would round it once more.
    scores = q_rows.new_empty(*q_rows.shape[:2], k_rows.shape[1])           # [b·hk, g·BLOCK, BLOCK]
    scores.baddbmm_(q_rows, k_rows.mT, beta=0.0, alpha=problem.scale if softcap is None else problem.scale / softcap)
    tanh = None
    if softcap is not None:
        tanh = scores.tanh_()
        scores = tanh * softcap
    if bias is not None:
        tile.by_head(scores).add_(tile.part(bias))
    if slopes is not None:
        tile.by_head(scores).sub_(slopes[:, :, None, None] * tile.distance())
    hidden = hidden_pairs(tile)                                             # [b|1, hq|1, BLOCK|1, BLOCK]
    if hidden is not None:
        tile.by_head(scores).masked_fill_(hidden, float("-inf"))
        if tanh is not None:  # a NaN of a hidden pair must not come back with the derivative
            tile.by_head(tanh).masked_fill_(hidden, 0.0)
    return scores, tanh


def uncapped(dscores: torch.Tensor, tanh: torch.Tensor | None) -> torch.Tensor:
    """Lead the gradient of the scores back through the softcap, in place: dx = dz·(1 − tanh²), maths.md, eq. 21."""
    return dscores if tanh is None else dscores.addcmul_(dscores * tanh, tanh, value=-1.0)


def dropout_factors(tile: Tile) -> torch.Tensor | None:
    """Return keep / (1 − dropout_p), (b·hk, g·BLOCK, BLOCK), or None without dropout (maths.md, eq. 18)."""
    problem, dropout_p = tile.problem, tile.problem.scores.dropout_p
    if tile.operands.seed is None:
        return None
    keep = keep_tile(tile.operands.seed, problem.b * problem.hq, tile.queries, tile.keys, dropout_p, tile.first_row)
    factors = keep.to(tile_dtype(problem.dtype)).mul_(1.0 / (1.0 - dropout_p))
    return factors.view(problem.b * problem.hk, -1, len(tile.keys))


def add_to_dbias(dbias: torch.Tensor, tile: Tile, dscores: torch.Tensor) -> None:
    """Add a tile's share to the gradient of the bias, summed over what is broadcast (maths.md, eq. 21)."""
    part = tile.part(dbias)
    part += tile.by_head(dscores).sum_to_size(part.shape)


def add_to_dalibi_slopes(dslopes: torch.Tensor, tile: Tile, dscores: torch.Tensor) -> None:
    """Add a tile's share to the gradient of the slopes, (b|1, hq) (maths.md, eq. 21)."""
    dslopes -= (tile.by_head(dscores) * tile.distance()).sum((2, 3)).sum_to_size(dslopes.shape)


def hidden_pairs(tile: Tile) -> torch.Tensor | None:
    """Return what the masks hide of the tile, by position and by data; None where no mask touches it."""
    shared = tile.problem.band.shared_keys_of(tile.queries, tile.problem.sk)
    hidden = tile.apart()                                                   # [b|1, 1, BLOCK, BLOCK]
    if tile.keys.start < shared.start or tile.keys.stop > shared.stop:
        by_position = _outside(tile.problem.band, tile)                     # [BLOCK, BLOCK]
        hidden = by_position if hidden is None else hidden | by_position
    if tile.operands.mask is None:
        return hidden
    by_data = ~tile.part(tile.operands.mask)                                # [b|1, hq|1, BLOCK|1, BLOCK|1]
    return by_data if hidden is None else by_data | hidden


def _outside(band: Band, tile: Tile) -> torch.Tensor:
    """Return (len(queries), len(keys)), bool: the two corners of the tile that lie outside the band."""
    if tile.problem.mask.has_exceptions:
        return _outside_with_exceptions(band, tile)
    corners = torch.ones(len(tile.queries), len(tile.keys), dtype=torch.bool, device=tile.problem.device)
    hidden = torch.zeros_like(corners)
    gap = tile.keys.start - tile.queries.start
    if band.lower is not None:
        hidden |= corners.tril(band.lower - gap - 1)
    if band.upper is not None:
        hidden |= corners.triu(band.upper - gap + 1)
    return hidden


def _outside_with_exceptions(band: Band, tile: Tile) -> torch.Tensor:
    queries, keys = tile.positions()
    hidden = torch.zeros(len(queries), len(keys), dtype=torch.bool, device=keys.device)
    if band.lower is not None:
        hidden |= (keys - queries < band.lower) & (keys >= (band.sink_tokens or 0))
    if band.upper is not None:
        hidden |= (keys - queries > band.upper) & (keys >= (band.prefix or 0))
    if band.chunk is not None:
        hidden |= (queries + band.offset) // band.chunk != keys // band.chunk
    return hidden
