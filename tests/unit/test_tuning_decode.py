"""Decoding: the tile and the splits that heuristics choose."""

from dataclasses import replace

import pytest
import torch

from tilewise import window
from tilewise.kernels.triton.config import DecodeConfig, Splits
from tilewise.problem.decode import CacheOperands, DecodeOptions, decode_problem, specs_of_inputs, specs_of_present
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics_decode import FIXED_SPLIT, RESIDENT, choose_splits, decode_config

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "interpreter")


def problem_of(b=1, sq=1, hq=32, hk=8, kv=8192, d=128, dtype=torch.bfloat16, **options):
    q, cache = (torch.empty(size, dtype=dtype, device="meta") for size in ((b, hq, sq, d), (b, hk, kv, d)))
    return decode_problem(specs_of_inputs(q, cache, cache), specs_of_present(CacheOperands()), DecodeOptions(**options))


def splits_of(problem, num_sms=132):
    return choose_splits(problem, decode_config(problem, DeviceSpec.of_arch("sm_90")), num_sms)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "interpreter"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [40, 64, 128, 256])
@pytest.mark.parametrize("sq", [1, 8, 300])
def test_tiles_fit_shared_memory_and_those_of_few_queries_fit_it_twice(arch, dtype, d, sq):
    spec = DeviceSpec.of_arch(arch)
    config = decode_config(problem_of(sq=sq, d=d, dtype=dtype), spec)
    needed = config.shared_bytes(problem_of(d=d).width, dtype.itemsize)
    assert needed <= spec.shared_memory
    if sq == 1 and arch in ("sm_80", "sm_90", "sm_100") and d * dtype.itemsize <= 512:
        assert RESIDENT * needed <= spec.shared_memory


@pytest.mark.parametrize(("sq", "hq", "rows"), [(1, 8, 16), (1, 32, 16), (1, 256, 32), (5, 32, 32), (1000, 32, 64)])
def test_a_tile_holds_the_queries_of_a_group(sq, hq, rows):
    problem = problem_of(sq=sq, hq=hq)
    config = decode_config(problem, DeviceSpec.of_arch("sm_90"))
    assert config.block_m == rows
    assert config.row_tiles(problem) == -(-sq * hq // 8 // rows)


def test_the_tile_of_hopper_is_64_keys_in_four_stages():
    assert decode_config(problem_of(), DeviceSpec.of_arch("sm_90")) == DecodeConfig(16, 64, 4, 4, overlapped=True)
    assert not decode_config(problem_of(), DeviceSpec.of_arch("sm_80")).overlapped


@pytest.mark.parametrize(("b", "kv", "count"), [(1, 8192, 16), (4, 8192, 4), (16, 65536, 1), (32, 8192, 1),
                                                (128, 8192, 1), (1, 64, 1), (1, 640, 10)])
def test_splits_fill_the_device_and_no_more(b, kv, count):
    assert splits_of(problem_of(b=b, kv=kv)) == Splits(count)


@pytest.mark.parametrize(("page", "count"), [(16, 8), (63, 8), (64, 4), (256, 4)])
def test_keys_in_pages_smaller_than_a_step_are_split_twice_as_often(page, count):
    """Threads look pages up before they load: two programs a multiprocessor wait for it in turn."""
    assert splits_of(replace(problem_of(b=4), page=page)) == Splits(count)


def test_a_window_is_split_for_what_it_sees():
    assert splits_of(problem_of(mask=window(127, 0))).count <= 4
    assert splits_of(problem_of(mask=window(None, 0))) == splits_of(problem_of())


def test_the_callers_number_of_splits_is_taken():
    assert splits_of(problem_of(num_splits=7)) == Splits(7)
    assert splits_of(problem_of(num_splits=7, deterministic=True)) == Splits(7)


@pytest.mark.parametrize("b", [1, 64])
def test_a_deterministic_split_has_a_fixed_length(b):
    assert splits_of(problem_of(b=b, deterministic=True)) == Splits(8192 // FIXED_SPLIT, FIXED_SPLIT)
    assert splits_of(problem_of(b=b, kv=0, deterministic=True)) == Splits(1, FIXED_SPLIT)
