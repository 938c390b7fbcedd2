"""What a warpgroup of the forward pass writes of its 64 rows: out and lse, or where keys are cut, a part of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.kernels.gluon.compat import tma_store, tma_store_wait
from tilewise.kernels.gluon.lengths import blank, comes_again, rows_of, store_some
from tilewise.kernels.gluon.pipeline import each_thread
from tilewise.kernels.gluon.products import rescale
from tilewise.kernels.gluon.softmax import add_sink
from tilewise.kernels.gluon.tiles import steps_of

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def store_columns(acc, place, left, out_desc, out_ptr, out_tiles, OWN: gl.constexpr, FIRST: gl.constexpr,
                  C: gl.constexpr):
    """Write some columns of out through the warpgroup's buffers, in the order of those, halving what is too wide.

    ``left``: rows to the end of a packed sequence; the copy engine would write past it.
    """
    if acc.shape[1] > C.OUT:
        HALF: gl.constexpr = acc.shape[1] // 2
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        low, high = acc.reshape([64, 2, HALF]).permute((0, 2, 1)).split()
        store_columns(gl.convert_layout(low, LAYOUT), place, left, out_desc, out_ptr, out_tiles, OWN, FIRST, C)
        store_columns(gl.convert_layout(high, LAYOUT), place, left, out_desc, out_ptr, out_tiles, OWN, FIRST + HALF, C)
    else:
        batch, head, row = place
        out_tile = out_tiles.index(OWN * C.OUT_SLOTS + FIRST // C.OUT % C.OUT_SLOTS)
        tma_store_wait(C.OUT_SLOTS - 1)
        out_tile.reshape([64, C.OUT]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        if C.PACKED:
            if left >= 64:
                tma_store(out_desc, [batch, head, row, FIRST], out_tile)
            else:
                store_some(out_tile, out_ptr, out_desc, place, left, FIRST, C.OUT)
        elif C.PACK > 1:
            tma_store(out_desc, [batch, head, row, 0, FIRST], out_tile)
        else:
            tma_store(out_desc, [batch, head, row, FIRST], out_tile)


@gluon.jit
def lines_of(tile, row, rows, stop, sq, heads, group, C: gl.constexpr):
    """Return where in lse the line of a head begins, or of each row's, which rows there are, and each row's head."""
    head = tile[1]
    batch = 0 if C.PACKED else tile[2]
    inside = row + rows // C.PACK < stop
    line = (batch * heads + head).to(gl.int64) * sq
    if C.PACK > 1:
        inside = inside & (rows % C.PACK < group)
        line = (line * group) + (rows % C.PACK) * sq
        head = head * group + gl.minimum(rows % C.PACK, group - 1)
    return line, inside, head


@gluon.constexpr_function
def record_of(widths):
    """Floats of a part of a line: its columns, and lse with what keeps them at multiples of 32 bytes."""
    return sum(widths) + 8


@gluon.jit
def store_piece(acc, records, inside, FIRST: gl.constexpr):
    """Write columns of the parts of 64 rows."""
    LAYOUT: gl.constexpr = acc.type.layout
    columns = FIRST + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    own = gl.convert_layout(records, gl.SliceLayout(1, LAYOUT))
    gl.store(own[:, None] + columns[None, :], acc, mask=gl.convert_layout(inside, gl.SliceLayout(1, LAYOUT))[:, None])


@gluon.jit
def write_part(acc, top, row_sum, weight, tile, row, band, heads, group, target, C: gl.constexpr):
    """Write what a part of the keys makes of 64 rows: out in float32, then lse to base 2; a line's parts in a row.

    The first part says of those without a step that they have seen nothing.
    """
    parts_ptr, shares = target
    parts, lead = shares
    part = tile[3]
    RECORD: gl.constexpr = record_of(C.DV)
    rows = gl.arange(0, 64, layout=row_sum.type.layout)
    line, inside, _head = lines_of(tile, row, rows, band[0], band[0], heads, group, C)
    records = parts_ptr + ((line + (row + rows // C.PACK)) * parts + part) * RECORD
    sum_or_one = gl.where(row_sum == 0.0, 1.0, row_sum)
    gl.store(records + (RECORD - 8), top + gl.log2(sum_or_one), mask=inside)
    nothing = gl.full([64], float("-inf"), gl.float32, layout=row_sum.type.layout)
    used = steps_of(tile[0], band, C)[3]
    if C.CUT == 2:
        used = gl.maximum(1, used - lead + 1)
    used = gl.minimum(parts, used)
    for unused in range(gl.where(part == 0, used, parts), parts):
        gl.store(records + (unused * RECORD + RECORD - 8), nothing, mask=inside)
    acc = rescale(acc, 1.0 / gl.where(weight == 0.0, 1.0, weight))
    for i in gl.static_range(len(C.DV)):
        store_piece(acc[i], records, inside, i * C.DV[0])


@gluon.jit
def await_results():
    """Wait until what this warpgroup has copied out has arrived in global memory."""
    each_thread("cp.async.bulk.wait_group 0; mov.b32 $0, $1;")


@gluon.jit
def write_whole(acc, top, row_sum, weight, tile, row, out_desc, out_tiles, results, sq, heads, group,
                OWN: gl.constexpr, C: gl.constexpr):
    """Write out and lse of 64 rows (eq. 6)."""
    head = tile[1]
    batch = 0 if C.PACKED else tile[2]
    out_ptr, lse_ptr, sinks_ptr, sinks_stride, _target = results
    begin, stop, length = rows_of(tile, sq, C)
    if C.STEADY:
        if comes_again(tile, C):
            await_results()  # two copies to one place arrive in any order
    place = (batch, head, begin + row)
    rows = gl.arange(0, 64, layout=row_sum.type.layout)
    line, inside, head = lines_of(tile, row, rows, stop, sq, heads, group, C)
    if sinks_ptr is not None:
        top, decay, of_sink = add_sink(top, sinks_ptr, sinks_stride, head)
        row_sum = row_sum * decay + of_sink
        weight = weight * decay + of_sink
    sum_or_one = gl.where(row_sum == 0.0, 1.0, row_sum)
    lse = (top + gl.log2(sum_or_one)) * LN2
    if C.LENGTHS:
        lse = gl.where(row + rows < length, lse, float("-inf"))
    gl.store(lse_ptr + line + (begin + row + rows // C.PACK), lse, mask=inside)
    share = 1.0 / gl.where(weight == 0.0, 1.0, weight)
    if sinks_ptr is not None:
        share = share * decay
    acc = rescale(acc, share)
    if C.LENGTHS:
        acc = blank(acc, length - row)
    if C.PACKED and C.OUT_SLOTS > 1:
        if stop - row < 64:
            tma_store_wait(0)  # what goes by other ways is not counted when a buffer is used again
    for i in gl.static_range(len(C.DV)):
        store_columns(acc[i], place, stop - row, out_desc, out_ptr, out_tiles, OWN, i * C.DV[0], C)


@gluon.jit
def write(acc, top, row_sum, weight, tile, row, out_desc, out_tiles, results, band, heads, group,
          OWN: gl.constexpr, C: gl.constexpr):
    """Write what there is to write of 64 rows: O divided by ``weight``; lse of ``top`` and ``row_sum``.

    Those before the first query are all 64 or none, and a copy to where they would be is an illegal instruction.
    """
    first = row if C.FROM_END else 0
    if first < 0:
        pass
    elif C.CUT == 1:
        write_part(acc, top, row_sum, weight, tile, row, band, heads, group, results[4], C)
    elif C.CUT == 2:
        if tile[3] >= 0:
            write_part(acc, top, row_sum, weight, tile, row, band, heads, group, results[4], C)
        else:
            write_whole(acc, top, row_sum, weight, tile, row, out_desc, out_tiles, results, band[0], heads, group,
                        OWN, C)
    else:
        write_whole(acc, top, row_sum, weight, tile, row, out_desc, out_tiles, results, band[0], heads, group, OWN, C)
