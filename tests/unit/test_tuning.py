"""Tile configs, heuristics and tables: pure functions, no device."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tilewise.errors import InvalidInput, UnsupportedProblem
from tilewise.functions import FunctionCode
from tilewise.kernels.hopper.backward.config import (
    D128Variant,
    HopperD128Config,
    HopperD192Config,
    HopperD256Config,
    HopperDbiasConfig,
)
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.kernels.triton.config import DbiasConfig, DkdvConfig, DqConfig, ForwardConfig
from tilewise.masks import Mask, causal, sink_tokens
from tilewise.problem import AttentionProblem
from tilewise.problem.options import FunctionSpec, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.tuning.device import DeviceSpec, device_spec
from tilewise.tuning.heuristics_hopper import backward_heuristic, forward_heuristic, hopper_dbias_config
from tilewise.tuning.heuristics_triton import (
    LEAST_WORK_FOR_DESCRIPTORS,
    dbias_launches,
    delta_config,
    entries_config,
    least_bytes,
    shared_bytes,
    single_tile_config,
    split_dkdv,
    tile_heuristic,
    wants_descriptors,
)
from tilewise.tuning.kinds import KINDS
from tilewise.tuning.problem_traits import has_pairs
from tilewise.tuning.select import triton_config
from tilewise.tuning.table import Bucket, load_rows, nearest_row, table_file

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100")


def problem_of(d=64, dv=None, dtype=torch.bfloat16, s=4096, b=1, mask=None):
    return AttentionProblem(b=b, hq=2, hk=2, sq=s, sk=s, d=d, dv=dv or d, dtype=dtype,
                            device=torch.device("cuda", 0), scale=1.0, mask=Mask() if mask is None else mask)


@pytest.mark.parametrize(("tile", "name"), [
    ((48, 64, 4, 2), "block_m=48"), ((64, 8, 4, 2), "block_n=8"), ((512, 64, 4, 2), "block_m=512"),
    ((64, 64, 3, 2), "num_warps=3"), ((64, 64, 4, 0), "num_stages=0"), ((64, 64, 4, 9), "num_stages=9"),
])
@pytest.mark.parametrize("kind", [ForwardConfig, DkdvConfig, DqConfig])
def test_illegal_tile_cannot_be_constructed(kind, tile, name):
    with pytest.raises(InvalidInput, match=name):
        kind(*tile)


@pytest.mark.parametrize(("settings", "message"), [
    ({"q_stages": 3}, "q_stages=3; allowed are 1, 2."), ({"stages": 5}, "stages=5; allowed are 2, 3, 4."),
])
def test_illegal_tiles_of_the_hopper_dbias_cannot_be_constructed(settings, message):
    with pytest.raises(InvalidInput, match=message):
        HopperDbiasConfig(**settings)


@pytest.mark.parametrize(("arch", "kernel"), list(product(ARCHS, KINDS)))
def test_every_heuristic_tile_fits_the_devices_shared_memory(arch, kernel):
    spec = DeviceSpec.of_arch(arch)
    for d, dtype, described in product((1, 40, 64, 96, 128, 192, 256), (torch.float16, torch.float32), (False, True)):
        problem = problem_of(d, dtype=dtype)
        config = tile_heuristic(kernel, problem, spec, descriptors=described)
        assert config.shared_bytes(problem) <= spec.shared_memory


@pytest.mark.parametrize(("arch", "kernel"), list(product(ARCHS, KINDS)))
def test_tiles_of_wide_heads_fit_wherever_the_least_ones_do(arch, kernel):
    spec = DeviceSpec.of_arch(arch)
    for d, dtype in product((257, 512, 513, 576), (torch.float16, torch.float32)):
        problem = problem_of(d, min(d, 512), dtype)
        if kernel != "forward":
            problem = problem.backward(lse_grad=False)
        if least_bytes(problem, spec) <= spec.shared_memory:
            config = tile_heuristic(kernel, problem, spec, descriptors=True)
            assert shared_bytes(config, problem, spec) <= spec.shared_memory
            assert not config.descriptors


def test_a_tail_takes_shared_memory_for_q_and_k_alone():
    for kind in KINDS.values():
        without, with_tail = (kind(32, 16, 4, 2).shared_bytes(problem_of(d, 512)) for d in (512, 576))
        rows = {DkdvConfig: 16 + 2 * 32, DbiasConfig: 32 + 16}.get(kind, 32 + 2 * 16)
        assert with_tail - without == rows * 64 * 2


def test_cdna_moves_wide_tiles_one_at_a_time_without_a_pipeline():
    spec, wide = DeviceSpec.of_arch("gfx942"), problem_of(576, 512)
    assert shared_bytes(DqConfig(32, 16, 4, 1), wide, spec) == 32 * 512 * 2
    for config, problem, arch in ((DqConfig(32, 16, 4, 2), wide, "gfx942"), (DqConfig(32, 16, 4, 1), wide, "gfx1100"),
                                  (DqConfig(32, 16, 4, 1), problem_of(256), "gfx942")):
        assert shared_bytes(config, problem, DeviceSpec.of_arch(arch)) == config.shared_bytes(problem)


def test_operands_take_shared_memory_and_shrink_the_tile():
    spec = DeviceSpec.of_arch("sm_90")
    plain = problem_of(256, mask=causal())
    facts = OperandSpec((1, 1, 4096, 4096), (0, 0, 4096, 1), torch.bfloat16)
    wanted = replace(plain, scores=ScoreOptions(bias=facts, mask=facts._replace(dtype=torch.bool), dropout_p=0.5))
    for kernel in KINDS:
        before, after = (tile_heuristic(kernel, problem, spec, descriptors=True) for problem in (plain, wanted))
        assert after.operand_bytes(plain) == 0
        assert after.operand_bytes(wanted) >= after.block_m * after.block_n * 3
        assert after.shared_bytes(wanted) <= spec.shared_memory
        assert before.shared_bytes(plain) <= spec.shared_memory


def test_a_functions_tensors_count_as_if_each_was_read_for_every_pair():
    code = FunctionCode("f", None, None, None, 2)
    plain = problem_of(256, mask=causal())
    for name in ("score_function", "mask_function"):
        wanted = replace(plain, scores=ScoreOptions(**{name: FunctionSpec(code, (torch.float32, torch.int8))}))
        config = tile_heuristic("forward", wanted, DeviceSpec.of_arch("sm_90"), descriptors=True)
        assert config.operand_bytes(wanted) >= config.block_m * config.block_n * 5
        assert has_pairs(wanted)
        assert not has_pairs(replace(plain, scores=ScoreOptions(**{name: FunctionSpec(code, ())})))


BIAS = OperandSpec((1, 2, 4096, 4096), (2 * 4096**2, 4096**2, 4096, 1), torch.bfloat16)


@pytest.mark.parametrize("options", [ScoreOptions(bias=BIAS), ScoreOptions(mask=BIAS._replace(dtype=torch.bool)),
                                     ScoreOptions(dropout_p=0.5)], ids=str)
def test_what_acts_on_each_pair_has_tiles_of_its_own_and_never_a_row_that_was_measured_without(options):
    spec = replace(DeviceSpec.of_arch("sm_90"), name="nvidia-h200")
    plain = problem_of(128, mask=causal())
    assert not has_pairs(plain)
    wanted = replace(plain, scores=options)
    assert has_pairs(wanted)
    assert triton_config("dq", plain, spec, descriptors=True) == DqConfig(128, 64, 8, 3)
    assert triton_config("dq", wanted, spec, descriptors=True) == DqConfig(64, 64, 4, 2, descriptors=True)
    assert triton_config("forward", wanted, spec, descriptors=False) == tile_heuristic("forward", wanted, spec,
                                                                                 descriptors=False)


@pytest.mark.parametrize(("d", "descriptors", "changes", "config"), [
    (128, True, {}, DbiasConfig(64, 64, 4, 1, True, 168)), (65, True, {}, DbiasConfig(64, 64, 4, 1, True, 168)),
    (128, False, {}, DbiasConfig(64, 64, 4, 1)), (64, True, {}, DbiasConfig(64, 64, 4, 1)),
    (256, True, {}, DbiasConfig(64, 128, 8, 1)),
    (128, True, {"sequences": Sequences(seqlens_k=OperandSpec((1,), (1,), torch.int32))},
     DbiasConfig(64, 64, 4, 1)),
], ids=str)
def test_gradient_of_a_bias_reads_through_descriptors_where_three_programs_then_share_a_multiprocessor(
        d, descriptors, changes, config):
    wanted = replace(problem_of(d), scores=ScoreOptions(bias=BIAS), **changes)
    assert tile_heuristic("dbias", wanted, DeviceSpec.of_arch("sm_90"), descriptors=descriptors) == config
    assert tile_heuristic("dbias", wanted, DeviceSpec.of_arch("sm_80"), descriptors=descriptors).registers == 0


def test_gradient_of_a_bias_takes_a_tile_of_each_operand_in_any_number_of_stages():
    problem = replace(problem_of(128), scores=ScoreOptions(bias=BIAS))
    for stages in (1, 2):
        assert DbiasConfig(64, 32, 4, stages).shared_bytes(problem) == 2 * (64 + 32) * 2 * 128 + 2 * 64 * 32


@pytest.mark.parametrize(("shape", "changes", "entries"), [
    ((1, 16, 4096, 4096), {}, 4), ((1, 16, 4096, 4096), {"b": 1}, 1), ((4, 16, 4096, 4096), {}, 1),
    ((1, 2, 4096, 4096), {"hq": 2}, 0), ((4, 2, 4096, 4096), {"hq": 2}, 1), ((4, 16, 1, 4096), {}, 0),
    ((4, 16, 4096, 1), {}, 0), ((1, 1, 4096, 4096), {}, 0), ((4, 1, 4096, 4096), {}, 0),
    ((1, 16, 4096, 4096), {"b": 1, "sequences": Sequences(packed=3, max_seqlen_q=4096, max_seqlen_k=4096)}, 0),
    ((3, 16, 4096, 4096), {"b": 1, "sequences": Sequences(packed=3, max_seqlen_q=4096, max_seqlen_k=4096)}, 1),
], ids=str)
def test_dq_makes_a_bias_gradient_that_nothing_or_the_batch_is_summed_for_if_its_launches_fill_a_device(
        shape, changes, entries):
    scores = ScoreOptions(bias=OperandSpec(shape, (1, 1, 1, 1), torch.bfloat16))
    problem = replace(problem_of(128, b=4), **{"hq": 16, "scores": scores} | changes)
    assert dbias_launches(problem, DqConfig(64, 64, 4, 2), DeviceSpec.of_arch("sm_90")) == entries
    assert dbias_launches(replace(problem, scores=ScoreOptions()), DqConfig(64, 64, 4, 2),
                        DeviceSpec.of_arch("sm_90")) == 0


@pytest.mark.parametrize(("d", "b", "arch", "changes", "entries"), [
    (128, 2, "sm_90", {}, 2), (128, 5, "sm_90", {}, 2), (96, 4, "sm_90", {}, 2), (64, 3, "sm_90", {}, 2),
    (64, 2, "sm_90", {}, 2), (256, 4, "sm_90", {}, None), (128, 1, "sm_90", {}, None),
    (128, 4, "sm_90", {"deterministic": True}, None), (128, 4, "sm_90", {"dtype": torch.float32}, None),
    (96, 4, "sm_90", {"k_strides": (96 * 4096, 96, 96, 1)}, 2), (40, 4, "sm_90", {"v_strides": (40, 40, 40, 1)}, None),
    (128, 4, "sm_80", {}, None), (128, 4, "sm_100", {}, None), (128, 4, "gfx942", {}, None),
], ids=str)
def test_dq_adds_up_two_batch_entries_where_registers_hold_them_but_none_of_a_deterministic_call(
        d, b, arch, changes, entries):
    scores = ScoreOptions(bias=OperandSpec((1, 16, 4096, 4096), (1, 1, 1, 1), torch.bfloat16))
    problem = replace(problem_of(d, b=b), **{"hq": 16, "scores": scores} | changes)
    config = entries_config(problem, DeviceSpec.of_arch(arch))
    assert (None if config is None else config.entries) == entries
    if config is not None:
        assert config.shared_bytes(problem) <= DeviceSpec.of_arch(arch).shared_memory


def test_entries_that_do_not_fit_shared_memory_together_are_taken_one_at_a_time():
    masks = {name: OperandSpec((1, 16, 4096, 4096), (1, 1, 1, 1), dtype)
             for name, dtype in (("bias", torch.float32), ("mask", torch.bool))}
    problem = replace(problem_of(128, b=2), scores=ScoreOptions(**masks))
    spec = DeviceSpec.of_arch("sm_90")
    config = entries_config(problem, spec)
    # q and dout, two stages of k and v; the bias once, the mask for each; half a step in float32.
    assert config.shared_bytes(problem) == 2 * (2 * 2 * 128 * (128 + 2 * 32)) + 128 * 32 * (4 + 2) + 128 * 16 * 4
    assert entries_config(problem, replace(spec, shared_memory=config.shared_bytes(problem) - 1)) is None


def shared_bias(b=4, own=(1, 16), s=4096, dtype=torch.bfloat16, d=128, strides=None):
    bias = OperandSpec((*own, s, s), strides or (own[1] * s * s, s * s, s, 1), dtype)
    return replace(problem_of(d, b=b, s=s), hq=16, hk=16, scores=ScoreOptions(bias=bias), direction="backward")


@pytest.mark.parametrize(("problem", "entries", "config"), [
    (shared_bias(), 4, (2, 2)), (shared_bias(b=2), 2, None), (shared_bias(b=3), 3, (2, 2)),
    (shared_bias(own=(4, 16)), 1, None), (shared_bias(own=(1, 1), b=1), 0, (2, 2)),
    (shared_bias(own=(1, 8), b=1), 0, (2, 2)), (shared_bias(own=(1, 1), s=1024), 0, None),  # 64 tiles
    (shared_bias(own=(1, 1), s=1100), 0, (2, 2)), (shared_bias(d=64), 4, (2, 4)),
    (shared_bias(d=64, dtype=torch.float32), 4, (2, 4)), (shared_bias(dtype=torch.float32), 4, (1, 3)),
    (shared_bias(d=64, b=2), 2, None),
    (shared_bias(own=(1, 16), s=1), 0, None), (replace(shared_bias(), scores=ScoreOptions()), 0, None),
])
def test_the_hopper_kernel_sums_a_bias_gradient_where_three_entries_share_it_or_triton_has_a_kernel_of_its_own(
        problem, entries, config):
    found = hopper_dbias_config(problem, entries)
    assert found == (config and HopperDbiasConfig(*config))
    if found is not None:
        assert found.shared_bytes(problem) <= DeviceSpec.of_arch("sm_90").shared_memory


def test_device_too_small_for_every_tile_is_refused_with_its_numbers():
    spec = DeviceSpec("small", "sm_75", 16 * 1024)
    with pytest.raises(UnsupportedProblem, match="no tile fits the 16384 bytes of shared memory of sm_75, the least"):
        tile_heuristic("dkdv", problem_of(256, dtype=torch.float32), spec, descriptors=False)


def test_descriptors_are_chosen_only_on_hopper_and_only_when_allowed():
    problem = problem_of(128)
    assert tile_heuristic("forward", problem, DeviceSpec.of_arch("sm_90"), descriptors=True).descriptors
    assert not tile_heuristic("forward", problem, DeviceSpec.of_arch("sm_90"), descriptors=False).descriptors
    assert not tile_heuristic("forward", problem, DeviceSpec.of_arch("sm_80"), descriptors=True).descriptors


def test_descriptors_are_not_wanted_where_the_kernel_is_short():
    hopper = DeviceSpec.of_arch("sm_90")
    short, long = problem_of(128, s=256), problem_of(128, s=16384)
    assert short.b * short.hq * 256 * 256 * 128 < LEAST_WORK_FOR_DESCRIPTORS
    assert not wants_descriptors(short, hopper)
    assert wants_descriptors(long, hopper)
    assert not wants_descriptors(long, DeviceSpec.of_arch("sm_80"))
    assert not wants_descriptors(problem_of(257, s=16384), hopper)


def test_neighbours_do_not_choose_the_tiles_of_a_deterministic_call():
    """By batch size, and where lengths are data by their sum or their longest, tiles changed, and a sequence's bits."""
    h200 = DeviceSpec.of_arch("sm_90", "nvidia-h200")
    lengths = OperandSpec((2,), (1,), torch.int32)
    layouts = {"padded": Sequences(seqlens_q=lengths), "packed": Sequences(1, lengths, lengths)}

    def tiles(kernel, problem):
        return triton_config(kernel, problem, h200, descriptors=wants_descriptors(problem, h200))

    for deterministic in (True, False):
        numbers = dict.fromkeys(("dense", *layouts), 0)
        for d, kernel in product((64, 128, 256), KINDS):
            plain = replace(problem_of(d, s=1024, b=2), deterministic=deterministic)
            numbers["dense"] += len({tiles(kernel, replace(plain, b=b)) for b in (1, 8, 512)}) - 1
            for name, sequences in layouts.items():
                numbers[name] += len({tiles(kernel, replace(plain, sq=s, sk=s, sequences=sequences))
                                      for s in (100, 1024, 30000)}) - 1
        assert all((number == 0) == deterministic for number in numbers.values()), numbers


def test_dk_and_dv_take_a_launch_each_only_for_wide_heads():
    hopper = DeviceSpec.of_arch("sm_90")
    assert split_dkdv(problem_of(256), hopper)
    assert split_dkdv(problem_of(64, dv=192), hopper)
    assert not split_dkdv(problem_of(128), hopper)


FEW_KEYS = replace(problem_of(), sq=250, sk=37)


def test_one_tile_holds_all_keys_where_they_and_the_blocks_of_queries_are_few():
    hopper = DeviceSpec.of_arch("sm_90")
    assert single_tile_config(FEW_KEYS, hopper) == DkdvConfig(64, 64, 8, 1)
    assert single_tile_config(replace(FEW_KEYS, d=80, sq=120, sk=3), hopper) == DkdvConfig(32, 16, 8, 1)
    assert single_tile_config(replace(FEW_KEYS, hq=4, sq=120), hopper) is not None
    assert single_tile_config(replace(FEW_KEYS, mask=causal("top_left")), hopper) is not None
    read = FunctionSpec(FunctionCode("reads", None, None, None, 8), (torch.float32,) * 8)
    reads_much = replace(FEW_KEYS, scores=ScoreOptions(score_function=read))
    assert single_tile_config(reads_much, DeviceSpec.of_arch("sm_75")) is None  # 64 KiB
    assert single_tile_config(reads_much, hopper) is not None
    assert single_tile_config(FEW_KEYS, DeviceSpec.of_arch("gfx942")) is None


@pytest.mark.parametrize("changed", [
    {"sk": 65}, {"sq": 257}, {"hq": 4}, {"d": 130}, {"dv": 130}, {"dtype": torch.float32},
    {"mask": causal("bottom_right")},  # the first queries see no key: nobody would store their dQ
    {"mask": causal("top_left") & sink_tokens(2)},
    {"sequences": Sequences(seqlens_k=OperandSpec((1,), (1,), torch.int32))},
    {"scores": ScoreOptions(documents_q=OperandSpec((1, 4, 250), (1000, 250, 1), torch.int32))},
    {"scores": ScoreOptions(tiles_q=OperandSpec((1, 1, 2, 3), (6, 6, 3, 1), torch.int32))},
], ids=lambda changed: next(iter(changed)))
def test_one_tile_of_keys_does_not_make_all_gradients_where(changed):
    assert single_tile_config(replace(FEW_KEYS, **changed), DeviceSpec.of_arch("sm_90")) is None


def test_delta_tile_holds_4096_elements_of_a_head():
    assert delta_config(problem_of(128)).block_m == 32
    assert delta_config(problem_of(256)).block_m == 16


def test_the_cpu_is_described_as_the_interpreter():
    assert device_spec(torch.device("cpu")).arch == "interpreter"
    assert DeviceSpec.of_arch("gfx942").shared_memory == 64 * 1024


def row(length, *, width=128, masked=False, descriptors=False, block_m=64):
    return {"width": width, "itemsize": 2, "masked": masked, "length": length, "block_m": block_m, "block_n": 64,
            "num_warps": 4, "num_stages": 2, "descriptors": descriptors}


def test_nearest_row_agrees_in_kind_and_is_nearest_in_logarithmic_length():
    rows = (row(512), row(8192), row(2048, masked=True), row(2048, width=64))
    assert Bucket.of(problem_of(128, s=2000)) == Bucket(128, 2, False, 2000)
    assert nearest_row(rows, Bucket(128, 2, False, 2049), descriptors=False) == row(8192)
    assert nearest_row(rows, Bucket(128, 2, True, 1), descriptors=False) == row(2048, masked=True)
    assert nearest_row(rows, Bucket(256, 2, False, 512), descriptors=False) is None


def test_a_head_with_a_tail_takes_no_row_of_one_without():
    wide, tailed = (Bucket.of(problem_of(d, 512, s=512)) for d in (512, 576))
    assert (wide.width, tailed.width) == (512, 576)
    assert nearest_row((row(512, width=512),), wide, descriptors=False) == row(512, width=512)
    assert nearest_row((row(512, width=512),), tailed, descriptors=False) is None


def test_row_with_descriptors_wins_at_its_length_if_it_may_serve():
    rows = (row(1024), row(1024, descriptors=True))
    bucket = Bucket(128, 2, False, 1024)
    assert nearest_row(rows, bucket, descriptors=True)["descriptors"]
    assert not nearest_row(rows, bucket, descriptors=False)["descriptors"]


def test_a_measured_tile_longer_than_those_of_a_list_serves_no_call_with_lists(monkeypatch):
    """Along a list of tiles of 128 a tile of 256 took keys for others': `tilewise tune` may find one fastest."""
    row = {"width": 64, "itemsize": 2, "masked": False, "length": 4096, "block_m": 128, "block_n": 256, "num_warps": 4,
           "num_stages": 2, "descriptors": False}
    monkeypatch.setattr("tilewise.tuning.table.load_rows", lambda *file: (row,))
    plain, spec = problem_of(), DeviceSpec.of_arch("sm_90")
    facts = OperandSpec((1, 1, 32, 34), (1088, 1088, 34, 1), torch.int32)
    listed = replace(plain, scores=ScoreOptions(tiles_q=facts, tiles_k=facts))
    assert triton_config("forward", plain, spec, descriptors=False) == ForwardConfig(128, 256, 4, 2)
    assert triton_config("forward", listed, spec, descriptors=False) == tile_heuristic(
        "forward", listed, spec, descriptors=False)


def test_device_without_a_table_takes_the_heuristic():
    spec = DeviceSpec.of_arch("sm_90", "no-such-device")
    problem = problem_of(128, mask=causal())
    assert load_rows(spec.name, table_file("forward", 2), "forward") == ()
    assert triton_config("forward", problem, spec, descriptors=False) == tile_heuristic(
        "forward", problem, spec, descriptors=False)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"block_n": 96}, "block_n=96; allowed are 64, 128."), ({"consumers": 4}, "consumers=4; allowed are 1, 2, 3."),
    ({"kv_stages": 3}, "kv_stages=3; allowed are 2, 4, 8."), ({"q_stages": 3}, "q_stages=3; allowed are 1, 2."),
    ({"epilogue_passes": 3}, "epilogue_passes=3; allowed are 1, 2."),
])
def test_illegal_hopper_tile_cannot_be_constructed(wrong, message):
    legal = {"block_n": 128, "consumers": 2, "kv_stages": 2, "q_stages": 2}
    HopperForwardConfig(**legal)
    with pytest.raises(InvalidInput) as caught:
        HopperForwardConfig(**(legal | wrong))
    assert str(caught.value) == message


def test_hopper_tiles_hold_queries_and_out_and_keys_and_values_of_every_stage():
    config = HopperForwardConfig(block_n=128, consumers=3, kv_stages=4, q_stages=1)
    queries, out, keys, values = 192, 192, 4 * 128, 4 * 128
    assert config.shared_bytes(problem_of(128)) == 2 * 128 * (queries + out + keys + values) + 3072
    # Narrow heads lie in rows of 128 bytes, which the copy engine swizzles.
    assert config.shared_bytes(problem_of(8)) == 2 * 64 * (queries + out + keys + values) + 3072


def test_hopper_tiles_of_wide_heads_are_in_chunks_and_v_has_its_own_width():
    config = HopperForwardConfig(block_n=64, consumers=2)
    for d, dv, chunks in ((256, 256, ((256,), (256,))), (192, 128, ((128, 64), (128,))),
                          (130, 72, ((128, 64), (64, 32))), (40, 193, ((64,), (256,))), (40, 96, ((64,), (64, 32))),
                          (97, 65, ((128,), (64, 32)))):
        assert config.head_dim_chunks(problem_of(d, dv)) == chunks
    assert config.shared_bytes(problem_of(192, 256)) == 2 * (2 * 128 * 192 + 128 * 256 + 2 * 64 * (192 + 256)) + 3072


def test_out_leaves_in_one_pass_or_in_two_through_buffers_64_columns_wide():
    one, two = (HopperForwardConfig(block_n=64, consumers=2, epilogue_passes=passes) for passes in (1, 2))
    for dv, at_once, after_another in ((128, (128, 1), (64, 1)), (256, (256, 1), (64, 2)), (192, (64, 3), (64, 1)),
                                       (96, (32, 3), (32, 1)), (64, (64, 1), (64, 1))):
        problem = problem_of(256, dv)
        assert (one.out_buffers(problem), two.out_buffers(problem)) == (at_once, after_another)
        columns, buffers = after_another
        spared = 2 * 128 * (sum(one.head_dim_chunks(problem)[1]) - columns * buffers)
        assert one.shared_bytes(problem) - two.shared_bytes(problem) == spared


@pytest.mark.parametrize("dv", [64, 96, 128, 192, 256])
def test_out_in_float32_takes_the_bytes_of_one_in_16_bits(dv):
    for passes in (1, 2):
        config, problem = HopperForwardConfig(block_n=64, consumers=2, epilogue_passes=passes), problem_of(256, dv)
        wide = replace(problem, float32_results=True)
        (columns, buffers), (half, same) = config.out_buffers(problem), config.out_buffers(wide)
        assert (2 * half, same) == (columns, buffers)
        assert config.shared_bytes(wide) == config.shared_bytes(problem)


@pytest.mark.parametrize(("d", "dv"), [(1, 1), (40, 64), (64, 64), (64, 65), (96, 40), (128, 8), (128, 128),
                                       *product((64, 96, 128, 192, 256), (192, 256)),
                                       *product((192, 256), (64, 96, 128))])
def test_every_hopper_tile_fits_the_devices_shared_memory(d, dv):
    for s, dtype in product((512, 4096), (torch.float16, torch.bfloat16)):
        problem = problem_of(d, dv, dtype, s)
        assert forward_heuristic(problem).shared_bytes(problem) <= DeviceSpec.of_arch("sm_90").shared_memory


@pytest.mark.parametrize(("d", "dv"), [(40, 64), (64, 72), (128, 128)])
def test_the_hopper_backward_adds_to_dq_in_order_where_that_is_asked_for_alone(d, dv):
    for deterministic in (False, True):
        problem = replace(problem_of(d, dv), deterministic=deterministic)
        config = backward_heuristic(problem)
        assert config.deterministic == deterministic
        assert config.shared_bytes(problem) <= DeviceSpec.of_arch("sm_90").shared_memory


@pytest.mark.parametrize(("d", "dv", "shared"), [
    (129, 8, False), (136, 72, False), (192, 128, False), (8, 129, True), (160, 160, True), (193, 128, True),
    (192, 192, True), (256, 256, True),
])
def test_two_warpgroups_share_the_keys_of_wide_heads_whose_sums_fit_no_registers(d, dv, shared):
    """And where the bits must be the same on every run, whatever fits: dQ has a kernel of its own then."""
    for deterministic in (False, True):
        problem = replace(problem_of(d, dv), deterministic=deterministic)
        config = backward_heuristic(problem)
        assert config == (HopperD256Config() if shared or deterministic else HopperD192Config())
        assert config.shared_bytes(problem) <= DeviceSpec.of_arch("sm_90").shared_memory


def test_of_the_two_kernels_of_wide_heads_the_one_that_takes_more_shared_memory_counts():
    """Beside keys q and dout are there twice, P once; beside queries 128 rows of them, k twice and v once."""
    wide = HopperD256Config()
    assert wide.shared_bytes(problem_of(256, 256)) == 64 * 2 * (4 + 3) * 256 + 1024
    assert wide.shared_bytes(problem_of(64, 256)) == 64 * 2 * 3 * (64 + 256) + 64 * 64 * 4 + 2 * 8 * 64 + 1024


def test_staged_dq_takes_shared_memory_for_one_step_and_in_order_for_two():
    step = 4 * 64 * 128
    direct, staged, deterministic = (HopperD128Config(variant=variant).shared_bytes(problem_of(128))
                                     for variant in D128Variant)
    assert (staged - direct, deterministic - direct) == (step, 2 * step)
