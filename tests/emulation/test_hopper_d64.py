"""The Hopper backward kernel of heads up to 64: its source on the CPU, every way to assign tiles and accumulate dQ."""

import math
import random

import pytest
import torch

from emulation.backward_calls import MASKS, call_of, compare, dq_of_accum, expected, extra_columns_of
from emulation.hopper_calls import bound_backward
from tilewise.kernels.hopper.backward.config import D64Variant, HopperD64Config

d64, backward, loading, products, dq_accum, augmented, pipeline, kv_tile_assignment, tiles, mask_ranges = (
    pytest.importorskip(f"tilewise.kernels.hopper.{name}", reason="Triton is not installed") for name in (
        "backward.d64", "backward.d128", "backward.producers", "backward.mmas", "backward.dq_accum",
        "backward.augmented_k", "pipeline", "backward.kv_tile_assignment", "tile_scheduler", "mask_ranges"))
gluon_on_cpu = pytest.importorskip("emulation.gluon_on_cpu")
Descriptor, Pointer, run = gluon_on_cpu.Descriptor, gluon_on_cpu.Pointer, gluon_on_cpu.run

MODULES = (d64, backward, loading, products, dq_accum, augmented, pipeline, kv_tile_assignment, tiles, mask_ranges)
CONSTANTS = {(module, "QUERIES"): 64 for module in MODULES if hasattr(module, "QUERIES")} | {
    (module, "EXTRA_COLUMNS"): 16 for module in (d64, backward, augmented)} | {
    (module, "NO_TILE"): -1 for module in (d64, tiles)} | {
    (d64, "ZERO"): 0, (d64, "ONE"): 1, (dq_accum, "WRITERS"): 2, (d64, "WRITERS"): 2}
DYNAMIC, DETERMINISTIC, HEAD_PERSISTENT = (HopperD64Config(variant=variant) for variant in D64Variant)
TWO, FOUR = (HopperD64Config(variant=D64Variant.HEAD_PERSISTENT, ctas_per_head=ctas) for ctas in (2, 4))


def differentiate(mask, config, d, together=None, num_sms=4):
    """Return (problem, tensors, (dq before it is scaled, dk, dv)).

    together: how many CTAs run at once, as many as share a head unless said otherwise.
    """
    random.seed(0)
    problem, tensors = call_of(*mask, (d, d))
    launch = bound_backward(problem, config, num_sms)
    q, k, v, dout, lse, delta = tensors
    dq, dk, dv = (torch.full_like(tensor, float("nan")) for tensor in (q, k, v))
    accum = torch.full((math.prod(launch.accum_shape),), float("nan") if config.deterministic else 0.0)
    accum[launch.accum_rows * 256:] = 0.0  # semaphores
    read = extra_columns_of(lse, delta)
    described = launch._in_forms((q, k, v, dout, read, dk, dv, dq), lambda tensor, form: Descriptor(tensor, form[0]))
    counter = torch.zeros(1, dtype=torch.int32)
    workspace = Pointer(counter) if config.dynamic_tiles else Pointer(accum) if config.head_persistent else Pointer(
        accum[launch.accum_rows * 256:].view(torch.int32)) if config.deterministic else None
    rows = accum[:launch.accum_rows * 256].view(-1, 256)
    run(launch.kernel, MODULES, launch.grid[0],
        (*described, Descriptor(rows, launch.accum_block), workspace, *launch.scalars), CONSTANTS,
        together or config.ctas_per_head)
    assert counter == 0
    if config.head_persistent:
        dq = dq.float() / problem.scale
    else:
        parts = dq_of_accum(rows.flatten(), 32, (problem.b, problem.hq), None)
        dq = parts.unflatten(2, (-1, 2, 64)).transpose(3, 4).flatten(4).flatten(2, 3)[:, :, :q.shape[2], :d]
    return problem, tensors, (dq, dk, dv)


@pytest.mark.parametrize("d", [64, 40])
@pytest.mark.parametrize("config", [DETERMINISTIC, HEAD_PERSISTENT, TWO, FOUR, DYNAMIC],
                         ids=["deterministic", "head_persistent", "two", "four", "dynamic"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_source_computes_the_gradients_on_the_cpu(mask, config, d):
    problem, tensors, gradients = differentiate(mask, config, d)
    compare(gradients, expected(problem, tensors))


@pytest.mark.parametrize("together", [2, 4])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_ctas_of_the_dynamic_scheduler_may_run_at_once(mask, together):
    problem, tensors, gradients = differentiate(mask, DYNAMIC, 64, together)
    compare(gradients, expected(problem, tensors))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_ctas_of_the_dynamic_scheduler_may_have_one_tile_each(mask):
    problem, tensors, gradients = differentiate(mask, DYNAMIC, 64, num_sms=132)
    compare(gradients, expected(problem, tensors))


@pytest.mark.parametrize("config", [HEAD_PERSISTENT, TWO, FOUR], ids=["head_persistent", "two", "four"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_head_persistent_cta_has_the_bits_of_deterministic_accumulation(mask, config):
    """A call may take either way, as its batch has it, with deterministic=True."""
    problem, _, (dq, *of_keys) = differentiate(mask, config, 64)
    _, _, (accum, *of_keys_in_order) = differentiate(mask, DETERMINISTIC, 64)
    assert torch.equal((dq * problem.scale).half(), (accum * problem.scale).half())
    assert all(map(torch.equal, of_keys, of_keys_in_order))
