"""The Hopper backward kernels of wide heads: their source on the CPU."""

import math
import random
import time
from dataclasses import replace

import pytest
import torch

from emulation.backward_calls import (
    MASKS,
    SCALE,
    call_of,
    compare,
    compare_beside_a_hidden_overflow,
    dq_of_accum,
    expected,
    with_a_hidden_overflow,
)
from emulation.hopper_calls import bound_backward
from tilewise.kernels.hopper.arguments import RowStatsAndSeed
from tilewise.kernels.hopper.backward.config import HopperD192Config, HopperD256Config
from tilewise.kernels.reference.dropout import keep_tile
from tilewise.masks import Span, window
from tilewise.problem.options import ScoreOptions

d192 = pytest.importorskip("tilewise.kernels.hopper.backward.d192", reason="Triton is not installed")
(masking, epilogue, loading, d256, dq_d256, dq_accum, draws_of_keys, draws_of_queries, pipeline, products, softmax,
 tiles, mask_ranges) = (pytest.importorskip(f"tilewise.kernels.hopper.{name}") for name in (
     "backward.masking", "backward.epilogue", "backward.producers", "backward.d256", "backward.dq_d256",
     "backward.dq_accum", "backward.dropout", "dropout", "pipeline", "products", "softmax", "tile_scheduler",
     "mask_ranges"))
gluon_on_cpu, forward_on_cpu = (pytest.importorskip(f"emulation.{name}") for name in (
    "gluon_on_cpu", "forward_on_cpu"))
Descriptor, Pointer, run = gluon_on_cpu.Descriptor, gluon_on_cpu.Pointer, gluon_on_cpu.run

WIDE = HopperD256Config()
MODULES = (masking, epilogue, loading, d256, dq_d256, d192, dq_accum, draws_of_keys, draws_of_queries, pipeline,
           products, softmax, tiles, mask_ranges)


def draw(*counters):
    """What the reference's draws need; test_gluon_dropout.py holds the kernel's own against them."""
    return counters


def signed(probs, counters, threshold):
    """Transposed probabilities, the dropped ones negative, by the reference's draws."""
    low, high, row, first_query, first_key = map(int, counters)
    kept = keep_tile(torch.tensor([high << 32 | low & 0xFFFFFFFF]), 1, Span(first_query, first_query + 64),
                     Span(first_key, first_key + 64), int(threshold) / 2**32, row)[0].mT
    return torch.where(kept, probs, -probs)


CONSTANTS = {(module, "QUERIES"): 64 for module in MODULES if hasattr(module, "QUERIES")} | {
    (module, "LOG2E"): math.log2(math.e) for module in (loading, softmax)} | {(loading, "LOST"): 2.0**24} | {
    (module, "pack_pairs"): forward_on_cpu.pack_pairs for module in (d256, dq_d256)} | {
    (d256, "draw"): draw, (d256, "signed"): signed, (dq_d256, "drop"): forward_on_cpu.drop} | {
    (mask_ranges, "SPAN"): 16,
    (d256, "load_fragments"): lambda tile: tile.load(None), (d256, "FRAGMENT_COLUMNS"): 128,
    (d256, "as_operand"): lambda fragments, *_: fragments,
    (dq_d256, "K_STAGES"): 2, (softmax, "squashed"): forward_on_cpu.squashed,
    (d192, "multiply_rounded"): lambda probs, dprobs, dtype: (probs.float() * dprobs).to(dtype)}


@pytest.mark.parametrize("dims", [(192, 128), (130, 40)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_source_of_those_in_chunks_computes_the_gradients_on_the_cpu(mask, dims):
    random.seed(0)
    problem, tensors = call_of(*mask, dims)
    compare(differentiate(problem, tensors, HopperD192Config()), expected(problem, tensors))


def differentiate(problem, tensors, config):
    """Return dq before it is scaled, dk and dv."""
    launch = bound_backward(problem, config)
    q, k, v, dout, lse, delta = tensors
    dk, dv = (torch.full_like(tensor, float("nan"), dtype=problem.out_dtype) for tensor in (k, v))
    accum = torch.zeros(math.prod(launch.accum_shape))
    described = launch._in_forms((q, k, v, dout, lse, delta, dk, dv), lambda tensor, form: (
        Pointer(tensor.flatten()) if form is None else Descriptor(tensor, form[0])))
    run(launch.kernel, MODULES, launch.grid[0], (*described, Pointer(accum), *launch.scalars), CONSTANTS)
    columns = sum(config.columns(problem)[0])
    dq = dq_of_accum(accum, columns, (problem.b, problem.hq), q.shape[2])[..., :problem.d]
    return dq, dk, dv


@pytest.mark.parametrize("dims", [(256, 256), (200, 100), (192, 192), (100, 250)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_source_of_those_with_dq_apart_computes_the_gradients_on_the_cpu(mask, dims):
    random.seed(0)
    problem, tensors = call_of(*mask, dims)
    launch = bound_backward(problem, WIDE)
    gradients = run_part(launch.dq, tensors, tensors[:1]) + run_part(launch.dkdv, tensors, tensors[1:3])
    dq, dk, dv = expected(problem, tensors)
    compare(gradients, (dq * SCALE, dk, dv))


@pytest.mark.parametrize(("mask", "dims"), [("full", (256, 256)), ("causal", (192, 128)), ("window", (200, 100)),
                                            ("few", (100, 250))])
def test_gradients_go_through_the_derivative_of_a_softcap(mask, dims):
    random.seed(0)
    problem, tensors = call_of(*MASKS[mask], dims)
    capped = replace(problem, scores=ScoreOptions(softcap=1.5))
    launch = bound_backward(capped, WIDE)
    gradients = run_part(launch.dq, tensors, tensors[:1]) + run_part(launch.dkdv, tensors, tensors[1:3])
    dq, dk, dv = expected(problem, tensors, function=lambda scores: 1.5 * torch.tanh(scores / 1.5))
    compare(gradients, (dq * SCALE, dk, dv))
    plain = expected(problem, tensors)
    assert not torch.allclose(dk, plain[1], rtol=0.05, atol=0.05), "a softcap that is dropped does not show"


@pytest.mark.parametrize(("mask", "dims", "softcap"), [
    ("full", (256, 256), None), ("causal", (192, 128), None), ("window", (200, 100), 1.5), ("few", (100, 250), None)])
def test_gradients_leave_out_what_dropout_drops(mask, dims, softcap):
    random.seed(0)
    p, seed = 0.25, torch.tensor([-2**40 - 7])
    problem, tensors = call_of(*MASKS[mask], dims)
    queries, keys = problem.seeing_queries, problem.seen_keys
    launch = bound_backward(replace(problem, scores=ScoreOptions(dropout_p=p, softcap=softcap)), WIDE)
    gradients = (run_part(launch.dq, tensors, tensors[:1], seed=seed)
                 + run_part(launch.dkdv, tensors, tensors[1:3], seed=seed))
    kept = keep_tile(seed, problem.b * problem.hq, queries, keys, p, 0).view(problem.b, problem.hq, len(queries), -1)
    function = None if softcap is None else lambda scores: softcap * torch.tanh(scores / softcap)
    dq, dk, dv = expected(problem, tensors, function=function, kept=kept.double() / (1.0 - p))
    compare(gradients, (dq * SCALE, dk, dv))


def test_a_hidden_score_that_overflows_adds_nothing_to_gradients_under_a_softcap():
    random.seed(0)
    problem, tensors = with_a_hidden_overflow(*call_of(*MASKS["causal"], (192, 192)))
    launch = bound_backward(replace(problem, scores=ScoreOptions(softcap=1.5)), WIDE)
    overflows = {(softmax, "squashed"): forward_on_cpu.squashed_with_overflow}
    dq, dk, dv = (run_part(launch.dq, tensors, tensors[:1], overflows)
                  + run_part(launch.dkdv, tensors, tensors[1:3], overflows))
    wanted = expected(problem, tensors, function=lambda scores: 1.5 * torch.tanh(scores / 1.5))
    compare_beside_a_hidden_overflow((dq / SCALE, dk, dv), wanted)


def test_what_is_asked_for_late_changes_no_bit_of_dq():
    problem, tensors = call_of(window(100, 30, "top_left"), (300, 280), (1, 1), (192, 192), b=1)
    part = bound_backward(problem, WIDE).dq
    random.seed(1)
    (first,) = run_part(part, tensors, tensors[:1])
    random.seed(2)  # copies land at other times
    assert torch.equal(first, *run_part(part, tensors, tensors[:1]))


@pytest.mark.parametrize("dout_stages", [2, 1])
def test_nothing_is_written_over_before_the_slowest_warpgroup_has_read_it(dout_stages):
    def wait_long(left, deps):
        time.sleep(random.random() * 8e-3)  # longer than a copy needs
        return gluon_on_cpu.wait_for_products(left, deps)

    random.seed(0)
    problem, tensors = call_of(window(200, 0, "top_left"), (400, 400), (2, 1), (192, 256), b=1)
    part = bound_backward(problem, HopperD256Config(dout_stages=dout_stages)).dkdv
    slow = {(module, "warpgroup_mma_wait"): wait_long for module in (d256, products)}
    first = run_part(part, tensors, tensors[1:3])
    for one, other in zip(first, run_part(part, tensors, tensors[1:3], slow), strict=True):
        assert torch.equal(one, other)


def run_part(part, tensors, like, constants=None, seed=None):
    """Run one of the kernels, and return its gradients, which are shaped as ``like``."""
    gradients = [torch.full_like(tensor, float("nan")) for tensor in like]
    *read, lse, delta = tensors
    read, written = ([form and Descriptor(tensor, form[0]) for tensor, own in zip(some, forms, strict=True)
                      for form in own] for some, forms in ((read, part.forms[:4]), (gradients, part.forms[6:])))
    rows = RowStatsAndSeed(Pointer(lse.flatten()), Pointer(delta.flatten()), None if seed is None else Pointer(seed))
    numbers, fixed = part.scalars
    run(part.kernel, MODULES, part.grid[0], (*read, rows, *written, forward_on_cpu.as_kernels_have(numbers), fixed),
        CONSTANTS | (constants or {}))
    return gradients
