"""The functions of flash-attn 3, whose module is ``flash_attn_interface``: names, order, defaults and conventions.

A window's bound of -1 (any negative one), a softcap of 0.0 and an attention_chunk of 0 mean none. What flash-attn 3
refuses and tilewise does not is computed: float32, gradients of lse, of qv and of chunks. ``pack_gqa``, ``sm_margin``,
``scheduler_metadata`` and, but for a cache, ``num_splits`` are for its kernels, and have no effect.
"""

import sys
from typing import Any, Literal, overload

import torch

from tilewise.decode import attention_decode
from tilewise.errors import InvalidInput, TilewiseError
from tilewise.integrations.callers_terms import in_terms
from tilewise.integrations.flash_family import (
    WORDS,
    OutAndLse,
    attend,
    band_of,
    heads_first,
    refuse,
    sides_of,
    unpacked,
)
from tilewise.masks import chunk
from tilewise.merging import merge

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_with_kvcache", "install", "uninstall"]
Maybe = torch.Tensor | None
_attend_cache = in_terms(attention_decode, WORDS | {"block_table": "page_table"}, heads_third=True)


@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None,
                    causal: bool = False, qv: Maybe = None, q_descale: Maybe = None, k_descale: Maybe = None,
                    v_descale: Maybe = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
                    deterministic: bool = False, sm_margin: int = 0,
                    return_attn_probs: Literal[False] = False) -> torch.Tensor: ...


@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None,
                    causal: bool = False, qv: Maybe = None, q_descale: Maybe = None, k_descale: Maybe = None,
                    v_descale: Maybe = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
                    deterministic: bool = False, sm_margin: int = 0, *,
                    return_attn_probs: Literal[True]) -> OutAndLse: ...


@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None,
                    causal: bool = False, qv: Maybe = None, q_descale: Maybe = None, k_descale: Maybe = None,
                    v_descale: Maybe = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
                    deterministic: bool = False, sm_margin: int = 0,
                    return_attn_probs: bool = False) -> torch.Tensor | OutAndLse: ...


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None,
                    causal: bool = False, qv: Maybe = None, q_descale: Maybe = None, k_descale: Maybe = None,
                    v_descale: Maybe = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
                    deterministic: bool = False, sm_margin: int = 0,
                    return_attn_probs: bool = False) -> torch.Tensor | OutAndLse:
    """Attend as flash-attn 3's ``flash_attn_func``.

    Args:
        q, k, v: (b, sq, hq, d), (b, sk, hk, d) and (b, sk, hk, dv), any strides.
        softmax_scale: None = 1/sqrt(d), with qv 1/sqrt(d + dv).
        causal: query i sees keys up to i + sk - sq.
        qv: (b, sq, hq, dv): ``qv · v`` is added to ``q · k``; k and v are put side by side for it, a copy.
        q_descale, k_descale, v_descale: must be None: of 8-bit numbers.
        window_size: (left, right): keys kept on either side of that diagonal, ends included; -1 = all.
        attention_chunk: positions i + sk - sq and j are in one chunk of so many; 0 = no chunks.
        softcap: 0.0 = none.
        num_splits, pack_gqa, sm_margin: without an effect.
        deterministic: True demands bit-equal gradients; False leaves it to
            :func:`torch.use_deterministic_algorithms`.
        return_attn_probs: return (out, lse).

    Returns:
        out, (b, sq, hq, dv), 0 where a query sees no key; lse is (b, hq, sq), float32, -inf there.

    >>> q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([1, 128, 8, 64])
    """
    _refuse_scales(q_descale, k_descale, v_descale)
    options = _options(softmax_scale, causal, window_size, attention_chunk, softcap, deterministic)
    found = attend(q, k, v, qv, options, with_lse=return_attn_probs)
    return found if return_attn_probs else found[0]


@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                           cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, seqused_q: Maybe = None,
                           seqused_k: Maybe = None, softmax_scale: float | None = None, causal: bool = False,
                           qv: Maybe = None, q_descale: Maybe = None, k_descale: Maybe = None, v_descale: Maybe = None,
                           window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                           num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
                           sm_margin: int = 0, return_attn_probs: Literal[False] = False) -> torch.Tensor: ...


@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                           cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, seqused_q: Maybe = None,
                           seqused_k: Maybe = None, softmax_scale: float | None = None, causal: bool = False,
                           qv: Maybe = None, q_descale: Maybe = None, k_descale: Maybe = None, v_descale: Maybe = None,
                           window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                           num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
                           sm_margin: int = 0, *, return_attn_probs: Literal[True]) -> OutAndLse: ...


@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                           cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, seqused_q: Maybe = None,
                           seqused_k: Maybe = None, softmax_scale: float | None = None, causal: bool = False,
                           qv: Maybe = None, q_descale: Maybe = None, k_descale: Maybe = None, v_descale: Maybe = None,
                           window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                           num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
                           sm_margin: int = 0, return_attn_probs: bool = False) -> torch.Tensor | OutAndLse: ...


def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                           cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, seqused_q: Maybe = None,
                           seqused_k: Maybe = None, softmax_scale: float | None = None, causal: bool = False,
                           qv: Maybe = None, q_descale: Maybe = None, k_descale: Maybe = None,
                           v_descale: Maybe = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                           softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
                           deterministic: bool = False, sm_margin: int = 0,
                           return_attn_probs: bool = False) -> torch.Tensor | OutAndLse:
    """Attend over packed sequences as flash-attn 3's ``flash_attn_varlen_func``.

    Args:
        q, k, v: (total_q, hq, d), (total_k, hk, d) and (total_k, hk, dv), any strides.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,): 0, then where each sequence ends.
        max_seqlen_q, max_seqlen_k: lengths of the longest; nothing here needs them.
        seqused_q, seqused_k: (sequences,): how many rows of each take part; None = all.
        qv: (total_q, hq, dv); otherwise as in :func:`flash_attn_func`.
        softmax_scale, causal, window_size, attention_chunk, softcap: as in :func:`flash_attn_func`.
        q_descale, k_descale, v_descale, deterministic, return_attn_probs: as in :func:`flash_attn_func`.
        num_splits, pack_gqa, sm_margin: without an effect.

    Returns:
        out, (total_q, hq, dv); with ``return_attn_probs`` also lse, (hq, total_q).
    """
    _refuse_scales(q_descale, k_descale, v_descale)
    options = _options(softmax_scale, causal, window_size, attention_chunk, softcap, deterministic)
    found = attend(q, k, v, qv, options, {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
                                          "seqused_q": seqused_q, "seqused_k": seqused_k}, return_attn_probs)
    return found if return_attn_probs else found[0]


@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
                              q_descale: Maybe = None, k_descale: Maybe = None, v_descale: Maybe = None,
                              window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                              deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0,
                              return_attn_probs: Literal[False] = False) -> torch.Tensor: ...


@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
                              q_descale: Maybe = None, k_descale: Maybe = None, v_descale: Maybe = None,
                              window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                              deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0, *,
                              return_attn_probs: Literal[True]) -> OutAndLse: ...


@overload
def flash_attn_qkvpacked_func(qkv: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
                              q_descale: Maybe = None, k_descale: Maybe = None, v_descale: Maybe = None,
                              window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                              deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0,
                              return_attn_probs: bool = False) -> torch.Tensor | OutAndLse: ...


def flash_attn_qkvpacked_func(qkv: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
                              q_descale: Maybe = None, k_descale: Maybe = None, v_descale: Maybe = None,
                              window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                              deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0,
                              return_attn_probs: bool = False) -> torch.Tensor | OutAndLse:
    """Attend as :func:`flash_attn_func`, with q, k and v in one tensor, which is not copied.

    ``qkv`` is (b, s, 3, h, d), or with ``num_heads_q`` (b, s, hq + 2 hk, d).
    """
    _refuse_scales(q_descale, k_descale, v_descale)
    if qkv.dim() == 5:
        q, k, v = unpacked("qkv", qkv, "b, s, 3, h, d")
    elif qkv.dim() != 4 or num_heads_q is None:
        raise InvalidInput(f"qkv has {qkv.dim()} dims and num_heads_q is {num_heads_q}; allowed are 5 dims "
                           "(b, s, 3, h, d), or 4 dims (b, s, hq + 2 hk, d) with num_heads_q.")
    else:
        heads_of_two = qkv.shape[2] - num_heads_q
        if num_heads_q < 0 or heads_of_two < 0 or heads_of_two % 2:
            raise InvalidInput(f"num_heads_q is {num_heads_q} and qkv has {qkv.shape[2]} heads; allowed is a number "
                               "that leaves as many heads for k as for v.")
        q, k, v = torch.split(qkv, [num_heads_q, heads_of_two // 2, heads_of_two // 2], 2)
    options = _options(softmax_scale, causal, window_size, attention_chunk, softcap, deterministic)
    found = attend(q, k, v, None, options, with_lse=return_attn_probs)
    return found if return_attn_probs else found[0]


@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Maybe = None,
                            v: Maybe = None, qv: Maybe = None, rotary_cos: Maybe = None, rotary_sin: Maybe = None,
                            cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: Maybe = None,
                            cache_leftpad: Maybe = None, page_table: Maybe = None, cu_seqlens_q: Maybe = None,
                            cu_seqlens_k_new: Maybe = None, max_seqlen_q: int | None = None,
                            rotary_seqlens: Maybe = None, q_descale: Maybe = None, k_descale: Maybe = None,
                            v_descale: Maybe = None, softmax_scale: float | None = None, causal: bool = False,
                            window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                            rotary_interleaved: bool = True, scheduler_metadata: Maybe = None, num_splits: int = 0,
                            pack_gqa: bool | None = None, sm_margin: int = 0,
                            return_softmax_lse: Literal[False] = False) -> torch.Tensor: ...


@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Maybe = None,
                            v: Maybe = None, qv: Maybe = None, rotary_cos: Maybe = None, rotary_sin: Maybe = None,
                            cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: Maybe = None,
                            cache_leftpad: Maybe = None, page_table: Maybe = None, cu_seqlens_q: Maybe = None,
                            cu_seqlens_k_new: Maybe = None, max_seqlen_q: int | None = None,
                            rotary_seqlens: Maybe = None, q_descale: Maybe = None, k_descale: Maybe = None,
                            v_descale: Maybe = None, softmax_scale: float | None = None, causal: bool = False,
                            window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                            rotary_interleaved: bool = True, scheduler_metadata: Maybe = None, num_splits: int = 0,
                            pack_gqa: bool | None = None, sm_margin: int = 0, *,
                            return_softmax_lse: Literal[True]) -> OutAndLse: ...


@overload
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Maybe = None,
                            v: Maybe = None, qv: Maybe = None, rotary_cos: Maybe = None, rotary_sin: Maybe = None,
                            cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: Maybe = None,
                            cache_leftpad: Maybe = None, page_table: Maybe = None, cu_seqlens_q: Maybe = None,
                            cu_seqlens_k_new: Maybe = None, max_seqlen_q: int | None = None,
                            rotary_seqlens: Maybe = None, q_descale: Maybe = None, k_descale: Maybe = None,
                            v_descale: Maybe = None, softmax_scale: float | None = None, causal: bool = False,
                            window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                            rotary_interleaved: bool = True, scheduler_metadata: Maybe = None, num_splits: int = 0,
                            pack_gqa: bool | None = None, sm_margin: int = 0,
                            return_softmax_lse: bool = False) -> torch.Tensor | OutAndLse: ...


def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Maybe = None,
                            v: Maybe = None, qv: Maybe = None, rotary_cos: Maybe = None, rotary_sin: Maybe = None,
                            cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: Maybe = None,
                            cache_leftpad: Maybe = None, page_table: Maybe = None, cu_seqlens_q: Maybe = None,
                            cu_seqlens_k_new: Maybe = None, max_seqlen_q: int | None = None,
                            rotary_seqlens: Maybe = None, q_descale: Maybe = None, k_descale: Maybe = None,
                            v_descale: Maybe = None, softmax_scale: float | None = None, causal: bool = False,
                            window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                            rotary_interleaved: bool = True, scheduler_metadata: Maybe = None, num_splits: int = 0,
                            pack_gqa: bool | None = None, sm_margin: int = 0,
                            return_softmax_lse: bool = False) -> torch.Tensor | OutAndLse:
    """Attend to a cache as flash-attn 3's ``flash_attn_with_kvcache``; there is no backward pass.

    Pages may have any size.

    Args:
        q: (b, sq, hq, d), any strides.
        k_cache, v_cache: (rows, capacity, hk, d) and (rows, capacity, hk, dv), stride 1 along the head dim; with a
            page_table, (pages, page size, hk, d) and so on.
        k, v: (b, new, hk, d) and (b, new, hk, dv): written to the caches from position ``cache_seqlens`` on.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): k is turned from position ``cache_seqlens`` on, and q too,
            but, without ``causal`` and a window, all of q by that one position.
        cache_seqlens: (b,), int32, or an integer: positions filled before k and v.
        cache_batch_idx: (b,), int32: rows of the caches.
        cache_leftpad: (b,), int32: where the keys begin.
        page_table: (b, pages of a sequence), int32.
        qv, cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens, q_descale, k_descale, v_descale: must be None.
        attention_chunk: must be 0.
        softmax_scale, causal, window_size, softcap: as in :func:`flash_attn_func`.
        rotary_interleaved: True = dims 2p and 2p + 1 turn together; False = p and p + rotary_dim / 2.
        num_splits: programs that share the keys of a head; 0 = what fills the device.
        max_seqlen_q, scheduler_metadata, pack_gqa, sm_margin: without an effect.
        return_softmax_lse: return (out, lse).

    Returns:
        out, (b, sq, hq, dv), 0 where a query sees no key; lse is (b, hq, sq), float32, -inf there.

    >>> q, cache = torch.randn(2, 1, 8, 64), torch.randn(2, 100, 2, 64)
    >>> flash_attn_with_kvcache(q, cache, cache, cache_seqlens=torch.tensor([30, 99]), causal=True).shape
    torch.Size([2, 1, 8, 64])
    """
    _refuse_scales(q_descale, k_descale, v_descale)
    refuse("queries and new keys come as a batch, pad them.", cu_seqlens_q=cu_seqlens_q,
           cu_seqlens_k_new=cu_seqlens_k_new)
    refuse("a cache is read as it lies, and keys turn by where they lie.", qv=qv, rotary_seqlens=rotary_seqlens)
    refuse("of a cache, chunks are not there yet.", attention_chunk=attention_chunk or None)
    left, right = sides_of(window_size)
    k, v = (None if tensor is None else heads_first(name, tensor) for name, tensor in (("k", k), ("v", v)))
    with torch.no_grad():
        out, lse = _attend_cache(
            heads_first("q", q), heads_first("k_cache", k_cache), heads_first("v_cache", v_cache), k=k, v=v,
            cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
            block_table=page_table,
            rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
            mask=band_of(left, right, causal), scale=softmax_scale, softcap=softcap or None,
            num_splits=num_splits or None, return_aux=("lse",))
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(out_partial: torch.Tensor, lse_partial: torch.Tensor, out: Maybe = None,
                       out_dtype: torch.dtype | None = None) -> OutAndLse:
    """Combine attention over parts of the keys as flash-attn 3's ``flash_attn_combine``.

    Args:
        out_partial: (parts, b, s, h, dv).
        lse_partial: (parts, b, s, h), float32, -inf where a part sees no key.
        out: (b, s, h, dv): where the result goes; None = a new tensor.
        out_dtype: of the result; None = that of ``out_partial``.

    Returns:
        out, (b, s, h, dv), and lse, (b, s, h).

    Raises:
        InvalidInput: no part, or shapes that do not belong together.
    """
    if not len(out_partial):
        raise InvalidInput("out_partial has no parts; allowed is one or more.")
    for name, tensor, shape in (("lse_partial", lse_partial, out_partial.shape[:-1]),
                                ("out", out, out_partial.shape[1:])):
        if tensor is not None and tensor.shape != shape:
            raise InvalidInput(f"{name} has shape {tuple(tensor.shape)} and out_partial {tuple(out_partial.shape)}; "
                               f"allowed is {tuple(shape)}.")
    made, lse = out_partial[0].float().clone(), lse_partial[0].clone()
    for part, part_lse in zip(out_partial[1:], lse_partial[1:], strict=True):
        made, lse = merge(made, lse, part.float(), part_lse)
    if out is not None:
        return out.copy_(made), lse
    return made.to(out_dtype or out_partial.dtype), lse


def install() -> None:
    """Make ``import flash_attn_interface`` find these functions, in code that is imported from now on.

    Raises:
        TilewiseError: the real one is imported already, and some code holds its functions.
    """
    present = sys.modules.get("flash_attn_interface")
    if present is not None and present is not sys.modules[__name__]:
        raise TilewiseError("flash_attn_interface is imported already: code that holds its functions would go on "
                            "calling them. Call install() before anything imports it.")
    sys.modules["flash_attn_interface"] = sys.modules[__name__]


def uninstall() -> None:
    """Undo :func:`install`: ``import flash_attn_interface`` finds what it found before.

    Code that was imported in between keeps the functions that it has. Where nothing is installed, nothing happens.
    """
    if sys.modules.get("flash_attn_interface") is sys.modules[__name__]:
        del sys.modules["flash_attn_interface"]


def _options(softmax_scale: float | None, causal: bool, window_size: tuple[int, int], attention_chunk: int,
             softcap: float, deterministic: bool) -> dict[str, Any]:
    left, right = sides_of(window_size)
    mask = band_of(left, right, causal)
    if attention_chunk:
        mask = mask & chunk(attention_chunk, "bottom_right")
    return {"mask": mask, "scale": softmax_scale, "softcap": softcap or None, "deterministic": deterministic or None}


def _refuse_scales(q_descale: Maybe, k_descale: Maybe, v_descale: Maybe) -> None:
    refuse("8-bit numbers are not there yet. Multiply by it, in 16 bits.", q_descale=q_descale, k_descale=k_descale,
           v_descale=v_descale)
