"""Dropout: the seed alone says which pairs are dropped, on every backend and in both directions."""

import pytest
import torch

from conformance.calls import problem_of, skip_if_refused
from tilewise import attention, explain
from tilewise.testing.cases import Case
from tilewise.testing.inputs import make_inputs
from tilewise.testing.oracle import dropout_keep

P = 0.3
# Every probability is 1/67, of which an identity in place of v shows each one.
CASE = Case("dropout_shown", b=2, hq=2, hk=1, sq=67, sk=67, d=16, dv=67, dropout_p=P)


def _probs(backend, inputs, **options):
    values = torch.eye(CASE.sk, dtype=inputs.q.dtype, device=inputs.q.device).expand_as(inputs.v)
    return attention(inputs.q * 0, inputs.k, values, dropout_p=P, backend=backend.name, **options)


@pytest.fixture
def inputs(backend, device, main_dtype):
    inputs = make_inputs(CASE, main_dtype, device)
    problem = problem_of(CASE, inputs)
    for side in (problem, problem.backward(lse_grad=False)):
        skip_if_refused(backend, side)
    return inputs


@pytest.mark.parametrize("seed", [0, 2**62 - 12345, -7], ids=str)
def test_forward_drops_the_pairs_that_the_oracle_drops(backend, seed, inputs, device):
    probs = _probs(backend, inputs, dropout_seed=seed)
    keep = dropout_keep(seed, (CASE.b, CASE.hq, CASE.sq, CASE.sk), P, device)
    assert torch.equal(probs != 0, keep)
    torch.testing.assert_close(probs.double(), keep.double() / (1 - P) / CASE.sk, rtol=0.01, atol=0.0)


def test_backward_drops_the_same_pairs(backend, inputs, device):
    """With an identity as dout, dv holds the transposed probabilities, summed over the heads of a group."""
    v = inputs.v.detach().requires_grad_()
    out = attention(inputs.q * 0, inputs.k, v, dropout_p=P, dropout_seed=5, backend=backend.name)
    out.backward(torch.eye(CASE.sq, dtype=out.dtype, device=device).expand_as(out))
    keep = dropout_keep(5, (CASE.b, CASE.hq, CASE.sq, CASE.sk), P, device)
    kept = keep.unflatten(1, (CASE.hk, -1)).sum(2).mT
    torch.testing.assert_close(v.grad.double(), kept.double() / (1 - P) / CASE.sk, rtol=0.01, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_a_pass_back_by_another_backend_drops_the_same_pairs(device, d):
    """On Hopper GPUs, where the call goes forward by triton and back by gluon."""
    q = torch.zeros(64, 16, d, d, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(64, 16, 512, d, device=device).to(q.dtype) for _ in range(2))
    found = explain(q, k, v, dropout_p=P, dropout_seed=9)
    if found.forward == found.backward:
        pytest.skip(f"both passes are by {found.forward}")
    out = attention(q, k, v.requires_grad_(), dropout_p=P, dropout_seed=9)
    dv, = torch.autograd.grad(out, v, torch.eye(d, dtype=q.dtype, device=device).expand_as(out))
    keep = dropout_keep(9, (64, 16, d, 512), P, device)
    torch.testing.assert_close(dv.double(), keep.mT.double() / (1 - P) / 512, rtol=0.01, atol=0.0)


def test_every_part_of_the_seed_matters_and_nothing_else(backend, inputs, device):
    first, again, as_tensor, low, high = (
        _probs(backend, inputs, dropout_seed=seed)
        for seed in (3, 3, torch.tensor([3], device=device), 4, 3 + 2**32))
    assert torch.equal(first, again)
    assert torch.equal(first, as_tensor)
    for other in (low, high):
        differing = ((first != 0) != (other != 0)).double().mean().item()
        assert differing == pytest.approx(2 * P * (1 - P), abs=0.02)


def test_without_a_seed_each_call_draws_its_own_from_the_default_generator(backend, inputs, device):
    calls = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            torch.manual_seed(7)
            calls.append((_probs(backend, inputs), _probs(backend, inputs)))
    (first, second), (again, _) = calls
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_dropped_pairs_stay_in_the_denominator(backend, inputs):
    lse = {seed: attention(*inputs[:3], dropout_p=P, dropout_seed=seed, return_aux=("lse",), backend=backend.name).lse
           for seed in (1, 2)}
    plain = attention(*inputs[:3], return_aux=("lse",), backend=backend.name).lse
    assert torch.equal(lse[1], lse[2])
    torch.testing.assert_close(lse[1], plain, rtol=1e-6, atol=1e-6)
