"""The lists of a mask's visible tiles against the dense mask."""

import pytest
import torch

from tilewise.masks import causal, chunk, documents, window
from tilewise.masks.tile_lists import TILE

MASKS = {
    "band": (window(200, 10) & torch.ones(1, dtype=torch.bool), 3 * TILE, 3 * TILE),
    "documents": (documents(torch.arange(700) // 250) & causal(), 700, 700),
    "tensor": (chunk(300, "top_left") & (torch.rand(2, 3, 300, 520, generator=torch.Generator().manual_seed(1)) > 0.99),
               300, 520),
    "keys": (window(None, None) & (torch.arange(400) > 200), 130, 400),
}


@pytest.mark.parametrize("name", MASKS)
def test_lists_name_exactly_the_tiles_that_are_visible_in_part_and_those_visible_whole(name):
    mask, sq, sk = MASKS[name]
    lists = mask.tiled(sq, sk).tiles
    dense = mask.visible(sq, sk)
    for listed, visible in ((lists.q, dense), (lists.k, dense.mT)):
        assert listed.dtype is torch.int32
        for batch, head in torch.cartesian_prod(*map(torch.arange, visible.shape[:2])).tolist():
            for row, entry in enumerate(listed[batch, head].tolist()):
                partly, whole, *numbers = entry
                states = {}
                for column in range(len(numbers)):
                    tile = visible[batch, head, row * TILE:(row + 1) * TILE, column * TILE:(column + 1) * TILE]
                    is_whole = tile.shape == (TILE, TILE) and bool(tile.all())
                    states[column] = "whole" if is_whole else "partly" if tile.any() else "hidden"
                assert numbers[:partly] == [c for c, state in states.items() if state == "partly"]
                assert numbers[partly:partly + whole] == [c for c, state in states.items() if state == "whole"]


def test_every_tile_of_the_kernels_divides_a_listed_one():
    from tilewise.tuning import heuristics_triton as triton

    for tiles in (triton._HOPPER, triton._HOPPER_MASK, triton._HOPPER_DROPOUT, triton._AMPERE,
                  triton._BLACKWELL, triton._AMD, triton._FLOAT32):
        for by_width in tiles.values():
            assert all(TILE % side == 0 for tile in by_width.values() for side in tile[:2])
