"""Rows that the tensor cores take off: lse from scores and delta from dP, in the Hopper backward (maths.md, section 6).

A thread of the backward kernel holds scores of 16 queries of every 64, and would read lse and delta of each from shared
memory, 32 numbers a step: a sixth of what passes there. Instead a query has a tail of 16 bfloat16 numbers, three that
add up to -lse / scale and three to -delta, and one product more, the first, picks them: S and dP begin there. Three
bfloat16 numbers hold what a float32 number does, and products with ones and sums in float32 are exact.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

TAIL = gl.constexpr(16)  # columns: the least that a product sums over
# -lse / scale of a query that sees nothing. Not -inf: 0 · inf is NaN.
_BLIND = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["sq", "heads", "steps"])
def hopper_tails_kernel(out_ptr, dout_ptr, lse_ptr, delta_ptr, tails_ptr, sums_ptr, stride_ob, stride_oh, stride_os,
                        stride_db, stride_dh, stride_ds, sq, heads, steps, scale, DV: tl.constexpr,
                        WIDTH: tl.constexpr, SUMS: tl.constexpr):
    """Write the tails of 64 queries, and zero SUMS numbers: of the sums for dq, or of their counters the step's own.

    Grid: (steps of a head · heads · batches,). lse: (b, heads, sq), float32, dense; tails: as many, each (16,),
    bfloat16. delta is read, as dense as lse, or where there is none computed (eq. 10) of out and dout, (b, heads, sq,
    dv) by strides. WIDTH: dv, or the next power of two.
    """
    number = tl.program_id(0)
    if SUMS > 0:
        tl.store(sums_ptr + number.to(tl.int64) * SUMS + tl.arange(0, SUMS), tl.zeros((SUMS,), tl.float32))
    line = number // steps
    rows = number % steps * 64 + tl.arange(0, 64)
    inside = rows < sq
    lines = line.to(tl.int64) * sq + rows
    lse = tl.load(lse_ptr + lines, mask=inside, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + lines, mask=inside, other=0.0)
    else:
        batch, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
        within = tl.arange(0, WIDTH)[None, :]
        places = rows.to(tl.int64)[:, None]
        there = inside[:, None] & (within < DV)
        out = tl.load(out_ptr + batch * stride_ob + head * stride_oh + places * stride_os + within, there, 0.0)
        dout = tl.load(dout_ptr + batch * stride_db + head * stride_dh + places * stride_ds + within, there, 0.0)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    columns = tl.arange(0, 16)[None, :]
    tails = tl.zeros((64, 16), tl.bfloat16)
    first = tl.where(lse == float("-inf"), _BLIND, -lse / scale)
    second = -delta
    for i in tl.static_range(3):
        tails = tl.where(columns == i, first.to(tl.bfloat16)[:, None], tails)
        tails = tl.where(columns == 3 + i, second.to(tl.bfloat16)[:, None], tails)
        first -= first.to(tl.bfloat16).to(tl.float32)
        second -= second.to(tl.bfloat16).to(tl.float32)
    tl.store(tails_ptr + lines[:, None] * 16 + columns, tails, mask=inside[:, None])


@gluon.jit
def make_picks():
    """Fill two left operands, by which products take -lse / scale out of tails, and -delta."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    picks = gl.allocate_shared_memory(gl.bfloat16, [2, 64, TAIL],
                                      gl.NVMMASharedLayout.get_default_for([64, TAIL], gl.bfloat16))
    columns = gl.arange(0, TAIL, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    columns += gl.full([64, TAIL], 0, gl.int32, layout=LAYOUT)
    for i in gl.static_range(2):
        picked = (columns >= 3 * i) & (columns < 3 * i + 3)
        picks.index(i).store(gl.where(picked, 1.0, 0.0).to(gl.bfloat16))
    return picks


@gluon.jit
def begin_with(rows, slot, WHICH: gl.constexpr, zero):
    """Issue the product that others of S (WHICH 0) or of dP (1) are added to. rows: picks, and tails of the slots."""
    picks, tails = rows
    tail = tails.index(slot).reshape([zero.shape[1], TAIL])
    return warpgroup_mma(picks.index(WHICH), tail.permute((1, 0)), zero, use_acc=False, is_async=True)
