"""A mask as lists of blocks and bits of pairs, built on the device: what the Hopper kernels read of any mask.

Three kernels. The first looks at every *cell* of 64 queries by 64 keys: is it hidden, visible in part, or whole? Where
the band and the documents hide 128 by 128 pairs at once, no pair is looked at; where they show them all, the boolean
mask and the user's function are, if there are any. The second lists, of each tile of a kernel, the blocks of the other
side that it visits. The third writes a bit a pair for the partial blocks among them.
Nothing is waited for: memory is for as many blocks as there could be.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilewise.kernels.triton.arguments import Modifiers
from tilewise.kernels.triton.launch import Launch, modifiers_of, needs_int64, numbers
from tilewise.kernels.triton.mask_ranges import document_ids_at, is_visible, narrow_to_documents, visible_keys
from tilewise.kernels.triton.modifiers import function_arguments, load_operand
from tilewise.kernels.triton.tile_types import Band, ScoreBlock
from tilewise.masks import Span
from tilewise.problem import AttentionProblem, Sizes
from tilewise.problem.options import Operands

CELL = tl.constexpr(64)  # queries, and keys, of a cell
HIDDEN, PARTIAL, FULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_NO_ROWS = tl.constexpr(3)  # of a cell behind the last query, which decides nothing
_SLICES = 16  # CTAs that share the partial blocks of 64 rows
Allocate = Callable[[Sizes, Sizes, torch.dtype], torch.Tensor]


class PlanShape(NamedTuple):
    """What a plan is of: its first query and key, where they stop, and how many cells these are.

    first_k: None where it is 0, so that the compiler knows what tiles of a boolean mask are aligned to. heads: of a
    batch entry; 1 where the mask is the same for all.
    """

    first_q: Any
    first_k: Any
    stop_q: Any
    stop_k: Any
    cells_q: Any
    cells_k: Any
    heads: Any


@triton.jit
def from_first(positions, first):
    """Count positions from the first one on; None is 0."""
    if first is not None:
        positions += first
    return positions


@triton.jit
def visible_pairs(offs_q, offs_k, batch, head, modifiers, problem, shape, KEYS_FIRST: tl.constexpr,
                  INT64: tl.constexpr):
    """Which pairs the mask leaves visible: [queries, keys], or [keys, queries] where KEYS_FIRST."""
    documents = modifiers.documents
    numbers_q = None
    numbers_k = None
    if documents.q is not None:
        numbers_q = tl.load(document_ids_at(documents.q, documents.batched, batch, 0, problem.sq) + offs_q,
                            mask=offs_q < shape.stop_q, other=-1)
        numbers_k = tl.load(document_ids_at(documents.k, documents.batched, batch, 0, problem.sk) + offs_k,
                            mask=offs_k < shape.stop_k, other=-1)
        numbers_q = numbers_q[None, :] if KEYS_FIRST else numbers_q[:, None]
        numbers_k = numbers_k[:, None] if KEYS_FIRST else numbers_k[None, :]
    offs_q = offs_q[None, :] if KEYS_FIRST else offs_q[:, None]
    offs_k = offs_k[:, None] if KEYS_FIRST else offs_k[None, :]
    visible = is_visible(offs_q, offs_k, shape.stop_q, shape.stop_k, Band(*problem.bounds, None), numbers_q, numbers_k)
    return allowed_pairs(visible, offs_q, offs_k, batch, head, modifiers, shape, INT64, True)


@triton.jit
def allowed_pairs(visible, offs_q, offs_k, batch, head, modifiers, shape, INT64: tl.constexpr, CHECKED: tl.constexpr):
    """Which of the visible pairs the boolean mask and the function leave so. Not CHECKED: the keys all exist."""
    block = ScoreBlock(None, batch, head, None, None, shape.stop_q, shape.stop_k)
    if modifiers.mask.ptr is not None:
        visible &= load_operand(modifiers.mask, block, offs_q, offs_k, INT64, CHECKED).to(tl.int1)
    if modifiers.mask_function.call is not None:
        sequence, member, q_idx, k_idx = function_arguments(block, offs_q, offs_k, INT64, CHECKED)
        visible &= modifiers.mask_function.call(sequence, member, q_idx, k_idx, *modifiers.mask_function.tensors)
    return visible


@triton.jit
def states_of_pairs(visible, cells_q, shape):
    """Return the states of 2 x 2 cells; a row behind the last query counts for none."""
    count = tl.sum(tl.sum(visible.to(tl.int32).reshape(2, CELL, 2, CELL), 3), 1)
    rows = tl.minimum(tl.maximum(shape.stop_q - (shape.first_q + cells_q * CELL), 0), CELL)
    return tl.where(count == (rows * CELL)[:, None], FULL, tl.where(count > 0, PARTIAL, HIDDEN))


@triton.jit
def mask_cells_kernel(states_ptr, modifiers, problem, shape, INT64: tl.constexpr):
    """Say of 2 x 2 cells which are hidden, partial or full. Grid: (pairs of cells of keys, of queries, entries).

    states: (entries, cells_q, cells_k), int8.
    """
    batch, head = tl.program_id(2) // shape.heads, tl.program_id(2) % shape.heads
    cell_q, cell_k = tl.program_id(1) * 2, tl.program_id(0) * 2
    first_q, first_k = shape.first_q + cell_q * CELL, from_first(cell_k * CELL, shape.first_k)
    offs_q, offs_k = first_q + tl.arange(0, 2 * CELL), first_k + tl.arange(0, 2 * CELL)
    band = Band(*problem.bounds, None)
    documents = modifiers.documents
    spans = visible_keys(first_q, tl.minimum(first_q + 2 * CELL, shape.stop_q) - 1, problem.sk, band)
    if documents.q is not None:
        _numbers, spans = narrow_to_documents(documents.q, documents.batched, batch, 0, 0, offs_q, shape.stop_q,
                                              problem.sq, spans)
    start, shared_start, shared_stop, stop = spans
    is_hidden = (first_k >= stop) | (first_k + 2 * CELL <= start)
    if band.sink_tokens is not None:
        is_hidden &= first_k >= band.sink_tokens
    is_full = (first_k >= shared_start) & (first_k + 2 * CELL <= shared_stop)
    cells_q, cells_k = cell_q + tl.arange(0, 2), cell_k + tl.arange(0, 2)
    if is_hidden:
        states = tl.zeros((2, 2), tl.int32)
    elif is_full:
        if modifiers.mask.ptr is None and modifiers.mask_function.call is None:
            states = tl.full((2, 2), FULL, tl.int32)
        else:
            exist = (offs_q < shape.stop_q)[:, None] & (offs_k >= 0)[None, :]
            allowed = allowed_pairs(exist, offs_q[:, None], offs_k[None, :], batch, head, modifiers, shape, INT64,
                                    False)
            states = states_of_pairs(allowed, cells_q, shape)
    else:
        visible = visible_pairs(offs_q, offs_k, batch, head, modifiers, problem, shape, False, INT64)
        states = states_of_pairs(visible, cells_q, shape)
    places = ((tl.program_id(2) * shape.cells_q + cells_q) * shape.cells_k)[:, None] + cells_k[None, :]
    inside = (cells_q < shape.cells_q)[:, None] & (cells_k < shape.cells_k)[None, :]
    tl.store(states_ptr + places, states.to(tl.int8), mask=inside)


@triton.jit
def block_states(states_ptr, shape, tile, number, blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                 KEYS_FIRST: tl.constexpr):
    """Return some blocks of a tile, and their states. ROWS, COLUMNS: cells of a tile, and of a block.

    ``number``: of the block in the order in which the list is made. Keys come from the last one down, where the
    diagonal is, and queries from the first one up.
    """
    block = number if KEYS_FIRST else blocks - 1 - number
    any_visible = number < 0
    all_visible = number >= 0
    for row in tl.static_range(ROWS):
        for column in tl.static_range(COLUMNS):
            own, other = tile * ROWS + row, block * COLUMNS + column
            cell_q, cell_k = (other, own) if KEYS_FIRST else (own, other)
            exists = (cell_q < shape.cells_q) & (cell_k < shape.cells_k) & (number < blocks)
            state = tl.load(states_ptr + cell_q * shape.cells_k + cell_k, mask=exists, other=HIDDEN)
            if not KEYS_FIRST:
                state = tl.where(own < shape.cells_q, state, _NO_ROWS)
            any_visible |= (state == PARTIAL) | (state == FULL)
            all_visible &= state >= FULL
    return block, tl.where(any_visible & (number < blocks), tl.where(all_visible, FULL, PARTIAL), HIDDEN)


@triton.jit
def mask_lists_kernel(lists_ptr, states_ptr, shape, blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                      KEYS_FIRST: tl.constexpr, CHUNK: tl.constexpr):
    """List the blocks that a tile visits, partial ones first. Grid: (tiles, entries).

    lists: (entries, tiles, 2 + blocks), int32: how many are partial, how many there are, and their numbers. Of a tile
    that sees nothing block 0 is listed as partial, since the kernels visit one at least.
    """
    tile, entry = tl.program_id(0), tl.program_id(1)
    states_ptr += entry * shape.cells_q * shape.cells_k
    lists_ptr += (entry * tl.num_programs(0) + tile) * (2 + blocks)
    partial = tile * 0
    full = tile * 0
    for begin in range(0, blocks, CHUNK):
        numbers = begin + tl.arange(0, CHUNK)
        _block, state = block_states(states_ptr, shape, tile, numbers, blocks, ROWS, COLUMNS, KEYS_FIRST)
        partial += tl.sum((state == PARTIAL).to(tl.int32))
        full += tl.sum((state == FULL).to(tl.int32))
    sees_nothing = partial + full == 0
    tl.store(lists_ptr, tl.where(sees_nothing, 1, partial))
    tl.store(lists_ptr + 1, tl.where(sees_nothing, 1, partial + full))
    tl.store(lists_ptr + 2, 0, mask=sees_nothing)
    at_partial = lists_ptr + 2
    at_full = lists_ptr + 2 + partial
    for begin in range(0, blocks, CHUNK):
        numbers = begin + tl.arange(0, CHUNK)
        block, state = block_states(states_ptr, shape, tile, numbers, blocks, ROWS, COLUMNS, KEYS_FIRST)
        is_partial, is_full = (state == PARTIAL).to(tl.int32), (state == FULL).to(tl.int32)
        tl.store(at_partial + tl.cumsum(is_partial) - 1, block, mask=is_partial != 0)
        tl.store(at_full + tl.cumsum(is_full) - 1, block, mask=is_full != 0)
        at_partial += tl.sum(is_partial)
        at_full += tl.sum(is_full)


@triton.jit
def mask_bits_kernel(bits_ptr, lists_ptr, modifiers, problem, shape, blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                     KEYS_FIRST: tl.constexpr, INT64: tl.constexpr):
    """Write the bits of 64 rows' partial blocks. Grid: (rows of cells, slices of the blocks, entries).

    bits: (entries, rows of cells, blocks, COLUMNS, 128), int32, those of a block at its place in the list. A word is a
    thread's part of a cell, in the order in which a warpgroup's accumulator lies in registers: thread 32w + 4r + l has
    rows 16w + 8h + r and columns 8j + 2l + p, and bit 16h + 2j + p says whether that pair is visible. Behind the last
    query, rows see all keys: the maximum of a row that has seen none must not stay as it is (softmax.overflowed).
    """
    group, entry = tl.program_id(0), tl.program_id(2)
    batch, head = entry // shape.heads, entry % shape.heads
    tiles = tl.num_programs(0) // ROWS
    lists_ptr += (entry * tiles + group // ROWS) * (2 + blocks)
    bits_ptr += (entry * tl.num_programs(0) + group) * blocks * (COLUMNS * 128)
    place = tl.arange(0, 2)[:, None, None] * 16 + tl.arange(0, 8)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    threads = tl.arange(0, 4)[:, None, None, None] * 32 + tl.arange(0, 8)[None, :, None, None] * 4
    threads += tl.arange(0, COLUMNS)[None, None, :, None] * 128 + tl.arange(0, 4)[None, None, None, :]
    for step in range(tl.program_id(1), tl.load(lists_ptr), tl.num_programs(1)):
        own = group * CELL + tl.arange(0, CELL)
        other = tl.load(lists_ptr + 2 + step) * (COLUMNS * CELL) + tl.arange(0, COLUMNS * CELL)
        offs_q, offs_k = (other, own) if KEYS_FIRST else (own, other)
        offs_q, offs_k = shape.first_q + offs_q, from_first(offs_k, shape.first_k)
        visible = visible_pairs(offs_q, offs_k, batch, head, modifiers, problem, shape, KEYS_FIRST, INT64)
        if not KEYS_FIRST:
            visible |= (offs_q >= shape.stop_q)[:, None] & (offs_k < shape.stop_k)[None, :]
        pairs = visible.to(tl.int32).reshape(4, 2, 8, COLUMNS, 8, 4, 2)
        pairs = pairs << place[None, :, None, None, :, None, :]
        words = tl.sum(tl.sum(tl.sum(pairs, 6), 4), 1)
        tl.store(bits_ptr + step * (COLUMNS * 128) + threads, words)


class MaskPlanner:
    """Builds the lists and bits of a problem's mask for a kernel's tiles and blocks.

    Args:
        problem: the call; its mask may be of any kind, and no length is data.
        queries, keys: those that the kernel is given, from the first to the last.
        rows: cells of 64 that a tile has along its own side.
        columns: cells that a block of the other side has.
        keys_first: tiles are of keys and blocks of queries, as in the backward pass.

    Attributes:
        strides: in int32s, of lists between batch entries, heads and tiles, and of bits between batch entries, heads
            and 64 rows; 0 for what is shared.
        cells, lists, bits: the launches, in this order.
    """

    def __init__(self, problem: AttentionProblem, queries: Span, keys: Span, *, rows: int, columns: int,
                 keys_first: bool) -> None:
        self.problem = problem
        batches, heads = problem.distinct_masks
        cells_q, cells_k = (-(-len(span) // 64) for span in (queries, keys))
        own, other = (cells_k, cells_q) if keys_first else (cells_q, cells_k)
        tiles, blocks, entries = -(-own // rows), -(-other // columns), batches * heads
        groups = tiles * rows
        shape = PlanShape(queries.start, keys.start or None, queries.stop, keys.stop, cells_q, cells_k, heads)
        int64 = needs_int64(problem)
        self.states_shape = entries, cells_q, cells_k
        self.lists_shape = entries, tiles, 2 + blocks
        self.bits_shape = entries, groups, blocks * columns * 128
        lists, bits = tiles * (2 + blocks), groups * blocks * columns * 128
        self.strides = (lists * heads if batches > 1 else 0, lists if heads > 1 else 0, 2 + blocks,
                        bits * heads if batches > 1 else 0, bits if heads > 1 else 0, blocks * columns * 128)
        given = numbers(problem, 0)
        self.cells = Launch(mask_cells_kernel, (-(-cells_k // 2), -(-cells_q // 2), entries), (given, shape, int64),
                            num_warps=8)
        chunk = min(1024, max(16, 1 << (blocks - 1).bit_length()))
        self.lists = Launch(mask_lists_kernel, (tiles, entries), (shape, blocks, rows, columns, keys_first, chunk),
                            num_warps=4)
        self.bits = Launch(mask_bits_kernel, (groups, min(_SLICES, blocks), entries),
                           (given, shape, blocks, rows, columns, keys_first, int64), num_warps=4)

    def __call__(self, operands: Operands, allocate: Allocate) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue the kernels; return lists and bits, int32."""
        states = allocate(self.states_shape, _dense(self.states_shape), torch.int8)
        lists = allocate(self.lists_shape, _dense(self.lists_shape), torch.int32)
        bits = allocate(self.bits_shape, _dense(self.bits_shape), torch.int32)
        modifiers = modifiers_of(self.problem, operands)
        modifiers = Modifiers(mask=modifiers.mask, documents=modifiers.documents,
                              mask_function=modifiers.mask_function)
        self.cells(states, modifiers)
        self.lists(lists, states)
        self.bits(bits, lists, modifiers)
        return lists, bits


def _dense(shape: Sizes) -> Sizes:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
