import pytest

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
    ({"documents": "shuffled"}, r"documents is 'shuffled'; allowed are \('', 'runs', 'interleaved', 'mixed'\)"),
    ({"packed": "yes"}, r"packed is 'yes'; allowed are \('', 'tight', 'gaps'\)"),
    ({"lengths_q": (3, 4)}, r"lengths_q is \(3, 4\); allowed are 1 lengths of 0 to 64"),
    ({"lengths_k": (65,)}, r"lengths_k is \(65,\); allowed are 1 lengths of 0 to 64"),
    ({"lengths_k": (-1,)}, r"lengths_k is \(-1,\); allowed are 1 lengths of 0 to 64"),
    ({"packed": "tight", "lengths_q": (3,)}, "lengths_k is None; packed sequences need both lengths"),
    ({"packed": "gaps", "lengths_q": (3,), "lengths_k": (3,), "layout": "packed_kv"},
     "layout is 'packed_kv'; packed sequences lie as 'bhsd', 'bshd', 'bhds' or 'moat'"),
    ({"documents": "mixed", "lengths_q": (3,)}, "documents are 'mixed' and lengths are data; allowed is one of them"),
    ({"lengths_q": (3,), "mask": causal()}, r"mask is causal\(\); where lengths are data it needs an alignment"),
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
    lambda c: not c.packed and c.lengths_q and c.lengths_k and 0 in c.lengths_q and 0 in c.lengths_k,
    lambda c: c.packed and 0 in c.lengths_q and 0 in c.lengths_k,
    lambda c: c.packed == "tight" and c.lengths_q == c.lengths_k,
    lambda c: c.packed and c.mask == causal("bottom_right") and any(map(int.__gt__, c.lengths_q, c.lengths_k)),
    lambda c: c.packed and c.bias and c.mask_tensor and c.alibi and c.sinks and c.softcap and c.dropout_p,
    lambda c: c.documents and c.packed,
    lambda c: c.documents and c.sq != c.sk and c.mask.left is not None,
    lambda c: c.mask.sink_tokens and len(c.mask.band(c.sq, c.sk).key_spans(Span(c.sq - 1, c.sq), c.sk)) == 2,
    lambda c: c.mask.prefix and c.mask.left is not None and c.sq != c.sk,
    lambda c: c.mask.chunk and c.mask.sink_tokens and c.mask.prefix and c.mask.left is not None,
], ids=("mha", "gqa", "mqa", "no_queries", "no_keys", "one_query", "bottom_right_more_queries", "top_left_more_keys",
        "value_dim_smaller", "value_dim_larger", "scale", "unseen_keys", "blind_queries", "bias_masked_gqa",
        "wide_bias", "alibi_unmasked_unequal", "mask_tensor_alone", "sinks_without_keys", "sinks_blind", "everything",
        "padded_zero_lengths", "packed_zero_lengths", "packed_equal_lengths", "packed_bottom_right_blind_queries",
        "packed_everything", "packed_documents", "documents_window", "sink_tokens_hole", "prefix_window",
        "every_exception"))
def test_cases_cover(aspect):
    assert any(aspect(case) for case in CASES)


def test_cases_cover_every_layout_and_head_dim_class():
    assert {case.layout for case in CASES} == {"bhsd", "bshd", "bhds", "packed_qkv", "packed_kv", "expanded", "moat",
                                               "sbhd", "shbd", "hbsd", "hsbd"}
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


def test_packed_sequences_lie_one_behind_the_other_and_padded_ones_in_their_entries():
    lengths = {"b": 3, "lengths_q": (4, 0, 2), "lengths_k": (1, 5, 3), "sq": 4, "sk": 6}
    tight, gaps, padded = (Case("places", packed=packed, **lengths) for packed in ("tight", "gaps", ""))
    assert (tight.spans("q"), tight.stored("q")) == ([Span(0, 4), Span(4, 4), Span(4, 6)], (1, 6))
    assert (gaps.spans("k"), gaps.stored("k")) == ([Span(0, 1), Span(3, 8), Span(11, 14)], (1, 22))
    assert (padded.spans("k"), padded.stored("k")) == ([Span(0, 1), Span(0, 5), Span(0, 3)], (3, 6))
    assert Case("whole", b=2, sq=5, sk=7).spans("k") == [Span(0, 7)] * 2


def test_dense_pairs_are_those_of_each_sequence_by_itself():
    lengths = {"b": 3, "sq": 4, "sk": 6, "lengths_q": (4, 0, 2), "lengths_k": (1, 5, 3)}
    assert Case("padded", **lengths).dense_pairs == Case("packed", packed="gaps", **lengths).dense_pairs == 4 + 2 * 3
    assert Case("whole", b=3, sq=4, sk=6).dense_pairs == 3 * 4 * 6
    assert Case("keys", b=2, sq=4, sk=6, lengths_k=(1, 5)).dense_pairs == 4 + 4 * 5


def test_mixed_documents_fill_each_entry_in_an_order_of_its_own():
    first, second = Case("mixed", b=2, sq=1000, sk=2000, documents="mixed").document_spans("q")
    assert [len(span) for span in first] == [128, 68, 238, 192, 49, 235, 30, 60]
    assert [len(span) for span in second] == [68, 238, 192, 49, 235, 30, 60, 128]
    assert [span.start for span in first[1:]] == [span.stop for span in first[:-1]]
    for length in (0, 1, 7, 4096):
        (spans,) = Case("mixed", sq=5, sk=length, documents="mixed").document_spans("k")
        assert (spans[0].start, spans[-1].stop, sum(map(len, spans))) == (0, length, length)


def test_lengths_of_documents_that_are_drawn_are_refused():
    with pytest.raises(InvalidInput, match="documents are 'runs'; allowed are 'mixed' where their lengths are asked"):
        Case("drawn", documents="runs").document_spans("q")


def test_only_padded_lengths_are_padded():
    lengths = {"lengths_q": (3,), "lengths_k": (3,)}
    cases = Case("padded", **lengths), Case("packed", packed="tight", **lengths), Case("whole")
    assert [case.is_padded for case in cases] == [True, False, False]


def test_only_a_packed_operand_needs_the_longest_lengths():
    lengths = {"sq": 4, "sk": 6, "lengths_q": (4,), "lengths_k": (1,)}
    assert Case("packed", packed="tight", bias="b11k", **lengths).settings.longest == (4, 6)
    assert Case("packed", packed="tight", sinks=True, **lengths).settings.longest == (None, None)
    assert Case("padded", bias="b11k", **lengths).settings.longest == (None, None)


def test_lengths_and_documents_are_options():
    """A case with them is compared whole, and its operands are drawn."""
    assert Case("lengths", lengths_k=(3,)).has_options
    assert Case("documents", documents="runs").has_options


LENGTHS_TOO = ("bias", "mask_tensor", "alibi", "sinks", "softcap", "dropout_p", "documents")


@pytest.mark.parametrize("option", LENGTHS_TOO)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_cases_cover_each_option_with_lengths(option, packed):
    assert any(getattr(case, option) and case.has_lengths and bool(case.packed) == packed for case in CASES)
