"""Parts of a sum: with float32_results a pass of 16-bit inputs writes out, or dq, dk and dv, in float32."""

from dataclasses import replace

import pytest
import torch

from tilewise.autograd.op import backward_op, forward_op
from tilewise.dispatch import get_backend
from tilewise.masks import Mask, causal
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPERANDS, Operands, OperatorOptions

DTYPES = {"reference": torch.bfloat16, "triton": torch.float16, "gluon": torch.bfloat16}
CAUSAL = causal("bottom_right")
NEEDS = [True, True, False, False, False]


def inputs_of(dtype, device, sq=70, sk=100, hq=2, hk=1, d=64):
    """Return q, k, v and dout, stored as (b, s, h, d)."""
    make = torch.Generator().manual_seed(0)
    return [torch.randn(2, rows, heads, d, generator=make).to(dtype).to(device).transpose(1, 2)
            for rows, heads in ((sq, hq), (sk, hk), (sk, hk), (sq, hq))]


def options_of(backend, mask=CAUSAL, *, float32_results):
    return OperatorOptions.of_mask(None, mask, backend=backend, float32_results=float32_results)


def refusal_of(backend, tensors, options, operands=NO_OPERANDS):
    """Return why a backend takes the call in one of the passes, or neither; None if it takes both."""
    problem = AttentionProblem.from_call(*tensors, operands, options)
    return get_backend(backend).why_not(problem) or get_backend(backend).why_not(problem.backward(lse_grad=False))


def run(tensors, options, operands=NO_OPERANDS):
    """Return out, lse and the gradients of q, k and v, the latter of what out and lse are in 16 bits."""
    q, k, v, dout = tensors
    out, lse = forward_op(q, k, v, *operands, *options)
    return [out, lse, *backward_op(q, k, v, out.to(q.dtype), lse, dout, None, *operands, *options, NEEDS)]


@pytest.mark.parametrize("sequences", ["dense", "packed"])
@pytest.mark.parametrize("backend", DTYPES)
def test_results_are_float32_and_16_bit_results_are_their_rounding(backend, sequences, device):
    tensors, operands = inputs_of(DTYPES[backend], device), NO_OPERANDS
    if sequences == "packed":
        tensors = [tensor[:1] for tensor in tensors]
        borders = [torch.tensor(own, dtype=torch.int32, device=device) for own in ((0, 30, 70), (0, 45, 100))]
        operands = Operands(cu_seqlens_q=borders[0], cu_seqlens_k=borders[1])
    wide, narrow = (options_of(backend, float32_results=wanted) for wanted in (True, False))
    reason = refusal_of(backend, tensors[:3], wide, operands)
    if reason is not None:
        pytest.skip(reason)
    got, rounded = run(tensors, wide, operands), run(tensors, narrow, operands)
    for number, (one, other) in enumerate(zip(got, rounded, strict=True)):
        assert one.dtype is torch.float32
        assert one.stride() == other.stride()
        if number != 2 or backend != "gluon":  # which sums dq in no fixed order
            assert torch.equal(one.to(other.dtype), other)
        else:
            torch.testing.assert_close(one.to(other.dtype), other)
    for one in (got[0], *got[2:]):
        assert not torch.equal(one, one.to(DTYPES[backend]).float()), "no bit more than in 16 bits"


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_where_nothing_is_seen_they_are_float32_zeros(backend, device):
    tensors = [tensor[:, :, :0] if place in (1, 2) else tensor
               for place, tensor in enumerate(inputs_of(DTYPES[backend], device))]
    options = options_of(backend, Mask(), float32_results=True)
    reason = refusal_of(backend, tensors[:3], options)
    if reason is not None:
        pytest.skip(reason)
    for result in run(tensors, options):
        assert result.dtype is torch.float32
        assert not result.nan_to_num(neginf=0.0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_inputs_have_the_problem_that_they_have_without(dtype, device):
    tensors = inputs_of(dtype, device)[:3]
    wide, plain = (AttentionProblem.from_call(*tensors, NO_OPERANDS, options_of(None, float32_results=wanted))
                   for wanted in (True, False))
    assert wide == plain
    assert wide.out_dtype is dtype


def test_a_problem_says_that_its_results_are_float32(device):
    problem = AttentionProblem.from_call(*inputs_of(torch.bfloat16, device)[:3], NO_OPERANDS,
                                         options_of(None, float32_results=True))
    assert "bfloat16 to float32" in str(problem)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_torch_refuses_them_by_name(direction, device):
    tensors = inputs_of(torch.bfloat16, device, sk=70, hk=2)[:3]
    problem = AttentionProblem.from_call(*tensors, NO_OPERANDS, options_of(None, float32_results=True))
    problem = replace(problem, direction=direction)
    assert get_backend("torch").why_not(problem) == (
        "writes results in the inputs' dtype, got torch.bfloat16 with results in float32")
    assert get_backend("torch").why_not(replace(problem, float32_results=False)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_traced_call_knows_their_dtype(dtype, device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    real, options = inputs_of(dtype, device), options_of("reference", float32_results=True)
    with FakeTensorMode() as mode:
        faked = run([mode.from_tensor(tensor) for tensor in real], options)
    for one, other in zip(faked, run(real, options), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
