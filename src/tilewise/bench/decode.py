"""Further forms of decoding beside the flat cache: in pages, and torch's with heads as queries."""

import torch
from torch.nn.attention import SDPBackend

from tilewise.bench.grids import Cell
from tilewise.bench.providers import AUTOMATIC, Attend, Provider, SdpaProvider, TilewiseProvider
from tilewise.bench.roofline import Direction
from tilewise.problem.options import Operands

_UNCACHED = "reads caches alone"


class PagesProvider(TilewiseProvider):
    """:func:`tilewise.attention_decode` with pages, which lie anywhere."""

    options = frozenset()

    def __init__(self, page: int) -> None:
        super().__init__()
        self.name, self.page = f"{AUTOMATIC}:pages{page}", page

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Refuse what is no cache, and one that is no whole number of pages."""
        if not cell.cached:
            return _UNCACHED
        if cell.case.sk % self.page:
            return f"takes caches of a multiple of {self.page} keys, got {cell.case.sk}"
        return super().why_not(cell, direction, device)

    def stored(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Scatter keys and values over pages."""
        return (q, *(self._paged(cache) for cache in (k, v)))

    def bind(self, cell: Cell, operands: Operands, device: torch.device) -> Attend:
        """Call it with the table that says where the pages lie."""
        table = page_table(cell.case.b, cell.case.sk // self.page).to(device)
        return self.bind_cached(cell, device, block_table=table)

    def _paged(self, cache: torch.Tensor) -> torch.Tensor:
        """(b, h, s, d) as (pages, h, page, d) whose heads lie side by side."""
        b, h, s, d = cache.shape
        pages = cache.transpose(1, 2).reshape(b * s // self.page, self.page, h, d)
        made = torch.empty_like(pages)
        made[page_table(b, s // self.page).flatten().to(cache.device).long()] = pages
        return made.transpose(1, 2)


class FoldedProvider(SdpaProvider):
    """torch's operators with the query heads of a group as queries of its key head, which one query allows."""

    def why_not(self, cell: Cell, direction: Direction, device: torch.device) -> str | None:
        """Refuse what is no cache, more queries than one, and heads without groups."""
        case = cell.case
        if not cell.cached:
            return _UNCACHED
        if case.sq != 1 or case.hq == case.hk:
            return f"takes one query of grouped heads, got {case.sq} of {case.hq} heads on {case.hk}"
        return super().why_not(cell, direction, device)

    def bind(self, cell: Cell, operands: Operands, device: torch.device) -> Attend:
        """Call torch with views of q and out."""
        case = cell.case
        b, hk, group = case.b, case.hk, case.hq // case.hk

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = torch.nn.functional.scaled_dot_product_attention(q.reshape(b, hk, group, case.d), k, v,
                                                                   scale=case.scale)
            return out.reshape(b, case.hq, 1, case.dv)

        return attend


def page_table(sequences: int, pages: int) -> torch.Tensor:
    """Return where each page of each sequence lies, (sequences, pages), int32: a permutation, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(sequences * pages, generator=generator).view(sequences, pages).int()


def decode_providers() -> list[Provider]:
    """Return the providers that read caches and nothing else."""
    return [PagesProvider(256), PagesProvider(16),
            FoldedProvider("sdpa_flash_folded", SDPBackend.FLASH_ATTENTION, on_cpu=True),
            FoldedProvider("sdpa_cudnn_folded", SDPBackend.CUDNN_ATTENTION, on_cpu=False)]
