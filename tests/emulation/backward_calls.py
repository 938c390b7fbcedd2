"""Small calls of the Hopper backward kernels, and what their gradients are."""

from dataclasses import replace

import torch

from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec, ScoreOptions

SCALE = 0.1
MASKS = {
    "full": (Mask(), (200, 300), (2, 1)),
    "causal": (causal("bottom_right"), (270, 330), (2, 2)),
    "window": (window(100, 30, "top_left"), (300, 280), (2, 1)),
    "few": (causal("top_left"), (70, 40), (1, 1)),
}


def call_of(mask, lengths, heads, dims, b=2):
    """Return (problem, (q, k, v, dout, lse, delta)), of queries and keys that take part alone."""
    torch.manual_seed(0)
    (sq, sk), (hq, hk), (d, dv) = lengths, heads, dims
    problem = AttentionProblem(b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv, dtype=torch.float16,
                               device=torch.device("cuda", 0), scale=SCALE, mask=mask, direction="backward")
    queries, keys = (len(rows) for rows in (problem.seeing_queries, problem.seen_keys))
    q, dout = torch.randn(b, hq, queries, d).half(), torch.randn(b, hq, queries, dv).half()
    k, v = torch.randn(b, hk, keys, d).half(), torch.randn(b, hk, keys, dv).half()
    lse, delta = torch.randn(b, hq, queries) + 4.0, torch.randn(b, hq, queries)
    return problem, (q, k, v, dout, lse, delta)


def with_slopes(problem, slopes):
    """The problem with ALiBi's slopes, (b|1, hq)."""
    spec = OperandSpec(tuple(slopes.shape), slopes.stride(), slopes.dtype)
    return replace(problem, scores=ScoreOptions(alibi_slopes=spec))


def alibi_of(problem, slopes):
    """What ALiBi takes off the scores of queries and keys that take part."""
    queries, keys = problem.seeing_queries, problem.seen_keys
    standing = torch.arange(problem.sq)[queries.start:queries.stop] + problem.mask.offset(problem.sq, problem.sk)
    distance = (standing[:, None] - torch.arange(problem.sk)[keys.start:keys.stop]).abs()
    return slopes.double()[..., None, None] * distance


def expected(problem, tensors, visible=None, taken_off=0.0):
    """dq, dk and dv of any lse and delta, in float64; dq before it is scaled.

    visible: the mask, if it is no band. taken_off: of scaled scores.
    """
    q, k, v, dout, lse, delta = (tensor.double() for tensor in tensors)
    wide_k, wide_v = (tensor.repeat_interleave(problem.group, 1) for tensor in (k, v))
    queries, keys = problem.seeing_queries, problem.seen_keys
    if visible is None:
        visible = problem.mask.visible(problem.sq, problem.sk)[queries.start:queries.stop, keys.start:keys.stop]
    probs = torch.exp(SCALE * q @ wide_k.mT - taken_off - lse[..., None]).masked_fill(~visible, 0.0)
    dscores = probs * (dout @ wide_v.mT - delta[..., None])
    dk, dv = ((left.mT @ right).unflatten(1, (-1, problem.group)).sum(2)
              for left, right in ((dscores, q), (probs, dout)))
    return dscores @ wide_k, dk * SCALE, dv


def dq_of_accum(accum, columns, lines, rows):
    """dQ from its accumulator, which is thread-major (dq_accum.thread_major)."""
    parts = accum.view(*lines, -1, columns // 8, 4, 8, 4, 2, 2)
    return parts.permute(0, 1, 2, 4, 7, 5, 3, 6, 8).reshape(*lines, -1, columns)[:, :, :rows]


def compare(gradients, wanted):
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=4e-3, atol=4e-3 * float(want.abs().max()))


def extra_columns_of(lse, delta):
    """What hopper_augmented_k_kernel writes, of queries that see something."""
    columns = torch.zeros(*lse.shape, 16, dtype=torch.bfloat16)
    for first, rest in ((0, -lse / SCALE), (3, -delta)):
        for i in range(3):
            columns[..., first + i] = rest
            rest = rest - columns[..., first + i].float()
    return columns
