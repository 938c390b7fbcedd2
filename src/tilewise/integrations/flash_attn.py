"""The functions of flash-attn 2, by their names, in their order, with their defaults and conventions.

Tensors are (b, s, h, d), or (total, h, d) packed, and seen as (b, h, s, d) without a copy. Causal and window masks and
the distances of ALiBi count from the bottom right corner; a bound of -1 (any negative one) and a softcap of 0.0 mean
none; lse is +inf, not -inf, where a query sees no key (:func:`tilewise.merge` takes both). What flash-attn refuses and
tilewise does not is computed: float32, wider heads, softcap with dropout, gradients of lse and of ALiBi slopes.

Not there yet are block tables of packed queries, which raise; those of ``flash_attn_with_kvcache`` are.
"""

import sys
from typing import Any, Literal, overload

import torch

from tilewise.autograd.op import backward_op
from tilewise.errors import TilewiseError, UnsupportedProblem
from tilewise.integrations import bert_padding, flash_attn_package, rotary
from tilewise.integrations.callers_terms import in_terms
from tilewise.integrations.flash_family import (
    WORDS,
    OutAndLse,
    attend_batch,
    attend_cache,
    attend_packed,
    heads_first,
    sides_of,
    unpacked,
)
from tilewise.integrations.signed_probabilities import signed_probabilities, signed_probabilities_varlen
from tilewise.masks import Mask, window
from tilewise.problem.options import Operands, OperatorOptions
from tilewise.validate.tensors import with_batch_dim
from tilewise.validate.values import check_switch

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "install",
           "uninstall"]
INTERFACE_VERSION = "2.8.3"  # of flash-attn, whose signatures these are; code that tells its versions apart asks
Slopes = torch.Tensor | None
OutLseAndProbs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_backward_op = in_terms(backward_op, WORDS, heads_third=True)
_NO_GRADIENT_OF_OPERANDS = [True, True, False, False, False]  # which gradients: dq; dk and dv; those of operands


@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                    softcap: float = 0.0, alibi_slopes: Slopes = None, deterministic: bool = False,
                    return_attn_probs: Literal[False] = False) -> torch.Tensor: ...


@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                    softcap: float = 0.0, alibi_slopes: Slopes = None, deterministic: bool = False, *,
                    return_attn_probs: Literal[True]) -> OutLseAndProbs: ...


@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                    softcap: float = 0.0, alibi_slopes: Slopes = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> torch.Tensor | OutLseAndProbs: ...


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                    softcap: float = 0.0, alibi_slopes: Slopes = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> torch.Tensor | OutLseAndProbs:
    """Attend as ``flash_attn.flash_attn_func``.

    Args:
        q, k, v: (b, sq, hq, d), (b, sk, hk, d) and (b, sk, hk, dv), any strides.
        dropout_p: probability to drop a pair; drawn from torch's default generator, so that a seed repeats it.
        softmax_scale: None = 1/sqrt(d).
        causal: query i sees keys up to i + sk - sq.
        window_size: (left, right): keys kept on either side of that diagonal, ends included; -1 = all.
        softcap: 0.0 = none.
        alibi_slopes: (hq,) or (b, hq), float32: adds ``-slope · |i + sk - sq - j|``.
        deterministic: True demands bit-equal gradients; False leaves it to
            :func:`torch.use_deterministic_algorithms`.
        return_attn_probs: return (out, lse, S_dmask).

    Returns:
        out, (b, sq, hq, dv); 0 where a query sees no key. With ``return_attn_probs`` also lse, (b, hq, sq), float32,
        +inf there, and S_dmask: without dropout an empty tensor, with it the probabilities, (b, hq, sq, sk) with sides
        rounded up to 128, negative where a pair was dropped.

    >>> q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([1, 128, 8, 64])
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _attend(q, k, v, options, return_attn_probs)


@overload
def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0,
                             softmax_scale: float | None = None, causal: bool = False,
                             window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Slopes = None,
                             deterministic: bool = False,
                             return_attn_probs: Literal[False] = False) -> torch.Tensor: ...


@overload
def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0,
                             softmax_scale: float | None = None, causal: bool = False,
                             window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Slopes = None,
                             deterministic: bool = False, *, return_attn_probs: Literal[True]) -> OutLseAndProbs: ...


@overload
def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0,
                             softmax_scale: float | None = None, causal: bool = False,
                             window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Slopes = None,
                             deterministic: bool = False,
                             return_attn_probs: bool = False) -> torch.Tensor | OutLseAndProbs: ...


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0,
                             softmax_scale: float | None = None, causal: bool = False,
                             window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Slopes = None, deterministic: bool = False,
                             return_attn_probs: bool = False) -> torch.Tensor | OutLseAndProbs:
    """Attend as :func:`flash_attn_func`, with k and v in one tensor, ``kv`` (b, sk, 2, hk, d), not copied."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    k, v = unpacked("kv", kv, "b, sk, 2, hk, d")
    return _attend(q, k, v, options, return_attn_probs)


@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: Slopes = None, deterministic: bool = False,
                              return_attn_probs: Literal[False] = False) -> torch.Tensor: ...


@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: Slopes = None, deterministic: bool = False, *,
                              return_attn_probs: Literal[True]) -> OutLseAndProbs: ...


@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: Slopes = None, deterministic: bool = False,
                              return_attn_probs: bool = False) -> torch.Tensor | OutLseAndProbs: ...


def flash_attn_qkvpacked_func(qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: Slopes = None, deterministic: bool = False,
                              return_attn_probs: bool = False) -> torch.Tensor | OutLseAndProbs:
    """Attend as :func:`flash_attn_func`, with q, k and v in one tensor, ``qkv`` (b, s, 3, h, d), not copied."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    q, k, v = unpacked("qkv", qkv, "b, s, 3, h, d")
    return _attend(q, k, v, options, return_attn_probs)


@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                           cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Slopes = None,
                           deterministic: bool = False, return_attn_probs: Literal[False] = False,
                           block_table: torch.Tensor | None = None) -> torch.Tensor: ...


@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                           cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Slopes = None,
                           deterministic: bool = False, *, return_attn_probs: Literal[True],
                           block_table: torch.Tensor | None = None) -> OutLseAndProbs: ...


@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                           cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Slopes = None,
                           deterministic: bool = False, return_attn_probs: bool = False,
                           block_table: torch.Tensor | None = None) -> torch.Tensor | OutLseAndProbs: ...


def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                           cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Slopes = None,
                           deterministic: bool = False, return_attn_probs: bool = False,
                           block_table: torch.Tensor | None = None) -> torch.Tensor | OutLseAndProbs:
    """Attend over packed sequences as ``flash_attn.flash_attn_varlen_func``.

    Args:
        q, k, v: (total_q, hq, d), (total_k, hk, d) and (total_k, hk, dv), any strides.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,): 0, then where each sequence ends.
        max_seqlen_q, max_seqlen_k: lengths of the longest; only S_dmask needs them.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs: as in
            :func:`flash_attn_func`, diagonals and distances by each sequence's own lengths.
        alibi_slopes: (hq,) or (sequences, hq), float32.
        block_table: must be None: of packed queries, caches in pages are not there yet.

    Returns:
        out, (total_q, hq, dv); with ``return_attn_probs`` also lse, (hq, total_q), and S_dmask, as of
        :func:`flash_attn_func`, of each sequence.

    Raises:
        UnsupportedProblem: a block table is given.
    """
    _refuse_pages(block_table=block_table)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    options |= _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _attend_varlen(q, k, v, options, return_attn_probs)


@overload
def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor,
                                    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int,
                                    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Slopes = None, deterministic: bool = False,
                                    return_attn_probs: Literal[False] = False) -> torch.Tensor: ...


@overload
def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor,
                                    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int,
                                    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Slopes = None, deterministic: bool = False, *,
                                    return_attn_probs: Literal[True]) -> OutLseAndProbs: ...


@overload
def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor,
                                    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int,
                                    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Slopes = None, deterministic: bool = False,
                                    return_attn_probs: bool = False) -> torch.Tensor | OutLseAndProbs: ...


def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor,
                                    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int,
                                    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Slopes = None, deterministic: bool = False,
                                    return_attn_probs: bool = False) -> torch.Tensor | OutLseAndProbs:
    """Attend as :func:`flash_attn_varlen_func`, with k and v in one tensor, ``kv`` (total_k, 2, hk, d)."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    options |= _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    k, v = unpacked("kv", kv, "total_k, 2, hk, d")
    return _attend_varlen(q, k, v, options, return_attn_probs)


@overload
def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int,
                                     dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Slopes = None, deterministic: bool = False,
                                     return_attn_probs: Literal[False] = False) -> torch.Tensor: ...


@overload
def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int,
                                     dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Slopes = None, deterministic: bool = False, *,
                                     return_attn_probs: Literal[True]) -> OutLseAndProbs: ...


@overload
def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int,
                                     dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Slopes = None, deterministic: bool = False,
                                     return_attn_probs: bool = False) -> torch.Tensor | OutLseAndProbs: ...


def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int,
                                     dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Slopes = None, deterministic: bool = False,
                                     return_attn_probs: bool = False) -> torch.Tensor | OutLseAndProbs:
    """Attend as :func:`flash_attn_varlen_func`, with q, k and v in one tensor, ``qkv`` (total, 3, h, d)."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    options |= _lengths(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    q, k, v = unpacked("qkv", qkv, "total, 3, h, d")
    return _attend_varlen(q, k, v, options, return_attn_probs)


@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                            k: torch.Tensor | None = None, v: torch.Tensor | None = None,
                            rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
                            cache_seqlens: int | torch.Tensor | None = None,
                            cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
                            block_table: torch.Tensor | None = None, softmax_scale: float | None = None,
                            causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Slopes = None, num_splits: int = 0,
                            return_softmax_lse: Literal[False] = False) -> torch.Tensor: ...


@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                            k: torch.Tensor | None = None, v: torch.Tensor | None = None,
                            rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
                            cache_seqlens: int | torch.Tensor | None = None,
                            cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
                            block_table: torch.Tensor | None = None, softmax_scale: float | None = None,
                            causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Slopes = None, num_splits: int = 0, *,
                            return_softmax_lse: Literal[True]) -> OutAndLse: ...


@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                            k: torch.Tensor | None = None, v: torch.Tensor | None = None,
                            rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
                            cache_seqlens: int | torch.Tensor | None = None,
                            cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
                            block_table: torch.Tensor | None = None, softmax_scale: float | None = None,
                            causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Slopes = None, num_splits: int = 0,
                            return_softmax_lse: bool = False) -> torch.Tensor | OutAndLse: ...


def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                            k: torch.Tensor | None = None, v: torch.Tensor | None = None,
                            rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
                            cache_seqlens: int | torch.Tensor | None = None,
                            cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
                            block_table: torch.Tensor | None = None, softmax_scale: float | None = None,
                            causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Slopes = None, num_splits: int = 0,
                            return_softmax_lse: bool = False) -> torch.Tensor | OutAndLse:
    """Attend to a cache as ``flash_attn.flash_attn_with_kvcache``; there is no backward pass.

    Pages may have any size, not multiples of 256 alone, and a block table may come with a left padding.

    Args:
        q: (b, sq, hq, d), any strides.
        k_cache, v_cache: (rows, capacity, hk, d) and (rows, capacity, hk, dv), stride 1 along the head dim; with a
            block_table, (pages, page size, hk, d) and so on.
        k, v: (b, new, hk, d) and (b, new, hk, dv): written to the caches from position ``cache_seqlens`` on.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): k is turned from position ``cache_seqlens`` on, and q too,
            but, without ``causal`` and a window, all of q by that one position.
        cache_seqlens: (b,), int32, or an integer: positions filled before k and v.
        cache_batch_idx: (b,), int32: rows of the caches.
        cache_leftpad: (b,), int32: where the keys begin.
        block_table: (b, pages of a sequence), int32.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in :func:`flash_attn_func`.
        rotary_interleaved: True = dims 2p and 2p + 1 turn together; False = p and p + rotary_dim / 2.
        num_splits: programs that share the keys of a head; 0 = what fills the device.
        return_softmax_lse: return (out, lse).

    Returns:
        out, (b, sq, hq, dv); with ``return_softmax_lse`` also lse, (b, hq, sq), float32, +inf where a query sees no
        key.
    """
    left, right = _sides(causal, window_size)
    k, v = (None if tensor is None else heads_first(name, tensor) for name, tensor in (("k", k), ("v", v)))
    with torch.no_grad():
        out, lse = attend_cache(
            heads_first("q", q), heads_first("k_cache", k_cache), heads_first("v_cache", v_cache), k=k, v=v,
            cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
            block_table=block_table,
            rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
            mask=window(left, right), scale=softmax_scale, alibi_slopes=alibi_slopes,
            softcap=None if softcap == 0.0 else softcap, num_splits=num_splits or None, return_aux=("lse",))
    return (out.transpose(1, 2), _plus_inf_where_empty(lse)) if return_softmax_lse else out.transpose(1, 2)


def _flash_attn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float,
                        softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int,
                        softcap: float, alibi_slopes: Slopes, return_softmax: bool,
                        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the forward pass alone, without a graph.

    Returns:
        out, lse and S_dmask as :func:`flash_attn_func`, and rng_state, (2,), int64: dropout's seed and a 0, for the
        backward pass.
    """
    options = _options(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    with torch.no_grad():
        return *_attend_fully(q, k, v, options, return_softmax), _state(options, q)


def _flash_attn_varlen_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                               cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
                               softmax_scale: float | None, causal: bool, window_size_left: int = -1,
                               window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Slopes = None,
                               return_softmax: bool = False, block_table: torch.Tensor | None = None,
                               leftpad_k: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None,
                               zero_tensors: bool = False, num_splits: int = 0,
                               ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the forward pass over packed sequences alone, without a graph; see :func:`_flash_attn_forward`.

    ``seqused_k``, (sequences,): keys of each sequence that take part. ``zero_tensors`` and ``num_splits`` change
    nothing: what is not computed is 0 anyway, and keys are not split.
    """
    _refuse_pages(block_table=block_table, leftpad_k=leftpad_k)
    options = _options(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    options |= _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) | {"seqused_k": seqused_k}
    with torch.no_grad():
        return *_attend_varlen_fully(q, k, v, options, return_softmax), _state(options, q)


def _flash_attn_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                         softmax_lse: torch.Tensor, dq: torch.Tensor | None, dk: torch.Tensor | None,
                         dv: torch.Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool,
                         window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Slopes,
                         deterministic: bool, rng_state: torch.Tensor | None = None) -> None:
    """Run the backward pass alone: write dq, dk and dv where they are not None.

    out and lse may be those of more keys than k has, as in a ring. The sums of ``dout · out`` that flash-attn returns
    are not.
    """
    options = _options(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes,
                       deterministic)
    given = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
    made = _backward([heads_first(name, tensor) for name, tensor in given.items()], softmax_lse, options, rng_state)
    _write([gradient.transpose(1, 2) for gradient in made], (dq, dk, dv))


def _flash_attn_varlen_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                                out: torch.Tensor, softmax_lse: torch.Tensor, dq: torch.Tensor | None,
                                dk: torch.Tensor | None, dv: torch.Tensor | None, cu_seqlens_q: torch.Tensor,
                                cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
                                softmax_scale: float | None, causal: bool, window_size_left: int,
                                window_size_right: int, softcap: float, alibi_slopes: Slopes, deterministic: bool,
                                rng_state: torch.Tensor | None = None, zero_tensors: bool = False) -> None:
    """Run the backward pass over packed sequences alone; see :func:`_flash_attn_backward`.

    ``zero_tensors`` changes nothing: what is not computed is 0 anyway.
    """
    options = _options(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes,
                       deterministic)
    options |= _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    made = _backward([tensor.transpose(0, 1)[None] for tensor in (q, k, v, out, dout)], softmax_lse[None], options,
                     rng_state)
    _write([gradient[0].transpose(0, 1) for gradient in made], (dq, dk, dv))


# By what names some clients (Diffusers) import the passes.
_wrapped_flash_attn_forward, _wrapped_flash_attn_backward = _flash_attn_forward, _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def install(*, metadata: bool = False) -> None:
    """Make ``import flash_attn`` find these functions, in code that is imported from now on.

    ``flash_attn``, ``flash_attn.flash_attn_interface``, ``flash_attn.bert_padding`` and ``flash_attn.layers.rotary``
    are entered in :data:`sys.modules`; the import of another module of flash-attn's is an ImportError that says what
    to use. Twice is as good as once; :func:`uninstall` takes all of it away.

    Args:
        metadata: answer for the package too: ``importlib.metadata.version("flash_attn")``, and with it what
            Transformers asks before it takes ``attn_implementation="flash_attention_2"``.

    Raises:
        TilewiseError: the real flash_attn is imported already, and some code holds its functions; or, with
            ``metadata``, it is installed.
    """
    check_switch("metadata", metadata)
    present = sys.modules.get("flash_attn")
    if present is not None and getattr(present, "flash_attn_func", None) is not flash_attn_func:
        raise TilewiseError(f"flash_attn is imported already, from {getattr(present, '__file__', None)}: code that "
                            "holds its functions would go on calling them. Call install() before anything imports it.")
    layers = flash_attn_package.package("flash_attn.layers", {"rotary": rotary}, None)
    modules = {"flash_attn_interface": sys.modules[__name__], "bert_padding": bert_padding, "layers": layers}
    functions = {name: globals()[name] for name in __all__ if not name.endswith("install")}
    package = flash_attn_package.package("flash_attn", {"__version__": INTERFACE_VERSION, **functions, **modules},
                                         __doc__)
    flash_attn_package.enter({"flash_attn": package, "flash_attn.layers.rotary": rotary,
                              **{f"flash_attn.{name}": module for name, module in modules.items()}},
                             INTERFACE_VERSION, metadata)


def uninstall() -> None:
    """Undo :func:`install`, and what was installed below it: ``import flash_attn`` finds what it found before.

    Code that was imported in between keeps the functions that it has. Where nothing is installed, nothing happens.
    """
    flash_attn_package.remove()


def _options(dropout_p: float, softmax_scale: float | None, causal: bool, window_size: tuple[int, int],
             softcap: float, alibi_slopes: Slopes, deterministic: bool = False) -> dict[str, Any]:
    """Translate what is neither q, k, v nor a length into the arguments of :func:`tilewise.attention`."""
    return {"mask": window(*_sides(causal, window_size), "bottom_right"), "scale": softmax_scale,
            "softcap": None if softcap == 0.0 else softcap, "alibi_slopes": alibi_slopes, "dropout_p": dropout_p,
            "deterministic": deterministic or None}


def _sides(causal: bool, window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    """Translate a window, whose right side counts not if causal, into that of :func:`tilewise.window`."""
    check_switch("causal", causal)
    left, right = sides_of(window_size)
    return left, 0 if causal else right


def _lengths(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
             max_seqlen_k: int) -> dict[str, Any]:
    return {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k}


def _refuse_pages(**given: torch.Tensor | None) -> None:
    for name, tensor in given.items():
        if tensor is not None:
            raise UnsupportedProblem(f"{name} is given; allowed is None: of packed queries, caches in pages or "
                                     "padded on the left are not there yet. Pass keys and values packed, with "
                                     "cu_seqlens_k, or a batch of queries to flash_attn_with_kvcache.", {})


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any],
            return_attn_probs: bool) -> torch.Tensor | OutLseAndProbs:
    if return_attn_probs:
        return _attend_fully(q, k, v, options, return_probs=True)
    out: torch.Tensor = attend_batch(heads_first("q", q), heads_first("k", k), heads_first("v", v), **options)
    return out.transpose(1, 2)


def _attend_fully(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any],
                  return_probs: bool) -> OutLseAndProbs:
    """Return out, lse and S_dmask; options get dropout's seed."""
    q, k, v = heads_first("q", q), heads_first("k", k), heads_first("v", v)
    _draw_seed(q, options)
    out, lse = attend_batch(q, k, v, **options, return_aux=("lse",))
    probs = signed_probabilities(q, k, options) if return_probs and options["dropout_p"] else q.new_empty(0)
    return out.transpose(1, 2), _plus_inf_where_empty(lse), probs


def _attend_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any],
                   return_attn_probs: bool) -> torch.Tensor | OutLseAndProbs:
    if return_attn_probs:
        return _attend_varlen_fully(q, k, v, options, return_probs=True)
    out: torch.Tensor = attend_packed(q, k, v, **options)
    return out


def _attend_varlen_fully(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any],
                         return_probs: bool) -> OutLseAndProbs:
    """Return out, lse and S_dmask of packed sequences; options get dropout's seed."""
    _draw_seed(q, options)
    out, lse = attend_packed(q, k, v, **options, return_aux=("lse",))
    probs = q.new_empty(0)
    if return_probs and options["dropout_p"]:
        longest = int(options["max_seqlen_q"]), int(options["max_seqlen_k"])
        probs = signed_probabilities_varlen(q, k, longest, options)
    return out, _plus_inf_where_empty(lse), probs


def _draw_seed(q: torch.Tensor, options: dict[str, Any]) -> None:
    """Draw the seed that :func:`tilewise.attention` would draw, for who has to know it."""
    if options["dropout_p"]:
        options["dropout_seed"] = torch.randint(2**62, (1,), dtype=torch.int64, device=q.device)


def _plus_inf_where_empty(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def _state(options: dict[str, Any], q: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if options["dropout_p"]:
        state[:1] = options["dropout_seed"]
    return state


def _backward(tensors: list[torch.Tensor], lse: torch.Tensor, options: dict[str, Any],
              rng_state: torch.Tensor | None) -> list[torch.Tensor]:
    """Return dq, dk and dv of (b, h, s, d) tensors q, k, v, out and dout; lse is +inf where a query sees no key."""
    q, k, v, out, dout = tensors
    lse = lse.masked_fill(lse == float("inf"), float("-inf"))  # contiguous, as backends expect it, whatever lse was
    slopes, cu_seqlens_q, cu_seqlens_k = (options.get(n) for n in ("alibi_slopes", "cu_seqlens_q", "cu_seqlens_k"))
    operands = Operands(alibi_slopes=None if slopes is None else with_batch_dim(slopes),
                        seed=rng_state[:1] if rng_state is not None and options["dropout_p"] else None,
                        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    mask: Mask = options["mask"]
    deterministic = bool(options["deterministic"] or torch.are_deterministic_algorithms_enabled())
    settings = OperatorOptions.of_mask(options["scale"], mask, softcap=options["softcap"],
                                       dropout_p=options["dropout_p"], deterministic=deterministic)
    gradients: list[torch.Tensor] = _backward_op(q, k, v, out, lse, dout, None, *operands, *settings,
                                                 _NO_GRADIENT_OF_OPERANDS)
    return gradients


def _write(made: list[torch.Tensor], wanted: tuple[torch.Tensor | None, ...]) -> None:
    for gradient, target in zip(made, wanted, strict=True):
        if target is not None:
            target.copy_(gradient)
