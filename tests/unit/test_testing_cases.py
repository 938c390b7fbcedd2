import pytest
import torch

from tilewise.errors import InvalidInput
from tilewise.masks import Span, causal
from tilewise.testing.cases import CASES, Case, case_named


def test_names_are_unique_and_lookup_returns_the_very_case():
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case_named(str(case)) is case for case in CASES)


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(InvalidInput, match=r"no case is named 'ghost'.*mha_causal"):
        case_named("ghost")


@pytest.mark.parametrize(("change", "message"), [
    ({"layout": "bsdh"}, "layout is 'bsdh'"),
    ({"layout": "packed_kv", "dv": 32}, "needs d == dv"),
    ({"layout": "packed_qkv", "sk": 65}, "needs sq == sk"),
    ({"sk": 65, "mask": causal()}, "names no alignment"),
    ({"sk": 65, "alibi": "h"}, "names no alignment"),
    ({"alibi": "hb"}, r"alibi is 'hb'; allowed are \('', 'h', 'bh'\)"),
    ({"operand_dtype": "double"}, "operand_dtype is 'double'"),
    ({"bias": "qk"}, "bias is 'qk'; allowed is 'bhqk', with 1 in place of a letter"),
    ({"mask_tensor": "bhkq"}, "mask_tensor is 'bhkq'"),
    ({"softcap": -1.0}, "softcap is -1.0"),
    ({"dropout_p": 1.0}, "dropout_p is 1.0"),
])
def test_impossible_case_cannot_be_made(change, message):
    with pytest.raises(InvalidInput, match=message):
        Case("impossible", **change)


@pytest.mark.parametrize("aspect", [
    lambda c: c.hq == c.hk,
    lambda c: c.hq > c.hk > 1,
    lambda c: c.hq > c.hk == 1,
    lambda c: c.sq == 0,
    lambda c: c.sk == 0,
    lambda c: c.sq == 1,
    lambda c: c.sq > c.sk > 0 and c.mask == causal("bottom_right"),
    lambda c: c.sq < c.sk and c.mask == causal("top_left"),
    lambda c: c.d > c.dv,
    lambda c: c.d < c.dv,
    lambda c: c.scale is not None,
    lambda c: len(c.mask.band(c.sq, c.sk).keys_of(Span(0, c.sq), c.sk)) < c.sk,
    lambda c: c.sk and not c.mask.visible(c.sq, c.sk).any(-1).all(),
    lambda c: c.bias and c.mask.is_bounded and c.hq > c.hk,
    lambda c: c.bias and c.operand_dtype == "float32",
    lambda c: c.alibi and c.sq != c.sk and not c.mask.is_bounded,
    lambda c: c.mask_tensor and not c.mask.is_bounded,
    lambda c: c.sinks and c.sk == 0,
    lambda c: c.sinks and c.sk and not c.mask.visible(c.sq, c.sk).any(-1).all(),
    lambda c: c.bias and c.mask_tensor and c.alibi and c.sinks and c.softcap and c.dropout_p,
], ids=("mha", "gqa", "mqa", "no_queries", "no_keys", "one_query", "bottom_right_more_queries", "top_left_more_keys",
        "value_dim_smaller", "value_dim_larger", "scale", "unseen_keys", "blind_queries", "bias_masked_gqa",
        "wide_bias", "alibi_unmasked_unequal", "mask_tensor_alone", "sinks_without_keys", "sinks_blind", "everything"))
def test_cases_cover(aspect):
    assert any(aspect(case) for case in CASES)


def test_cases_cover_every_layout_and_head_dim_class():
    assert {case.layout for case in CASES} == {"bhsd", "bshd", "bhds", "packed_qkv", "packed_kv", "expanded", "moat"}
    assert {1, 16, 40, 64, 72, 80, 96, 128, 192, 256, 512, 576} <= {case.d for case in CASES}


OPTIONS = ("bias", "alibi", "mask_tensor", "sinks", "softcap", "dropout_p")


@pytest.mark.parametrize("option", OPTIONS)
def test_cases_cover_each_option_alone_with_a_group_of_heads_and_with_unequal_lengths(option):
    having = [case for case in CASES if getattr(case, option)]
    assert any(not any(getattr(case, other) for other in OPTIONS if other != option) for case in having)
    assert any(case.hq > case.hk for case in having)
    assert any(case.sq != case.sk for case in having)
    assert all(case.has_options for case in having)


def test_cases_cover_every_broadcast_of_a_bias():
    assert {"bhqk", "1hqk", "11qk", "b11k", "1hq1", "b111"} <= {case.bias for case in CASES}
    assert not case_named("mha").has_options


def test_cases_are_small_enough_for_the_interpreter():
    pairs = {case.name: case.b * case.hq * case.sq * case.sk for case in CASES}
    assert max(pairs.values()) <= 300 * 300 * 2, max(pairs, key=pairs.get)
    assert all(isinstance(case.mask.visible(case.sq, case.sk), torch.Tensor) for case in CASES)
