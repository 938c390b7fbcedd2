"""The public calls: what their arguments may be, what they return, and how a mask and a seed become operands."""

import pytest
import torch

from tilewise import InvalidInput, attention, causal, explain, window
from tilewise.api import AttentionOutput, AttentionOutputWithMax

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
    ({"mask": _NONE.float()}, "mask has dtype torch.float32; allowed are torch.bool."),
    ({"mask": causal("top_left") & _NONE[0]},
     "mask is a tensor of shape (5,); allowed is a tensor of 2 to 4 dims that broadcasts to (b, hq, sq, sk)."),
    ({"mask": _NONE.mT}, "mask has shape (1, 1, 5, 6); allowed is (b=2, hq=4, sq=6, sk=5), or 1 in place of a size."),
    ({"bias": 0.5}, "bias is a float; allowed is a tensor of 2 to 4 dims that broadcasts to (b, hq, sq, sk)."),
    ({"bias": torch.zeros(6, 5, device="meta")}, "bias is on meta and q is on cpu: move them to one device."),
    ({"alibi_slopes": torch.zeros(1, 1, 4)},
     "alibi_slopes is a tensor of shape (1, 1, 4); allowed is a tensor of shape (hq,) or (b, hq)."),
    ({"sinks": torch.zeros(4).half()}, "sinks has dtype torch.float16; allowed are torch.float32."),
    ({"softcap": 0.0}, "softcap is 0.0; allowed is a finite number > 0, or None for none."),
    ({"dropout_p": 1.0}, "dropout_p is 1.0; allowed is a probability, 0 <= dropout_p < 1."),
    ({"return_aux": "lse"}, "return_aux is 'lse'; allowed is a tuple of names out of ('lse', 'max_logit')."),
    ({"return_aux": ("lse", "max")},
     "return_aux is ('lse', 'max'); allowed is a tuple of names out of ('lse', 'max_logit')."),
    ({"return_aux": None}, "return_aux is None; allowed is a tuple of names out of ('lse', 'max_logit')."),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
@pytest.mark.parametrize("call", [attention, explain])
def test_message_names_the_argument_and_what_is_allowed(call, arguments, message):
    with pytest.raises(InvalidInput) as caught:
        call(*_tensors(), **arguments)
    assert str(caught.value) == message


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


def test_explain_prints_the_options():
    text = str(explain(*_tensors(), bias=torch.zeros(6, 5), softcap=30.0, dropout_p=0.1))
    assert text.startswith("b2 h4/2 s6x5 d8 float32 no mask, softcap 30, bias 1x1x6x5, dropout 0.1 on cpu\n")
    assert "  forward  torch      no: takes no bias" in text


def test_autocast_casts_q_k_and_v_and_leaves_the_operands():
    operands = {"bias": torch.randn(6, 5), "sinks": torch.randn(4)}
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*_tensors(), backend="reference", **operands)
    assert torch.equal(out, attention(*_tensors(torch.bfloat16), backend="reference", **operands))
