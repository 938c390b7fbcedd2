"""A mask cut to some queries and keys shows, in its rectangles, the pairs of the whole mask and no others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import attention, attention_decode
from tilewise.errors import InvalidInput
from tilewise.masks import Mask, Span, causal, chunk, prefix, sink_tokens, window
from tilewise.masks.cutting import cut_mask

MASKS = {
    "none": Mask(), "causal": causal("bottom_right"), "causal_from_the_top": causal("top_left"),
    "window": window(3, 2, "bottom_right"), "left_window": causal("top_left") & window(4, 0),
    "right_window": window(None, 3, "bottom_right"), "prefix": prefix(5, "bottom_right"),
    "prefix_in_a_window": prefix(6, "top_left") & window(3, 0),
    "sink_tokens": causal("bottom_right") & window(2, 0) & sink_tokens(3),
    "sink_tokens_of_two_sides": window(1, 2, "top_left") & sink_tokens(4),
    "chunk": chunk(4, "bottom_right"), "causal_chunk": causal("top_left") & chunk(5),
    "chunk_of_one": chunk(1, "bottom_right"), "offset": causal(3), "negative_offset": window(4, 1, -5),
    "all": prefix(4, "bottom_right") & window(5, 0) & sink_tokens(2) & chunk(6)}


def put_together(mask, queries, keys, lengths, step=1):
    """Return the dense mask of a rectangle from its blocks, each drawn by the mask that it has."""
    seen = torch.zeros(lengths, dtype=torch.bool)
    count = torch.zeros(lengths, dtype=torch.int)
    for block in cut_mask(mask, queries, keys, lengths, step):
        assert all(own.start % step == 0 or own.start == whole.start or mask.chunk
                   for own, whole in ((block.queries, queries), (block.keys, keys)))
        rows, columns = slice(block.queries.start, block.queries.stop), slice(block.keys.start, block.keys.stop)
        assert queries.start <= rows.start < rows.stop <= queries.stop
        assert keys.start <= columns.start < columns.stop <= keys.stop
        visible = block.mask.visible(len(block.queries), len(block.keys))
        assert not (block.is_full and not visible.all())
        seen[rows, columns] |= visible
        count[rows, columns] += 1
    assert not (count > 1).any()
    return seen[queries.start:queries.stop, keys.start:keys.stop]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", [(17, 17), (13, 22), (22, 13)], ids=str)
def test_blocks_show_the_pairs_of_the_mask(name, lengths):
    mask = MASKS[name]
    whole = mask.visible(*lengths)
    for first_query in range(0, lengths[0], 5):
        for first_key in range(0, lengths[1], 4):
            queries, keys = Span(first_query, min(first_query + 5, lengths[0])), Span(
                first_key, min(first_key + 7, lengths[1]))
            part = whole[queries.start:queries.stop, keys.start:keys.stop]
            assert torch.equal(put_together(mask, queries, keys, lengths), part)


BOUND = st.none() | st.integers(0, 12)


@settings(deadline=None, max_examples=300)
@given(bounds=st.tuples(BOUND, BOUND, BOUND, BOUND), length=st.none() | st.integers(1, 9), data=st.data(),
       alignment=st.sampled_from(("top_left", "bottom_right")) | st.integers(-15, 15))
def test_any_mask_can_be_cut(bounds, length, alignment, data):
    left, right, first, sinks = bounds
    mask = Mask(left, right, alignment, first, sinks, length)
    lengths = data.draw(st.tuples(st.integers(0, 20), st.integers(0, 20)))
    queries, keys = (Span(*sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))))
                     for size in lengths)
    part = mask.visible(*lengths)[queries.start:queries.stop, keys.start:keys.stop]
    assert torch.equal(put_together(mask, queries, keys, lengths, data.draw(st.integers(1, 5))), part)


def test_what_nothing_sees_has_no_block():
    assert cut_mask(causal("top_left"), Span(0, 4), Span(4, 8), (8, 8)) == ()
    assert cut_mask(window(2, 0), Span(8, 12), Span(0, 4), (12, 12)) == ()
    assert cut_mask(causal(), Span(3, 3), Span(0, 4), (12, 12)) == ()


def test_a_block_without_hidden_pairs_has_an_unbounded_mask():
    (block,) = cut_mask(causal() & window(100, 0), Span(4, 8), Span(0, 4), (8, 8))
    assert block.is_full
    assert block.mask == Mask(alignment=4)


def test_blocks_are_trimmed_to_what_a_window_reaches():
    (block,) = cut_mask(causal() & window(3, 0), Span(8, 16), Span(0, 8), (16, 16))
    assert (block.queries, block.keys) == (Span(8, 11), Span(5, 8))


def test_far_queries_see_the_sink_tokens_alone():
    (block,) = cut_mask(causal() & window(3, 0) & sink_tokens(2), Span(12, 16), Span(0, 8), (16, 16))
    assert (block.queries, block.keys, block.is_full) == (Span(12, 16), Span(0, 2), True)


def test_a_mask_that_names_no_alignment_raises_for_unequal_lengths():
    with pytest.raises(InvalidInput, match="names no alignment"):
        cut_mask(causal(), Span(0, 2), Span(0, 2), (4, 6))


@pytest.mark.parametrize("name", ["causal", "sink_tokens", "prefix", "causal_chunk", "all"])
def test_a_call_on_a_part_with_its_block_is_a_part_of_the_whole_call(name):
    lengths = (18, 18)
    q, k, v = (torch.randn(1, 2, size, 8, dtype=torch.float64) for size in (*lengths, lengths[1]))
    slopes, whole = torch.rand(2, dtype=torch.float64), MASKS[name].visible(*lengths)
    for block in cut_mask(MASKS[name], Span(6, 13), Span(2, 18), lengths):
        rows, columns = slice(block.queries.start, block.queries.stop), slice(block.keys.start, block.keys.stop)
        bias = -slopes[:, None, None] * (torch.arange(18)[rows, None] - torch.arange(18)[columns]).abs()
        wanted = attention(q[:, :, rows], k[:, :, columns], v[:, :, columns], mask=whole[rows, columns], bias=bias,
                           backend="reference")
        got = attention(q[:, :, rows], k[:, :, columns], v[:, :, columns], mask=block.mask, alibi_slopes=slopes,
                        backend="reference")
        torch.testing.assert_close(got, wanted)


def test_lengths_that_are_data_take_no_offset():
    q = torch.randn(2, 2, 4, 8)
    with pytest.raises(InvalidInput, match=r"^mask is causal\(alignment=2\) and lengths are data \(seqlens_k\); "
                                           "allowed with them are alignment='top_left' and 'bottom_right'"):
        attention(q, q, q, mask=causal(2), seqlens_k=torch.tensor([3, 4]))


def test_decoding_takes_no_offset():
    q, cache = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 4, 8)
    with pytest.raises(InvalidInput, match=r"mask is causal\(alignment=2\); allowed is alignment='bottom_right'"):
        attention_decode(q, cache, cache, mask=causal(2))
