"""What versions of flash-attn have in common: layouts, packed projections, windows, lengths, ``qv``, and refusals.

Tensors are (b, s, h, d), or (total, h, d) packed, and seen as (b, h, s, d) without a copy. Diagonals run through the
bottom right corner, each sequence's own; lse is -inf where a query sees no key.
"""

from typing import Any

import torch

from tilewise.api import attention, attention_varlen
from tilewise.decode import attention_decode
from tilewise.errors import InvalidInput, UnsupportedProblem
from tilewise.integrations.callers_terms import in_terms
from tilewise.masks import Mask, window
from tilewise.validate.values import check_switch

OutAndLse = tuple[torch.Tensor, torch.Tensor]
# What errors of tilewise's say, and what flash-attn knows it by.
WORDS = {"scale": "softmax_scale", "sinks": "learnable_sink", "seqlens_q": "seqused_q", "seqlens_k": "seqused_k",
         "or None for none": "or 0.0 for none", "integer >= 1, or None to choose": "integer >= 1, or 0 to choose"}
attend_batch = in_terms(attention, WORDS, heads_third=True)
attend_packed = in_terms(attention_varlen, WORDS)
attend_cache = in_terms(attention_decode, WORDS, heads_third=True)


def band_of(left: int | None, right: int | None, causal: bool) -> Mask:
    """Return the mask of a window; causal takes the place of its right side.

    Raises:
        InvalidInput: causal is neither True nor False, as a window that came in its place.
    """
    check_switch("causal", causal)
    return window(left, 0 if causal else right, "bottom_right")


def sides_of(window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    """Return the bounds of a window as :func:`tilewise.window` has them; a negative one is none."""
    try:
        left, right = (None if side < 0 else side for side in window_size)
    except (TypeError, ValueError):
        raise InvalidInput(f"window_size is {window_size!r}; allowed are two integers (left, right), -1 for no "
                           "bound.") from None
    return left, right


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: torch.Tensor | None, options: dict[str, Any],
           lengths: dict[str, Any] | None = None, with_lse: bool = True) -> tuple[torch.Tensor, Any]:
    """Return out and, unless it is not wanted, lse.

    Args:
        q, k, v: as flash-attn has them, packed where ``lengths`` has ``cu_seqlens_q``.
        qv: (..., hq, dv): queries of the values, whose products with v are added to those of q with k; None = none.
        options: of :func:`tilewise.attention`.
        lengths: ``cu_seqlens_q``, ``cu_seqlens_k``, ``seqused_q`` and ``seqused_k``.
        with_lse: whether lse is wanted; None stands for it where not.
    """
    if qv is not None:  # q·k + qv·v is a product of the two side by side; the scale counts both
        _check_values_queries(q, k, v, qv)
        q, k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    given: dict[str, Any] = lengths or {}
    packed = [given.get(name) is not None for name in ("cu_seqlens_q", "cu_seqlens_k")]
    if packed[0] != packed[1]:
        raise InvalidInput(f"cu_seqlens_q is {'given' if packed[0] else 'None'} and cu_seqlens_k is "
                           f"{'given' if packed[1] else 'None'}; allowed are both, or neither.")
    options |= {"return_aux": ("lse",) if with_lse else ()}
    if packed[0]:
        found = attend_packed(q, k, v, **given, **options)
        return (found[0], found[1]) if with_lse else (found, None)
    q, k, v = heads_first("q", q), heads_first("k", k), heads_first("v", v)
    found = attend_batch(q, k, v, seqlens_q=given.get("seqused_q"), seqlens_k=given.get("seqused_k"), **options)
    return (found[0].transpose(1, 2), found[1]) if with_lse else (found.transpose(1, 2), None)


def heads_first(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """View (b, s, h, d) as (b, h, s, d)."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
        got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"type {type(tensor).__name__}"
        raise InvalidInput(f"{name} has {got}; allowed is a tensor of 4 dims (b, s, h, d).")
    return tensor.transpose(1, 2)


def _check_values_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: torch.Tensor) -> None:
    """Refuse what cannot be put side by side."""
    for name, tensor, beside, of in (("v", v, k, "k"), ("qv", qv, q, "q")):
        if tensor.shape[:-1] != beside.shape[:-1]:
            raise InvalidInput(f"{name} has shape {tuple(tensor.shape)} and {of} {tuple(beside.shape)}: with qv they "
                               "may differ in their head dim alone.")
    if qv.shape[-1] != v.shape[-1]:
        raise InvalidInput(f"qv has head dim {qv.shape[-1]} and v has {v.shape[-1]}: they must be equal.")


def unpacked(name: str, packed: torch.Tensor, dims: str) -> tuple[torch.Tensor, ...]:
    """Return the parts of packed projections, without a copy; ``dims``: "b, s, 3, h, d", the number that of parts."""
    names = dims.split(", ")
    place = next(place for place, size in enumerate(names) if size.isdigit())
    if packed.dim() != len(names) or packed.shape[place] != int(names[place]):
        raise InvalidInput(f"{name} has shape {tuple(packed.shape)}; allowed is ({dims}).")
    return packed.unbind(place)


def refuse(reason: str, **given: object) -> None:
    """Raise for the first argument that is there."""
    for name, value in given.items():
        if value is not None:
            raise UnsupportedProblem(f"{name} is given; allowed is None: {reason}", {})
