"""Operators of masks: the union by ``|`` against dense masks, and what every operator without a meaning says."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import attention
from tilewise.errors import InvalidInput
from tilewise.functions import MaskFunction
from tilewise.masks import Mask, causal, chunk, documents, prefix, sink_tokens, window
from tilewise.testing.strategies import LENGTHS, masks

ODD = torch.tensor([[False, True, False], [True, False, True]])
IDS = torch.tensor([5, 5, -2])
EVEN = MaskFunction(torch=lambda batch, head, q_idx, k_idx: (q_idx - k_idx) % 2 == 0)
JOINED = causal("top_left") & ODD
# One mask of each kind.
KINDS = [causal(), JOINED, documents(IDS), EVEN, causal() & EVEN]


def refusal(make):
    with pytest.raises(InvalidInput) as caught:
        make()
    return str(caught.value)


def assert_is_union(united, a, b, query_length, key_length):
    expected = a.visible(query_length, key_length) | b.visible(query_length, key_length)
    assert torch.equal(united.visible(query_length, key_length), expected)


@settings(max_examples=500)
@given(masks(), masks(), LENGTHS, LENGTHS)
def test_union_of_equal_chunks_is_exact_with_every_exception(a, b, query_length, key_length):
    b = replace(b, alignment=a.alignment, chunk=a.chunk)
    assert a | b == b | a
    assert_is_union(a | b, a, b, query_length, key_length)


@settings(max_examples=500)
@given(masks(), masks(), LENGTHS, LENGTHS, st.sampled_from([None, 2, 3, 5]), st.sampled_from([None, 1, 2, 3]))
def test_union_of_masks_is_exact_or_refused(a, b, query_length, key_length, length, times):
    a = replace(a, chunk=length)
    b = replace(b, alignment=a.alignment, chunk=length and times and length * times)
    try:
        united = a | b
    except InvalidInput:
        assert a.chunk != b.chunk
        return
    assert_is_union(united, a, b, query_length, key_length)


def raised(value, by):
    return None if value is None else value + by


@given(masks(), st.tuples(*[st.integers(0, 9)] * 4), st.integers(1, 3))
def test_union_with_a_mask_that_contains_the_other_is_that_mask(mask, by, times):
    left, right, first, sinks = by
    wider = Mask(raised(mask.left, left), raised(mask.right, right), mask.alignment, raised(mask.prefix, first),
                 raised(mask.sink_tokens, sinks), None if mask.chunk is None else mask.chunk * times)
    assert mask | wider == wider | mask == wider


@given(masks())
def test_union_with_itself_is_the_mask_and_with_no_mask_is_no_mask(mask):
    assert mask | mask == mask
    assert not (mask | Mask()).is_bounded
    assert not (Mask() | mask).is_bounded


@given(masks(), masks(), st.integers(0, 40))
def test_an_alignment_that_one_mask_leaves_out_is_that_of_the_other(a, b, length):
    b = replace(b, alignment=None, chunk=a.chunk)
    assert (a | b).alignment == (b | a).alignment == a.alignment
    assert_is_union(a | b, a, b, length, length)


@pytest.mark.parametrize(("a", "b", "united"), [
    (causal(), window(3, 2), window(None, 2)),
    (window(7, 0), window(2, 5), window(7, 5)),
    (window(7, 0, "top_left"), window(2, 5), window(7, 5, "top_left")),
    (prefix(4), window(2, 0), prefix(4)),
    (window(5, 0) & sink_tokens(2), window(9, 0) & sink_tokens(1), window(9, 0) & sink_tokens(2)),
    (window(5, 0) & sink_tokens(2), causal(), causal()),
    (causal() & chunk(4), causal(), causal()),
    (chunk(12), chunk(4), chunk(12)),
    (chunk(4), window(3, 3), window(3, 3)),
    (causal() & chunk(4), window(9, 0) & chunk(4), causal() & chunk(4)),
], ids=str)
def test_union_is_the_mask_that_one_would_write(a, b, united):
    assert a | b == united
    assert b | a == united


# Dynamo itself instantiates autograd Functions while it traces them.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_union_is_made_inside_of_a_compiled_graph():
    torch._dynamo.reset()
    q = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))

    def call(q):
        mask = (window(1, 0) & sink_tokens(1)) | window(0, 2) | chunk(2)
        return attention(q, q, q, mask=mask, backend="reference")

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q), call(q))


WRITE = "rite a tilewise.functions.MaskFunction that asks both."
BY_POSITION = "allowed are two masks by position, such as causal() and window(left, right)."
BY_CHUNK = "no mask sees exactly what either sees; allowed are masks of equal chunks, or one that contains the other."
DENSE = "ass the boolean tensor a.visible(sq, sk, q.device) | b.visible(sq, sk, q.device)"


@pytest.mark.parametrize(("unite", "message"), [
    (lambda: causal("top_left") | window(3, 0, "bottom_right"),
     "cannot unite causal(alignment='top_left') | causal(alignment='bottom_right') & window(3, 0): a mask has one "
     f"alignment, got 'top_left' and 'bottom_right'. Give both parts the same alignment, or p{DENSE}, or w{WRITE}"),
    (lambda: causal() | chunk(4), f"cannot unite causal() | chunk(4): {BY_CHUNK} P{DENSE}, or w{WRITE}"),
    (lambda: chunk(4) | chunk(6), f"cannot unite chunk(4) | chunk(6): {BY_CHUNK} P{DENSE}, or w{WRITE}"),
    (lambda: window(2, 2) | chunk(4),
     f"cannot unite window(2, 2) | chunk(4): {BY_CHUNK} P{DENSE}, or w{WRITE}"),
    (lambda: causal() | ODD,
     f"cannot unite causal() | a tensor of shape (2, 3): {BY_POSITION} Pass the boolean tensor a.visible(sq, sk, "
     f"q.device) | b, or w{WRITE}"),
    (lambda: ODD | causal(),
     f"cannot unite a tensor of shape (2, 3) | causal(): {BY_POSITION} Pass the boolean tensor a | b.visible(sq, sk, "
     f"q.device), or w{WRITE}"),
    (lambda: causal() | documents(IDS),
     f"cannot unite causal() | documents of 3 tokens: {BY_POSITION} Pass the boolean tensor a.visible(sq, sk, q.device)"
     f" | b.visible(sq, sk), or w{WRITE}"),
    (lambda: documents(IDS) | causal(),
     f"cannot unite documents of 3 tokens | causal(): {BY_POSITION} Pass the boolean tensor a.visible(sq, sk) | "
     f"b.visible(sq, sk, q.device), or w{WRITE}"),
    (lambda: ODD | documents(IDS),
     f"cannot unite a tensor of shape (2, 3) | documents of 3 tokens: {BY_POSITION} Pass the boolean tensor a | "
     f"b.visible(sq, sk), or w{WRITE}"),
    # visible() asks a function for one batch entry and head alone, so a tensor is not offered.
    (lambda: causal() | EVEN, f"cannot unite causal() | {EVEN}: {BY_POSITION} W{WRITE}"),
    (lambda: EVEN | EVEN, f"cannot unite {EVEN} | {EVEN}: {BY_POSITION} W{WRITE}"),
    (lambda: EVEN | ODD, f"cannot unite {EVEN} | a tensor of shape (2, 3): {BY_POSITION} W{WRITE}"),
    (lambda: ODD | EVEN, f"cannot unite a tensor of shape (2, 3) | {EVEN}: {BY_POSITION} W{WRITE}"),
    (lambda: (causal() & EVEN) | ODD,
     f"cannot unite causal() & {EVEN} | a tensor of shape (2, 3): {BY_POSITION} W{WRITE}"),
])
def test_refused_union_says_what_to_pass_instead(unite, message):
    assert refusal(unite) == message


@pytest.mark.parametrize("mask", KINDS, ids=["band", "tensor", "documents", "function", "band_and_function"])
@pytest.mark.parametrize("ask", [bool, lambda mask: mask and causal(), lambda mask: mask or causal(),
                                 lambda mask: not mask, lambda mask: 1 if mask else 0],
                         ids=["bool", "and", "or", "not", "if"])
def test_truth_value_of_a_mask_raises_and_names_the_operator(mask, ask):
    """``mask_a and mask_b`` was mask_b, without a word."""
    assert refusal(lambda: ask(mask)) == (
        f"the truth value of a mask was asked for ({mask}), and it has none: write mask_a & mask_b where you wrote "
        "'mask_a and mask_b', and `mask is None` to ask whether there is one.")


OPPOSITE = "rite a tilewise.functions.MaskFunction that returns the opposite."


@pytest.mark.parametrize(("mask", "instead"), [
    (causal(), f"Pass the boolean tensor ~mask.visible(sq, sk, q.device), or w{OPPOSITE}"),
    (JOINED, f"Pass the boolean tensor ~mask.visible(sq, sk), or w{OPPOSITE}"),
    (documents(IDS), f"Pass the boolean tensor ~mask.visible(sq, sk), or w{OPPOSITE}"),
    (EVEN, f"W{OPPOSITE}"),
    (causal() & EVEN, f"W{OPPOSITE}"),
], ids=["band", "tensor", "documents", "function", "band_and_function"])
def test_complement_of_a_mask_raises_and_says_what_to_pass_instead(mask, instead):
    assert refusal(lambda: ~mask) == f"cannot invert {mask}: a mask has no complement. {instead}"


def test_what_the_messages_offer_instead_is_taken():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 3, 8, generator=generator)
    a, b = causal(), chunk(2)
    for visible in (a.visible(3, 3, q.device) | b.visible(3, 3, q.device), ~a.visible(3, 3, q.device),
                    a.visible(3, 3, q.device) | documents(IDS).visible(3, 3), ~documents(IDS).visible(3, 3)):
        probs = (q @ q.mT * 8**-0.5).masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
        torch.testing.assert_close(attention(q, q, q, mask=visible, backend="reference"), probs @ q)


@pytest.mark.parametrize("mask", KINDS, ids=["band", "tensor", "documents", "function", "band_and_function"])
@pytest.mark.parametrize("use", [
    lambda mask, other: mask ^ other, lambda mask, other: other ^ mask, lambda mask, other: mask - other,
    lambda mask, other: other - mask, lambda mask, other: mask < other, lambda mask, other: other <= mask,
    lambda mask, other: len(mask), lambda mask, other: list(mask), lambda mask, other: other in mask,
    lambda mask, other: mask[0], lambda mask, other: mask | 1, lambda mask, other: 1 | mask,
    lambda mask, other: torch.logical_or(ODD, mask), lambda mask, other: torch.logical_not(mask),
], ids=["xor", "rxor", "sub", "rsub", "less", "at_most", "len", "iter", "in", "item", "or_one", "one_or", "logical_or",
        "logical_not"])
@pytest.mark.parametrize("other", [causal(), ODD], ids=["mask", "tensor"])
def test_operators_without_a_meaning_are_type_errors(mask, use, other):
    with pytest.raises(TypeError):
        use(mask, other)
