"""Arguments that an operator's schema would refuse in torch's words, or take for another: refused by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from tilewise.errors import InvalidInput, UnknownArgument

_Call = TypeVar("_Call", bound=Callable[..., Any])
# What each call takes, by its name.
_arguments: dict[str, tuple[str, ...]] = {}
_ANY_MASK = "mask= for a boolean tensor, True = take part, or bias= for numbers that are added to the scores"
_PADDING = "{}= where padding comes last, or mask=keep[:, None, None] of a boolean keep (b, sk), True = take part"
_WITH_LSE = ("return_aux", "return_aux=('lse',)")
_WINDOW = ("mask", "mask=window(left, right), None = no bound (flash-attn's -1)")
# What other libraries call it: our argument, and how to pass it. torch's SDPA and varlen_attn, flash-attn 2 to 4,
# FlexAttention, Transformers, xFormers.
_ELSEWHERE: dict[str, tuple[str, str]] = {
    "is_causal": ("mask", "mask=causal(), of lengths that differ causal('top_left') as torch has it"),
    "causal": ("mask", "mask=causal(), of lengths that differ causal('bottom_right') as flash-attn has it"),
    "window_size": _WINDOW, "window_size_left": _WINDOW, "window_size_right": _WINDOW,
    "sliding_window": ("mask", "mask=window(n - 1, 0) for n keys up to the query"),
    "attention_chunk": ("mask", "mask=chunk(n)"), "mask_mod": ("mask", "mask=MaskFunction(...)"),
    "block_mask": ("mask", "mask=, of a BlockMask tilewise.integrations.flex.traced_mask(block_mask)"),
    "attn_mask": ("bias", _ANY_MASK), "attention_mask": ("bias", _ANY_MASK), "attn_bias": ("bias", _ANY_MASK),
    "score_mod": ("score_function", "score_function=ScoreFunction(...)"),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), ("scale", "scale=")),
    **dict.fromkeys(("dropout", "dropout_rate", "p"), ("dropout_p", "dropout_p=, 0.0 outside of training")),
    **dict.fromkeys(("seed", "rng_state", "generator"), ("dropout_seed", "dropout_seed=")),
    **dict.fromkeys(("soft_cap", "logit_softcap", "logits_soft_cap"), ("softcap", "softcap=")),
    **dict.fromkeys(("sink", "s_aux", "learnable_sink"), ("sinks", "sinks=")),
    **dict.fromkeys(("return_lse", "return_attn_probs", "return_softmax_lse", "need_weights"), _WITH_LSE),
    "enable_gqa": ("q", "nothing: q may have any multiple of the heads of k and v"),
    "page_table": ("block_table", "block_table="), "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_q="),
    "cu_seq_q": ("cu_seqlens_q", "cu_seqlens_q="), "cu_seq_k": ("cu_seqlens_k", "cu_seqlens_k="),
    "max_q": ("max_seqlen_q", "max_seqlen_q="), "max_k": ("max_seqlen_k", "max_seqlen_k="),
}
# The same where calls differ: tried in this order, the first argument that a call takes.
_LENGTHS_ELSEWHERE: dict[str, tuple[tuple[str, str], ...]] = {
    "key_padding_mask": (("seqlens_k", _PADDING.format("seqlens_k")), ("seqused_k", "seqused_k="),
                         ("cache_seqlens", "cache_seqlens=, and cache_leftpad= where padding comes first")),
    "seqlens_q": (("seqused_q", "seqused_q="),),
    "seqlens_k": (("seqused_k", "seqused_k="), ("cache_seqlens", "cache_seqlens=")),
    "seqused_q": (("seqlens_q", "seqlens_q="),),
    "seqused_k": (("seqlens_k", "seqlens_k="), ("cache_seqlens", "cache_seqlens=")),
    "cache_seqlens": (("seqlens_k", "seqlens_k="), ("seqused_k", "seqused_k=")),
}


def refuses_unknown(call: _Call) -> _Call:
    """Hide a call's ``**unknown``, which is there to be refused by :func:`unknown_argument`, from its signature.

    The function itself is returned: a wrapper would slow every call down.
    """
    signature = inspect.signature(call)
    shown = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    _arguments[call.__name__] = tuple(one.name for one in shown)
    cast(Any, call).__signature__ = signature.replace(parameters=shown)
    return call


def unknown_argument(call: str, unknown: Mapping[str, Any]) -> UnknownArgument:
    """Return the error for arguments that a call does not have, which names ours for those of other libraries."""
    name, known = next(iter(unknown)), _arguments[call]
    meant = (*_LENGTHS_ELSEWHERE.get(name, ()), *([_ELSEWHERE[name]] if name in _ELSEWHERE else ()))
    allowed = next((how for ours, how in meant if ours in known), None)
    if call.endswith("decode") and any(ours == "mask" or how is _ANY_MASK for ours, how in meant):
        allowed = "mask=causal() or mask=window(left, right): a band is all that decoding takes"
    if allowed is not None:
        return UnknownArgument(f"{call} has no argument {name!r}; allowed in its place is {allowed}.")
    wanted = {name, *(ours for ours, _ in meant)}
    others = [other for other, taken in _arguments.items()
              if other.startswith("attention") and not wanted.isdisjoint(taken)]
    if others:
        (ours,) = sorted(wanted.intersection(_arguments[others[0]]))[:1]
        return UnknownArgument(f"{call} has no argument {name!r}; {' and '.join(others)} take"
                               f"{'s' if len(others) == 1 else ''} {ours}=, and {call} nothing like it.")
    return UnknownArgument(f"{call} has no argument {name!r}; allowed are {', '.join(known)}.")


def check_packed(packed: Mapping[str, Any], padded: Mapping[str, Any]) -> bool:
    """Return whether a call's sequences are packed, which ``cu_seqlens_q`` says; None is what is not given.

    Raises:
        InvalidInput: another argument of packed sequences is given without it, or one of padded ones beside it.
    """
    is_packed = packed["cu_seqlens_q"] is not None
    for name, value in (padded if is_packed else packed).items():
        if value is not None and is_packed:
            raise InvalidInput(f"{name} is given beside cu_seqlens_q; allowed is one of them: of packed sequences, "
                               f"{name.replace('seqlens', 'seqused')} says how many rows take part.")
        if value is not None:
            raise InvalidInput(f"{name} is given without cu_seqlens_q, which says where packed queries begin; allowed "
                               "are both, or neither.")
    return is_packed
