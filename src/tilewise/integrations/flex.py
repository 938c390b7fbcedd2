"""FlexAttention's call, for what can be translated, without compiling a graph.

A ``BlockMask`` becomes a mask function and lists of its visible tiles, once (flex_masks.py); masks of tilewise's own
are taken in its place. A ``score_mod`` in Python is traced (flex_tracing.py). Those of :func:`softcap` and
:func:`alibi`, which FlexAttention itself takes as well, are options of the call, for which there are faster kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.api import attention
from tilewise.errors import InvalidInput, UnsupportedProblem
from tilewise.functions import MaskFunction, ScoreFunction
from tilewise.integrations.flex_masks import FROM_THE_FIRST, mask_of, traced_mask
from tilewise.integrations.flex_tracing import traced_score
from tilewise.integrations.torch_sdpa import _check_heads, wants
from tilewise.masks import Mask, TensorMask

__all__ = ["alibi", "flex_attention", "softcap", "traced_mask", "traced_score"]

Visible = Mask | TensorMask | MaskFunction


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A score_mod that is known by name: FlexAttention calls it, tilewise reads its options.

    Attributes:
        function: (score, b, h, q_idx, kv_idx) -> score.
        options: the same as arguments of :func:`tilewise.attention`.
    """

    function: Callable[..., torch.Tensor]
    options: dict[str, Any]

    def __call__(self, score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor,
                 kv_idx: torch.Tensor) -> torch.Tensor:
        """Change one score."""
        return self.function(score, b, h, q_idx, kv_idx)


def softcap(cap: float) -> ScoreMod:
    """Return the score_mod ``cap · tanh(score / cap)``."""
    return ScoreMod(lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap), {"softcap": cap})


def alibi(slopes: torch.Tensor) -> ScoreMod:
    """Return the score_mod ``score − slopes[h] · |q_idx − kv_idx|``; slopes (hq,), float32.

    Beside a mask of tilewise's, distances have that mask's alignment.
    """
    return ScoreMod(lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs(),
                    {"alibi_slopes": slopes})


def flex_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                   score_mod: Callable[..., Any] | ScoreFunction | None = None, block_mask: Any = None,
                   scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
                   kernel_options: dict[str, Any] | None = None, *, return_aux: Any = None) -> Any:
    """Attend as :func:`torch.nn.attention.flex_attention.flex_attention`.

    Args:
        query, key, value: (b, hq, sq, d), (b|1, hk, sk, d) and (b|1, hk, sk, dv).
        score_mod: (score, b, h, q_idx, kv_idx) -> score, of elementwise operations and tensors read at positions, as
            :func:`traced_score` takes it; what :func:`softcap`, :func:`alibi` or :func:`traced_score` have made; a
            :class:`tilewise.functions.ScoreFunction`; or None.
        block_mask: a ``BlockMask``, a mask of tilewise's, or None. The lists of a ``BlockMask`` are read at its first
            call, tensors that its mask_mod reads in each one, as :func:`traced_mask` has it. What a mask_mod does that
            is not taken there, a RuntimeWarning names: it is then evaluated at the first call, for all pairs. Inside of
            torch.compile one that is new is evaluated in every run; pass the result of :func:`traced_mask` instead.
        scale: None = 1/sqrt(d).
        enable_gqa: allow hq to be a multiple of hk.
        return_lse: return (out, lse).
        kernel_options: for the tiles of FlexAttention's own kernels; without an effect.
        return_aux: an ``AuxRequest``: return (out, AuxOutput), with lse and max_scores where asked for.

    Returns:
        out, (b, hq, sq, dv), 0 where a query sees no key; lse and max_scores, (b, hq, sq), float32, -inf there.

    Raises:
        UnsupportedProblem: score_mod does what has no counterpart in Triton; it is named.
        InvalidInput: the ``BlockMask`` is of other lengths, batch entries or heads, or as :func:`tilewise.attention`.

    >>> q = torch.randn(1, 4, 64, 16)
    >>> flex_attention(q, q, q, score_mod=softcap(20.0)).shape
    torch.Size([1, 4, 64, 16])
    """
    if return_lse and return_aux is not None:
        raise InvalidInput("return_lse is True and return_aux is given; allowed is one of them: "
                           "return_aux=AuxRequest(lse=True).")
    _check_heads(query.shape[1], key.shape[1], enable_gqa)
    options = _score_options(score_mod)
    mask = _mask(block_mask, query, key)
    if len(key) == 1 and len(query) > 1:
        key, value = (tensor.expand(len(query), -1, -1, -1) for tensor in (key, value))
    with_lse, with_most = (wants(return_aux, name, of=("lse", "max_scores")) for name in ("lse", "max_scores"))
    with_lse = with_lse or return_lse
    # What is not asked for is not made: where it would have a gradient of zeros, some backends refuse.
    found: Any = attention(query, key, value, mask=mask, scale=scale, **options,
                           return_aux=("max_logit",) if with_most else ("lse",) if with_lse else ())
    out, lse, *most = found if with_lse or with_most else (found, None)
    if return_lse:
        return out, lse
    if return_aux is None:
        return out
    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(lse if with_lse else None, most[0] if most else None)


def _score_options(score_mod: object) -> dict[str, Any]:
    if score_mod is None:
        return {}
    if isinstance(score_mod, ScoreFunction):
        return {"score_function": score_mod}
    if isinstance(score_mod, ScoreMod):
        return score_mod.options
    if not callable(score_mod):
        raise InvalidInput(f"score_mod is a {type(score_mod).__name__}; allowed is a function, or None.")
    if torch.compiler.is_compiling():
        raise UnsupportedProblem(f"score_mod is a {type(score_mod).__name__} of Python's own inside torch.compile; "
                                 "allowed there are None, softcap(...) and alibi(...) of tilewise.integrations.flex, "
                                 "and what its traced_score(...) has returned outside.", {})
    return {"score_function": traced_score(score_mod)}


def _mask(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Visible:
    if block_mask is None:
        return FROM_THE_FIRST
    if isinstance(block_mask, (Mask, TensorMask, MaskFunction)):
        return block_mask
    return mask_of(block_mask, query, key)
