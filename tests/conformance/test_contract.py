"""What every backend returns whatever the numbers: shapes, strides, dtypes, zeros for what sees nothing."""

import pytest
import torch

from conformance.calls import (
    assert_gradients_within_budget,
    forward,
    forward_and_backward,
    problem_of,
    skip_if_refused,
)
from tilewise.backends.base import Saved
from tilewise.problem import dense_strides
from tilewise.testing.cases import CASES, case_named
from tilewise.testing.inputs import make_inputs

LAYOUTS = ("mha_odd_lengths", "gqa_causal_odd_lengths", "value_dim_odd", "storage_bhds", "packed_qkv_gqa",
           "packed_kv", "expanded_heads_and_batch", "moat_window", "one_query", "no_queries", "no_keys", "no_batch")
BLIND = [case for case in CASES if not case.mask.visible(case.sq, case.sk).any(-1).all()]
UNSEEN = [case for case in CASES if not case.mask.visible(case.sq, case.sk).any(0).all()]


def _strides(shape, strides):
    """Strides of the dims that have more than one element: the others address nothing."""
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1] if 0 not in shape else []


@pytest.mark.parametrize("name", LAYOUTS)
def test_results_have_the_promised_shape_strides_and_dtype(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    problem = problem_of(case, inputs)
    results = forward_and_backward(backend, case, inputs)
    assert results.out.shape == (case.b, case.hq, case.sq, case.dv)
    assert _strides(results.out.shape, results.out.stride()) == _strides(results.out.shape, problem.out_strides)
    assert results.lse.shape == (case.b, case.hq, case.sq)
    assert results.lse.is_contiguous()
    assert results.lse.dtype is torch.float32
    for result, like in ((results.out, inputs.q), *zip(results[2:], inputs[:3], strict=True)):
        assert result.dtype is like.dtype
        assert result.device == like.device
    for gradient, like in zip(results[2:], inputs[:3], strict=True):
        assert gradient.shape == like.shape
        promised = dense_strides(like.shape, like.stride())
        assert _strides(like.shape, gradient.stride()) == _strides(like.shape, promised)


@pytest.mark.parametrize("name", ["gqa_causal_odd_lengths", "window_hides_whole_tiles", "packed_qkv_gqa"])
def test_inputs_are_only_read(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    forward_and_backward(backend, case, inputs, "out")
    for tensor, untouched in zip(inputs, make_inputs(case, main_dtype, device), strict=True):
        assert torch.equal(tensor, untouched)


@pytest.mark.parametrize("case", BLIND, ids=str)
def test_blind_query_gives_zero_output_minus_infinite_lse_and_zero_gradient(backend, case, device, main_dtype):
    inputs = make_inputs(case, main_dtype, device)
    blind = ~case.mask.visible(case.sq, case.sk, device).any(-1)
    results = forward_and_backward(backend, case, inputs)
    for name in ("out", "dq"):
        rows = getattr(results, name)[:, :, blind]
        assert torch.equal(rows, torch.zeros_like(rows)), name
    assert torch.equal(results.lse.isneginf(), blind.expand_as(results.lse))


@pytest.mark.parametrize("case", UNSEEN, ids=str)
def test_key_that_no_query_sees_gets_zero_gradients(backend, case, device, main_dtype):
    inputs = make_inputs(case, main_dtype, device)
    unseen = ~case.mask.visible(case.sq, case.sk, device).any(0)
    results = forward_and_backward(backend, case, inputs)
    for name in ("dk", "dv"):
        rows = getattr(results, name)[:, :, unseen]
        assert torch.equal(rows, torch.zeros_like(rows)), name


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("k", "v"), ("q", "v")], ids="_".join)
def test_gradient_of_some_inputs_is_the_same_as_with_all(backend, wanted, device, main_dtype):
    case = case_named("gqa_causal_odd_lengths")
    inputs = make_inputs(case, main_dtype, device)
    skip_if_refused(backend, problem_of(case, inputs).backward(lse_grad=False))
    tensors = {name: getattr(inputs, name).detach().requires_grad_(name in wanted) for name in "qkv"}
    forward(backend, case, list(tensors.values())).out.backward(inputs.dout)
    assert [name for name, tensor in tensors.items() if tensor.grad is not None] == list(wanted)
    every = dict(zip("qkv", forward_and_backward(backend, case, inputs)[2:], strict=True))
    got = [tensors[name].grad if name in wanted else every[name] for name in "qkv"]
    assert_gradients_within_budget(case, inputs, got)


@pytest.mark.parametrize(("need_dq", "need_dkv"), [(True, False), (False, True)], ids=["dq_alone", "dkv_alone"])
def test_backward_computes_what_is_needed_and_returns_none_for_the_rest(backend, need_dq, need_dkv, device, main_dtype):
    case = case_named("gqa_causal_odd_lengths")
    inputs = make_inputs(case, main_dtype, device)
    problem = problem_of(case, inputs)
    skip_if_refused(backend, problem.backward(lse_grad=False))
    out, lse = forward(backend, case, inputs)
    got = backend.backward(problem.backward(lse_grad=False), Saved(*inputs[:3], out, lse), inputs.dout, None,
                           need_dq=need_dq, need_dkv=need_dkv)
    assert [gradient is not None for gradient in got] == [need_dq, need_dkv, need_dkv]
    every = forward_and_backward(backend, case, inputs)[2:]
    assert_gradients_within_budget(case, inputs, [every[i] if got[i] is None else got[i] for i in range(3)])


def test_call_without_gradient_saves_nothing_and_gives_the_same(backend, device, main_dtype):
    case = case_named("gqa_causal_odd_lengths")
    inputs = make_inputs(case, main_dtype, device)
    plain = forward(backend, case, inputs)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    tracked = forward(backend, case, leaves)
    assert plain.out.grad_fn is None
    assert tracked.out.grad_fn is not None
    assert torch.equal(plain.out, tracked.out)
    assert torch.equal(plain.lse, tracked.lse)
