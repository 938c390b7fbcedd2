"""flash-attn's ``S_dmask``: the probabilities of a call, negative where dropout dropped the pair.

They are read off attention itself, whose values are the unit vectors: its output is then the matrix P, with dropout
P · keep / (1 − dropout_p), which is 0 where P is not exactly where a pair was dropped. O(sq x sk) memory, as whoever
asks for them expects; both sides are rounded up to 128, as flash-attn's kernels leave them, and zeros fill that.
"""

from typing import Any

import torch
from torch.nn.functional import pad

from tilewise.api import attention, attention_varlen

_ROUND = 128


@torch.no_grad()
def signed_probabilities(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return (b, hq, sq, sk), sides rounded up, in q's dtype, of the call ``attention(q, k, v, **options)``.

    Args:
        q, k: (b, h, s, d).
        options: with a probability of dropout and its seed.
    """
    units = torch.eye(k.shape[2], _rounded(k.shape[2]), dtype=q.dtype, device=q.device)
    values = units.expand(*k.shape[:2], -1, -1)
    kept, probs = (attention(q, k, values, **changed) for changed in (options, _without_dropout(options)))
    return pad(_signed(kept, probs), (0, 0, 0, _rounded(q.shape[2]) - q.shape[2]))


@torch.no_grad()
def signed_probabilities_varlen(q: torch.Tensor, k: torch.Tensor, longest: tuple[int, int],
                                options: dict[str, Any]) -> torch.Tensor:
    """Return (sequences, hq, longest sq, longest sk), sides rounded up, of ``attention_varlen(q, k, v, **options)``.

    Args:
        q, k: (total, h, d).
        longest: lengths of the longest sequences of queries and of keys.
        options: with lengths, a probability of dropout and its seed.
    """
    rows, columns = (_rounded(length) for length in longest)
    _, key_places = _places(options["cu_seqlens_k"], k.shape[0], columns)
    units = (key_places[:, None] == torch.arange(columns, device=k.device)).to(q.dtype)
    values = units[:, None].expand(-1, k.shape[1], -1)
    kept, probs = (attention_varlen(q, k, values, **changed) for changed in (options, _without_dropout(options)))
    sequences, query_places = _places(options["cu_seqlens_q"], q.shape[0], rows)
    # One sequence more, for the rows behind the last one.
    placed = q.new_zeros(options["cu_seqlens_q"].shape[0], rows, q.shape[1], columns)
    placed[sequences, query_places] = _signed(kept, probs)
    return placed[:-1].transpose(1, 2)


def _rounded(length: int) -> int:
    return -(-max(1, length) // _ROUND) * _ROUND


def _without_dropout(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"dropout_p": 0.0, "dropout_seed": None}


def _signed(kept: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    return torch.where(kept == 0, -probs, probs)


def _places(cu_seqlens: torch.Tensor, total: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, of each packed row, the number of its sequence and its position there, below ``most``."""
    rows = torch.arange(total, device=cu_seqlens.device)
    sequences = torch.searchsorted(cu_seqlens.long(), rows, right=True) - 1
    return sequences, (rows - cu_seqlens[sequences]).clamp(max=most - 1)
