"""Masks: their meaning, their tile ranges against the dense mask, their pictures, their messages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.errors import InvalidInput
from tilewise.masks import ALIGNMENTS, Band, Mask, Span, TensorMask, causal, window
from tilewise.testing.strategies import LENGTHS, masks, spans


def _indices(flags):
    return flags.nonzero().flatten().tolist()


@st.composite
def tiles(draw):
    """A mask with lengths put in, the dense mask, and a span of queries."""
    mask, query_length, key_length = draw(masks()), draw(LENGTHS), draw(LENGTHS)
    return mask.band(query_length, key_length), mask.visible(query_length, key_length), draw(spans(query_length))


@given(tiles())
def test_keys_of_a_span_are_exactly_those_that_one_of_its_queries_sees(tile):
    band, visible, queries = tile
    span = band.keys_of(queries, visible.shape[1])
    assert list(range(span.start, span.stop)) == _indices(visible[queries.start:queries.stop].any(0))


@given(tiles())
def test_shared_keys_of_a_span_are_exactly_those_that_all_of_its_queries_see(tile):
    band, visible, queries = tile
    span = band.shared_keys_of(queries, visible.shape[1])
    rows = visible[queries.start:queries.stop]
    expected = _indices(rows.all(0)) if len(rows) else []
    assert list(range(span.start, span.stop)) == expected


@given(masks(), LENGTHS, LENGTHS, st.data())
def test_transposed_band_gives_the_queries_that_see_a_span_of_keys(mask, query_length, key_length, data):
    keys = data.draw(spans(key_length))
    visible = mask.visible(query_length, key_length)[:, keys.start:keys.stop]
    band = mask.band(query_length, key_length).transposed()
    some, every = band.keys_of(keys, query_length), band.shared_keys_of(keys, query_length)
    assert list(range(some.start, some.stop)) == _indices(visible.any(1))
    assert list(range(every.start, every.stop)) == (_indices(visible.all(1)) if len(keys) else [])


@given(masks(), LENGTHS, LENGTHS)
def test_transposing_twice_changes_nothing(mask, query_length, key_length):
    band = mask.band(query_length, key_length)
    assert band.transposed().transposed() == band


@given(masks(), LENGTHS, LENGTHS)
def test_visible_pairs_counts_the_dense_mask(mask, query_length, key_length):
    pairs = mask.band(query_length, key_length).visible_pairs(query_length, key_length)
    assert pairs == int(mask.visible(query_length, key_length).sum())


@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from(ALIGNMENTS), LENGTHS, LENGTHS)
def test_dense_mask_follows_the_definition_pair_by_pair(left, right, alignment, query_length, key_length):
    offset = key_length - query_length if alignment == "bottom_right" else 0
    visible = window(left, right, alignment).visible(query_length, key_length)
    expected = [[i + offset - left <= j <= i + offset + right for j in range(key_length)] for i in range(query_length)]
    assert visible.tolist() == expected


@given(masks(), masks(), LENGTHS, LENGTHS)
def test_and_hides_what_either_mask_hides(a, b, query_length, key_length):
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
])
def test_mask_prints_as_what_it_is(mask, text):
    assert str(mask) == text


@given(masks())
def test_printed_mask_evaluates_to_the_mask(mask):
    if not mask.is_bounded:
        assert str(mask) == "no mask"
        return
    assert eval(str(mask), {"causal": causal, "window": window}) == mask


def test_masks_with_equal_parts_are_equal_and_hash_alike():
    a, b = causal("top_left") & window(4, None), window(4, 0, "top_left")
    assert a == b
    assert hash(a) == hash(b)
    assert a != causal("top_left")


def test_pictures_show_both_corners():
    assert causal("top_left").show(3, 5) == "■ · · · ·\n■ ■ · · ·\n■ ■ ■ · ·"
    assert causal("bottom_right").show(3, 5) == "■ ■ ■ · ·\n■ ■ ■ ■ ·\n■ ■ ■ ■ ■"
    assert (causal() & window(1, 0)).show(3, 3) == "■ · ·\n■ ■ ·\n· ■ ■"


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


def test_no_mask_takes_any_lengths():
    assert Mask().band(3, 8) == Band(None, None)
    assert Mask().visible(3, 8).all()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: causal("right"), "alignment is 'right'; allowed are 'top_left' and 'bottom_right'."),
    (lambda: window(1, 1, "left"), "alignment is 'left'; allowed are 'top_left' and 'bottom_right'."),
    (lambda: window(-1, 0), "window: left is -1; allowed is an integer >= 0, or None for no bound on that side."),
    (lambda: window(0, 1.5), "window: right is 1.5; allowed is an integer >= 0, or None for no bound on that side."),
    (lambda: window(True, 0), "window: left is True; allowed is an integer >= 0, or None for no bound on that side."),
    (lambda: causal("top_left") & causal("bottom_right"),
     "cannot combine causal(alignment='top_left') & causal(alignment='bottom_right'): a mask has one alignment, got "
     "'top_left' and 'bottom_right'. Give both parts the same alignment."),
])
def test_message_names_what_was_got_and_what_is_allowed(make, message):
    with pytest.raises(InvalidInput) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize("mask", [causal(), causal() & torch.ones(2, 2, dtype=torch.bool)], ids=str)
@pytest.mark.parametrize("other", [[[True]], 1, None], ids=repr)
def test_and_with_something_else_is_a_type_error(mask, other):
    with pytest.raises(TypeError):
        _ = mask & other
    with pytest.raises(TypeError):
        _ = other & mask


_ODD = torch.tensor([[False, True, False], [True, False, True]])
_LATE = torch.tensor([False, True, True])


@pytest.mark.parametrize(("make", "band", "tensor"), [
    (lambda: causal("top_left") & _ODD, causal("top_left"), _ODD),
    (lambda: (causal("top_left") & _ODD) & _LATE, causal("top_left"), _ODD & _LATE),
    (lambda: (causal("top_left") & _ODD) & window(1, None), causal("top_left") & window(1, 0), _ODD),
    (lambda: window(1, None) & (causal("top_left") & _ODD), causal("top_left") & window(1, 0), _ODD),
    (lambda: (causal("top_left") & _ODD) & (window(1, None) & _LATE), causal("top_left") & window(1, 0), _ODD & _LATE),
], ids=["mask_tensor", "and_tensor", "and_mask", "mask_and", "both"])
def test_and_with_a_tensor_joins_bands_with_bands_and_tensors_with_tensors(make, band, tensor):
    joined = make()
    assert isinstance(joined, TensorMask)
    assert joined.band == band
    assert torch.equal(joined.tensor, tensor)


def test_tensor_mask_prints_its_band_and_its_shape():
    assert str(causal("top_left") & _ODD) == "causal(alignment='top_left') & a tensor of shape (2, 3)"
    assert str(Mask() & _LATE) == "no mask & a tensor of shape (3,)"


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
