"""Decoding in plain PyTorch: takes every problem, on any device, with memory for every score."""

import torch

from tilewise.backends.current import without_autocast
from tilewise.decode_problem import CacheOperands, DecodeProblem
from tilewise.errors import InvalidInput
from tilewise.kernels.reference.decode import attend_cached


def why_not(problem: DecodeProblem) -> str | None:
    """Return None: there is no reason against."""
    del problem
    return None


def decode(problem: DecodeProblem, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
           operands: CacheOperands) -> tuple[torch.Tensor, torch.Tensor]:
    """Append k and v; return out (b, hq, sq, dv), strides ``problem.out_strides``, and lse (b, hq, sq).

    Raises:
        InvalidInput: on a CPU, where to look costs no wait: a table, or an index, names what the caches have not.
    """
    if problem.device.type == "cpu":
        _check_places(problem, len(k_cache), operands)
    with without_autocast(problem.device.type):
        return attend_cached(problem, q, k_cache, v_cache, operands)


def _check_places(problem: DecodeProblem, rows: int, operands: CacheOperands) -> None:
    """Check which pages, or rows, of the caches are read and written; entries of others may hold anything."""
    indices, table = operands.cache_batch_idx, operands.block_table
    if indices is not None:
        _check_entries("cache_batch_idx", indices, torch.ones_like(indices, dtype=torch.bool), rows)
    if table is None:
        return
    before = operands.cache_seqlens
    before = table.new_full((problem.b,), problem.capacity) if before is None else before.clamp(min=0)
    length = (before + problem.new).clamp(max=problem.capacity)
    first = torch.zeros_like(length) if operands.cache_leftpad is None else operands.cache_leftpad
    if problem.mask.left is not None:
        first = torch.maximum(first, length - problem.sq - problem.mask.left)
    if problem.new:
        first = torch.minimum(first, before.clamp(max=problem.capacity - 1))
    pages = torch.arange(table.shape[1])
    used = (pages >= first[:, None] // problem.page) & (pages * problem.page < length[:, None])
    _check_entries("block_table", table, used, rows)


def _check_entries(name: str, entries: torch.Tensor, used: torch.Tensor, rows: int) -> None:
    wrong = (used & ((entries < 0) | (entries >= rows))).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise InvalidInput(f"{name} has {int(entries[place])} at {list(place)}; allowed are 0 to {rows - 1}, for "
                           f"k_cache has {rows} {'pages' if name == 'block_table' else 'rows'}.")
