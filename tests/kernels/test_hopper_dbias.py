"""The Hopper kernel that sums the gradient of a shared bias: its source on the CPU, and itself on the GPU it is for."""

import math
import random

import pytest
import torch

from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.scores import OperandFacts, ScoreOptions
from tilewise.tuning.configs import HopperDbiasConfig

hopper_dbias = pytest.importorskip("tilewise.kernels.gluon.hopper_dbias", reason="Triton is not installed")
from kernels.gluon_on_cpu import Descriptor, Pointer, run  # noqa: E402 - they need Triton
from tilewise.kernels.gluon import launch_dbias, pair_tiles, pipeline  # noqa: E402


def call_of(mask, lengths, heads, shape, dtype, config, b=3, d=40, dv=24):
    """Return (launch, q, k, v, dout, lse, delta, bias): what the kernel is launched with."""
    torch.manual_seed(0)
    (sq, sk), (hq, hk) = lengths, heads
    q, dout = torch.randn(b, hq, sq, d).half(), torch.randn(b, hq, sq, dv).half()
    k, v = torch.randn(b, hk, sk, d).half(), torch.randn(b, hk, sk, dv).half()
    bias = torch.randn(*shape, sq, sk).to(dtype)
    facts = OperandFacts(tuple(bias.shape), bias.stride(), bias.dtype)
    problem = AttentionProblem(b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv, dtype=torch.float16,
                               device=torch.device("cuda", 0), scale=0.3, mask=mask, direction="backward",
                               scores=ScoreOptions(bias=facts))
    lse, delta = torch.randn(b, hq, sq) + 8.0, torch.randn(b, hq, sq)
    lse[0, :, 5] = float("-inf")  # a query that sees nothing for its bias
    return launch_dbias.HopperDbias(problem, config, 132), (q, k, v, dout, lse, delta, bias), problem


def expected(problem, tensors):
    """dS summed to the bias's shape, in float64."""
    q, k, v, dout, lse, delta, bias = (tensor.double() for tensor in tensors)
    k, v = (tensor.repeat_interleave(problem.group, 1) for tensor in (k, v))
    probs = torch.exp(0.3 * q @ k.mT + bias - lse.masked_fill(lse == -math.inf, math.inf)[..., None])
    dscores = probs * (dout @ v.mT - delta[..., None])
    dscores = dscores.masked_fill(~problem.mask.visible(problem.sq, problem.sk), 0.0)
    return dscores.sum_to_size(bias.shape)


CASES = {
    "full": (Mask(), (200, 300), (2, 1), (1, 2), torch.float16, (4, 1, 3)),
    "causal": (causal("bottom_right"), (300, 520), (2, 2), (1, 2), torch.float16, (4, 2, 4)),
    "causal_all_share": (causal("top_left"), (320, 520), (4, 2), (1, 1), torch.float32, (2, 1, 3)),
    "window_heads_share": (window(100, 30, "top_left"), (300, 450), (2, 1), (3, 1), torch.float16, (2, 2, 2)),
    "blind_queries_odd": (causal("bottom_right"), (400, 131), (2, 2), (1, 2), torch.float16, (2, 2, 2)),
    "keys_unseen": (window(0, 0, "top_left"), (70, 800), (1, 1), (1, 1), torch.float32, (4, 1, 3)),
}


@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_its_source_computes_the_sum_on_the_cpu(case, programs):
    random.seed(programs)
    *case, config = case
    config = HopperDbiasConfig(*config)
    launch, tensors, problem = call_of(*case, config)
    q, k, v, dout, lse, delta, bias = tensors
    dbias = torch.full_like(bias, float("nan"))
    block = [1, 1, 64, config.columns(problem)]
    arguments = (*(Descriptor(tensor, block) for tensor in (q, k, v, dout)),
                 *(Pointer(tensor.flatten()) for tensor in (lse, delta, bias)), Pointer(dbias.view(-1)),
                 *launch.scalars)
    constants = {(hopper_dbias, "LOG2E"): math.log2(math.e), (hopper_dbias, "SIZE"): 3, (hopper_dbias, "END"): -1,
                 (hopper_dbias, "ROWS"): 128, (hopper_dbias, "BLANK_ROWS"): 4, (pair_tiles, "ROWS"): 128}
    run(hopper_dbias.hopper_dbias_kernel, (hopper_dbias, pair_tiles, pipeline), programs, arguments, constants)
    want = expected(problem, tensors)
    assert not dbias[want == 0.0].any()
    tolerance = 1e-3 if bias.dtype is torch.float16 else 2e-5  # the rounding of a sum, and of its terms
    torch.testing.assert_close(dbias.double(), want, rtol=tolerance, atol=tolerance)
