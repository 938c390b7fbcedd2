"""The Hopper kernel that sums the gradient of a shared bias: its source on the CPU, and itself on the GPU it is for."""

import math
import random
from dataclasses import replace

import pytest
import torch

from conformance.calls import assert_gradients_within_budget, forward_and_backward, operands_of, problem_of
from tilewise.backends._support import hopper
from tilewise.kernels.hopper.backward.config import HopperDbiasConfig
from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec, ScoreOptions
from tilewise.support.caches import clear_caches
from tilewise.testing.cases import Case
from tilewise.testing.inputs import make_inputs

hopper_dbias = pytest.importorskip("tilewise.kernels.hopper.backward.dbias", reason="Triton is not installed")
launch_dbias, dbias_tiles, producers, pipeline, tile_scheduler = (
    pytest.importorskip(f"tilewise.kernels.hopper.{name}") for name in (
        "backward.launch_dbias", "backward.dbias_tiles", "backward.producers", "pipeline", "tile_scheduler"))
triton, gluon, gluon_on_cpu = (pytest.importorskip(name) for name in (
    "tilewise.backends.triton", "tilewise.backends.gluon", "emulation.gluon_on_cpu"))
Descriptor, Pointer, run = gluon_on_cpu.Descriptor, gluon_on_cpu.Pointer, gluon_on_cpu.run


def call_of(mask, lengths, heads, shape, dtype, config, b=3, d=40, dv=24):
    """Return (launch, q, k, v, dout, lse, delta, bias): what the kernel is launched with."""
    torch.manual_seed(0)
    (sq, sk), (hq, hk) = lengths, heads
    q, dout = torch.randn(b, hq, sq, d).half(), torch.randn(b, hq, sq, dv).half()
    k, v = torch.randn(b, hk, sk, d).half(), torch.randn(b, hk, sk, dv).half()
    bias = torch.randn(*shape, sq, sk).to(dtype)
    facts = OperandSpec(tuple(bias.shape), bias.stride(), bias.dtype)
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
    "full": (Mask(), (200, 300), (2, 1), (1, 2), torch.float16, (1, 3)),
    "causal": (causal("bottom_right"), (300, 520), (2, 2), (1, 2), torch.float16, (2, 4)),
    "causal_all_share": (causal("top_left"), (320, 520), (4, 2), (1, 1), torch.float32, (1, 3)),
    "window_heads_share": (window(100, 30, "top_left"), (300, 450), (2, 1), (3, 1), torch.float16, (2, 2)),
    "blind_queries_odd": (causal("bottom_right"), (400, 131), (2, 2), (1, 2), torch.float16, (2, 2)),
    "keys_unseen": (window(0, 0, "top_left"), (70, 800), (1, 1), (1, 1), torch.float32, (1, 3)),
    "nothing_is_shared": (causal("bottom_right"), (300, 450), (4, 2), (3, 4), torch.float16, (2, 4)),
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
    constants = {(module, "LOG2E"): math.log2(math.e) for module in (hopper_dbias, producers)} | {
                 (producers, "LOST"): 2.0**24, (hopper_dbias, "TILE_SIZE"): 3,
                 (hopper_dbias, "NO_TILE"): -1, (hopper_dbias, "ZEROED_ROWS"): 4}
    constants |= {(module, name): int(getattr(dbias_tiles, name)) for module in (hopper_dbias, dbias_tiles)
                  for name in ("TILE_QUERIES", "BLOCKS_PER_TILE")}
    run(hopper_dbias.hopper_dbias_kernel, (hopper_dbias, dbias_tiles, producers, pipeline, tile_scheduler), programs,
        arguments, constants)
    want = expected(problem, tensors)
    assert not dbias[want == 0.0].any()
    tolerance = 1e-3 if bias.dtype is torch.float16 else 2e-5  # the rounding of a sum, and of its terms
    torch.testing.assert_close(dbias.double(), want, rtol=tolerance, atol=tolerance)


PLAIN = Case("plain", b=5, hq=4, hk=2, sq=520, sk=520, d=128, dv=128, bias="1hqk")
ON_GPU = (
    PLAIN, replace(PLAIN, name="causal", mask=causal()), replace(PLAIN, name="two_entries", b=2, mask=causal()),
    replace(PLAIN, name="bottom_right", sq=300, sk=600, mask=causal("bottom_right")),
    replace(PLAIN, name="blind_queries", sq=600, sk=300, mask=causal("bottom_right"), sinks=True),
    replace(PLAIN, name="keys_unseen", sq=300, sk=900, mask=window(40, 20, "top_left")),
    replace(PLAIN, name="window", mask=window(100, 0)),
    replace(PLAIN, name="odd", sq=333, sk=501, mask=causal("top_left")),
    replace(PLAIN, name="float32", operand_dtype="float32", mask=causal()),
    replace(PLAIN, name="float32_odd", operand_dtype="float32", sk=501),
    replace(PLAIN, name="narrow", d=64, dv=40, mask=causal()), replace(PLAIN, name="padded", d=40, dv=96),
    replace(PLAIN, name="narrow_float32", d=64, dv=64, operand_dtype="float32"),
    replace(PLAIN, name="heads_share", bias="b1qk", mask=causal()), replace(PLAIN, name="all_share", bias="11qk"),
    replace(PLAIN, name="turned", layout="bshd", mask=causal()),
    replace(PLAIN, name="scaled", scale=0.03, mask=causal()),
)


@pytest.fixture
def small_calls_take_it(monkeypatch):
    for name, least in (("triton.LEAST_WORK_FOR_DESCRIPTORS", 0), ("hopper.LEAST_TILES", 0),
                        ("hopper.LEAST_SHARING", 1)):
        monkeypatch.setattr(f"tilewise.tuning.heuristics_{name}", least)
    clear_caches()
    yield
    clear_caches()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu", "small_calls_take_it")
@pytest.mark.parametrize("case", [
    replace(PLAIN, name="one_entry", b=1, mask=causal()), replace(PLAIN, name="two_entries", b=2, mask=causal()),
    replace(PLAIN, name="of_entries", bias="bhqk"), replace(PLAIN, name="odd", b=1, sq=333, sk=501, d=96, dv=96)],
    ids=str)
def test_behind_the_hopper_kernels_dq_it_sums_what_few_members_have(case, device, monkeypatch):
    inputs, launches, launch = make_inputs(case, torch.bfloat16, device), [], launch_dbias.HopperDbias.__call__
    monkeypatch.setattr(launch_dbias.HopperDbias, "__call__",
                        lambda *arguments: launches.append(arguments) or launch(*arguments))
    got = forward_and_backward(gluon.backend, case, inputs, "out_and_lse").gradients
    assert_gradients_within_budget(case, inputs, got, "out_and_lse")
    assert any(tensors[0].is_cuda for _, *tensors in launches)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu", "small_calls_take_it")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_it_computes_the_oracles_gradient_and_the_same_bits_at_every_call(case, dtype, device, monkeypatch):
    inputs = make_inputs(case, dtype, device)
    problem = problem_of(case, inputs, operands_of(case, inputs)).backward(lse_grad=True)
    assert hopper.sums_dbias(problem)
    launches, launch = [], launch_dbias.HopperDbias.__call__
    monkeypatch.setattr(launch_dbias.HopperDbias, "__call__",
                        lambda *arguments: launches.append(arguments) or launch(*arguments))
    got, again = (forward_and_backward(triton.backend, case, inputs, "out_and_lse").gradients for _ in range(2))
    assert_gradients_within_budget(case, inputs, got, "out_and_lse")
    assert torch.equal(got.dbias, again.dbias)
    assert len([tensors for _, *tensors in launches if tensors[0].is_cuda]) == 2  # beside what compiles it ahead
