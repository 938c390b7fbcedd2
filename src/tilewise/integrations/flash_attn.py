"""The functions of flash-attn 2, by their names, in their order, with their defaults and conventions.

Tensors are (b, s, h, d), or (total, h, d) packed, and seen as (b, h, s, d) without a copy. Causal and window masks and
the distances of ALiBi count from the bottom right corner; a bound of -1 (any negative one) and a softcap of 0.0 mean
none; lse is +inf, not -inf, where a query sees no key (:func:`tilewise.merge` takes both). What flash-attn refuses and
tilewise does not is computed: float32, wider heads, softcap with dropout, gradients of lse and of ALiBi slopes.

Not there yet are block tables of packed queries, which raise; those of ``flash_attn_with_kvcache`` are.
"""

import sys
from typing import Literal, overload

import torch

from tilewise.errors import TilewiseError
from tilewise.integrations import bert_padding, flash_attn_package, flash_attn_passes, rotary
from tilewise.integrations.flash_attn_calls import (
    OutLseAndProbs,
    Slopes,
    attend,
    attend_varlen,
    lengths_of,
    options_of,
    plus_inf_where_empty,
    refuse_pages,
    window_sides,
)
from tilewise.integrations.flash_family import OutAndLse, attend_cache, heads_first, unpacked
from tilewise.masks import window
from tilewise.validate.values import check_switch

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "install",
           "uninstall"]
INTERFACE_VERSION = "2.8.3"  # of flash-attn, whose signatures these are; code that tells its versions apart asks
# The passes by themselves, and by what names some clients (Diffusers) import them.
_flash_attn_forward = _wrapped_flash_attn_forward = flash_attn_passes.forward
_flash_attn_backward = _wrapped_flash_attn_backward = flash_attn_passes.backward
_flash_attn_varlen_forward = _wrapped_flash_attn_varlen_forward = flash_attn_passes.varlen_forward
_flash_attn_varlen_backward = _wrapped_flash_attn_varlen_backward = flash_attn_passes.varlen_backward


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
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return attend(q, k, v, options, return_attn_probs)


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
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    k, v = unpacked("kv", kv, "b, sk, 2, hk, d")
    return attend(q, k, v, options, return_attn_probs)


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
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    q, k, v = unpacked("qkv", qkv, "b, s, 3, h, d")
    return attend(q, k, v, options, return_attn_probs)


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
    refuse_pages(block_table=block_table)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    options |= lengths_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend_varlen(q, k, v, options, return_attn_probs)


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
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    options |= lengths_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    k, v = unpacked("kv", kv, "total_k, 2, hk, d")
    return attend_varlen(q, k, v, options, return_attn_probs)


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
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    options |= lengths_of(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    q, k, v = unpacked("qkv", qkv, "total, 3, h, d")
    return attend_varlen(q, k, v, options, return_attn_probs)


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
    left, right = window_sides(causal, window_size)
    k, v = (None if tensor is None else heads_first(name, tensor) for name, tensor in (("k", k), ("v", v)))
    with torch.no_grad():
        out, lse = attend_cache(
            heads_first("q", q), heads_first("k_cache", k_cache), heads_first("v_cache", v_cache), k=k, v=v,
            cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
            block_table=block_table,
            rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
            mask=window(left, right), scale=softmax_scale, alibi_slopes=alibi_slopes,
            softcap=None if softcap == 0.0 else softcap, num_splits=num_splits or None, return_aux=("lse",))
    return (out.transpose(1, 2), plus_inf_where_empty(lse)) if return_softmax_lse else out.transpose(1, 2)


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
