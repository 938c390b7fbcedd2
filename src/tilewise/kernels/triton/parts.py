"""Combining parts of attention: out and lse of the lines whose keys were cut, one after another, by another kernel."""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tilewise.kernels.triton.decode import finished
from tilewise.kernels.triton.launch import Launch
from tilewise.kernels.triton.primitives import LN2, head_offset
from tilewise.problem import AttentionProblem

_LINES = 4  # of a program of four warps: 16 bytes a thread and part at 128 columns
_AT_ONCE = tl.constexpr(4)  # parts whose loads are under way together


@triton.jit
def _lse_of(records, part, parts, inside, RECORD: tl.constexpr):
    """Load lse of a part of some lines, to base 2; -inf of one that there is not."""
    return tl.load(records + part * RECORD + (RECORD - 8), mask=inside & (part < parts), other=float("-inf"))


@triton.jit(do_not_specialize=["first", "count", "sq", "hq", "parts"])
def combine_parts_kernel(parts_ptr, out_ptr, lse_ptr, sinks_ptr, stride_sinks, stride_ob, stride_oh,
                         stride_os, first, count, sq, hq, parts, DV: tl.constexpr, BLOCK_D: tl.constexpr,
                         RECORD: tl.constexpr, LINES: tl.constexpr, OVERLAPPED: tl.constexpr):
    """Combine the parts of ``count`` lines of lse from ``first`` on (eq. 11), in their order, and let the sink enter.

    Grid: (ceil(count / LINES),). parts: (count, parts, RECORD), out and at RECORD - 8 lse to base 2. A part that has
    seen no key has an lse of -inf, and need not have more.
    """
    if OVERLAPPED:
        gdc_wait()  # until the parts are there
    own = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = own < count
    line = first + own
    query = line % sq
    head = line // sq % hq
    offs_d = tl.arange(0, BLOCK_D)
    records = parts_ptr + own.to(tl.int64) * parts * RECORD
    top = tl.full([LINES], float("-inf"), tl.float32)
    row_sum = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, BLOCK_D], tl.float32)
    for begin in tl.range(0, parts, _AT_ONCE):
        new_top = top
        for i in tl.static_range(_AT_ONCE):
            new_top = tl.maximum(new_top, _lse_of(records, begin + i, parts, inside, RECORD))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp2(top - shift)
        row_sum *= decay
        acc *= decay[:, None]
        for i in tl.static_range(_AT_ONCE):
            lses = _lse_of(records, begin + i, parts, inside, RECORD)
            taken = (inside & (begin + i < parts))[:, None] & (offs_d < DV)[None, :]
            values = tl.load((records + (begin + i) * RECORD)[:, None] + offs_d[None, :], mask=taken, other=0.0)
            # A part without keys was not written. Asked after the load, which need not wait for lse then; a NaN stays.
            values = tl.where((lses != float("-inf"))[:, None], values, 0.0)
            weights = tl.exp2(lses - shift)
            row_sum += weights
            acc += weights[:, None] * values
        top = new_top
    lse, out = finished(top, row_sum, acc, sinks_ptr, stride_sinks, head, inside)
    tl.store(lse_ptr + line, lse * LN2, mask=inside)
    rows = out_ptr + head_offset(line // sq // hq, head, stride_ob, stride_oh) + query.to(tl.int64) * stride_os
    tl.store(rows[:, None] + offs_d[None, :], out.to(out_ptr.dtype.element_ty),
             mask=inside[:, None] & (offs_d < DV)[None, :])


def combine_parts_launch(problem: AttentionProblem, lines: range, shape: tuple[int, int, int], *,
                         overlapped: bool) -> Launch:
    """Bind the kernel: call the result with (parts, out, lse, sinks or None, their stride or None).

    Args:
        problem: the call.
        lines: of lse, those that were cut.
        shape: of the parts.
        overlapped: whether it is launched while the kernel in front still runs, and waits by itself.
    """
    scalars: tuple[Any, ...] = (
        *problem.out_strides[:3], lines.start, len(lines), problem.sq, problem.hq, shape[1], problem.dv,
        1 << (problem.dv - 1).bit_length(), shape[2], _LINES, overlapped)
    return Launch(combine_parts_kernel, -(-len(lines) // _LINES), scalars, num_warps=4, num_stages=1,
                  **({"launch_pdl": True} if overlapped else {}))
