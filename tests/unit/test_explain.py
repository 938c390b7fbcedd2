"""``explain`` and ``explain_decode``: what they take, what they say, and that they are of one mind with the calls."""

import inspect

import pytest
import torch

from tilewise import (
    InvalidInput,
    attention,
    attention_decode,
    attention_varlen,
    causal,
    documents,
    explain,
    use_backend,
)
from tilewise.decode import explain_decode

CU = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
CACHE = torch.randn(2, 2, 10, 8)
NEW = torch.randn(2, 2, 1, 8)


def dense():
    return torch.randn(2, 4, 6, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)


def packed():
    return torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)


def test_it_takes_every_argument_of_a_call():
    own = [list(inspect.signature(call).parameters) for call in (explain, attention, attention_varlen)]
    assert set(own[0]) == {*own[1], *own[2]}
    assert [name for name in own[0] if name in own[1]] == own[1]
    assert explain(*dense(), dropout_p=0.5, dropout_seed=3).forward == "reference"
    with pytest.raises(InvalidInput, match="dropout_seed is '7'; allowed is an integer of 64 bits"):
        explain(*dense(), dropout_p=0.5, dropout_seed="7")


def test_it_draws_no_seed():
    tensors, before = dense(), torch.random.get_rng_state()
    explain(*tensors, dropout_p=0.5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_it_prints_the_options():
    text = str(explain(*dense(), bias=torch.zeros(6, 5), softcap=30.0, dropout_p=0.1))
    assert text.startswith("b2 h4/2 s6x5 d8 float32 no mask, softcap 30, bias 1x1x6x5, dropout 0.1 on cpu\n")
    assert "  forward  torch      no: takes no bias" in text


@pytest.mark.parametrize(("tensors", "lengths", "said"), [
    (dense(), {"seqlens_k": torch.tensor([3, 5])}, "b2 h4/2 s6x5 d8 float32 no mask, padded sequences on cpu\n"),
    (packed(), {"cu_seqlens_q": CU}, "b1 h4/2 s6x6 d8 float32 no mask, 3 packed sequences on cpu\n"),
    (packed(), {"cu_seqlens_q": CU, "cu_seqlens_k": CU.clone(), "seqused_k": torch.tensor([1, 0, 2]),
                "max_seqlen_q": 4, "max_seqlen_k": 4, "bias": torch.zeros(4, 4)},
     "b1 h4/2 s6x6 d8 float32 no mask, bias 1x1x4x4, 3 packed sequences on cpu\n")], ids=["padded", "packed", "more"])
def test_it_tells_who_takes_lengths(tensors, lengths, said):
    found = explain(*tensors, **lengths)
    assert str(found).startswith(said)
    assert "  forward  torch      no: takes no " in str(found)
    assert (found.forward, found.backward) == ("reference", "reference")


def test_it_tells_who_takes_documents():
    assert explain(*dense(), mask=documents(torch.arange(6), torch.arange(5))).forward == "reference"


def test_packed_sequences_that_share_lengths_need_no_alignment_and_others_do():
    assert explain(*packed(), cu_seqlens_q=CU, mask=causal()).forward == "reference"
    for call in (explain, attention_varlen):
        with pytest.raises(InvalidInput, match=r"mask is causal.* and names no alignment, but lengths are data"):
            call(*packed(), cu_seqlens_q=CU, cu_seqlens_k=CU.clone(), mask=causal())


@pytest.mark.parametrize(("lengths", "message"), [
    ({"cu_seqlens_q": CU, "seqlens_k": CU}, "seqlens_k is given beside cu_seqlens_q; allowed is one of them: of packed "
                                            "sequences, seqused_k says how many rows take part."),
    ({"max_seqlen_k": 3}, "max_seqlen_k is given without cu_seqlens_q, which says where packed queries begin; allowed "
                          "are both, or neither.")], ids=["both", "neither"])
def test_lengths_that_belong_to_no_call_are_refused(lengths, message):
    with pytest.raises(InvalidInput) as caught:
        explain(*packed(), **lengths)
    assert str(caught.value) == message


def test_a_decoding_call_has_every_backends_answer():
    found = explain_decode(torch.randn(2, 4, 1, 8), CACHE, CACHE, k=NEW, v=NEW, cache_seqlens=3, mask=causal())
    assert (found.forward, found.backward) == ("reference", None)
    lines = str(found).splitlines()
    assert lines[0] == "decode b2 h4/2 s1 cache 10 d8 float32 causal() on cpu"
    assert lines[1] == "  forward  reference  chosen"
    assert "  forward  gluon      no: does not decode; backend='triton' and 'reference' do" in lines
    assert len(lines) == 1 + 7


def test_explaining_a_decoding_call_writes_nothing():
    cache = CACHE.clone()
    explain_decode(torch.randn(2, 4, 1, 8), cache, cache, k=NEW, v=NEW, cache_seqlens=3)
    assert torch.equal(cache, CACHE)


def test_a_decoding_calls_refusal_is_an_answer_and_a_wrong_argument_is_not():
    q = torch.randn(2, 4, 1, 8)
    assert explain_decode(q, CACHE, CACHE, backend="gluon").forward is None
    with use_backend("reference"):
        assert explain_decode(q, CACHE, CACHE).forward == "reference"
    wide = torch.randn(2, 4, 1, 300), torch.randn(2, 2, 10, 300), torch.randn(2, 2, 10, 300)
    assert explain_decode(*wide, backend="triton").forward is None
    for wrong in ({"backend": "flash"}, {"num_splits": 0}, {"return_aux": "lse"}, {"cache_seqlens": torch.zeros(3)}):
        with pytest.raises(InvalidInput) as of_call:
            attention_decode(q, CACHE, CACHE, **wrong)
        with pytest.raises(InvalidInput) as caught:
            explain_decode(q, CACHE, CACHE, **wrong)
        assert str(caught.value) == str(of_call.value)


def test_explain_decode_takes_the_arguments_of_the_call():
    assert inspect.signature(explain_decode).parameters == inspect.signature(attention_decode).parameters
