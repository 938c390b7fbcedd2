"""llm.c's packed attention: its layout, its mask, and that nothing is copied on the way."""

import pytest
import torch

from tilewise.errors import InvalidInput
from tilewise.integrations import llmc
from tilewise.integrations.llmc import packed_attention


def packed_input(requires_grad=False):
    made = torch.randn(2, 33, 3 * 48, generator=torch.Generator().manual_seed(0))
    return made.requires_grad_(requires_grad)


def written_out(packed, heads):
    """llm.c's attention_forward, line by line, in float64: (out, lse)."""
    b, s, columns = packed.shape
    q, k, v = (part.reshape(b, s, heads, columns // 3 // heads) for part in packed.double().split(columns // 3, 2))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[3] ** 0.5
    scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf"))
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(3), v).reshape(b, s, columns // 3)
    return out, scores.logsumexp(3)


def test_out_and_lse_are_those_of_llmc():
    packed = packed_input()
    out, lse = packed_attention(packed, 3, return_lse=True)
    for got, wanted in zip((out, lse), written_out(packed, 3), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=2e-6, rtol=0)


def test_gradient_arrives_in_the_packed_layout():
    packed, dout = packed_input(requires_grad=True), torch.randn(2, 33, 48)
    (got,) = torch.autograd.grad(packed_attention(packed, 3), packed, dout)
    (wanted,) = torch.autograd.grad(written_out(packed, 3)[0], packed, dout.double())
    torch.testing.assert_close(got, wanted, atol=5e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_call_has_no_gradient_through_lse():
    """The backend has none, and would refuse: lse is asked for where it is returned alone."""
    compiled = torch.compile(lambda packed: packed_attention(packed, 2, backend="torch"), backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(packed := packed_input(requires_grad=True)).sum(), packed)
    (wanted,) = torch.autograd.grad(packed_attention(packed, 2, backend="torch").sum(), packed)
    assert torch.equal(gradient, wanted)


def test_a_full_mask_and_a_scale_can_be_asked_for():
    packed = packed_input()
    full = packed_attention(packed, 3, is_causal=False, scale=0.5)
    q, k, v = packed.unflatten(2, (3, 3, 16)).unbind(2)
    wanted = (torch.einsum("bihd,bjhd->bhij", q, k) * 0.5).softmax(3) @ v.transpose(1, 2)
    torch.testing.assert_close(full, wanted.transpose(1, 2).flatten(2))


def test_kernels_are_handed_views_of_the_input_and_out_is_returned_where_it_was_written(monkeypatch):
    packed, seen = packed_input(), {}

    def attention(q, k, v, **options):
        result = real(q, k, v, **options)
        seen.update(q=q, k=k, v=v, out=result)
        return result

    real = llmc.attention
    monkeypatch.setattr(llmc, "attention", attention)
    out = packed_attention(packed, 3)
    storage = packed.untyped_storage().data_ptr()
    assert [seen[name].untyped_storage().data_ptr() for name in "qkv"] == [storage] * 3
    assert out.data_ptr() == seen["out"].data_ptr()


@pytest.mark.parametrize(("shape", "heads", "words"), [
    ((2, 33), 3, r"packed has shape \(2, 33\); allowed are 3 dims"),
    ((2, 33, 144), 5, "packed has 144 columns and heads is 5"),
    ((2, 33, 144), 0, "packed has 144 columns and heads is 0"),
    ((2, 33, 0), 3, "packed has 0 columns and heads is 3"),
])
def test_a_layout_that_is_not_llmcs_raises(shape, heads, words):
    with pytest.raises(InvalidInput, match=words):
        packed_attention(torch.zeros(shape), heads)
