"""Keys that a model's indexer chose for each query, as DeepSeek-V3.2's and MiniMax-M3's do, as a boolean mask."""

import torch

from tilewise.errors import InvalidInput, UnsupportedProblem

__all__ = ["chosen_keys"]


def chosen_keys(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor | None,
                block_indices: torch.Tensor | None) -> torch.Tensor | None:
    """Say which keys each query may see.

    Args:
        module: the layer; its ``indexer.block_size`` tells the keys of a block.
        query, key: (b, hq, sq, d), (b, hk, sk, d).
        indices: (b, sq, n), integers: keys, by their numbers; less than 0 = none.
        block_indices: (b, groups of heads, sq, n), integers: blocks of keys; less than 0 = none.

    Returns:
        (b, 1 or hq, sq, sk), bool, True = chosen; None where neither is given.

    Raises:
        InvalidInput: both are given, or a shape or dtype is not of these.
        UnsupportedProblem: blocks of a layer that does not tell their size.
    """
    if indices is not None and block_indices is not None:
        raise InvalidInput("indices and block_indices are both given; allowed is one of them.")
    (b, heads, query_length, _), key_length = query.shape, key.shape[2]
    b = max(b, len(key))
    if indices is not None:
        _check("indices", indices, "(b, sq, n)", indices.shape[:-1] == (b, query_length), query, b)
        return _scattered(indices[:, None], key_length)
    if block_indices is None:
        return None
    fits = (block_indices.dim() == 4 and block_indices.shape[::2] == (b, query_length)
            and heads % block_indices.shape[1] == 0)
    _check("block_indices", block_indices, "(b, groups, sq, n) with groups that divide hq", fits, query, b)
    block_size: int | None = getattr(getattr(module, "indexer", None), "block_size", None)
    if block_size is None:
        raise UnsupportedProblem("block_indices is given, and the layer has no indexer.block_size; allowed is one "
                                 "that says so how many keys a block has. Use attn_implementation='eager' for this "
                                 "model.", {})
    chosen = _scattered(block_indices, -(-key_length // block_size))
    chosen = chosen.repeat_interleave(block_size, dim=-1)[..., :key_length]
    return chosen.repeat_interleave(heads // chosen.shape[1], dim=1)


def _scattered(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Mark what numbers name: (..., n) becomes (..., count), bool."""
    numbers = numbers.long()
    # What is none goes into a column of its own, which is cut off.
    marks = torch.zeros(*numbers.shape[:-1], count + 1, dtype=torch.bool, device=numbers.device)
    return marks.scatter(-1, numbers.masked_fill(numbers < 0, count), True)[..., :count]


def _check(name: str, given: torch.Tensor, wanted: str, fits: bool, query: torch.Tensor, b: int) -> None:
    if not fits or given.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(f"{name} has shape {tuple(given.shape)} and dtype {given.dtype}; allowed is {wanted}, of "
                           f"torch.int32 or torch.int64, where b is {b}, sq is {query.shape[2]} and hq is "
                           f"{query.shape[1]}.")
