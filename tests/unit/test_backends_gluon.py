"""What the Gluon backend takes, and in which words it refuses the rest; without a Hopper GPU."""

import contextlib
import importlib.metadata
import importlib.util
import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewise import UnsupportedProblem, attention, causal, chunk, explain, prefix, sink_tokens, window
from tilewise.backends import gluon
from tilewise.backends._support import hopper, self_check
from tilewise.backends.base import Saved
from tilewise.backends.triton import TritonBackend
from tilewise.dispatch import explain_problem
from tilewise.functions import FunctionCode
from tilewise.kernels.hopper.forward.config import HopperForwardSchedule, SplitPlan, is_movable_bias
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem, are_aligned, dense_strides
from tilewise.problem.options import FunctionSpec, Operands, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.support.packages import package_version
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.select import hopper_backward_config

TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # that a GPU has run the kernels with
SINKS = OperandSpec((4,), (1,), torch.float32)
SLOPES = OperandSpec((1, 4), (4, 1), torch.float32)
BIAS = OperandSpec((1, 4, 512, 512), (2**20, 2**18, 512, 1), torch.bfloat16)
LENGTHS = Sequences(seqlens_k=OperandSpec((2,), (1,), torch.int32))
BORDERS = OperandSpec((9,), (1,), torch.int64)
PACKED = Sequences(8, BORDERS, BORDERS)
DROPS = ScoreOptions(dropout_p=0.5)
FUNCTION = FunctionSpec(FunctionCode("sees", None, None, None, 0), ())
OF_ENTRIES, OF_HEADS = (FunctionSpec(FunctionCode("sees", lambda *_: True, None, None, 1, reads_head=reads_head),
                                     (torch.int32,)) for reads_head in (False, True))
UNALIGNED = ("takes dropout under a window where lengths are data if it is aligned at the top left, got "
             "causal(alignment='bottom_right') & window(80, 0)")
FIRSTS = "takes dropout where the first query that sees a key and the first key that is seen are multiples of 16, got "


def documents_of(entries=1, sq=512, sk=512, **others):
    """The scores of a call with documents, and what else they have."""
    pair = {f"documents_{name}": OperandSpec((entries, 4, length), (4 * length, length, 1), torch.int32)
            for name, length in (("q", sq), ("k", sk))}
    return ScoreOptions(**pair, **others)


def boolean_of(*shape, **others):
    """The same of a boolean mask."""
    return ScoreOptions(mask=OperandSpec(shape, dense_strides(shape, (4, 3, 2, 1)), torch.bool), **others)


@pytest.fixture(autouse=True)
def a_hopper_gpu(monkeypatch):
    """Answer for the device and for Triton, whatever this machine has."""
    monkeypatch.setattr(gluon, "device_spec", lambda device: DeviceSpec.of_arch("sm_90"))
    monkeypatch.setattr(hopper, "triton_version", lambda: (3, 6))


def problem_of(lengths=(512, 512), heads=(4, 2), dims=(64, 64), mask=None, dtype=torch.bfloat16, **fields):
    (sq, sk), (hq, hk), (d, dv) = lengths, heads, dims
    b, order = fields.pop("b", 2), (4, 2, 3, 1)  # (b, s, h, d) in memory
    strides = {f"{name}_strides": dense_strides(shape, order) for name, shape in (
        ("q", (b, hq, sq, d)), ("k", (b, hk, sk, d)), ("v", (b, hk, sk, dv)))}
    return AttentionProblem(b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv, dtype=dtype, scale=1.0,
                            mask=Mask() if mask is None else mask,
                            **({"device": torch.device("cuda", 0)} | strides | fields))


@pytest.mark.parametrize("problem", [
    problem_of(), problem_of(dtype=torch.float16), problem_of(dims=(128, 128)), problem_of(dims=(40, 8)),
    problem_of((500, 700), mask=causal("bottom_right")), problem_of(mask=window(100, None)), problem_of((1, 1)),
    problem_of(dims=(256, 256)), problem_of(dims=(192, 128)), problem_of(dims=(64, 200)),
    problem_of(heads=(6, 1), b=1), problem_of(scores=ScoreOptions(sinks=SINKS)), problem_of(deterministic=True),
    problem_of(dims=(136, 128), deterministic=True), problem_of(dims=(256, 256), deterministic=True),
    problem_of(scores=ScoreOptions(softcap=30.0, sinks=SINKS)), problem_of(sequences=LENGTHS),
    problem_of(scores=ScoreOptions(softcap=1024.0)),
    problem_of((700, 900), b=1, mask=causal("bottom_right"), sequences=PACKED),
], ids=str)
def test_plain_16_bit_calls_are_taken(problem):
    assert gluon.backend.why_not(problem) is None
    assert gluon.backend.why_not(problem.backward(lse_grad=True)) is None


@pytest.mark.parametrize("order", list(itertools.permutations((4, 3, 2))), ids=str)
def test_every_memory_order_of_batch_heads_and_positions_is_taken_and_is_that_of_the_results(order):
    """Of a head dim that the copy engine moves all strides are multiples of 16 bytes, whatever their order."""
    sizes, strides = (2, 4, 512, 64), (*order, 1)
    ordered = problem_of(**{f"{name}_strides": dense_strides((2, heads, 512, 64), strides)
                            for name, heads in zip("qkv", (4, 2, 2), strict=True)})
    for problem in (ordered, ordered.backward(lse_grad=True)):
        assert gluon.backend.why_not(problem) is None
        stored = torch.empty_strided(sizes, problem.out_strides, device="meta")
        assert stored.permute(*sorted(range(3), key=lambda dim: -order[dim]), 3).is_contiguous()


@pytest.mark.parametrize(("problem", "reason"), [
    (problem_of(dims=(64, 256), scores=ScoreOptions(alibi_slopes=SLOPES)),
     "takes, in its backward pass, head dims up to 128 with ALiBi, got 64 and 256"),
], ids=lambda value: "" if isinstance(value, str) else str(value))
def test_forward_takes_what_backward_refuses(problem, reason):
    assert gluon.backend.why_not(problem) is None
    assert gluon.backend.why_not(problem.backward(lse_grad=False)) == reason


@pytest.mark.parametrize("problem", [
    problem_of(scores=DROPS), problem_of(dims=(128, 64), scores=DROPS, deterministic=True),
    problem_of(scores=ScoreOptions(softcap=30.0, sinks=SINKS, dropout_p=0.5)),
    problem_of(dims=(64, 256), scores=ScoreOptions(softcap=30.0, dropout_p=0.5)),
    problem_of((700, 900), dims=(256, 256), b=1, mask=causal("bottom_right"), sequences=PACKED, scores=DROPS),
    problem_of(dims=(192, 128), sequences=LENGTHS, scores=DROPS, deterministic=True),
    problem_of(scores=DROPS, sequences=LENGTHS, deterministic=True),
    problem_of((700, 900), b=1, mask=causal("bottom_right"), sequences=PACKED, scores=DROPS, deterministic=True),
    problem_of((700, 900), b=1, mask=causal("bottom_right"), sequences=PACKED, scores=DROPS),
    problem_of((512, 700), mask=causal("bottom_right"), scores=DROPS),
    problem_of((512, 768), mask=window(80, 0, "bottom_right"), scores=DROPS),  # key 176 is the first that is seen
], ids=str)
def test_both_passes_take_dropout(problem):
    assert gluon.backend.why_not(problem) is None
    assert gluon.backend.why_not(problem.backward(lse_grad=True)) is None


def test_forward_takes_dropout_wherever_the_first_query_that_sees_a_key_is():
    """Its tiles begin with the first query, those of the backward pass with the first that sees a key."""
    problem = problem_of((512, 500), mask=causal("bottom_right"), scores=DROPS)
    assert gluon.backend.why_not(problem) is None
    assert "are multiples of 16, got 12 and 0" in gluon.backend.why_not(problem.backward(lse_grad=False))


@pytest.mark.parametrize("options", [
    {"bias": BIAS}, {"alibi_slopes": SLOPES}, {"max_logit": True},
    {"bias": BIAS, "alibi_slopes": SLOPES, "softcap": 30.0, "sinks": SINKS},
    {"alibi_slopes": SLOPES, "softcap": 30.0, "sinks": SINKS, "dropout_p": 0.5}],
    ids=["bias", "alibi", "max_logit", "all_but_dropout", "all_but_a_bias"])
def test_both_passes_take_what_changes_scores_or_reports_one(options):
    problem = problem_of(mask=causal("top_left"), scores=ScoreOptions(**options))
    assert gluon.backend.why_not(problem) is None
    assert gluon.backend.why_not(problem.backward(lse_grad=False)) is None


MOVES = "needs, in its backward pass, a bias with a last stride of 1 and others that are positive multiples of"


def biased(bias=BIAS, d=64, **fields):
    """A backward call with a bias."""
    scores = ScoreOptions(bias=bias, **fields.pop("scores", {}))
    return problem_of(dims=(d, d), scores=scores, **fields).backward(lse_grad=False)


@pytest.mark.parametrize("problem", [
    biased(), biased(d=128), biased(deterministic=True),
    biased(OperandSpec((1, 1, 512, 512), (1, 1, 512, 1), torch.float32)),
    biased(OperandSpec((2, 4, 512, 512), (0, 2**18, 512, 1), torch.bfloat16)),
    biased(OperandSpec((2, 4, 512, 512), (2**18, 0, 520, 1), torch.bfloat16)), biased(scores={"softcap": 3.0}, d=128),
    replace(biased(), scores=documents_of(bias=BIAS))], ids=str)
def test_backward_takes_a_bias_that_the_copy_engine_can_move(problem):
    assert gluon.backend.why_not(problem) is None
    assert hopper_backward_config(problem, DeviceSpec.of_arch("sm_90")).fits(problem)


@pytest.mark.parametrize(("problem", "reason"), [
    (biased(d=192), "takes, in its backward pass, head dims up to 128 with a bias, got 192 and 192"),
    (biased(scores={"dropout_p": 0.5}),
     "takes, in its backward pass, a bias without dropout, got bias 1x4x512x512, dropout 0.5"),
    (biased(d=128, deterministic=True),
     "takes, in its backward pass, a bias at head dims up to 64 where deterministic=True, got 128 and 128"),
    (biased(sequences=LENGTHS), f"takes, in its backward pass, a bias where lengths are no data, got {LENGTHS}"),
    (biased(OperandSpec((1, 1, 1, 512), (512, 512, 512, 1), torch.float32)),
     "takes, in its backward pass, a bias of 512 queries and 512 keys, got one of 1 and 512"),
    (biased(OperandSpec((1, 4, 1, 512), (2048, 512, 512, 1), torch.bfloat16), lengths=(1, 512)),
     "takes, in its backward pass, a bias of more than one query and more than one key, got one of 1 and 512"),
    (biased(OperandSpec((1, 4, 512, 1), (2**14, 2**12, 8, 1), torch.bfloat16), lengths=(512, 1)),
     "takes, in its backward pass, a bias of more than one query and more than one key, got one of 512 and 1"),
    (biased(OperandSpec((1, 4, 512, 512), (2**20, 2**18, 1, 512), torch.bfloat16)),
     f"{MOVES} 8 elements, got one with (1048576, 262144, 1, 512)"),
    (biased(OperandSpec((1, 4, 512, 512), (2**20, 2**18, 514, 1), torch.float32)),
     f"{MOVES} 4 elements, got one with (1048576, 262144, 514, 1)"),
    (biased(OperandSpec((1, 4, 512, 512), (2**20, 2**18, 0, 1), torch.float32)),
     f"{MOVES} 4 elements, got one with (1048576, 262144, 0, 1)"),
], ids=lambda value: "" if isinstance(value, str) else str(value))
def test_each_refusal_of_a_bias_says_what_was_got(problem, reason):
    assert gluon.backend.why_not(problem) == reason


@pytest.mark.parametrize(("problem", "reason"), [
    (problem_of(device=torch.device("cpu")), "runs on Hopper GPUs (sm_90), got cpu"),
    (problem_of(dtype=torch.float32), "computes in float16 and bfloat16, got torch.float32"),
    (problem_of(dims=(264, 64)), "takes head dims up to 256, got 264 and 64"),
    (problem_of(dims=(64, 512)), "takes head dims up to 256, got 64 and 512"),
    (problem_of(mask=prefix(3), sequences=LENGTHS, scores=ScoreOptions(sinks=SINKS)),
     f"takes causal masks and windows with lengths that are data, got {prefix(3)}, sinks"),
    (problem_of(scores=ScoreOptions(dropout_p=0.5, dropout_origin_k=16)),
     "takes functions, bias, ALiBi, softcap, sinks and dropout and nothing else that changes scores, got dropout 0.5 "
     "from 0, 16"),
    (problem_of(scores=ScoreOptions(score_function=FUNCTION, dropout_p=0.5)),
     "needs a triton function, got sees without one; backend='reference' takes a torch function"),
    (problem_of(dims=(64, 256), scores=ScoreOptions(alibi_slopes=SLOPES)).backward(lse_grad=False),
     "takes, in its backward pass, head dims up to 128 with ALiBi, got 64 and 256"),
    (problem_of(scores=DROPS, sequences=LENGTHS, mask=window(80, 0, "bottom_right")), UNALIGNED),
    (problem_of(dims=(256, 64), scores=DROPS, sequences=LENGTHS, mask=window(80, 0, "bottom_right")).backward(
        lse_grad=False), UNALIGNED),
    (problem_of(dims=(64, 256), scores=ScoreOptions(alibi_slopes=SLOPES, score_function=FUNCTION)).backward(
        lse_grad=False),
     "takes, in its backward pass, head dims up to 128 with ALiBi and a score function, got 64 and 256"),
    (problem_of((512, 700), mask=window(100, 0, "bottom_right"), scores=DROPS).backward(lse_grad=False),
     FIRSTS + "0 and 88"),
    (problem_of((700, 512), mask=causal("bottom_right"), scores=DROPS).backward(lse_grad=False), FIRSTS + "188 and 0"),
    (problem_of(scores=ScoreOptions(softcap=1025.0)), "takes softcaps up to 1024, got 1025"),
    (problem_of(scores=ScoreOptions(softcap=1e9)).backward(lse_grad=False),
     "takes softcaps up to 1024, got 1e+09"),
    (problem_of((512, 0)), "needs a pair that is visible, got none"),
    (problem_of((512, 0), sequences=LENGTHS), "needs a pair that is visible, got none"),
    (problem_of((0, 512), b=1, sequences=PACKED), "needs a pair that is visible, got none"),
    (problem_of((512, 512), b=1, sequences=Sequences(0, *[OperandSpec((1,), (1,), torch.int32)] * 2)),
     "needs a pair that is visible, got none"),
    (problem_of(aligned=False), "needs q, k and v at addresses that are multiples of 16 bytes"),
    (problem_of(dims=(36, 64)), "needs a last stride of 1 and the others positive multiples of 8 elements, got q with "
                                "(73728, 36, 144, 1)"),
    (problem_of(dims=(64, 36)), "needs a last stride of 1 and the others positive multiples of 8 elements, got v with "
                                "(36864, 36, 72, 1)"),
    (problem_of(k_strides=(65536, 0, 64, 1)), "needs a last stride of 1 and the others positive multiples of 8 "
                                              "elements, got k with (65536, 0, 64, 1)"),
    (problem_of(q_strides=(131072, 32768, 1, 512)), "needs a last stride of 1 and the others positive multiples of 8 "
                                                    "elements, got q with (131072, 32768, 1, 512)"),
    (problem_of(dims=(64, 36), v_strides=(65536, 64, 128, 1)),
     "needs a last stride of 1 and the others positive multiples of 8 elements, got out with (73728, 36, 144, 1)"),
    (problem_of((1, 64), heads=(1, 1), b=1, dims=(64, 36), v_strides=(4096, 64, 64, 1), sequences=PACKED),
     "needs a last stride of 1 and the others positive multiples of 8 elements, got out with (36, 36, 36, 1)"),
    (problem_of(dims=(36, 64), q_strides=(131072, 64, 256, 1), k_strides=(65536, 64, 128, 1)).backward(lse_grad=False),
     "needs a last stride of 1 and the others positive multiples of 8 elements, got dq with (73728, 36, 144, 1)"),
    (problem_of((64, 1), heads=(1, 1), b=1, dims=(64, 36), v_strides=(4096, 64, 64, 1),
                sequences=PACKED).backward(lse_grad=False),
     "needs a last stride of 1 and the others positive multiples of 8 elements, got dv with (36, 36, 36, 1)"),
], ids=lambda value: "" if isinstance(value, str) else str(value))
def test_each_refusal_says_what_was_got(problem, reason):
    assert gluon.backend.why_not(problem) == reason


@pytest.mark.parametrize("problem", [
    problem_of(mask=prefix(3)), problem_of(mask=causal() & chunk(64)), problem_of(mask=causal() & sink_tokens(2)),
    problem_of(mask=window(100, 0) & sink_tokens(2)), problem_of(scores=documents_of()),
    problem_of(dims=(128, 128), mask=causal(), scores=documents_of(2)),
    problem_of((512, 700), mask=causal("bottom_right"), scores=documents_of(1, 512, 700)),
    problem_of(scores=documents_of(1, softcap=30.0, sinks=SINKS)), problem_of(scores=boolean_of(2, 1, 512, 512)),
    problem_of(dims=(128, 64), scores=boolean_of(1, 1, 1, 512)),
    problem_of(heads=(4, 4), scores=boolean_of(1, 4, 512, 512)),
    problem_of(scores=documents_of(1, tiles_q=SINKS, tiles_k=SINKS)),
    problem_of(scores=ScoreOptions(mask_function=OF_ENTRIES)),
    problem_of(heads=(4, 4), mask=causal(), scores=documents_of(mask_function=OF_HEADS, softcap=30.0)),
], ids=str)
def test_masks_that_are_no_band_are_taken(problem):
    assert gluon.backend.why_not(problem) is None
    assert gluon.backend.why_not(problem.backward(lse_grad=True)) is None


@pytest.mark.parametrize("problem", [problem_of(scores=documents_of(1, dropout_p=0.5)),
                                     problem_of(scores=boolean_of(1, 1, 512, 512, dropout_p=0.5))], ids=str)
def test_dropout_is_taken_with_masks_that_are_no_band(problem):
    assert gluon.backend.why_not(problem) is None
    assert gluon.backend.why_not(problem.backward(lse_grad=False)) is None


@pytest.mark.parametrize(("problem", "reason"), [
    (problem_of(mask=causal(), scores=documents_of(mask_function=FUNCTION)),
     "needs a triton function, got sees without one; backend='reference' takes a torch function"),
    (problem_of(sequences=LENGTHS, scores=ScoreOptions(mask_function=OF_ENTRIES)),
     "takes causal masks and windows with lengths that are data, got no mask, mask function sees"),
    (problem_of(mask=prefix(3), sequences=LENGTHS),
     "takes causal masks and windows with lengths that are data, got causal() & prefix(3)"),
    (problem_of(mask=causal(), sequences=LENGTHS, scores=documents_of(sinks=SINKS)),
     "takes causal masks and windows with lengths that are data, got causal(), sinks, documents"),
    (problem_of((700, 900), b=1, mask=causal("bottom_right"), sequences=PACKED, scores=documents_of(1, 700, 900)),
     "takes causal masks and windows with lengths that are data, got causal(alignment='bottom_right'), documents"),
    (problem_of(sequences=LENGTHS, scores=boolean_of(2, 1, 512, 512)),
     "takes causal masks and windows with lengths that are data, got no mask, mask 2x1x512x512"),
    (problem_of((512, 700), mask=causal("bottom_right") & prefix(3)),
     "takes prefixes, sink tokens and chunks of as many queries as keys, got 512 and 700 with "
     "causal(alignment='bottom_right') & prefix(3)"),
    (problem_of((700, 512), mask=window(99, 0, "bottom_right") & sink_tokens(3)),
     "takes prefixes, sink tokens and chunks of as many queries as keys, got 700 and 512 with "
     "causal(alignment='bottom_right') & window(99, 0) & sink_tokens(3)"),
    (problem_of((512, 700), mask=causal("top_left") & chunk(64)),
     "takes prefixes, sink tokens and chunks of as many queries as keys, got 512 and 700 with "
     "causal(alignment='top_left') & chunk(64)"),
    (problem_of((512, 512), mask=causal(7) & prefix(3)),
     "takes prefixes, sink tokens and chunks of as many queries as keys, got 512 and 512 with causal(alignment=7) & "
     "prefix(3)"),
    (problem_of((92160, 93312), mask=causal("bottom_right"), scores=documents_of(1, 92160, 93312)),
     "takes masks whose plan has up to 1024 MiB, got 1025 MiB"),
    (problem_of((64, 64), b=65536, scores=documents_of(65536, 64, 64)),
     "takes up to 65535 masks of up to 4194304 queries and keys, got 65536 of 64 and 64"),
], ids=lambda value: "" if isinstance(value, str) else str(value))
def test_masks_without_a_plan_are_refused_in_both_passes(problem, reason):
    assert gluon.backend.why_not(problem) == reason
    assert gluon.backend.why_not(problem.backward(lse_grad=False)) == reason


@pytest.mark.parametrize(("problem", "reason"), [
    (problem_of(mask=prefix(3), deterministic=True),
     "takes, in its backward pass, causal masks and windows where deterministic=True at head dims up to 128, got "
     "causal() & prefix(3)"),
    (problem_of(scores=documents_of(), deterministic=True),
     "takes, in its backward pass, causal masks and windows where deterministic=True at head dims up to 128, got "
     "no mask, documents"),
    (problem_of(scores=boolean_of(1, 4, 512, 512)), "takes, in its backward pass, a mask of each head's own where no "
                                                    "heads share keys, got 4 and 2 heads"),
    (problem_of(scores=ScoreOptions(mask_function=OF_HEADS)), "takes, in its backward pass, a mask of each head's own "
                                                              "where no heads share keys, got 4 and 2 heads"),
], ids=lambda value: "" if isinstance(value, str) else str(value))
def test_forward_takes_masks_that_backward_has_no_plan_of(problem, reason):
    assert gluon.backend.why_not(problem) is None
    assert gluon.backend.why_not(problem.backward(lse_grad=False)) == reason


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "gfx942"])
def test_other_gpus_are_refused(monkeypatch, arch):
    monkeypatch.setattr(gluon, "device_spec", lambda device: DeviceSpec.of_arch(arch))
    assert gluon.backend.why_not(problem_of()) == f"runs on Hopper GPUs (sm_90), got {arch}"


@pytest.mark.parametrize(("version", "found"), [(None, "none"), ((2, 9), "2.9"), ((3, 5), "3.5")])
def test_a_triton_that_is_too_old_or_not_there_is_refused(monkeypatch, version, found):
    monkeypatch.setattr(hopper, "triton_version", lambda: version)
    monkeypatch.setattr(self_check, "why_not", None)
    assert gluon.backend.why_not(problem_of()) == f"needs Triton 3.6 or newer, got {found}"


@pytest.mark.parametrize("version", TRITONS)
def test_a_triton_that_a_gpu_has_run_the_kernels_with_is_used_without_a_check(monkeypatch, version):
    install(monkeypatch, version)
    monkeypatch.setattr(self_check, "why_not", None)
    assert gluon.backend.why_not(problem_of()) is None
    assert gluon.backend.why_not(problem_of().backward(lse_grad=True)) is None


@pytest.mark.parametrize("version", [(3, 10), (4, 0), (0, 0)])
def test_any_later_triton_is_asked_for_a_self_check_of_the_kernels_of_a_call_that_they_take(monkeypatch, version):
    asked, problem = [], problem_of()
    monkeypatch.setattr(hopper, "triton_version", lambda: version)
    monkeypatch.setattr(self_check, "why_not", lambda *facts: asked.append(facts) or "the self-check failed")
    assert gluon.backend.why_not(problem) == "the self-check failed"
    assert gluon.backend.why_not(problem.backward(lse_grad=False)) == "the self-check failed"
    assert asked == [("forward", problem.device), ("backward", problem.device)]
    monkeypatch.setattr(self_check, "why_not", lambda *facts: asked.append(facts))
    assert gluon.backend.why_not(problem) is None
    asked.clear()
    assert gluon.backend.why_not(problem_of(dims=(264, 64))) == "takes head dims up to 256, got 264 and 64"
    assert asked == []


def install(monkeypatch, version):
    """Have this version of Triton installed, as far as packages tell."""
    find_spec, other_version = importlib.util.find_spec, importlib.metadata.version
    monkeypatch.setattr(hopper, "triton_version", lambda: package_version("triton", "triton"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" or find_spec(name))
    monkeypatch.setattr(importlib.metadata, "version",
                        lambda name: version if name == "triton" else other_version(name))


LONG = {"lengths": (4096, 4096), "heads": (16, 4)}
USUAL_CALLS = {
    "full": {}, "causal": {"mask": causal()}, "window": {"mask": window(255, 0)}, "mha": {"heads": (16, 16)},
    "float16": {"dtype": torch.float16}, "head_dim_128": {"dims": (128, 128), "mask": causal()},
    "head_dim_256": {"dims": (256, 256), "mask": causal()}, "head_dim_192_128": {"dims": (192, 128)},
    "bottom_right": {"lengths": (2048, 4096), "mask": causal("bottom_right")},
    "sinks": {"scores": ScoreOptions(sinks=OperandSpec((16,), (1,), torch.float32))},
    "softcap": {"scores": ScoreOptions(softcap=30.0), "mask": causal()}, "padded": {"sequences": LENGTHS},
    "packed": {"b": 1, "lengths": (8192, 8192), "mask": causal("bottom_right"), "sequences": PACKED},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("version", TRITONS)
@pytest.mark.parametrize("call", [*USUAL_CALLS, "dropout"])
def test_explain_names_gluon_for_usual_calls_with_every_version_of_triton_that_was_run(monkeypatch, version, call):
    """Only 3.6 was named in the source: a newer Triton left these calls to slower kernels, and nothing told of it."""
    install(monkeypatch, version)
    monkeypatch.setattr(TritonBackend, "why_not", lambda self, problem: None)
    monkeypatch.setattr("tilewise.backends.cudnn.backend.__class__.why_not", lambda self, problem: "not asked here")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = explain_problem(problem_of(**(LONG | USUAL_CALLS.get(call, {"scores": DROPS}))))
    assert (found.forward, found.backward) == ("gluon", "gluon")


def test_a_stride_along_a_dim_of_one_does_not_matter():
    """Tensors come with any, and no step is ever made along it; the launcher puts one there that the engine takes."""
    problem = problem_of((1, 512), b=1, heads=(4, 1))
    strided = replace(problem, q_strides=(0, 64, 7, 1), k_strides=(3, 1, 64, 1))
    assert gluon.backend.why_not(strided) is None


@pytest.mark.parametrize("current", [True, False])
def test_forward_launches_on_the_tensors_device_and_makes_it_current_where_it_is_not(monkeypatch, current):
    entered, launched, device = [], [], torch.device("cpu")
    q = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(gluon, "is_current", lambda asked: current)
    monkeypatch.setattr(torch.cuda, "device", lambda asked: contextlib.nullcontext(entered.append(asked)))

    def launch(tensors, addresses, *rest, **named):
        launched.append((tensors(), addresses, list(entered)))

    monkeypatch.setattr(gluon, "HopperForward", lambda *facts: launch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda asked: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(gluon, "_plan", gluon._plan.__wrapped__)
    gluon.backend.forward(AttentionProblem.from_tensors(q, q, q), q, q, q)
    assert launched == [((q, q, q), (q.data_ptr(),) * 3, [] if current else [device])]


def test_splits_are_combined_and_sinks_enter_there(monkeypatch):
    calls, q = [], torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    launch = SimpleNamespace(split_rows=range(3, 16), partial_shape=(13, 5, 72), sinks_stride=None)
    sinks = torch.zeros(2)

    class Launches:
        def __call__(self, tensors, addresses, out, lse, more):
            calls.append(("attend", (out, lse), more))

        def __getattr__(self, name):
            return getattr(launch, name)

    def combining(problem, rows, shape, *, overlapped):
        assert (rows, shape, overlapped) == (launch.split_rows, launch.partial_shape, True)
        return lambda *tensors: calls.append(("combine", tensors))

    monkeypatch.setattr(gluon, "is_current", lambda asked: True)
    schedule = HopperForwardSchedule(1, pack_gqa=4, split_kv=SplitPlan(7, 5))
    monkeypatch.setattr(gluon, "forward_schedule", lambda *facts: schedule)
    monkeypatch.setattr(gluon, "HopperForward", lambda *facts: calls.append(facts[2:]) or Launches())
    monkeypatch.setattr("tilewise.kernels.triton.combine.combine_splits_launch", combining)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda asked: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(gluon, "_plan", gluon._plan.__wrapped__)
    out, lse, _ = gluon.backend.forward(AttentionProblem.from_tensors(q, q, q), q, q, q, Operands(sinks=sinks))
    facts, (_, (at_out, at_lse), partial), (_, combined) = calls
    assert facts == (schedule, 132, None)
    assert (partial.shape, partial.dtype) == ((13, 5, 72), torch.float32)
    assert all(got is wanted for got, wanted in zip((at_out, at_lse), (out, lse), strict=True))
    assert all(got is wanted for got, wanted in zip(combined, (partial, out, lse, sinks, None), strict=True))


def test_explain_names_gluon_and_its_reason():
    q = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    assert "  forward  gluon      no: runs on Hopper GPUs (sm_90), got cpu" in str(explain(q, q, q)).splitlines()


def test_addresses_of_the_tensors_reach_the_backend(monkeypatch):
    seen = []
    monkeypatch.setattr(gluon.GluonBackend, "why_not", lambda self, problem: seen.append(problem.aligned) or "no")
    store = torch.zeros(3 * 29 * 8 + 1, dtype=torch.bfloat16)
    q = store[:-1].view(1, 3, 29, 8)
    for v, aligned in ((q, True), (store[1:].view(1, 3, 29, 8), False)):
        with pytest.raises(UnsupportedProblem):
            attention(q, q, v, backend="gluon")
        explain(q, q, v)
        assert seen == [aligned] * 3, "the call, and explain's two passes"
        seen.clear()


def test_a_traced_tensor_counts_as_aligned():
    whole = torch.zeros(17, dtype=torch.bfloat16)
    assert are_aligned(whole)
    assert are_aligned(whole, whole[8:])
    assert not are_aligned(whole, whole[1:])
    with FakeTensorMode() as mode:
        assert are_aligned(mode.from_tensor(whole)[1:])


def test_a_delta_launch_belongs_to_the_alignment_of_each_tensor(monkeypatch):
    """One flag stood for all of them: a kernel made for an aligned dlse beside an odd out was handed an odd dlse."""
    keys = []

    def plan(problem, incoming, alignment, moments, dbias):
        keys.append(alignment)
        raise KeyError

    monkeypatch.setattr(gluon, "_backward_plan", plan)
    q, lse = torch.zeros(1, 2, 8, 64), torch.zeros(1, 2, 8)
    problem = AttentionProblem.from_tensors(q, q, q).backward(lse_grad=True)
    odd_out, odd_lse = torch.zeros(q.numel() + 1)[1:].view_as(q), torch.zeros(17)[1:].view_as(lse)
    for out, dlse in ((q, lse), (odd_out, lse), (q, odd_lse)):
        with pytest.raises(KeyError):
            gluon.backend.backward(problem, Saved(q, q, q, out, lse), q, dlse)
    assert keys == [(True, True, True), (False, True, True), (True, True, False)]


def test_a_plan_is_of_the_strides_of_the_bias_that_is_read(monkeypatch):
    """A bias that begins where the copy engine cannot read is copied, and not with the strides that it has."""
    planned = []

    def plan(problem, incoming, alignment, moments, dbias):
        planned.append((problem.scores.bias.strides, alignment))
        raise KeyError

    monkeypatch.setattr(gluon, "_backward_plan", plan)
    q, lse = torch.zeros(1, 2, 8, 64, dtype=torch.float16), torch.zeros(1, 2, 8)
    for first in (0, 1, 8):
        bias = torch.zeros(1, 2, 8, 64, dtype=torch.float16)[..., first:first + 8]
        operands = Operands(bias=bias)
        problem = AttentionProblem.from_tensors(q, q, q, operands).backward(lse_grad=False)
        with pytest.raises(KeyError):
            gluon.backend.backward(problem, Saved(q, q, q, q, lse, operands), q, None)
        assert problem.scores.bias.strides == (1024, 512, 64, 1)
    assert planned == [(strides, (True, True, True)) for strides in (
        (1024, 512, 64, 1), (128, 64, 8, 1), (1024, 512, 64, 1))]


def test_a_forward_call_copies_a_bias_that_tma_would_read_from_where_it_cannot(monkeypatch):
    planned = []

    def attend(tensors, addresses, operands):
        read.append((operands.bias.stride(), operands.bias.data_ptr() % 16))
        raise KeyError

    def plan(problem):
        planned.append(problem.scores.bias.strides)
        place = (1, 1, 0) if is_movable_bias(problem) else None
        return SimpleNamespace(launch=SimpleNamespace(place_of_bias=place), attend=attend)

    monkeypatch.setattr(gluon, "_plan", plan)
    read = []
    q = torch.zeros(1, 2, 8, 64, dtype=torch.float16)
    strided = torch.zeros(1, 2, 8, 64, dtype=torch.float16)
    for bias in (strided[..., :8], strided[..., 1:9], strided[..., 1:9].float(), strided[..., 1:17:2]):
        operands = Operands(bias=bias)
        with pytest.raises(KeyError):
            gluon.backend.forward(AttentionProblem.from_tensors(q, q, q, operands), q, q, q, operands)
    assert read == [((1024, 512, 64, 1), 0), ((128, 64, 8, 1), 0), ((128, 64, 8, 1), 0), ((1024, 512, 64, 2), 2)]
    assert planned == [(1024, 512, 64, 1), (1024, 512, 64, 1), (128, 64, 8, 1), (128, 64, 8, 1), (1024, 512, 64, 2)]


def _without_metadata(name):
    raise importlib.metadata.PackageNotFoundError(name)


class TestTritonVersion:
    """The version is read without importing Triton."""

    @pytest.fixture(autouse=True)
    def a_hopper_gpu(self):
        """Nothing is answered here: the true function is tested."""

    def test_it_is_that_of_the_package(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(importlib.metadata, "version", lambda name: {"triton": "3.10.1+git0"}[name])
        assert hopper.triton_version.__wrapped__() == (3, 10)

    def test_of_a_triton_without_metadata_it_is_the_modules_own(self, monkeypatch):
        """As builds from source and of other names have it: what was asked, raised where it had to answer."""
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(importlib.metadata, "version", _without_metadata)
        for module, version in ((SimpleNamespace(__version__="3.6.0"), (3, 6)), (SimpleNamespace(), (0, 0)),
                                (SimpleNamespace(__version__="main"), (0, 0)), (None, (0, 0))):
            monkeypatch.setitem(sys.modules, "triton", module)
            assert hopper.triton_version.__wrapped__() == version

    def test_there_may_be_none(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert hopper.triton_version.__wrapped__() is None
