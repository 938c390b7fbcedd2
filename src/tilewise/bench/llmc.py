"""llm.c's layer: attention from one tensor of packed projections, and one gradient of it."""

from typing import cast

import torch

from tilewise.bench.grids import Cell
from tilewise.bench.providers import Attend, Dims, Provider, TilewiseProvider
from tilewise.bench.roofline import Direction
from tilewise.bench.shapes import CAUSAL, FULL
from tilewise.integrations.llmc import packed_attention
from tilewise.problem.options import Operands
from tilewise.testing.cases import Case


class LlmcProvider(TilewiseProvider):
    """:func:`tilewise.integrations.llmc.packed_attention` by one backend, or the automatic choice.

    The backward pass puts the gradient of the packed tensor together, which other providers have no part of.
    """

    options = frozenset()
    gradients = frozenset()
    on_request = True

    def __init__(self, backend: str | None) -> None:
        super().__init__(backend)
        self.name = f"{self.name}:llmc"

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Refuse what llm.c's layer cannot say."""
        case = cell.case
        if cell.cached or (case.hq, case.sq, case.d) != (case.hk, case.sk, case.dv) or case.mask not in (CAUSAL, FULL):
            return ("takes queries, keys and values of one shape, full or causal, got "
                    f"{'a cache, ' if cell.cached else ''}{case}")
        return super().why_not(cell, direction, device)

    def dims(self, case: Case) -> Dims:
        """As they lie in its tensor."""
        return "bshd"

    def stored(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pack them, (b, s, 3c)."""
        return (torch.stack((q, k, v), 2).flatten(2),)

    def gradients_of(self, found: tuple[torch.Tensor, ...], case: Case) -> tuple[torch.Tensor, ...]:
        """Unpack them."""
        (packed,) = found
        return tuple(torch.unflatten(part, 2, (case.hq, case.d)) for part in packed.chunk(3, 2))

    def bind(self, cell: Cell, operands: Operands, device: torch.device) -> Attend:
        """Call it with out's heads told apart, a view."""
        case = cell.case
        is_causal = case.mask == CAUSAL

        def attend(packed: torch.Tensor) -> torch.Tensor:
            out = packed_attention(packed, case.hq, is_causal=is_causal, scale=case.scale, backend=self.backend)
            return torch.unflatten(cast(torch.Tensor, out), 2, (case.hq, case.d))

        return attend


def llmc_providers() -> list[Provider]:
    """Return the automatic choice and the backends whose precision is float32's."""
    return [LlmcProvider(backend) for backend in (None, "cuda", "cuda_ieee")]
