"""Which probabilities dropout keeps, as a warpgroup draws it whose rows are keys: 64 of them by a block of queries.

The bits are the same in every backend (maths.md, eq. 19). In transposed scores a thread holds keys j and j + 8, and
queries i and i + 8 for each: four scores that share a counter. So it calls Philox 8 times a block, takes 2 words of
each call, and keeps them, 16 registers, until there are probabilities; nothing passes between threads.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.hopper.philox import FACTORS, KEY_STEPS, ROUNDS, philox_round
from tilewise.kernels.hopper.pipeline import optimization_barrier
from tilewise.problem.options import DRAW_SPAN

_SPAN = gl.constexpr(DRAW_SPAN)
# A thread's counters, (keys, queries): of every 16 keys or queries the first 8. Its 32 scores are the same 8 places, at
# them and at what lies 8 behind, so that words need no other thread.
_COUNTERS = gl.constexpr(gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 8], [0, 16]], lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
    warp_bases=[[8, 0], [16, 0]], block_bases=[], shape=[32, 32]))


class Dropout(NamedTuple):
    """What a launch says of dropout. seed: its halves, in shared memory.

    threshold: the first of 2^16 random numbers that keeps a score. dv_scale: what dV is multiplied by. origin_q,
    origin_k: the positions of the first query and key.
    """

    seed: Any
    threshold: Any
    dv_scale: Any
    origin_q: Any
    origin_k: Any


class Draws(NamedTuple):
    """What the random numbers of a tile of keys are drawn by. low, high: the seed's halves.

    first_row: the number of the group's first query head in the batch. threshold: in the upper half of a word.
    """

    low: Any
    high: Any
    first_row: Any
    threshold: Any
    origin_q: Any
    origin_k: Any


@gluon.jit
def draw(low, high, row, first_query, first_key):
    """Return two words for each counter of 64 keys and queries, (32, 32): of query i, and of query i + 8.

    A word has the random numbers of keys j and j + 8. low, high: the seed; row: the head's number in the batch; both
    firsts are multiples of 16. What depends on row and key alone is computed anew in every block: keeping it, too,
    would spill.
    """
    row = optimization_barrier(row)
    first_key = optimization_barrier(first_key)
    numbers = gl.arange(0, 32, layout=gl.SliceLayout(1, _COUNTERS))
    is_odd = (numbers & 1 != 0)[:, None]
    c0 = (first_key // 4 + numbers // 8 * 4 + numbers % 8 // 2).to(gl.uint32)[:, None]
    c1 = (first_query // 2 + gl.arange(0, 32, layout=gl.SliceLayout(0, _COUNTERS))).to(gl.uint32)[None, :]
    c2 = row.to(gl.uint32)
    c3 = c2 & 0
    k0 = low.to(gl.uint32)
    k1 = high.to(gl.uint32)
    for _ in gl.static_range(ROUNDS - 1):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0 += KEY_STEPS[0]
        k1 += KEY_STEPS[1]
    # The last round makes two words at a time, and a thread's keys are all odd or all even.
    product = gl.where(is_odd, c0, c2).to(gl.uint64) * gl.where(is_odd, FACTORS[0], FACTORS[1]).to(gl.uint64)
    near = (product >> 32).to(gl.uint32) ^ gl.where(is_odd, c3, c1) ^ gl.where(is_odd, k1, k0)
    return near, product.to(gl.uint32)


@gluon.jit
def signed(probs, words, threshold):
    """Return the transposed probabilities, the dropped ones negative: the random numbers then need no register."""
    near, far = words
    both = gl.join(near, far)
    numbers = gl.join(both << 16, both)  # in the upper half; the lower one then decides nothing
    numbers = numbers.reshape([4, 8, 4, 8, 2, 2]).permute((0, 5, 1, 2, 4, 3)).reshape([64, 4 * _SPAN])
    kept = gl.convert_layout(numbers >= threshold, probs.type.layout, assert_trivial=True)
    return gl.where(kept, probs, -probs)


@gluon.jit
def kept_alone(probs, DTYPE: gl.constexpr):
    """Round signed probabilities, the dropped ones to 0, two at a time: no instruction beside that of rounding."""
    if DTYPE == gl.bfloat16:
        rounded = gl.inline_asm_elementwise("cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [probs], dtype=gl.bfloat16,
                                            is_pure=True, pack=2)
    else:
        rounded = gl.inline_asm_elementwise("cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,r,r", [probs], dtype=gl.float16,
                                            is_pure=True, pack=2)
    return rounded


@gluon.jit
def score_gradient(probs, dprobs, delta):
    """2 (1 - p) times P∘(R∘dP − delta), of signed probabilities and of delta times 2 (1 - p) (maths.md, eq. 20).

    2P where kept, else 0, is an addition: it runs beside what compares and selects, a maximum would not.
    """
    size = gl.abs(probs)
    return (probs + size) * dprobs - size * delta
