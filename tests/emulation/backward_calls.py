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


# Masks under which no key that is seen is ahead of its query: groups of heads, diagonals of unequal lengths, queries
# and keys that are not read, and lengths that are no multiple of a block.
NONE_AHEAD = {
    "causal": (causal("bottom_right"), (270, 330), (2, 1)),
    "top_left": (causal("top_left"), (300, 200), (2, 2)),
    "fewer_keys": (causal("bottom_right"), (300, 210), (2, 1)),
    "window": (window(100, 0, "top_left"), (300, 280), (2, 1)),
    "few": (causal("top_left"), (70, 40), (2, 2)),
}
# Of each head, also negative: of each batch entry, or of all, in 16 bits.
SLOPES = {"entries": torch.tensor([[0.5, -0.01], [-0.02, 4.0]]), "shared": torch.tensor([[0.25, -0.015625]]).bfloat16()}


def with_true_lse(problem, tensors, taken_off):
    """The tensors with lse as the forward pass would have it: no probability is more than 1."""
    q, k, v, dout, lse, delta = tensors
    queries, keys = problem.seeing_queries, problem.seen_keys
    visible = problem.mask.visible(problem.sq, problem.sk)[queries.start:queries.stop, keys.start:keys.stop]
    scores = SCALE * q.double() @ k.double().repeat_interleave(problem.group, 1).mT - taken_off
    return q, k, v, dout, scores.masked_fill(~visible, -torch.inf).logsumexp(-1).to(lse.dtype), delta


def alibi_of(problem, slopes):
    """What ALiBi takes off the scores of queries and keys that take part."""
    queries, keys = problem.seeing_queries, problem.seen_keys
    standing = torch.arange(problem.sq)[queries.start:queries.stop] + problem.mask.offset(problem.sq, problem.sk)
    distance = (standing[:, None] - torch.arange(problem.sk)[keys.start:keys.stop]).abs()
    return slopes.double()[..., None, None] * distance


def expected(problem, tensors, visible=None, taken_off=0.0, function=None, kept=1.0):
    """dq, dk and dv of any lse and delta, in float64; dq before it is scaled.

    visible: the mask, if it is no band. taken_off: of scaled scores, behind what a function makes of them. kept: what
    dropout multiplies probabilities by.
    """
    q, k, v, dout, lse, delta = (tensor.double() for tensor in tensors)
    wide_k, wide_v = (tensor.repeat_interleave(problem.group, 1) for tensor in (k, v))
    queries, keys = problem.seeing_queries, problem.seen_keys
    if visible is None:
        visible = problem.mask.visible(problem.sq, problem.sk)[queries.start:queries.stop, keys.start:keys.stop]
    scores = SCALE * q @ wide_k.mT
    slopes = torch.ones_like(scores)
    if function is not None:
        given = scores.requires_grad_()
        scores = function(given)
        slopes, scores = torch.autograd.grad(scores.sum(), given)[0], scores.detach()
    probs = torch.exp(scores - taken_off - lse[..., None]).masked_fill(~visible, 0.0)
    dscores = probs * (kept * (dout @ wide_v.mT) - delta[..., None]) * slopes.masked_fill(~visible, 0.0)
    dk, dv = ((left.mT @ right).unflatten(1, (-1, problem.group)).sum(2)
              for left, right in ((dscores, q), (kept * probs, dout)))
    return dscores @ wide_k, dk * SCALE, dv


def dq_of_accum(accum, columns, lines, rows):
    """dQ from its accumulator, which is thread-major (dq_accum.thread_major)."""
    parts = accum.view(*lines, -1, columns // 8, 4, 8, 4, 2, 2)
    return parts.permute(0, 1, 2, 4, 7, 5, 3, 6, 8).reshape(*lines, -1, columns)[:, :, :rows]


def compare(gradients, wanted):
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=4e-3, atol=4e-3 * float(want.abs().max()))


def with_a_hidden_overflow(problem, tensors):
    """The causal call in bfloat16; of its first query and the first key that this does not see the score overflows."""
    q, k, v, dout = (tensor.bfloat16() for tensor in tensors[:4])
    hidden = 1 + problem.mask.offset(problem.sq, problem.sk)
    q[..., :2], k[..., :2] = 0.0, 0.0
    q[:, :, 0, :2], k[:, :, hidden, :2] = torch.tensor([1e20, -1e20]), 1e20
    return replace(problem, dtype=torch.bfloat16), (q, k, v, dout, *tensors[4:])


def compare_beside_a_hidden_overflow(gradients, wanted):
    """All gradients are finite, and dq of the first query is right."""
    assert all(bool(got.isfinite().all()) for got in gradients)
    first, want = gradients[0][:, :, 0].double(), wanted[0][:, :, 0]
    torch.testing.assert_close(first, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def extra_columns_of(lse, delta, slopes=None):
    """What hopper_augmented_k_kernel writes; with ALiBi's slopes also of queries past the last one."""
    parts = [(0, (-lse / SCALE).masked_fill(lse.isinf(), -1e30)), (3, -delta)]
    if slopes is not None:
        ahead = -lse.shape[-1] % 64
        lse, delta = (torch.nn.functional.pad(rows, (0, ahead), value=past) for rows, past in (
            (lse, torch.inf), (delta, 0.0)))
        slopes = slopes.float()[..., None].expand(lse.shape)
        of_queries = -(lse + slopes * (torch.arange(lse.shape[-1]) % 64)) / SCALE
        parts = [(0, of_queries.masked_fill(lse.isinf(), -1e30)), (3, -delta), (6, slopes / SCALE)]
    columns = torch.zeros(*lse.shape, 16, dtype=torch.bfloat16)
    for first, rest in parts:
        for i in range(3):
            columns[..., first + i] = rest
            rest = rest - columns[..., first + i].float()
    return columns


def with_bias(problem, bias):
    """The problem with a bias, (b|1, hq|1, sq, sk)."""
    spec = OperandSpec(tuple(bias.shape), bias.stride(), bias.dtype)
    return replace(problem, scores=problem.scores._replace(bias=spec))


def bias_of(problem, entries, heads, dtype=torch.float16):
    """A bias of so many batch entries and heads, whose rows begin at multiples of 16 bytes.

    It is NaN where nobody may look: behind the last key of each row, and in the rows and columns of queries and keys
    that do not take part.
    """
    torch.manual_seed(1)
    queries, keys, wide = problem.seeing_queries, problem.seen_keys, -(-problem.sk // 8) * 8
    bias = torch.full((entries, heads, problem.sq, wide), torch.nan, dtype=dtype)
    taken = 2.0 * torch.randn(entries, heads, len(queries), len(keys))
    bias[:, :, queries.start:queries.stop, keys.start:keys.stop] = taken.to(dtype)
    return bias[..., :problem.sk]


def taken_off_by(problem, bias):
    """What a bias takes off the scores of queries and keys that take part: less than nothing where it is positive."""
    queries, keys = problem.seeing_queries, problem.seen_keys
    return -bias[:, :, queries.start:queries.stop, keys.start:keys.stop].double()
