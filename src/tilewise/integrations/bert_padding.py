"""flash-attn's ``bert_padding``: sequences out of a padded batch into packed rows, and back."""

import torch
from torch.nn.functional import pad

from tilewise.errors import InvalidInput

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Take rows of ``input``, (rows, ...), in the order of ``indices``, (taken,)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Put ``values``, (given, ...), into ``first_axis_dim`` rows of zeros, at ``indices``, (given,), int32 or int64."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None,
                ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Pack the tokens that a padding mask keeps, as ``flash_attn.bert_padding.unpad_input``.

    Waits for the device: how many tokens there are decides a shape.

    Args:
        hidden_states: (b, s, ...).
        attention_mask: (b, s), bool or integers; nonzero marks a token.
        unused_mask: (b, s): tokens that get a row of their own and take no part; none of ``attention_mask``'s.

    Returns:
        The rows, (total, ...); their indices in b·s, (total,); cu_seqlens, (b + 1,), int32; the longest sequence's
        length; and how many rows of each take part, (b,), int32.

    Raises:
        InvalidInput: a mask of other lengths than ``hidden_states``, whose rows would be others than it marks.
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            raise InvalidInput(f"{name} has shape {tuple(mask.shape)} and hidden_states "
                               f"{tuple(hidden_states.shape)}; allowed is (b, s), the first two dims.")
    taking_part = attention_mask != 0
    present = taking_part if unused_mask is None else taking_part | (unused_mask != 0)
    lengths, used = (mask.sum(-1, dtype=torch.int32) for mask in (present, taking_part))
    indices = present.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(lengths.max()), used


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Put packed rows back where :func:`unpad_input` took them from: (batch, seqlen, ...), zeros elsewhere.

    >>> hidden, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> rows, indices, cu_seqlens, longest, used = unpad_input(hidden, mask)
    >>> rows.shape, cu_seqlens.tolist(), longest
    (torch.Size([3, 4]), [0, 2, 3], 2)
    >>> torch.equal(pad_input(rows, indices, 2, 3), hidden * mask[..., None])
    True
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])
