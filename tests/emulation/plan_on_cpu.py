"""A mask plan of any dense mask, made by plain torch, and what of its device functions is in plain words on the CPU."""

import itertools

import pytest
import torch

mask_plan, tile_scheduler = (
    pytest.importorskip(f"tilewise.kernels.hopper.{name}", reason="Triton is not installed") for name in (
        "mask_plan", "tile_scheduler"))


def plan_constants(modules):
    """What of the functions that read a plan is in plain words, by the modules that have it."""
    return {(module, name): value for module in modules for name, value in (
        ("CELL_WORDS", 128), ("_without", mask_plan._without.fn), ("kv_tile_size", tile_scheduler.kv_tile_size.fn),
        ("where_set", lambda words, bits, values, hidden: torch.where((words & bits) != 0, values, hidden)))
        if hasattr(module, name)}


def plan_of(visible, rows, columns, keys_first=False):
    """Return (lists, bits, strides) of a dense mask: (batches, heads, queries, keys), bool.

    rows: cells of a tile; columns: of a block. keys_first: tiles are of keys, as in the backward pass. A tile's blocks
    come in any order, partial ones first.
    """
    batches, heads, *sides = visible.shape
    queries, keys = (-(-side // 64) * 64 for side in sides)
    # Queries that do not exist hide nothing of a block, keys that do not exist are hidden.
    shown, allowed = (torch.nn.functional.pad(visible, (0, 0, 0, queries - sides[0]), value=rest) for rest in (
        False, True))
    step = 64 * rows, 64 * columns
    tile, block = reversed(step) if keys_first else step
    shown = torch.nn.functional.pad(shown, (0, -keys % block + keys - sides[1], 0, -queries % tile))
    allowed = torch.nn.functional.pad(allowed, (0, -keys % block + keys - sides[1]))
    allowed = torch.nn.functional.pad(allowed, (0, 0, 0, -queries % tile), value=True)
    if keys_first:
        shown, allowed = shown.mT, allowed.mT
    tiles, blocks = shown.shape[2] // step[0], shown.shape[3] // step[1]
    shown, allowed = (pairs.reshape(batches, heads, tiles, rows, 64, blocks, 64 * columns).movedim(5, 3)
                      for pairs in (shown, allowed))  # (batches, heads, tiles, blocks, rows, 64, 64 * columns)
    is_seen, is_full = shown.flatten(4).any(-1), allowed.flatten(4).all(-1)
    lists = torch.full((batches, heads, tiles, 2 + blocks), -7, dtype=torch.int32)
    bits = torch.full((batches, heads, tiles, rows, blocks, columns, 128), -7, dtype=torch.int32)
    for place in itertools.product(*map(range, (batches, heads, tiles))):
        seen = [number for number in torch.randperm(blocks).tolist() if is_seen[place][number]]
        full = [number for number in seen if is_full[place][number]]
        partial = [number for number in seen if number not in full] or [0] * (not seen)
        listed = [len(partial), len(partial) + len(full), *partial, *full]
        lists[place][:len(listed)] = torch.tensor(listed)
        for row, at in itertools.product(range(rows), range(len(partial))):
            bits[place][row, at] = words_of(shown[place][partial[at], row])
    strides = []
    for part in (lists, bits):
        size = part[0, 0].numel()
        strides += [size * heads if batches > 1 else 0, size if heads > 1 else 0, part.stride(2) if part is lists else
                    part.stride(3)]
    return lists.flatten(), bits.flatten(), tuple(strides)


def words_of(pairs):
    """Return the words of 64 rows, (cells, 128): of each thread, which of the pairs are visible that it holds.

    A thread has, of each 64 x 64 cell, two rows that are 8 apart, and of those two columns of every 8.
    """
    row, column = pairs.nonzero().unbind(1)
    threads = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    places = row // 8 % 2 * 16 + column % 64 // 8 * 2 + column % 2
    words = torch.zeros(pairs.shape[1] // 64, 128, dtype=torch.int64)
    words.index_put_((column // 64, threads), 1 << places, accumulate=True)
    return torch.where(words < 2**31, words, words - 2**32).int()
