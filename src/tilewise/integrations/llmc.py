"""The attention of llm.c: one packed input, one packed output, nothing transposed and nothing copied.

llm.c's layer takes (b, s, 3c), the outputs of one linear layer: queries, keys and values one behind the other, each of
``heads`` heads side by side; and gives (b, s, c), the input of the next. Its mask is causal.
"""

import torch

from tilewise.api import attention
from tilewise.errors import InvalidInput
from tilewise.masks import causal

__all__ = ["packed_attention"]


def packed_attention(packed: torch.Tensor, heads: int, *, is_causal: bool = True, scale: float | None = None,
                     return_lse: bool = False, deterministic: bool | None = None,
                     backend: str | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention from llm.c's packed queries, keys and values.

    The kernels read q, k and v where they lie and write out where it belongs: the forward pass copies nothing. The
    gradient of ``packed`` is put together from dq, dk and dv in one copy.

    Args:
        packed: (b, s, 3c): q, k and v, each (b, s, heads, c / heads).
        heads: number of heads, a divisor of c.
        is_causal: whether a query sees the keys up to its own position alone, as in llm.c, or all.
        scale: factor of the scores; None = 1/sqrt(c / heads).
        return_lse: whether to return lse too.
        deterministic, backend: as in :func:`tilewise.attention`.

    Returns:
        out, (b, s, c), in the dtype of ``packed``; with ``return_lse`` the tuple (out, lse), lse (b, heads, s).

    Raises:
        InvalidInput: ``packed`` has not 3 dims, or its last is no multiple of 3 heads.

    >>> import torch
    >>> from tilewise.integrations.llmc import packed_attention
    >>> packed_attention(torch.randn(2, 16, 3 * 64), heads=4).shape
    torch.Size([2, 16, 64])
    """
    if packed.dim() != 3:
        raise InvalidInput(f"packed has shape {tuple(packed.shape)}; allowed are 3 dims (b, s, 3c).")
    if heads < 1 or packed.shape[2] % (3 * heads) or not packed.shape[2]:
        raise InvalidInput(f"packed has {packed.shape[2]} columns and heads is {heads}: the columns must be a multiple "
                           "of 3 heads, those of q, k and v.")
    width = packed.shape[2] // 3
    q, k, v = (torch.unflatten(part, 2, (heads, width // heads)).transpose(1, 2)
               for part in torch.split(packed, width, 2))
    # lse is asked for where it is wanted alone: a compiled call makes a gradient through what is.
    result = attention(q, k, v, mask=causal() if is_causal else None, scale=scale, deterministic=deterministic,
                       return_aux=("lse",) if return_lse else (), backend=backend)
    if isinstance(result, torch.Tensor):
        return result.transpose(1, 2).flatten(2)
    return result.out.transpose(1, 2).flatten(2), result.lse
