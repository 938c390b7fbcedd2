"""What ``attention_decode`` refuses, word for word; and what it makes of the rest."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tilewise import InvalidInput, Mask, UnsupportedProblem, attention_decode, causal, documents, sink_tokens, window
from tilewise.backends._support import reference_decode, triton_decode
from tilewise.dispatch import choose_decoder
from tilewise.problem.decode import CacheOperands, DecodeOptions, decode_problem, specs_of_inputs, specs_of_present

Q, CACHE = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 10, 8)
NEW, LENGTHS, TABLE = torch.randn(2, 2, 1, 8), torch.tensor([3, 4]), torch.zeros(2, 3, dtype=torch.int32)
ANGLES = torch.zeros(10, 4)


def call(q=Q, k_cache=CACHE, v_cache=CACHE, **more):
    return attention_decode(q, k_cache, v_cache, **more)


WRONG = {
    "k_cache is a list; allowed is a torch.Tensor of shape (b, h, s, d).": {"k_cache": []},
    "k_cache has head dim 6 and q has 8: they must be equal (v_cache's may differ).": {"k_cache": CACHE[..., :6]},
    "v_cache has dtype torch.float16 and q has torch.float32: cast them to one dtype.": {"v_cache": CACHE.half()},
    "v_cache has shape (2, 2, 9, 8) and k_cache (2, 2, 10, 8): they may differ in their head dim alone.":
        {"v_cache": CACHE[:, :, :9]},
    "k_cache has 2 heads and q has 3: q heads must be a multiple of k heads. Did you transpose (b, h, s, d)?":
        {"q": Q[:, :3]},
    "k_cache has stride 10 along its head dim; allowed is 1: a cache is not copied.":
        {"k_cache": torch.randn(2, 2, 8, 10).mT},
    "v_cache is expanded (strides (0, 80, 8, 1)) and k is given, which would be written to one place for several of "
    "its positions; allowed is memory for each: v_cache.clone().":
        {"k_cache": CACHE.clone(), "v_cache": CACHE[:1].expand(2, -1, -1, -1), "k": NEW, "v": NEW,
         "cache_seqlens": LENGTHS},
    "cache_batch_idx is given and so is block_table; allowed is one of them: a table says already where a sequence "
    "lies.": {"cache_batch_idx": LENGTHS, "block_table": TABLE},
    "k_cache has shape (2, 2, 0, 8): pages of 0 positions; allowed are 1 and more.":
        {"k_cache": CACHE[:, :, :0], "v_cache": CACHE[:, :, :0], "block_table": TABLE},
    "k_cache has batch size 1 and q has 2: they must be equal, unless cache_batch_idx or block_table says where a "
    "sequence lies.": {"k_cache": CACHE[:1], "v_cache": CACHE[:1]},
    "k has shape (2, 4, 1, 8); allowed is (b=2, hk=2, new=1, d=8).":
        {"k": NEW.repeat(1, 2, 1, 1), "v": NEW, "cache_seqlens": LENGTHS},
    "v has shape (2, 2, 3, 8); allowed is (b=2, hk=2, new=1, dv=8).":
        {"k": NEW, "v": NEW.repeat(1, 1, 3, 1), "cache_seqlens": LENGTHS},
    "k has dtype torch.float64; allowed is torch.float32.":
        {"k": NEW.double(), "v": NEW, "cache_seqlens": LENGTHS},
    "k is given without v; allowed are both, or none.": {"k": NEW, "cache_seqlens": LENGTHS},
    "v is given without k; allowed are both, or none.": {"v": NEW[:, :, :0], "cache_seqlens": LENGTHS},
    "k is given without cache_seqlens, which says where they are to be written.": {"k": NEW, "v": NEW},
    "k has 11 positions and the cache holds 10; allowed are no more.":
        {"k": NEW.repeat(1, 1, 11, 1), "v": NEW.repeat(1, 1, 11, 1), "cache_seqlens": LENGTHS},
    "cache_seqlens has shape (3,); allowed is (b=2).": {"cache_seqlens": torch.zeros(3, dtype=torch.int32)},
    "cache_seqlens has dtype torch.float32; allowed are torch.int32, torch.int64.": {"cache_seqlens": torch.zeros(2)},
    "cache_seqlens has stride 2; allowed is 1: call contiguous() on it.": {"cache_seqlens": TABLE.view(-1)[::2][:2]},
    "cache_seqlens is 2.5; allowed is a tensor of shape (b,), an integer from 0 up, or None.": {"cache_seqlens": 2.5},
    "cache_leftpad has shape (2, 3); allowed is (b=2).": {"cache_leftpad": TABLE},
    "block_table has shape (1, 3); allowed is (b=2, pages a sequence=3).": {"block_table": TABLE[:1]},
    "rotary_cos is given without k, which says which keys turn; those of the cache have turned already.":
        {"rotary_cos": ANGLES, "rotary_sin": ANGLES},
    "rotary_cos is given without rotary_sin; allowed are both, or none.":
        {"k": NEW, "v": NEW, "cache_seqlens": LENGTHS, "rotary_cos": ANGLES},
    "rotary_cos has shape (9, 4); allowed is (positions, rotary_dim / 2) with at least 10 positions, the capacity of "
    "the cache, and a rotary_dim of 2 to 8.":
        {"k": NEW, "v": NEW, "cache_seqlens": LENGTHS, "rotary_cos": ANGLES[:9], "rotary_sin": ANGLES[:9]},
    "rotary_interleaved is 'yes'; allowed are True and False.": {"rotary_interleaved": "yes"},
    "rotary_interleaved is None; allowed are True and False.": {"rotary_interleaved": None},
    "rotary_cos has dtype torch.int64; allowed are floating-point dtypes.":
        {"k": NEW, "v": NEW, "cache_seqlens": LENGTHS, "rotary_cos": ANGLES.long(), "rotary_sin": ANGLES.long()},
    "rotary_sin has shape (10, 3); allowed is (positions=10, rotary_dim / 2=4).":
        {"k": NEW, "v": NEW, "cache_seqlens": LENGTHS, "rotary_cos": ANGLES, "rotary_sin": ANGLES[:, :3]},
    "rotary_sin has stride 10; allowed is 1: call contiguous() on it.":
        {"k": NEW, "v": NEW, "cache_seqlens": LENGTHS, "rotary_cos": ANGLES, "rotary_sin": torch.zeros(4, 10).mT},
    "alibi_slopes has shape (1, 3); allowed is (b=2, hq=4), or 1 in place of b.": {"alibi_slopes": torch.zeros(3)},
    "cache_seqlens is -1; allowed is a tensor of shape (b,), an integer from 0 up, or None.": {"cache_seqlens": -1},
    "sinks is a list; allowed is a torch.Tensor, or None.": {"sinks": [0.0] * 4},
    "sinks has shape (2,); allowed is (hq=4).": {"sinks": torch.zeros(2)},
    "scale is 0.0; allowed is a number from 2^-126 to 2^127, or None for 1/sqrt(d).": {"scale": 0.0},
    "softcap is -1.0; allowed is a number from 2^-126 to 2^127, or None for none.": {"softcap": -1.0},
    "num_splits is 0; allowed is an integer >= 1, or None to choose.": {"num_splits": 0},
    "num_splits is '3'; allowed is an integer >= 1, or None to choose.": {"num_splits": "3"},
    "num_splits is True; allowed is an integer >= 1, or None to choose.": {"num_splits": True},
    "scale is 'a'; allowed is a number from 2^-126 to 2^127, or None for 1/sqrt(d).": {"scale": "a"},
    "softcap is 'a'; allowed is a number from 2^-126 to 2^127, or None for none.": {"softcap": "a"},
    "deterministic is 1; allowed are True and False, or None to follow torch.use_deterministic_algorithms.":
        {"deterministic": 1},
    "backend is 1; allowed is the name of a backend, or None to choose.": {"backend": 1},
    "backend is ''; allowed is the name of a backend, or None to choose.": {"backend": ""},
    "q has layout torch.sparse_coo; allowed is torch.strided: call to_dense() on it.": {"q": Q.to_sparse()},
    "return_aux is 'lse'; allowed are () and ('lse',).": {"return_aux": "lse"},
    "return_aux is None; allowed are () and ('lse',).": {"return_aux": None},
    "return_aux is ('max_logit',); allowed are () and ('lse',).": {"return_aux": ("max_logit",)},
    "mask is a Tensor; allowed is None, causal() or window(left, right). Padding is told by cache_seqlens and "
    "cache_leftpad.": {"mask": torch.ones(1, 10).bool()},
    "mask is causal(alignment='top_left'); allowed is alignment='bottom_right', or none: the last query stands on the "
    "last key of the cache.": {"mask": causal("top_left")},
    "q requires a gradient, and decoding has no backward pass; call it under torch.no_grad(), or attention() without "
    "a cache.": {"q": Q.clone().requires_grad_()},
    "sinks requires a gradient, and decoding has no backward pass; call it under torch.no_grad(), or attention() "
    "without a cache.": {"sinks": torch.zeros(4, requires_grad=True)},
}


def test_a_length_may_be_an_integer_of_numpys():
    assert torch.equal(call(cache_seqlens=np.int64(3)), call(cache_seqlens=3))


@pytest.mark.parametrize("message", WRONG)
def test_what_has_no_meaning_is_refused_by_name(message):
    with pytest.raises(InvalidInput) as caught:
        call(**WRONG[message])
    assert str(caught.value) == message


def test_a_mask_with_exceptions_is_not_decoded():
    with pytest.raises(UnsupportedProblem) as caught:
        call(mask=window(5, 0) & sink_tokens(2))
    assert str(caught.value) == ("mask is causal() & window(5, 0) & sink_tokens(2); decoding takes causal() and "
                                 "window(left, right).")
    with pytest.raises(InvalidInput, match="mask is a TensorMask; allowed is None"):
        call(mask=documents(torch.zeros(10, dtype=torch.int32)))


@pytest.mark.parametrize(("asked", "subject"), [(None, "no backend takes"), ("triton", "backend 'triton' refuses"),
                                                ("torch", "backend 'torch' refuses")])
def test_a_refusal_says_what_was_asked_for(monkeypatch, asked, subject):
    """Where none was named it said "backend None"."""
    for module in (reference_decode, triton_decode):
        monkeypatch.setattr(module, "why_not", lambda problem: "says no")
    problem = decode_problem(specs_of_inputs(Q, CACHE, CACHE), (), DecodeOptions(Mask()))
    with pytest.raises(UnsupportedProblem) as caught:
        choose_decoder.__wrapped__(problem, asked)
    assert str(caught.value).startswith(f"{subject} this problem: {problem}\n  ")
    assert list(caught.value.reasons) == (["reference", "triton"] if asked is None else [asked])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rows_that_reach_over_more_memory_than_32_bits_count_are_refused_in_words(name):
    operands = specs_of_present(CacheOperands(k=NEW, v=NEW, cache_seqlens=LENGTHS))
    problem = decode_problem(specs_of_inputs(Q, CACHE, CACHE), operands, DecodeOptions())

    def apart(stride):
        return replace(problem, tensors=tuple((own, (*strides[:3], stride) if own == name else strides, dtype)
                                              for own, strides, dtype in problem.tensors))

    assert problem.width == 16
    assert triton_decode.why_not(apart(2**27)) == (
        f"decodes rows of {name} within {2**31 - 1} elements of memory, got 8 head dims, {2**27} elements apart: call "
        "contiguous() on it")
    assert triton_decode.why_not(apart(2**27 - 1)) is None


def test_no_gradient_is_asked_for_under_no_grad():
    with torch.no_grad():
        call(q=Q.clone().requires_grad_())


def test_calls_that_differ_in_the_dtype_of_a_length_are_two_problems():
    """A launch keeps the kernel of its first call, which reads lengths of that call's size."""
    one, other = (decode_problem(specs_of_inputs(Q, CACHE, CACHE),
                                 specs_of_present(CacheOperands(cache_seqlens=LENGTHS.to(dtype))), DecodeOptions())
                  for dtype in (torch.int32, torch.int64))
    assert one != other


def test_a_table_makes_the_capacity():
    problem = decode_problem(specs_of_inputs(Q, CACHE, CACHE), specs_of_present(CacheOperands(block_table=TABLE)),
                             DecodeOptions())
    assert (problem.page, problem.capacity) == (10, 30)
    assert str(problem) == "decode b2 h4/2 s1 cache 30 in pages of 10 d8 float32 no mask on cpu"
