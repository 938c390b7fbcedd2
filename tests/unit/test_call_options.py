"""One description of a call: what is written anywhere else agrees with it."""

import dataclasses
import inspect
import typing

import pytest
import torch

import tilewise
from tilewise import api, decode
from tilewise.backends.base import Gradients, Needs
from tilewise.problem.decode import CacheOperands, DecodeOptions
from tilewise.problem.options import (
    DIFFERENTIABLE,
    PLAIN_FIELDS,
    RARE,
    RARE_PLACES,
    CallOptions,
    Operands,
    OperatorOptions,
    ScoreOptions,
    ScoreSettings,
    schema_of,
)

CALLS = {"attention": tilewise.attention, "attention_varlen": tilewise.attention_varlen, "explain": tilewise.explain,
         "attention_decode": tilewise.attention_decode, "explain_decode": decode.explain_decode}
TENSORS = {"attention": ("q", "k", "v"), "attention_varlen": ("q", "k", "v"), "explain": ("q", "k", "v"),
           "attention_decode": ("q", "k_cache", "v_cache"), "explain_decode": ("q", "k_cache", "v_cache")}
# Where a call takes less than the description says: another type, or no default.
NARROWER = {("attention_decode", "mask"): (tilewise.Mask | None, None),
            ("explain_decode", "mask"): (tilewise.Mask | None, None),
            ("attention_varlen", "cu_seqlens_q"): (torch.Tensor, inspect.Parameter.empty)}


def described(call):
    """Return type and default of each argument that a call takes by name."""
    types = typing.get_type_hints(CallOptions)
    return {name: NARROWER.get((call, name), (types[name], one.default)) for name, one in CallOptions.of(call).items()}


def written(function):
    types = typing.get_type_hints(function)
    return {one.name: (types[one.name], one.default) for one in inspect.signature(function).parameters.values()
            if one.kind is inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("call", CALLS)
def test_the_signature_of_a_call_is_as_described(call):
    assert written(CALLS[call]) == described(call)
    positional = [name for name, one in inspect.signature(CALLS[call]).parameters.items()
                  if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert tuple(positional) == TENSORS[call]


@pytest.mark.parametrize("call", ["attention", "attention_varlen"])
def test_each_overload_has_the_arguments_of_the_call(call):
    overloads = typing.get_overloads(getattr(api, call))
    assert len(overloads) == 3
    expected = described(call)
    del expected["return_aux"]
    for one in overloads:
        arguments = written(one)
        aux, default = arguments.pop("return_aux")
        assert arguments == expected
        returned = typing.get_type_hints(one)["return"]
        assert (default == ()) == (returned is torch.Tensor) == (aux == tuple[()])


def test_explain_takes_the_arguments_of_both_calls_in_the_order_described():
    taken = CallOptions.of("attention") | CallOptions.of("attention_varlen")
    assert set(CallOptions.of("explain")) == set(taken)
    for call in ("attention", "explain"):
        assert list(written(CALLS[call])) == list(CallOptions.of(call))
    assert CallOptions.of("explain_decode") == CallOptions.of("attention_decode")


def becomes(call):
    return {name for one in CallOptions.of(call).values() for name in one.metadata["becomes"]}


def test_arguments_become_all_that_the_operators_take_and_nothing_else():
    internal = {"float32_results"}  # of parts of a call, which tilewise.distributed makes
    assert becomes("explain") == {*Operands._fields, *OperatorOptions._fields} - internal
    band = {"left", "right", "alignment"}  # to decode, a mask is no more
    more = {"mask", "prefix", "sink_tokens", "chunk", "documents_q", "documents_k", "tiles_q", "tiles_k",
            "mask_function", "mask_tensors", "max_logit", "offset"}
    assert becomes("attention_decode") - more == {*CacheOperands._fields, *DecodeOptions._fields[1:], "backend"} | band
    assert dataclasses.fields(CallOptions)[0].name == DecodeOptions._fields[0] == "mask"


OPERATORS = {"attention_forward": (3, [Operands, OperatorOptions], 0),
             "attention_backward": (7, [Operands, OperatorOptions], 1),
             "attention_forward_plain": (3, [], 0), "attention_backward_plain": (7, [], 1)}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_takes_the_fields_in_their_order(name):
    before, described_by, behind = OPERATORS[name]
    arguments = [one.name for one in getattr(torch.ops.tilewise, name).default._schema.arguments]
    expected = [field for one in described_by for field in one._fields] or list(PLAIN_FIELDS)
    assert arguments[before:len(arguments) - behind] == expected


def test_a_schema_has_the_types_of_the_annotations():
    assert schema_of(OperatorOptions, ("scale", "left", "alignment", "dropout_p", "max_logit", "max_seqlen_q")) == (
        "float? scale, int? left, str? alignment, float dropout_p, bool max_logit, SymInt? max_seqlen_q")
    assert schema_of(Operands, ("bias", "score_tensors")) == "Tensor? bias, Tensor[] score_tensors"


def test_operands_with_a_gradient_are_those_of_the_backward_pass_in_its_order():
    assert tuple(f"d{name}" for name in DIFFERENTIABLE) == Gradients._fields[3:] == Needs._fields[2:]


def test_a_plain_calls_options_are_put_among_the_others():
    plain = (0.5, 1, 2, "top_left", True, "triton")
    options = OperatorOptions.of_plain(plain)
    assert tuple(getattr(options, name) for name in PLAIN_FIELDS) == plain
    assert options[RARE_PLACES] == RARE
    assert {name: getattr(options, name) for name in OperatorOptions._fields if name not in PLAIN_FIELDS} == {
        name: default for name, default in OperatorOptions._field_defaults.items() if name not in PLAIN_FIELDS}


def test_settings_of_scores_are_named_as_the_operators_options():
    longest = {"max_seqlen_q", "max_seqlen_k"}
    kept = set(ScoreSettings._fields) - {"longest"}
    assert kept == set(OperatorOptions._fields[RARE_PLACES]) - {"prefix", "sink_tokens", "chunk", "offset"} - longest
    assert kept - {"float32_results"} < set(ScoreOptions._fields)
