"""Options in twos: a few problems in which every two levels of every two options meet."""

import itertools
import random
from dataclasses import replace

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
from conformance.option_levels import EXCEPTIONS, contradict, levels
from tilewise.backends.base import Gradients
from tilewise.dispatch import get_backend
from tilewise.testing.cases import case_named
from tilewise.testing.configurations import draw_from
from tilewise.testing.inputs import call, make_inputs

# Streams of configurations.py that are drawn anew from one case to the next.
VARIED = ("mask", "alignment", "prefix", "sink_tokens", "chunk", "documents", "storage", "heads", "layout", "bias",
          "mask_tensor", "operand_dtype", "alibi", "sinks", "softcap", "dropout_p", "max_logit")
# All others are of this seed: two sequences of 33 queries and 37 keys, of which, where lengths are data, 28 and 33, and
# 13 and 30 take part; heads of 15 and 12; windows of 16 to the left and 11 to the right.
SIZES = 1525
# Levels that stay, or are no options.
NOT_PAIRED = ("bias along b", "bias along h", "mask_tensor along b", "mask_tensor along h", "dtype", "lse_grad",
              "shift", "placement", "batches", "lengths", "dims", "odd", "scale")


def _drawn(seeds):
    """Draw the configuration whose streams have these seeds, by name."""
    return draw_from(lambda name: random.Random(f"{seeds.get(name, SIZES)} {name}"), "tiny")


def _paired(configuration):
    return {name: level for name, level in levels(configuration).items() if name not in NOT_PAIRED}


def _pairs(configuration):
    """Every two (option, level) of a configuration."""
    return set(itertools.combinations(_paired(configuration).items(), 2))


def _possible_pairs(configurations):
    """Every two levels of every two options that a call can have at once."""
    values = {name: {_paired(one)[name] for one in configurations} for name in _paired(configurations[0])}
    return {pair for names in itertools.combinations(values, 2)
            for pair in itertools.product(*([(name, level) for level in values[name]] for name in names))
            if not contradict(*pair)}


def _even_draws(count):
    """Draw configurations in which each level of an option is as likely as the others of the same stream."""
    choices, seeds = random.Random(0), {}
    for name in VARIED:
        by_level = seeds[name] = {}
        for seed in range(100):
            by_level.setdefault(tuple(_paired(_drawn({name: seed})).items()), []).append(seed)
    draws = (_drawn({name: choices.choice(choices.choice([*own.values()])) for name, own in seeds.items()})
             for _ in itertools.count())
    return list(itertools.islice(filter(_tells, draws), count))


def _tells(configuration):
    """Whether the options change what comes out: exceptions are for some key or query, a softcap is near the scores."""
    case = configuration.case
    return all(getattr(case.mask, name) != 0 for name in EXCEPTIONS) and (case.softcap or 0.0) <= 10


def _covering(configurations):
    """Take configurations until all pairs are met: at each step that which meets most new pairs."""
    missing, taken = _possible_pairs(configurations), []
    pairs = [_pairs(one) for one in configurations]
    while missing:
        best = max(range(len(pairs)), key=lambda number: len(pairs[number] & missing))
        assert pairs[best] & missing, missing
        taken.append(configurations[best])
        missing -= pairs[best]
    return taken


CONFIGURATIONS = _covering(_even_draws(600))
CASES = [replace(one.case, name=f"pairs_{number}") for number, one in enumerate(CONFIGURATIONS)]


def test_every_two_levels_of_every_two_options_meet_in_few_cases():
    met = set().union(*map(_pairs, CONFIGURATIONS))
    assert _possible_pairs(CONFIGURATIONS) <= met
    counts = {name: len({_paired(one)[name] for one in CONFIGURATIONS}) for name in _paired(CONFIGURATIONS[0])}
    assert counts.pop("storage") == 6
    assert counts.pop("layout") == 7
    assert counts["right"] == 3
    assert min(counts.values()) == 2
    assert len(CASES) <= 48


def test_no_pair_of_options_is_met_by_a_case_too_small_to_tell():
    for case in CASES:
        assert (case.b, case.sq, case.d) == (2, 33, 15)
        assert min((case.sk, *(case.lengths_q or ()), *(case.lengths_k or ()))) >= 13


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
