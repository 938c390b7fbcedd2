"""Pieces that the forward and the backward loop share: the tiles, their scores, and the rows a tile is made of.

Heads of one group read the same keys. They are folded into the rows of a tile, so that k and v are never expanded:

    q (b, hk·g, s, d)  →  rows (b·hk, g·BLOCK, d)        k (b, hk, t, d)  →  rows (b·hk, BLOCK, d)
"""

from collections.abc import Iterator

import torch

from tilewise.masks import Band, Span
from tilewise.problem import AttentionProblem

# 256 x 256 scores of 8 heads are 2 MiB in float32: they stay in a core's cache between the steps of a tile, and the
# products are large enough for the BLAS. Smaller and larger tiles were slower from 512 tokens up (AVX-512, 2 cores).
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


def tile_scores(q_rows: torch.Tensor, k_rows: torch.Tensor, band: Band, queries: Span, keys: Span,
                shared: Span) -> torch.Tensor:
    """Return the scores of a tile, -inf where the band hides the pair (maths.md, eq. 12).

    Args:
        q_rows: (b·hk, g·BLOCK, d), scaled already.
        k_rows: (b·hk, BLOCK, d).
        band: who sees whom.
        queries, keys: positions of the tile.
        shared: keys that all of the queries see (eq. 14); a tile inside is not masked.
    """
    scores = torch.bmm(q_rows, k_rows.mT)                                   # [b·hk, g·BLOCK, BLOCK]
    if keys.start < shared.start or keys.stop > shared.stop:
        hidden = _hidden(band, queries, keys, scores.device)                # [BLOCK, BLOCK]
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
