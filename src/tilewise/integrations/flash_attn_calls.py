"""A call of flash-attn 2 in tilewise's terms: its arguments, and what its functions return."""

from typing import Any

import torch

from tilewise.errors import UnsupportedProblem
from tilewise.integrations.flash_family import attend_batch, attend_packed, heads_first, sides_of
from tilewise.integrations.signed_probabilities import signed_probabilities, signed_probabilities_varlen
from tilewise.masks import window
from tilewise.validate.values import check_switch

Slopes = torch.Tensor | None
OutLseAndProbs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def options_of(dropout_p: float, softmax_scale: float | None, causal: bool, window_size: tuple[int, int],
               softcap: float, alibi_slopes: Slopes, deterministic: bool = False) -> dict[str, Any]:
    """Translate what is neither q, k, v nor a length into the arguments of :func:`tilewise.attention`."""
    return {"mask": window(*window_sides(causal, window_size), "bottom_right"), "scale": softmax_scale,
            "softcap": None if softcap == 0.0 else softcap, "alibi_slopes": alibi_slopes, "dropout_p": dropout_p,
            "deterministic": deterministic or None}


def window_sides(causal: bool, window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    """Translate a window, whose right side counts not if causal, into that of :func:`tilewise.window`."""
    check_switch("causal", causal)
    left, right = sides_of(window_size)
    return left, 0 if causal else right


def lengths_of(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
               max_seqlen_k: int) -> dict[str, Any]:
    """Name the lengths of packed sequences as :func:`tilewise.attention_varlen` does."""
    return {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k}


def refuse_pages(**given: torch.Tensor | None) -> None:
    """Raise UnsupportedProblem where packed queries come with a cache in pages or padded on the left."""
    for name, tensor in given.items():
        if tensor is not None:
            raise UnsupportedProblem(f"{name} is given; allowed is None: of packed queries, caches in pages or "
                                     "padded on the left are not there yet. Pass keys and values packed, with "
                                     "cu_seqlens_k, or a batch of queries to flash_attn_with_kvcache.", {})


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any],
           return_attn_probs: bool) -> torch.Tensor | OutLseAndProbs:
    """Return out, (b, sq, hq, dv), or with probabilities what :func:`attend_fully` returns."""
    if return_attn_probs:
        return attend_fully(q, k, v, options, return_probs=True)
    out: torch.Tensor = attend_batch(heads_first("q", q), heads_first("k", k), heads_first("v", v), **options)
    return out.transpose(1, 2)


def attend_fully(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any],
                 return_probs: bool) -> OutLseAndProbs:
    """Return out, lse and S_dmask; options get dropout's seed."""
    q, k, v = heads_first("q", q), heads_first("k", k), heads_first("v", v)
    _draw_seed(q, options)
    out, lse = attend_batch(q, k, v, **options, return_aux=("lse",))
    probs = signed_probabilities(q, k, options) if return_probs and options["dropout_p"] else q.new_empty(0)
    return out.transpose(1, 2), plus_inf_where_empty(lse), probs


def attend_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any],
                  return_attn_probs: bool) -> torch.Tensor | OutLseAndProbs:
    """Return out, (total_q, hq, dv), or with probabilities what :func:`attend_varlen_fully` returns."""
    if return_attn_probs:
        return attend_varlen_fully(q, k, v, options, return_probs=True)
    out: torch.Tensor = attend_packed(q, k, v, **options)
    return out


def attend_varlen_fully(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any],
                        return_probs: bool) -> OutLseAndProbs:
    """Return out, lse and S_dmask of packed sequences; options get dropout's seed."""
    _draw_seed(q, options)
    out, lse = attend_packed(q, k, v, **options, return_aux=("lse",))
    probs = q.new_empty(0)
    if return_probs and options["dropout_p"]:
        longest = int(options["max_seqlen_q"]), int(options["max_seqlen_k"])
        probs = signed_probabilities_varlen(q, k, longest, options)
    return out, plus_inf_where_empty(lse), probs


def _draw_seed(q: torch.Tensor, options: dict[str, Any]) -> None:
    """Draw the seed that :func:`tilewise.attention` would draw, for who has to know it."""
    if options["dropout_p"]:
        options["dropout_seed"] = torch.randint(2**62, (1,), dtype=torch.int64, device=q.device)


def plus_inf_where_empty(lse: torch.Tensor) -> torch.Tensor:
    """Return lse as flash-attn has it, +inf where a query sees no key."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))
