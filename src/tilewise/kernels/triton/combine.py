"""Split-KV's second kernel: combines the partial results of rows whose keys were split (maths.md, eq. 11)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tilewise.kernels.triton.decode import finished
from tilewise.kernels.triton.launch import Launch
from tilewise.kernels.triton.primitives import LN2, head_offset
from tilewise.problem import AttentionProblem

_ROWS = 4  # of a CTA of four warps: 16 bytes a thread and split at 128 columns
_AT_ONCE = tl.constexpr(4)  # splits whose loads are in flight together


class SplitNumbers(NamedTuple):
    """The numbers of a call, for which the kernel is not specialised: ``count`` rows of lse from ``first`` on, ..."""

    first: int
    count: int
    sq: int
    hq: int
    num_splits: int


@triton.jit
def _load_max(partials, split, num_splits, inside, FLOATS: tl.constexpr):
    """Load the maximum of a split of some rows, to base 2; -inf past the last split."""
    return tl.load(partials + split * FLOATS + (FLOATS - 8), mask=inside & (split < num_splits), other=float("-inf"))


@triton.jit
def combine_splits_kernel(partial_ptr, out, lse_ptr, sinks_ptr, stride_sinks, rows, DV: tl.constexpr,
                          BLOCK_D: tl.constexpr, FLOATS: tl.constexpr, ROWS: tl.constexpr, OVERLAPPED: tl.constexpr):
    """Combine the splits of ``count`` rows of lse from ``first`` on, in their order, and let the sink enter.

    Grid: (ceil(count / ROWS),). rows: SplitNumbers. partial: (count, num_splits, FLOATS), float32: out of the
    split's keys; from FLOATS - 8 on the maximum of the scores, to base 2, and the sum of 2^(score - maximum). They stay
    apart: a maximum far from 0 has no bits left for the logarithm of a sum. A split without a visible key has a maximum
    of -inf, and nothing else of it is read.
    """
    if OVERLAPPED:
        gdc_wait()  # until the partial results are there
    sq, hq, num_splits = rows.sq, rows.hq, rows.num_splits
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = own < rows.count
    row = rows.first + own
    query = row % sq
    head = row // sq % hq
    offs_d = tl.arange(0, BLOCK_D)
    partials = partial_ptr + own.to(tl.int64) * num_splits * FLOATS
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for begin in tl.range(0, num_splits, _AT_ONCE):
        new_max = row_max
        for i in tl.static_range(_AT_ONCE):
            new_max = tl.maximum(new_max, _load_max(partials, begin + i, num_splits, inside, FLOATS))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(row_max - shift)
        row_sum *= decay
        acc *= decay[:, None]
        for i in tl.static_range(_AT_ONCE):
            own_max = _load_max(partials, begin + i, num_splits, inside, FLOATS)
            exists = inside & (begin + i < num_splits)
            at = partials + (begin + i) * FLOATS
            own_sum = tl.load(at + (FLOATS - 7), mask=exists, other=0.0)
            own_out = tl.load(at[:, None] + offs_d[None, :], mask=exists[:, None] & (offs_d < DV)[None, :], other=0.0)
            # A split without keys was not written. Asked after the loads, which need not wait for the maximum then; a
            # NaN stays.
            own_sum = tl.where(own_max != float("-inf"), own_sum, 0.0)
            own_out = tl.where((own_max != float("-inf"))[:, None], own_out, 0.0)
            weight = tl.exp2(own_max - shift) * own_sum
            row_sum += weight
            acc += weight[:, None] * own_out
        row_max = new_max
    lse, acc = finished(row_max, row_sum, acc, sinks_ptr, stride_sinks, head, inside)
    tl.store(lse_ptr + row, lse * LN2, mask=inside)
    offset = head_offset(row // sq // hq, head, out.stride_b, out.stride_h)
    out_rows = out.ptr + offset + query.to(tl.int64) * out.stride_s
    tl.store(out_rows[:, None] + offs_d[None, :], acc.to(out.ptr.dtype.element_ty),
             mask=inside[:, None] & (offs_d < DV)[None, :])


def combine_splits_launch(problem: AttentionProblem, rows: range, shape: tuple[int, int, int], *,
                          overlapped: bool) -> Launch:
    """Bind the kernel: call the result with (partial, out, lse, sinks or None, their stride or None).

    Args:
        problem: the call.
        rows: of lse, those whose keys were split.
        shape: of the partial results: (rows, splits, floats of each).
        overlapped: whether it is launched while the kernel in front still runs, and waits by itself.
    """
    scalars: tuple[Any, ...] = (
        SplitNumbers(rows.start, len(rows), problem.sq, problem.hq, shape[1]), problem.dv,
        1 << (problem.dv - 1).bit_length(), shape[2], _ROWS, overlapped)
    return Launch(combine_splits_kernel, -(-len(rows) // _ROWS), scalars, (None, problem.out_strides[:3]),
                  num_warps=4, num_stages=1,
                  **({"launch_pdl": True} if overlapped else {}))
