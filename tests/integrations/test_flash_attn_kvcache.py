"""``flash_attn_with_kvcache`` of flash-attn 2 and 3: layout and conventions, against each sequence by itself."""

import pytest
import torch

from conformance.cached import expected
from tilewise import InvalidInput, UnsupportedProblem
from tilewise.integrations import flash_attn_interface as fa3
from tilewise.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache

INF = float("inf")
# flash-attn's options; what they mean: bounds, and other arguments of the formula.
OPTIONS = {
    "none": ({}, (None, None), {}),
    "causal": ({"causal": True}, (None, 0), {}),
    "window": ({"window_size": (3, 1)}, (3, 1), {}),
    "window_of_one_side": ({"window_size": (4, -1)}, (4, None), {}),
    "causal_window_whose_right_side_counts_not": ({"causal": True, "window_size": (4, 6)}, (4, 0), {}),
    "scale": ({"softmax_scale": 0.4}, (None, None), {"scale": 0.4}),
    "softcap": ({"softcap": 1.5}, (None, None), {"softcap": 1.5}),
    "splits": ({"num_splits": 3}, (None, None), {}),
}


def tensors(sq=2, new=0, pages=None):
    """q (3, sq, 4, 8), caches (3, 20, 2, 8) or (pages, 4, 2, 8), and new keys and values (3, new, 2, 8)."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 20, 2, 8) if pages is None else (pages, 4, 2, 8)
    q, k_cache, v_cache = (torch.randn(size, generator=generator) for size in ((3, sq, 4, 8), shape, shape))
    return q, k_cache, v_cache, *(torch.randn(3, new, 2, 8, generator=generator) for _ in range(2))


def formula(q, k_cache, v_cache, bounds, **call):
    """Return out (b, s, h, d) and lse, and append to the caches, which stay as they lie."""
    firsts = [tensor.double().transpose(1, 2) for tensor in (q, k_cache, v_cache)]
    call = {name: tensor.double() if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else tensor
            for name, tensor in call.items()}
    for name in ("k", "v"):
        if name in call:
            call[name] = call[name].transpose(1, 2)
    out, lse = expected(*firsts, *bounds, **call, hk=2, dv=8)
    return out.transpose(1, 2), lse.masked_fill(lse == -INF, INF), *(cache.transpose(1, 2) for cache in firsts[1:])


def close(found, wanted):
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_out_and_lse_are_those_of_the_formula(name):
    options, bounds, terms = OPTIONS[name]
    q, k_cache, v_cache, *_ = tensors()
    lengths = torch.tensor([7, 0, 20], dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, return_softmax_lse=True, **options)
    wanted, wanted_lse, *_ = formula(q, k_cache, v_cache, bounds, cache_seqlens=lengths, **terms)
    close(out, wanted)
    close(lse, wanted_lse)
    assert (lse[1] == INF).all()
    close(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, **options), wanted)


@pytest.mark.parametrize("name", OPTIONS)
def test_version_3_gives_lse_of_minus_infinity_where_nothing_is_seen(name):
    options, bounds, terms = OPTIONS[name]
    q, k_cache, v_cache, *_ = tensors()
    lengths = torch.tensor([7, 0, 20], dtype=torch.int32)
    out, lse = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, return_softmax_lse=True,
                                           **options)
    wanted, wanted_lse, *_ = formula(q, k_cache, v_cache, bounds, cache_seqlens=lengths, **terms)
    close(out, wanted)
    close(lse, wanted_lse.masked_fill(wanted_lse == INF, -INF))
    assert (lse[1] == -INF).all()
    close(fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, **options), wanted)


def test_slopes_count_from_the_key_that_a_query_stands_on():
    q, k_cache, v_cache, *_ = tensors()
    slopes, lengths = torch.tensor([0.5, 0.25, 0.1, 0.0]), torch.tensor([7, 3, 20], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True, alibi_slopes=slopes)
    wanted, *_ = formula(q, k_cache, v_cache, (None, 0), cache_seqlens=lengths, alibi_slopes=slopes.expand(3, 4))
    close(out, wanted)


@pytest.mark.parametrize("attend", [flash_attn_with_kvcache, fa3.flash_attn_with_kvcache], ids=["2", "3"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_new_keys_turn_and_are_written_in_place(causal, interleaved, attend):
    q, k_cache, v_cache, k, v = tensors(sq=2, new=2)
    angles = torch.rand(20, 3, generator=torch.Generator().manual_seed(1)) * 6
    call = {"cache_seqlens": torch.tensor([7, 0, 18], dtype=torch.int32), "rotary_cos": angles.cos(),
            "rotary_sin": angles.sin(), "rotary_interleaved": interleaved, "k": k, "v": v}
    wanted, _, *caches = formula(q, k_cache, v_cache, (None, 0 if causal else None), **call)
    out = attend(q, k_cache, v_cache, **call, causal=causal)
    close(out, wanted)
    close(k_cache, caches[0])
    close(v_cache, caches[1])


@pytest.mark.parametrize(("attend", "table"), [(flash_attn_with_kvcache, "block_table"),
                                               (fa3.flash_attn_with_kvcache, "page_table")], ids=["2", "3"])
def test_pages_of_any_size_with_left_padding(attend, table):
    q, k_cache, v_cache, k, v = tensors(sq=1, new=1, pages=17)
    call = {"cache_seqlens": torch.tensor([7, 4, 16], dtype=torch.int32), "k": k, "v": v,
            "block_table": torch.randperm(17)[:15].view(3, 5).int(),
            "cache_leftpad": torch.tensor([2, 0, 9], dtype=torch.int32)}
    wanted, _, *caches = formula(q, k_cache, v_cache, (None, None), **call)
    call[table] = call.pop("block_table")
    close(attend(q, k_cache, v_cache, **call), wanted)
    close(k_cache, caches[0])


@pytest.mark.parametrize("attend", [flash_attn_with_kvcache, fa3.flash_attn_with_kvcache], ids=["2", "3"])
def test_rows_of_the_cache_are_chosen_and_an_integer_is_every_length(attend):
    q, k_cache, v_cache, *_ = tensors()
    rows = torch.tensor([2, 2, 0], dtype=torch.int32)
    out = attend(q, k_cache, v_cache, cache_seqlens=9, cache_batch_idx=rows)
    close(out, flash_attn_func(q, k_cache[rows, :9], v_cache[rows, :9]).double())


def test_a_step_by_step_decoding_is_the_causal_forward():
    q, k, v = (torch.randn(2, 6, heads, 8) for heads in (4, 2, 2))
    k_cache, v_cache = torch.zeros(2, 8, 2, 8), torch.zeros(2, 8, 2, 8)
    steps = [flash_attn_with_kvcache(q[:, i:i + 1], k_cache, v_cache, k[:, i:i + 1], v[:, i:i + 1], cache_seqlens=i,
                                     causal=True) for i in range(6)]
    close(torch.cat(steps, 1), flash_attn_func(q, k, v, causal=True).double())


@pytest.mark.parametrize("attend", [flash_attn_with_kvcache, fa3.flash_attn_with_kvcache], ids=["2", "3"])
def test_there_is_no_gradient_and_no_complaint_about_it(attend):
    q, k_cache, v_cache, *_ = tensors()
    out = attend(q.requires_grad_(), k_cache, v_cache)
    assert not out.requires_grad


def test_what_has_no_meaning_is_the_apis_to_refuse():
    q, k_cache, v_cache, k, v = tensors(new=1)
    with pytest.raises(InvalidInput, match="k is given without cache_seqlens"):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v)


def test_what_version_3_passes_to_its_kernels_alone_has_no_effect():
    q, k_cache, v_cache, *_ = tensors()
    plain = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9)
    out = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9, max_seqlen_q=2, pack_gqa=True, sm_margin=4,
                                      scheduler_metadata=torch.zeros(4, dtype=torch.int32))
    assert torch.equal(out, plain)


@pytest.mark.parametrize(("name", "words"), [
    ("qv", "a cache is read as it lies"), ("rotary_seqlens", "keys turn by where they lie"),
    ("cu_seqlens_q", "queries and new keys come as a batch, pad them"),
    ("cu_seqlens_k_new", "queries and new keys come as a batch, pad them"),
    ("q_descale", "8-bit numbers are not there yet"), ("k_descale", "8-bit"), ("v_descale", "8-bit"),
    ("attention_chunk", "of a cache, chunks are not there yet"),
])
def test_what_version_3_has_and_this_has_not_is_refused_by_name(name, words):
    q, k_cache, v_cache, *_ = tensors()
    with pytest.raises(UnsupportedProblem, match=f"^{name} is given; allowed is None: .*{words}"):
        fa3.flash_attn_with_kvcache(q, k_cache, v_cache, **{name: 4 if name == "attention_chunk" else torch.ones(4)})
