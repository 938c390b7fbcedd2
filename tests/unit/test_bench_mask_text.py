"""Masks as text: what flags take and rows hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.bench.mask_text import format_mask, parse_mask
from tilewise.errors import InvalidInput
from tilewise.masks import ALIGNMENTS, Mask, causal, window

SIDES = st.none() | st.integers(0, 10**6)


@given(SIDES, SIDES, st.none() | st.sampled_from(ALIGNMENTS))
def test_a_bounded_mask_survives_the_round_trip(left, right, alignment):
    mask = window(left, right, alignment)
    expected = mask if mask.is_bounded else Mask()
    assert parse_mask(format_mask(mask)) == expected


@pytest.mark.parametrize(("text", "mask"), [
    ("none", Mask()),
    ("causal", causal()),
    ("causal:bottom_right", causal("bottom_right")),
    ("window:1023,0", window(1023, 0)),
    ("window:5,inf:top_left", window(5, None, "top_left")),
    ("causal:bottom_right & window:7,0", causal("bottom_right") & window(7, 0)),
])
def test_each_form_means_the_mask_it_names(text, mask):
    assert parse_mask(text) == mask


@pytest.mark.parametrize("text", ["", "casual", "causal:middle", "window:1", "window:-1,0", "window:a,b", "none:1",
                                  "causal:bottom_right&causal:top_left", "window:1,2:top_left:3"])
def test_anything_else_raises_naming_the_part(text):
    with pytest.raises(InvalidInput, match=r"mask|alignment"):
        parse_mask(text)
