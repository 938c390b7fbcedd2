"""Code of a user who annotates: test_types.py asks mypy about it. Each ignored error is one that mypy must find."""

from typing import assert_type

import torch
from torch import Tensor

import tilewise as tw
from tilewise.functions import MaskFunction
from tilewise.integrations import flash_attn, flash_attn_cute, flash_attn_interface


def attend(q: Tensor, k: Tensor, v: Tensor, mask: tw.AnyMask | None = None) -> Tensor:
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        mask = mask != 0
    tw.explain(q, k, v, mask=mask)
    return tw.attention(q, k, v, mask=mask)


def masks(ids: Tensor, visible: Tensor, even: MaskFunction) -> list[tw.AnyMask]:
    return [tw.causal(), tw.window(3, 0) & tw.sink_tokens(2), tw.documents(ids), tw.causal() & tw.documents(ids),
            visible, tw.causal() & visible, even, tw.causal() & even, even & visible, tw.causal() | tw.window(3, 3),
            tw.tree(ids, [-1, 0]), tw.causal() & tw.intervals(ids[None, None], ids[None, None]),
            tw.blocks(visible) & visible, tw.prefixes(ids)]


def is_mask(mask: object) -> bool:
    return isinstance(mask, tw.AnyMask)


def wrong(q: Tensor) -> None:
    attend(q, q, q, "causal")  # type: ignore[arg-type]
    tw.attention(q, q, q, mask=True)  # type: ignore[call-overload]
    tw.attention_decode(q, q, q, mask=torch.ones(1))  # type: ignore[arg-type]


def version_2(q: Tensor, qkv: Tensor, cu: Tensor, probs: bool) -> None:
    assert_type(flash_attn.flash_attn_func(q, q, q, causal=True), Tensor)
    assert_type(flash_attn.flash_attn_func(q, q, q, return_attn_probs=False), Tensor)
    assert_type(flash_attn.flash_attn_func(q, q, q, return_attn_probs=True), tuple[Tensor, Tensor, Tensor])
    assert_type(flash_attn.flash_attn_func(q, q, q, return_attn_probs=probs), Tensor | tuple[Tensor, Tensor, Tensor])
    assert_type(flash_attn.flash_attn_kvpacked_func(q, qkv), Tensor)
    assert_type(flash_attn.flash_attn_kvpacked_func(q, qkv, return_attn_probs=True), tuple[Tensor, Tensor, Tensor])
    assert_type(flash_attn.flash_attn_qkvpacked_func(qkv), Tensor)
    assert_type(flash_attn.flash_attn_qkvpacked_func(qkv, return_attn_probs=True), tuple[Tensor, Tensor, Tensor])
    assert_type(flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 9, 9), Tensor)
    assert_type(flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 9, 9, return_attn_probs=True),
                tuple[Tensor, Tensor, Tensor])
    assert_type(flash_attn.flash_attn_varlen_kvpacked_func(q, qkv, cu, cu, 9, 9), Tensor)
    assert_type(flash_attn.flash_attn_varlen_kvpacked_func(q, qkv, cu, cu, 9, 9, return_attn_probs=True),
                tuple[Tensor, Tensor, Tensor])
    assert_type(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 9), Tensor)
    assert_type(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 9, return_attn_probs=True),
                tuple[Tensor, Tensor, Tensor])
    assert_type(flash_attn.flash_attn_with_kvcache(q, q, q), Tensor)
    assert_type(flash_attn.flash_attn_with_kvcache(q, q, q, return_softmax_lse=True), tuple[Tensor, Tensor])
    flash_attn.flash_attn_func(q, q, q, return_lse=True)  # type: ignore[call-overload]


def version_3(q: Tensor, qkv: Tensor, cu: Tensor, probs: bool) -> None:
    assert_type(flash_attn_interface.flash_attn_func(q, q, q), Tensor)
    assert_type(flash_attn_interface.flash_attn_func(q, q, q, return_attn_probs=True), tuple[Tensor, Tensor])
    assert_type(flash_attn_interface.flash_attn_func(q, q, q, return_attn_probs=probs),
                Tensor | tuple[Tensor, Tensor])
    assert_type(flash_attn_interface.flash_attn_qkvpacked_func(qkv), Tensor)
    assert_type(flash_attn_interface.flash_attn_qkvpacked_func(qkv, return_attn_probs=True), tuple[Tensor, Tensor])
    assert_type(flash_attn_interface.flash_attn_varlen_func(q, q, q, cu, cu, 9, 9), Tensor)
    assert_type(flash_attn_interface.flash_attn_varlen_func(q, q, q, cu, cu, 9, 9, return_attn_probs=True),
                tuple[Tensor, Tensor])
    assert_type(flash_attn_interface.flash_attn_with_kvcache(q, q, q), Tensor)
    assert_type(flash_attn_interface.flash_attn_with_kvcache(q, q, q, return_softmax_lse=True), tuple[Tensor, Tensor])


def version_4(q: Tensor, cu: Tensor) -> None:
    assert_type(flash_attn_cute.flash_attn_func(q, q, q), tuple[Tensor, Tensor | None])
    assert_type(flash_attn_cute.flash_attn_func(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flash_attn_cute.flash_attn_varlen_func(q, q, q), tuple[Tensor, Tensor | None])
    assert_type(flash_attn_cute.flash_attn_varlen_func(q, q, q, cu_seqlens_q=cu, return_lse=True),
                tuple[Tensor, Tensor])
