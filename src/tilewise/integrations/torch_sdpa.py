"""torch's own calls, ``scaled_dot_product_attention`` and ``varlen_attn``, by their names, arguments and conventions.

The causal mask of the first has its diagonal in the top left corner, that of the second in the bottom right one; a
boolean mask is True where a pair takes part, a float one is added to the scores; fewer heads of keys than of queries
need ``enable_gqa``; dropout draws from torch's default generator, so that a seed repeats it.

:func:`install` puts the first in the place of torch's own, for the whole process.
"""

import re
import warnings
from collections.abc import Sequence
from types import NoneType
from typing import Any, Protocol

import torch

from tilewise import settings
from tilewise.api import attention, attention_varlen
from tilewise.backends._support.current import autocast_dtype
from tilewise.errors import InvalidInput, TilewiseError, UnsupportedProblem
from tilewise.integrations.callers_terms import in_terms
from tilewise.integrations.flash_family import sides_of
from tilewise.masks import Mask, TensorMask, causal, window
from tilewise.validate.tensors import is_causal_bias
from tilewise.validate.values import check_switch

__all__ = ["install", "scaled_dot_product_attention", "uninstall", "varlen_attn"]
# What errors of tilewise's say, and what torch knows it by.
_WORDS = {"q": "query", "k": "key", "v": "value"}
_attend = in_terms(attention, _WORDS | {
    "bias": "attn_mask", "mask has": "attn_mask has",
    "pass mask[:, None, None], or lengths as seqlens_k": "pass attn_mask[:, None, None]"})
_attend_packed = in_terms(attention_varlen, _WORDS | {"cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k"})
_NAME = "scaled_dot_product_attention"
_torchs: Any = torch._C._nn.scaled_dot_product_attention
_NUMBER = re.compile(r"\d+(\.\d+)?")
_reported: set[str] = set()  # reasons for which torch's own function has computed a call, without their numbers
_usable: set[str] = set()  # torch's backends that were enabled when install() was called
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_tensors_rule: Any = torch.Tensor.__torch_function__
_NO_RULES = (_tensors_rule.__func__, torch._C._disabled_torch_function_impl)  # of classes that leave calls to torch
_constant_when_compiled: Any = torch.compiler.assume_constant_result  # has no types


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
            float32, added to the scaled scores, where -inf hides a pair; under autocast it is cast as query is. Or a
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
        given = _four_dims(_as_under_autocast(attn_mask), batch)
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


def install() -> None:
    """Put :func:`scaled_dot_product_attention` in the place of ``torch.nn.functional``'s, in this process.

    What calls ``F.scaled_dot_product_attention`` comes here, on every device; what has imported the function by its own
    name before keeps torch's. Calls that tilewise refuses go to torch's function, and a warning gives the reason, once
    for each: nested, distributed and other tensors with rules of their own, transforms of ``torch.func`` that ask for
    gradients, and calls inside :func:`torch.nn.attention.sdpa_kernel`, or after another switch has disabled a backend
    of torch's that was enabled at ``install()``. Where a backend of tilewise's is named
    (:func:`tilewise.use_backend`, ``TILEWISE_BACKEND``), the refusal is raised in place of that.

    Code that :func:`torch.compile` has compiled before is compiled anew, and keeps the choice that is made then. Twice
    is as good as once; :func:`uninstall` takes it away.

    Raises:
        TilewiseError: another library has put a function of its own there.

    >>> install()
    >>> q = torch.randn(2, 8, 128, 64)
    >>> out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> uninstall()
    """
    if _function_in_place() is not _in_place_of_torchs:
        _usable.update(_enabled())
        vars(torch.nn.functional)[_NAME] = _in_place_of_torchs


def uninstall() -> None:
    """Undo :func:`install`: ``torch.nn.functional.scaled_dot_product_attention`` is torch's own function again.

    Code that has imported the function by its own name in between keeps what it has. Where nothing is installed,
    nothing happens.

    Raises:
        TilewiseError: another library has put a function of its own there.
    """
    if _function_in_place() is not _torchs:
        _usable.clear()
        _reported.clear()
        vars(torch.nn.functional)[_NAME] = _torchs


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


def _as_under_autocast(attn_mask: torch.Tensor) -> torch.Tensor:
    """Cast a float mask as torch's autocast does: the least number of float32 becomes -inf in 16 bits."""
    dtype = autocast_dtype(attn_mask.device.type)
    if dtype is None or attn_mask.dtype in (torch.bool, torch.float64):
        return attn_mask
    return attn_mask.to(dtype)


def _function_in_place() -> object:
    """Return what torch.nn.functional holds: torch's own function or tilewise's; a third one is refused."""
    found = vars(torch.nn.functional)[_NAME]
    if found is not _torchs and found is not _in_place_of_torchs:
        raise TilewiseError(f"torch.nn.functional.{_NAME} is {getattr(found, '__module__', None)}."
                            f"{getattr(found, '__qualname__', found)}; allowed are torch's own function and tilewise's "
                            "in its place: remove first what has replaced it.")
    return found


def _in_place_of_torchs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                        attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
                        scale: float | None = None, enable_gqa: bool = False) -> torch.Tensor:
    """Attend by tilewise; by torch's own function, with a warning, where tilewise refuses the call."""
    given = query, key, value, attn_mask, dropout_p, is_causal
    options: Any = {"scale": scale, "enable_gqa": enable_gqa}
    reason = _why_torchs(query, key, value, attn_mask)
    if reason is None:
        try:
            return scaled_dot_product_attention(*given, **options)
        except (InvalidInput, UnsupportedProblem) as refusal:
            if _is_backend_named():
                raise
            reason = str(refusal)
            out = _by_torch(*given, **options)  # an error that torch raises now is printed below the refusal
    elif _is_backend_named():
        raise UnsupportedProblem(reason, {})
    else:
        out = _by_torch(*given, **options)
    _report(reason)
    return out


def _by_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
              *given: Any, **options: Any) -> torch.Tensor:
    call = _torchs
    if is_causal_bias(attn_mask):  # it knows torch's call by torch.nn.functional, which holds another function now
        call = type(attn_mask)._dispatch  # type: ignore[union-attr]
    out: torch.Tensor = call(query, key, value, attn_mask, *given, **options)
    return out


def _why_torchs(query: object, key: object, value: object, attn_mask: object) -> str | None:
    """Return why torch's own function has to serve a call, as far as that is known before tilewise sees it."""
    disabled: str = _disabled_since_install()
    if disabled:
        return (f"sdpa_kernel(...) of torch.nn.attention, or a switch of torch.backends.cuda, disables backends of "
                f"torch's, here {disabled}: it asks for another of them. Allowed are all that were enabled at "
                "install(): call outside of sdpa_kernel(...), or enable them.")
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        kind = type(tensor)
        if not isinstance(tensor, torch.Tensor):
            if name != "attn_mask":
                return f"{name} is a {kind.__name__}; allowed is a torch.Tensor."
        elif tensor.is_nested or (kind not in _PLAIN and _has_rules(kind)):
            return (f"{name} is a {'nested tensor' if tensor.is_nested else kind.__name__}, which has rules of its own "
                    "for the call; allowed are plain tensors. Sequences of unequal lengths go to "
                    "tilewise.attention_varlen.")
    return None


def _has_rules(kind: Any) -> bool:
    """Whether a subclass of torch.Tensor wraps other tensors (DTensor), or answers for functions of torch itself."""
    if kind.__name__ == "CausalBias":
        return False
    own = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return hasattr(kind, "__tensor_flatten__") or own not in _NO_RULES


def _is_backend_named() -> bool:
    """Whether the user has named a backend of tilewise's, in whose place no other function may compute."""
    return settings.default_backend() is not None


def _disabled_since_install() -> str:
    """Return the names of torch's backends that were enabled at install() and are not now."""
    return ", ".join(sorted(_usable - _enabled()))


def _enabled() -> set[str]:
    cuda = torch.backends.cuda
    switches: dict[str, Any] = {"cuDNN": cuda.cudnn_sdp_enabled, "flash": cuda.flash_sdp_enabled,
                                "math": cuda.math_sdp_enabled, "memory-efficient": cuda.mem_efficient_sdp_enabled}
    return {name for name, is_enabled in switches.items() if is_enabled()}


def _report(reason: str) -> None:
    """Warn of a call that torch's own function has computed; once for each reason, whatever the numbers in it."""
    kind = _NUMBER.sub("", reason)
    if kind not in _reported:
        warnings.warn(f"torch's own {_NAME} computes this call, and others that tilewise refuses for the same reason: "
                      f"{reason}", RuntimeWarning, stacklevel=3)
        _reported.add(kind)


# torch.compile, which cannot trace these, calls them when it compiles, and keeps what they return.
for _function in (_is_backend_named, _disabled_since_install, _report):
    _constant_when_compiled(_function)
