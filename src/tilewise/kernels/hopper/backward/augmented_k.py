"""lse, delta and ALiBi as extra columns of an MMA's K dim, in the Hopper backward (maths.md, sections 6 and 11).

A thread of the backward kernel holds scores of 16 queries of every 64, and would read lse and delta of each from shared
memory, 32 numbers a block: a sixth of what passes there. Instead a query has 16 extra bfloat16 columns, of which three
add up to -lse / scale and three to -delta, and one MMA more, the first, multiplies them by a selector matrix: S and dP
begin there. Three bfloat16 numbers hold what a float32 number does, and multiplying by one and adding in float32 are
exact.

Where no query sees a key ahead, ALiBi takes slope · (i + diagonal - j) off a score, which is linear in both. Query i
is row i' of its block of 64, which begins at query I, and key j is row j' of a warpgroup's 64 keys, which begin at key
J. Then i + diagonal - j = (i' - j') + (I + diagonal - J). The tensor cores subtract the part within the block: slope ·
i' beside lse, and three columns more hold slope / scale, which the selector matrix multiplies by j', exact in bfloat16.
The other part is one number for a block, and the scale's multiplication of each score becomes a fused multiply-add with
it. What cancels is slope · i' and slope · j', each below 64 · slope, whatever the lengths are: the exponent is off by
up to slope · 2^-15, if an MMA's sum keeps 22 bits only: for slopes up to 64 less than rounding P to bfloat16 errs by.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.kernels.hopper.softmax import LOG2E, LOST

EXTRA_COLUMNS = gl.constexpr(16)  # the least K dim of an MMA
SLOPE_COLUMNS = gl.constexpr(6)  # of three that hold a head's slope / scale, the first
# -lse / scale of a query that sees nothing, or whose lse is LOST. Not -inf: 0 · inf is NaN.
_NO_KEYS = tl.constexpr(-1e30)


class AugmentedK(NamedTuple):
    """Operands of the MMAs that S and dP begin with: the selector matrices, and each Q stage's extra columns."""

    selectors: Any
    columns: Any


class HeadSlopes(NamedTuple):
    """ALiBi's slopes (b, hq) and their strides in elements, 0 along a dim that is shared; or None's."""

    ptr: Any
    stride_b: Any = None
    stride_h: Any = None


@triton.jit(do_not_specialize=["sq", "heads", "blocks"])
def hopper_augmented_k_kernel(out, dout, lse_ptr, delta_ptr, slopes, columns_ptr, accum_ptr, sq, heads, blocks, scale,
                              DV: tl.constexpr, WIDTH: tl.constexpr, ZEROS: tl.constexpr):
    """Write the extra columns of 64 queries, and ZEROS zeros: to the dQ accumulator, or to the block's counter.

    Grid: (blocks of a head · heads · batches,). lse: (b, heads, sq), float32, dense; columns: (b, heads, sq, 16),
    bfloat16, dense. delta is read, as dense as lse, or where it is None computed (eq. 10) of out and dout, (b, heads,
    sq, dv), each a StridedRows. WIDTH: dv, or the next power of two.

    slopes: a HeadSlopes. With slopes, columns have 64 · blocks queries a head. Those past the last one see nothing: the
    number that the main kernel adds for a block could make their probabilities infinite, and inf · 0 is NaN.
    """
    HAS_ALIBI: tl.constexpr = slopes.ptr is not None
    number = tl.program_id(0)
    if ZEROS > 0:
        tl.store(accum_ptr + number.to(tl.int64) * ZEROS + tl.arange(0, ZEROS), tl.zeros((ZEROS,), tl.float32))
    head_row = number // blocks
    rows = number % blocks * 64 + tl.arange(0, 64)
    inside = rows < sq
    lse_rows = head_row.to(tl.int64) * sq + rows
    lse = tl.load(lse_ptr + lse_rows, mask=inside, other=float("-inf") if HAS_ALIBI else 0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + lse_rows, mask=inside, other=0.0)
    else:
        batch, head = (head_row // heads).to(tl.int64), (head_row % heads).to(tl.int64)
        within = tl.arange(0, WIDTH)[None, :]
        places = rows.to(tl.int64)[:, None]
        exists = inside[:, None] & (within < DV)
        left = tl.load(out.ptr + batch * out.stride_b + head * out.stride_h + places * out.stride_s + within, exists,
                       0.0)
        right = tl.load(dout.ptr + batch * dout.stride_b + head * dout.stride_h + places * dout.stride_s + within,
                        exists, 0.0)
        delta = tl.sum(left.to(tl.float32) * right.to(tl.float32), 1)
    numbers = tl.arange(0, 16)[None, :]
    columns = tl.zeros((64, 16), tl.bfloat16)
    has_no_probs = tl.abs(lse) * LOG2E >= LOST
    if HAS_ALIBI:
        batch, head = (head_row // heads).to(tl.int64), (head_row % heads).to(tl.int64)
        slope = tl.load(slopes.ptr + batch * slopes.stride_b + head * slopes.stride_h).to(tl.float32)
        first = tl.where(has_no_probs, _NO_KEYS, -(lse + slope * tl.arange(0, 64)) / scale)
        third = tl.zeros((64,), tl.float32) + slope / scale
        for i in tl.static_range(3):
            columns = tl.where(numbers == SLOPE_COLUMNS + i, third.to(tl.bfloat16)[:, None], columns)
            third -= third.to(tl.bfloat16).to(tl.float32)
    else:
        first = tl.where(has_no_probs, _NO_KEYS, -lse / scale)
    second = -delta
    for i in tl.static_range(3):
        columns = tl.where(numbers == i, first.to(tl.bfloat16)[:, None], columns)
        columns = tl.where(numbers == 3 + i, second.to(tl.bfloat16)[:, None], columns)
        first -= first.to(tl.bfloat16).to(tl.float32)
        second -= second.to(tl.bfloat16).to(tl.float32)
    if HAS_ALIBI:
        tl.store(columns_ptr + (number.to(tl.int64) * 64 + tl.arange(0, 64))[:, None] * 16 + numbers, columns)
    else:
        tl.store(columns_ptr + lse_rows[:, None] * 16 + numbers, columns, mask=inside[:, None])


@gluon.jit
def make_selectors(HAS_ALIBI: gl.constexpr):
    """Fill two left operands: MMAs with them take -lse / scale out of the extra columns, and -delta.

    With HAS_ALIBI the first one multiplies slope / scale by each key's row.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    selectors = gl.allocate_shared_memory(gl.bfloat16, [2, 64, EXTRA_COLUMNS],
                                          gl.NVMMASharedLayout.get_default_for([64, EXTRA_COLUMNS], gl.bfloat16))
    columns = gl.arange(0, EXTRA_COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    columns += gl.full([64, EXTRA_COLUMNS], 0, gl.int32, layout=LAYOUT)
    for i in gl.static_range(2):
        selected = (columns >= 3 * i) & (columns < 3 * i + 3)
        values = gl.where(selected, 1.0, 0.0)
        if HAS_ALIBI and i == 0:
            rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))[:, None].to(gl.float32)
            values = gl.where((columns >= SLOPE_COLUMNS) & (columns < SLOPE_COLUMNS + 3), rows, values)
        selectors.index(i).store(values.to(gl.bfloat16))
    return selectors


@gluon.jit
def slope_times_offset(slope, first_query, view):
    """What ALiBi adds to all scores of a block: the slope times how far its first key is ahead of its first query.

    With a slope times log2(e), to base 2. It is less than 0 where the key is behind, and the slope is not negative.
    """
    return slope * (view.key - first_query - view.diagonal).to(gl.float32)


@gluon.jit
def issue_augmented(augmented, stage, OPERAND: gl.constexpr, zero):
    """Issue the MMA that S (OPERAND 0: less lse / scale) or dP (1: less delta) begins with, of a Q stage's queries."""
    columns = augmented.columns.index(stage).reshape([zero.shape[1], EXTRA_COLUMNS])
    return warpgroup_mma(augmented.selectors.index(OPERAND), columns.permute((1, 0)), zero, use_acc=False,
                         is_async=True)
