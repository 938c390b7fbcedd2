"""Masks: their meaning, their tile ranges against the dense mask, their pictures, their messages."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import attention
from tilewise.errors import InvalidInput
from tilewise.functions import MaskFunction
from tilewise.masks import (
    ALIGNMENTS,
    Band,
    Mask,
    Span,
    TensorMask,
    causal,
    chunk,
    documents,
    prefix,
    sink_tokens,
    window,
)
from tilewise.testing.strategies import LENGTHS, masks, spans


def _indices(flags):
    return flags.nonzero().flatten().tolist()


def _positions(*spans):
    return [i for span in spans for i in range(span.start, span.stop)]


def _filled(places):
    """From the first to the last."""
    return list(range(places[0], places[-1] + 1)) if places else []


@st.composite
def tiles(draw):
    """A mask with lengths put in, the dense mask, and a span of queries."""
    mask, query_length, key_length = draw(masks()), draw(LENGTHS), draw(LENGTHS)
    return mask.band(query_length, key_length), mask.visible(query_length, key_length), draw(spans(query_length))


# Masks of so many kinds need more draws than the suite's usual number.
@settings(max_examples=300)
@given(tiles())
def test_key_spans_of_a_span_are_exactly_the_keys_that_one_of_its_queries_sees(tile):
    band, visible, queries = tile
    seen = _indices(visible[queries.start:queries.stop].any(0))
    found = band.key_spans(queries, visible.shape[1])
    assert _positions(*found) == seen
    assert len(found) == 1 or all(len(span) for span in found)
    assert _positions(band.keys_of(queries, visible.shape[1])) == _filled(seen)


@settings(max_examples=300)
@given(tiles())
def test_shared_keys_of_a_span_are_exactly_those_that_all_of_its_queries_see_but_for_far_sink_tokens(tile):
    band, visible, queries = tile
    rows = visible[queries.start:queries.stop]
    shared = _indices(rows.all(0)) if len(rows) else []
    found = _positions(band.shared_keys_of(queries, visible.shape[1]))
    assert found in (shared, [key for key in shared if key >= (band.sink_tokens or 0)])


@settings(max_examples=300)
@given(masks(), LENGTHS, LENGTHS, st.data())
def test_queries_of_a_span_of_keys_are_those_from_the_first_to_the_last_that_sees_one(mask, query_length, key_length,
                                                                                      data):
    keys = data.draw(spans(key_length))
    visible = mask.visible(query_length, key_length)[:, keys.start:keys.stop]
    found = mask.band(query_length, key_length).queries_of(keys, query_length)
    assert _positions(found) == _filled(_indices(visible.any(1)))


def test_sink_tokens_leave_a_hole_unless_the_window_reaches_them():
    band = (causal() & window(9, 0) & sink_tokens(4)).band(100, 100)
    assert band.key_spans(Span(50, 60), 100) == (Span(0, 4), Span(41, 60))
    assert band.key_spans(Span(13, 60), 100) == (Span(0, 60),)
    assert band.shared_keys_of(Span(50, 55), 100) == Span(45, 51)
    assert band.queries_of(Span(3, 9), 100) == Span(3, 100)
    assert band.queries_of(Span(4, 9), 100) == Span(4, 18)


def test_queries_past_the_last_key_see_its_sink_tokens_alone():
    """The empty window behind the hole once stretched keys_of past the keys there are."""
    band = (window(2, 0, "top_left") & sink_tokens(1)).band(120, 50)
    assert band.key_spans(Span(100, 120), 50) == (Span(0, 1),)
    assert band.keys_of(Span(100, 120), 50) == Span(0, 1)


@given(masks(), LENGTHS, LENGTHS)
def test_visible_pairs_counts_the_dense_mask(mask, query_length, key_length):
    pairs = mask.band(query_length, key_length).visible_pairs(query_length, key_length)
    assert pairs == int(mask.visible(query_length, key_length).sum())


def test_pairs_of_very_many_queries_are_counted_without_looking_at_each():
    length, width = 2 ** 40, 4096
    assert causal().band(length, length).visible_pairs(length, length) == length * (length + 1) // 2
    assert (causal() & window(width - 1, 0)).band(length, length).visible_pairs(length, length) == (
        length * width - width * (width - 1) // 2)


@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from(ALIGNMENTS), LENGTHS, LENGTHS)
def test_dense_mask_follows_the_definition_pair_by_pair(left, right, alignment, query_length, key_length):
    offset = key_length - query_length if alignment == "bottom_right" else 0
    visible = window(left, right, alignment).visible(query_length, key_length)
    expected = [[i + offset - left <= j <= i + offset + right for j in range(key_length)] for i in range(query_length)]
    assert visible.tolist() == expected


@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from(ALIGNMENTS), st.data())
def test_an_integer_alignment_is_the_offset(left, right, alignment, data):
    query_length, key_length = (data.draw(st.integers(0, 20)) for _ in range(2))
    offset = data.draw(st.integers(-25, 25))
    mask = window(left, right, offset)
    assert mask.offset(query_length, key_length) == offset
    expected = [[i + offset - left <= j <= i + offset + right for j in range(key_length)] for i in range(query_length)]
    assert mask.visible(query_length, key_length).tolist() == expected
    corner = window(left, right, key_length - query_length)
    assert torch.equal(corner.visible(query_length, key_length),
                       window(left, right, "bottom_right").visible(query_length, key_length))


def test_an_offset_of_zero_is_the_top_left_corner():
    assert causal(0) == causal("top_left")
    assert str(causal(-3) & chunk(2)) == "causal(alignment=-3) & chunk(2)"


@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from(ALIGNMENTS), st.data())
def test_exceptions_follow_the_definition_pair_by_pair(left, right, alignment, data):
    query_length, key_length = (data.draw(st.integers(0, 20)) for _ in range(2))
    first, sinks, length = (data.draw(st.integers(1, 12)) for _ in range(3))
    offset = key_length - query_length if alignment == "bottom_right" else 0
    # A prefix comes with causal(), whose right bound is 0.
    for mask, kept_right, kept, kept_left, same in (
        (prefix(first) & window(left, None, alignment), 0, first, 0, None),
        (window(left, right, alignment) & sink_tokens(sinks), right, 0, sinks, None),
        (window(left, right, alignment) & chunk(length), right, 0, 0, length),
        (prefix(first, alignment) & window(left, 0) & sink_tokens(sinks) & chunk(length), 0, first, sinks, length),
    ):
        expected = [[(j >= i + offset - left or j < kept_left) and (j <= i + offset + kept_right or j < kept)
                     and (same is None or (i + offset) // same == j // same) for j in range(key_length)]
                    for i in range(query_length)]
        assert mask.visible(query_length, key_length).tolist() == expected


@given(st.sampled_from(["prefix", "sink_tokens"]), st.none() | st.integers(0, 9), st.none() | st.integers(0, 9))
def test_and_keeps_the_exceptions_of_both_and_the_shorter_where_both_have_one(field, one, other):
    lengths = [value for value in (one, other) if value is not None]
    joined = Mask(3, 0, **{field: one}) & Mask(5, 0, **{field: other})
    assert joined == Mask(3, 0, **{field: min(lengths, default=None)})


def test_integers_of_numpy_are_integers():
    made = window(np.int64(3), np.int32(0)) & prefix(np.int64(2)) & sink_tokens(np.uint8(1)) & chunk(np.int64(4))
    assert made == window(3, 0) & prefix(2) & sink_tokens(1) & chunk(4)
    assert all(type(getattr(made, name)) is int for name in ("left", "right", "prefix", "sink_tokens", "chunk"))
    assert type(Mask(prefix=np.int64(2)).prefix) is int
    with pytest.raises(InvalidInput, match=r"window: left is np.int64\(-1\)"):
        window(np.int64(-1), 0)


def test_a_side_that_no_tensor_reaches_is_no_bound():
    assert window(3, 2**31 - 1) == window(3, 2**63) == window(3, None) == Mask(3, 2**31 - 1)
    assert window(2**30 - 1, 0).left == 2**30 - 1


@pytest.mark.parametrize("make", [prefix, sink_tokens, chunk])
def test_a_count_that_no_tensor_reaches_is_one_that_kernels_can_add_to(make):
    """A chunk of 2³¹ − 1 passed 32 bits where queries stand before the first key: dK and dV read out of bounds."""
    assert make(2**31 - 1) == make(2**63) == make(2**30) != make(2**30 - 1)


@pytest.mark.parametrize(("one", "other", "length"), [(4, 12, 4), (12, 4, 4), (6, 6, 6), (1, 5, 1)])
def test_chunks_inside_chunks_are_the_shorter_ones(one, other, length):
    joined = chunk(one) & chunk(other)
    assert joined == chunk(length)
    assert torch.equal(joined.visible(30, 30), chunk(one).visible(30, 30) & chunk(other).visible(30, 30))


@given(masks(), masks(), LENGTHS, LENGTHS)
def test_and_of_plain_bands_hides_what_either_hides(a, b, query_length, key_length):
    a, b = (replace(mask, prefix=None, sink_tokens=None, chunk=None) for mask in (a, b))
    if a.alignment and b.alignment and a.alignment != b.alignment:
        with pytest.raises(InvalidInput, match="a mask has one alignment"):
            _ = a & b
        return
    both = (a & b).visible(query_length, key_length)
    # A mask that hides nothing has no alignment of its own: any lengths fit it.
    assert torch.equal(both, a.visible(query_length, key_length) & b.visible(query_length, key_length))


def test_alignments_agree_where_lengths_are_equal():
    unnamed = causal().visible(7, 7)
    assert torch.equal(unnamed, causal("top_left").visible(7, 7))
    assert torch.equal(unnamed, causal("bottom_right").visible(7, 7))
    assert torch.equal(unnamed, torch.ones(7, 7, dtype=torch.bool).tril())


def test_window_keeps_both_ends_and_the_diagonal():
    assert window(2, 1).visible(9, 9)[4].tolist() == [False, False, True, True, True, True, False, False, False]


def test_empty_span_sees_no_key():
    band = window(3, 3).band(8, 8)
    assert len(band.keys_of(Span(4, 4), 8)) == 0
    assert len(band.shared_keys_of(Span(4, 4), 8)) == 0


def test_span_that_ends_before_it_starts_is_empty():
    assert len(Span(5, 2)) == 0


@pytest.mark.parametrize(("mask", "text"), [
    (Mask(), "no mask"),
    (window(None, None), "no mask"),
    (causal(), "causal()"),
    (causal("bottom_right"), "causal(alignment='bottom_right')"),
    (window(3, 0), "causal() & window(3, 0)"),
    (causal("top_left") & window(3, None), "causal(alignment='top_left') & window(3, 0)"),
    (window(3, 5), "window(3, 5)"),
    (window(None, 5, "top_left"), "window(None, 5, alignment='top_left')"),
    (prefix(7, "top_left"), "causal(alignment='top_left') & prefix(7)"),
    (causal() & window(9, 0) & sink_tokens(4), "causal() & window(9, 0) & sink_tokens(4)"),
    (sink_tokens(4), "sink_tokens(4)"),
    (chunk(8, "bottom_right"), "chunk(8, alignment='bottom_right')"),
    (causal("bottom_right") & chunk(8), "causal(alignment='bottom_right') & chunk(8)"),
    (prefix(3) & window(9, 0) & chunk(64) & sink_tokens(2),
     "causal() & window(9, 0) & chunk(64) & prefix(3) & sink_tokens(2)"),
])
def test_mask_prints_as_what_it_is(mask, text):
    assert str(mask) == text


@given(masks())
def test_printed_mask_evaluates_to_the_mask(mask):
    if not mask.is_bounded:
        assert str(mask) == ("no mask" if mask.sink_tokens is None else f"sink_tokens({mask.sink_tokens})")
        return
    makers = {make.__name__: make for make in (causal, window, prefix, sink_tokens, chunk)}
    assert eval(str(mask), makers) == mask


def test_masks_with_equal_parts_are_equal_and_hash_alike():
    a, b = causal("top_left") & window(4, None), window(4, 0, "top_left")
    assert a == b
    assert hash(a) == hash(b)
    assert a != causal("top_left")


def test_pictures_show_both_corners():
    assert causal("top_left").show(3, 5) == "■ · · · ·\n■ ■ · · ·\n■ ■ ■ · ·"
    assert causal("bottom_right").show(3, 5) == "■ ■ ■ · ·\n■ ■ ■ ■ ·\n■ ■ ■ ■ ■"
    assert (causal() & window(1, 0)).show(3, 3) == "■ · ·\n■ ■ ·\n· ■ ■"
    assert prefix(2).show(4, 4) == "■ ■ · ·\n■ ■ · ·\n■ ■ ■ ·\n■ ■ ■ ■"
    assert (window(1, 0) & sink_tokens(1)).show(4, 4) == "■ · · ·\n■ ■ · ·\n■ ■ ■ ·\n■ · ■ ■"
    assert chunk(2).show(4, 4) == "■ ■ · ·\n■ ■ · ·\n· · ■ ■\n· · ■ ■"
    assert (chunk(2, "bottom_right") & causal()).show(2, 4) == "· · ■ ·\n· · ■ ■"


def test_unequal_lengths_without_an_alignment_raise_and_show_both_pictures():
    with pytest.raises(InvalidInput) as caught:
        causal().band(70, 133)
    assert str(caught.value) == (
        "mask is causal() and names no alignment, but q has 70 positions and k has 133: the mask is ambiguous. "
        "Pass alignment='top_left' (torch's is_causal) or 'bottom_right' (flash-attn, decoding with a cache):\n"
        "  top_left       bottom_right\n"
        "  ■ · · · ·      ■ ■ ■ · ·\n"
        "  ■ ■ · · ·      ■ ■ ■ ■ ·\n"
        "  ■ ■ ■ · ·      ■ ■ ■ ■ ■"
    )


def test_ambiguity_message_draws_more_queries_where_there_are_more_queries():
    with pytest.raises(InvalidInput) as caught:
        window(9, 0).band(5000, 4)
    assert str(caught.value).endswith(
        "  top_left       bottom_right\n"
        "  ■ · ·          · · ·\n"
        "  ■ ■ ·          · · ·\n"
        "  · ■ ■          ■ · ·\n"
        "  · · ■          ■ ■ ·\n"
        "  · · ·          · ■ ■"
    )


@pytest.mark.parametrize(("mask", "top_left", "bottom_right"), [
    (prefix(400), ["■ · · · ·", "■ ■ · · ·", "■ ■ ■ · ·"], ["■ ■ ■ · ·", "■ ■ ■ ■ ·", "■ ■ ■ ■ ■"]),
    (window(99, 0) & sink_tokens(30), ["■ · · · ·", "■ ■ · · ·", "■ ■ ■ · ·"],
     ["■ ■ ■ · ·", "■ · ■ ■ ·", "■ · · ■ ■"]),
    (chunk(8192), ["■ ■ · · ·", "■ ■ · · ·", "· · ■ ■ ·"], ["· · ■ ■ ·", "· · ■ ■ ·", "· · · · ■"]),
], ids=str)
def test_ambiguity_message_draws_exceptions_too(mask, top_left, bottom_right):
    with pytest.raises(InvalidInput) as caught:
        mask.band(4, 5000)
    drawn = [line.split(None) for line in str(caught.value).split("\n")[2:]]
    assert drawn == [(one + " " + other).split() for one, other in zip(top_left, bottom_right, strict=True)]


def test_no_mask_takes_any_lengths():
    assert sink_tokens(3).band(3, 8) == Band(None, None)
    assert Mask().band(3, 8) == Band(None, None)
    assert Mask().visible(3, 8).all()


CORNERS = "allowed are 'top_left', 'bottom_right' and an integer, the key that query 0 stands on."


@pytest.mark.parametrize(("make", "message"), [
    (lambda: causal("right"), f"alignment is 'right'; {CORNERS}"),
    (lambda: window(1, 1, "left"), f"alignment is 'left'; {CORNERS}"),
    (lambda: causal(True), f"alignment is True; {CORNERS}"),
    (lambda: causal(1.0), f"alignment is 1.0; {CORNERS}"),
    (lambda: causal(2**30), f"alignment is {2**30}; {CORNERS}"),
    (lambda: window(-1, 0), "window: left is -1; allowed is an integer >= 0, or None for no bound on that side."),
    (lambda: window(0, 1.5), "window: right is 1.5; allowed is an integer >= 0, or None for no bound on that side."),
    (lambda: window(True, 0), "window: left is True; allowed is an integer >= 0, or None for no bound on that side."),
    (lambda: Mask(None, 0, "left"), f"alignment is 'left'; {CORNERS}"),
    (lambda: Mask(-1), "window: left is -1; allowed is an integer >= 0, or None for no bound on that side."),
    (lambda: Mask(1, 1.0), "window: right is 1.0; allowed is an integer >= 0, or None for no bound on that side."),
    (lambda: Mask(prefix=-1), "prefix: length is -1; allowed is an integer >= 0."),
    (lambda: Mask(sink_tokens=1.0), "sink_tokens: count is 1.0; allowed is an integer >= 0."),
    (lambda: Mask(chunk=0), "chunk: length is 0; allowed is an integer >= 1."),
    (lambda: prefix(None), "prefix: length is None; allowed is an integer >= 0."),
    (lambda: sink_tokens(None), "sink_tokens: count is None; allowed is an integer >= 0."),
    (lambda: chunk(None), "chunk: length is None; allowed is an integer >= 1."),
    (lambda: causal("top_left") & causal("bottom_right"),
     "cannot combine causal(alignment='top_left') & causal(alignment='bottom_right'): a mask has one alignment, got "
     "'top_left' and 'bottom_right'. Give both parts the same alignment."),
    (lambda: prefix(-1), "prefix: length is -1; allowed is an integer >= 0."),
    (lambda: prefix(2, "left"), f"alignment is 'left'; {CORNERS}"),
    (lambda: sink_tokens(True), "sink_tokens: count is True; allowed is an integer >= 0."),
    (lambda: chunk(0), "chunk: length is 0; allowed is an integer >= 1."),
    (lambda: chunk(2.0), "chunk: length is 2.0; allowed is an integer >= 1."),
    (lambda: chunk(2, "left"), f"alignment is 'left'; {CORNERS}"),
    (lambda: chunk(4) & chunk(6),
     "cannot combine chunk(4) & chunk(6): one length must be a multiple of the other."),
    (lambda: documents([1, 2]),
     "documents: ids is list; allowed is a tensor of integers of shape (s,) or (b, s)."),
    (lambda: documents(torch.zeros(3)),
     "documents: ids is torch.float32 of shape (3,); allowed is a tensor of integers of shape (s,) or (b, s)."),
    (lambda: documents(_IDS, torch.zeros(1, 1, 3, dtype=torch.int64)),
     "documents: key_ids is torch.int64 of shape (1, 1, 3); allowed is a tensor of integers of shape (s,) or (b, s)."),
    (lambda: documents(_IDS > 1),
     "documents: ids is torch.bool of shape (3,); allowed is a tensor of integers of shape (s,) or (b, s)."),
    (lambda: documents(_IDS.expand(2, 3), _IDS.expand(3, 3)),
     "documents: key_ids have batch size 3 on cpu and ids 2 on cpu; allowed are one device and equal batch sizes, "
     "or 1."),
    (lambda: documents(_IDS, _IDS.to("meta")),
     "documents: key_ids have batch size 1 on meta and ids 1 on cpu; allowed are one device and equal batch sizes, "
     "or 1."),
    (lambda: documents(_IDS) & (causal() & documents(_IDS)),
     "cannot combine documents & documents: a mask has one. Give each pair of ids a number of its own, and pass "
     "those."),
    (lambda: (causal("top_left") & _LATE).show(),
     "show: causal(alignment='top_left') & a tensor of shape (3,) does not tell how many queries and keys there are; "
     "pass query_length and key_length."),
    (lambda: (causal("top_left") & _ODD[:1]).show(None, 3),
     "show: causal(alignment='top_left') & a tensor of shape (1, 3) does not tell how many queries and keys there "
     "are; pass query_length and key_length."),
])
def test_message_names_what_was_got_and_what_is_allowed(make, message):
    with pytest.raises(InvalidInput) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize("mask", [causal(), causal() & torch.ones(2, 2, dtype=torch.bool),
                                  documents(torch.tensor([0, 0, 1]))], ids=str)
@pytest.mark.parametrize("other", [[[True]], 1, None], ids=repr)
def test_and_with_something_else_is_a_type_error(mask, other):
    with pytest.raises(TypeError):
        _ = mask & other
    with pytest.raises(TypeError):
        _ = other & mask


_IDS = torch.tensor([5, 5, -2])
_ODD = torch.tensor([[False, True, False], [True, False, True]])
_LATE = torch.tensor([False, True, True])
_EVEN = MaskFunction(torch=lambda batch, head, q_idx, k_idx: (q_idx - k_idx) % 2 == 0)


@pytest.mark.parametrize(("make", "band", "tensor"), [
    (lambda: causal("top_left") & _ODD, causal("top_left"), _ODD),
    (lambda: _ODD & causal("top_left"), causal("top_left"), _ODD),
    (lambda: _LATE & (causal("top_left") & _ODD), causal("top_left"), _ODD & _LATE),
    (lambda: (causal("top_left") & _ODD) & _LATE, causal("top_left"), _ODD & _LATE),
    (lambda: (causal("top_left") & _ODD) & window(1, None), causal("top_left") & window(1, 0), _ODD),
    (lambda: window(1, None) & (causal("top_left") & _ODD), causal("top_left") & window(1, 0), _ODD),
    (lambda: (causal("top_left") & _ODD) & (window(1, None) & _LATE), causal("top_left") & window(1, 0), _ODD & _LATE),
], ids=["mask_tensor", "tensor_mask", "tensor_and", "and_tensor", "and_mask", "mask_and", "both"])
def test_and_with_a_tensor_joins_bands_with_bands_and_tensors_with_tensors(make, band, tensor):
    joined = make()
    assert isinstance(joined, TensorMask)
    assert joined.band == band
    assert torch.equal(joined.tensor, tensor)


# Dynamo itself instantiates autograd Functions while it traces them.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("join", [
    lambda mask, tensor: mask & tensor, lambda mask, tensor: tensor & mask,
    lambda mask, tensor: tensor & (documents(torch.arange(6) // 2) & mask) & tensor,
    lambda mask, tensor: mask & (tensor & _EVEN),
], ids=["mask_and", "tensor_and", "documents", "function"])
def test_masks_and_tensors_are_joined_inside_of_a_compiled_graph(join):
    """torch's operator was handed a mask there: a break of the graph, and with fullgraph=True an error."""
    torch._dynamo.reset()
    q = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    tensor = torch.arange(36).view(6, 6) % 5 != 1
    step = torch.compile(lambda q, tensor: attention(q, q, q, mask=join(causal(), tensor), backend="reference"),
                         fullgraph=True, backend="aot_eager")
    assert torch.equal(step(q, tensor), attention(q, q, q, mask=join(causal(), tensor), backend="reference"))


def test_torch_takes_a_mask_for_nothing_else():
    for call in (lambda: _ODD + causal(), lambda: torch.where(_ODD, causal(), _ODD)):
        with pytest.raises(TypeError):
            call()


def test_tensor_mask_prints_its_band_and_its_shape():
    assert str(causal("top_left") & _ODD) == "causal(alignment='top_left') & a tensor of shape (2, 3)"
    assert str(Mask() & _LATE) == "a tensor of shape (3,)"
    assert str(documents(_IDS)) == "documents of 3 tokens"
    assert str(causal() & documents(_IDS) & _LATE) == "causal() & documents of 3 tokens & a tensor of shape (3,)"


def test_tensor_masks_keep_to_one_alignment():
    with pytest.raises(InvalidInput, match="a mask has one alignment, got 'top_left' and 'bottom_right'"):
        _ = (causal("top_left") & _ODD) & causal("bottom_right")


@given(masks(), LENGTHS, LENGTHS)
def test_offset_is_where_the_band_has_its_diagonal(mask, query_length, key_length):
    if mask.alignment is None and query_length != key_length:
        with pytest.raises(InvalidInput, match="names no alignment"):
            mask.offset(query_length, key_length)
        return
    diagonal = Band(mask.offset(query_length, key_length), mask.offset(query_length, key_length))
    alignment = mask.alignment or "top_left"
    assert diagonal == window(0, 0, alignment).band(query_length, key_length)


_ID_LISTS = st.integers(0, 12).flatmap(lambda length: st.lists(st.integers(-3, 3), min_size=length, max_size=length))


def _checked_documents(queries, keys, visible, rows):
    """Hold the extents of one side against the dense mask: (len(queries), len(keys))."""
    for i in range(len(queries)):
        seen = _indices(visible[i])
        _, first, stop, dense = rows[:, i].tolist()
        assert (first, stop) == ((seen[0], seen[-1] + 1) if seen else (len(keys), 0))
        assert dense == (first if seen == _filled(seen) and seen else len(keys))


@settings(max_examples=100)
@given(_ID_LISTS, st.none() | _ID_LISTS, st.sampled_from([torch.int64, torch.int32, torch.int8]), st.booleans())
def test_documents_are_those_of_equal_ids_in_any_order(queries, keys, dtype, in_order):
    ids = torch.tensor(sorted(queries) if in_order else queries, dtype=dtype)
    others = ids if keys is None else torch.tensor(keys, dtype=torch.int64)
    mask = documents(ids) if keys is None else documents(ids, others)
    expected = ids[:, None] == others[None, :]
    assert torch.equal(mask.visible(len(ids), len(others)), expected[None, None])
    assert (mask.documents.q.shape, mask.documents.k.shape) == ((1, 4, len(ids)), (1, 4, len(others)))
    assert mask.documents.q.dtype is mask.documents.k.dtype is torch.int32
    _checked_documents(ids, others, expected, mask.documents.q[0])
    _checked_documents(others, ids, expected.mT, mask.documents.k[0])


def test_documents_may_differ_by_batch_entry_on_either_side():
    one, two = torch.tensor([[1, 1, 2, 3]]), torch.tensor([[1, 2, 2], [9, 3, 1]])
    for queries, keys in ((one, two), (two, one), (two, two.flip(0)), (one[0], two)):
        visible = documents(queries, keys).visible(queries.shape[-1], keys.shape[-1])
        wide, long = queries.reshape(-1, queries.shape[-1]), keys.reshape(-1, keys.shape[-1])
        assert torch.equal(visible, (wide[:, :, None] == long[:, None, :])[:, None])


def test_documents_join_bands_and_tensors():
    joined = causal() & documents(_IDS) & _LATE & window(1, None)
    assert joined.band == window(1, 0)
    assert torch.equal(joined.visible(3, 3), (window(1, 0).visible(3, 3) & (_IDS[:, None] == _IDS) & _LATE)[None, None])
    assert joined.show() == "· · ·\n· ■ ·\n· · ■"


def test_tensor_masks_draw_themselves():
    assert (causal("top_left") & _ODD).show() == "· · ·\n■ · ·"
    assert (causal("top_left") & _LATE).show(2, 3) == "· · ·\n· ■ ·"
    assert (causal() & documents(_IDS)).show() == "■ · ·\n■ ■ ·\n· · ■"
    assert documents(_IDS, torch.tensor([-2, 5])).show() == "· ■\n· ■\n■ ·"
