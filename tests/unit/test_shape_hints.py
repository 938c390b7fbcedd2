"""What an error says of shapes that look like another layout or like padding; and that no legal call is refused."""

import pytest
import torch

from tilewise import InvalidInput, attention, attention_decode, attention_varlen, causal, documents, explain


def zeros(*shape):
    return torch.zeros(shape)


def said(call, *args, **kwargs):
    with pytest.raises(InvalidInput) as caught:
        call(*args, **kwargs)
    return str(caught.value)


ALL = "q, k and v look like (b, s, h, d): pass q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)."


@pytest.mark.parametrize("call", [attention, explain])
@pytest.mark.parametrize(("q", "k", "v", "hint"), [
    ((2, 128, 8, 64), (2, 96, 8, 64), (2, 96, 8, 64), ALL),
    ((2, 128, 8, 64), (2, 96, 2, 64), (2, 96, 2, 32), ALL),
    ((2, 1, 8, 64), (2, 96, 8, 64), (2, 96, 8, 64), ALL),
    ((2, 8, 128, 64), (2, 96, 8, 64), (2, 96, 8, 64),
     "k and v look like (b, s, h, d): pass k.transpose(1, 2), v.transpose(1, 2)."),
    ((2, 128, 12, 64), (2, 12, 96, 64), (2, 12, 96, 64), "q looks like (b, s, h, d): pass q.transpose(1, 2)."),
    ((2, 8, 128, 64), (2, 8, 96, 64), (2, 96, 8, 64), "v looks like (b, s, h, d): pass v.transpose(1, 2)."),
    ((2, 8, 128, 64), (2, 96, 8, 64), (2, 8, 96, 64), "k looks like (b, s, h, d): pass k.transpose(1, 2)."),
], ids=["all", "all_gqa", "one_query", "keys", "queries", "values", "k_alone"])
def test_sizes_that_fit_with_heads_and_positions_swapped_are_named(call, q, k, v, hint):
    assert said(call, zeros(*q), zeros(*k), zeros(*v)).endswith(f". {hint}")


@pytest.mark.parametrize(("q", "k"), [((2, 3, 6, 8), (2, 2, 5, 8)), ((2, 7, 6, 8), (2, 5, 4, 8))],
                         ids=["more_positions_than_heads", "swapped_is_no_better"])
def test_other_head_counts_that_do_not_divide_are_asked_about(q, k):
    assert said(attention, zeros(*q), zeros(*k), zeros(*k)).endswith("Did you transpose (b, h, s, d)?")


def test_an_ambiguous_mask_of_swapped_sizes_tells_of_them_behind_its_drawings():
    q, k = zeros(2, 128, 8, 64), zeros(2, 64, 2, 64)
    assert said(attention, q, k, k, mask=causal()).endswith(f"\n{ALL}")
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    assert "look" not in said(attention, q, k, k, mask=causal())


def test_a_legal_call_is_served_however_its_sizes_look():
    q = torch.randn(2, 64, 8, 16)
    assert attention(q, q, q, mask=causal()).shape == q.shape


@pytest.mark.parametrize("given", [
    {"bias": zeros(8, 64, 64)}, {"bias": zeros(64, 64)}, {"alibi_slopes": zeros(8)}, {"sinks": zeros(8)},
    {"mask": torch.ones(2, 1, 64, 64, dtype=torch.bool)}, {"mask": documents(torch.arange(64))},
], ids=["bias", "bias_of_all_heads", "alibi_slopes", "sinks", "mask", "documents"])
def test_an_operand_that_fits_swapped_queries_says_so(given):
    q = zeros(2, 64, 8, 16)
    assert said(attention, q, q, q, **given).endswith(
        ". It fits a q of (b, s, h, d): pass q.transpose(1, 2), and so k and v.")


def test_an_operand_that_fits_neither_way_gets_no_hint():
    q = zeros(2, 64, 8, 16)
    assert said(attention, q, q, q, sinks=zeros(9)) == "sinks has shape (9,); allowed is (hq=64)."
    assert said(attention, q[:, :4], q[:, :4], q[:, :4], sinks=zeros(8)).endswith("(hq=4).")


@pytest.mark.parametrize(("shape", "hint"), [
    ((3, 5), "Of padding, (b, sk), pass {}[:, None, None]"),
    ((3, 1, 5), "Of (b, 1, sk), make the dim of heads: unsqueeze(1)."),
    ((3, 6, 5), "Of (b, sq, sk), make the dim of heads: unsqueeze(1)."),
], ids=["padding", "padding_of_3_dims", "one_a_batch_entry"])
def test_a_mask_or_bias_of_the_batch_without_heads_is_told_how_to_get_them(shape, hint):
    q, k = torch.randn(3, 4, 6, 8), torch.randn(3, 4, 5, 8)
    mask = torch.ones(shape, dtype=torch.bool)
    assert said(attention, q, k, k, mask=mask).removesuffix(", or lengths as seqlens_k.").rstrip(".").endswith(
        hint.format("mask").rstrip("."))
    assert said(attention, q, k, k, bias=mask.float()).endswith(hint.format("bias").rstrip(".") + ".")
    as_told = mask[:, None, None] if mask.dim() == 2 else mask.unsqueeze(1)
    torch.testing.assert_close(attention(q, k, k, mask=as_told), attention(q, k, k))


def test_packed_rows_with_heads_first_are_told_in_their_own_dims():
    q, k, lengths = zeros(8, 128, 64), zeros(8, 96, 64), torch.tensor([0, 8])
    assert said(attention_varlen, q, k, k, cu_seqlens_q=lengths).endswith(
        ". q, k and v look like (h, total, d): pass q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1).")


def test_packed_padding_is_told_in_lengths_of_packed_calls():
    q, lengths = zeros(9, 4, 8), torch.tensor([0, 4, 9])
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert said(attention_varlen, q, q, q, cu_seqlens_q=lengths, mask=mask, max_seqlen_q=5, max_seqlen_k=5).endswith(
        " Of padding, (b, sk), pass mask[:, None, None], or lengths as seqused_k.")


def test_caches_and_new_keys_with_positions_first_are_named():
    q, cache = zeros(2, 8, 1, 64), zeros(2, 96, 8, 64)
    stored = cache.transpose(1, 2).contiguous()
    assert said(attention_decode, q, cache, cache).endswith(
        ". k_cache and v_cache look like (b, s, h, d): pass k_cache.transpose(1, 2), v_cache.transpose(1, 2).")
    assert said(attention_decode, q, stored, cache).endswith(
        ". v_cache looks like (b, s, h, d): pass v_cache.transpose(1, 2).")
    new = zeros(2, 1, 8, 64)
    assert said(attention_decode, q, stored, stored, k=new, v=new, cache_seqlens=3).endswith(
        ". k looks like (b, s, h, d): pass k.transpose(1, 2).")
