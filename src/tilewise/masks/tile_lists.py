"""Lists of the tiles that a mask leaves visible, for masks that no formula describes.

A tile is TILE queries by TILE keys. Of each tile of queries the list names the tiles of keys that are visible in part,
which need the mask pair by pair, then those that are visible whole, which do not; the others are not visited. The
keys' side has a list of its own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

TILE = 128  # a multiple of every tile of the kernels that read lists (tuning/table.py)


class TileLists(NamedTuple):
    """The lists, in the form that kernels read; made by :meth:`tilewise.masks.TensorMask.tiled`.

    Attributes:
        q: (b|1, hq|1, ceil(sq / TILE), 2 + ceil(sk / TILE)), int32; of each tile of queries: how many tiles of keys
            are visible in part, how many whole, and the numbers of the former and of the latter.
        k: (b|1, hq|1, ceil(sk / TILE), 2 + ceil(sq / TILE)), int32; the same of each tile of keys.
    """

    q: torch.Tensor
    k: torch.Tensor


def tile_lists(visible_rows: Callable[[int, int], torch.Tensor], query_length: int, key_length: int) -> TileLists:
    """List the tiles of a mask, without waiting for the device.

    Args:
        visible_rows: of two numbers, the first query and one past the last: (b|1, hq|1, queries, key_length), bool.
        query_length, key_length: of the call; a tile that reaches past one is never visible whole.
    """
    found = []
    for first in range(0, query_length, TILE):
        rows = visible_rows(first, min(first + TILE, query_length))
        # What is missing to a whole tile counts as hidden.
        missing = (0, -key_length % TILE, 0, TILE - rows.shape[2])
        padded = torch.nn.functional.pad(rows, missing)
        by_tile = padded.view(*padded.shape[:3], -1, TILE)
        found.append(torch.where(by_tile.all(4).all(2), 2, by_tile.any(4).any(2).int()))
    return listed(torch.stack(found, 2))


def listed(states: torch.Tensor) -> TileLists:
    """List tiles by their states, (b|1, hq|1, tiles of queries, tiles of keys): 0 hidden, 1 in part, 2 whole."""
    return TileLists(_listed(states), _listed(states.mT))


def _listed(states: torch.Tensor) -> torch.Tensor:
    counts = torch.stack([(states == wanted).sum(-1) for wanted in (1, 2)], -1)
    order = torch.where(states == 0, 3, states).sort(stable=True, dim=-1).indices
    return torch.cat([counts, order], -1).int()
