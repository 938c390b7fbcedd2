"""A mask that no bounds describe, inside the Hopper kernels: each tile's blocks come from a list, and pairs from bits.

The host's side is kernels/triton/mask_plan.py, which builds both on the device, whatever kind the mask is. A list names
the blocks of the other side that a tile visits: first the *partial* ones, of which some pair is hidden, then the *full*
ones, of which none is. Of each partial block there are bits, in the order in which a warpgroup holds a block of scores:
a 32-bit word a thread for each 64 x 64 *cell*, so that a thread loads one word and tests bits that the compiler knows.
Where they lie follows from the step in the list, not from the block: they are on their way before the scores are made.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.hopper.mask_ranges import BlockRange, q_blocks_of
from tilewise.kernels.hopper.tile_scheduler import KVTile

CELL_WORDS = gl.constexpr(128)  # of a cell: one a thread


class MaskPlan(NamedTuple):
    """The lists and bits of a launch; without C.MASK_PLAN None, and no numbers."""

    lists: Any
    bits: Any
    numbers: Any


@gluon.jit
def list_of_tile(plan, batch, head, tile):
    """Point to a tile's list: how many of its blocks are partial, how many there are, and their numbers."""
    numbers = plan.numbers
    return plan.lists + (batch * numbers.list_batch + head * numbers.list_head + tile * numbers.list_tile)


@gluon.jit
def blocks_in_list(plan, batch, head, tile, partial, count):
    """Return the blocks of a tile, in the order of its list. There is one at least, even if no pair is visible."""
    return BlockRange(list_of_tile(plan, batch, head, tile) + 2, partial, partial, count)


@gluon.jit
def kv_tile_in_list(plan, tile, C: gl.constexpr):
    """Return a tile of keys with the numbers of its blocks; members of a group share a list."""
    listed = list_of_tile(plan, tile.batch, tile.head, tile.first // (64 * C.CONSUMERS))
    return KVTile(tile.first, tile.head, tile.batch, gl.load(listed), gl.load(listed + 1))


@gluon.jit
def kv_blocks_in_list(plan, tile, C: gl.constexpr):
    """Return the blocks of keys that a tile of queries sees."""
    listed = list_of_tile(plan, tile.batch, tile.head, tile.first // (64 * C.CONSUMERS))
    partial = gl.load(listed)
    return BlockRange(listed + 2, partial, partial, gl.load(listed + 1))


@gluon.jit
def q_blocks_of_tile(tile, bounds, plan, C: gl.constexpr):
    """Return the blocks of queries that see a tile of keys, by the mask's bounds or by its list."""
    if C.MASK_PLAN:
        return blocks_in_list(plan, tile.batch, tile.head, tile.first // (64 * C.CONSUMERS), tile.partial, tile.blocks)
    else:
        return q_blocks_of(tile.first, bounds, C)


@gluon.jit
def bits_of_rows(plan, batch, head, group):
    """Point to the bits of the first partial block of 64 rows, the ``group``-th of their side."""
    numbers = plan.numbers
    return plan.bits + (batch * numbers.bits_batch + head * numbers.bits_head + group * numbers.bits_group)


@gluon.jit
def as_threads_hold(scores):
    """Order 64 rows as threads hold them: (warp, half, row, cell, eight columns, lane, pair)."""
    return scores.reshape([4, 2, 8, scores.shape[1] // 64, 8, 4, 2])


@gluon.constexpr_function
def _without(layout, dims):
    """Return the layout of a tensor without some dims, the last one first."""
    for dim in dims:
        layout = gl.SliceLayout(dim, layout)
    return layout


@gluon.jit
def bits_of_step(step, view, COLUMNS: gl.constexpr, C: gl.constexpr):
    """With C.MASK_PLAN, load the words of a warpgroup's block of COLUMNS columns, [4, 8, cells, 4].

    Of a full block there are none: all bits are set.
    """
    if C.MASK_PLAN:
        CELLS: gl.constexpr = COLUMNS // 64
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
        LAYOUT: gl.constexpr = _without(as_threads_hold(gl.full([64, COLUMNS], 0, gl.int32, layout=SCORES)).type.layout,
                                        (6, 4, 1))
        warps = gl.arange(0, 4, layout=_without(LAYOUT, (3, 2, 1)))[:, None, None, None]
        rows = gl.arange(0, 8, layout=_without(LAYOUT, (3, 2, 0)))[None, :, None, None]
        cells = gl.arange(0, CELLS, layout=_without(LAYOUT, (3, 1, 0)))[None, None, :, None]
        lanes = gl.arange(0, 4, layout=_without(LAYOUT, (2, 1, 0)))[None, None, None, :]
        places = (step * CELLS + cells) * CELL_WORDS + (warps * 32 + rows * 4 + lanes)
        return gl.load(view.bits + places, mask=(places >= 0) & (step < view.blocks.boundary), other=-1)
    else:
        return ()


@gluon.jit
def where_set(words, bits, values, HIDDEN: gl.constexpr):
    """Return the values whose bit is set in their word, else HIDDEN, 0 or -inf.

    Without assembly the compiler packs the bits of a block's second half into 16 of another word, to take them apart
    again behind a wait (pipeline.scheduling_fence).
    """
    OTHER: gl.constexpr = "0" if HIDDEN == 0.0 else "0xFF800000"
    CODE: gl.constexpr = f"""{{
        .reg .pred is_set;
        .reg .b32 bit;
        and.b32 bit, $1, $2;
        setp.ne.b32 is_set, bit, 0;
        selp.b32 $0, $3, {OTHER}, is_set;
    }}"""
    return gl.inline_asm_elementwise(CODE, "=r,r,r,r", [words, bits, values], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def keep_by_bits(scores, words, HIDDEN: gl.constexpr):
    """Set the scores of pairs whose bit is not set to HIDDEN, 0 or -inf."""
    split = as_threads_hold(scores)
    LAYOUT: gl.constexpr = split.type.layout
    halves = gl.arange(0, 2, layout=_without(LAYOUT, (6, 5, 4, 3, 2, 0)))[None, :, None, None, None, None, None]
    eights = gl.arange(0, 8, layout=_without(LAYOUT, (6, 5, 3, 2, 1, 0)))[None, None, None, None, :, None, None]
    pairs = gl.arange(0, 2, layout=_without(LAYOUT, (5, 4, 3, 2, 1, 0)))[None, None, None, None, None, None, :]
    bits = 1 << (halves * 16 + (eights * 2 + pairs))
    kept = where_set(words[:, None, :, :, None, :, None], bits, split, HIDDEN)
    return gl.convert_layout(kept.reshape(scores.shape), scores.type.layout)
