"""Attention functions for the torture suite, by name: this package, its backends, and its peers where they are here.

What a peer declares is what its documentation says that it takes; where it answers for one call itself, it is asked.
"""

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.api import attention, attention_varlen, explain
from tilewise.bench.peers import peer_providers
from tilewise.bench.providers import AUTOMATIC, Provider, torch_providers
from tilewise.bench.torture_flex import flex_implementation
from tilewise.errors import InvalidInput
from tilewise.masks import Mask, causal
from tilewise.support.names import BACKENDS
from tilewise.testing.torture import Call, Implementation, Takes
from tilewise.validate.choices import check_implementation, path_of_implementation

_HALVES = (torch.float16, torch.bfloat16)
_ALL_DTYPES = (*_HALVES, torch.float32, torch.float64)
_INSTALL = {
    "flash_attn2": "pip install flash-attn",
    "flash_attn3": "build it from the folder hopper/ of github.com/Dao-AILab/flash-attention",
    "flash_attn3_fwd": "pip install fa3-fwd",
    "flash_attn4": "pip install flash-attn-4",
}
_OURS = (AUTOMATIC, *(f"{AUTOMATIC}:{name}" for name in BACKENDS))


def peer_names() -> list[str]:
    """Return the names of the peers, installed or not."""
    return [provider.name for provider in _providers()]


def implementation_names() -> list[str]:
    """Return every name that there is an implementation for."""
    return [*_OURS, *peer_names()]


def is_own(name: str) -> bool:
    """Whether a failure of that implementation is this package's, or the caller's own: all but the peers."""
    return name not in peer_names()


def check_name(name: str) -> None:
    """Raise :class:`InvalidInput` unless it is one of :func:`implementation_names`, or MODULE:NAME."""
    check_implementation(name, implementation_names())


def missing(name: str, device: torch.device) -> str | None:
    """Return why an implementation cannot run here at all and what to install, as a sentence, or None."""
    provider = next((provider for provider in _providers() if provider.name == name), None)
    reason = None if provider is None else provider.missing(device)
    if reason is None or "is not installed" not in reason:
        return reason
    return f"{reason}; {_INSTALL[name]}"


def implementation_named(name: str) -> Implementation:
    """Return the implementation of that name, or import that of MODULE:NAME.

    Raises:
        InvalidInput: there is none; the message says what is allowed.
    """
    check_name(name)
    if name in _OURS:
        return _own(name)
    if (path := path_of_implementation(name)) is not None:
        return _imported(name, *path)
    if name == "flex":
        return flex_implementation()
    if name in _SDPA:
        return _sdpa(name)
    return _dense() if name == "naive" else _flash_attn(name)


def _providers() -> list[Provider]:
    return [*torch_providers(), *peer_providers()]


def _imported(name: str, module: str, attribute: str) -> Implementation:
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise InvalidInput(f"implementation is {name!r}, and there is none: {error}. Is its folder on PYTHONPATH?"
                           ) from error
    if not isinstance(found, Implementation):
        raise InvalidInput(f"implementation is {name!r}, which is a {type(found).__name__}; allowed is a "
                           "tilewise.testing.torture.Implementation.")
    return found


def _own(name: str) -> Implementation:
    """Return this package's attention, or one of its backends."""
    backend = name.partition(":")[2] or None

    def mask_of(is_causal: bool, alignment: Any, mask: torch.Tensor | None = None) -> Any:
        band = causal(alignment) if is_causal else Mask()
        return band if mask is None else band & mask

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float,
               alignment: Any = None, mask: torch.Tensor | None = None, return_lse: bool = False) -> Any:
        visible = mask_of(causal, alignment, mask)
        if return_lse:
            return tuple(attention(q, k, v, mask=visible, scale=scale, return_aux=("lse",), backend=backend))
        return attention(q, k, v, mask=visible, scale=scale, backend=backend)

    def attend_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, alignment: Any =
                      "bottom_right", **options: Any) -> Any:
        return attention_varlen(q, k, v, mask=mask_of(causal, alignment), backend=backend, **options)

    def why_not(call: Call) -> str | None:
        options = dict(call.options)
        visible = mask_of(options.pop("causal"), options.pop("alignment", "bottom_right"), options.pop("mask", None))
        return_aux = ("lse",) if options.pop("return_lse", False) else ()
        answer = explain(call.q, call.k, call.v, mask=visible, return_aux=return_aux, **options)
        for one in ("forward", "backward") if call.q.requires_grad else ("forward",):
            reasons = {name: reason for (way, name), reason in answer.reasons.items() if way == one}
            if backend is not None and reasons[backend] is not None:
                return f"{one}: {reasons[backend]}"
            if backend is None and all(reason is not None for reason in reasons.values()):
                return "; ".join(f"{one}, {name}: {reason}" for name, reason in reasons.items())
        return None

    takes = Takes(dtypes=_ALL_DTYPES, head_dims=range(1, 577), other_value_dim=True,
                  alignments=("top_left", "bottom_right"), grouped_heads=True, masks=True, lse=True,
                  deterministic=True, batch_invariant=True)
    return Implementation(name, attend, takes, attend_packed, why_not)


def _dense() -> Implementation:
    """Return attention as a textbook writes it."""
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float,
               mask: torch.Tensor | None = None) -> torch.Tensor:
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        scores = q @ k.mT * scale
        if causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v

    return Implementation("naive", attend, Takes(
        dtypes=_ALL_DTYPES, head_dims=range(1, 577), other_value_dim=True, alignments=("top_left",),
        grouped_heads=True, masks=True))


_SDPA = {
    "sdpa_math": (SDPBackend.MATH, Takes(
        dtypes=_ALL_DTYPES, head_dims=range(1, 577), other_value_dim=True, alignments=("top_left",),
        grouped_heads=True, masks=True)),
    "sdpa_flash": (SDPBackend.FLASH_ATTENTION, Takes(
        dtypes=_ALL_DTYPES, head_dims=range(1, 257), alignments=("top_left",), grouped_heads=True, masks=True,
        strided_head_dim=False, deterministic=True)),
    "sdpa_efficient": (SDPBackend.EFFICIENT_ATTENTION, Takes(
        head_dims=range(1, 577), other_value_dim=True, alignments=("top_left",), grouped_heads=True, masks=True,
        strided_head_dim=False)),
    "sdpa_cudnn": (SDPBackend.CUDNN_ATTENTION, Takes(
        dtypes=_HALVES, other_value_dim=True, alignments=("top_left",), grouped_heads=True, masks=True,
        strided_head_dim=False)),
}
_ANSWERS = {SDPBackend.FLASH_ATTENTION: "can_use_flash_attention",
            SDPBackend.EFFICIENT_ATTENTION: "can_use_efficient_attention",
            SDPBackend.CUDNN_ATTENTION: "can_use_cudnn_attention"}


def _sdpa(name: str) -> Implementation:
    """Return one backend of torch's scaled_dot_product_attention; on a GPU torch itself says what it takes."""
    backend, takes = _SDPA[name]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float,
               mask: torch.Tensor | None = None) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    def why_not(call: Call) -> str | None:
        if call.q.device.type != "cuda" or backend not in _ANSWERS:
            return None
        cuda: Any = torch.backends.cuda
        params = cuda.SDPAParams(call.q, call.k, call.v, call.options.get("mask"), 0.0, call.options["causal"],
                                 call.case.hq != call.case.hk)
        with warnings.catch_warnings(record=True) as caught, sdpa_kernel(backend):
            warnings.simplefilter("always")
            taken = getattr(cuda, _ANSWERS[backend])(params, True)
        said = " | ".join(str(warning.message).partition(" (Triggered")[0] for warning in caught)
        return None if taken else f"torch says that it does not take the call: {said or 'without a reason'}"

    return Implementation(name, attend, takes, why_not=why_not)


def _flash_attn(name: str) -> Implementation:
    """Return a generation of the flash-attn package: (b, s, h, d), aligned at the bottom right."""
    provider: Any = next(provider for provider in peer_providers() if provider.name == name)
    module: Any = importlib.import_module(provider.module)
    forward_only, second = name == "flash_attn3_fwd", name == "flash_attn2"

    def options_of(causal: bool, scale: float) -> dict[str, Any]:
        options = {"softmax_scale": scale, "causal": causal}
        # Each generation has the switch of its own; torch's is not read.
        is_asked = torch.are_deterministic_algorithms_enabled() and not forward_only
        return options | ({"deterministic": True} if is_asked else {})

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float) -> torch.Tensor:
        out = module.flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)), **options_of(causal, scale))
        return _first(out).transpose(1, 2)

    def attend_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float,
                      **lengths: Any) -> torch.Tensor:
        return _first(module.flash_attn_varlen_func(q, k, v, **lengths, **options_of(causal, scale)))

    dtypes: Sequence[torch.dtype] = (torch.bfloat16,) if forward_only else _HALVES
    return Implementation(name, attend, Takes(
        dtypes=tuple(dtypes), other_value_dim=not second, grouped_heads=True, backward=not forward_only,
        strided_head_dim=False, nothing=False, deterministic=True), attend_packed)


def _first(result: Any) -> torch.Tensor:
    """Return out: some generations return lse beside it."""
    out: torch.Tensor = result[0] if isinstance(result, (tuple, list)) else result
    return out


