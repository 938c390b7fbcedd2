"""Forward and backward against float64, on every case."""

import pytest

from conformance.calls import (
    assert_forward_within_budget,
    assert_gradients_within_budget,
    forward,
    forward_and_backward,
    needs_of,
    operands_of,
    problem_of,
    skip_if_refused,
)
from tilewise.backends.base import Saved
from tilewise.dispatch import get_backend
from tilewise.masks import Mask, causal, window
from tilewise.testing.cases import Case, case_named
from tilewise.testing.inputs import make_inputs


def test_forward_stays_within_error_budget(backend, case, dtype, device):
    inputs = make_inputs(case, dtype, device)
    assert_forward_within_budget(case, inputs, forward(backend, case, inputs))


def test_gradients_stay_within_error_budget(backend, case, dtype, through, device):
    inputs = make_inputs(case, dtype, device)
    results = forward_and_backward(backend, case, inputs, through)
    assert_gradients_within_budget(case, inputs, results.gradients, through)


@pytest.mark.parametrize(("sq", "sk", "mask", "lengths"), [
    (1999, 1999, causal(), ""), (1870, 2100, causal("bottom_right"), ""), (2100, 1800, causal("top_left"), ""),
    (1000, 1000, Mask(), ""), (2112, 800, Mask(), ""), (2000, 2000, window(300, 40), ""),
    (2100, 2100, causal("bottom_right"), "padded"), (900, 2000, Mask(), "padded"),
    (2100, 2100, causal("bottom_right"), "tight"), (1100, 900, Mask(), "gaps"),
], ids=str)
def test_long_calls_of_narrow_heads_stay_within_error_budget(backend, sq, sk, mask, lengths, device, main_dtype):
    """On Hopper in tiles of 192 queries, of which one has none for some warpgroups: behind the last, before the first.

    On a CPU a sixteenth as long.
    """
    heads, share = (2, 16) if device.type == "cpu" else (32, 1)
    sq, sk = sq // share, sk // share
    own = {"lengths_q": (sq, sq - 130 // share, sq // 2), "lengths_k": (sk, sk * 3 // 4, sk)} if lengths else {}
    case = Case("long", b=3, hq=heads, hk=heads // 2, sq=sq, sk=sk, mask=mask, packed=lengths.removeprefix("padded"),
                **own)
    inputs = make_inputs(case, main_dtype, device)
    assert_forward_within_budget(case, inputs, forward(backend, case, inputs))


@pytest.mark.parametrize("name", ["gqa", "causal_bottom_right_more_queries", "window_both_sides", "moat_window",
                                  "sinks_blind_queries", "everything"])
def test_gradients_through_lse_alone_stay_within_error_budget(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    results = forward_and_backward(backend, case, inputs, "lse")
    assert_gradients_within_budget(case, inputs, results.gradients, "lse")
    assert not results.dv.any(), "v does not enter lse"


@pytest.mark.parametrize("name", ["gqa_causal_odd_lengths", "causal_bottom_right_more_queries", "moat_window",
                                  "everything"])
def test_backward_takes_the_out_and_lse_of_another_backend(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands)
    skip_if_refused(backend, problem.backward(lse_grad=False))
    out, lse, _ = get_backend("reference").forward(problem, *inputs[:3], operands)
    got = backend.backward(problem.backward(lse_grad=False), Saved(*inputs[:3], out, lse, operands), inputs.dout,
                           None, needs_of(operands))
    assert_gradients_within_budget(case, inputs, got)
