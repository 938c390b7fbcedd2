"""Pieces that the forward and the backward loop share: the tiles, and the rows a tile is made of.

Heads of one group read the same keys. They are folded into the rows of a tile, so that k and v are never expanded:

    q (b, hk·g, s, d)  →  rows (b·hk, g·BLOCK, d)        k (b, hk, t, d)  →  rows (b·hk, BLOCK, d)
"""

from collections.abc import Iterator

import torch

from tilewise.masks import Span
from tilewise.problem import AttentionProblem

# Large enough for the BLAS, small enough for the caches: at 4096 tokens, 8 heads of 64, tiles of 128 took 5 to 18 %
# longer, and tiles of 384 up to 18 % (float32, AVX-512, 2 cores, 1 MiB of L2 each).
BLOCK = 256


def tiles(span: Span) -> Iterator[Span]:
    """Cut a span into tiles of at most BLOCK positions."""
    for start in range(span.start, span.stop, BLOCK):
        yield Span(start, min(start + BLOCK, span.stop))


def blind_spans(problem: AttentionProblem) -> list[Span]:
    """Return the queries that see no key by their position: before and behind those that see one. No tile has them."""
    if problem.is_empty:
        return [Span(0, problem.sq)]
    seeing = problem.seeing_queries
    return [span for span in (Span(0, seeing.start), Span(seeing.stop, problem.sq)) if len(span)]


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


def sink_rows(sinks: torch.Tensor, positions: Span, problem: AttentionProblem) -> torch.Tensor:
    """Return a head's sink (hq,) as a score of each of its rows, (b·hk, g·len(positions), 1), in memory of its own."""
    by_query = sinks.view(1, -1, 1).expand(problem.b, problem.hq, problem.sq)
    return rows(by_query, positions, problem).unsqueeze(-1).clone()
