"""Arguments that a call does not have: the error names ours; signatures, types and the function itself stay."""

import inspect

import pytest
import torch

from tilewise import InvalidInput, attention, attention_decode, attention_varlen, causal, explain
from tilewise.decode import explain_decode
from tilewise.errors import UnknownArgument

Q = torch.randn(2, 4, 6, 8)
ROWS, LENGTHS = torch.randn(6, 4, 8), torch.tensor([0, 2, 6])
CAUSAL = "mask=causal(), of lengths that differ causal('{}') as {} has it"
BAND = "mask=causal() or mask=window(left, right): a band is all that decoding takes"
TENSOR = "mask= for a boolean tensor, True = take part, or bias= for numbers that are added to the scores"
SCALE = "scale="


def said(call, name):
    given = {"cu_seqlens_q": LENGTHS} if call is attention_varlen else {}
    tensors = (ROWS, ROWS, ROWS) if call is attention_varlen else (Q, Q, Q)
    with pytest.raises(UnknownArgument) as caught:
        call(*tensors, **given, **{name: True})
    return str(caught.value)


@pytest.mark.parametrize(("call", "name", "ours"), [
    (attention, "is_causal", CAUSAL.format("top_left", "torch")),
    (attention, "causal", CAUSAL.format("bottom_right", "flash-attn")),
    (attention, "attn_mask", TENSOR), (attention, "attention_mask", TENSOR), (attention, "attn_bias", TENSOR),
    (attention, "window_size", "mask=window(left, right), None = no bound (flash-attn's -1)"),
    (attention, "sliding_window", "mask=window(n - 1, 0) for n keys up to the query"),
    (attention, "softmax_scale", SCALE), (attention, "scaling", SCALE), (attention_varlen, "softmax_scale", SCALE),
    (attention_decode, "softmax_scale", SCALE),
    (attention, "dropout", "dropout_p=, 0.0 outside of training"),
    (attention, "key_padding_mask", "seqlens_k= where padding comes last, or mask=keep[:, None, None] of a boolean "
                                    "keep (b, sk), True = take part"),
    (attention_varlen, "key_padding_mask", "seqused_k="),
    (attention_decode, "key_padding_mask", "cache_seqlens=, and cache_leftpad= where padding comes first"),
    (attention, "enable_gqa", "nothing: q may have any multiple of the heads of k and v"),
    (attention, "return_softmax_lse", "return_aux=('lse',)"), (attention, "s_aux", "sinks="),
    (attention, "block_mask", "mask=, of a BlockMask tilewise.integrations.flex.traced_mask(block_mask)"),
    (attention, "score_mod", "score_function=ScoreFunction(...)"), (attention, "seqused_k", "seqlens_k="),
    (attention_varlen, "is_causal", CAUSAL.format("top_left", "torch")), (attention_varlen, "seqlens_k", "seqused_k="),
    (attention_varlen, "cu_seq_k", "cu_seqlens_k="), (attention_varlen, "max_q", "max_seqlen_q="),
    (attention_decode, "causal", BAND), (attention_decode, "window_size", BAND), (attention_decode, "attn_mask", BAND),
    (attention_decode, "page_table", "block_table="), (attention_decode, "seqlens_k", "cache_seqlens="),
    (explain, "is_causal", CAUSAL.format("top_left", "torch")), (explain_decode, "causal", BAND),
], ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) and value.isidentifier() else ""))
def test_an_argument_of_another_library_is_answered_with_ours(call, name, ours):
    assert said(call, name) == f"{call.__name__} has no argument {name!r}; allowed in its place is {ours}."


@pytest.mark.parametrize(("call", "name", "message"), [
    (attention, "cu_seqlens_q", "attention_varlen takes cu_seqlens_q=, and attention nothing like it."),
    (attention, "block_table", "attention_decode takes block_table=, and attention nothing like it."),
    (attention_decode, "dropout",
     "attention and attention_varlen take dropout_p=, and attention_decode nothing like it."),
])
def test_an_argument_that_another_call_has_leads_there(call, name, message):
    assert said(call, name) == f"{call.__name__} has no argument {name!r}; {message}"


@pytest.mark.parametrize("call", [attention, attention_varlen, attention_decode, explain, explain_decode])
def test_any_other_name_is_answered_with_all_that_are_allowed(call):
    names = ", ".join(inspect.signature(call).parameters)
    assert said(call, "casual") == f"{call.__name__} has no argument 'casual'; allowed are {names}."
    assert "unknown" not in names


def test_it_is_still_the_error_that_python_raises_for_it():
    with pytest.raises(TypeError):
        attention(Q, Q, Q, is_causal=True)
    assert issubclass(UnknownArgument, InvalidInput)


@pytest.mark.parametrize("call", [attention, attention_varlen, attention_decode])
def test_nothing_stands_around_the_function(call):
    """A wrapper costs every call as much as a fast path through the checks."""
    assert not hasattr(call, "__wrapped__")
    assert call.__code__.co_name == call.__name__
    assert call.__code__.co_filename == inspect.getsourcefile(call)


def test_a_compiled_call_is_one_graph_as_before():
    compiled = torch.compile(lambda q: attention(q, q, q, mask=causal()), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(Q), attention(Q, Q, Q, mask=causal()))
