"""The CUDA kernels compute attention: the whole source, run by a CPU, against the oracle."""

from dataclasses import replace

import pytest
import torch

from conformance import extremes
from conformance.calls import (
    assert_forward_within_budget,
    assert_gradients_within_budget,
    operands_of,
    problem_of,
)
from emulation import cuda_on_cpu
from tilewise.backends import cuda, cuda_ieee
from tilewise.backends._support import float32
from tilewise.backends.base import Gradients, Needs, Results, Saved
from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPERANDS, Operands
from tilewise.support.caches import clear_caches
from tilewise.testing import oracle
from tilewise.testing.cases import CASES, Case, case_named
from tilewise.testing.inputs import make_inputs
from tilewise.tuning import select
from tilewise.tuning.device import DeviceSpec

pytestmark = pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="there is no C++ compiler to run the kernels with")
PLAIN = ("out", "lse", "dq", "dk", "dv")
BACKENDS = {"cuda": cuda.backend, "cuda_ieee": cuda_ieee.backend}


def is_taken(case):
    return float32._wrong_problem(problem_of(case, make_inputs(case, torch.float32, "cpu"))) is None


TAKEN = [case for case in CASES if is_taken(case)]
# The kernels of both are one source: beside what each has of its own, cases take turns.
BOTH = {"mha", "gqa_causal_odd_lengths", "padded", "value_dim_odd", "head_dim_128", "head_dim_256"}
TURNS = [(case, name) for i, case in enumerate(TAKEN) for j, name in enumerate(BACKENDS)
         if i % len(BACKENDS) == j or case.name in BOTH]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(float32, "load", cuda_on_cpu.load)
    monkeypatch.setattr(float32, "device_spec", lambda device: DeviceSpec.of_arch("sm_90"))
    clear_caches()


@pytest.mark.parametrize(("case", "name"), TURNS, ids=[f"{case}-{name}" for case, name in TURNS])
def test_results_stay_within_error_budget(case, name):
    backend = BACKENDS[name]
    inputs = make_inputs(case, torch.float32, "cpu")
    q, k, v, dout, dlse = inputs
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands)
    result = backend.forward(problem, q, k, v, operands)
    assert_forward_within_budget(case, inputs, Results(result.out, result.lse))
    got = backend.backward(problem.backward(lse_grad=True), Saved(q, k, v, *result[:2], operands), dout, dlse, Needs())
    assert_gradients_within_budget(case, inputs, Gradients(*got), "out_and_lse")


@pytest.mark.parametrize("name", ["gqa_causal_odd_lengths", "window_bottom_right_blind_queries", "padded",
                                  "value_dim_odd"])
@pytest.mark.parametrize("backend", [cuda.backend, cuda_ieee.backend], ids=lambda backend: backend.name)
def test_deterministic_gradients_have_kernels_of_their_own_and_stay_within_error_budget(backend, name):
    case = case_named(name)
    inputs = make_inputs(case, torch.float32, "cpu")
    q, k, v, dout, dlse = inputs
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands, deterministic=True)
    result = backend.forward(problem, q, k, v, operands)
    got = backend.backward(problem.backward(lse_grad=True), Saved(q, k, v, *result[:2], operands), dout, dlse, Needs())
    assert_gradients_within_budget(case, inputs, Gradients(*got), "out_and_lse")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["gqa_causal_odd_lengths", "padded", "value_dim_odd", "head_dim_128"])
def test_rows_split_once_a_call_are_as_every_program_splits_them(name, deterministic, monkeypatch):
    case = case_named(name)
    inputs = make_inputs(case, torch.float32, "cpu")
    q, k, v, dout, dlse = inputs
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands, deterministic=deterministic)
    found = []
    for split in (False, True):
        monkeypatch.setattr(float32, "cuda_config", lambda *asked, split=split: replace(select.cuda_config(*asked),
                                                                                       split=split))
        clear_caches()
        out, lse, _ = cuda.backend.forward(problem, q, k, v, operands)
        made = cuda.backend.backward(problem.backward(lse_grad=True), Saved(q, k, v, out, lse, operands), dout, dlse,
                                     Needs())
        found.append((out, lse, *made[:3]))
    clear_caches()
    for name, one, other in zip(PLAIN, *found, strict=True):
        assert torch.equal(one, other), name


def test_keys_that_no_query_sees_may_hold_anything_beside_keys_that_are_seen():
    """dq is a sum over the keys of a program, in blocks of 16: 0 times NaN was in it."""
    q, k, v, dout = (random(1, 1, 20 + i, 64) for i in (0, 9, 9, 0))
    k[:, :, 20:] = v[:, :, 20:] = float("nan")
    got = results(cuda.backend, q, k, v, dout, causal("top_left"))
    assert all(tensor.isfinite().all() for tensor in got.values())
    assert (got["dk"][:, :, 20:] == 0).all()


@pytest.mark.parametrize("mask", [causal("top_left"), Mask(), window(70, 3, "top_left")], ids=str)
@pytest.mark.parametrize("keys", [256, 203])
def test_whole_tiles_that_land_and_a_last_one_that_is_copied_are_as_tiles_that_every_program_splits(mask, keys,
                                                                                                     monkeypatch):
    q, k, v = random(1, 1, 150, 128), random(1, 1, keys, 128), random(1, 1, keys + 1, 128)[:, :, :keys]
    problem = AttentionProblem.from_tensors(q, k, v, mask=mask)
    found = []
    for split in (False, True):
        monkeypatch.setattr(float32, "cuda_config", lambda *asked, split=split: replace(select.cuda_config(*asked),
                                                                                       split=split))
        clear_caches()
        found.append(cuda.backend.forward(problem, q, k, v))
    clear_caches()
    assert torch.equal(found[0].out, found[1].out)
    assert torch.equal(found[0].lse, found[1].lse)
    assert found[0].out.isfinite().all()


@pytest.mark.parametrize(("mask", "d", "dv"), [
    (causal("bottom_right"), 128, 128), (causal("top_left"), 64, 64), (Mask(), 96, 32), (Mask(), 18, 100),
    (window(None, 5, "top_left"), 64, 128), (window(70, 3, "top_left"), 64, 64)], ids=str)
@pytest.mark.parametrize("lengths", [False, True])
def test_chunks_of_keys_written_transposed_are_as_chunks_that_every_program_transposes(mask, d, dv, lengths,
                                                                                        monkeypatch):
    """With 2 heads to a head of keys, and NaN in keys that nobody sees; windows bounded at the left are as before."""
    q, k, v = random(2, 4, 200, d), random(2, 2, 299, d), random(2, 2, 299, dv)
    operands, seen = NO_OPERANDS, [200, 200] if mask.right == 0 and mask.alignment == "top_left" else [299, 299]
    if lengths:
        operands = Operands(seqlens_q=torch.tensor([131, 200]), seqlens_k=torch.tensor([260, 3]))
        seen = [131 if seen[0] == 200 else 260, 3]
    for entry, stop in enumerate(seen):
        k[entry, :, stop:] = v[entry, :, stop:] = float("nan")
    problem = AttentionProblem.from_tensors(q, k, v, operands, mask=mask)
    chosen, found = [], []
    for split in (False, True):
        def config(*asked, split=split):
            chosen.append(select.cuda_config(*asked))
            return replace(chosen[-1], split=split and chosen[-1].split)

        monkeypatch.setattr(float32, "cuda_config", config)
        clear_caches()
        found.append(cuda_ieee.backend.forward(problem, q, k, v, operands))
    clear_caches()
    assert [config.split for config in chosen] == [mask.left is None] * 2
    assert torch.equal(found[0].out, found[1].out)
    assert torch.equal(found[0].lse, found[1].lse)
    assert found[1].out.isfinite().all()


def test_values_of_the_half_of_a_step_that_no_query_of_a_warp_sees_are_not_multiplied():
    q, k, v = (random(1, 1, 128 + i, 128)[:, :, :128] for i in range(3))
    v[:, :, 64:] = float("nan")
    problem = AttentionProblem.from_tensors(q, k, v, mask=causal())
    out, lse, _ = cuda_ieee.backend.forward(problem, q, k, v)
    assert out[:, :, :64].isfinite().all()
    assert lse.isfinite().all()
    assert out[:, :, 64:].isnan().all()


def results(backend, q, k, v, dout, mask=None, scale=None):
    problem = AttentionProblem.from_tensors(q, k, v, mask=Mask() if mask is None else mask, scale=scale)
    out, lse, _ = backend.forward(problem, q, k, v)
    made = backend.backward(problem.backward(lse_grad=False), Saved(q, k, v, out, lse), dout, None, Needs())
    return dict(zip(PLAIN, (out, lse, *made[:3]), strict=True))


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def relative_errors(got, exact):
    return {name: ((got[name].double() - exact[name]).norm() / exact[name].norm()).item() for name in PLAIN}


def test_three_products_of_halves_err_at_most_twice_as_much_as_float32_ones_and_one_errs_as_tf32_does(monkeypatch):
    """The tensor core cuts sums toward zero here at every addition: the worst that is known of one."""
    q, k, v, dout = (random(1, 2, 150 + i, 64)[:, :, :150] for i in range(4))
    exact = oracle.attend(q, k, v, Mask(), None)
    exact = dict(zip(PLAIN, (*exact[:2], *oracle.gradients(q, k, v, dout, None, Mask(), None)[:3]), strict=True))
    three, ieee = (relative_errors(results(backend, q, k, v, dout), exact) for backend in BACKENDS.values())
    assert all(error < 1e-6 for error in three.values()), three
    assert all(three[name] < 2 * ieee[name] for name in PLAIN), (three, ieee)
    monkeypatch.setattr(float32.Float32Backend, "products", 1)
    one = relative_errors(results(cuda.backend, q, k, v, dout), exact)
    assert all(1e-5 < one[name] < 2e-3 for name in ("out", "dq", "dk", "dv")), one


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize(("keys", "d"), [(4096, 64), (512, 256)])
def test_long_sums_err_no_more_than_short_ones(backend, keys, d):
    """Keys summed one after another erred by 1.2e-6, and so did 256 dims that a tensor core cut 32 times; sums of a
    tile's keys and of a chunk of dims err by 5e-7.
    """
    q, (k, v) = random(1, 1, 32, d), (random(1, 1, keys + i, d)[:, :, :keys] for i in range(2))
    out = backend.forward(AttentionProblem.from_tensors(q, k, v), q, k, v).out
    exact = oracle.attend(q, k, v, Mask(), None)[0]
    assert ((out - exact).norm() / exact.norm()).item() < 8e-7


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("sk", [100, 129])
def test_rows_past_the_last_key_reach_no_gradient_where_every_score_is_far_below_zero(backend, sk):
    """Their score is 0, so their probability e^100, or infinite, and dq sums over whole tiles of keys."""
    case = Case("shifted", hq=2, hk=1, sq=65, sk=sk, d=16, dv=16, scale=1.0)
    inputs = make_inputs(case, torch.float32, "cpu")
    q, k, v, dout, _ = inputs
    q[..., 0], k[..., 0] = 1.0, -100.0
    problem = problem_of(case, inputs)
    out, lse, _ = backend.forward(problem, q, k, v)
    assert (lse < -80).all()
    got = backend.backward(problem.backward(lse_grad=False), Saved(q, k, v, out, lse, NO_OPERANDS), dout, None, Needs())
    assert_gradients_within_budget(case, inputs, Gradients(*got))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_the_least_scale_averages_what_is_seen(backend):
    q, v = random(1, 2, 40, 16), random(1, 2, 40, 16)
    problem = AttentionProblem.from_tensors(q, q, v, mask=causal(), scale=2.0**-126)
    out, lse, _ = backend.forward(problem, q, q, v)
    seen = torch.arange(1.0, 41)
    torch.testing.assert_close(out, v.cumsum(2) / seen[:, None], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, seen.log().expand(1, 2, 40), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("size", [1e4, 1.2e4, 1e5, 1e9])
def test_a_row_s_largest_score_has_probability_1_however_large_it_is(backend, size):
    """The largest score was multiplied with one rounding, and what was taken from it with two: what was left, 2^8 in
    scores of 10^8, took probabilities to infinity, and to 0 where the difference fell the other way.
    """
    q, v = torch.zeros(1, 1, 24, 64), random(1, 1, 24, 64)
    q[..., 0] = size * (1 + torch.arange(24.0) / 24)
    problem = AttentionProblem.from_tensors(q, q, v, scale=1.0)
    out, lse, _ = backend.forward(problem, q, q, v)
    torch.testing.assert_close(out, v[:, :, 23:].expand_as(v), atol=0, rtol=1e-6)
    torch.testing.assert_close(lse, q[..., 0] * q[0, 0, 23, 0], atol=0, rtol=2.0**-22)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("size", [14.0, 30.0, 122.0])
def test_a_query_that_sees_one_key_copies_its_row_however_large_the_score_is(backend, size):
    """Scores of 196 to 14884 beside their negatives; a probability of 1 but for what its shift was rounded by, times
    a row, over that probability again, was two units in the last place from the row.
    """
    q = torch.full((1, 1, 24, 64), size / 8) * torch.where(torch.arange(24) % 2 == 0, 1.0, -1.0)[:, None]
    k, v = random(1, 1, 33, 64) - 1e-3 * size, random(1, 1, 33, 64).bfloat16().float()
    k[..., :12, :], k[0, 0, 5], k[0, 0, 6] = 0.0, size / 8, -size / 8
    out = backend.forward(AttentionProblem.from_tensors(q, k, v, scale=1.0), q, k, v).out
    torch.testing.assert_close(out, v[:, :, [5, 6]].repeat(1, 1, 12, 1), atol=0, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_a_small_probability_beside_a_large_score_has_all_its_bits(backend):
    """Scores 64 000 000 and 8 less, both exact in float32; the first key has no v."""
    q, k, v = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 2, 64), random(1, 1, 2, 64)
    q[..., :2], k[..., 0], k[0, 0, 1, 1], v[:, :, 0] = torch.tensor([8000.0, 1.0]), 8000.0, -8.0, 0.0
    out = backend.forward(AttentionProblem.from_tensors(q, k, v, scale=1.0), q, k, v).out
    expected = v[:, :, 1:].double() * torch.sigmoid(torch.tensor(-8.0, dtype=torch.float64))
    torch.testing.assert_close(out.double(), expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_random_scores_of_great_size_pick_each_query_s_best_key(backend):
    q, k, v = random(1, 1, 64, 64) * 1e4, random(1, 1, 65, 64)[:, :, :64] * 1e4, random(1, 1, 66, 64)[:, :, :64]
    problem = AttentionProblem.from_tensors(q, k, v, scale=1.0)
    out, lse, _ = backend.forward(problem, q, k, v)
    exact, exact_lse = oracle.attend(q, k, v, Mask(), 1.0)
    torch.testing.assert_close(out.double(), exact, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, atol=0, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("name", extremes.EXTREMES)
def test_finite_inputs_give_what_float64_rounded_says(backend, name):
    """Gradients were NaN from inputs of 133120 on: P was infinite where lse's rounding alone made it so."""
    given = extremes.inputs_of(name, torch.float32, "cpu")
    extremes.assert_as_float64(given, results(backend, *given[:4], scale=extremes.SCALE))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("rows", extremes.HARD_ROWS)
@pytest.mark.parametrize("d", [64, 128])
def test_hard_rows_err_at_most_three_times_as_much_as_dense_float32(backend, d, rows):
    """dv erred 4.6 and 3.5 times as much: P was made of scores that were rounded otherwise than their lse."""
    extremes.assert_errors_at_most_three_times_dense(
        lambda *tensors: results(backend, *tensors, scale=extremes.SCALE), rows, d, 96, "cpu", 6)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_nan_stays_with_the_rows_that_see_it(backend):
    q, k, v, dout = (random(1, 1, 40 + i, 32)[:, :, :40] for i in range(4))
    q[0, 0, 3], k[0, 0, 30, 0] = float("nan"), float("nan")
    got = results(backend, q, k, v, dout, causal())
    rows = torch.zeros(40, dtype=torch.bool)
    rows[3] = rows[30:] = True
    for name in ("out", "lse"):
        assert got[name][0, 0, rows].isnan().all(), name
        assert got[name][0, 0, ~rows].isfinite().all(), name


@pytest.mark.parametrize(("infinite", "name", "first", "stop"), [
    ("k", "out", 70, 79), ("k", "lse", 70, 79), ("k", "dq", 64, 80), ("k", "dk", 62, 79), ("k", "dv", 62, 79),
    ("v", "out", 64, 80), ("v", "lse", 0, 0), ("v", "dq", 64, 80), ("v", "dk", 56, 80), ("v", "dv", 0, 0)])
def test_infinity_in_a_row_of_k_or_v_is_nan_for_those_that_see_it_or_share_its_tile(infinite, name, first, stop):
    """Key 70 is seen by queries 70 to 78, and shares its tile with 64 to 69 and 79, which see keys 56 and further; 78
    sees no key before 70, 70 none before 62. Other rows keep every bit.
    """
    q, k, v, dout = (random(1, 1, 80 + i, 32)[:, :, :80] for i in range(4))
    before = results(cuda.backend, q, k, v, dout, window(8, 0))[name]
    {"k": k, "v": v}[infinite][0, 0, 70, 5] = float("inf")
    after = results(cuda.backend, q, k, v, dout, window(8, 0))[name]
    assert after[:, :, first:stop].isnan().all()
    assert torch.equal(after[:, :, :first], before[:, :, :first])
    assert torch.equal(after[:, :, stop:], before[:, :, stop:])


def test_numbers_lose_bits_only_far_below_their_rows_largest():
    """One key: the probability is 1, and out is what is left of v when it has been split and cut once."""
    smaller = 2.0 ** -torch.arange(32.0) * (1 + torch.rand(1, 40, 1, 32, generator=torch.Generator().manual_seed(0)))
    v = (smaller * 10.0 ** torch.randint(-30, 30, (1, 40, 1, 1), generator=torch.Generator().manual_seed(1))).float()
    q, k = random(1, 40, 1, 32), random(1, 40, 1, 32)
    out = cuda.backend.forward(AttentionProblem.from_tensors(q, k, v), q, k, v).out
    error, largest = (out.double() - v).abs(), v.double().amax(-1, keepdim=True)
    cut = 2.0**-23 * v.double()
    assert (error <= cut + torch.maximum(2.0**-23 * v.double(), 2.0**-39 * largest)).all()
    assert (error[..., -4:] > 2.0**-22 * v.double()[..., -4:]).any()


@pytest.mark.parametrize(("backend", "arch"), [(cuda_ieee.backend, "sm_75"), (cuda.backend, "sm_80"),
                                               (cuda.backend, "sm_86")],
                         ids=["cuda_ieee-sm_75", "cuda-sm_80", "cuda-sm_86"])
def test_tiles_of_gpus_with_less_shared_memory_compute_the_same(backend, arch, monkeypatch):
    monkeypatch.setattr(float32, "device_spec", lambda device: DeviceSpec.of_arch(arch))
    clear_caches()
    for d in (64, 128, 256):
        q, k, v, dout = (random(1, 1, 20 + i, d)[:, :, :20] for i in range(4))
        exact = oracle.attend(q, k, v, causal(), None)
        exact = dict(zip(PLAIN, (*exact[:2], *oracle.gradients(q, k, v, dout, None, causal(), None)[:3]), strict=True))
        assert max(relative_errors(results(backend, q, k, v, dout, causal()), exact).values()) < 2e-6
    clear_caches()


@pytest.mark.parametrize("width", [16, 32, 48, 64, 96, 128, 256])
def test_a_quarter_warp_reads_no_bank_of_shared_memory_twice(width):
    """16 bytes a thread, 8 threads at a time: rows of both operands of a product, columns of the other."""
    problem = AttentionProblem.from_tensors(*[torch.empty(1, 1, 1, 64)] * 3)
    built = cuda_on_cpu.library(float32.plan("forward", problem, DeviceSpec.of_arch("sm_90"), 1, True)[0])
    place, stride = built.place, width + built.pad()
    reads = {"rows": lambda lane: place(lane // 4) * stride + lane % 4 * 4,
             "columns, even": lambda lane: place(lane % 4 * 2) * stride + lane // 4 * 4,
             "columns, odd": lambda lane: place(lane % 4 * 2 + 1) * stride + lane // 4 * 4}
    for name, first in reads.items():
        for quarter in range(4):
            banks = [(first(lane) + e) % 32 for lane in range(8 * quarter, 8 * quarter + 8) for e in range(4)]
            assert len(set(banks)) == 32, name


@pytest.mark.parametrize(("kernel", "d"), [("forward", 32), ("forward", 64), ("forward", 128), ("dqkv", 64),
                                           ("dqkv", 128), ("dq", 96), ("dk", 256)])
def test_half_a_warp_on_fma_pipes_reads_128_bytes_at_once(kernel, d):
    """16 bytes a thread are two reads of 128 bytes a warp, not four, only where each of half a warp's threads has the
    address of its neighbour or of its next but one. Forward, numbers of all rows lie side by side.
    """
    problem = AttentionProblem.from_tensors(*[torch.empty(1, 1, 1, d)] * 3)
    built = cuda_on_cpu.library(float32.plan(kernel, problem, DeviceSpec.of_arch("sm_90"), 0, True)[0])
    stride = 1 if kernel == "forward" else d + built.pad()
    row, column = ([of(lane) for lane in range(32)] for of in (built.row_of, built.column_of))
    assert len(set(zip(row, column, strict=True))) == 32
    reads = {"rows": [row[lane] * stride for lane in range(32)],
             "rows of the other side": [column[lane] * stride for lane in range(32)],
             "columns of the tile": row, "columns": [built.quad_of(lane) for lane in range(32)]}
    for name, first in reads.items():
        for half in (first[:16], first[16:]):
            assert any(all(half[i] == half[i ^ apart] for i in range(16)) for apart in (1, 2)), name
            banks = [(start + e) % 32 for start in set(half) for e in range(4)]
            assert len(set(banks)) == len(banks), name


@pytest.mark.parametrize("width", [16, 32, 48, 64, 96, 128, 256])
def test_eight_rows_of_halves_lie_in_different_banks(width):
    """A matrix that the tensor core reads is 8 rows of 16 bytes."""
    problem = AttentionProblem.from_tensors(*[torch.empty(1, 1, 1, 64)] * 3)
    built = cuda_on_cpu.library(float32.plan("forward", problem, DeviceSpec.of_arch("sm_90"), 3, True)[0])
    assert len({(row * (width + built.pad()) + e) % 32 for row in range(8) for e in range(4)}) == 32


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_no_key_rows_beside_lengths_that_are_data(backend):
    """The lengths say nothing of it, and no kernel has a program for it."""
    q, dout, k = torch.randn(2, 2, 8, 64), torch.randn(2, 2, 8, 64), torch.randn(2, 2, 0, 64)
    operands = Operands(seqlens_k=torch.zeros(2, dtype=torch.int32))
    problem = AttentionProblem.from_tensors(q, k, k, operands, mask=Mask())
    out, lse, _ = backend.forward(problem, q, k, k, operands)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    saved = Saved(q, k, k, out, lse, operands)
    dq, dk, dv, *_ = backend.backward(problem.backward(lse_grad=False), saved, dout, None, Needs())
    assert (dq == 0).all()
    assert dk.shape == dv.shape == k.shape


@pytest.mark.parametrize(("mask", "sq", "sk", "split"), [
    (causal("top_left"), 40, 500, {"k": (0, 40), "q": (0, 40)}),
    (causal("bottom_right"), 40, 500, {"k": (0, 500), "q": (0, 40)}),
    (window(10, 5, "bottom_right"), 40, 500, {"k": (450, 500), "q": (0, 40)}),
    (causal("bottom_right"), 500, 40, {"k": (0, 40), "q": (460, 500)})])
def test_only_rows_that_somebody_sees_are_split_before(mask, sq, sk, split, monkeypatch):
    seen = {}

    def load(program, arch, device, shared_bytes):
        launch = cuda_on_cpu.load(program, arch, device, shared_bytes)

        def noting(call, programs):
            if program.kernel == "split":
                apart = {name: call.k.data - tensor.data_ptr() for name, tensor in named.items()}
                name = next(name for name, tensor in named.items() if 0 <= apart[name] < 4 * tensor.numel())
                first = apart[name] // (4 * call.k.s)
                seen[name] = (first, first + call.sk)
            launch(call, programs)

        return noting

    monkeypatch.setattr(float32, "load", load)
    q, dout = random(1, 1, sq, 128), random(1, 1, sq + 1, 128)[:, :, :sq]
    k, v = random(1, 1, sk + 2, 128)[:, :, :sk], random(1, 1, sk + 3, 128)[:, :, :sk]
    named = {"q": q, "k": k}
    got = results(cuda.backend, q, k, v, dout, mask)
    assert seen == split
    exact = (*oracle.attend(q, k, v, mask, None)[:2], *oracle.gradients(q, k, v, dout, None, mask, None)[:3])
    for name, expected in zip(PLAIN, exact, strict=True):
        torch.testing.assert_close(got[name].double(), expected, atol=1e-5, rtol=1e-5, msg=name)
