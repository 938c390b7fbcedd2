"""The public calls: what their arguments may be, what they return, and how a mask and a seed become operands."""

import numpy as np
import pytest
import torch

from tilewise import (
    InvalidInput,
    attention,
    attention_varlen,
    causal,
    documents,
    explain,
    sink_tokens,
    window,
)
from tilewise.api import AttentionOutput, AttentionOutputWithMax
from tilewise.problem import length_checks

_NONE = torch.ones(6, 5, dtype=torch.bool)


def _tensors(dtype=torch.float32):
    """b=2, hq=4, hk=2, sq=6, sk=5."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 8))]


def _equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"mask": [[True]]}, "mask is a list; allowed is None, causal(), window(left, right), a boolean tensor, a "
                         "MaskFunction, or these joined by '&'."),
    ({"mask": _NONE.float()}, "mask has dtype torch.float32; allowed is torch.bool. Numbers that are added to the "
                              "scores go to bias=; a mask says which pairs take part: True, or False."),
    ({"mask": causal("top_left") & _NONE.half()},
     "mask has dtype torch.float16; allowed is torch.bool. Numbers that are added to the scores go to bias=; a mask "
     "says which pairs take part: True, or False."),
    ({"mask": _NONE.long()}, "mask has dtype torch.int64; allowed is torch.bool. Of numbers that are not 0 where a "
                             "pair takes part, pass mask.bool()."),
    ({"mask": causal("top_left") & _NONE[0]},
     "mask is a tensor of shape (5,); allowed is a tensor of 2 to 4 dims that broadcasts to (b, hq, sq, sk)."),
    ({"mask": _NONE.mT}, "mask has shape (1, 1, 5, 6); allowed is (b=2, hq=4, sq=6, sk=5), or 1 in place of a size."),
    ({"bias": _NONE}, "bias has dtype torch.bool; allowed is torch.float32. A boolean tensor, of which True says that "
                      "a pair takes part, goes to mask=."),
    ({"bias": 0.5}, "bias is a float; allowed is a tensor of 2 to 4 dims that broadcasts to (b, hq, sq, sk)."),
    ({"bias": torch.zeros(6, 5, device="meta")}, "bias is on meta and q is on cpu: move them to one device."),
    ({"alibi_slopes": torch.zeros(1, 1, 4)},
     "alibi_slopes is a tensor of shape (1, 1, 4); allowed is a tensor of shape (hq,) or (b, hq)."),
    ({"sinks": 0.5}, "sinks is a float; allowed is a tensor of shape (hq,), or None."),
    ({"seqlens_q": [1, 2]}, "seqlens_q is a list; allowed is a tensor of integers on q's device."),
    ({"seqlens_k": torch.tensor([1.0, 2.0])},
     "seqlens_k has dtype torch.float32; allowed are torch.int32, torch.int64."),
    ({"mask": documents(torch.arange(5))},
     "documents: ids has shape (1, 5); allowed is (b=2, sq=6), or 1 in place of b."),
    ({"mask": documents(torch.arange(6))},
     "documents: key_ids has shape (1, 6); allowed is (b=2, sk=5), or 1 in place of b."),
    ({"mask": torch.ones(2, 5, dtype=torch.bool)},
     "mask has shape (1, 1, 2, 5); allowed is (b=2, hq=4, sq=6, sk=5), or 1 in place of a size. Of padding, (b, sk), "
     "pass mask[:, None, None], or lengths as seqlens_k."),
    ({"sinks": torch.zeros(4).half()}, "sinks has dtype torch.float16; allowed is torch.float32."),
    ({"softcap": 0.0}, "softcap is 0.0; allowed is a number from 2^-126 to 2^127, or None for none."),
    ({"dropout_p": 2**1024}, f"dropout_p is {2**1024}; allowed is a probability, 0 <= dropout_p < 1."),
    ({"dropout_p": 1.0}, "dropout_p is 1.0; allowed is a probability, 0 <= dropout_p < 1."),
    ({"return_aux": "lse"}, "return_aux is 'lse'; allowed is a tuple of names out of ('lse', 'max_logit')."),
    ({"return_aux": ("lse", "max")},
     "return_aux is ('lse', 'max'); allowed is a tuple of names out of ('lse', 'max_logit')."),
    ({"return_aux": None}, "return_aux is None; allowed is a tuple of names out of ('lse', 'max_logit')."),
    ({"scale": "a"}, "scale is 'a'; allowed is a number from 2^-126 to 2^127, or None for 1/sqrt(d)."),
    ({"scale": True}, "scale is True; allowed is a number from 2^-126 to 2^127, or None for 1/sqrt(d)."),
    ({"deterministic": "yes"}, "deterministic is 'yes'; allowed are True and False, or None to follow "
                               "torch.use_deterministic_algorithms."),
    ({"bias": torch.zeros(6, 5).to_sparse()},
     "bias has layout torch.sparse_coo; allowed is torch.strided: call to_dense() on it."),
    ({"mask": torch.ones(2, 4, 6, 5, dtype=torch.bool).to_sparse()},
     "mask has layout torch.sparse_coo; allowed is torch.strided: call to_dense() on it."),
    ({"backend": ""}, "backend is ''; allowed is the name of a backend, or None to choose."),
    ({"backend": 3}, "backend is 3; allowed is the name of a backend, or None to choose."),
    ({"double_backward": "no"}, "double_backward is 'no'; allowed are True and False."),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
@pytest.mark.parametrize("call", [attention, explain])
def test_message_names_the_argument_and_what_is_allowed(call, arguments, message):
    with pytest.raises(InvalidInput) as caught:
        call(*_tensors(), **arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("call", [attention, explain])
def test_names_that_can_be_read_once_are_refused(call):
    """Reading them to check them used them up, and what they asked for was not returned."""
    with pytest.raises(InvalidInput, match=r"return_aux is <generator .*; allowed is a tuple of names out of"):
        call(*_tensors(), return_aux=(name for name in ("lse", "max_logit")))


def test_numbers_of_numpy_are_numbers():
    tensors = _tensors()
    for scale in (np.float32(0.25), np.float64(0.25)):
        assert torch.equal(attention(*tensors, scale=scale, softcap=np.float32(2)),
                           attention(*tensors, scale=0.25, softcap=2.0))
    assert torch.equal(attention(*tensors, dropout_p=np.float32(0.25), dropout_seed=np.int64(3)),
                       attention(*tensors, dropout_p=0.25, dropout_seed=3))
    for name in ("scale", "softcap", "dropout_p"):
        with pytest.raises(InvalidInput, match=f"{name} is np.float32"):
            attention(*tensors, **{name: np.float32(-1)})


def test_integers_of_numpy_are_integers():
    q, lengths, bias = torch.randn(9, 2, 8), torch.tensor([0, 3, 9]), torch.arange(36.0).view(6, 6)
    made = [attention_varlen(q, q, q, cu_seqlens_q=lengths, bias=bias, max_seqlen_q=longest, max_seqlen_k=longest)
            for longest in (6, np.int64(6))]
    assert torch.equal(*made)
    with pytest.raises(InvalidInput, match=r"max_seqlen_q is np.int64\(-1\)"):
        attention_varlen(q, q, q, cu_seqlens_q=lengths, max_seqlen_q=np.int64(-1))


@pytest.mark.parametrize("call", [attention, explain])
@pytest.mark.parametrize(("place", "name"), [(0, "q"), (1, "k"), (2, "v")])
def test_what_is_no_tensor_is_refused_by_name(call, place, name):
    tensors = list(_tensors())
    tensors[place] = tensors[place].tolist()
    with pytest.raises(InvalidInput) as caught:
        call(*tensors)
    assert str(caught.value) == f"{name} is a list; allowed is a torch.Tensor."


@pytest.mark.parametrize("call", [attention, explain])
@pytest.mark.parametrize(("make", "message"), [
    (lambda tensor: tensor.to_sparse(),
     "k has layout torch.sparse_coo; allowed is torch.strided: call to_dense() on it."),
    (lambda tensor: torch.nested.nested_tensor(list(tensor), layout=torch.jagged),
     "k is a nested tensor; allowed is a dense one. attention_varlen takes sequences of several lengths: the values, "
     "packed, and where each begins."),
], ids=["sparse", "nested"])
def test_tensors_without_strides_are_refused_by_name(call, make, message):
    q, k, v = _tensors()
    with pytest.raises(InvalidInput) as caught:
        call(q, make(k), v)
    assert str(caught.value) == message


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "dropout_p": 0.5}, {"double_backward": True}], ids=str)
def test_meta_tensors_give_meta_tensors(options, autocast):
    """torch has no autocast for them and raised when it was asked whether it was on."""
    q, k, v = (tensor.to("meta").requires_grad_() for tensor in _tensors())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out, lse = attention(q, k, v, return_aux=("lse",), **options)
        explained = explain(q, k, v)
    assert (out.device.type, out.shape, out.dtype) == ("meta", q.shape, q.dtype)
    assert (lse.device.type, lse.shape, lse.dtype) == ("meta", q.shape[:3], torch.float32)
    assert explained.forward == "reference"
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(made.is_meta and made.shape == of.shape for made, of in zip((dq, dk, dv), (q, k, v), strict=True))


@pytest.mark.parametrize("seed", [1.5, True, "7", 2**63, -2**63 - 1])
def test_dropout_seed_that_is_no_integer_raises(seed):
    with pytest.raises(InvalidInput) as caught:
        attention(*_tensors(), dropout_p=0.5, dropout_seed=seed)
    assert str(caught.value) == (
        f"dropout_seed is {seed!r}; allowed is an integer of 64 bits, an int64 tensor of shape (1,), or None.")


@pytest.mark.parametrize("seed", [torch.tensor([1, 2]), torch.tensor(1), torch.tensor([1.0]),
                                  torch.ones(1, dtype=torch.int64, device="meta")], ids=["two", "0d", "float", "meta"])
def test_dropout_seed_that_is_another_tensor_raises(seed):
    with pytest.raises(InvalidInput, match=r"seed (has (shape|dtype)|is on meta)"):
        attention(*_tensors(), dropout_p=0.5, dropout_seed=seed)


def test_what_is_asked_for_is_returned_by_name():
    tensors = _tensors()
    out = attention(*tensors)
    assert isinstance(out, torch.Tensor)
    with_lse = attention(*tensors, return_aux=("lse",), backend="reference")
    assert type(with_lse) is AttentionOutput
    for names in (("max_logit",), ("lse", "max_logit")):
        with_max = attention(*tensors, return_aux=names, backend="reference")
        assert type(with_max) is AttentionOutputWithMax
        assert _equal(with_max[:2], with_lse)
        assert with_max.max_logit.shape == with_max.lse.shape


@pytest.mark.parametrize("tile", [2, 256])
def test_max_logit_is_the_largest_visible_score_without_the_sink(tile, monkeypatch):
    monkeypatch.setattr("tilewise.kernels.reference.primitives.BLOCK", tile)
    q, k, v = _tensors(torch.float64)
    bias, visible = torch.randn(6, 5, dtype=torch.float64), torch.rand(2, 1, 6, 5) > 0.4
    visible[0, 0, 2] = False
    results = attention(q, k, v, bias=bias, mask=visible, sinks=torch.full((4,), 99.0, dtype=torch.float64),
                        return_aux=("max_logit",), backend="reference")
    scores = (q @ k.repeat_interleave(2, 1).mT / 8**0.5 + bias).masked_fill(~visible, float("-inf"))
    torch.testing.assert_close(results.max_logit, scores.amax(-1))
    assert (results.max_logit[0, :, 2] == float("-inf")).all()


@pytest.mark.parametrize("shape", [(6, 5), (4, 1, 5), (2, 1, 6, 1)], ids=str)
def test_bias_of_fewer_dims_is_one_that_is_broadcast(shape):
    bias = torch.randn(shape)
    whole = bias.expand(2, 4, 6, 5)
    assert torch.equal(attention(*_tensors(), bias=bias), attention(*_tensors(), bias=whole))


def test_slopes_are_bias_by_distance():
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0])
    for alignment, offset in (("top_left", 0), ("bottom_right", -1)):
        distance = (torch.arange(6)[:, None] + offset - torch.arange(5)).abs()
        mask = window(None, None, alignment)
        expected = attention(*_tensors(), mask=mask, bias=-slopes[:, None, None] * distance)
        for given in (slopes, slopes.expand(2, 4)):
            torch.testing.assert_close(attention(*_tensors(), mask=mask, alibi_slopes=given), expected)


def test_a_band_may_come_as_a_tensor_alone_or_joined_with_one():
    band, padding = causal("bottom_right"), torch.rand(2, 1, 1, 5) > 0.3
    expected = attention(*_tensors(), mask=band.visible(6, 5) & padding, return_aux=("lse",), backend="reference")
    assert _equal(attention(*_tensors(), mask=band & padding, return_aux=("lse",), backend="reference"), expected)
    plain = attention(*_tensors(), mask=band, return_aux=("lse",), backend="reference")
    assert _equal(attention(*_tensors(), mask=band.visible(6, 5), return_aux=("lse",), backend="reference"), plain)


@pytest.mark.parametrize("sinks_dtype", [torch.float32, torch.bfloat16])
def test_rows_that_see_nothing_give_zero_and_the_sink(sinks_dtype):
    """Rows 0 and 1 are hidden by their position, row 3 by data."""
    q, k, v = _tensors(torch.bfloat16)
    visible = _NONE.clone()
    visible[3] = False
    sinks = torch.tensor([0.5, -1.0, float("-inf"), 2.0], dtype=sinks_dtype)
    out, lse = attention(q, k[:, :, :4], v[:, :, :4], mask=causal("bottom_right") & visible[:, :4], sinks=sinks,
                         return_aux=("lse",), backend="reference")
    for row in (0, 1, 3):
        assert (out[:, :, row] == 0).all()
        assert torch.equal(lse[:, :, row], sinks.float().expand(2, 4))


@pytest.mark.parametrize("lengths", [(0, 5), (6, 0)], ids=str)
def test_a_call_without_pairs_takes_every_option(lengths):
    sq, sk = lengths
    q, k = torch.randn(2, 4, sq, 8, requires_grad=True), torch.randn(2, 2, sk, 8, requires_grad=True)
    operands = {"bias": torch.randn(sq, sk, requires_grad=True), "sinks": torch.ones(4, requires_grad=True),
                "alibi_slopes": torch.randn(4, requires_grad=True)}
    out, lse, max_logit = attention(
        q, k, k, mask=causal("top_left") & torch.ones(sq, sk, dtype=torch.bool), softcap=1.0, dropout_p=0.5,
        return_aux=("lse", "max_logit"), backend="reference", **operands)
    (out.sum() + lse.sum()).backward()
    assert (lse == 1.0).all()
    assert (max_logit == float("-inf")).all()
    assert [operand.grad.count_nonzero().item() for operand in operands.values()] == [0, 4 if sq else 0, 0]
    assert torch.equal(operands["sinks"].grad, torch.full((4,), 2.0 * sq)), "lse is the sink in every row"


def test_a_drawn_seed_follows_torchs_generator():
    torch.manual_seed(3)
    first, second = (attention(*_tensors(), dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(attention(*_tensors(), dropout_p=0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1])
def test_a_seed_may_be_an_integer_or_a_tensor(seed):
    as_tensor = torch.tensor([seed])
    assert torch.equal(attention(*_tensors(), dropout_p=0.5, dropout_seed=seed),
                       attention(*_tensors(), dropout_p=0.5, dropout_seed=as_tensor))


def test_without_dropout_no_seed_is_drawn():
    state = torch.get_rng_state()
    attention(*_tensors(), dropout_seed=5)
    attention(*_tensors())
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast_casts_q_k_and_v_and_leaves_the_operands():
    operands = {"bias": torch.randn(6, 5), "sinks": torch.randn(4)}
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*_tensors(), backend="reference", **operands)
    assert torch.equal(out, attention(*_tensors(torch.bfloat16), backend="reference", **operands))


# Sequences of 2, 0 and 3 queries, and of 1, 2 and 2 keys.
_LENGTHS = torch.tensor([2, 0, 3]), torch.tensor([1, 2, 2])


def _packed():
    """q, k and v of :data:`_LENGTHS`, packed, and where the sequences begin and end."""
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(shape, generator=generator) for shape in ((5, 4, 8), (5, 2, 8), (5, 2, 6))]
    return tensors, [torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) for lengths in _LENGTHS]


def test_autocast_casts_packed_rows():
    tensors, (cu_q, cu_k) = _packed()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_varlen(*tensors, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    rounded = [tensor.bfloat16() for tensor in tensors]
    assert torch.equal(out, attention_varlen(*rounded, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k))


def _padded(packed, borders, rows):
    """Packed (total, h, d) as (n, h, rows, d); NaN behind a sequence's end."""
    padded = torch.full((len(borders) - 1, packed.shape[1], rows, packed.shape[2]), float("nan"))
    for n, (start, stop) in enumerate(zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)):
        padded[n, :, :stop - start] = packed[start:stop].transpose(0, 1)
    return padded


@pytest.mark.parametrize("mask", [causal("bottom_right"), window(1, 1, "top_left"), None], ids=str)
def test_packed_equals_padded_equals_one_sequence_after_another(mask):
    (q, k, v), (cu_q, cu_k) = _packed()
    options = {"mask": mask, "sinks": torch.ones(4), "backend": "reference", "return_aux": ("lse", "max_logit")}
    packed = attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    assert type(packed) is AttentionOutputWithMax
    assert (packed.out.shape, packed.lse.shape, packed.max_logit.shape) == ((5, 4, 6), (4, 5), (4, 5))
    padded = attention(_padded(q, cu_q, 7), _padded(k, cu_k, 4), _padded(v, cu_k, 4), seqlens_q=_LENGTHS[0],
                       seqlens_k=_LENGTHS[1], **options)
    for n in range(3):
        queries, keys = (slice(*cu[n:n + 2].tolist()) for cu in (cu_q, cu_k))
        alone = attention(*(tensor[part].transpose(0, 1)[None] for tensor, part in (
            (q, queries), (k, keys), (v, keys))), **options)
        rows = alone.out.shape[2]
        torch.testing.assert_close(packed.out[queries], alone.out[0].transpose(0, 1))
        torch.testing.assert_close(padded.out[n, :, :rows], alone.out[0])
        assert not padded.out[n, :, rows:].any()
        for name in ("lse", "max_logit"):
            torch.testing.assert_close(getattr(packed, name)[:, queries], getattr(alone, name)[0])
            torch.testing.assert_close(getattr(padded, name)[n, :, :rows], getattr(alone, name)[0])
            assert getattr(padded, name)[n, :, rows:].isneginf().all()


@pytest.fixture
def unseen_lengths(monkeypatch):
    """Let lengths on a CPU be as those on a GPU, whose values nobody looks at ahead of a backend."""
    monkeypatch.setattr(length_checks, "_may_look", lambda *_, **__: False)


@pytest.mark.usefixtures("unseen_lengths")
def test_rows_that_no_sequence_uses_are_padding():
    (q, k, v), (cu_q, cu_k) = _packed()
    used = torch.tensor([1, 5, 2], dtype=torch.int32)  # more than a sequence has is all it has
    out, lse = attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_q=used, seqused_k=used - 1,
                                return_aux=("lse",), backend="reference")
    assert type(attention_varlen(q, k, v, cu_seqlens_q=cu_q[:3], backend="reference")) is torch.Tensor
    assert torch.equal(lse[0].isneginf(), torch.tensor([True, True, False, False, True]))
    assert torch.equal(out[:, 0, 0] == 0, torch.tensor([True, True, False, False, True]))
    alone = attention(*(part.transpose(0, 1)[None] for part in (q[2:4], k[3:4], v[3:4])), backend="reference")
    torch.testing.assert_close(out[2:4], alone[0].transpose(0, 1))


@pytest.mark.usefixtures("unseen_lengths")
def test_lengths_past_what_is_stored_end_with_the_storage():
    (q, k, v), (cu_q, cu_k) = _packed()
    options = {"backend": "reference"}
    right = attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    past = torch.tensor([0, 0, 90])
    assert torch.equal(attention_varlen(q, k, v, cu_seqlens_q=cu_q + past[[0, 0, 0, 2]],
                                        cu_seqlens_k=cu_k + past[[0, 0, 0, 2]], **options), right)
    tensors = _tensors()
    assert torch.equal(attention(*tensors, seqlens_k=torch.tensor([99, -3]), **options)[0],
                       attention(*tensors, **options)[0])
    assert not attention(*tensors, seqlens_k=torch.tensor([99, -3]), **options)[1].any()


def test_lengths_that_queries_and_keys_share_need_no_alignment():
    (q, k, v), (cu, _) = _packed()
    expected = attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu.clone(), mask=causal("bottom_right"))
    for others in ({}, {"cu_seqlens_k": cu}, {"seqused_q": (used := torch.tensor([2, 0, 3])), "seqused_k": used}):
        assert torch.equal(attention_varlen(q, k, v, cu_seqlens_q=cu, mask=causal(), **others), expected)
    for others in ({"cu_seqlens_k": cu.clone()}, {"seqused_q": used}):
        with pytest.raises(InvalidInput, match="names no alignment, but lengths are data"):
            attention_varlen(q, k, v, cu_seqlens_q=cu, mask=causal(), **others)
    tensors, lengths = _tensors(), torch.tensor([3, 5])
    assert torch.equal(attention(*tensors, seqlens_q=lengths, seqlens_k=lengths, mask=causal()),
                       attention(*tensors, seqlens_q=lengths, seqlens_k=lengths.clone(), mask=causal("bottom_right")))


def test_lengths_may_lie_anywhere():
    (q, k, v), (cu, _) = _packed()
    spread = torch.stack([cu, cu], 1)[:, 0]
    assert spread.stride() == (2,)
    assert torch.equal(attention_varlen(q, k, v, cu_seqlens_q=spread), attention_varlen(q, k, v, cu_seqlens_q=cu))


@pytest.mark.usefixtures("unseen_lengths")
def test_a_sequence_longer_than_a_bias_is_named_by_the_reference_which_reads_lengths():
    q, borders = torch.randn(5, 2, 4), torch.tensor([0, 2, 5])
    for side, shape in (("q", (2, 3)), ("k", (3, 2))):
        with pytest.raises(InvalidInput, match=f"max_seqlen_{side} is 2, the size of a bias or a mask, and a sequence "
                                               "has 3; allowed is the longest one's or more"):
            attention_varlen(q, q, q, cu_seqlens_q=borders, bias=torch.zeros(shape), max_seqlen_q=shape[0],
                             max_seqlen_k=shape[1], backend="reference")


@pytest.mark.parametrize("longest", [{"max_seqlen_q": 3, "max_seqlen_k": 2}, {"max_seqlen_q": torch.tensor(3)}, {}],
                         ids=["integers", "tensor", "none"])
def test_the_longest_lengths_matter_to_operands_alone(longest):
    (q, k, v), (cu_q, cu_k) = _packed()
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **longest}
    plain = attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend="reference")
    assert torch.equal(attention_varlen(q, k, v, backend="reference", **lengths), plain)
    for operand in ({"bias": torch.zeros(4, 3, 2)}, {"mask": torch.ones(3, 1, 3, 2, dtype=torch.bool)}):
        if isinstance(longest.get("max_seqlen_q"), int):
            assert torch.equal(attention_varlen(q, k, v, backend="reference", **operand, **lengths), plain)
        else:
            with pytest.raises(InvalidInput, match="pass max_seqlen_q as an integer, the size of its dim 2"):
                attention_varlen(q, k, v, **operand, **lengths)
    assert torch.equal(attention_varlen(q, k, v, bias=torch.zeros(3, 1, 1, 1), backend="reference", **lengths), plain)


_CU = torch.tensor([0, 2, 5])


@pytest.mark.parametrize(("arguments", "message"), [
    ({"q": torch.zeros(1, 4, 5, 8)}, "q has shape (1, 4, 5, 8); allowed is a tensor of 3 dims (total, h, d)."),
    ({"v": 0.5}, "v has type float; allowed is a tensor of 3 dims (total, h, d)."),
    ({"cu_seqlens_q": [0, 5]}, "cu_seqlens_q is a list; allowed is a tensor of integers on q's device."),
    ({"cu_seqlens_q": None}, "cu_seqlens_q is a NoneType; allowed is a tensor of integers on q's device."),
    ({"seqused_k": (2, 3)}, "seqused_k is a tuple; allowed is a tensor of integers on q's device."),
    ({"seqused_q": torch.tensor([2])}, "seqused_q has shape (1,); allowed is (sequences=2)."),
    ({"max_seqlen_q": -1}, "max_seqlen_q is -1; allowed is an integer >= 0, a tensor of one element, or None."),
    ({"max_seqlen_k": 2.5}, "max_seqlen_k is 2.5; allowed is an integer >= 0, a tensor of one element, or None."),
    ({"max_seqlen_k": True}, "max_seqlen_k is True; allowed is an integer >= 0, a tensor of one element, or None."),
    ({"max_seqlen_q": _CU}, "max_seqlen_q is tensor([0, 2, 5]); allowed is an integer >= 0, a tensor of one element, "
                            "or None."),
    ({"mask": "causal"}, "mask is a str; allowed is None, causal(), window(left, right), a boolean tensor, a "
                         "MaskFunction, or these joined by '&'."),
    ({"softcap": True}, "softcap is True; allowed is a number from 2^-126 to 2^127, or None for none."),
    ({"dropout_p": True}, "dropout_p is True; allowed is a probability, 0 <= dropout_p < 1."),
    ({"scale": "s"}, "scale is 's'; allowed is a number from 2^-126 to 2^127, or None for 1/sqrt(d)."),
    ({"return_aux": "lse"}, "return_aux is 'lse'; allowed is a tuple of names out of ('lse', 'max_logit')."),
    ({"mask": documents(torch.arange(4))},
     "documents: ids has shape (1, 4); allowed is (b=1, sq=5), or 1 in place of b."),
], ids=str)
def test_message_of_a_packed_call_names_the_argument(arguments, message):
    (q, k, v), _ = _packed()
    with pytest.raises(InvalidInput) as caught:
        attention_varlen(**{"q": q, "k": k, "v": v, "cu_seqlens_q": _CU} | arguments)
    assert str(caught.value) == message


def test_packed_documents_end_with_their_sequence():
    """One document over everything: the second sequence must not see the first one's part of it."""
    (q, k, v), (cu, _) = _packed()
    for ids in (torch.zeros(5, dtype=torch.int64), torch.tensor([4, 4, 4, 1, 1])):
        inside = ids[:, None] == ids
        inside[:2, 2:] = inside[2:, :2] = False
        expected = attention(*(tensor.transpose(0, 1)[None] for tensor in (q, k, v)), mask=causal() & inside,
                             backend="reference")
        got = attention_varlen(q, k, v, cu_seqlens_q=cu, mask=causal() & documents(ids), backend="reference")
        torch.testing.assert_close(got, expected[0].transpose(0, 1))


@pytest.mark.parametrize("tile", [2, 256])
@pytest.mark.parametrize("ids", [[0, 0, 1, 1, 1, 2], [0, 1, 0, 1, 2, 0], [3, 3, 3, 3, 3, 3]], ids=str)
def test_documents_equal_a_boolean_tensor(ids, tile, monkeypatch):
    monkeypatch.setattr("tilewise.kernels.reference.primitives.BLOCK", tile)
    q, k, v = _tensors()
    k, v, ids = torch.cat([k, k[:, :, :1]], 2), torch.cat([v, v[:, :, :1]], 2), torch.tensor(ids)
    expected = attention(q, k, v, mask=causal() & (ids[:, None] == ids), return_aux=("lse",), backend="reference")
    got = attention(q, k, v, mask=causal() & documents(ids), return_aux=("lse",), backend="reference")
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_tiles_between_documents_and_in_the_hole_behind_sink_tokens_are_not_read(monkeypatch):
    monkeypatch.setattr("tilewise.kernels.reference.primitives.BLOCK", 2)
    q, k, v = (torch.randn(1, 1, 8, 4) for _ in range(3))
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    for mask, hidden, rows in ((documents(ids), slice(0, 4), slice(4, 8)),
                               (causal() & window(1, 0) & sink_tokens(1), slice(1, 5), slice(6, 8))):
        clean = attention(q, k, v, mask=mask, backend="reference")
        poisoned = v.clone()
        poisoned[:, :, hidden] = float("nan")
        got = attention(q, k, poisoned, mask=mask, backend="reference")
        assert torch.equal(got[:, :, rows], clean[:, :, rows])
        assert got.isnan().any()


def test_tensors_without_memory_give_the_shapes_of_results_and_gradients():
    """torch's own question whether autocast is on raises for the device "meta", where models are laid out."""
    q, k, sinks = (torch.empty(shape, device="meta", requires_grad=True)
                   for shape in ((2, 4, 5, 8), (2, 2, 9, 8), (4,)))
    out, lse = attention(q, k, k[..., :6], sinks=sinks, mask=causal("top_left"), return_aux=("lse",))
    assert (out.shape, lse.shape, out.device.type) == ((2, 4, 5, 6), (2, 4, 5), "meta")
    out.sum().backward()
    assert [tensor.grad.shape for tensor in (q, k, sinks)] == [(2, 4, 5, 8), (2, 2, 9, 8), (4,)]
    rows = torch.empty(7, 4, 8, device="meta")
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    assert attention_varlen(rows, rows, rows, cu_seqlens_q=ends, mask=causal()).shape == rows.shape
