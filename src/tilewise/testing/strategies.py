"""Hypothesis strategies for spans, masks and small problems; the one module that imports hypothesis."""

from hypothesis import strategies as st

from tilewise.masks import ALIGNMENTS, Mask, Span, causal, window
from tilewise.testing.cases import Case, Layout

LENGTHS = st.integers(0, 40)
_SIDES = st.none() | st.integers(0, 45)


@st.composite
def spans(draw: st.DrawFn, length: int) -> Span:
    """Spans inside ``0 .. length``, empty ones included."""
    start = draw(st.integers(0, length))
    return Span(start, draw(st.integers(start, length)))


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """Every kind of mask, always with a named alignment, so that it fits any lengths."""
    alignment = draw(st.sampled_from(ALIGNMENTS))
    band = window(draw(_SIDES), draw(_SIDES), alignment)
    return draw(st.sampled_from((Mask(), causal(alignment), band, causal(alignment) & band)))


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Problems small enough for any backend to take in milliseconds: lengths to 40, head dims to 24."""
    hk = draw(st.integers(1, 2))
    layout: Layout = draw(st.sampled_from(("bhsd", "bshd", "bhds", "moat")))
    return Case(
        "small", b=draw(st.integers(1, 2)), hq=hk * draw(st.integers(1, 3)), hk=hk, sq=draw(LENGTHS),
        sk=draw(LENGTHS), d=draw(st.integers(1, 24)), dv=draw(st.integers(1, 24)), mask=draw(masks()),
        scale=draw(st.none() | st.floats(0.01, 2.0)), layout=layout,
    )
