"""The Hopper backward kernels of wide heads: their source on the CPU."""

import math
import random

import pytest
import torch

from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.tuning.configs import HopperBackwardConfig

pieces = pytest.importorskip("tilewise.kernels.gluon.hopper_backward_pieces", reason="Triton is not installed")
backward, wide, dq_wide, sums_of, launch_backward, launch_backward_wide, pipeline, softmax, tiles = (
    pytest.importorskip(f"tilewise.kernels.gluon.{name}") for name in (
        "hopper_backward", "hopper_backward_wide", "hopper_dq_wide", "hopper_dq_sums", "launch_backward",
        "launch_backward_wide", "pipeline", "softmax", "tiles"))
gluon_on_cpu = pytest.importorskip("kernels.gluon_on_cpu")
Descriptor, Pointer, run = gluon_on_cpu.Descriptor, gluon_on_cpu.Pointer, gluon_on_cpu.run

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


WIDE = HopperBackwardConfig(wide=True)
MODULES = (backward, wide, dq_wide, pieces, sums_of, pipeline, softmax, tiles)
CONSTANTS = {(module, "QUERIES"): 64 for module in MODULES if hasattr(module, "QUERIES")} | {
    (module, "LOG2E"): math.log2(math.e) for module in (backward, softmax)} | {
    (wide, "in_pairs"): lambda probs, dtype: probs.to(dtype), (wide, "as_operand"): lambda pairs, *_: pairs,
    (dq_wide, "K_STAGES"): 2,
    (pieces, "times"): lambda probs, slopes, dtype: (probs.float() * slopes).to(dtype)}


@pytest.mark.parametrize("dims", [(192, 128), (130, 40)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_source_of_those_in_pieces_computes_the_gradients_on_the_cpu(mask, dims):
    random.seed(0)
    config = HopperBackwardConfig(direct=True)
    problem, tensors = call_of(*mask, dims)
    launch = launch_backward.HopperBackward(problem, config, problem.q_strides)
    q, k, v, dout, lse, delta = tensors
    dk, dv = torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))
    sums = torch.zeros(math.prod(launch.sums_shape))
    described = launch._in_forms((q, k, v, dout, lse, delta, dk, dv), lambda tensor, form: (
        Pointer(tensor.flatten()) if form is None else Descriptor(tensor, form[0])))
    run(launch.kernel, MODULES, launch.grid[0], (*described, Pointer(sums), None, *launch.scalars), CONSTANTS)
    columns = sum(config.columns(problem)[0])
    dq = gathered(sums, columns, (problem.b, problem.hq), q.shape[2])[..., :problem.d]
    compare((dq, dk, dv), expected(problem, tensors))


@pytest.mark.parametrize("dims", [(256, 256), (200, 100), (192, 192), (100, 250)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_source_of_those_with_dq_apart_computes_the_gradients_on_the_cpu(mask, dims):
    random.seed(0)
    problem, tensors = call_of(*mask, dims)
    launch = launch_backward_wide.HopperBackwardApart(problem, WIDE)
    gradients = run_part(launch.dq, tensors, tensors[:1]) + run_part(launch.dkdv, tensors, tensors[1:3])
    dq, dk, dv = expected(problem, tensors)
    compare(gradients, (dq * SCALE, dk, dv))


def test_what_is_asked_for_late_changes_no_bit_of_dq():
    problem, tensors = call_of(window(100, 30, "top_left"), (300, 280), (1, 1), (192, 192), b=1)
    part = launch_backward_wide.HopperBackwardApart(problem, WIDE).dq
    random.seed(1)
    (first,) = run_part(part, tensors, tensors[:1])
    random.seed(2)  # copies land at other times
    assert torch.equal(first, *run_part(part, tensors, tensors[:1]))


def run_part(part, tensors, like):
    """Run one of the kernels, and return its gradients, which are shaped as ``like``."""
    gradients = [torch.full_like(tensor, float("nan")) for tensor in like]
    described = [form and Descriptor(tensor, form[0]) if own else Pointer(tensor.flatten())
                 for tensor, own in zip((*tensors, *gradients), part.forms, strict=True) for form in own or [None]]
    run(part.kernel, MODULES, part.grid[0], (*described, *part.scalars), CONSTANTS)
    return gradients


def compare(gradients, wanted):
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=4e-3, atol=4e-3 * float(want.abs().max()))
