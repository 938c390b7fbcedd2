"""The Hopper backward kernels of wide heads: their source on the CPU."""

import math
import random

import pytest
import torch

from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.tuning.configs import HopperBackwardConfig

pieces = pytest.importorskip("tilewise.kernels.gluon.hopper_backward_pieces", reason="Triton is not installed")
backward, wide, sums_of, launch_backward, pipeline, tiles = (
    pytest.importorskip(f"tilewise.kernels.gluon.{name}") for name in (
        "hopper_backward", "hopper_backward_wide", "hopper_dq_sums", "launch_backward", "pipeline", "tiles"))
gluon_on_cpu = pytest.importorskip("kernels.gluon_on_cpu")
Descriptor, Pointer, run = gluon_on_cpu.Descriptor, gluon_on_cpu.Pointer, gluon_on_cpu.run

SCALE = 0.1
MASKS = {
    "full": (Mask(), (200, 300), (2, 1)),
    "causal": (causal("bottom_right"), (270, 330), (2, 2)),
    "window": (window(100, 30, "top_left"), (300, 280), (2, 1)),
    "few": (causal("top_left"), (70, 40), (1, 1)),
}
WIDE, IN_PIECES = HopperBackwardConfig(direct=True, wide=True), HopperBackwardConfig(direct=True)


def call_of(mask, lengths, heads, dims, config, b=2):
    """Return (problem, launch, (q, k, v, dout, lse, delta)), of queries and keys that take part alone."""
    torch.manual_seed(0)
    (sq, sk), (hq, hk), (d, dv) = lengths, heads, dims
    problem = AttentionProblem(b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv, dtype=torch.float16,
                               device=torch.device("cuda", 0), scale=SCALE, mask=mask, direction="backward")
    queries, keys = (len(rows) for rows in (problem.seeing_queries, problem.seen_keys))
    q, dout = torch.randn(b, hq, queries, d).half(), torch.randn(b, hq, queries, dv).half()
    k, v = torch.randn(b, hk, keys, d).half(), torch.randn(b, hk, keys, dv).half()
    lse, delta = torch.randn(b, hq, queries) + 4.0, torch.randn(b, hq, queries)
    return problem, launch_backward.HopperBackward(problem, config, problem.q_strides), (q, k, v, dout, lse, delta)


def expected(problem, tensors):
    """dq, dk and dv of any lse and delta, in float64; dq before it is scaled."""
    q, k, v, dout, lse, delta = (tensor.double() for tensor in tensors)
    wide_k, wide_v = (tensor.repeat_interleave(problem.group, 1) for tensor in (k, v))
    queries, keys = problem.seeing_queries, problem.seen_keys
    visible = problem.mask.visible(problem.sq, problem.sk)[queries.start:queries.stop, keys.start:keys.stop]
    probs = torch.exp(SCALE * q @ wide_k.mT - lse[..., None]).masked_fill(~visible, 0.0)
    dscores = probs * (dout @ wide_v.mT - delta[..., None])
    dk, dv = ((left.mT @ right).unflatten(1, (-1, problem.group)).sum(2)
              for left, right in ((dscores, q), (probs, dout)))
    return dscores @ wide_k, dk * SCALE, dv


def gathered(sums, columns, lines, rows):
    """dQ from its sums, in which threads' values stand four by four (hopper_dq.py)."""
    parts = sums.view(*lines, -1, columns // 8, 4, 8, 4, 2, 2)
    return parts.permute(0, 1, 2, 4, 7, 5, 3, 6, 8).reshape(*lines, -1, columns)[:, :, :rows]


@pytest.mark.parametrize(("dims", "config"), [
    ((192, 128), IN_PIECES), ((130, 40), IN_PIECES), ((256, 256), WIDE), ((200, 100), WIDE), ((192, 192), WIDE)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_their_source_computes_the_gradients_on_the_cpu(mask, dims, config):
    random.seed(0)
    problem, launch, tensors = call_of(*mask, dims, config)
    q, k, v, dout, lse, delta = tensors
    dk, dv = torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))
    sums = torch.zeros(math.prod(launch.sums_shape))
    described = launch._in_forms((q, k, v, dout, lse, delta, dk, dv), lambda tensor, form: (
        Pointer(tensor.flatten()) if form is None else Descriptor(tensor, form[0])))
    modules = (backward, wide, pieces, sums_of, pipeline, tiles)
    constants = {(module, "QUERIES"): 64 for module in modules if hasattr(module, "QUERIES")} | {
        (backward, "LOG2E"): math.log2(math.e),
        (pieces, "times"): lambda probs, slopes, dtype: (probs.float() * slopes).to(dtype)}
    run(launch.kernel, modules, launch.grid[0],
        (*described, Pointer(sums), None, *launch.scalars), constants)
    columns = sum(config.columns(problem)[0])
    dq = gathered(sums, columns, (problem.b, problem.hq), q.shape[2])[..., :problem.d]
    for got, want in zip((dq, dk, dv), expected(problem, tensors), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=4e-3, atol=4e-3 * float(want.abs().max()))
