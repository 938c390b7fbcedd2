"""What becomes of the tensors and masks that a user passes: the operands of an operator."""

from dataclasses import replace
from functools import lru_cache
from typing import cast

import torch

from tilewise.functions import CallFunctions, MaskFunction
from tilewise.masks import Mask, TensorMask
from tilewise.problem.options import NO_OPERANDS, Operands
from tilewise.support.caches import registered
from tilewise.validate.tensors import (
    check_lengths_are_tensors,
    check_packed_rows,
    check_sinks,
    with_batch_dim,
    with_four_dims,
)
from tilewise.validate.values import check_dropout_seed, check_longest, not_a_mask

_NO_MASK = Mask()
# cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k.
Lengths = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
NO_LENGTHS: Lengths = (None, None, None, None)
# documents_q, documents_k, tiles_q, tiles_k.
NO_LISTS: tuple[torch.Tensor | None, ...] = (None, None, None, None)
Longest = tuple[int | None, int | None]  # max_seqlen_q, max_seqlen_k
NO_LONGEST: Longest = (None, None)


def parted(mask: object) -> tuple[Mask, torch.Tensor | None, tuple[torch.Tensor | None, ...], MaskFunction | None]:
    """Part a mask into its band, its tensor and, as operands, its documents and tiles; and its function."""
    if mask is None:
        return _NO_MASK, None, NO_LISTS, None
    if isinstance(mask, Mask):
        return mask, None, NO_LISTS, None
    if isinstance(mask, TensorMask):
        lists = (*(mask.documents or NO_LISTS[:2]), *(mask.tiles or NO_LISTS[2:]))
        return mask.band, mask.tensor, lists, mask.function
    if isinstance(mask, torch.Tensor):
        return _NO_MASK, mask, NO_LISTS, None
    if isinstance(mask, MaskFunction):
        return _NO_MASK, None, NO_LISTS, mask
    raise not_a_mask(mask)


def as_batches(q: torch.Tensor, k: torch.Tensor,
                v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """View packed rows (total, h, d) as one batch entry (1, h, total, d)."""
    check_packed_rows(q, k, v)
    return q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)


def longest_of(*longest: int | torch.Tensor | None, needed: bool) -> Longest:
    """Check the sizes of the longest sequences; they are part of a call only where an operand needs them."""
    for side, size in zip("qk", longest, strict=True):
        check_longest(side, size)
    kept = [None if size is None or not needed or isinstance(size, torch.Tensor)
            else size if isinstance(size, (int, torch.SymInt)) else int(size) for size in longest]
    return kept[0], kept[1]


def with_lengths(band: Mask, lengths: Lengths, names: tuple[str | None, ...]) -> tuple[Mask, Lengths]:
    """Make the lengths dense, and name an alignment where those of queries and keys are one tensor, hence equal."""
    borders_q, borders_k, used_q, used_k = lengths
    if not (used_q is used_k is None and borders_q.__class__ is borders_k.__class__ is torch.Tensor):
        check_lengths_are_tensors(names, lengths)
    compiling = torch.compiler.is_compiling()
    if band.alignment is None and borders_q is borders_k and used_q is used_k:
        band = replace(band, alignment="top_left") if compiling else _aligned(band)  # dynamo warns of a cache
    dense = [None if tensor is None else tensor.contiguous() for tensor in lengths]
    if compiling:  # dynamo traces no autograd Function that is handed one tensor twice
        dense = [None if tensor is None else tensor.view_as(tensor) for tensor in dense]
    return band, cast(Lengths, tuple(dense))


@registered
@lru_cache(maxsize=1024)
def _aligned(band: Mask) -> Mask:
    return replace(band, alignment="top_left")


def operands_of(bias: torch.Tensor | None, alibi_slopes: torch.Tensor | None, mask: torch.Tensor | None,
              sinks: torch.Tensor | None, seed: torch.Tensor | None, lengths: Lengths,
              lists: tuple[torch.Tensor | None, ...], functions: CallFunctions) -> Operands:
    """Put the operands together; :data:`NO_OPERANDS` itself where there are none."""
    if (bias is None and alibi_slopes is None and mask is None and sinks is None and seed is None and lists is NO_LISTS
            and lengths is NO_LENGTHS and not functions.score_tensors and not functions.mask_tensors):
        return NO_OPERANDS
    if sinks is not None:
        check_sinks(sinks)
    alone = (None if bias is None else with_four_dims("bias", bias),
             None if alibi_slopes is None else with_batch_dim(alibi_slopes),
             None if mask is None else with_four_dims("mask", mask), sinks, seed, *lengths, *lists)
    return Operands._make((*alone, functions.score_tensors, functions.mask_tensors))


def seed_of(q: torch.Tensor, dropout_p: float, seed: int | torch.Tensor | None) -> torch.Tensor | None:
    """Return the seed as a tensor on the device, where a CUDA graph can draw a new one at every replay."""
    if dropout_p == 0.0 or not isinstance(q, torch.Tensor):
        return None
    if seed is None:
        return torch.randint(2**62, (1,), dtype=torch.int64, device=q.device)
    check_dropout_seed(seed)
    if isinstance(seed, torch.Tensor):
        return seed
    return torch.full((1,), int(seed), dtype=torch.int64, device=q.device)
