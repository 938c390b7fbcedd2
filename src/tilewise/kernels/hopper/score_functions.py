"""A score function of the user's in the Hopper kernels, and its derivative (maths.md, section 11).

It is written for Triton, and called as it is: what a kernel calls Gluon compiles as its own, with the layouts that
tiles have there. Only a tile that the function itself makes of nothing would have none; inlining.py finds that out.
Tiles are in the order of ``as_pairs``, in which positions are a thread's own first one and a number that the compiler
knows.

Function and derivative go from jit function to jit function as constants of their own, FUNCTION and DERIVATIVE: of a
tuple that holds one, Triton would make a tensor where it is assigned.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.hopper.alibi import places_of


class HeadPlace(NamedTuple):
    """What a score function is told of a tile's query head, beside positions.

    batch: its batch entry, of packed sequences its sequence. tensors: pointers to the function's. first_pair: a
    FirstPair.
    """

    batch: Any
    head: Any
    tensors: Any
    first_pair: Any


@gluon.jit
def function_arguments(scores, corner, place, bounds, KEYS_FIRST: gl.constexpr, CHECKED: gl.constexpr,
                       INT64: gl.constexpr):
    """Return batch, head and positions as the function takes them, which may read its tensors there.

    corner: the first query and key of the scores; KEYS_FIRST: keys are the rows, else queries are. For a query that is
    not there stands the nearest one, and where CHECKED also for a key. Batch and head have 64 bits, positions where
    INT64.
    """
    rows, lanes, place_in_row = places_of(scores)
    first, first_key = place.first_pair
    first_query = first + corner[0]
    keys = first_key + corner[1]
    if KEYS_FIRST:
        queries = gl.minimum((first_query + lanes) + place_in_row, first + (bounds.sq - 1))
        keys = keys + rows
    else:
        queries = gl.maximum(gl.minimum(first_query + rows, first + (bounds.sq - 1)), first)
        keys = (keys + lanes) + place_in_row
    if CHECKED:
        keys = gl.maximum(gl.minimum(keys, first_key + (bounds.sk - 1)), first_key)
    if INT64:
        queries = queries.to(gl.int64)
        keys = keys.to(gl.int64)
    return place.batch.to(gl.int64), place.head.to(gl.int64), queries, keys


@gluon.jit
def function_of_pairs(pairs, arguments, tensors, FUNCTION: gl.constexpr):
    """What becomes of natural scores, in the order of ``as_pairs``."""
    return FUNCTION(pairs, *arguments, *tensors).to(gl.float32)


@gluon.jit
def gradient_of_pairs(gradients, pairs, arguments, tensors, DERIVATIVE: gl.constexpr):
    """The gradient of the function's scores from that of its results (eq. 21), all in the order of ``as_pairs``."""
    return DERIVATIVE(gradients, pairs, *arguments, *tensors).to(gl.float32)


@gluon.jit
def as_tile(pairs, scores):
    """Bring pairs into the order of a tile of scores; costs nothing."""
    return gl.convert_layout(pairs.reshape(scores.shape), scores.type.layout)
