"""What every backend returns whatever the numbers: shapes, strides, dtypes, zeros for what sees nothing."""

import pytest
import torch

from conformance.calls import (
    TRAINABLE,
    assert_gradients_within_budget,
    forward,
    forward_and_backward,
    needs_of,
    operands_of,
    problem_of,
    skip_if_refused,
    stored,
    trainable,
    visible_of,
)
from tilewise.backends.base import Needs, Saved
from tilewise.problem import dense_strides
from tilewise.testing.cases import CASES, case_named
from tilewise.testing.inputs import make_inputs, padding_of

LAYOUTS = ("mha_odd_lengths", "gqa_causal_odd_lengths", "value_dim_odd", "storage_bhds", "storage_sbhd",
           "storage_shbd", "storage_hbsd", "storage_hsbd", "packed_qkv_gqa",
           "packed_kv", "expanded_heads_and_batch", "moat_window", "one_query", "no_queries", "no_keys", "no_batch",
           "bias_expanded", "bias_blind_queries", "everything", "everything_moat_blind_queries", "sinks_no_keys",
           "padded_everything", "packed_everything", "packed_bias_of_keys", "packed_causal_top_left", "packed_nothing")
BLIND = [case for case in CASES if not visible_of(case).any(-1).all()]


def _unseen(case, device="cpu"):
    """Which keys no query of their group sees: (b, hk, sk)."""
    return ~visible_of(case, device).any(2).unflatten(1, (case.hk, -1)).any(2)


UNSEEN = [case for case in CASES if _unseen(case).any()]


def _strides(shape, strides):
    """Strides of the dims that have more than one element: the others address nothing."""
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1] if 0 not in shape else []


@pytest.mark.parametrize("name", LAYOUTS)
def test_results_have_the_promised_shape_strides_and_dtype(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    problem = problem_of(case, inputs)
    results = forward_and_backward(backend, case, inputs)
    batch, positions = case.stored("q")
    assert results.out.shape == (batch, case.hq, positions, case.dv)
    assert _strides(results.out.shape, results.out.stride()) == _strides(results.out.shape, problem.out_strides)
    assert results.lse.shape == (batch, case.hq, positions)
    assert results.lse.is_contiguous()
    assert results.lse.dtype is torch.float32
    operands = operands_of(case, inputs)
    for name in TRAINABLE:
        gradient, operand = getattr(results, f"d{name}"), getattr(operands, name)
        assert (gradient is None) == (operand is None)
        if gradient is not None:
            assert (gradient.shape, gradient.dtype, gradient.device) == (operand.shape, operand.dtype, operand.device)
            assert gradient.is_contiguous()
    for result, like in ((results.out, inputs.q), *zip(results.gradients[:3], inputs[:3], strict=True)):
        assert result.dtype is like.dtype
        assert result.device == like.device
    for gradient, like in zip(results.gradients[:3], inputs[:3], strict=True):
        assert gradient.shape == like.shape
        promised = dense_strides(like.shape, like.stride())
        assert _strides(like.shape, gradient.stride()) == _strides(like.shape, promised)


@pytest.mark.parametrize("name", ["gqa_causal_odd_lengths", "window_hides_whole_tiles", "packed_qkv_gqa",
                                  "everything", "padded_window_bias", "packed_everything"])
def test_inputs_are_only_read(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    forward_and_backward(backend, case, inputs, "out", operands)
    for tensor, untouched in zip(inputs, make_inputs(case, main_dtype, device), strict=True):
        torch.testing.assert_close(tensor, untouched, rtol=0, atol=0, equal_nan=True)
    for operand, untouched in zip(operands.alone, operands_of(case, inputs).alone, strict=True):
        assert operand is untouched is None or torch.equal(operand, untouched)


@pytest.mark.parametrize("case", BLIND, ids=str)
def test_blind_query_gives_zero_output_zero_gradient_and_no_other_lse_than_the_sinks(backend, case, device, main_dtype):
    inputs = make_inputs(case, main_dtype, device)
    padding = padding_of(case, "q", device)[:, None].expand(-1, case.hq, -1)
    seeing = stored(case, visible_of(case, device).any(-1), "q")
    results = forward_and_backward(backend, case, inputs)
    for name in ("out", "dq"):
        rows = getattr(results, name)[~seeing]
        assert torch.equal(rows, torch.zeros_like(rows)), name
    assert torch.equal(results.lse.isneginf(), padding if case.sinks else ~seeing)
    assert results.lse[~padding if case.sinks else seeing].isfinite().all()


@pytest.mark.parametrize("case", UNSEEN, ids=str)
def test_key_that_no_query_sees_gets_zero_gradients(backend, case, device, main_dtype):
    inputs = make_inputs(case, main_dtype, device)
    unseen = ~stored(case, ~_unseen(case, device), "k")
    results = forward_and_backward(backend, case, inputs)
    for name in ("dk", "dv"):
        rows = getattr(results, name)[unseen]
        assert torch.equal(rows, torch.zeros_like(rows)), name


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("k", "v"), ("q", "v"), ("bias",), ("alibi_slopes",),
                                    ("sinks",), ("q", "bias"), ("v", "alibi_slopes", "sinks")], ids="_".join)
def test_gradient_of_some_inputs_is_the_same_as_with_all(backend, wanted, device, main_dtype):
    case = case_named("everything" if set(wanted) & set(TRAINABLE) else "gqa_causal_odd_lengths")
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    skip_if_refused(backend, problem_of(case, inputs, operands).backward(lse_grad=False))
    tensors = {name: getattr(inputs, name).detach() for name in "qkv"} | trainable(operands)
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in wanted)
    qkv, others = list(tensors.values())[:3], {name: tensors[name] for name in tensors if name in TRAINABLE}
    forward(backend, case, qkv, operands._replace(**others)).out.backward(inputs.dout)
    assert [name for name, tensor in tensors.items() if tensor.grad is not None] == list(wanted)
    every = forward_and_backward(backend, case, inputs).gradients
    assert_gradients_within_budget(case, inputs, every._replace(**{f"d{name}": tensors[name].grad for name in wanted}))


@pytest.mark.parametrize("needs", [Needs(True, False), Needs(False, True), Needs(False, False, True),
                                   Needs(False, False, False, True), Needs(False, False, False, False, True)],
                         ids=["dq_alone", "dkv_alone", "dbias_alone", "dalibi_slopes_alone", "dsinks_alone"])
def test_backward_computes_what_is_needed_and_returns_none_for_the_rest(backend, needs, device, main_dtype):
    case = case_named("everything" if any(needs[2:]) else "gqa_causal_odd_lengths")
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands).backward(lse_grad=False)
    skip_if_refused(backend, problem)
    saved = Saved(*inputs[:3], *forward(backend, case, inputs, operands), operands)
    got = backend.backward(problem, saved, inputs.dout, None, needs)
    assert [gradient is not None for gradient in got] == [needs.dq, needs.dkv, *needs[1:]]
    every = backend.backward(problem, saved, inputs.dout, None, needs_of(operands))
    assert_gradients_within_budget(case, inputs, [b if a is None else a for a, b in zip(got, every, strict=True)])


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
