"""Attention in operations that torch differentiates any number of times, in reverse and in forward mode.

The equations are those of forward.py, without a step in place: what a later derivative needs is not overwritten. A tile
is some queries and all the keys that they see, so that its softmax is done in one go. Sequences whose lengths are data
are walked by :mod:`tilewise.kernels.reference.sequences`.
"""

from typing import Any, cast

import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tilewise.kernels.reference.primitives import blind_spans, rows, sink_rows, tiles
from tilewise.kernels.reference.scores import Tile, changed_by_user, dropout_factors, hidden_pairs
from tilewise.masks import Span
from tilewise.problem import AttentionProblem, memory_order
from tilewise.problem.options import Operands

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_unpack_dual: Any = forward_ad.unpack_dual  # has no types


def differentiable_attention(problem: AttentionProblem, inputs: Inputs, operands: Operands,
                             first_row: int = 0) -> Results:
    """Return out (b, hq, sq, dv), lse (b, hq, sq) and max_logit, shaped as lse.

    Arguments, meaning, edges and what is not read are those of
    :func:`tilewise.kernels.reference.forward.attention_forward`. Rows without a key have gradients of 0 of every order.
    max_logit has none.

    A tile is computed again on the way back and keeps nothing but the call's own tensors: O(s) memory for the results,
    for forward mode and for first gradients. Every tile's scores are kept, O(sq x sk), where a gradient is itself
    recorded (``create_graph=True``), and in reverse mode over tangents or by a transform of :mod:`torch.func`, which
    cannot compute a tile again.
    """
    blind = blind_spans(problem)
    seeing = [] if problem.is_empty else list(tiles(problem.seeing_queries))
    again = _can_compute_again((*inputs, *operands.alone))
    parts: list[Results] = []
    for queries in sorted((*blind, *seeing), key=lambda span: span.start):
        if queries in blind:
            parts.append(_blind_rows(problem, queries, inputs, operands))
        elif again:
            parts.append(cast(Results, checkpoint(_tile, problem, queries, first_row, *inputs, *operands,
                                                  use_reentrant=False, preserve_rng_state=False)))
        else:
            parts.append(_tile(problem, queries, first_row, *inputs, *operands))
    outs, lses, max_logits = zip(*parts, strict=True)
    return joined_as(problem, outs), torch.cat(lses, 2), torch.cat(max_logits, 2)


def nothing_of(problem: AttentionProblem, inputs: Inputs, operands: Operands) -> torch.Tensor:
    """Return 0 as a sum over no element: it reads nothing, and gives a call without any pair its gradients of 0."""
    given = (*inputs, operands.bias, operands.alibi_slopes, operands.sinks)
    return torch.stack([t[..., :0].sum(dtype=problem.lse_dtype) for t in given if t is not None]).sum()


def _can_compute_again(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Tell whether what differentiates the call understands a checkpoint: plain reverse mode alone does."""
    # Tangents: torch 2.13's takes them, 2.11's raises.
    return torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active() and all(
        tensor is None or _unpack_dual(tensor).tangent is None for tensor in tensors)


def joined_as(problem: AttentionProblem, outs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Join the tiles of out, in the memory order that the problem gives it."""
    order = (*memory_order(problem.out_strides), 3)
    parts = [out.permute(order) for out in outs]
    joined = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, order.index(2))
    return joined.permute([order.index(dim) for dim in range(4)])


def _blind_rows(problem: AttentionProblem, queries: Span, inputs: Inputs, operands: Operands) -> Results:
    """Return the results of queries that see no key by their position, which are not read."""
    shape = problem.b, problem.hq, len(queries)
    nothing = nothing_of(problem, inputs, operands)
    out = torch.zeros((*shape, problem.dv), dtype=problem.dtype, device=problem.device) + nothing
    max_logit = torch.full(shape, float("-inf"), dtype=problem.lse_dtype, device=problem.device)
    seen = max_logit if operands.sinks is None else operands.sinks[:, None].to(problem.lse_dtype).expand(shape)
    return out, seen + nothing, max_logit


def _tile(problem: AttentionProblem, queries: Span, first_row: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
          *others: Any) -> Results:
    """Attend with one tile of queries to the keys it sees (maths.md, eq. 1 and 3, with section 11)."""
    operands, q_rows = Operands(*others), rows(q, queries, problem)
    parts = [Tile(problem, operands, queries, keys, first_row)
             for keys in problem.band.key_spans(queries, problem.sk)]
    scores = torch.cat([_scores(part, q_rows, rows(k, part.keys, problem)) for part in parts], -1)
    # The softmax is the same for any shift, so that none of its derivatives asks where the shift came from.
    max_logit = scores.detach().amax(-1, keepdim=True)                      # [b·hk, g·BLOCK, 1]
    sinks, row_max = None, max_logit
    if operands.sinks is not None:
        sinks = sink_rows(operands.sinks, queries, problem)                 # [b·hk, g·BLOCK, 1]; eq. 17
        row_max = torch.maximum(row_max, sinks.detach())
    shift = row_max.masked_fill(row_max == float("-inf"), 0.0)
    probs = torch.exp(scores - shift)                                       # [b·hk, g·BLOCK, keys]
    row_sum = probs.sum(-1, keepdim=True)                                   # [b·hk, g·BLOCK, 1]
    if sinks is not None:
        row_sum = row_sum + torch.exp(sinks - shift)
    # A row that a mask of data hides whole: its sum is replaced ahead of the quotient and the logarithm, whose
    # derivatives at 0 are not finite, and its results behind them, so that whatever arrives there goes no further.
    empty = row_sum == 0.0
    row_sum = row_sum.masked_fill(empty, 1.0)
    factors = [kept for part in parts if (kept := dropout_factors(part)) is not None]
    values = torch.cat([rows(v, part.keys, problem) for part in parts], 1)  # [b·hk, keys, dv]
    out = torch.bmm(probs * torch.cat(factors, -1) if factors else probs, values) / row_sum  # eq. 6 and 18
    out = out.masked_fill(empty, 0.0).to(problem.dtype)
    lse = (torch.log(row_sum) + shift).masked_fill(empty, float("-inf"))
    by_head = problem.b, problem.hq, len(queries)
    return out.reshape(*by_head, problem.dv), lse.reshape(by_head), max_logit.reshape(by_head)


def _scores(tile: Tile, q_rows: torch.Tensor, k_rows: torch.Tensor) -> torch.Tensor:
    """Return the scores of a tile, (b·hk, g·BLOCK, keys), -inf where a mask hides the pair (maths.md, eq. 16)."""
    problem, (bias, slopes, *_) = tile.problem, tile.operands
    products = torch.bmm(q_rows, k_rows.mT) * problem.scale                 # [b·hk, g·BLOCK, keys]
    scores, hidden = tile.by_head(products), hidden_pairs(tile)             # [b, hq, BLOCK, keys]
    softcap = problem.scores.softcap
    if softcap is not None:
        if hidden is not None:  # a NaN of a hidden pair must not come back with the derivative
            scores = scores.masked_fill(hidden, 0.0)
        scores = torch.tanh(scores / softcap) * softcap
    if problem.scores.score_function is not None:
        if hidden is not None:  # on both sides of the function: of hidden pairs it may make NaN, forth and back
            scores = scores.masked_fill(hidden, 0.0)
        scores = changed_by_user(tile, scores).to(products.dtype).expand_as(scores)
    if bias is not None:
        scores = scores + tile.part(bias)
    if slopes is not None:
        scores = scores - slopes[:, :, None, None] * tile.distance()
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.reshape(products.shape)
