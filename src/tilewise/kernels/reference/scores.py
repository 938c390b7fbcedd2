"""What changes the scores of a tile, and the way back to the operands that changed them (maths.md, section 11).

Options belong to query heads. The rows of a tile are heads folded into rows, in their order, so that a tile

    (b·hk, g·BLOCK, BLOCK)   seen as   (b, hq, BLOCK, BLOCK)

is the same memory, and meets there what broadcasts to (b, hq, sq, sk).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch

from tilewise.functions import pair_indices
from tilewise.kernels.reference.dropout import keep_tile
from tilewise.kernels.reference.primitives import tile_dtype, tiles
from tilewise.masks import Band, Span
from tilewise.problem import AttentionProblem
from tilewise.problem.options import FunctionSpec, Operands


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

    def pairs(self) -> tuple[torch.Tensor, ...]:
        """Return batch, head, q_idx and k_idx of the tile, as the user's functions take them."""
        problem = self.problem
        return pair_indices((problem.b, problem.hq, len(self.queries), len(self.keys)), problem.device,
                            (self.first_row // problem.hq, self.queries.start, self.keys.start))

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


class Steps(NamedTuple):
    """What :func:`to_products` needs of a tile's scores.

    Attributes:
        tanh: tanh(x / softcap), 0 where hidden; None without softcap.
        capped: what the user's function was given; None without one.
        hidden: which pairs the masks hide; None where they touch nothing.
    """

    tanh: torch.Tensor | None
    capped: torch.Tensor | None
    hidden: torch.Tensor | None


def tile_scores(tile: Tile, q_rows: torch.Tensor, k_rows: torch.Tensor) -> tuple[torch.Tensor, Steps]:
    """Return the scores of a tile (maths.md, eq. 16), and -inf where a mask hides the pair.

    Args:
        tile: the call and the positions.
        q_rows: (b·hk, g·BLOCK, d).
        k_rows: (b·hk, BLOCK, d).

    Returns:
        The scores, and what the way back needs of them.
    """
    problem, (bias, slopes, *_) = tile.problem, tile.operands
    softcap = problem.scores.softcap
    # The product scales for nothing; scaling q beforehand would round it once more.
    scores = q_rows.new_empty(*q_rows.shape[:2], k_rows.shape[1])           # [b·hk, g·BLOCK, BLOCK]
    scores.baddbmm_(q_rows, k_rows.mT, beta=0.0, alpha=problem.scale if softcap is None else problem.scale / softcap)
    tanh = capped = None
    if softcap is not None:
        tanh = scores.tanh_()
        scores = tanh * softcap
    if problem.scores.score_function is not None:
        capped = scores
        scores = torch.empty_like(capped)  # of its own: what a function returns may be broadcast, or its argument
        tile.by_head(scores).copy_(changed_by_user(tile, tile.by_head(capped)))
    if bias is not None:
        tile.by_head(scores).add_(tile.part(bias))
    if slopes is not None:
        tile.by_head(scores).sub_(slopes[:, :, None, None] * tile.distance())
    hidden = hidden_pairs(tile)                                             # [b|1, hq|1, BLOCK|1, BLOCK]
    if hidden is not None:
        tile.by_head(scores).masked_fill_(hidden, float("-inf"))
        if tanh is not None:  # a NaN of a hidden pair must not come back with the derivative
            tile.by_head(tanh).masked_fill_(hidden, 0.0)
    return scores, Steps(tanh, capped, hidden)


def changed_by_user(tile: Tile, scores: torch.Tensor) -> torch.Tensor:
    """Return what the user's function makes of scores (b, hq, BLOCK, BLOCK); it may broadcast to their shape."""
    code = cast(FunctionSpec, tile.problem.scores.score_function).code
    function = cast("Callable[..., torch.Tensor]", code.torch)  # the backend refuses where there is none
    return function(scores, *tile.pairs(), *tile.operands.score_tensors)


def to_products(tile: Tile, dscores: torch.Tensor, steps: Steps) -> torch.Tensor:
    """Lead the gradient of the scores back to the products, in place: dx = dz·f'(y)·(1 − tanh²), maths.md, eq. 21."""
    if steps.capped is not None:
        with _recorded():
            capped = tile.by_head(steps.capped).requires_grad_()
            changed = changed_by_user(tile, capped).to(capped.dtype).expand_as(capped)
        if changed.requires_grad:
            (by_head,) = torch.autograd.grad(changed, capped, tile.by_head(dscores))
            dscores = by_head.reshape(dscores.shape)
        else:  # a function that does not look at its score
            dscores = torch.zeros_like(dscores)
        if steps.hidden is not None:  # of what is hidden, the function may make NaN
            tile.by_head(dscores).masked_fill_(steps.hidden, 0.0)
    return dscores if steps.tanh is None else dscores.addcmul_(dscores * steps.tanh, steps.tanh, value=-1.0)


@contextlib.contextmanager
def _recorded() -> Iterator[None]:
    """Let autograd record inside an operator, where a dispatch mode, a compiler's say, may have shut it out."""
    autograd = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(autograd, False), torch.enable_grad():
        yield


def dropout_factors(tile: Tile) -> torch.Tensor | None:
    """Return keep / (1 − dropout_p), (b·hk, g·BLOCK, BLOCK), or None without dropout (maths.md, eq. 18)."""
    problem, dropout_p = tile.problem, tile.problem.scores.dropout_p
    if tile.operands.seed is None:
        return None
    queries, keys = (Span(span.start + origin, span.stop + origin) for span, origin in (
        (tile.queries, problem.scores.dropout_origin_q), (tile.keys, problem.scores.dropout_origin_k)))
    keep = keep_tile(tile.operands.seed, problem.b * problem.hq, queries, keys, dropout_p, tile.first_row)
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
    by_data = None if tile.operands.mask is None else ~tile.part(tile.operands.mask)  # [b|1, hq|1, BLOCK|1, BLOCK|1]
    for more in (by_data, _hidden_by_user(tile)):
        if more is not None:
            hidden = more if hidden is None else hidden | more
    return hidden


def _hidden_by_user(tile: Tile) -> torch.Tensor | None:
    """Return what the user's mask function hides; broadcasts to (b, hq, BLOCK, BLOCK)."""
    facts = tile.problem.scores.mask_function
    if facts is None:
        return None
    function = cast("Callable[..., torch.Tensor]", facts.code.torch)  # the backend refuses where there is none
    return ~function(*tile.pairs(), *tile.operands.mask_tensors)


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
