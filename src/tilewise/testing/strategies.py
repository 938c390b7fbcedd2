"""Hypothesis' choices for spans, masks and random configurations; the one module that imports hypothesis.

What is drawn is that of configurations.py: hypothesis makes its choices and shrinks them.
"""

from dataclasses import fields, replace

from hypothesis import strategies as st

from tilewise.masks import Mask, Span
from tilewise.testing.cases import Case
from tilewise.testing.configurations import Configuration, draw_from, draw_mask, draw_window

LENGTHS = st.integers(0, 40)
_CHOICES = st.randoms(use_true_random=False, note_method_calls=False)
# What nearly every backend takes, in some form.
_PLAIN = frozenset(("name", "b", "hq", "hk", "sq", "sk", "d", "dv", "mask", "scale", "layout"))


@st.composite
def spans(draw: st.DrawFn, length: int) -> Span:
    """Spans inside ``0 .. length``, empty ones included."""
    start = draw(st.integers(0, length))
    return Span(start, draw(st.integers(start, length)))


@st.composite
def windows(draw: st.DrawFn, longest: int) -> Mask:
    """Windows and causal masks, with sides up to half of ``longest``, or neither; with a named alignment."""
    choices = draw(_CHOICES)
    return draw_window(lambda _: choices, longest)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """Every kind of mask, exceptions included, with a named alignment, so that it and a distance fit any lengths."""
    choices = draw(_CHOICES)
    return draw_mask(lambda _: choices, 90)


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    """Configurations small enough for any backend to take in milliseconds, with every option."""
    choices = draw(_CHOICES)
    return draw_from(lambda _: choices, "tiny")


def plain_configurations() -> st.SearchStrategy[Configuration]:
    """Those of :func:`configurations` without options and without lengths that are data."""
    return configurations().map(_plain)


def _plain(configuration: Configuration) -> Configuration:
    kept = {field.name: getattr(configuration.case, field.name) for field in fields(Case) if field.name in _PLAIN}
    return replace(configuration, case=Case(**kept))
