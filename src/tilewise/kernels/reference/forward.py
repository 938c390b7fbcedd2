"""The forward pass, tile by tile: the same loop as the GPU kernels, in PyTorch (maths.md, eq. 1 to 7)."""

import torch

from tilewise.kernels.reference.primitives import put_rows, rows, tile_scores, tiles
from tilewise.masks import Span
from tilewise.problem import AttentionProblem


def attention_forward(problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                      out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write every element of out (b, hq, sq, dv) and lse (b, hq, sq): attention, eq. 1, and eq. 3.

    A query that sees no key gives out 0 and lse -inf. Neither its row of q nor a key that no query sees is read.
    """
    if problem.is_empty or problem.seeing_queries != Span(0, problem.sq):
        out.zero_()
        lse.fill_(float("-inf"))
    if problem.is_empty:
        return
    for queries in tiles(problem.seeing_queries):
        _forward_tile(problem, q, k, v, out, lse, queries)


def _forward_tile(problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  out: torch.Tensor, lse: torch.Tensor, queries: Span) -> None:
    """Walk one tile of queries over the keys it sees."""
    q_rows = rows(q, queries, problem)                                      # [b·hk, g·BLOCK, d]
    row_max = q_rows.new_full((*q_rows.shape[:2], 1), float("-inf"))        # [b·hk, g·BLOCK, 1]; eq. 5
    row_sum = torch.zeros_like(row_max)                                     # [b·hk, g·BLOCK, 1]
    acc = q_rows.new_zeros(*q_rows.shape[:2], problem.dv)                   # [b·hk, g·BLOCK, dv]
    for keys in tiles(problem.band.keys_of(queries, problem.sk)):
        scores = tile_scores(problem, q_rows, rows(k, keys, problem), queries, keys)
        row_max = online_softmax_step(scores, rows(v, keys, problem), row_max, row_sum, acc)
    put_rows(out, queries, acc.div_(row_sum))                               # eq. 6
    put_rows(lse, queries, row_sum.log_().add_(row_max))


def online_softmax_step(scores: torch.Tensor, v_rows: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor,
                        acc: torch.Tensor) -> torch.Tensor:
    """Fold one tile of scores into the running softmax (maths.md, eq. 4); return the new row_max.

    m' = max(m, max_j s_j);  l' = l·e^(m−m') + Σ_j e^(s_j−m');  acc' = acc·e^(m−m') + Σ_j e^(s_j−m')·v_j

    The scores become probabilities in place; row_sum and acc are updated in place.
    """
    new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))         # [b·hk, g·BLOCK, 1]
    # A row with no visible key yet has new_max = −inf; −inf − (−inf) is NaN, so shift by 0 there.
    shift = new_max.masked_fill(new_max == float("-inf"), 0.0)
    probs = scores.sub_(shift).exp_()                                       # [b·hk, g·BLOCK, BLOCK]
    decay = torch.exp(row_max - shift)                                      # [b·hk, g·BLOCK, 1]
    row_sum.mul_(decay).add_(probs.sum(-1, keepdim=True))
    acc.mul_(decay).baddbmm_(probs, v_rows)
    return new_max
