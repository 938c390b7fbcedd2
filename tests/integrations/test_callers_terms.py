"""Errors of other libraries' functions name the arguments that the caller gave, in the order of dims that they have."""

import pytest
import torch

from integrations.calls import CU_K, CU_Q
from tilewise import InvalidInput
from tilewise.integrations import flash_attn as fa2
from tilewise.integrations import flash_attn_cute as fa4
from tilewise.integrations import flash_attn_interface as fa3
from tilewise.integrations.torch_sdpa import scaled_dot_product_attention, varlen_attn

FACES = {"2": fa2, "3": fa3, "4": fa4}
Q, K, CACHE, NEW = (torch.zeros(shape) for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 20, 2, 8), (2, 1, 2, 8)))
LENGTHS = torch.tensor([3, 4], dtype=torch.int32)


def said(call, *args, **kwargs):
    with pytest.raises(InvalidInput) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("face", FACES.values(), ids=FACES)
@pytest.mark.parametrize(("given", "message"), [
    ({"q": Q[0]}, "q has shape (5, 4, 8); allowed is a tensor of 4 dims (b, s, h, d)."),
    ({"k": [1]}, "k has type list; allowed is a tensor of 4 dims (b, s, h, d)."),
    ({"k": K.transpose(1, 2), "v": K.transpose(1, 2)}, "k has 7 heads and q has 4: q heads must be a multiple of k "
                                                       "heads. k and v look like (b, h, s, d): pass k.transpose(1, 2), "
                                                       "v.transpose(1, 2)."),
    ({"softmax_scale": -1.0}, "softmax_scale is -1.0; allowed is a number from 2^-126 to 2^127, or None for "
                              "1/sqrt(d)."),
    ({"softcap": -1.0}, "softcap is -1.0; allowed is a number from 2^-126 to 2^127, or 0.0 for none."),
], ids=["dims", "type", "heads", "scale", "softcap"])
def test_flash_attns_dims_and_names(face, given, message):
    assert said(face.flash_attn_func, **{"q": Q, "k": K, "v": K} | given) == message


@pytest.mark.parametrize("face", FACES.values(), ids=FACES)
def test_flash_attns_names_in_packed_calls(face):
    q, k = torch.zeros(9, 4, 8), torch.zeros(8, 2, 8)
    given = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 6, "max_seqlen_k": 5}
    assert said(face.flash_attn_varlen_func, q, k, k, **given, softmax_scale="a").startswith("softmax_scale is 'a'; ")
    assert said(face.flash_attn_varlen_func, Q, k, k, **given) == (
        "q has shape (2, 5, 4, 8); allowed is a tensor of 3 dims (total, h, d).")


def test_version_4s_names():
    assert said(fa4.flash_attn_func, Q, K, K, learnable_sink=torch.zeros(3)) == (
        "learnable_sink has shape (3,); allowed is (hq=4).")
    assert said(fa4.flash_attn_func, Q, K, K, learnable_sink=[0.0]) == (
        "learnable_sink is a list; allowed is a tensor of shape (hq,), or None.")
    assert said(fa4.flash_attn_varlen_func, Q, K, K, seqused_k=torch.zeros(3, dtype=torch.int32)) == (
        "seqused_k has shape (3,); allowed is (b=2).")


@pytest.mark.parametrize("face", [fa3, fa4], ids=["3", "4"])
@pytest.mark.parametrize(("given", "message"), [
    ({"qv": Q[:1]}, "qv has shape (1, 5, 4, 8) and q (2, 5, 4, 8): with qv they may differ in their head dim alone."),
    ({"qv": Q, "v": K[:, :3]}, "v has shape (2, 3, 2, 8) and k (2, 7, 2, 8): with qv they may differ in their head dim "
                               "alone."),
    ({"qv": Q[..., :6]}, "qv has head dim 6 and v has 8: they must be equal.")], ids=["qv", "v", "head_dim"])
def test_queries_of_values_that_do_not_fit(face, given, message):
    """torch said of its concatenation that sizes must match."""
    assert said(face.flash_attn_func, **{"q": Q, "k": K, "v": K} | given) == message


@pytest.mark.parametrize(("face", "table"), [(fa2, "block_table"), (fa3, "page_table")], ids=["2", "3"])
@pytest.mark.parametrize(("given", "message"), [
    ({"v_cache": CACHE[:, :9]}, "v_cache has shape (2, 9, 2, 8) and k_cache (2, 20, 2, 8): they may differ in their "
                                "head dim alone."),
    ({"k": NEW.repeat(1, 1, 2, 1), "v": NEW}, "k has shape (2, 1, 4, 8); allowed is (b=2, new=1, hk=2, d=8)."),
    ({"v": NEW[0], "k": NEW}, "v has shape (1, 2, 8); allowed is a tensor of 4 dims (b, s, h, d)."),
    ({"k_cache": CACHE[0]}, "k_cache has shape (20, 2, 8); allowed is a tensor of 4 dims (b, s, h, d)."),
    ({"num_splits": -1}, "num_splits is -1; allowed is an integer >= 1, or 0 to choose."),
    ({"softmax_scale": 0.0}, "softmax_scale is 0.0; allowed is a number from 2^-126 to 2^127, or None for 1/sqrt(d)."),
    ({"table": torch.zeros(1, 3)}, "table has shape (1, 3); allowed is (b=2, pages a sequence=3)."),
], ids=["caches", "k", "v", "k_cache", "splits", "scale", "table"])
def test_flash_attns_dims_and_names_in_decoding(face, table, given, message):
    given = {name.replace("table", table): value for name, value in given.items()}
    call = {"q": Q[:, :1], "k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": LENGTHS} | given
    assert said(face.flash_attn_with_kvcache, **call) == message.replace("table has", f"{table} has")


def test_the_passes_alone_say_what_a_caller_of_theirs_gave():
    few = torch.zeros(2, 7, 3, 8)
    lse = torch.zeros(2, 4, 5)
    assert said(fa2._flash_attn_forward, Q, few, few, 0.0, None, False, -1, -1, 0.0, None, False).endswith(
        "Did you transpose (b, s, h, d)?")
    rest = (None, None, None, 0.0, None, False, -1, -1, 0.0, None, False)
    assert said(fa2._flash_attn_backward, Q, Q, few, few, Q, lse, *rest).endswith("Did you transpose (b, s, h, d)?")
    assert said(fa2._flash_attn_backward, Q[0], Q, K, K, Q, lse, *rest) == (
        "dout has shape (5, 4, 8); allowed is a tensor of 4 dims (b, s, h, d).")


def test_torchs_names():
    q, k, v = Q.transpose(1, 2), K.transpose(1, 2), K.transpose(1, 2)
    call = {"query": q, "key": k, "value": v, "enable_gqa": True}
    sdpa = scaled_dot_product_attention
    assert said(sdpa, **call | {"key": k[..., :6]}) == (
        "key has head dim 6 and query has 8: they must be equal (value's may differ).")
    assert said(sdpa, **call, attn_mask=torch.zeros(5, 6)) == (
        "attn_mask has shape (1, 1, 5, 6); allowed is (b=2, hq=4, sq=5, sk=7), or 1 in place of a size.")
    assert said(sdpa, **call, attn_mask=torch.ones(2, 7, dtype=torch.bool)) == (
        "attn_mask has shape (1, 1, 2, 7); allowed is (b=2, hq=4, sq=5, sk=7), or 1 in place of a size. Of padding, "
        "(b, sk), pass attn_mask[:, None, None].")
    rows = torch.zeros(9, 4, 8)
    assert said(varlen_attn, rows, rows[:, :3], rows, CU_Q, CU_Q, 6, 6, enable_gqa=True).startswith(
        "value has 4 heads and key has 3")
    assert said(varlen_attn, rows, rows, rows, CU_Q, CU_Q[:2], 6, 6).startswith("cu_seq_k has shape (2,); allowed is ")
