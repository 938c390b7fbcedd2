"""flash-attn's ``layers.rotary``: rotary position embedding (RoFormer; Su et al., 2021), in plain PyTorch.

With angle ``θ = position · base^(−2p / rotary_dim)``, the dims ``x₁, x₂`` of pair p become

    x₁·cos θ − x₂·sin θ,   x₁·sin θ + x₂·cos θ.

They are dims 2p and 2p + 1 where ``interleaved`` (GPT-J), else p and p + rotary_dim / 2 (GPT-NeoX); dims from
rotary_dim on stay. It is computed in float32, in float64 where the tensor is, and rounded once. A function that works
in place does so as torch knows it: autograd sees the change, and refuses it where it refuses its own (leaves that
require a gradient, outputs of ``unbind`` and ``split``). cos and sin have a gradient too, but not in place.
"""

from typing import Any

import torch
from torch.nn.functional import embedding

from tilewise.errors import InvalidInput

__all__ = ["RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_",
           "apply_rotary_emb_torch", "rotate_half"]
Offsets = int | torch.Tensor


def rotate_half(x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Return (−x₂, x₁) in the place of each pair (x₁, x₂) of the last dim."""
    first, second = _pairs(x, interleaved)
    return _joined(-second, first, interleaved)


def apply_rotary_emb_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                           interleaved: bool = False) -> torch.Tensor:
    """Rotate (b, s, h, d) by tables of exactly its positions, (s, rotary_dim / 2) or (b, s, rotary_dim / 2).

    Raises:
        InvalidInput: tables of other shapes, or of more dims than x has.
    """
    _check_widths(x, cos, sin)
    if cos.shape[:-1] not in (x.shape[1:2], x.shape[:2]):
        raise InvalidInput(f"cos has shape {tuple(cos.shape)} and x {tuple(x.shape)}; allowed is a row for each "
                           "position, (s, rotary_dim / 2) or (b, s, rotary_dim / 2).")
    return _rotated(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False,
                     inplace: bool = False, seqlen_offsets: Offsets = 0, cu_seqlens: torch.Tensor | None = None,
                     max_seqlen: int | None = None) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` dims of each head by the position of its row.

    Args:
        x: (b, s, h, d), or packed (total, h, d) with ``cu_seqlens``.
        cos, sin: (positions, rotary_dim / 2): the tables, from position 0 on.
        interleaved: True = dims 2p and 2p + 1 are a pair; False = p and p + rotary_dim / 2.
        inplace: write the result to x, and return x.
        seqlen_offsets: position of the first row: an integer, or (b,), int32 or int64, one of each sequence.
        cu_seqlens: (b + 1,), int32: 0, then where each packed sequence ends; rows behind the last one stay.
        max_seqlen: length of the longest packed sequence, for which the tables must have a row; None = they are asked
            row by row alone.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        InvalidInput: shapes that do not belong together, or more positions than the tables have. Where a tensor tells
            the positions, the look-up itself fails, with torch's error (on a GPU, an assertion on the device).

    >>> x, angles = torch.randn(2, 5, 4, 8), torch.arange(6.0)[:, None] / 10.0 ** torch.arange(4)
    >>> apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=1).shape
    torch.Size([2, 5, 4, 8])
    """
    if x.dim() != (4 if cu_seqlens is None else 3):
        raise InvalidInput(f"x has shape {tuple(x.shape)} and cu_seqlens is {'None' if cu_seqlens is None else 'given'}"
                           "; allowed is (b, s, h, d) without it, and (total, h, d) with it.")
    if cos.dim() != 2:
        raise InvalidInput(f"cos has shape {tuple(cos.shape)}; allowed is (positions, rotary_dim / 2).")
    _check_widths(x, cos, sin)
    if cu_seqlens is None:
        cos, sin = _rows(cos, sin, x.shape[0], x.shape[1], seqlen_offsets)
    else:
        cos, sin = _packed_rows(cos, sin, x.shape[0], seqlen_offsets, cu_seqlens, max_seqlen)
    rotated = _rotated(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb  # its older name


def apply_rotary_emb_qkv_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cos_k: torch.Tensor | None = None,
                          sin_k: torch.Tensor | None = None, interleaved: bool = False, seqlen_offsets: Offsets = 0,
                          num_heads_q: int | None = None) -> torch.Tensor:
    """Rotate the queries and keys of a packed projection in place; values stay.

    Args:
        qkv: (b, s, 3, h, d), or with ``num_heads_q`` (b, s, hq + 2 hk, d).
        cos, sin, interleaved, seqlen_offsets: as in :func:`apply_rotary_emb`.
        cos_k, sin_k: tables of the keys; None = cos and sin.
        num_heads_q: how many heads, the first ones, are queries'.

    Returns:
        qkv.

    Raises:
        InvalidInput: as :func:`apply_rotary_emb`, or a projection of other dims.
    """
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.dim() == 4 and num_heads_q is not None and 0 <= num_heads_q <= qkv.shape[2] and (
            qkv.shape[2] - num_heads_q) % 2 == 0:
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:(qkv.shape[2] + num_heads_q) // 2]
    else:
        raise InvalidInput(f"qkv has shape {tuple(qkv.shape)} and num_heads_q is {num_heads_q}; allowed is "
                           "(b, s, 3, h, d), or (b, s, hq + 2 hk, d) with num_heads_q.")
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False,
                         seqlen_offsets: Offsets = 0) -> torch.Tensor:
    """Rotate the keys of ``kv``, (b, s, 2, h, d), in place and return it; otherwise as :func:`apply_rotary_emb`."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise InvalidInput(f"kv has shape {tuple(kv.shape)}; allowed is (b, s, 2, h, d).")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotate queries and keys in place, with tables that are made once and lengthened as sequences get longer.

    Args:
        dim: how many dims of a head are rotated, the first ones; even.
        base: the wavelengths of the pairs go from 2π to nearly 2π · base.
        interleaved: as in :func:`apply_rotary_emb`.
        scale_base: scale queries and inversely keys by their position, as XPos does (Sun et al., 2022); None = not.
        device: of the frequencies.

    Raises:
        InvalidInput: dim is odd.

    >>> rotary = RotaryEmbedding(8)
    >>> rotary(torch.randn(2, 5, 3, 4, 16)).shape
    torch.Size([2, 5, 3, 4, 16])
    """

    def __init__(self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None,
                 device: torch.device | str | None = None) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise InvalidInput(f"dim is {dim}; allowed is an even number of dims, 2 or more.")
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.inv_freq: torch.Tensor
        self.scale: torch.Tensor | None
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._scales(device), persistent=False)
        self._seq_len_cached = 0
        # Code that decodes reads these, and calls _update_cos_sin_cache.
        self._cos_cached: Any = None
        self._sin_cached: Any = None
        self._cos_k_cached: Any = None
        self._sin_k_cached: Any = None

    def forward(self, qkv: torch.Tensor, kv: torch.Tensor | None = None, seqlen_offset: Offsets = 0,
                max_seqlen: int | None = None,
                num_heads_q: int | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Rotate in place.

        Args:
            qkv: (b, s, 3, h, d), or with ``num_heads_q`` (b, s, hq + 2 hk, d); with kv, the queries (b, s, hq, d).
            kv: (b, s, 2, hk, d), or None.
            seqlen_offset: position of the first row: an integer, or (b,), one of each sequence.
            max_seqlen: how many positions the tables must have; needed where ``seqlen_offset`` is a tensor.
            num_heads_q: as in :func:`apply_rotary_emb_qkv_`.

        Returns:
            qkv, or with kv both, (qkv, kv).

        Raises:
            InvalidInput: a tensor tells the positions and nothing how many there are; or as the functions raise it.
        """
        if max_seqlen is None:
            if isinstance(seqlen_offset, torch.Tensor):
                raise InvalidInput("seqlen_offset is a tensor and max_seqlen is None: how long the tables must be is "
                                   "not known without waiting for the device. Pass max_seqlen, more than the largest "
                                   "position.")
            max_seqlen = qkv.shape[1] + seqlen_offset
        self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        cos_k, sin_k = (cos, sin) if self.scale_base is None else (self._cos_k_cached, self._sin_k_cached)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _update_cos_sin_cache(self, seqlen: int, device: torch.device | None = None,
                              dtype: torch.dtype | None = None) -> None:
        """Make the tables anew where they are too short, elsewhere, of another dtype, or cannot be trained with."""
        known = self._cos_cached
        if known is not None and seqlen <= self._seq_len_cached and (known.device, known.dtype) == (device, dtype) and (
                torch.is_inference_mode_enabled() or not known.is_inference()):
            return
        self._seq_len_cached = seqlen
        # Of a module that was cast as a whole, frequencies of 16 bits would be those of other positions.
        kept = self.inv_freq.dtype == torch.float32
        frequencies = self.inv_freq.to(device) if kept else self._frequencies(device)
        angles = torch.outer(torch.arange(seqlen, device=device, dtype=torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        powers = (torch.arange(seqlen, device=device, dtype=torch.float32) - seqlen // 2) / self.scale_base
        scales = self._scales(device) ** powers[:, None]
        self._cos_cached, self._sin_cached = (cos * scales).to(dtype), (sin * scales).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scales).to(dtype), (sin / scales).to(dtype)

    def _frequencies(self, device: torch.device | str | None) -> torch.Tensor:
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        return torch.pow(self.base, exponents).reciprocal()

    def _scales(self, device: torch.device | str | None) -> torch.Tensor:
        return (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) + 0.4 * self.dim) / (1.4 * self.dim)


def _rows(cos: torch.Tensor, sin: torch.Tensor, batch: int, length: int,
          offsets: Offsets) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables' rows of a batch: (s, rotary_dim / 2), or (b, s, rotary_dim / 2) where offsets differ."""
    if isinstance(offsets, torch.Tensor):
        _check_offsets(offsets, batch)
        positions = offsets[:, None] + torch.arange(length, device=offsets.device)
        return embedding(positions, cos), embedding(positions, sin)
    _check_span(cos, length, offsets, "x")
    return cos[offsets:offsets + length], sin[offsets:offsets + length]


def _packed_rows(cos: torch.Tensor, sin: torch.Tensor, total: int, offsets: Offsets, cu_seqlens: torch.Tensor,
                 longest: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables' rows of packed sequences, (total, rotary_dim / 2); behind the last one, cos 1 and sin 0."""
    sequences = cu_seqlens.shape[0] - 1
    if isinstance(offsets, torch.Tensor):
        _check_offsets(offsets, sequences)
    else:
        _check_span(cos, longest or 0, offsets, "max_seqlen")
    rows = torch.arange(total, device=cu_seqlens.device)
    owner = torch.searchsorted(cu_seqlens.long(), rows, right=True) - 1
    outside = owner == sequences
    owner = owner.clamp(max=max(0, sequences - 1))
    positions = rows - cu_seqlens[owner] + (offsets[owner] if isinstance(offsets, torch.Tensor) else offsets)
    positions = positions.masked_fill(outside, 0)
    outside = outside[:, None]
    return embedding(positions, cos).masked_fill(outside, 1.0), embedding(positions, sin).masked_fill(outside, 0.0)


def _check_widths(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if cos.shape != sin.shape or 2 * cos.shape[-1] > x.shape[-1]:
        raise InvalidInput(f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)} and x {tuple(x.shape)}; allowed "
                           "are equal shapes of cos and sin, whose last dim is at most half of x's.")


def _check_offsets(offsets: torch.Tensor, batch: int) -> None:
    if offsets.shape != (batch,) or offsets.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(f"seqlen_offsets has shape {tuple(offsets.shape)} and dtype {offsets.dtype}; allowed is an "
                           f"integer, or ({batch},), one of each sequence, int32 or int64.")


def _check_span(cos: torch.Tensor, length: int, offset: int, of: str) -> None:
    if offset < 0 or offset + length > cos.shape[0]:
        raise InvalidInput(f"seqlen_offsets is {offset}, {of} has {length} positions and cos {cos.shape[0]} rows; "
                           "allowed is an offset >= 0, and a row for each position from it on. Make longer tables.")


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    head, rest = x[..., :2 * cos.shape[-1]], x[..., 2 * cos.shape[-1]:]
    first, second = _pairs(head.to(dtype), interleaved)
    cos, sin = cos.to(dtype), sin.to(dtype)
    rotated = _joined(first * cos - second * sin, first * sin + second * cos, interleaved).to(x.dtype)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    return x[..., :x.shape[-1] // 2], x[..., x.shape[-1] // 2:]


def _joined(first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
