"""Packed sequences: their numbers, whom they do not suit, torch's kernel for them, and ours on them as documents."""

import inspect
from typing import Any, cast

import torch

from tilewise.api import attention
from tilewise.bench.grids import Cell
from tilewise.bench.providers import Attend, Dims, Provider, TilewiseProvider
from tilewise.bench.roofline import Direction
from tilewise.masks import documents
from tilewise.problem.options import Operands
from tilewise.testing.cases import Case

_UNPACKED = "takes packed sequences alone"


def sequence_numbers(borders: torch.Tensor) -> torch.Tensor:
    """Return the number of each packed row's sequence, (total,), given (sequences + 1,) borders without gaps."""
    numbers = torch.arange(len(borders) - 1, dtype=borders.dtype, device=borders.device)
    return torch.repeat_interleave(numbers, borders.diff())


def are_squares(case: Case) -> bool:
    """Whether each sequence has as many queries as keys, so that a mask's alignment does not matter."""
    return all(len(queries) == len(keys) for queries, keys in zip(case.spans("q"), case.spans("k"), strict=True))


def why_not_positions(case: Case, aligned: str) -> str | None:
    """Return why a provider does not take where sequences lie and what their mask sees, as a sentence, or None.

    Args:
        aligned: the alignment that its masks have where lengths differ; "" = it takes none there.
    """
    if case.packed == "gaps":
        return "takes packed sequences without gaps between them"
    if case.mask.has_exceptions:
        return f"takes causal masks and windows, got {case.mask}"
    if case.mask.is_bounded and not are_squares(case) and case.mask.alignment != aligned:
        allowed = f"aligned {aligned.replace('_', '-')}" if aligned else "of sequences with as many queries as keys"
        return f"takes masks {allowed}, got {case.mask}"
    return None


def why_not_flash(cell: Cell) -> str | None:
    """Return why no FlashAttention takes the cell's dtype or positions, as a sentence, or None."""
    if cell.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, got {cell.dtype}"
    return why_not_positions(cell.case, "bottom_right")


class DocumentsProvider(TilewiseProvider):
    """One backend of this package on packed sequences as the documents of a single batch entry."""

    options = frozenset({"packed"})

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.name = f"{self.name}:documents"

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Refuse what documents of one entry cannot say."""
        return why_not_positions(cell.case, "") if cell.case.packed else _UNPACKED

    def dims(self, case: Case) -> Dims:
        """One batch entry."""
        return "bhsd"

    def bind(self, cell: Cell, operands: Operands, device: torch.device) -> Attend:
        """Call :func:`tilewise.attention`; the mask is made of the sequences' numbers beforehand."""
        case = cell.case
        queries, keys = (sequence_numbers(cast(torch.Tensor, borders))
                         for borders in (operands.cu_seqlens_q, operands.cu_seqlens_k))
        mask = case.mask & documents(queries, keys)
        return lambda q, k, v: attention(q, k, v, mask=mask, scale=case.scale, backend=self.backend)


class VarlenProvider(Provider):
    """torch's varlen_attn: FlashAttention-2 on packed sequences."""

    name = "varlen_attn"
    options = frozenset({"packed"})

    def missing(self, device: torch.device) -> str | None:
        """Refuse the CPU."""
        return None if device.type == "cuda" else "torch has this kernel for GPUs only"

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Refuse what is not packed, float32 and masks of the other corner."""
        return why_not_flash(cell) if cell.case.packed else _UNPACKED

    def dims(self, case: Case) -> Dims:
        """As it takes them."""
        return "shd"

    def bind(self, cell: Cell, operands: Operands, device: torch.device) -> Attend:
        """Call it with the borders as 32-bit integers and the longest lengths."""
        from torch.nn.attention import varlen

        case, function = cell.case, cast(Any, varlen.varlen_attn)
        sides = tuple(-1 if side is None else side for side in (case.mask.left, case.mask.right))
        borders = [cast(torch.Tensor, tensor).int() for tensor in (operands.cu_seqlens_q, operands.cu_seqlens_k)]
        # torch 2.11 takes fewer key/value heads as they are, later ones when told to.
        told = "enable_gqa" in inspect.signature(function).parameters
        more = {"enable_gqa": True} if told and case.hq != case.hk else {}

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, function(q, k, v, *borders, case.sq, case.sk, scale=case.scale,
                                               window_size=sides, **more))

        return attend


def packed_providers() -> list[Provider]:
    """Return the providers that take packed sequences and nothing else."""
    return [DocumentsProvider("triton"), VarlenProvider()]
