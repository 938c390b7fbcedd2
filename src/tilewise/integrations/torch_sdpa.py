"""torch's own calls, ``scaled_dot_product_attention`` and ``varlen_attn``, by their names, arguments and conventions.

The causal mask of the first has its diagonal in the top left corner, that of the second in the bottom right one; a
boolean mask is True where a pair takes part, a float one is added to the scores; fewer heads of keys than of queries
need ``enable_gqa``; dropout draws from torch's default generator, so that a seed repeats it.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any, Protocol

import torch

from tilewise.api import attention, attention_varlen
from tilewise.errors import InvalidInput, UnsupportedProblem
from tilewise.integrations.callers_terms import in_terms
from tilewise.integrations.flash_family import sides_of
from tilewise.masks import Mask, TensorMask, causal, window
from tilewise.validate.tensors import is_causal_bias
from tilewise.validate.values import check_switch

__all__ = ["scaled_dot_product_attention", "varlen_attn"]
# What errors of tilewise's say, and what torch knows it by.
_WORDS = {"q": "query", "k": "key", "v": "value"}
_attend = in_terms(attention, _WORDS | {
    "bias": "attn_mask", "mask has": "attn_mask has",
    "pass mask[:, None, None], or lengths as seqlens_k": "pass attn_mask[:, None, None]"})
_attend_packed = in_terms(attention_varlen, _WORDS | {"cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k"})


class AuxRequest(Protocol):
    """What torch's ``AuxRequest`` is, which is not imported: whether lse is asked for."""

    @property
    def lse(self) -> bool:
        """Whether lse is returned too."""


def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                                 attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: float | None = None,
                                 enable_gqa: bool = False) -> torch.Tensor:
    """Attend as :func:`torch.nn.functional.scaled_dot_product_attention`, with a gradient for a float mask too.

    Args:
        query, key, value: (..., hq, sq, d), (..., hk, sk, d) and (..., hk, sk, dv), of two dims or more; dims in front
            are broadcast, and the heads too unless ``enable_gqa``.
        attn_mask: broadcasts to (..., hq, sq, sk), and has no more dims; bool, True = take part, or query's dtype or
            float32, added to the scaled scores, where -inf hides a pair. Or a
            :class:`torch.nn.attention.bias.CausalBias`: a causal mask that says which corner its diagonal is in.
        dropout_p: probability to drop a pair, whatever mode a module is in.
        is_causal: query i sees keys up to i, also where lengths differ; together with ``attn_mask`` both hold.
        scale: None = 1/sqrt(d).
        enable_gqa: allow hq to be a multiple of hk.

    Returns:
        (..., hq, sq, dv); 0 where a query sees no key.

    Raises:
        InvalidInput: heads differ and ``enable_gqa`` is False, a tensor has too few dims or ``attn_mask`` too many, a
            CausalBias is of other lengths or comes with ``is_causal``, a switch is no bool, or as
            :func:`tilewise.attention`.

    >>> q = torch.randn(2, 8, 128, 64)
    >>> scaled_dot_product_attention(q, q, q, is_causal=True).shape
    torch.Size([2, 8, 128, 64])
    """
    check_switch("is_causal", is_causal)
    check_switch("enable_gqa", enable_gqa)
    band = causal("top_left") if is_causal else Mask()
    if not isinstance(attn_mask, (torch.Tensor, NoneType)):
        raise InvalidInput(f"attn_mask is a {type(attn_mask).__name__}; allowed is a torch.Tensor, a CausalBias of "
                           "torch's, or None. A mask of tilewise's goes to tilewise.attention(mask=).")
    if is_causal_bias(attn_mask):
        band, attn_mask = _band_of(attn_mask, query, key, is_causal), None
    rank = max(query.dim(), key.dim(), value.dim())
    _check_ranks(query, key, value, attn_mask, rank)
    batch, (q, k, v) = _broadcast((query, key, value), max(rank, 4), kept=3 if enable_gqa else 2)
    _check_heads(q.shape[1], k.shape[1], enable_gqa)
    mask: Mask | TensorMask = band
    bias = None
    if attn_mask is not None:
        check_mask_dtype("attn_mask", attn_mask)
        given = _four_dims(attn_mask, batch)
        if given.dtype is torch.bool:  # not joined by "&", which torch.compile takes for an operator of torch
            mask = TensorMask(band, given)
        else:
            bias = given
    out: torch.Tensor = _attend(q, k, v, mask=mask, bias=bias, dropout_p=dropout_p, scale=scale)
    return out.reshape((*batch, *out.shape[1:])[-rank:])


def varlen_attn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
                cu_seq_k: torch.Tensor | None, max_q: int, max_k: int, *, return_aux: AuxRequest | None = None,
                scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
                seqused_k: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
                num_splits: int | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend over packed sequences as :func:`torch.nn.attention.varlen.varlen_attn`.

    Args:
        query, key, value: (total_q, hq, d), (total_k, hk, d) and (total_k, hk, dv).
        cu_seq_q, cu_seq_k: (sequences + 1,): 0, then where each sequence ends; cu_seq_k None = cu_seq_q.
        max_q, max_k: lengths of the longest; nothing here needs them.
        return_aux: a ``torch.nn.attention.varlen.AuxRequest``; with ``lse=True``, (out, lse) is returned.
        scale: None = 1/sqrt(d).
        window_size: (left, right): keys kept on either side of the diagonal, ends included; -1 = all. (-1, 0) is
            causal. The diagonal runs through the bottom right corner.
        enable_gqa: allow hq to be a multiple of hk.
        seqused_k: (sequences,): keys of each sequence that take part; here with a gradient.
        block_table: must be None: paged caches are not there yet.
        num_splits: 1 makes a sequence's result the same in every batch (``deterministic=True`` of
            :func:`tilewise.attention_varlen`); keys are never split.

    Returns:
        out, (total_q, hq, dv), and where asked for lse, (hq, total_q), float32; 0 and -inf where a query sees no key.

    Raises:
        InvalidInput: as :func:`scaled_dot_product_attention`.
        UnsupportedProblem: a block table is given.
    """
    if block_table is not None:
        raise UnsupportedProblem("block_table is given; allowed is None: paged caches are not there yet. Pass keys and "
                                 "values packed, with cu_seq_k.", {})
    _check_heads(query.shape[1], key.shape[1], enable_gqa)
    left, right = sides_of(window_size)
    with_lse = wants(return_aux, "lse", of=("lse",))
    wanted: Any = ("lse",) if with_lse else ()
    found: Any = _attend_packed(query, key, value, cu_seqlens_q=cu_seq_q, cu_seqlens_k=cu_seq_k, seqused_k=seqused_k,
                                mask=window(left, right, "bottom_right"), scale=scale,
                                deterministic=True if num_splits == 1 else None, return_aux=wanted)
    return tuple(found) if with_lse else found


def wants(return_aux: Any, name: str, of: tuple[str, ...]) -> bool:
    """Whether one of torch's ``AuxRequest`` asks for this result; it may not ask for one that is not among ``of``."""
    for other in getattr(return_aux, "_fields", ()):
        if other not in of and getattr(return_aux, other):
            raise UnsupportedProblem(f"return_aux asks for {other}; allowed {'is' if len(of) == 1 else 'are'} "
                                     f"{', '.join(of)}: leave {other} out of the AuxRequest.", {})
    return return_aux is not None and bool(getattr(return_aux, name))


def check_mask_dtype(name: str, mask: torch.Tensor) -> None:
    """Refuse integers: a tokenizer's 0 and 1 are no booleans, and adding them would hide nothing."""
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise InvalidInput(f"{name} has dtype {mask.dtype}; allowed are torch.bool, True = take part, and "
                           "floating-point dtypes, which are added to the scores.")


def _band_of(bias: Any, query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> Mask:
    """Return the mask that a CausalBias stands for; as a tensor it has no values, nor their shape."""
    if is_causal:
        raise InvalidInput("attn_mask is a CausalBias and is_causal is True; allowed is one of them, as in torch.")
    own, lengths = (bias.seq_len_q, bias.seq_len_kv), (query.shape[-2:-1] + key.shape[-2:-1])
    if own != tuple(lengths):
        raise InvalidInput(f"attn_mask is a CausalBias of lengths {own}; allowed are {tuple(lengths)}, those of query "
                           "and key.")
    return causal("top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right")


def _check_ranks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
                 rank: int) -> None:
    """Refuse what has no positions, and a mask with dims in front that the batch would be taken for."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise InvalidInput(f"{name} has shape {tuple(tensor.shape)}; allowed are two dims (positions, head dim) or "
                               "more.")
    if attn_mask is not None and attn_mask.dim() > rank:
        raise InvalidInput(f"attn_mask has shape {tuple(attn_mask.shape)}; allowed are {rank} dims at most, as many as "
                           "query, key and value have.")


def _check_heads(query_heads: int, key_heads: int, enable_gqa: bool) -> None:
    """Refuse what torch refuses without the flag; with it, the problem's own check decides."""
    if query_heads != key_heads and not enable_gqa:
        raise InvalidInput(f"key has {key_heads} heads and query has {query_heads}, and enable_gqa is False: pass "
                           "enable_gqa=True, or as many heads of keys as of queries.")


def _broadcast(tensors: tuple[torch.Tensor, ...], rank: int,
               kept: int) -> tuple[Sequence[int], tuple[torch.Tensor, ...]]:
    """Return what the dims in front of the heads are broadcast to, and the tensors with one dim in their place.

    Dims that cannot be broadcast stay as they are, for the problem's check to name.

    Args:
        tensors: of up to ``rank`` dims, at least 4.
        rank: of all once dims are added at the front.
        kept: dims, the last ones, that are not broadcast.
    """
    full = [_of_rank(tensor, rank) for tensor in tensors]
    lead = [next((size for size in sizes if size != 1), 1)
            for sizes in zip(*(tensor.shape[:-kept] for tensor in full), strict=True)]
    expanded = [tensor.expand(*(wanted if own == 1 else own for own, wanted in zip(tensor.shape, lead, strict=False)),
                              *tensor.shape[-kept:]) for tensor in full]
    return lead[:rank - 3], tuple(tensor.flatten(0, -4) for tensor in expanded)


def _four_dims(attn_mask: torch.Tensor, batch: Sequence[int]) -> torch.Tensor:
    """View a mask with one batch dim; copied only where it has some of several and is broadcast along the others."""
    full = _of_rank(attn_mask, len(batch) + 3)
    if len(batch) > 1 and any(size != 1 for size in full.shape[:-3]):
        full = full.expand(*batch, -1, -1, -1)
    return full.flatten(0, -4)


def _of_rank(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Add dims at the front, as torch broadcasts."""
    return tensor[(None,) * (rank - tensor.dim())] if tensor.dim() < rank else tensor
