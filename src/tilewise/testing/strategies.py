"""Hypothesis strategies for spans, masks, broadcasts and small problems; the one module that imports hypothesis."""

from dataclasses import replace

from hypothesis import strategies as st

from tilewise.masks import ALIGNMENTS, Mask, Span, causal, chunk, prefix, sink_tokens, window
from tilewise.testing.cases import Case, Documents, Layout, OperandDtype, Packed, Slopes

LENGTHS = st.integers(0, 40)
_SIDES = st.none() | st.integers(0, 45)


@st.composite
def spans(draw: st.DrawFn, length: int) -> Span:
    """Spans inside ``0 .. length``, empty ones included."""
    start = draw(st.integers(0, length))
    return Span(start, draw(st.integers(start, length)))


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """Every kind of mask, exceptions included, with a named alignment, so that it and a distance fit any lengths."""
    alignment = draw(st.sampled_from(ALIGNMENTS))
    band = window(draw(_SIDES), draw(_SIDES), alignment)
    band = draw(st.sampled_from((window(None, None, alignment), causal(alignment), band, causal(alignment) & band)))
    for make, least in ((prefix, 0), (sink_tokens, 0), (chunk, 1)):
        if draw(st.integers(0, 3)) == 3:
            band = band & make(draw(st.integers(least, 45)))
    return band


def patterns() -> st.SearchStrategy[str]:
    """Dims of a broadcast operand, as a case names them; half of all times there is none."""
    return st.just("") | st.tuples(*(st.sampled_from((letter, "1")) for letter in "bhqk")).map("".join)


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Problems small enough for any backend to take in milliseconds: lengths to 40, head dims to 24; no options."""
    hk = draw(st.integers(1, 2))
    layout: Layout = draw(st.sampled_from(("bhsd", "bshd", "bhds", "moat")))
    return Case(
        "small", b=draw(st.integers(1, 2)), hq=hk * draw(st.integers(1, 3)), hk=hk, sq=draw(LENGTHS),
        sk=draw(LENGTHS), d=draw(st.integers(1, 24)), dv=draw(st.integers(1, 24)), mask=draw(masks()),
        scale=draw(st.none() | st.floats(0.01, 2.0)), layout=layout,
    )


@st.composite
def small_cases_with_options(draw: st.DrawFn) -> Case:
    """Those of :func:`small_cases`, with any subset of the options; a third padded, and a third packed."""
    operand_dtype: OperandDtype = draw(st.sampled_from(("same", "float32")))
    alibi: Slopes = draw(st.sampled_from(("", "h", "bh")))
    documents: Documents = draw(st.sampled_from(("", "runs", "interleaved")))
    case, kind = draw(small_cases()), draw(st.sampled_from(("dense", "padded", "packed")))
    packed: Packed = draw(st.sampled_from(("tight", "gaps"))) if kind == "packed" else ""
    lengths_q, lengths_k = (
        None if kind == "dense" else tuple(draw(st.lists(st.integers(0, most), min_size=case.b, max_size=case.b)))
        for most in (case.sq, case.sk))
    return replace(
        case, bias=draw(patterns()), mask_tensor=draw(patterns()), operand_dtype=operand_dtype,
        alibi=alibi, sinks=draw(st.booleans()), softcap=draw(st.none() | st.floats(0.5, 50.0)),
        dropout_p=draw(st.just(0.0) | st.floats(0.01, 0.9)), documents=documents, packed=packed, lengths_q=lengths_q,
        lengths_k=lengths_k,
    )
