"""The functions of flash-attn 3, whose module is ``flash_attn_interface``: names, order, defaults and conventions.

A window's bound of -1 (any negative one), a softcap of 0.0 and an attention_chunk of 0 mean none. What flash-attn 3
refuses and tilewise does not is computed: float32, gradients of lse, of qv and of chunks. ``pack_gqa``, ``num_splits``
and ``sm_margin`` are for its kernels, and have no effect.

Not there is ``flash_attn_with_kvcache``.
"""

import sys
from typing import Any

import torch

from tilewise.errors import InvalidInput, TilewiseError
from tilewise.integrations.flash_family import OutAndLse, attend, band_of, refuse
from tilewise.masks import chunk
from tilewise.merge import merge

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "install"]
Maybe = torch.Tensor | None


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
    found = attend(q, k, v, qv, options)
    return found if return_attn_probs else found[0]


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
                                          "seqused_q": seqused_q, "seqused_k": seqused_k})
    return found if return_attn_probs else found[0]


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
        q, k, v = qkv.unbind(2)
    elif num_heads_q is None:
        raise InvalidInput(f"qkv has {qkv.dim()} dims and num_heads_q is None; allowed are 5 dims (b, s, 3, h, d), or "
                           "4 dims (b, s, hq + 2 hk, d) with num_heads_q.")
    else:
        key_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = torch.split(qkv, [num_heads_q, key_heads, key_heads], 2)
    options = _options(softmax_scale, causal, window_size, attention_chunk, softcap, deterministic)
    found = attend(q, k, v, None, options)
    return found if return_attn_probs else found[0]


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
    """
    if not len(out_partial):
        raise InvalidInput("out_partial has no parts; allowed is one or more.")
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


def _options(softmax_scale: float | None, causal: bool, window_size: tuple[int, int], attention_chunk: int,
             softcap: float, deterministic: bool) -> dict[str, Any]:
    left, right = (None if side < 0 else side for side in window_size)
    mask = band_of(left, right, causal)
    if attention_chunk:
        mask = mask & chunk(attention_chunk, "bottom_right")
    return {"mask": mask, "scale": softmax_scale, "softcap": softcap or None, "deterministic": deterministic or None}


def _refuse_scales(q_descale: Maybe, k_descale: Maybe, v_descale: Maybe) -> None:
    refuse("8-bit numbers are not there yet. Multiply by it, in 16 bits.", q_descale=q_descale, k_descale=k_descale,
           v_descale=v_descale)
