"""Configs of the Hopper backward kernels: each takes the problems and the values that its kernel has, no others."""

import re
from dataclasses import fields

import pytest
import torch

from tilewise.errors import InvalidInput
from tilewise.kernels.hopper import SHARED_MEMORY
from tilewise.kernels.hopper.backward.config import (
    BACKWARD_CONFIGS,
    BackwardKernel,
    D64Variant,
    D128AugmentedKVariant,
    D128Variant,
    HopperD64Config,
    HopperD128AugmentedKConfig,
    HopperD128Config,
    HopperD192Config,
    HopperD256Config,
)
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning.device import DeviceSpec

ALL_VARIANTS = [*(HopperD64Config(variant=variant) for variant in D64Variant),
                *(HopperD128AugmentedKConfig(variant=variant) for variant in D128AugmentedKVariant),
                *(HopperD128Config(variant=variant) for variant in D128Variant), HopperD192Config(), HopperD256Config()]


def problem_of(d, dv=None, **others):
    problem = AttentionProblem(b=1, hq=2, hk=2, sq=512, sk=512, d=d, dv=dv or d, dtype=torch.bfloat16, scale=1.0,
                               device=torch.device("cuda", 0), mask=Mask(), **others)
    return problem.backward(lse_grad=False)


def test_every_kernel_has_one_config():
    assert list(BACKWARD_CONFIGS) == list(BackwardKernel)
    assert [kind.kernel for kind in BACKWARD_CONFIGS.values()] == list(BackwardKernel)
    assert len(set(ALL_VARIANTS)) == len(ALL_VARIANTS)


@pytest.mark.parametrize("config", ALL_VARIANTS, ids=str)
def test_a_variant_is_one_way_to_accumulate_dq_and_one_to_assign_tiles(config):
    assert config.dq_from_registers + config.deterministic <= 1
    assert config.dynamic_tiles + config.head_persistent <= 1
    assert not (config.dq_from_registers and (config.dynamic_tiles or config.head_persistent))
    assert config.augmented_k == (config.kernel in (BackwardKernel.D64, BackwardKernel.D128_AUGMENTED_K))


@pytest.mark.parametrize(("kind", "settings", "message"), [
    *((kind, {"q_stages": 3}, "q_stages=3; allowed are 2, 4.") for kind in BACKWARD_CONFIGS.values()),
    *((kind, {"dout_stages": 3}, "dout_stages=3; allowed are 1, 2, 4.") for kind in BACKWARD_CONFIGS.values()
      if kind is not HopperD64Config),
    (HopperD64Config, {"dout_stages": 1}, "dout_stages=1; allowed are 2, 4."),
    (HopperD64Config, {"variant": "dq_staged"},
     "variant=dq_staged; allowed are dynamic_tiles, deterministic, head_persistent."),
    (HopperD64Config, {"variant": D64Variant.HEAD_PERSISTENT, "ctas_per_head": 5},
     "ctas_per_head=5; allowed are 1, 2, 4."),
    *((HopperD64Config, {"variant": variant, "ctas_per_head": 2},
       f"ctas_per_head=2 with variant={variant}; allowed is 1, or variant=head_persistent.")
      for variant in ("dynamic_tiles", "deterministic")),
    (HopperD128AugmentedKConfig, {"variant": D128Variant.DETERMINISTIC},
     "variant=deterministic; allowed are dynamic_tiles, head_persistent."),
    (HopperD128AugmentedKConfig, {"variant": D128Variant.DQ_STAGED},
     "variant=dq_staged; allowed are dynamic_tiles, head_persistent."),
    (HopperD64Config, {"variant": "one_tile"},
     "variant=one_tile; allowed are dynamic_tiles, deterministic, head_persistent."),
    (HopperD128Config, {"variant": D128AugmentedKVariant.DYNAMIC_TILES},
     "variant=dynamic_tiles; allowed are dq_from_registers, dq_staged, deterministic."),
    (HopperD128Config, {"s_ahead": 2}, "s_ahead=2; allowed are False, True."),
])
def test_a_value_that_the_kernel_does_not_have_is_refused(kind, settings, message):
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        kind(**settings)


def test_settings_of_other_kernels_do_not_exist():
    own = {kind.kernel: [field.name for field in fields(kind)] for kind in BACKWARD_CONFIGS.values()}
    stages = ["q_stages", "dout_stages"]
    assert own == {"d64": [*stages, "variant", "ctas_per_head"], "d128_augmented_k": [*stages, "variant"],
                   "d128": [*stages, "s_ahead", "variant"], "d192": stages, "d256": stages}


@pytest.mark.parametrize(("config", "d", "dv", "columns"), [
    (HopperD64Config(), 8, 64, ((64,), (64,))), (HopperD128AugmentedKConfig(), 40, 65, ((128,), (128,))),
    (HopperD128AugmentedKConfig(), 128, 128, ((128,), (128,))), (HopperD128Config(), 40, 64, ((64,), (64,))),
    (HopperD128Config(), 96, 40, ((128,), (128,))), (HopperD192Config(), 129, 8, ((128, 64), (128,))),
    (HopperD192Config(), 192, 128, ((128, 64), (128,))), (HopperD256Config(), 40, 136, ((64,), (128, 64))),
    (HopperD256Config(), 128, 256, ((128,), (256,)))], ids=str)
def test_tiles_have_the_columns_of_the_kernels_head_dim(config, d, dv, columns):
    assert config.columns(problem_of(d, dv)) == columns


@pytest.mark.parametrize(("config", "d", "dv", "allowed"), [
    (HopperD64Config(), 65, 64, "head dims up to 64, a scale of"), (HopperD64Config(), 64, 65, "head dims up to 64, a"),
    (HopperD128AugmentedKConfig(), 64, 64, "head dims of 65 to 128, a scale of"),
    (HopperD128AugmentedKConfig(), 136, 128, "head dims of 65 to 128, a scale of"),
    (HopperD128Config(), 136, 128, "head dims up to 128."), (HopperD128Config(), 64, 136, "head dims up to 128."),
    *((HopperD192Config(), d, dv, "head dims of 129 to 192 of q and k, and up to 128 of v.")
      for d, dv in ((128, 128), (200, 128), (192, 136), (64, 136), (256, 256)))], ids=str)
def test_head_dims_of_another_kernel_are_refused(config, d, dv, allowed):
    for ask in (config.columns, config.shared_bytes):
        with pytest.raises(InvalidInput, match=f"^kernel={config.kernel} for .*; allowed are {re.escape(allowed)}"):
            ask(problem_of(d, dv))


def bias_of(dtype=torch.bfloat16):
    return ScoreOptions(bias=OperandSpec((1, 2, 512, 512), (2**19, 2**18, 512, 1), dtype))


@pytest.mark.parametrize(("config", "d", "dtype", "stages"), [
    (HopperD64Config(), 64, torch.bfloat16, 2), (HopperD64Config(), 64, torch.float32, 1),
    (HopperD64Config(variant=D64Variant.DETERMINISTIC), 64, torch.bfloat16, 2),
    (HopperD64Config(variant=D64Variant.DETERMINISTIC), 64, torch.float32, 1),
    (HopperD64Config(variant=D64Variant.HEAD_PERSISTENT), 64, torch.bfloat16, 1),
    (HopperD64Config(variant=D64Variant.HEAD_PERSISTENT), 64, torch.float32, None),
    (HopperD64Config(variant=D64Variant.HEAD_PERSISTENT, ctas_per_head=2), 64, torch.bfloat16, None),
    *((HopperD128AugmentedKConfig(variant=variant), 128, torch.bfloat16, 1) for variant in D128AugmentedKVariant),
    (HopperD128AugmentedKConfig(), 128, torch.float32, None), (HopperD128Config(), 128, torch.bfloat16, 2),
    (HopperD128Config(), 128, torch.float32, 1), (HopperD128Config(), 64, torch.float32, 2),
    (HopperD128Config(variant=D128Variant.DETERMINISTIC), 64, torch.bfloat16, 2),
    (HopperD128Config(variant=D128Variant.DETERMINISTIC), 128, torch.bfloat16, None)], ids=str)
def test_a_bias_has_two_tiles_in_flight_or_one_or_the_config_does_not_fit(config, d, dtype, stages):
    """A tile is 64 queries by the 128 keys of a tile of keys."""
    plain, problem = problem_of(d), problem_of(d, scores=bias_of(dtype))
    assert config.fits(plain)
    assert config.bias_stages(plain) == 0
    assert config.fits(problem) == (stages is not None)
    assert config.bias_stages(problem) == (stages or 1)
    assert config.shared_bytes(problem) - config.shared_bytes(plain) == (stages or 1) * 64 * 128 * dtype.itemsize


def test_a_cta_may_have_as_much_shared_memory_as_hopper_has():
    assert DeviceSpec.of_arch("sm_90").shared_memory == SHARED_MEMORY


@pytest.mark.parametrize(("config", "d", "dv"), [(HopperD192Config(), 192, 128), (HopperD256Config(), 256, 256)],
                         ids=str)
def test_kernels_of_wide_heads_take_no_bias(config, d, dv):
    with pytest.raises(InvalidInput, match=r"allowed are calls without a bias\.$"):
        config.columns(problem_of(d, dv, scores=bias_of()))


def test_a_bias_is_for_lengths_that_are_known():
    lengths = Sequences(seqlens_k=OperandSpec((1,), (1,), torch.int32))
    with pytest.raises(InvalidInput, match=r"allowed are a bias where lengths are no data\.$"):
        HopperD128Config().columns(problem_of(64, scores=bias_of(), sequences=lengths))


@pytest.mark.parametrize(("config", "more"), [
    (HopperD64Config(variant=D64Variant.DYNAMIC_TILES), 2 * 128 * 64 * 2),
    (HopperD64Config(variant=D64Variant.DETERMINISTIC), 64 * 64 * 4),
    (HopperD64Config(variant=D64Variant.HEAD_PERSISTENT), 2 * 128 * 64 * 2 + 64 * 64 * 2),
    (HopperD64Config(variant=D64Variant.HEAD_PERSISTENT, ctas_per_head=2), 2 * 128 * 64 * 2 + 64 * 64 * (2 + 4))],
    ids=str)
def test_shared_memory_of_narrow_heads_holds_keys_under_way_and_dq_on_its_way(config, more):
    keys, queries, dscores, columns = 2 * 128 * 64 * 2, 2 * 4 * 64 * 64 * 2, 4 * 64 * 64 * 2, 64 * (64 + 32 * 4)
    assert config.shared_bytes(problem_of(64)) == keys + queries + dscores + columns + 64 * 64 * 4 + 1024 + more
