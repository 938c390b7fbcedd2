"""Masks as text: what flags take and rows hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.bench.mask_text import format_mask, parse_mask
from tilewise.errors import InvalidInput
from tilewise.masks import ALIGNMENTS, Mask, causal, chunk, prefix, sink_tokens, window

SIDES, COUNTS = st.none() | st.integers(0, 10**6), st.none() | st.integers(1, 10**6)


@given(SIDES, SIDES, st.none() | st.sampled_from(ALIGNMENTS), COUNTS, COUNTS, COUNTS)
def test_a_bounded_mask_survives_the_round_trip(left, right, alignment, first, length, sinks):
    mask = window(left, right, alignment)
    for make, count in ((prefix, first), (chunk, length), (sink_tokens, sinks)):
        mask &= Mask() if count is None else make(count)
    expected = mask if mask.is_bounded else Mask()
    assert parse_mask(format_mask(mask)) == expected


@pytest.mark.parametrize(("text", "mask"), [
    ("none", Mask()),
    ("causal", causal()),
    ("causal:bottom_right", causal("bottom_right")),
    ("window:1023,0", window(1023, 0)),
    ("window:5,inf:top_left", window(5, None, "top_left")),
    ("causal:bottom_right & window:7,0", causal("bottom_right") & window(7, 0)),
    ("prefix:12", prefix(12)),
    ("prefix:12:top_left & window:9,0", prefix(12, "top_left") & window(9, 0)),
    ("chunk:16:bottom_right", chunk(16, "bottom_right")),
    ("causal & chunk:16", causal() & chunk(16)),
    ("causal & window:7,0 & sink_tokens:4", causal() & window(7, 0) & sink_tokens(4)),
])
def test_each_form_means_the_mask_it_names(text, mask):
    assert parse_mask(text) == mask


@pytest.mark.parametrize("text", ["", "casual", "causal:middle", "window:1", "window:-1,0", "window:a,b", "none:1",
                                  "causal:bottom_right&causal:top_left", "window:1,2:top_left:3", "prefix",
                                  "prefix:-1", "chunk:0", "chunk:x", "chunk:16:middle",
                                  "sink_tokens:4:top_left", "sink_tokens:"])
def test_anything_else_raises_naming_the_part(text):
    with pytest.raises(InvalidInput, match=r"mask|alignment|chunk: length is 0; allowed"):
        parse_mask(text)
