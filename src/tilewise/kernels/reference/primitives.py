"""Pieces that the forward and the backward loop share: the tiles, their scores, and the rows a tile is made of.

Heads of one group read the same keys. They are folded into the rows of a tile, so that k and v are never expanded:

    q (b, hk·g, s, d)  →  rows (b·hk, g·BLOCK, d)        k (b, hk, t, d)  →  rows (b·hk, BLOCK, d)
"""

from collections.abc import Iterator

import torch

from tilewise.masks import Band, Span
from tilewise.problem import AttentionProblem

# Large enough for the BLAS, small enough for the caches: at 4096 tokens, 8 heads of 64, tiles of 128 took 5 to 18 %
# longer, and tiles of 384 up to 18 % (float32, AVX-512, 2 cores, 1 MiB of L2 each).
BLOCK = 256


def tiles(span: Span) -> Iterator[Span]:
    """Cut a span into tiles of at most BLOCK positions."""
    for start in range(span.start, span.stop, BLOCK):
        yield Span(start, min(start + BLOCK, span.stop))


def tile_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a tile is computed in: float64 for float64, else float32.

    Half types too: only the newest CPUs multiply them faster than float32, and sums are kept in float32 anyway.
    """
    return torch.float64 if dtype is torch.float64 else torch.float32


def rows(tensor: torch.Tensor, positions: Span, problem: AttentionProblem) -> torch.Tensor:
    """Return the rows of (b, h, s, ...) at some positions as (b·hk, g·len(positions), ...), in the tile's dtype."""
    part = tensor[:, :, positions.start:positions.stop].to(tile_dtype(problem.dtype))
    folded = problem.b * problem.hk, tensor.shape[1] // problem.hk * len(positions)
    return part.reshape(*folded, *tensor.shape[3:])


def put_rows(tensor: torch.Tensor, positions: Span, values: torch.Tensor) -> None:
    """Write rows back to where :func:`rows` took them from, rounded to the tensor's dtype."""
    part = tensor[:, :, positions.start:positions.stop]
    part.copy_(values.view(part.shape))


def tile_scores(problem: AttentionProblem, q_rows: torch.Tensor, k_rows: torch.Tensor, queries: Span,
                keys: Span) -> torch.Tensor:
    """Return the scores of a tile, scale · q kᵀ, and -inf where the mask hides the pair (maths.md, eq. 1 and 12).

    Args:
        problem: the call.
        q_rows: (b·hk, g·BLOCK, d).
        k_rows: (b·hk, BLOCK, d).
        queries, keys: positions of the tile.
    """
    # The product scales for nothing; scaling q beforehand would round it once more.
    scores = q_rows.new_empty(*q_rows.shape[:2], k_rows.shape[1])           # [b·hk, g·BLOCK, BLOCK]
    scores.baddbmm_(q_rows, k_rows.mT, beta=0.0, alpha=problem.scale)
    shared = problem.band.shared_keys_of(queries, problem.sk)
    if keys.start < shared.start or keys.stop > shared.stop:
        hidden = _hidden(problem.band, queries, keys, scores.device)        # [BLOCK, BLOCK]
        scores.view(len(scores), -1, len(queries), len(keys)).masked_fill_(hidden, float("-inf"))
    return scores


def _hidden(band: Band, queries: Span, keys: Span, device: torch.device) -> torch.Tensor:
    """Return (len(queries), len(keys)), bool: the two corners of the tile that lie outside the band."""
    corners = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
    hidden = torch.zeros_like(corners)
    gap = keys.start - queries.start
    if band.lower is not None:
        hidden |= corners.tril(band.lower - gap - 1)
    if band.upper is not None:
        hidden |= corners.triu(band.upper - gap + 1)
    return hidden
