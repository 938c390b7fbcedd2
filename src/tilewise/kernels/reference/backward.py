"""The backward pass, tile by tile (maths.md, eq. 8 to 10): probabilities are recomputed from lse, never stored.

One walk over the tiles gives all three gradients. A GPU runs it twice, once by queries for dq and once by keys for dk
and dv, since there the tiles run side by side and would add into dk and dv at the same time.
"""

import torch

from tilewise.kernels.reference.primitives import put_rows, rows, tile_dtype, tile_scores, tiles
from tilewise.masks import Span
from tilewise.problem import AttentionProblem

Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def attention_backward(problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                       gradients: Gradients) -> None:
    """Write every element of dq, dk and dv; None where one is not wanted (dk and dv come together).

    Args:
        problem: the call.
        saved: q, k, v as given to the forward pass; out (b, hq, sq, dv) and lse (b, hq, sq), its results.
        dout, dlse: gradients of out and lse; dlse None when none arrives.
        gradients: dq, dk, dv to write, shaped as q, k, v.

    Rows of q and dout that see no key, and rows of k and v that no query sees, are not read: their gradients are 0.
    """
    k, dq, dk, dv = saved[1], *gradients
    if dq is not None and (problem.is_empty or problem.seeing_queries != Span(0, problem.sq)):
        dq.zero_()
    dkv_acc = None
    if dk is not None and dv is not None:
        # Each tile of queries adds to these, in the tile's dtype so that half types do not round at every tile.
        dkv_acc = tuple(torch.zeros((problem.b * problem.hk, problem.sk, dim), dtype=tile_dtype(problem.dtype),
                                    device=k.device) for dim in (problem.d, problem.dv))
    if not problem.is_empty:
        for queries in tiles(problem.seeing_queries):
            _backward_tile(problem, saved, dout, dlse, queries, dq, dkv_acc)
    if dk is not None and dv is not None and dkv_acc is not None:
        for gradient, acc in zip((dk, dv), dkv_acc, strict=True):
            put_rows(gradient, Span(0, problem.sk), acc)


def _backward_tile(problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                   queries: Span, dq: torch.Tensor | None, dkv_acc: tuple[torch.Tensor, ...] | None) -> None:
    """Walk one tile of queries over the keys it sees."""
    q, k, v, out, lse = saved
    q_rows = rows(q, queries, problem)                                      # [b·hk, g·BLOCK, d]
    dout_rows = rows(dout, queries, problem)                                # [b·hk, g·BLOCK, dv]
    lse_rows = rows(lse, queries, problem).unsqueeze(-1)                    # [b·hk, g·BLOCK, 1]
    delta = (rows(out, queries, problem) * dout_rows).sum(-1, keepdim=True)  # [b·hk, g·BLOCK, 1]; eq. 10
    if dlse is not None:
        delta -= rows(dlse, queries, problem).unsqueeze(-1)
    dq_acc = torch.zeros_like(q_rows)                                       # [b·hk, g·BLOCK, d]
    for keys in tiles(problem.band.keys_of(queries, problem.sk)):
        k_rows = rows(k, keys, problem)
        scores = tile_scores(problem, q_rows, k_rows, queries, keys)
        probs = scores.sub_(lse_rows).exp_()                                # [b·hk, g·BLOCK, BLOCK]; eq. 3
        dprobs = torch.bmm(dout_rows, rows(v, keys, problem).mT)            # [b·hk, g·BLOCK, BLOCK]
        dscores = dprobs.sub_(delta).mul_(probs)                            # eq. 9
        if dkv_acc is not None:
            dk_acc, dv_acc = (acc[:, keys.start:keys.stop] for acc in dkv_acc)
            dk_acc.baddbmm_(dscores.mT, q_rows, alpha=problem.scale)        # eq. 10
            dv_acc.baddbmm_(probs.mT, dout_rows)                            # eq. 8
        if dq is not None:
            dq_acc.baddbmm_(dscores, k_rows, alpha=problem.scale)           # eq. 10
    if dq is not None:
        put_rows(dq, queries, dq_acc)
