"""The functions of flash-attn 4, which is ``flash_attn.cute``: their names, order, defaults and conventions.

They return (out, lse), always; a window's bound of None means none, as do two bounds whose sum is negative; a softcap
of 0.0 means none. ``num_splits``, ``pack_gqa`` and what is said to its scheduler have no effect. Functions written in
CuTe, and the block lists that go with them, are refused.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any, Literal, overload

import torch

from tilewise.errors import TilewiseError
from tilewise.integrations import flash_attn, flash_attn_package
from tilewise.integrations.flash_family import OutAndLse, attend, band_of, refuse
from tilewise.validate.values import check_switch

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "install", "uninstall"]
Maybe = torch.Tensor | None
Window = tuple[int | None, int | None]
OutAndMaybeLse = tuple[torch.Tensor, torch.Tensor | None]
_IN_CUTE = ("it is written in CuTe, which nothing here compiles. Call tilewise.attention with a "
            "tilewise.functions.ScoreFunction or MaskFunction, or a mask of tilewise's.")
_NOT_THERE = "caches in pages and gathered keys are not there yet. Pass keys and values packed, with cu_seqlens_k."


@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: Maybe = None,
                    gather_kv_indices: Maybe = None, softmax_scale: float | None = None, causal: bool = False,
                    window_size: Window = (None, None), learnable_sink: Maybe = None, softcap: float = 0.0,
                    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
                    score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None, aux_tensors: Any = None,
                    aux_scalars: Any = None, block_sparse_tensors: Any = None, block_sparse_tensors_bwd: Any = None, *,
                    return_lse: Literal[True]) -> OutAndLse: ...


@overload
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: Maybe = None,
                    gather_kv_indices: Maybe = None, softmax_scale: float | None = None, causal: bool = False,
                    window_size: Window = (None, None), learnable_sink: Maybe = None, softcap: float = 0.0,
                    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
                    score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None, aux_tensors: Any = None,
                    aux_scalars: Any = None, block_sparse_tensors: Any = None, block_sparse_tensors_bwd: Any = None,
                    return_lse: bool = False) -> OutAndMaybeLse: ...


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: Maybe = None,
                    gather_kv_indices: Maybe = None, softmax_scale: float | None = None, causal: bool = False,
                    window_size: Window = (None, None), learnable_sink: Maybe = None, softcap: float = 0.0,
                    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
                    score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None, aux_tensors: Any = None,
                    aux_scalars: Any = None, block_sparse_tensors: Any = None, block_sparse_tensors_bwd: Any = None,
                    return_lse: bool = False) -> OutAndMaybeLse:
    """Attend as ``flash_attn.cute.flash_attn_func``.

    Args:
        q, k, v: (b, sq, hq, d), (b, sk, hk, d) and (b, sk, hk, dv), any strides.
        qv: (b, sq, hq, dv): ``qv · v`` is added to ``q · k``; k and v are put side by side for it, a copy.
        softmax_scale: None = 1/sqrt(d), with qv 1/sqrt(d + dv).
        causal: query i sees keys up to i + sk - sq.
        window_size: (left, right): keys kept on either side of that diagonal, ends included; None = all.
        learnable_sink: (hq,), bfloat16, q's dtype or float32: a logit of each head for nothing; with a gradient.
        softcap: 0.0 = none.
        num_splits, pack_gqa: without an effect.
        deterministic: True demands bit-equal gradients; False leaves it to
            :func:`torch.use_deterministic_algorithms`.
        gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars: must be None.
        block_sparse_tensors, block_sparse_tensors_bwd: must be None.
        return_lse: return lse too where no gradient needs it.

    Returns:
        out, (b, sq, hq, dv), 0 where a query sees no key; and lse, (b, hq, sq), float32, -inf there, with a gradient,
        or None where neither it nor a gradient is asked for.

    >>> q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
    >>> out, lse = flash_attn_func(q, k, v, causal=True)
    >>> out.shape, lse
    (torch.Size([1, 128, 8, 64]), None)
    """
    refuse(_IN_CUTE, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
           aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
           block_sparse_tensors_bwd=block_sparse_tensors_bwd)
    refuse(_NOT_THERE, gather_kv_indices=gather_kv_indices)
    options = _options(softmax_scale, causal, window_size, _sink_for(q, learnable_sink), softcap, deterministic)
    out, lse = attend(q, k, v, qv, options)
    return out, lse if return_lse or lse.requires_grad else None


@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: Maybe = None,
                           cu_seqlens_q: Maybe = None, cu_seqlens_k: Maybe = None, max_seqlen_q: int | None = None,
                           max_seqlen_k: int | None = None, min_seqlen_k: int | None = None, seqused_q: Maybe = None,
                           seqused_k: Maybe = None, gather_kv_indices: Maybe = None, page_table: Maybe = None,
                           softmax_scale: float | None = None, causal: bool = False, window_size: Window = (None, None),
                           learnable_sink: Maybe = None, softcap: float = 0.0, num_splits: int = 1,
                           pack_gqa: bool | None = None, deterministic: bool = False, score_mod: Any = None,
                           score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None,
                           aux_tensors: Any = None, aux_scalars: Any = None, *, return_lse: Literal[True],
                           scheduler_metadata: Any = None, seqlen_k_per_split: int | None = None,
                           disable_scheduler_metadata: bool = False) -> OutAndLse: ...


@overload
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: Maybe = None,
                           cu_seqlens_q: Maybe = None, cu_seqlens_k: Maybe = None, max_seqlen_q: int | None = None,
                           max_seqlen_k: int | None = None, min_seqlen_k: int | None = None, seqused_q: Maybe = None,
                           seqused_k: Maybe = None, gather_kv_indices: Maybe = None, page_table: Maybe = None,
                           softmax_scale: float | None = None, causal: bool = False, window_size: Window = (None, None),
                           learnable_sink: Maybe = None, softcap: float = 0.0, num_splits: int = 1,
                           pack_gqa: bool | None = None, deterministic: bool = False, score_mod: Any = None,
                           score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None,
                           aux_tensors: Any = None, aux_scalars: Any = None, return_lse: bool = False,
                           scheduler_metadata: Any = None, seqlen_k_per_split: int | None = None,
                           disable_scheduler_metadata: bool = False) -> OutAndMaybeLse: ...


def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: Maybe = None,
                           cu_seqlens_q: Maybe = None, cu_seqlens_k: Maybe = None, max_seqlen_q: int | None = None,
                           max_seqlen_k: int | None = None, min_seqlen_k: int | None = None, seqused_q: Maybe = None,
                           seqused_k: Maybe = None, gather_kv_indices: Maybe = None, page_table: Maybe = None,
                           softmax_scale: float | None = None, causal: bool = False, window_size: Window = (None, None),
                           learnable_sink: Maybe = None, softcap: float = 0.0, num_splits: int = 1,
                           pack_gqa: bool | None = None, deterministic: bool = False, score_mod: Any = None,
                           score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None,
                           aux_tensors: Any = None, aux_scalars: Any = None, return_lse: bool = False,
                           scheduler_metadata: Any = None, seqlen_k_per_split: int | None = None,
                           disable_scheduler_metadata: bool = False) -> OutAndMaybeLse:
    """Attend over packed or padded sequences as ``flash_attn.cute.flash_attn_varlen_func``.

    Args:
        q, k, v: (total_q, hq, d), (total_k, hk, d) and (total_k, hk, dv) with ``cu_seqlens``, otherwise as in
            :func:`flash_attn_func`.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,): 0, then where each sequence ends; both or neither.
        max_seqlen_q, max_seqlen_k, min_seqlen_k: lengths of the longest and shortest; nothing here needs them.
        seqused_q, seqused_k: (sequences,): how many rows of each take part; None = all.
        gather_kv_indices, page_table, score_mod, score_mod_bwd, mask_mod: must be None.
        block_sparse_tensors, aux_tensors, aux_scalars: must be None.
        qv, softmax_scale, causal, window_size, learnable_sink, softcap: as in :func:`flash_attn_func`.
        num_splits, pack_gqa, deterministic, return_lse: as in :func:`flash_attn_func`.
        scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata: without an effect.

    Returns:
        As :func:`flash_attn_func`; packed, out is (total_q, hq, dv) and lse (hq, total_q).
    """
    refuse(_IN_CUTE, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
           aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors)
    refuse(_NOT_THERE, gather_kv_indices=gather_kv_indices, page_table=page_table)
    options = _options(softmax_scale, causal, window_size, _sink_for(q, learnable_sink), softcap, deterministic)
    out, lse = attend(q, k, v, qv, options, {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
                                             "seqused_q": seqused_q, "seqused_k": seqused_k})
    return out, lse if return_lse or lse.requires_grad else None


def install() -> None:
    """Make ``import flash_attn.cute`` find these functions, in code that is imported from now on.

    ``flash_attn.cute.interface`` is the same module. Where no flash_attn is there, flash-attn 2's functions are
    installed as well, by :func:`tilewise.integrations.flash_attn.install`.

    Raises:
        TilewiseError: the real one is imported already, and some code holds its functions.
    """
    own = sys.modules[__name__]
    present = sys.modules.get("flash_attn.cute")
    if present is not None and getattr(present, "interface", None) is not own:
        raise TilewiseError("flash_attn.cute is imported already: code that holds its functions would go on calling "
                            "them. Call install() before anything imports it.")
    if "flash_attn" not in sys.modules and importlib.util.find_spec("flash_attn") is None:
        flash_attn.install()
    functions = {name: getattr(own, name) for name in __all__ if not name.endswith("install")}
    package = flash_attn_package.package("flash_attn.cute", {**functions, "interface": own}, __doc__)
    sys.modules.update({"flash_attn.cute": package, "flash_attn.cute.interface": own})
    if "flash_attn" in sys.modules:
        vars(sys.modules["flash_attn"])["cute"] = package


def uninstall() -> None:
    """Undo :func:`install`; flash-attn 2's functions stay until :func:`tilewise.integrations.flash_attn.uninstall`.

    Code that was imported in between keeps the functions that it has. Where nothing is installed, nothing happens.
    """
    if getattr(sys.modules.get("flash_attn.cute"), "interface", None) is sys.modules[__name__]:
        del sys.modules["flash_attn.cute"], sys.modules["flash_attn.cute.interface"]
        vars(sys.modules.get("flash_attn", ModuleType("flash_attn"))).pop("cute", None)


def _sink_for(q: torch.Tensor, sink: Maybe) -> Maybe:
    """Return a sink in a dtype that goes with q's: bfloat16, the one that flash-attn 4 takes, does so beside any."""
    if not isinstance(sink, torch.Tensor) or sink.dtype is not torch.bfloat16 or q.dtype is torch.bfloat16:
        return sink
    return sink.to(torch.promote_types(q.dtype, torch.float32))


def _options(softmax_scale: float | None, causal: bool, window_size: Window, learnable_sink: Maybe, softcap: float,
             deterministic: bool) -> dict[str, Any]:
    check_switch("causal", causal)
    left, right = window_size
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        left = right = None
    return {"mask": band_of(left, right, causal), "scale": softmax_scale, "sinks": learnable_sink,
            "softcap": softcap or None, "deterministic": deterministic or None}
