"""Hugging Face Transformers under context parallel: a model on this rank's tokens, attention over all ranks' ones.

:func:`register` enters an attention function and a mask function. A model that names them is called with this rank's
shard of ``input_ids`` and of ``position_ids``; everything but attention works on single tokens, and so needs no change.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed import Layout, context_parallel_attention, context_parallel_attention_varlen, positions
from tilewise.distributed.layouts import named_layout
from tilewise.distributed.mesh import check_ranks_agree, ranks_of
from tilewise.distributed.sharding import whole_length
from tilewise.errors import InvalidInput, UnsupportedProblem
from tilewise.integrations.model_masks import Pattern, parts_of
from tilewise.integrations.transformers import check_both_lengths, enter, refuse_others, refuse_others_of_masks
from tilewise.masks import Mask, chunk, window

__all__ = ["register"]

_NOT_CUT = ("position_bias", "sinks", "indices", "block_indices")  # what belongs to pairs of one device's tokens


def register(mesh: DeviceMesh, layout: str | Layout, *, name: str = "tilewise_context_parallel",
             schedule: str | None = None) -> None:
    """Enter context parallel attention into Transformers, by this name.

    Then ``AutoModel.from_pretrained(..., attn_implementation=name)`` or ``model.set_attn_implementation(name)``. The
    model is called on every rank with its shards, as :func:`tilewise.distributed.shard` makes them: of ``input_ids``,
    of ``position_ids``, which count in the whole sequence (:func:`tilewise.distributed.positions`), and of
    ``shift_labels``, labels that were shifted before they were cut. Parameters' gradients are this rank's part: sum
    them over the ranks.

    Masks of the model are those of the whole sequence: causal or not, sliding windows, chunks, sinks of each head.
    Packed sequences are marked by ``cu_seq_lens_q`` and ``cu_seq_lens_k`` of all ranks' tokens, one tensor for both,
    and position ids that begin at 0 with each. Padding, biases, caches, cross attention and what else is not cut over
    ranks raise :class:`tilewise.UnsupportedProblem`. Where a model hands its position ids down to attention, as most
    decoders do, they are compared with the layout once a forward pass, which the host waits for: of another layout, or
    left out, they raise :class:`tilewise.InvalidInput`.

    Args:
        mesh: the ranks, as in :func:`tilewise.distributed.context_parallel_attention`.
        layout: which tokens a rank holds, as there.
        name: as of :func:`tilewise.integrations.transformers.register`; each mesh and layout needs a name of its own.
        schedule: as in :func:`tilewise.distributed.context_parallel_attention`.

    Raises:
        InvalidInput: no such mesh or layout, or a name that would be taken for another implementation.
        TilewiseError: Transformers is not installed.
    """
    ranks = ranks_of(mesh)
    named_layout(layout, whole_length(layout, 0, None, ranks.count), ranks.count)
    attend = _ShardedAttention(mesh, layout, schedule)
    enter(name, attend, partial(_shard_mask, attend))


@dataclass(frozen=True, eq=False)
class _ShardMask:
    """What a model hands from its mask function to its layers.

    Attributes:
        pattern: the mask of the whole sequence.
        is_packed, is_padded: whether this rank's position ids jump, and whether its tokens are marked as padding.
    """

    pattern: Pattern
    is_packed: bool
    is_padded: bool


class _ShardedAttention:
    """Attention of a rank's tokens, as an ``AttentionInterface`` function."""

    def __init__(self, mesh: DeviceMesh, layout: str | Layout, schedule: str | None) -> None:
        self._mesh, self._layout, self._schedule = mesh, layout, schedule
        # Position ids and lengths that were looked at: all layers of a pass share them.
        self._checked: tuple[weakref.ref[torch.Tensor] | None, weakref.ref[torch.Tensor] | None] = None, None

    def own_positions(self, length: int, device: torch.device | str) -> torch.Tensor:
        """Return the positions of this rank's tokens, of which there are so many."""
        whole = whole_length(self._layout, length, None, self._mesh.size())
        return positions(self._mesh, length=whole, layout=self._layout, device=device)

    def __call__(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 attention_mask: _ShardMask | None, dropout: float = 0.0, scaling: float | None = None,
                 **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Return out, (b, s, hq, dv), of this rank's tokens, and None for the probabilities."""
        given = {name: kwargs.pop(name, None) for name in (
            "is_causal", "sliding_window", "softcap", "s_aux", "deterministic", "cu_seq_lens_q", "cu_seq_lens_k")}
        for name in _NOT_CUT:
            if kwargs.pop(name, None) is not None:
                raise UnsupportedProblem(f"{name} is given; allowed under context parallel is None: it is not cut over "
                                         "ranks.", {})
        position_ids = kwargs.pop("position_ids", None)
        refuse_others(kwargs)
        if key.shape[2] != query.shape[2]:
            raise UnsupportedProblem(f"key has {key.shape[2]} tokens and query {query.shape[2]}; allowed under context "
                                     "parallel are equal numbers: neither caches nor cross attention.", {})
        ends = _ends_of(given["cu_seq_lens_q"], given["cu_seq_lens_k"])
        found: list[Mask] = []

        def describe() -> str:
            found.append(_mask_of(module, attention_mask, given, is_packed=ends is not None))
            self._check_positions(position_ids, query.shape[2], ends)
            return f"a model's attention with {found[0]}, {'packed' if ends is not None else 'one'} sequences"

        check_ranks_agree(ranks_of(self._mesh), describe)  # padding and positions may be wrong on one rank alone
        (mask,) = found
        options: dict[str, Any] = {
            "mesh": self._mesh, "layout": self._layout, "schedule": self._schedule, "mask": mask, "scale": scaling,
            "softcap": given["softcap"], "sinks": given["s_aux"], "deterministic": given["deterministic"] or None}
        if ends is None:
            out: Any = context_parallel_attention(query, key, value, **options, dropout_p=dropout)
            return out.transpose(1, 2).contiguous(), None
        if query.shape[0] != 1 or dropout:
            raise UnsupportedProblem(f"cu_seq_lens_q and cu_seq_lens_k are given with {query.shape[0]} batch entries "
                                     f"and dropout {dropout}; allowed are one entry and no dropout.", {})
        rows = [own.squeeze(0).transpose(0, 1) for own in (query, key, value)]
        out = context_parallel_attention_varlen(*rows, **options, cu_seqlens_q=ends)
        return out.unsqueeze(0).contiguous(), None

    def _check_positions(self, ids: torch.Tensor | None, length: int, ends: torch.Tensor | None) -> None:
        """Raise :class:`InvalidInput` for position ids, (b, s), of other tokens than this rank's."""
        known_ids, known_ends = (None if own is None else own() for own in self._checked)
        if ids is None or ids.dim() != 2 or (known_ids is ids and known_ends is ends):
            return
        wanted = self.own_positions(length, ids.device)
        if ends is not None:
            starts = ends.to(ids.device)
            wanted = wanted - starts[torch.searchsorted(starts, wanted, right=True) - 1]
        if ids.shape[1] != length or not bool((ids == wanted).all()):
            name = self._layout.name if isinstance(self._layout, Layout) else self._layout
            raise InvalidInput(f"position_ids are not those of this rank's {length} tokens in layout {name!r}; allowed "
                               "are tilewise.distributed.positions(...), counted from the start of each sequence.")
        self._checked = weakref.ref(ids), None if ends is None else weakref.ref(ends)


def _shard_mask(attend: _ShardedAttention, batch_size: int, q_length: int, kv_length: int,
                q_offset: int | torch.Tensor = 0, kv_offset: int = 0, mask_function: Callable[..., Any] | None = None,
                attention_mask: torch.Tensor | None = None, *, device: torch.device | str = "cpu",
                use_vmap: bool = False, dtype: torch.dtype = torch.float32, **kwargs: Any) -> _ShardMask:
    """Describe a layer's mask, as an ``AttentionMaskInterface`` function, from that of a rank's tokens alone."""
    refuse_others_of_masks(kwargs)
    if isinstance(q_offset, torch.Tensor) or q_offset or kv_offset or q_length != kv_length:
        raise UnsupportedProblem(f"the mask is of {q_length} queries and {kv_length} keys from {kv_offset} on; allowed "
                                 "under context parallel are the tokens of one call: no cache of earlier ones.", {})
    from transformers import masking_utils

    pattern = parts_of(mask_function or masking_utils.causal_mask_function)
    if pattern is None or pattern.empty:
        raise UnsupportedProblem(f"mask_function is {mask_function}; allowed under context parallel are causal and "
                                 "bidirectional masks, sliding windows and chunks.", {})
    is_packed = False
    if pattern.packed is not None:
        # Transformers takes each jump of position ids for a new sequence, those between a rank's pieces too.
        own = attend.own_positions(q_length, pattern.packed.device)
        is_packed = not bool((pattern.packed == (own.diff(prepend=own[:1] - 1) != 1).cumsum(0)).all())
    return _ShardMask(pattern, is_packed, attention_mask is not None and not bool(attention_mask.all()))


def _mask_of(module: torch.nn.Module, mask: _ShardMask | torch.Tensor | None, given: dict[str, Any], *,
             is_packed: bool) -> Mask:
    """Return the mask of the whole sequences."""
    if mask is None:
        side = None if given["sliding_window"] is None else given["sliding_window"] - 1
        causal = getattr(module, "is_causal", True) if given["is_causal"] is None else given["is_causal"]
        return window(side, 0 if causal else side, "top_left")
    if not isinstance(mask, _ShardMask):
        raise UnsupportedProblem(f"attention_mask is a {type(mask).__name__}; allowed under context parallel is what "
                                 "the mask function makes that register() enters.", {})
    if mask.is_padded:
        raise UnsupportedProblem("attention_mask marks padding; allowed under context parallel are batches without. "
                                 "Leave it out where padding is on the right and the model causal, or pack the "
                                 "sequences.", {})
    if mask.is_packed and not is_packed:
        raise UnsupportedProblem("position_ids mark packed sequences, which ranks have to know as a whole; hand "
                                 "cu_seq_lens_q and cu_seq_lens_k of all ranks' tokens to the model as well.", {})
    pattern = mask.pattern
    if pattern.chunk is not None and is_packed:
        raise UnsupportedProblem("cu_seq_lens_q and cu_seq_lens_k are given with chunks; allowed under context "
                                 "parallel are packed sequences without: versions of Transformers differ in where "
                                 "their chunks begin.", {})
    band = window(pattern.left, pattern.right, "top_left")
    return band if pattern.chunk is None else band & chunk(pattern.chunk, "top_left")


def _ends_of(of_queries: torch.Tensor | None, of_keys: torch.Tensor | None) -> torch.Tensor | None:
    """Return where packed sequences end; raises :class:`InvalidInput` where queries and keys have other ones."""
    check_both_lengths(of_queries, of_keys)
    if of_queries is not None and of_keys is not None and of_queries is not of_keys:
        raise InvalidInput("cu_seq_lens_q and cu_seq_lens_k are two tensors; allowed under context parallel is one for "
                           "both, whose values are then known to be the same.")
    return of_queries
