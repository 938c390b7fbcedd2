"""torch's FlexAttention for the torture suite: masks as block masks, compiled once for all lengths and batches."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tilewise.bench.packed import sequence_numbers
from tilewise.testing.torture import Implementation, Takes

_MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def flex_implementation() -> Implementation:
    """Return FlexAttention as its users compile it; it takes what its documentation and its own checks say."""
    flex = _Flex()
    return Implementation("flex", flex.attend, Takes(
        head_dims=range(16, 257), other_value_dim=True, alignments=("top_left", "bottom_right"), grouped_heads=True,
        masks=True, lse=True, nothing=False), flex.attend_packed)


class _Flex:
    """FlexAttention, compiled at the first call, and the causal block masks made so far."""

    def __init__(self) -> None:
        self._compiled: Any = None
        self._causal: dict[tuple[int, int, int], Any] = {}  # made once: a captured call could not

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float,
               alignment: str = "top_left", mask: torch.Tensor | None = None, return_lse: bool = False) -> Any:
        """Attend to (b, h, s, d), of a causal mask, a boolean one, both or none."""
        (b, hq, sq, _), sk = q.shape, k.shape[2]
        offset = sk - sq if alignment == "bottom_right" else 0
        block_mask = None
        if mask is not None:
            seen = mask.expand(b, hq, sq, sk)
            if causal:
                seen = seen & torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(offset)
            block_mask = _block_mask(_seen_in(seen.contiguous()), b, hq, q, sk)
        elif causal:
            if (sq, sk, offset) not in self._causal:
                self._causal[sq, sk, offset] = _block_mask(_seen_from(torch.tensor(offset, device=q.device)), None,
                                                           None, q, sk)
            block_mask = self._causal[sq, sk, offset]
        out, lse = self._call(q, k, v, block_mask, scale)
        return (out, lse) if return_lse else out

    def attend_packed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float,
                      cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, alignment: str = "bottom_right",
                      **_longest: int) -> torch.Tensor:
        """Attend to packed sequences, (total, h, d), as documents of one batch entry."""
        sequences = sequence_numbers(cu_seqlens_q), sequence_numbers(cu_seqlens_k)
        places = tuple(torch.zeros_like(numbers) for numbers in sequences)
        if causal:
            origins = (cu[:-1] if alignment == "top_left" else cu[1:] for cu in (cu_seqlens_q, cu_seqlens_k))
            places = tuple(torch.arange(len(numbers), device=q.device) - origin[numbers]
                           for numbers, origin in zip(sequences, origins, strict=True))
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        block_mask = _block_mask(_seen_within(*sequences, *places), None, None, q, k.shape[2])
        return self._call(q, k, v, block_mask, scale)[0][0].transpose(0, 1)

    def _call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: Any,
              scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        if self._compiled is None:
            # Head dims and strides are a compilation each; past torch's limit a call would not be compiled any more.
            config: Any = importlib.import_module("torch._dynamo.config")
            config.recompile_limit = config.accumulated_recompile_limit = 1000
            self._compiled = torch.compile(_with_lse, dynamic=True)
        out, lse = self._compiled(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out, lse


def _with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    function: Any = flex_attention  # its overloads know no options by dict
    out, aux = function(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def _block_mask(mask_mod: _MaskMod, b: int | None, hq: int | None, q: torch.Tensor, sk: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask_mod, b, hq, q.shape[2], sk, device=str(q.device))


# What the masks below close over are tensors: another number would be another compilation.
def _seen_from(offset: torch.Tensor) -> _MaskMod:
    return lambda b, h, i, j: i + offset >= j


def _seen_in(seen: torch.Tensor) -> _MaskMod:
    return lambda b, h, i, j: seen[b, h, i, j]


def _seen_within(sequence_q: torch.Tensor, sequence_k: torch.Tensor, place_q: torch.Tensor,
                 place_k: torch.Tensor) -> _MaskMod:
    return lambda b, h, i, j: (sequence_q[i] == sequence_k[j]) & (place_q[i] >= place_k[j])
