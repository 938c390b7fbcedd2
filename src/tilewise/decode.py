"""Decoding: attention of a few new queries to the keys and values that a cache holds."""

from typing import Any, Never, cast

import torch

from tilewise import settings
from tilewise.api import AttentionOutput
from tilewise.autograd.decode_op import NAMES, refuse_gradient, run_decode
from tilewise.backends._support.current import autocast_dtype
from tilewise.dispatch import Explanation, explain_decoding
from tilewise.masks import Mask
from tilewise.problem.decode import (
    CacheOperands,
    DecodeOptions,
    decode_problem,
    specs_of_inputs,
    specs_of_present,
)
from tilewise.problem.length_checks import check_length
from tilewise.validate.names import refuses_unknown, unknown_argument
from tilewise.validate.tensors import check_optional_tensors, with_batch_dim
from tilewise.validate.values import (
    check_cache_seqlens,
    check_choices,
    check_mask_to_decode,
    check_switch,
    checked_softcap,
    checked_splits,
    wants_lse,
)

_NO_MASK = Mask()
_CAST = (torch.float16, torch.bfloat16, torch.float32)  # what autocast casts, and casts to


@refuses_unknown
def attention_decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, k: torch.Tensor | None = None,
                     v: torch.Tensor | None = None, cache_seqlens: int | torch.Tensor | None = None,
                     cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
                     block_table: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
                     rotary_sin: torch.Tensor | None = None, rotary_interleaved: bool = True,
                     mask: Mask | None = None, scale: float | None = None,
                     alibi_slopes: torch.Tensor | None = None, softcap: float | None = None,
                     sinks: torch.Tensor | None = None, num_splits: int | None = None,
                     return_aux: tuple[str, ...] = (), deterministic: bool | None = None,
                     backend: str | None = None, **unknown: Never) -> torch.Tensor | AttentionOutput:
    """Compute attention of new queries to a cache of keys and values, which k and v are appended to first.

    The last query stands on the last key. Lengths, tables and indices stay on the device: no synchronisation, and a
    CUDA graph replays with other ones. There is no backward pass.

    Args:
        q: (b, hq, sq, d), any strides; sq is 1, or a few, or all of a prompt.
        k_cache, v_cache: (b, hk, capacity, d) and (b, hk, capacity, dv), stride 1 along the head dim and any others.
            With a block_table, (pages, hk, page size, d) and so on, pages of any size.
        k, v: (b, hk, new, d) and (b, hk, new, dv): written to the caches, in place, from position ``cache_seqlens``
            on; what there is no room for is not, and raises under ``TILEWISE_CHECK=1``. None = the caches are complete.
        cache_seqlens: (b,), int32 or int64, or an integer: positions filled before k and v, no more than there are, a
            number below 0 in a tensor counting as 0; None = all.
        cache_batch_idx: (b,), int32 or int64: the row of the caches in which a sequence lies; None = its own.
        cache_leftpad: (b,), int32 or int64: positions before this one are padding, which nobody sees; None = 0.
        block_table: (b, pages of a sequence), int32 or int64: its pages in order; entries past its end are not read.
            An entry, here or in ``cache_batch_idx``, that the caches have not is refused on a CPU, and so is a length
            above the capacity; on a GPU the host never reads them, and what comes of them means nothing (under
            ``TILEWISE_CHECK=1`` a later call raises).
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), floating point: k is turned by the angles of its positions
            and q, under a bounded mask, by those of the positions that k begins at, query by query; without one all of
            q turns by the first.
        rotary_interleaved: True = dims 2p and 2p + 1 turn together; False = p and p + rotary_dim / 2.
        mask: :func:`causal`, :func:`window` or both, their alignment "bottom_right" or left out; None = every key of
            the sequence.
        scale, softcap: as in :func:`attention`.
        alibi_slopes: (hq,) or (b, hq), float32; distances count from the key that a query stands on.
        sinks: (hq,), as in :func:`attention`.
        num_splits: programs that share the keys of a head; None = what fills the device. It changes the order of sums.
        return_aux: ``("lse",)`` returns a named tuple (out, lse).
        deterministic: True = a sequence's result has the same bits whatever else the batch or the cache holds; keys
            are then split at fixed lengths. None follows :func:`torch.use_deterministic_algorithms`. On every run the
            same it is in any case.
        backend: "triton" or "reference"; None = triton where there is a GPU.

    Returns:
        out, (b, hq, sq, dv), or with ``return_aux`` (out, lse): 0 and -inf where a query sees no key.

    Raises:
        InvalidInput: an argument without a meaning, or one that asks for a gradient.
        UnsupportedProblem: the backend refuses, or the mask is more than a band.

    Under autocast, q, k and v take the dtype of the caches, whatever autocast's is, and out has it too: a cache is
    written in place and never copied. float64 stays as it is.

    >>> import torch, tilewise as tw
    >>> q, cache = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 100, 64)
    >>> tw.attention_decode(q, cache, cache, cache_seqlens=torch.tensor([30, 99])).shape
    torch.Size([2, 8, 1, 64])
    """
    if unknown:
        raise unknown_argument("attention_decode", unknown)
    with_lse = wants_lse(return_aux)
    given = CacheOperands(k, v, cast(Any, cache_seqlens), cache_batch_idx, cache_leftpad, block_table, rotary_cos,
                          rotary_sin, alibi_slopes, sinks)
    options = DecodeOptions(_NO_MASK if mask is None else mask, scale, softcap, rotary_interleaved, num_splits,
                            cast(Any, deterministic))
    q, operands, options = _prepared(q, k_cache, v_cache, given, options, backend)
    out, lse = run_decode(q, k_cache, v_cache, operands, options, backend)
    return AttentionOutput(out, lse) if with_lse else out


@refuses_unknown
def explain_decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, k: torch.Tensor | None = None,
                   v: torch.Tensor | None = None, cache_seqlens: int | torch.Tensor | None = None,
                   cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
                   block_table: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
                   rotary_sin: torch.Tensor | None = None, rotary_interleaved: bool = True,
                   mask: Mask | None = None, scale: float | None = None,
                   alibi_slopes: torch.Tensor | None = None, softcap: float | None = None,
                   sinks: torch.Tensor | None = None, num_splits: int | None = None,
                   return_aux: tuple[str, ...] = (), deterministic: bool | None = None,
                   backend: str | None = None, **unknown: Never) -> Explanation:
    """Tell which backend this call of :func:`attention_decode` would use, and every other backend's reason.

    Arguments and errors are those of :func:`attention_decode`; nothing is computed or written, and a refusal is an
    answer.

    >>> import torch, tilewise as tw
    >>> q, cache = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 100, 64)
    >>> tw.decode.explain_decode(q, cache, cache, cache_seqlens=30).forward
    'reference'
    """
    if unknown:
        raise unknown_argument("explain_decode", unknown)
    wants_lse(return_aux)
    given = CacheOperands(k, v, cast(Any, cache_seqlens), cache_batch_idx, cache_leftpad, block_table, rotary_cos,
                          rotary_sin, alibi_slopes, sinks)
    options = DecodeOptions(_NO_MASK if mask is None else mask, scale, softcap, rotary_interleaved, num_splits,
                            cast(Any, deterministic))
    q, operands, options = _prepared(q, k_cache, v_cache, given, options, backend)
    problem = decode_problem(specs_of_inputs(q, k_cache, v_cache), specs_of_present(operands), options)
    return explain_decoding(problem, backend or settings.default_backend())


def _prepared(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: CacheOperands,
              options: DecodeOptions, backend: str | None) -> tuple[torch.Tensor, CacheOperands, DecodeOptions]:
    """Check what the operator would refuse in words of its own, and make lengths, slopes and dtypes what it takes."""
    check_switch("rotary_interleaved", options.rotary_interleaved)
    check_choices(options.scale, options.deterministic, backend)
    checked_softcap(options.softcap)
    checked_splits(options.num_splits)
    check_mask_to_decode(options.mask, is_mask=isinstance(options.mask, Mask))
    specs_of_inputs(q, k_cache, v_cache)
    check_length(given.cache_seqlens, k_cache, given.block_table)
    operands = given._replace(cache_seqlens=_lengths(q, given.cache_seqlens),
                              alibi_slopes=_slopes(q, given.alibi_slopes))
    _check_tensors(q, k_cache, v_cache, operands)
    q, operands = _autocast(q, k_cache, operands)
    if options.deterministic is None:
        options = options._replace(deterministic=torch.are_deterministic_algorithms_enabled())
    return q, operands, options


def _lengths(q: torch.Tensor, cache_seqlens: Any) -> torch.Tensor | None:
    if cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    check_cache_seqlens(cache_seqlens)
    return torch.full((len(q),), int(cache_seqlens), dtype=torch.int32, device=q.device)


def _slopes(q: torch.Tensor, slopes: torch.Tensor | None) -> torch.Tensor | None:
    if slopes is None:
        return None
    slopes = with_batch_dim(slopes)
    return slopes.expand(len(q), -1) if slopes.shape == (1, q.shape[1]) else slopes


def _autocast(q: torch.Tensor, k_cache: torch.Tensor, operands: CacheOperands) -> tuple[torch.Tensor, CacheOperands]:
    """Give q, k and v the dtype of the caches where autocast is on."""
    if autocast_dtype("cuda" if q.is_cuda else q.device.type) is None or k_cache.dtype not in _CAST:
        return q, operands
    k, v = (None if tensor is None else _cast(tensor, k_cache.dtype) for tensor in (operands.k, operands.v))
    return _cast(q, k_cache.dtype), operands._replace(k=k, v=v)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype in _CAST else tensor


def _check_tensors(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, operands: CacheOperands) -> None:
    """Refuse what is no tensor, which the operator would in words of its own, and what asks for a gradient."""
    named = list(zip(NAMES, (q, k_cache, v_cache, *operands), strict=True))
    check_optional_tensors(named)
    refuse_gradient(named)
