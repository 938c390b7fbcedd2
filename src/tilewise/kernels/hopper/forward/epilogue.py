"""Epilogue of the forward pass: a warpgroup writes out and lse of its 64 rows, or with split-KV a partial result."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.kernels.hopper.compat import tma_store, tma_store_wait
from tilewise.kernels.hopper.mask_ranges import kv_blocks_of
from tilewise.kernels.hopper.pipeline import per_thread_asm
from tilewise.kernels.hopper.products import rescale
from tilewise.kernels.hopper.softmax import add_sink
from tilewise.kernels.hopper.varlen import blank, rows_of, store_some

LN2 = gl.constexpr(0.6931471805599453)


class Outputs(NamedTuple):
    """Where results go. out_desc: of out; out_ptr: where copies by TMA would write past a packed sequence, else None.

    sinks_ptr, sinks_stride: the sinks, which enter the softmax here, or None. partial_ptr: with split-KV, where the
    partial results lie, each in ``floats_per_partial`` floats, a row's splits one behind the other. max_ptr: where
    the largest score of each row goes, or None.
    """

    out_desc: Any
    out_ptr: Any
    lse_ptr: Any
    sinks_ptr: Any
    sinks_stride: Any
    partial_ptr: Any
    max_ptr: Any


class Rows(NamedTuple):
    """What a warpgroup has computed of 64 rows: O is divided by ``divisor``, and lse is ln(2^row_max * row_sum)."""

    acc: Any
    row_max: Any
    row_sum: Any
    divisor: Any


@gluon.jit
def copy_out(out_desc, coord, out_tile, FIRST: gl.constexpr, C: gl.constexpr):
    """Copy staged columns of 64 rows to out, by TMA."""
    batch, head, row = coord
    if C.PACK_GQA > 1:
        tma_store(out_desc, [batch, head, row, 0, FIRST], out_tile)
    else:
        tma_store(out_desc, [batch, head, row, FIRST], out_tile)


@gluon.jit
def store_columns(acc, coord, left, out_desc, out_ptr, out_tiles, WG: gl.constexpr, FIRST: gl.constexpr,
                  C: gl.constexpr):
    """Write some columns of out through the warpgroup's buffers, in the order of those, halving what is too wide.

    ``left``: rows of the tile to the end of a packed sequence; TMA would write past it.
    """
    if acc.shape[1] > C.OUT:
        HALF: gl.constexpr = acc.shape[1] // 2
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        low, high = acc.reshape([64, 2, HALF]).permute((0, 2, 1)).split()
        store_columns(gl.convert_layout(low, LAYOUT), coord, left, out_desc, out_ptr, out_tiles, WG, FIRST, C)
        store_columns(gl.convert_layout(high, LAYOUT), coord, left, out_desc, out_ptr, out_tiles, WG, FIRST + HALF, C)
    else:
        out_tile = out_tiles.index(WG * C.OUT_SLOTS + FIRST // C.OUT % C.OUT_SLOTS)
        tma_store_wait(C.OUT_SLOTS - 1)
        out_tile.reshape([64, C.OUT]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        if C.HAS_CU_SEQLENS:
            if left >= 64:
                copy_out(out_desc, coord, out_tile, FIRST, C)
            else:
                store_some(out_tile, out_ptr, out_desc, coord, left, FIRST, C.OUT)
        else:
            copy_out(out_desc, coord, out_tile, FIRST, C)


@gluon.jit
def lse_rows_of(tile, row, rows, num_rows, sq, heads, group, C: gl.constexpr):
    """Return where a head's rows of lse begin (with C.PACK_GQA each row's), which exist, and each row's head."""
    head = tile.head
    batch = 0 if C.HAS_CU_SEQLENS else tile.batch
    inside = row + rows // C.PACK_GQA < num_rows
    lse_row = (batch * heads + head).to(gl.int64) * sq
    if C.PACK_GQA > 1:
        inside = inside & (rows % C.PACK_GQA < group)
        lse_row = lse_row * group + (rows % C.PACK_GQA).to(gl.int64) * sq
        head = head * group + gl.minimum(rows % C.PACK_GQA, group - 1)
    return lse_row, inside, head


@gluon.constexpr_function
def floats_per_partial(widths):
    """Return the floats of a row's partial result: its columns, maximum and sum, padded to a multiple of 32 bytes."""
    return sum(widths) + 8


@gluon.jit
def store_partial_columns(acc, partials, inside, FIRST: gl.constexpr):
    """Write columns of the partial results of 64 rows."""
    LAYOUT: gl.constexpr = acc.type.layout
    columns = FIRST + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    own = gl.convert_layout(partials, gl.SliceLayout(1, LAYOUT))
    gl.store(own[:, None] + columns[None, :], acc, mask=gl.convert_layout(inside, gl.SliceLayout(1, LAYOUT))[:, None])


@gluon.jit
def write_partial(result, tile, row, args, C: gl.constexpr):
    """Write the partial result of a split in float32: out, the rows' maxima and their sums (triton/combine.py).

    The first split marks the partial results of splits without a block as empty, by a maximum of -inf.
    """
    num_splits = args.splits.num_splits
    FLOATS: gl.constexpr = floats_per_partial(C.DV)
    rows = gl.arange(0, 64, layout=result.row_sum.type.layout)
    sq = args.bounds.sq
    lse_row, inside, _head = lse_rows_of(tile, row, rows, sq, sq, args.grid.heads, args.group, C)
    partials = args.outputs.partial_ptr + ((lse_row + (row + rows // C.PACK_GQA)) * num_splits + tile.split) * FLOATS
    gl.store(partials + (FLOATS - 8), result.row_max, mask=inside)
    gl.store(partials + (FLOATS - 7), result.row_sum, mask=inside)
    empty = gl.full([64], float("-inf"), gl.float32, layout=result.row_sum.type.layout)
    used = gl.minimum(num_splits, kv_blocks_of(tile.first, args.bounds, C).count)
    for unused in range(gl.where(tile.split == 0, used, num_splits), num_splits):
        gl.store(partials + (unused * FLOATS + FLOATS - 8), empty, mask=inside)
    acc = rescale(result.acc, 1.0 / gl.where(result.divisor == 0.0, 1.0, result.divisor))
    for i in gl.static_range(len(C.DV)):
        store_partial_columns(acc[i], partials, inside, i * C.DV[0])


@gluon.jit
def await_results():
    """Wait until what this warpgroup has copied out is in global memory, and not only read from shared memory."""
    per_thread_asm("cp.async.bulk.wait_group 0; mov.b32 $0, $1;")


@gluon.jit
def write_tile(result, tile, row, args, out_tiles, WG: gl.constexpr, C: gl.constexpr):
    """Write out and lse of 64 rows (eq. 6)."""
    out_desc, out_ptr, lse_ptr, sinks_ptr, sinks_stride, _partial_ptr, max_ptr = args.outputs
    acc, row_max, row_sum, divisor = result
    batch = 0 if C.HAS_CU_SEQLENS else tile.batch
    row_start, num_rows, length = rows_of(tile, args.bounds.sq, C)
    if C.FROZEN_MAX:
        if tile.recompute != 0:
            await_results()  # two copies to one place arrive in any order
    coord = (batch, tile.head, row_start + row)
    rows = gl.arange(0, 64, layout=row_sum.type.layout)
    lse_row, inside, head = lse_rows_of(tile, row, rows, num_rows, args.bounds.sq, args.grid.heads, args.group, C)
    if max_ptr is not None:  # before the sink, which is no score
        largest = row_max * LN2
        if C.VARLEN:
            largest = gl.where(row + rows // C.PACK_GQA < length, largest, float("-inf"))
        gl.store(max_ptr + lse_row + (row_start + row + rows // C.PACK_GQA), largest, mask=inside)
    if sinks_ptr is not None:
        row_max, decay, of_sink = add_sink(row_max, sinks_ptr, sinks_stride, head)
        row_sum = row_sum * decay + of_sink
        divisor = divisor * decay + of_sink
    sum_or_one = gl.where(row_sum == 0.0, 1.0, row_sum)
    lse = (row_max + gl.log2(sum_or_one)) * LN2
    if C.VARLEN:
        lse = gl.where(row + rows // C.PACK_GQA < length, lse, float("-inf"))
    gl.store(lse_ptr + lse_row + (row_start + row + rows // C.PACK_GQA), lse, mask=inside)
    normalizer = 1.0 / gl.where(divisor == 0.0, 1.0, divisor)
    if sinks_ptr is not None:
        normalizer = normalizer * decay
    if C.HAS_DROPOUT:
        normalizer = normalizer * args.dropout.dv_scale
    acc = rescale(acc, normalizer)
    if C.VARLEN:
        acc = blank(acc, gl.maximum(gl.minimum(length - row, 64), 0) * C.PACK_GQA)
    left = gl.minimum(num_rows - row, 64) * C.PACK_GQA
    if C.HAS_CU_SEQLENS and C.OUT_SLOTS > 1:
        if left < 64:
            tma_store_wait(0)  # plain stores are not counted when a staging buffer is used again
    for i in gl.static_range(len(C.DV)):
        store_columns(acc[i], coord, left, out_desc, out_ptr, out_tiles, WG, i * C.DV[0], C)


@gluon.jit
def write(result, tile, row, args, out_tiles, WG: gl.constexpr, C: gl.constexpr):
    """Write what the warpgroup has computed of its 64 rows of a tile, from ``row`` on.

    Rows before the first query are all 64 or none, and a copy to where they would be is an illegal instruction.
    """
    first = row if C.TILES_FROM_END else 0
    if first < 0:
        pass
    elif C.SPLIT_KV == 1:
        write_partial(result, tile, row, args, C)
    elif C.SPLIT_KV == 2:
        if tile.split >= 0:
            write_partial(result, tile, row, args, C)
        else:
            write_tile(result, tile, row, args, out_tiles, WG, C)
    else:
        write_tile(result, tile, row, args, out_tiles, WG, C)
