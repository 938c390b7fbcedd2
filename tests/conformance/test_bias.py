"""Additive bias: a gradient as small as the bias, zero where pairs are hidden, whatever the bias holds there."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.calls import (
    assert_forward_within_budget,
    assert_gradients_within_budget,
    forward_and_backward,
    needs_of,
    operands_of,
    problem_of,
    skip_if_refused,
    visible_of,
)
from conformance.functions import REACH, relative, relative_twin
from tilewise import attention, explain, window
from tilewise.backends.base import Saved
from tilewise.functions import ScoreFunction
from tilewise.testing.cases import Case, case_named
from tilewise.testing.inputs import make_inputs

# Biases with an element that no visible pair reads.
PARTLY_HIDDEN = ("bias_shared_by_batch_causal", "bias_shared_by_batch_and_heads", "bias_blind_queries",
                 "bias_window_moat", "softcap_bias", "everything", "everything_moat_blind_queries",
                 "chunk_window_sink_tokens_prefix", "padded_window_bias", "packed_bias", "packed_bias_of_keys",
                 "packed_bias_of_all_sequences", "packed_everything")
VALUES = (float("nan"), float("inf"), float("-inf"))


def _hidden(case, bias):
    """Which elements of the bias reach hidden pairs alone."""
    visible = visible_of(case, bias.device)
    for dim, size in enumerate(bias.shape):
        if size == 1:
            visible = visible.any(dim, keepdim=True)
    return ~visible


# Where a blind query's bias is -inf, numpy remarks that -inf − (-inf) is NaN, before the pair is dropped.
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
@pytest.mark.parametrize("name", PARTLY_HIDDEN)
def test_bias_of_hidden_pairs_may_hold_anything_and_has_no_gradient(backend, name, device, main_dtype):
    """On the CPU, where a value takes seconds, each case has one of them, in turns."""
    case, first = case_named(name), PARTLY_HIDDEN.index(name) % len(VALUES)
    inputs = make_inputs(case, main_dtype, device)
    clean = operands_of(case, inputs)
    hidden = _hidden(case, clean.bias)
    assert hidden.any(), "the case hides no element of its bias"
    for value in VALUES[first:first + 1] if device.type == "cpu" else VALUES:
        planted = clean._replace(bias=clean.bias.masked_fill(hidden, value))
        results = forward_and_backward(backend, case, inputs, "out_and_lse", planted)
        assert_forward_within_budget(case, inputs, results[:2], clean)
        assert_gradients_within_budget(case, inputs, results.gradients, "out_and_lse", clean)
        assert not results.dbias[hidden].any()


def _skip_if_refused(backend, tensors, **options):
    """Skip with the backend's reason against a pass of the call."""
    reasons = explain(*tensors, **options).reasons
    for direction in ("forward", "backward"):
        if reasons[direction, backend.name] is not None:
            pytest.skip(reasons[direction, backend.name])


def _results(backend, tensors, **options):
    """out, lse and the gradients of q, k and v."""
    _skip_if_refused(backend, tensors, **options)
    out, lse = attention(*tensors, return_aux=("lse",), backend=backend.name, **options)
    return out, lse, *torch.autograd.grad((out.float().sum() + lse[lse > float("-inf")].sum()), tensors)


@pytest.fixture
def tensors(device, main_dtype):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 1, 200, 16, generator=generator).to(device, main_dtype).requires_grad_() for _ in range(3)]


# 130 keys are the first tile, and more, whatever the tile; one query is left without any.
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
@pytest.mark.parametrize("rows", [1, 200])
def test_a_bias_of_minus_infinity_hides_as_a_boolean_mask_does(backend, rows, tensors):
    keep = torch.ones(rows, 200, dtype=torch.bool, device=tensors[0].device)
    keep[:, :130] = False
    keep[rows // 2] &= rows == 1
    bias = torch.zeros(rows, 200, device=keep.device, dtype=tensors[0].dtype).masked_fill_(~keep, float("-inf"))
    wanted = _results(backend, tensors, mask=keep)
    torch.testing.assert_close(_results(backend, tensors, bias=bias), wanted)
    dbias, = torch.autograd.grad(attention(*tensors, bias=bias.requires_grad_(), backend=backend.name).sum(), bias)
    assert dbias.isfinite().all()
    assert not dbias[~keep].any()


@pytest.mark.parametrize("lowest", [False, True], ids=["minus_10000", "lowest"])
@pytest.mark.parametrize("d", [16, 128])
def test_rows_whose_every_bias_is_far_below_zero_spoil_no_others(backend, d, lowest, device, main_dtype):
    """As masks of padding are made of finite numbers: float32 cannot tell the scores of such a row from one another."""
    generator = torch.Generator().manual_seed(5)
    *tensors, dout = [torch.randn(1, 2, 200, d, generator=generator).to(device, main_dtype) for _ in range(4)]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    zeros, bias = torch.zeros(2, 1, 2, 200, 200, device=device, dtype=main_dtype)
    bias[:, :, 60:80] = torch.finfo(main_dtype).min if lowest else -1e4
    bias.requires_grad_()
    _skip_if_refused(backend, tensors, bias=bias)
    out, without = (attention(*tensors, bias=added, backend=backend.name) for added in (bias, zeros))
    of_all = torch.autograd.grad(out, (*tensors, bias), dout, retain_graph=True)
    assert all(gradient.isfinite().all() for gradient in of_all)
    dout[:, :, 60:80] = 0.0
    for got, wanted in zip(*(torch.autograd.grad(result, tensors, dout) for result in (out, without)), strict=True):
        unit = torch.finfo(main_dtype).eps * float(wanted.abs().max())  # dq may be summed in any order
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=2 * unit)


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
def test_a_score_function_of_minus_infinity_hides_as_a_window_does(backend, device, main_dtype):
    case = Case("window", b=1, hq=1, hk=1, sq=200, sk=200, d=16, dv=16, mask=window(20, 20))
    inputs = make_inputs(case, main_dtype, device)
    inputs = inputs._replace(dout=torch.ones_like(inputs.dout), dlse=torch.ones_like(inputs.dlse))
    table = torch.zeros(1, 2 * REACH + 1, device=device)
    table[:, :REACH - 20] = table[:, REACH + 21:] = float("-inf")  # by the query's place less the key's
    function = ScoreFunction(relative, relative_twin, tensors=(table,))
    tensors = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    out, lse, *gradients = _results(backend, tensors, score_function=function)
    assert_forward_within_budget(case, inputs, (out, lse))
    assert_gradients_within_budget(case, inputs, gradients, "out_and_lse")


class _Largest(TorchDispatchMode):
    """Notes the size of the largest storage, in elements, that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


# 400 positions are two of the reference's tiles along each side.
@pytest.mark.parametrize("pattern", ["b11k", "11q1", "b111"])
def test_gradient_of_a_broadcast_bias_needs_no_memory_by_the_number_of_pairs(backend, pattern, device):
    case = Case("broadcast", b=2, hq=1, hk=1, sq=400, sk=400, d=8, dv=8, bias=pattern)
    inputs = make_inputs(case, torch.float32, device)
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands)
    skip_if_refused(backend, problem.backward(lse_grad=False))
    with _Largest() as largest:  # below the operator, behind which no mode sees
        out, lse, _ = backend.forward(problem, *inputs[:3], operands)
        got = backend.backward(problem.backward(lse_grad=False), Saved(*inputs[:3], out, lse, operands), inputs.dout,
                               None, needs_of(operands))
    assert 0 < largest.elements < case.b * case.hq * case.sq * case.sk / 2
    assert got.dbias.untyped_storage().nbytes() == operands.bias.untyped_storage().nbytes()
    assert_gradients_within_budget(case, inputs, got, "out", operands)


def test_bias_of_one_number_changes_lse_alone(backend, device, main_dtype):
    case = case_named("bias_of_batches")
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    with_bias = forward_and_backward(backend, case, inputs, "out", operands)
    without = forward_and_backward(backend, case, inputs, "out", operands._replace(bias=None))
    torch.testing.assert_close(with_bias.out, without.out)
    torch.testing.assert_close(with_bias.lse, without.lse + operands.bias[..., 0].float(), rtol=1e-3, atol=1e-3)
