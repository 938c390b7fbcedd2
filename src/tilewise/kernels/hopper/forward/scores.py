"""What changes scores in the Hopper forward kernel: a function, a bias, and ALiBi (maths.md, section 11)."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.kernels.hopper.alibi import as_pairs, places_of, slope_of, slope_times_distance, strided
from tilewise.kernels.hopper.mask_ranges import kv_block_start
from tilewise.kernels.hopper.pipeline import consumer_release, consumer_wait
from tilewise.kernels.hopper.score_functions import HeadPlace, as_tile, function_arguments, function_of_pairs
from tilewise.kernels.hopper.softmax import in_float32


class ScoreMod(NamedTuple):
    """What changes the scores of a work tile; () in the place of what a call has not.

    bias: a pointer to that of its head, or with C.BIAS_STAGES the Ring of its blocks. slope: its head's. diagonal: the
    key that query 0 has no distance to. place: with a function, a HeadPlace.
    """

    bias: Any
    slope: Any
    diagonal: Any
    place: Any


@gluon.jit
def score_mod_of_tile(tile, operands, bias_pipe, diagonal, function_tensors, first_pair, C: gl.constexpr):
    """Return what changes the scores of a tile."""
    bias = ()
    slope = ()
    place = ()
    if C.HAS_FUNCTION:
        place = HeadPlace(tile.batch, tile.head, function_tensors, first_pair)
    if C.BIAS_STAGES > 0:
        bias = bias_pipe
    elif C.HAS_BIAS:
        bias = operands.bias + (strided(tile.batch, operands.bias_b) + strided(tile.head, operands.bias_h))
    if C.HAS_ALIBI:
        slope = slope_of(operands.slopes, tile.batch, tile.head, operands.slopes_b, operands.slopes_h)
        if C.VARLEN:
            diagonal = tile.diagonal if C.BOTTOM_RIGHT else 0
    else:
        diagonal = ()
    return ScoreMod(bias, slope, diagonal, place)


@gluon.jit
def bias_of_step(step, view, MASKED: gl.constexpr, C: gl.constexpr):
    """With C.HAS_BIAS, but C.BIAS_STAGES, load the bias of a warpgroup's block of keys, in the order of ``as_pairs``.

    The nearest query stands for one that is not there; for a key that is not, where the block is MASKED, 0.
    """
    if C.HAS_BIAS and C.BIAS_STAGES == 0:
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
        rows, lanes, place = places_of(gl.full([64, C.BLOCK_N], 0, gl.int32, layout=SCORES))
        operands = view.operands
        first = kv_block_start(step, view.blocks, C)
        rows = gl.maximum(gl.minimum(view.row + rows, view.bounds.sq - 1), 0)
        pointers = view.score_mod.bias + strided(rows, operands.bias_q)
        if operands.bias_k is None:
            pointers = pointers + (first + lanes) + place
        else:
            pointers = pointers + strided(first + lanes + place, operands.bias_k)
        if MASKED:
            return gl.load(pointers, mask=place < view.bounds.sk - (first + lanes), other=0.0)
        else:
            return gl.load(pointers)
    else:
        return ()


@gluon.jit
def staged_bias(s, count, pipe, WG: gl.constexpr, C: gl.constexpr):
    """Read a warpgroup's bias of iteration ``count``, in the order of ``as_pairs``, and free its stage."""
    NC: gl.constexpr = C.CONSUMERS
    number = count * NC + WG
    consumer_wait(pipe.full, number, C.BIAS_STAGES * NC)
    tile = pipe.tiles.index(number % (C.BIAS_STAGES * NC)).reshape([64, C.BLOCK_N])
    bias = in_float32(tile.load(s.type.layout))
    fence_async_shared()  # TMA writes there again
    consumer_release(pipe.empty, number, C.BIAS_STAGES * NC)
    return as_pairs(bias)


@gluon.jit
def modify_scores(s, step, count, bias, view, scaling, WG: gl.constexpr, MASKED: gl.constexpr,
                  FUNCTION: gl.constexpr, C: gl.constexpr):
    """Return f(natural scores) + bias - slope·distance, as the call has them; else the scores as they are.

    count: the KV pipe's iteration that brought the block's keys. bias: what ``bias_of_step`` loaded. MASKED: keys of
    the block may not be there. FUNCTION: f, with C.HAS_FUNCTION.
    """
    if C.HAS_FUNCTION or C.HAS_BIAS or C.HAS_ALIBI:
        pairs = as_pairs(s) * scaling.to_natural
        if scaling.squash is not None:  # what ``squashed`` left out
            pairs += 0.5 * scaling.to_natural
        if C.HAS_FUNCTION:
            corner = (view.row, kv_block_start(step, view.blocks, C))
            place = view.score_mod.place
            arguments = function_arguments(s, corner, place, view.bounds, False, MASKED, C.INT64)
            pairs = function_of_pairs(pairs, arguments, place.tensors, FUNCTION)
        if C.BIAS_STAGES > 0:
            pairs = pairs + staged_bias(s, count, view.score_mod.bias, WG, C)
        elif C.HAS_BIAS:
            pairs = pairs + bias.to(gl.float32)
        if C.HAS_ALIBI:
            corner = view.row + view.score_mod.diagonal - kv_block_start(step, view.blocks, C)
            pairs = pairs - slope_times_distance(s, corner, view.score_mod.slope, False, C.SEES_AHEAD)
        s = as_tile(pairs, s)
    return s
