"""The backward pass, tile by tile (maths.md, eq. 8 to 10): probabilities are recomputed from lse, never stored.

One walk over the tiles gives all gradients. A GPU runs it twice, once by queries for dq and once by keys for dk and
dv, since there the tiles run side by side and would add into dk and dv at the same time.
"""

from typing import NamedTuple

import torch

from tilewise.kernels.reference.primitives import blind_spans, put_rows, rows, sink_rows, tile_dtype, tiles
from tilewise.kernels.reference.scores import (
    add_to_dalibi_slopes,
    add_to_dbias,
    dropout_factors,
    seen_tiles,
    tile_scores,
    to_products,
)
from tilewise.masks import Span
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands

Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class GradientTensors(NamedTuple):
    """A tensor for each gradient that is wanted, else None; dk and dv come together."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    dbias: torch.Tensor | None = None
    dalibi_slopes: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None


def attention_backward(problem: AttentionProblem, saved: Saved, operands: Operands, dout: torch.Tensor,
                       dlse: torch.Tensor | None, gradients: GradientTensors, first_row: int = 0) -> None:
    """Write every element of the gradients that are wanted.

    Args:
        problem: the call.
        saved: q, k, v as given to the forward pass; out (b, hq, sq, dv) and lse (b, hq, sq), its results.
        operands: as given to the forward pass.
        dout, dlse: gradients of out and lse; dlse None when none arrives.
        gradients: tensors to write, each shaped as what it is the gradient of.
        first_row: as given to the forward pass.

    Rows of q and dout that see no key by their position, and rows of k and v that no query sees by its, are not read:
    their gradients are 0.
    """
    sums = _zero_sums(problem, gradients)
    for blind in blind_spans(problem):
        if sums.dq is not None:
            sums.dq[:, :, blind.start:blind.stop] = 0.0
        if sums.dsinks is not None and dlse is not None:  # lse is the sink there
            sums.dsinks.add_(dlse[:, :, blind.start:blind.stop].sum((0, 2)))
    if not problem.is_empty:
        for queries in tiles(problem.seeing_queries):
            _backward_tile(problem, saved, operands, dout, dlse, queries, sums, first_row)
    for gradient, total in zip(gradients[1:3], sums[1:3], strict=True):
        if gradient is not None and total is not None:
            put_rows(gradient, Span(0, problem.sk), total)
    for gradient, total in zip(gradients[3:], sums[3:], strict=True):
        if gradient is not None and total is not None:
            gradient.copy_(total)


def _zero_sums(problem: AttentionProblem, gradients: GradientTensors) -> GradientTensors:
    """Return what every tile of queries adds to, in the tile's dtype so that half types do not round at every tile.

    dk and dv are rows, (b·hk, sk, dim). dq is the gradient itself: a row of it is made by one tile of queries.
    """
    dtype = tile_dtype(problem.dtype)
    dkv = (None if gradient is None else
           torch.zeros((problem.b * problem.hk, problem.sk, dim), dtype=dtype, device=gradient.device)
           for gradient, dim in zip(gradients[1:3], (problem.d, problem.dv), strict=True))
    others = (None if gradient is None else
              gradient.zero_() if gradient.dtype is dtype else torch.zeros_like(gradient, dtype=dtype)
              for gradient in gradients[3:])
    return GradientTensors(gradients.dq, *dkv, *others)


def _backward_tile(problem: AttentionProblem, saved: Saved, operands: Operands, dout: torch.Tensor,
                   dlse: torch.Tensor | None, queries: Span, sums: GradientTensors, first_row: int) -> None:
    """Walk one tile of queries over the keys it sees."""
    q, k, v, out, lse = saved
    q_rows = rows(q, queries, problem)                                      # [b·hk, g·BLOCK, d]
    dout_rows = rows(dout, queries, problem)                                # [b·hk, g·BLOCK, dv]
    lse_rows = rows(lse, queries, problem).unsqueeze(-1)                    # [b·hk, g·BLOCK, 1]
    delta = (rows(out, queries, problem) * dout_rows).sum(-1, keepdim=True)  # [b·hk, g·BLOCK, 1]; eq. 10
    if dlse is not None:
        delta -= rows(dlse, queries, problem).unsqueeze(-1)
    # A row that a mask of data hides whole has lse −inf, and −inf − (−inf) is NaN; so may be what comes through it.
    empty = lse_rows == float("-inf")
    lse_rows, delta = lse_rows.masked_fill(empty, 0.0), delta.masked_fill_(empty, 0.0)
    if sums.dsinks is not None and operands.sinks is not None:
        dsinks = sink_rows(operands.sinks, queries, problem).sub_(lse_rows).exp_().mul_(delta)
        sums.dsinks.sub_(dsinks.view(problem.b, problem.hq, -1).sum((0, 2)))  # eq. 22
    dq_acc = torch.zeros_like(q_rows)                                       # [b·hk, g·BLOCK, d]
    for tile in seen_tiles(problem, operands, queries, first_row):
        k_rows = rows(k, tile.keys, problem)
        scores, steps = tile_scores(tile, q_rows, k_rows)
        probs = scores.sub_(lse_rows).exp_()                                # [b·hk, g·BLOCK, BLOCK]; eq. 3
        dprobs = torch.bmm(dout_rows, rows(v, tile.keys, problem).mT)       # [b·hk, g·BLOCK, BLOCK]
        factors = dropout_factors(tile)
        if factors is not None:
            dprobs.mul_(factors)                                            # eq. 20
        dscores = dprobs.sub_(delta).mul_(probs)                            # eq. 9
        if sums.dbias is not None:
            add_to_dbias(sums.dbias, tile, dscores)
        if sums.dalibi_slopes is not None:
            add_to_dalibi_slopes(sums.dalibi_slopes, tile, dscores)
        dscores = to_products(tile, dscores, steps)
        if sums.dk is not None and sums.dv is not None:
            dk, dv = (total[:, tile.keys.start:tile.keys.stop] for total in (sums.dk, sums.dv))
            dk.baddbmm_(dscores.mT, q_rows, alpha=problem.scale)            # eq. 10
            dv.baddbmm_((probs if factors is None else probs.mul_(factors)).mT, dout_rows)  # eq. 8 and 20
        if sums.dq is not None:
            dq_acc.baddbmm_(dscores, k_rows, alpha=problem.scale)           # eq. 10
    if sums.dq is not None:
        put_rows(sums.dq, queries, dq_acc)
