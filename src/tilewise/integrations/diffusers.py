"""Hugging Face Diffusers: the function that its models hand their queries, keys and values to.

Tensors are (b, s, h, d), and seen as (b, h, s, d) without a copy; everything else is as torch's SDPA has it.
"""

import sys
from typing import Any

import torch

from tilewise.errors import TilewiseError, UnsupportedProblem
from tilewise.integrations.torch_sdpa import scaled_dot_product_attention

__all__ = ["dispatch_attention_fn", "install"]

_DEFAULT = "native"  # the name of Diffusers' backend where nobody asks for one


def dispatch_attention_fn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                          attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
                          scale: float | None = None, enable_gqa: bool = False,
                          attention_kwargs: dict[str, Any] | None = None, *, backend: Any = None,
                          parallel_config: Any = None) -> torch.Tensor:
    """Attend as ``diffusers.models.attention_dispatch.dispatch_attention_fn``.

    Args:
        query, key, value: (b, sq, hq, d), (b, sk, hk, d) and (b, sk, hk, dv).
        attn_mask: broadcasts to (b, hq, sq, sk), or (b, sk) of the keys alone; bool, True = take part, or added to
            the scores.
        dropout_p: probability to drop a pair.
        is_causal: query i sees keys up to i.
        scale: None = 1/sqrt(d).
        enable_gqa: allow hq to be a multiple of hk.
        attention_kwargs, backend, parallel_config: must be None (or empty): meant for another implementation.

    Returns:
        (b, sq, hq, dv); 0 where a query sees no key.

    Raises:
        UnsupportedProblem: another implementation is asked for, by the call or around it, or context parallelism.

    >>> q = torch.randn(2, 16, 4, 8)
    >>> dispatch_attention_fn(q, q, q).shape
    torch.Size([2, 16, 4, 8])
    """
    for name, given in (("attention_kwargs", attention_kwargs), ("backend", backend),
                        ("parallel_config", parallel_config)):
        if given:
            raise UnsupportedProblem(f"{name} is {given!r}; allowed is None: it is meant for an implementation of "
                                     "Diffusers' own. Take it off the model.", {})
    _refuse_another_in_force()
    if attn_mask is not None and attn_mask.shape == (len(query), key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    out = scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask,
                                       dropout_p, is_causal, scale, enable_gqa)
    return out.transpose(1, 2)


def install() -> None:
    """Put :func:`dispatch_attention_fn` in the place of Diffusers', in the modules that are imported and those to come.

    It serves calls for which Diffusers' own default, ``native``, is in force; where ``attention_backend(...)``,
    ``set_attention_backend(...)`` or the variable ``DIFFUSERS_ATTN_BACKEND`` has asked for another, they raise.

    Raises:
        TilewiseError: Diffusers is not installed, or has no such function.
    """
    try:
        from diffusers.models import attention_dispatch
        original = attention_dispatch.dispatch_attention_fn
    except (ImportError, AttributeError) as missing:
        raise TilewiseError("Diffusers is not installed, or its models do not call dispatch_attention_fn; allowed are "
                            "versions that do: pip install -U diffusers.") from missing
    for name, module in list(sys.modules.items()):
        if name.startswith("diffusers.") and vars(module).get("dispatch_attention_fn") is original:
            vars(module)["dispatch_attention_fn"] = dispatch_attention_fn


def _refuse_another_in_force() -> None:
    """Refuse what Diffusers would give to the implementation that its context manager or variable names."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is None or dispatch.dispatch_attention_fn is not dispatch_attention_fn:
        return  # not installed: called by name
    registry: Any = getattr(dispatch, "_AttentionBackendRegistry", None)
    if registry is None:
        return
    in_force = registry.get_active_backend()[0]
    if in_force != _DEFAULT:
        raise UnsupportedProblem(f"Diffusers' backend in force is {in_force.value!r}; allowed is {_DEFAULT!r}, its "
                                 "default, which tilewise stands in for: leave attention_backend(...), or enter "
                                 f"attention_backend({_DEFAULT!r}).", {})
