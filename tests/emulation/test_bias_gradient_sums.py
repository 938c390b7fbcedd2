"""Gradient of a bias on dQ's way: where it is made there, where not, and that it is right in every launch."""

from dataclasses import replace

import pytest
import torch

from conformance.calls import assert_gradients_within_budget, forward_and_backward, operands_of, problem_of
from tilewise import attention, window
from tilewise.backends import triton
from tilewise.backends._support import bias_gradients
from tilewise.backends.base import Needs
from tilewise.kernels.triton.bias_gradient import BiasGradientSums
from tilewise.kernels.triton.launch import Launch
from tilewise.masks import causal, sink_tokens
from tilewise.support.caches import clear_caches
from tilewise.testing.cases import Case
from tilewise.testing.inputs import make_inputs

# More than a tile of 64 either way, the last one ragged, and whole tiles that a mask hides.
PLAIN = Case("plain", b=3, hq=2, hk=1, sq=70, sk=150, d=16, dv=24, bias="1hqk")
FIVE = replace(PLAIN, name="five_entries", b=5)
CASES = (
    PLAIN,
    FIVE,
    replace(PLAIN, name="one_entry", b=1),
    replace(PLAIN, name="two_entries", b=2, mask=causal("bottom_right"), alibi="h", dropout_p=0.3, softcap=4.0),
    replace(PLAIN, name="five_entries_padded", b=5, lengths_k=(20, 150, 0, 64, 7), mask=causal("bottom_right")),
    replace(PLAIN, name="two_entries_float32", b=2, operand_dtype="float32", mask=causal("top_left")),
    replace(PLAIN, name="float32", operand_dtype="float32", mask=causal("bottom_right") & window(20, 0)),
    replace(PLAIN, name="causal", mask=causal("top_left")),
    replace(PLAIN, name="sink_tokens", sq=150, mask=causal() & window(20, 0) & sink_tokens(3), softcap=4.0),
    replace(PLAIN, name="blind_queries", sq=150, sk=70, mask=causal("bottom_right"), alibi="h", sinks=True),
    replace(PLAIN, name="mask_tensor_dropout", mask_tensor="b11k", dropout_p=0.3),
    replace(PLAIN, name="documents", mask=causal("bottom_right"), documents="runs"),
    replace(PLAIN, name="padded", lengths_q=(70, 0, 33), lengths_k=(20, 150, 90), mask=causal("bottom_right")),
    replace(PLAIN, name="padded_float32", lengths_k=(20, 150, 0), operand_dtype="float32"),
    replace(PLAIN, name="of_entries", bias="bhqk"),
    replace(PLAIN, name="of_entries_causal", bias="bhqk", mask=causal("top_left"), operand_dtype="float32"),
    replace(PLAIN, name="of_entries_padded", bias="bhqk", lengths_q=(70, 0, 33), lengths_k=(20, 150, 90)),
    replace(PLAIN, name="of_sequences", bias="bhqk", lengths_q=(70, 0, 33), lengths_k=(20, 150, 90), packed="gaps"),
)
ELSEWHERE = (
    replace(PLAIN, name="shared_by_heads", bias="b1qk"),
    replace(PLAIN, name="shared_by_all", bias="11qk"),
    replace(PLAIN, name="shared_by_packed_sequences", lengths_q=(70, 0, 33), lengths_k=(20, 150, 90), packed="tight"),
)


@pytest.fixture
def dtype(device):
    return torch.float16 if device.type == "cpu" else torch.bfloat16


@pytest.fixture(params=["on_the_way", "by_its_own_kernel"])
def is_on_the_way(request, monkeypatch):
    """Either way where both can: on the way a launch need not fill the device."""
    found = bias_gradients.dbias_launches
    monkeypatch.setattr("tilewise.tuning.heuristics_triton.FILLING", 1)
    if request.param != "on_the_way":
        monkeypatch.setattr(bias_gradients, "dbias_launches", lambda *_: 0)
    clear_caches()
    yield bias_gradients.dbias_launches is found
    clear_caches()


def plan_of(case, device, dtype, needs):
    inputs = make_inputs(case, dtype, device)
    problem = problem_of(case, inputs, operands_of(case, inputs)).backward(lse_grad=False)
    strides = inputs.dout.stride()
    return triton._backward_plan(problem, (strides, strides, None), (True,) * 7, "ieee", needs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_made_either_way_is_the_oracles(case, is_on_the_way, device, dtype):
    plan = plan_of(case, device, dtype, Needs(dbias=True))
    assert isinstance(plan.dq, BiasGradientSums) == is_on_the_way
    assert (plan.dbias is None) == is_on_the_way
    inputs = make_inputs(case, dtype, device)
    got = forward_and_backward(triton.backend, case, inputs, "out_and_lse").gradients
    assert_gradients_within_budget(case, inputs, got, "out_and_lse")


def test_dq_has_the_same_bits_whichever_way_the_bias_has_its_gradient(monkeypatch, device, dtype):
    """The way depends on the batch's size, on which no bit of a deterministic call may depend."""
    monkeypatch.setattr("tilewise.tuning.heuristics_triton.FILLING", 1)
    inputs = make_inputs(PLAIN, dtype, device)
    found = []
    for entries in (bias_gradients.dbias_launches, lambda *_: 0):
        monkeypatch.setattr(bias_gradients, "dbias_launches", entries)
        clear_caches()
        found.append(forward_and_backward(triton.backend, PLAIN, inputs, deterministic=True).dq)
    clear_caches()
    assert torch.equal(*found)


@pytest.mark.parametrize("case", ELSEWHERE, ids=str)
def test_gradient_summed_over_more_than_the_batch_has_a_kernel_of_its_own(case, device, dtype):
    plan = plan_of(case, device, dtype, Needs(dbias=True))
    assert isinstance(plan.dq, Launch)
    assert isinstance(plan.dbias, Launch)


@pytest.mark.parametrize(("case", "is_wanted"), [(PLAIN, False), (replace(PLAIN, name="of_keys", bias="1h1k"), True)],
                         ids=str)
def test_bias_without_gradient_or_without_pairs_costs_no_launch(case, is_wanted, device, dtype):
    plan = plan_of(case, device, dtype, Needs(dbias=is_wanted))
    assert isinstance(plan.dq, Launch)
    assert plan.dbias is None


@pytest.mark.parametrize("shape", [(1, 1), (3, 1)], ids=["lists_of_all", "lists_of_entries"])
def test_lists_of_tiles_leave_no_hidden_pair_unwritten(shape, is_on_the_way, device):
    """Entries with lists of their own visit other tiles than one another."""
    case = replace(PLAIN, hq=1, sq=140, sk=270)
    q, k, v, dout, _ = make_inputs(case, torch.float32, device, requires_grad=True)
    bias = torch.linspace(-1, 1, 140 * 270, device=device).view(1, 1, 140, 270).requires_grad_()
    visible = torch.ones(*shape, 140, 270, dtype=torch.bool, device=device)
    for entry in range(shape[0]):
        visible[entry, :, :128, :128 + 64 * entry] = False
    mask = window(None, None) & visible
    want, got = (torch.autograd.grad(attention(q, k, v, mask=given, bias=bias, backend="triton"), bias, dout)[0]
                 for given in (mask, mask.tiled(140, 270)))
    assert not got[:, :, :128, :128].any()
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", [FIVE, replace(FIVE, name="padded", lengths_k=(20, 150, 0, 64, 7))], ids=str)
def test_gradients_have_the_same_bits_at_every_call(case, monkeypatch, device, dtype):
    monkeypatch.setattr("tilewise.tuning.heuristics_triton.FILLING", 1)
    clear_caches()
    inputs = make_inputs(case, dtype, device)
    found = [forward_and_backward(triton.backend, case, inputs) for _ in range(2)]
    clear_caches()
    assert all(torch.equal(*pair) for pair in zip(*(run.gradients for run in found), strict=True)
               if pair[0] is not None)


def sums_of(case, at_once, dtype=torch.float16):
    """Return what BiasGradientSums asked to be bound, what it launched (entry, pairs, earlier pairs), and its sum."""
    inputs = make_inputs(case, torch.float16, "cpu")
    problem = problem_of(case, inputs, operands_of(case, inputs)).backward(lse_grad=False)
    bound, launched = [], []

    def bind(entries):
        bound.append(entries)
        return lambda _q, pairs, earlier, entry, _modifiers: launched.append((entries, entry, pairs, earlier))

    pairs = torch.empty(problem.scores.bias.shape, dtype=dtype)
    BiasGradientSums(problem, case.b, at_once, bind)("q", pairs, None, None, "modifiers")
    return launched, pairs


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_sum_over_the_batch_is_kept_in_float32_and_needs_a_buffer_for_16_bits_alone(dtype):
    case = replace(PLAIN, operand_dtype="float32" if dtype is torch.float32 else "same")
    launched, pairs = sums_of(case, 1, dtype)
    assert [launch[:2] for launch in launched] == [(1, entry) for entry in range(case.b)]
    totals = [launch[2] for launch in launched[:-1]] + [launch[3] for launch in launched[1:]]
    assert all(total is totals[0] and total.dtype is torch.float32 for total in totals)
    assert launched[0][3] is None
    assert launched[-1][2] is pairs
    assert (totals[0] is pairs) == (dtype is torch.float32)


@pytest.mark.parametrize(("b", "at_once", "launches"), [
    (2, 2, [(2, 0)]), (3, 2, [(2, 0), (1, 2)]), (5, 2, [(2, 0), (2, 2), (1, 4)]), (6, 2, [(2, 0), (2, 2), (2, 4)]),
    (3, 3, [(3, 0)]), (2, 4, [(2, 0)])])
def test_entries_at_once_take_a_launch_together_and_the_last_one_the_rest(b, at_once, launches):
    launched, pairs = sums_of(replace(PLAIN, b=b), at_once)
    assert [launch[:2] for launch in launched] == launches
    assert launched[0][3] is None
    assert launched[-1][2] is pairs
    assert all(launch[2] is launched[0][2] for launch in launched[:-1])
    assert all(launch[3] is launched[0][2] for launch in launched[1:])


@pytest.mark.parametrize(("case", "is_alike"), [
    (PLAIN, True), (replace(PLAIN, mask_tensor="b11k"), True),
    (replace(PLAIN, lengths_k=(20, 150, 0)), False), (replace(PLAIN, documents="runs"), False),
], ids=["plain", "masks_of_entries", "padded", "documents_of_entries"])
def test_entries_are_taken_at_once_where_they_see_the_same_tiles(case, is_alike, monkeypatch, device, dtype):
    """Their loops are one; what hides pairs within a tile is each entry's own."""
    monkeypatch.setattr("tilewise.tuning.heuristics_triton.FILLING", 1)
    asked = []
    monkeypatch.setattr(bias_gradients, "entries_config", lambda *_: asked.append(True))
    clear_caches()
    plan_of(case, device, dtype, Needs(dbias=True))
    clear_caches()
    assert bool(asked) == is_alike
