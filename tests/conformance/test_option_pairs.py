"""Options in twos: a few problems in which every two levels of every two options meet."""

import itertools
import random

import pytest
import torch

from conformance.calls import (
    assert_forward_within_budget,
    assert_gradients_within_budget,
    backpropagate,
    forward_and_backward,
    operands_of,
    problem_of,
    trainable,
)
from tilewise.backends.base import Gradients
from tilewise.dispatch import get_backend
from tilewise.masks import Mask, causal, chunk, prefix, sink_tokens, window
from tilewise.testing.cases import Case, case_named
from tilewise.testing.inputs import call, make_inputs

_LENGTHS = {"lengths_q": (35, 20), "lengths_k": (13, 40)}
SEQUENCES = {"dense": {}, "padded": _LENGTHS, "padded_keys": {"lengths_k": (13, 40)},
             "tight": _LENGTHS | {"packed": "tight"}, "gaps": _LENGTHS | {"packed": "gaps"}}
LEVELS = {
    "mask": (window(None, None, "bottom_right"), causal("bottom_right"), window(9, 4, "top_left")),
    "exception": (Mask(), prefix(11), sink_tokens(3), chunk(13)),
    "documents": ("", "runs", "interleaved"),
    "sequences": tuple(SEQUENCES),
    "hk": (2, 1),
    "layout": ("bhsd", "bshd", "bhds", "moat"),
    "bias": ("", "bhqk", "b11k", "1hq1"),
    "operand_dtype": ("same", "float32"),
    "mask_tensor": ("", "b1qk", "1h1k"),
    "alibi": ("", "h", "bh"),
    "sinks": (False, True),
    "softcap": (None, 3.0),
    "dropout_p": (0.0, 0.3),
}


def _pairs(chosen):
    """Every two (option, level) of a choice of levels."""
    return set(itertools.combinations(chosen.items(), 2))


def _covering_choices(seed):
    """Draw choices until all pairs are met: at each step, of 50 random ones that which meets most new pairs."""
    draw = random.Random(seed)
    missing = {pair for names in itertools.combinations(LEVELS, 2)
               for pair in itertools.product(*([(name, level) for level in LEVELS[name]] for name in names))}
    choices = []
    while missing:
        drawn = [{name: draw.choice(levels) for name, levels in LEVELS.items()} for _ in range(50)]
        choices.append(max(drawn, key=lambda choice: len(_pairs(choice) & missing)))
        missing -= _pairs(choices[-1])
    return choices


def _case(number, choice):
    fields = {name: level for name, level in choice.items() if name not in ("exception", "sequences")}
    fields |= SEQUENCES[choice["sequences"]] | {"mask": choice["mask"] & choice["exception"]}
    return Case(f"pairs_{number}", b=2, hq=2, sq=35, sk=40, d=16, dv=16, **fields)


CHOICES = _covering_choices(seed=1)
CASES = [_case(i, choice) for i, choice in enumerate(CHOICES)]


def test_every_two_levels_of_every_two_options_meet_in_few_cases():
    met = set().union(*map(_pairs, CHOICES))
    for one, other in itertools.combinations(LEVELS, 2):
        for levels in itertools.product(LEVELS[one], LEVELS[other]):
            assert ((one, levels[0]), (other, levels[1])) in met
    assert len(CASES) <= 32


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_no_option_is_a_reason_to_refuse(name, device):
    backend = get_backend(name)
    plain = case_named("mha")
    reason = backend.why_not(problem_of(plain, make_inputs(plain, torch.float32, device)))
    if reason is not None:
        pytest.skip(reason)
    for case in CASES:
        problem = problem_of(case, make_inputs(case, torch.float32, device), max_logit=True)
        assert backend.why_not(problem) is None
        assert backend.why_not(problem.backward(lse_grad=True)) is None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairs_of_options_stay_within_error_budget(backend, case, device):
    inputs = make_inputs(case, torch.float32, device)
    results = forward_and_backward(backend, case, inputs, "out_and_lse")
    assert_forward_within_budget(case, inputs, results[:2])
    assert_gradients_within_budget(case, inputs, results.gradients, "out_and_lse")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairs_of_options_stay_within_error_budget_in_a_call_to_be_differentiated_twice(case, device):
    inputs = make_inputs(case, torch.float32, device)
    operands = operands_of(case, inputs)
    given = trainable(operands)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    result = call(case, leaves, operands._replace(**given), return_aux=("lse",), double_backward=True)
    dq, dk, dv, *others = backpropagate(result, [*leaves, *given.values()], inputs, "out_and_lse")
    assert_forward_within_budget(case, inputs, result)
    assert_gradients_within_budget(case, inputs, Gradients(dq, dk, dv, **{
        f"d{name}": other for name, other in zip(given, others, strict=True)}), "out_and_lse")
