"""Which gradients of a bias the Hopper kernel sums, for the Triton backend and beside the Hopper kernels, and when."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewise.backends._support import hopper, self_check
from tilewise.backends.base import Needs, Pending, Saved
from tilewise.masks import Mask, causal, chunk, prefix, window
from tilewise.problem import AttentionProblem, dense_strides
from tilewise.problem.options import Operands, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.support.caches import clear_caches
from tilewise.tuning.device import DeviceSpec

triton = pytest.importorskip("tilewise.backends.triton", reason="Triton is not installed")
gluon = pytest.importorskip("tilewise.backends.gluon")
bias_gradients = pytest.importorskip("tilewise.backends._support.bias_gradients")
HopperDbias = pytest.importorskip("tilewise.kernels.hopper.backward.launch_dbias").HopperDbias
Launch = pytest.importorskip("tilewise.kernels.triton.launch").Launch
BiasGradientSums = pytest.importorskip("tilewise.kernels.triton.bias_gradient").BiasGradientSums

B, H, S = 4, 16, 4096
SEEN = OperandSpec((B, H), (H, 1), torch.float32)


@pytest.fixture(autouse=True)
def a_hopper_gpu(monkeypatch):
    """Answer for the device and for Triton, whatever this machine has."""
    for module in (hopper, triton, bias_gradients):
        monkeypatch.setattr(module, "device_spec", lambda device: DeviceSpec.of_arch("sm_90"))
    monkeypatch.setattr(hopper, "triton_version", lambda: (3, 6))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    clear_caches()
    yield
    clear_caches()


def bias_of(b, h, s=S, dtype=torch.bfloat16):
    return OperandSpec((b, h, s, s), dense_strides((b, h, s, s), (4, 3, 2, 1)), dtype)


def problem_of(bias=None, d=128, dv=None, dtype=torch.bfloat16, s=S, b=B, options=None, **fields):
    bias, dv = bias or bias_of(1, H, s), dv or d
    strides = {f"{name}_strides": dense_strides((b, H, s, dim), (4, 3, 2, 1)) for name, dim in
               (("q", d), ("k", d), ("v", dv))}
    return AttentionProblem(b=b, hq=H, hk=H, sq=s, sk=s, d=d, dv=dv, dtype=dtype, device=torch.device("cuda", 0),
                            scale=1.0, direction="backward", scores=ScoreOptions(bias=bias, **(options or {})),
                            **({"mask": causal()} | strides | fields))


@pytest.mark.parametrize("problem", [
    problem_of(), problem_of(mask=Mask()), problem_of(mask=window(100, 3)), problem_of(dtype=torch.float16),
    problem_of(bias_of(1, H, dtype=torch.float32)), problem_of(d=64), problem_of(d=40, dv=128),
    problem_of(options={"sinks": OperandSpec((H,), (1,), torch.float32)}), problem_of(options={"max_logit": True}),
    problem_of(deterministic=True), problem_of(lse_grad=True), problem_of(bias_of(1, 1)), problem_of(bias_of(B, 1)),
], ids=str)
def test_bands_with_plain_scores_are_summed_there(problem):
    assert hopper.sums_dbias(problem)


@pytest.mark.parametrize("problem", [
    problem_of(d=129, dv=128), problem_of(d=64, dv=136), problem_of(dtype=torch.float32),
    problem_of(mask=causal() & prefix(5)), problem_of(mask=causal() & chunk(64)),
    problem_of(sequences=Sequences(seqlens_k=OperandSpec((B,), (1,), torch.int32))),
    problem_of(options={"softcap": 3.0}), problem_of(options={"dropout_p": 0.5}),
    problem_of(options={"alibi_slopes": SEEN}),
    problem_of(options={"mask": OperandSpec((1, 1, S, S), (S, S, S, 1), torch.bool)}),
    problem_of(options={"documents_q": SEEN}), problem_of(options={"tiles_q": SEEN}),
    problem_of(options={"score_function": SEEN}), problem_of(options={"mask_function": SEEN}),
    problem_of(OperandSpec((1, H, 1, S), (S, S, S, 1), torch.bfloat16)),
    problem_of(OperandSpec((1, H, S, 1), (S, S, 1, 1), torch.bfloat16)),
    replace(problem_of(), scores=ScoreOptions()),
])
def test_all_else_keeps_the_triton_kernels(problem):
    assert not hopper.sums_dbias(problem)


@pytest.mark.parametrize("version", [None, (3, 5)])
def test_an_older_triton_or_another_gpu_keeps_the_triton_kernels(monkeypatch, version):
    monkeypatch.setattr(hopper, "triton_version", lambda: version)
    assert not hopper.sums_dbias(problem_of())
    monkeypatch.setattr(hopper, "triton_version", lambda: (3, 6))
    monkeypatch.setattr(hopper, "device_spec", lambda device: DeviceSpec.of_arch("sm_100"))
    assert not hopper.sums_dbias(problem_of())


@pytest.mark.parametrize("version", sorted(hopper.RUN_ON_GPU))
def test_a_triton_that_a_gpu_has_run_the_kernel_with_is_used_without_a_check(monkeypatch, version):
    monkeypatch.setattr(hopper, "triton_version", lambda: version)
    monkeypatch.setattr(self_check, "why_not", None)
    assert isinstance(plan_of(problem_of()).dbias, HopperDbias)


@pytest.mark.parametrize(("failure", "kernel"), [(None, HopperDbias), ("the self-check failed", type(None))])
def test_with_any_later_triton_a_self_check_decides_whether_the_kernel_is_used(monkeypatch, failure, kernel):
    asked = []
    monkeypatch.setattr(hopper, "triton_version", lambda: (3, 10))
    monkeypatch.setattr(self_check, "why_not", lambda *facts: asked.append(facts) or failure)
    assert isinstance(plan_of(problem_of()).dbias, kernel)
    assert asked == [("dbias", torch.device("cuda", 0))]
    plan_of(problem_of(bias_of(B, H)))
    assert len(asked) == 1, "a bias whose gradient other kernels sum is no reason for a check"


@pytest.mark.parametrize("capturing", [True, False])
def test_a_plan_made_while_a_graph_is_captured_is_not_kept_if_the_kernel_awaits_its_check(monkeypatch, capturing):
    monkeypatch.setattr(hopper, "triton_version", lambda: (3, 10))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(self_check, "why_not", lambda *facts: Pending("awaits") if capturing else None)
    assert hopper.awaits_dbias_check(problem_of()) is capturing
    assert not hopper.awaits_dbias_check(problem_of(options={"softcap": 3.0}))
    monkeypatch.setattr(hopper, "triton_version", lambda: (3, 9))
    assert not hopper.awaits_dbias_check(problem_of())


def test_a_backward_pass_takes_a_plan_of_its_own_while_the_kernel_awaits_its_check(monkeypatch):
    class Taken(Exception):
        pass

    def plan(*facts):
        raise Taken

    kept = functools.lru_cache(plan)
    monkeypatch.setattr(triton, "_backward_plan", kept)
    problem, tensor = problem_of(), torch.zeros(1, 1, 1, 1)
    saved = Saved(*(tensor,) * 4, torch.zeros(1, 1, 1), Operands(bias=tensor))
    for awaits, counted in ((True, 0), (False, 1)):
        monkeypatch.setattr(triton, "awaits_dbias_check", lambda problem, awaits=awaits: awaits)
        with pytest.raises(Taken):
            triton.backend.backward(problem, saved, tensor, None, Needs(dbias=True))
        assert kept.cache_info().misses == counted


def plan_of(problem, aligned=True, needs=Needs(dbias=True)):  # noqa: B008 - a frozen value
    strides = problem.out_strides
    return triton._backward_plan(problem, (strides, strides, None), (aligned,) * 7, "ieee", needs)


@pytest.mark.parametrize(("problem", "q_stages"), [
    (problem_of(), 2), (problem_of(s=2048, b=8), 2), (problem_of(b=3), 2), (problem_of(bias_of(1, 1), b=2), 2),
    (problem_of(bias_of(4, 1)), 2), (problem_of(bias_of(1, H, dtype=torch.float32)), 1),
    (problem_of(deterministic=True), 2),
], ids=str)
def test_a_bias_that_three_entries_or_the_heads_share_has_its_gradient_summed_there(problem, q_stages):
    plan = plan_of(problem)
    assert isinstance(plan.dbias, HopperDbias)
    assert isinstance(plan.dq, Launch)
    assert q_stages == plan.dbias.scalars[-1].Q_STAGES
    assert plan_of(problem, needs=Needs()).dbias is None


@pytest.mark.parametrize("problem", [problem_of(b=2), problem_of(bias_of(B, H)), problem_of(options={"softcap": 3.0})],
                         ids=["two_entries", "of_entries", "softcap"])
def test_on_dqs_way_it_stays_where_fewer_share_it_and_where_the_kernel_does_not_take_the_call(problem):
    plan = plan_of(problem)
    assert plan.dbias is None
    assert isinstance(plan.dq, BiasGradientSums)


@pytest.mark.parametrize(("problem", "again", "own"), [
    (problem_of(b=2), None, HopperDbias), (problem_of(bias_of(B, H)), None, HopperDbias),
    (problem_of(bias_of(1, H), b=1), None, HopperDbias), (problem_of(options={"softcap": 3.0}), BiasGradientSums, None),
    (problem_of(d=64, b=2), BiasGradientSums, None), (problem_of(d=64), None, HopperDbias),
], ids=["two_entries", "of_entries", "one_entry", "softcap", "two_narrow_ones", "four_narrow_ones"])
def test_behind_a_dq_of_the_hopper_kernels_it_is_summed_there_however_few_share_it(monkeypatch, problem, again, own):
    monkeypatch.setattr(gluon, "device_spec", lambda device: DeviceSpec.of_arch("sm_90"))
    made = gluon._launches_of_sums(problem, problem.out_strides, problem.q_strides, (True,) * 7, True)
    assert [type(launch) for launch in made] == [type(None) if kind is None else kind for kind in (again, own)]


def test_what_the_copy_engine_cannot_move_keeps_the_triton_kernels():
    assert isinstance(plan_of(problem_of(bias_of(1, 1)), aligned=False).dbias, Launch)
    assert isinstance(plan_of(problem_of(bias_of(1, 1), q_strides=(S * H * 129, S * 129, 129, 1))).dbias, Launch)


def test_dq_of_a_deterministic_call_has_one_tile_whichever_way_its_batch_has_the_gradient():
    tiles = {tuple(plan_of(problem_of(deterministic=True, b=b)).dq.options.items()) for b in (4, 8)}
    assert len(tiles) == 1
