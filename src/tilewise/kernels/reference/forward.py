"""The forward pass, tile by tile: the same loop as the GPU kernels, in PyTorch (maths.md, eq. 1 to 7)."""

import torch

from tilewise.kernels.reference.primitives import blind_spans, put_rows, rows, sink_rows, tiles
from tilewise.kernels.reference.scores import dropout_factors, seen_tiles, tile_scores
from tilewise.masks import Span
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def attention_forward(problem: AttentionProblem, inputs: Inputs, operands: Operands, results: Results,
                      first_row: int = 0) -> None:
    """Write every element of the results: attention, eq. 1 and 3, with the options of section 11.

    Args:
        problem: the call.
        inputs: q, k, v.
        operands: the tensors of the options.
        results: out (b, hq, sq, dv), lse (b, hq, sq) and, or None, max_logit (b, hq, sq), to write.
        first_row: as of :func:`tilewise.kernels.reference.dropout.keep_tile`.

    A query that sees no key gives out 0, lse -inf, or its head's sink, and max_logit -inf. Where it is its position
    that hides all keys, its row of q is not read. Nor is a key that no query sees by its position.
    """
    out, lse, max_logit = results
    for blind in blind_spans(problem):
        out[:, :, blind.start:blind.stop] = 0.0
        lse[:, :, blind.start:blind.stop] = float("-inf") if operands.sinks is None else operands.sinks[:, None]
        if max_logit is not None:
            max_logit[:, :, blind.start:blind.stop] = float("-inf")
    if not problem.is_empty:
        for queries in tiles(problem.seeing_queries):
            _forward_tile(problem, inputs, operands, results, queries, first_row)


def _forward_tile(problem: AttentionProblem, inputs: Inputs, operands: Operands, results: Results,
                  queries: Span, first_row: int) -> None:
    """Walk one tile of queries over the keys it sees."""
    (q, k, v), (out, lse, max_logit) = inputs, results
    q_rows = rows(q, queries, problem)                                      # [b·hk, g·BLOCK, d]
    row_max = q_rows.new_full((*q_rows.shape[:2], 1), float("-inf"))        # [b·hk, g·BLOCK, 1]; eq. 5
    row_sum = torch.zeros_like(row_max)                                     # [b·hk, g·BLOCK, 1]
    acc = q_rows.new_zeros(*q_rows.shape[:2], problem.dv)                   # [b·hk, g·BLOCK, dv]
    for tile in seen_tiles(problem, operands, queries, first_row):
        scores, _ = tile_scores(tile, q_rows, rows(k, tile.keys, problem))
        row_max = online_softmax_step(scores, rows(v, tile.keys, problem), row_max, row_sum, acc, dropout_factors(tile))
    if max_logit is not None:
        put_rows(max_logit, queries, row_max)
    if operands.sinks is not None:  # one more key, whose value is 0; eq. 17
        nothing = acc.new_zeros(len(acc), 1, problem.dv)
        row_max = online_softmax_step(sink_rows(operands.sinks, queries, problem), nothing, row_max, row_sum, acc)
    row_sum.masked_fill_(row_sum == 0.0, 1.0)  # a row that a mask of data hides whole
    put_rows(out, queries, acc.div_(row_sum))                               # eq. 6
    put_rows(lse, queries, row_sum.log_().add_(row_max))


def online_softmax_step(scores: torch.Tensor, v_rows: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor,
                        acc: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Fold one tile of scores into the running softmax (maths.md, eq. 4); return the new row_max.

    m' = max(m, max_j s_j);  l' = l·e^(m−m') + Σ_j e^(s_j−m');  acc' = acc·e^(m−m') + Σ_j e^(s_j−m')·v_j

    The scores become probabilities in place; row_sum and acc are updated in place. Dropout multiplies by factors what
    meets v, and not the denominator (eq. 18).
    """
    new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))         # [b·hk, g·BLOCK, 1]
    # A row with no visible key yet has new_max = −inf; −inf − (−inf) is NaN, so shift by 0 there.
    shift = new_max.masked_fill(new_max == float("-inf"), 0.0)
    probs = scores.sub_(shift).exp_()                                       # [b·hk, g·BLOCK, BLOCK]
    decay = torch.exp(row_max - shift)                                      # [b·hk, g·BLOCK, 1]
    row_sum.mul_(decay).add_(probs.sum(-1, keepdim=True))
    if factors is not None:
        probs.mul_(factors)
    acc.mul_(decay).baddbmm_(probs, v_rows)
    return new_max
