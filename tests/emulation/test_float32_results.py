"""The Hopper kernels with results in float32: what they write is what they round to 16 bits otherwise."""

import random
from dataclasses import replace

import pytest
import torch

from emulation.backward_calls import MASKS, call_of, compare, expected
from emulation.hopper_calls import bound_backward
from tilewise.kernels.hopper.backward.config import (
    D64Variant,
    D128AugmentedKVariant,
    D128Variant,
    HopperD64Config,
    HopperD128AugmentedKConfig,
    HopperD128Config,
    HopperD192Config,
    HopperD256Config,
)
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal
from tilewise.problem.options import OperandSpec
from tilewise.problem.sequences import Sequences

forward_on_cpu, backward_on_cpu, wide_heads = (
    pytest.importorskip(f"emulation.{name}", reason="Triton is not installed") for name in (
        "forward_on_cpu", "backward_on_cpu", "test_hopper_d256"))

FORWARD = {
    "64": ((64, 64), HopperForwardConfig(128, 2), {}),
    "three_warpgroups": ((64, 64), HopperForwardConfig(128, 3, ping_pong=True), {}),
    "128": ((128, 128), HopperForwardConfig(128, 2, ping_pong=True), {}),
    "fewer_buffers": ((128, 128), HopperForwardConfig(128, 2, epilogue_passes=2), {}),
    "chunks": ((96, 96), HopperForwardConfig(128, 2), {}),
    "256": ((256, 256), HopperForwardConfig(64, 2, q_stages=1, epilogue_passes=2), {}),
    "packed_heads": ((64, 64), HopperForwardConfig(128, 2), {"pack_gqa": 2}),
}
BACKWARD = {
    "d64": (64, HopperD64Config()), "d64_narrow": (40, HopperD64Config()),
    "d64_deterministic": (64, HopperD64Config(variant=D64Variant.DETERMINISTIC)),
    "d64_head_persistent": (64, HopperD64Config(variant=D64Variant.HEAD_PERSISTENT)),
    "d64_ctas_share_heads": (64, HopperD64Config(variant=D64Variant.HEAD_PERSISTENT, ctas_per_head=2)),
    "d128": (128, HopperD128AugmentedKConfig()),
    "d128_head_persistent": (80, HopperD128AugmentedKConfig(variant=D128AugmentedKVariant.HEAD_PERSISTENT)),
    "d128_without_augmented_k": (128, HopperD128Config()),
    "d128_from_registers": (64, HopperD128Config(s_ahead=True, variant=D128Variant.DQ_FROM_REGISTERS)),
    "d128_deterministic": (128, HopperD128Config(variant=D128Variant.DETERMINISTIC)),
}
BORDERS = (0, 70, 70, 261, 300), (0, 70, 79, 300, 301)  # one without queries, one with a key


def assert_rounds_to(wide, narrow):
    """Hold a float32 result against the one in 16 bits."""
    assert wide.dtype is torch.float32
    assert torch.equal(wide.to(narrow.dtype), narrow)
    assert not torch.equal(wide, narrow.float()), "no bit more than in 16 bits"


def packed_sequences(problem):
    spec = OperandSpec((len(BORDERS[0]),), (1,), torch.int32)
    borders = [torch.tensor(own, dtype=torch.int32) for own in BORDERS]
    return replace(problem, sequences=Sequences(len(BORDERS[0]) - 1, spec, spec)), borders


@pytest.mark.parametrize(("dims", "config", "options"), FORWARD.values(), ids=FORWARD)
def test_out_is_what_is_rounded_otherwise(dims, config, options):
    problem, tensors = forward_on_cpu.call_of(causal("bottom_right"), (150, 300), (2, 1), dims)
    wide, narrow = (forward_on_cpu.attend(replace(problem, float32_results=wanted), config, tensors, **options)
                    for wanted in (True, False))
    assert_rounds_to(wide[0], narrow[0])
    assert torch.equal(wide[1], narrow[1])
    forward_on_cpu.check(problem, tensors, *wide[:2])


@pytest.mark.parametrize("config", [HopperForwardConfig(128, 2), HopperForwardConfig(128, 3, ping_pong=True)], ids=str)
@pytest.mark.parametrize("pack_gqa", [1, 2])
def test_out_of_packed_sequences_is_too(config, pack_gqa):
    """The last rows of a sequence leave by plain stores, past the copy engine."""
    problem, tensors = forward_on_cpu.call_of(causal("bottom_right"), (300, 301), (2, 1), (64, 64))
    problem, borders = packed_sequences(problem)
    wide, narrow = (forward_on_cpu.attend(replace(problem, float32_results=wanted), config, tensors, pack_gqa,
                                          lengths=(*borders, None, None)) for wanted in (True, False))
    assert_rounds_to(wide[0], narrow[0])


@pytest.mark.parametrize(("d", "config"), BACKWARD.values(), ids=BACKWARD)
@pytest.mark.parametrize("mask", [MASKS["causal"], MASKS["few"]], ids=["causal", "few"])
def test_gradients_are_what_is_rounded_otherwise(mask, d, config):
    random.seed(0)
    problem, tensors = call_of(*mask, (d, d))
    wide, narrow = (backward_on_cpu.differentiate(replace(problem, float32_results=wanted), tensors, config, 4,
                                                  config.ctas_per_head) for wanted in (True, False))
    for one, other in zip(wide[1:], narrow[1:], strict=True):
        assert_rounds_to(one, other)
    if config.head_persistent:  # another kernel writes dq else (test_hopper_dq.py)
        assert_rounds_to(wide[0] * problem.scale, (narrow[0] * problem.scale).half())
    compare(wide, expected(problem, tensors))


@pytest.mark.parametrize("d", [64, 40])
def test_gradients_of_packed_sequences_are_too(d):
    problem, tensors = call_of(Mask(), (300, 301), (2, 1), (d, d), b=1)
    problem, borders = packed_sequences(problem)
    wide, narrow = (backward_on_cpu.differentiate(replace(problem, float32_results=wanted), tensors, HopperD128Config(),
                                                  4, 1, borders=borders) for wanted in (True, False))
    for one, other in zip(wide[1:], narrow[1:], strict=True):
        assert_rounds_to(one, other)
    sequence_of_q, sequence_of_k = (torch.bucketize(torch.arange(own[-1]), torch.tensor(own[1:]), right=True)
                                    for own in BORDERS)
    compare(wide[1:], expected(problem, tensors, sequence_of_q[:, None] == sequence_of_k)[1:])


@pytest.mark.parametrize("mask", [MASKS["causal"], MASKS["window"]], ids=["causal", "window"])
def test_gradients_of_heads_in_chunks_are_too(mask):
    problem, tensors = call_of(*mask, (192, 128))
    wide, narrow = (wide_heads.differentiate(replace(problem, float32_results=wanted), tensors, HopperD192Config())
                    for wanted in (True, False))
    for one, other in zip(wide[1:], narrow[1:], strict=True):
        assert_rounds_to(one, other)


@pytest.mark.parametrize("dims", [(256, 256), (192, 192), (100, 250)])
def test_gradients_of_the_kernels_with_dq_apart_are_too(dims):
    problem, tensors = call_of(*MASKS["causal"], dims)
    wide, narrow = (bound_backward(replace(problem, float32_results=wanted), HopperD256Config())
                    for wanted in (True, False))
    for part, like in (("dq", tensors[:1]), ("dkdv", tensors[1:3])):
        written = [wide_heads.run_part(getattr(launch, part), tensors, [torch.empty_like(own, dtype=dtype)
                                                                        for own in like])
                   for launch, dtype in ((wide, torch.float32), (narrow, torch.float16))]
        for one, other in zip(*written, strict=True):
            assert_rounds_to(one, other)
