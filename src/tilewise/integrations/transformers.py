"""Hugging Face Transformers: an attention function and a mask function under a name that models can be told.

:func:`register` enters both, since a name that has no mask function gets no masks, and padding would be ignored
silently. A model is then made, or told, with ``attn_implementation="tilewise"``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilewise.api import attention, attention_varlen
from tilewise.errors import InvalidInput, TilewiseError, UnsupportedProblem
from tilewise.integrations import class_tables
from tilewise.integrations.chosen_keys import chosen_keys
from tilewise.integrations.model_masks import ModelMask, Places, evaluated, pattern_of, translate
from tilewise.integrations.torch_sdpa import check_mask_dtype
from tilewise.masks import Mask, TensorMask, window

__all__ = ["attention_forward", "attention_mask", "register"]

# Names by which Transformers takes an implementation for one of its own.
_TAKEN = ("eager", "flash", "flex_attention", "paged", "sdpa", "/", "|")
# What reaches an attention function without an effect on its result, by the reason. Transformers hands to every layer
# what its TransformersKwargs and FlashAttentionKwargs name and what its Trainer says, and models whose layers pass on
# what they do not know hand down what was said to generate() or to the model as a whole.
_WITHOUT_EFFECT_BECAUSE = {
    "queries, keys and the mask have it in them already": (
        "cache_position", "grid_thw", "image_grid_thw", "image_sizes", "interpolate_pos_encoding", "mm_token_type_ids",
        "position_embeddings", "position_ids", "seq_idx", "token_type_ids", "use_cache", "video_grid_thw"),
    "an upper bound of lengths that are given as well": ("max_length_k", "max_length_q"),
    "the model's input, another part of it reads that": (
        "decoder_attention_mask", "decoder_input_ids", "decoder_inputs_embeds", "decoder_position_ids",
        "encoder_outputs", "input_ids", "inputs_embeds", "pixel_values"),
    "which features of a vision tower the model takes": (
        "vision_feature_layer", "vision_feature_select_strategy"),
    "the model's output": (
        "labels", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits",
        "return_dict", "return_loss", "shift_labels"),
    "how generate() searches and when it stops": (
        "do_sample", "early_stopping", "length_penalty", "max_length", "max_new_tokens", "min_length",
        "min_new_tokens", "no_repeat_ngram_size", "num_beams", "num_return_sequences", "repetition_penalty"),
    "which kind of cache generate() makes: its keys are here": ("cache_config", "cache_implementation"),
    "how generate() compiles and reports": (
        "compile_config", "disable_compile", "output_logits", "output_scores", "return_dict_in_generate",
        "synced_gpus"),
}
_WITHOUT_EFFECT = frozenset(name for names in _WITHOUT_EFFECT_BECAUSE.values() for name in names)
_PAGED = "caches in pages, of continuous batching, are not read here. Use 'paged|sdpa' for it."
# What changes the result and is not there, and why.
_REFUSED = {
    "head_mask": "the probabilities are never in memory to be multiplied by it. Use attn_implementation='eager'.",
    "cache": _PAGED, "block_table": _PAGED, "k_cache": _PAGED, "v_cache": _PAGED, "read_index": _PAGED,
    "write_index": _PAGED,
}
_UNKNOWN = ("tilewise does not know what it would change. Use attn_implementation='eager' or 'sdpa' for this model, or "
            "leave it out of the model's call.")
# What mask functions get for Transformers' own: how they may be left out, and what their mask function says already.
_OF_MASKS_WITHOUT_EFFECT = frozenset({
    "allow_is_bidirectional_skip", "allow_is_causal_skip", "allow_torch_fix", "cache_position", "config",
    "local_size"})
# Models that ask whether the mask is an instance of torch.Tensor, and leave keys out of it if it is none.
_WANTS_A_TENSOR = frozenset({"deepseek_v4"})  # appends its compressed keys to it
# Models that read the mask as booleans, as Transformers' SDPA gets it. Eager attention's numbers they read the wrong
# way round, 0 as hidden, and so give NaN with it.
_WANTS_BOOLEANS = frozenset({"nemotron_asr_streaming_encoder"})
# Models that refuse a mask whose size is not theirs, and rely on getting none where it would hide nothing.
_WANTS_NONE = frozenset({"informer"})  # halves the sequence between layers
# Layers that say is_causal and are not: their models know eager attention alone, which does not ask.
_NOT_CAUSAL = frozenset({"BridgeTowerSelfAttention"})  # of the images' half of a layer of both, which has no mask


def register(name: str = "tilewise", *, read_padding: bool = False, rows_without_keys: str = "zero") -> None:
    """Enter tilewise's attention and mask functions into Transformers, by this name.

    Then ``AutoModel.from_pretrained(..., attn_implementation=name)`` or ``model.set_attn_implementation(name)``.

    Args:
        name: must not look like an implementation of Transformers' own, as one with "flash" in it does.
        read_padding: look at each padding mask on the host, as Transformers' own implementations do, and drop one that
            hides nothing, which leaves the call to faster kernels. Waits for the device once a forward pass; without,
            nothing is waited for.
        rows_without_keys: what a query gets that sees no key: "zero", or "average", the mean of all values of its call,
            as Transformers' own implementations give it. The latter is for comparing with them: it reads all values
            once more, and keys that a static cache has room for count as they do there.

    Raises:
        InvalidInput: the name would be taken for another implementation, or ``rows_without_keys`` is neither.
        TilewiseError: Transformers is not installed.

    >>> register()  # doctest: +SKIP
    """
    if rows_without_keys not in ("zero", "average"):
        raise InvalidInput(f"rows_without_keys is {rows_without_keys!r}; allowed are 'zero' and 'average'.")
    enter(name, attention_forward if rows_without_keys == "zero" else
          partial(attention_forward, rows_without_keys=rows_without_keys),
          partial(attention_mask, read_padding=read_padding))
    class_tables.enter(name)


def enter(name: str, attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Enter an attention function and its mask function into Transformers; raises as :func:`register`."""
    for taken in _TAKEN:
        if taken in name:
            raise InvalidInput(f"name is {name!r}; allowed is one without {taken!r}, by which Transformers takes it "
                               "for an implementation of its own.")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as missing:
        raise TilewiseError("Transformers is not installed, or older than 5.17; allowed are 5.17 and newer: install "
                            "'tilewise[transformers]'.") from missing
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)


def attention_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int | torch.Tensor = 0, kv_offset: int = 0,
                   mask_function: Callable[..., Any] | None = None,
                   attention_mask: torch.Tensor | ModelMask | None = None, *,
                   device: torch.device | str = "cpu", use_vmap: bool = False, read_padding: bool = False,
                   dtype: torch.dtype = torch.float32, **kwargs: Any) -> ModelMask | torch.Tensor | None:
    """Describe a layer's mask, as an ``AttentionMaskInterface`` function.

    Padding becomes documents and the window a band, whose hidden tiles are skipped; a cache that is longer than its
    content gets the lengths in use, which stay on the device. What no such name fits is made a boolean tensor. A model
    that computes with the mask finds a tensor there, as eager attention has it, which is made when it is asked for.

    Args:
        batch_size, q_length, kv_length: sizes of the mask.
        q_offset, kv_offset: positions of the first query and key; the query's may be a tensor.
        mask_function: of (batch, head, query, key) indices, True = take part; None = causal.
        attention_mask: (at least b, at least kv_offset + kv_length or what is there of it), bool, True = a token. Of
            more than b rows, as MusicGen gives one to each codebook, the first b count.
        device: of the mask.
        use_vmap: whether ``mask_function`` cannot be handed index tensors.
        read_padding: as in :func:`register`.
        dtype: of what is added to scores, for a model that does so itself.
        kwargs: what Transformers says to its own mask functions without an effect on this one; anything else raises.

    Returns:
        What :func:`attention_forward` takes; for DeepSeek-V4, which asks for no less, a tensor that is added to scores,
        for Nemotron's streaming speech recognition a boolean one, and for Informer, as eager attention has it, None
        where nothing is hidden.

    Raises:
        UnsupportedProblem: something unknown is given.
    """
    refuse_others_of_masks(kwargs)
    if isinstance(attention_mask, ModelMask):  # made before the model was called, as for a compiled one
        return attention_mask
    from transformers import masking_utils

    padding = None
    if attention_mask is not None:
        attention_mask = attention_mask[:batch_size]
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        # Contiguous: a static cache's marks grow from step to step, and a compiled model would be told a new stride.
        padding = padding[:, kv_offset:kv_offset + kv_length].contiguous()
        if read_padding and not torch.compiler.is_compiling() and bool(padding.all()):
            padding = None
    mask_function = mask_function or masking_utils.causal_mask_function
    places = Places(batch_size, q_length, kv_length, q_offset, kv_offset, device, dtype)
    pattern = pattern_of(mask_function)
    mask = None if pattern is None else translate(pattern, places, padding)
    if mask is None:
        mask = evaluated(masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device), places)
    model_type = getattr(kwargs.get("config"), "model_type", None)
    if model_type in _WANTS_NONE and mask.hides_nothing and kwargs.get("allow_is_bidirectional_skip"):
        return None
    if model_type in _WANTS_BOOLEANS:
        return mask.visible_pairs
    return mask.added if model_type in _WANTS_A_TENSOR else mask


def attention_forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      attention_mask: ModelMask | torch.Tensor | None, dropout: float = 0.0,
                      scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
                      softcap: float | None = None, s_aux: torch.Tensor | None = None,
                      position_bias: torch.Tensor | None = None, deterministic: bool | None = None,
                      sinks: torch.Tensor | None = None, indices: torch.Tensor | None = None,
                      block_indices: torch.Tensor | None = None, rows_without_keys: str = "zero",
                      **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Attend, as an ``AttentionInterface`` function.

    Args:
        module: the layer; its ``is_causal`` counts where neither a mask nor the argument says it.
        query, key, value: (b, hq, sq, d), (b, hk, sk, d) and (b, hk, sk, dv); one batch entry of queries, as models
            learn them, serves all.
        attention_mask: a mask of :func:`attention_mask`, or of four dims: bool, True = take part, or added to the
            scores, where the least number of its dtype and -inf hide a pair. One of one query serves all queries,
            and one of one query and one key all keys too.
        dropout: probability to drop a pair.
        scaling: None = 1/sqrt(d).
        is_causal, sliding_window: what is hidden by position where there is no mask; ``sliding_window`` keys are kept,
            the query's own among them.
        softcap: bound of the scores.
        s_aux: (hq,): a logit of each head for nothing.
        position_bias: broadcasts to (b, hq, sq, sk): added to the scores.
        deterministic: True demands bit-equal gradients; otherwise :func:`torch.use_deterministic_algorithms` decides.
        sinks: (b, hq, sq) or (b, hq, sq, 1): a logit of each query for nothing.
        indices: (b, sq, n): the only keys that each query may see, by their numbers; less than 0 = none.
        block_indices: (b, groups of heads, sq, n): blocks of such keys, each of ``module.indexer.block_size``.
        rows_without_keys: as in :func:`register`; packed sequences always get 0.
        kwargs: ``cu_seq_lens_q`` and ``cu_seq_lens_k`` mark packed sequences of one batch entry; what else Transformers
            hands down without an effect on the result; anything else raises.

    Returns:
        out, (b, sq, hq, dv), and None for the probabilities, which are never there. A query that sees no key gives 0,
        where Transformers' own average all values, unless ``rows_without_keys`` says "average".

    Raises:
        UnsupportedProblem: probabilities, a paged cache or something unknown is asked for.
    """
    lengths = kwargs.pop("cu_seq_lens_q", None), kwargs.pop("cu_seq_lens_k", None)
    check_both_lengths(*lengths)
    refuse_others(kwargs)
    chosen = chosen_keys(module, query, key, indices, block_indices)
    if len(query) == 1 and len(key) > 1:
        query = query.expand(len(key), -1, -1, -1)
    mask, bias, seqlens_k = _translated(module, query, key, attention_mask, is_causal, sliding_window)
    if chosen is not None:
        mask = (replace(mask, tiles=None) if isinstance(mask, TensorMask) else mask) & chosen
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout, "bias": bias,
                               "deterministic": deterministic or None}
    if lengths[0] is not None:
        if sinks is not None or chosen is not None:
            raise UnsupportedProblem("cu_seq_lens_q and cu_seq_lens_k are given with sinks of each query or with "
                                     "chosen keys; allowed are packed sequences without. Leave the lengths out, and "
                                     "mark sequences by position_ids.", {})
        band = _band_of_packed(query, attention_mask, mask)
        options |= {"mask": band, "cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1]}
        out: torch.Tensor = attention_varlen(*(t.squeeze(0).transpose(0, 1) for t in (query, key, value)), **options)
        return out.unsqueeze(0).contiguous(), None
    options |= {"mask": mask, "seqlens_k": seqlens_k}
    if sinks is None and rows_without_keys == "zero":
        out = attention(query, key, value, **options)
    else:
        out, lse = attention(query, key, value, return_aux=("lse",), **options)
        if sinks is not None:
            out = _with_sinks(out, lse, sinks)
        elif rows_without_keys == "average":
            average = value.mean(2, keepdim=True).repeat_interleave(query.shape[1] // value.shape[1], dim=1)
            out = torch.where(lse[..., None] == float("-inf"), average, out)
    return out.transpose(1, 2).contiguous(), None


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Let a logit of each query take its share of the probability: exp(lse) / (exp(lse) + exp(sink)) is left.

    out is (b, hq, sq, dv), lse (b, hq, sq); a query that sees no key has -inf, and keeps its 0.
    """
    if sinks.shape not in (lse.shape, (*lse.shape, 1)):
        raise InvalidInput(f"sinks has shape {tuple(sinks.shape)}; allowed are (b, hq, sq) and (b, hq, sq, 1), here "
                           f"{tuple(lse.shape)}: a logit of each query. One of each head goes by the name of s_aux.")
    left = torch.sigmoid(lse - sinks.reshape(lse.shape).to(lse.dtype))
    return (out * left[..., None]).to(out.dtype)


def _band_of_packed(query: torch.Tensor, attention_mask: ModelMask | torch.Tensor | None,
                    mask: Mask | TensorMask) -> Mask:
    """Return what packed sequences need beside their lengths; documents of positions that say the same are dropped."""
    is_band = attention_mask is None or (isinstance(attention_mask, ModelMask) and attention_mask.is_band)
    if query.shape[0] != 1 or not is_band:
        raise UnsupportedProblem(f"cu_seq_lens_q and cu_seq_lens_k are given with {query.shape[0]} batch entries and "
                                 f"{'a band' if is_band else 'padding or another mask'}; allowed are one entry and "
                                 "masks by position. Leave them out, and mark sequences by position_ids.", {})
    band = mask.band if isinstance(mask, TensorMask) else mask
    return replace(band, alignment=band.alignment or "bottom_right")  # as flash-attn's lengths mean it


def _translated(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
                attention_mask: ModelMask | torch.Tensor | None, is_causal: bool | None, sliding_window: int | None,
                ) -> tuple[Mask | TensorMask, torch.Tensor | None, torch.Tensor | None]:
    """Return the mask, what is added to the scores, and the lengths in use."""
    if isinstance(attention_mask, ModelMask):
        given, wanted = (query.shape[2], key.shape[2]), attention_mask.shape[2:]
        if given == wanted:
            return attention_mask.visible, None, attention_mask.seqlens_k
        # Eager attention adds its mask to the scores, and so broadcasts one that has fewer.
        if wanted not in ((1, given[1]), (1, 1)):
            raise InvalidInput(f"attention_mask is of {wanted[0]} queries and {wanted[1]} keys, and query and key have "
                               f"{given[0]} and {given[1]}: allowed is a mask made for them, one of one query and all "
                               "keys, or one of one query and one key.")
        mask = Mask() if attention_mask.hides_nothing else TensorMask(Mask(), attention_mask.visible_pairs)
        return mask, None, None
    if attention_mask is not None:
        if attention_mask.dim() != 4:
            raise InvalidInput(f"attention_mask has shape {tuple(attention_mask.shape)}; allowed are four dims, or a "
                               "mask of the mask function that register() enters.")
        check_mask_dtype("attention_mask", attention_mask)
        if attention_mask.dtype is torch.bool:
            return TensorMask(Mask(), attention_mask), None, None
        hidden = torch.finfo(attention_mask.dtype).min
        return TensorMask(Mask(), attention_mask > hidden), attention_mask, None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True) and type(module).__name__ not in _NOT_CAUSAL
    # One query is the newest: it sees every key. Of several, lengths alone do not tell on which keys they stand, so the
    # mask has no alignment, and raises where they differ.
    last = query.shape[2] == 1
    side = None if sliding_window is None else sliding_window - 1
    if last:
        return window(side, None, "bottom_right"), None, None
    return window(side, 0 if is_causal else side), None, None


def check_both_lengths(of_queries: torch.Tensor | None, of_keys: torch.Tensor | None) -> None:
    """Raise :class:`InvalidInput` where packed sequences have lengths of queries or of keys alone."""
    if (of_queries is None) != (of_keys is None):
        raise InvalidInput("of cu_seq_lens_q and cu_seq_lens_k one is given; allowed are both or neither.")


def refuse_others_of_masks(kwargs: dict[str, Any]) -> None:
    """Refuse by name what a mask function gets and does not know; None is nothing given."""
    for name, value in kwargs.items():
        if value is not None and name not in _OF_MASKS_WITHOUT_EFFECT:
            raise UnsupportedProblem(f"{name} is given to the mask function, a {type(value).__name__}; allowed is "
                                     f"None: {_UNKNOWN}", {})


def refuse_others(kwargs: dict[str, Any]) -> None:
    """Refuse by name what is neither acted on nor known to have no effect; None is nothing given."""
    if kwargs.pop("output_attentions", None):
        raise UnsupportedProblem("output_attentions is True; allowed is False: the probabilities are never in memory. "
                                 "Use attn_implementation='eager' to look at them.", {})
    for name, value in kwargs.items():
        if value is not None and name not in _WITHOUT_EFFECT:
            raise UnsupportedProblem(f"{name} is given, a {type(value).__name__}; allowed is None: "
                                     f"{_REFUSED.get(name, _UNKNOWN)}", {})
