"""Score modifiers inside a kernel, and their derivatives: one formula a function (maths.md, section 11).

``modifiers`` is a named tuple of the host (arguments.py): a field that a call does not use is None, which Triton knows
at compile time, so that what is not used costs nothing. Scores are in base 2 here, as everywhere in the kernels:
softcap, bias and slopes are multiplied by log2 e on their way in.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.primitives import LN2, LOG2E
from tilewise.problem.options import DRAW_SPAN

SPAN = tl.constexpr(DRAW_SPAN)
ROUNDS = tl.constexpr(7)  # of Philox4x32; Salmon et al., 2011, table 2: passes BigCrush


@triton.jit
def hyperbolic_tangent(x, EXACT: tl.constexpr):
    """tanh(x) = sign(x)·(1 − 2e/(1 + e)), e = exp(−2|x|); EXACT keeps float32's relative error near 0 too.

    Far from 0 what the division and e err by is small beside 1. Near 0 the terms cancel, and the series to x⁹ takes
    over (its next term is 1e-8 of x at 1/4).
    """
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = 1.0 - (e + e) / (1.0 + e)
    tanh = tl.where(x < 0.0, -size, size)
    if EXACT:
        square = x * x
        series = x + x * square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
        tanh = tl.where(tl.abs(x) < 0.25, series, tanh)
    return tanh


@triton.jit
def operand_offset(positions, stride, INT64: tl.constexpr):
    """Offsets along one dim of an operand, whose unit stride is None."""
    if INT64:
        positions = positions.to(tl.int64)
    if stride is not None:
        positions = positions * stride
    return positions


@triton.jit
def load_operand(operand, block, offs_q, offs_k, INT64: tl.constexpr, CHECKED: tl.constexpr):
    """Load an operand's elements for the tile's pairs; positions broadcast to the tile, strides may be 0.

    CHECKED: 0 is read outside. Else all keys of the tile are inside and the last query stands for those that are not:
    without a mask along the keys a thread loads 16 bytes at once, with one an element at a time.
    """
    rows = offs_q if CHECKED else tl.minimum(offs_q, block.stop_q - 1)
    ptrs = operand.ptr + operand_offset(block.sequence, operand.stride_b, True)
    ptrs += operand_offset(block.head, operand.stride_h, True)
    ptrs += operand_offset(rows, operand.stride_q, INT64) + operand_offset(offs_k, operand.stride_k, INT64)
    if CHECKED:
        values = tl.load(ptrs, mask=(offs_q < block.stop_q) & (offs_k < block.stop_k), other=0)
    else:
        values = tl.load(ptrs)
    return values


@triton.jit
def distance(offs_q, offs_k, modifiers, band):
    """|i + offset − j|: what an ALiBi slope is multiplied by; float32 holds positions to 2^24 exactly."""
    if band.shift is None:
        on_key = offs_q + modifiers.alibi.offset
    else:
        on_key = offs_q + band.shift
    return tl.abs(on_key.to(tl.float32) - offs_k.to(tl.float32))


@triton.jit
def modify_scores(products, block, offs_q, offs_k, modifiers, band, scale_log2, bias, EXACT: tl.constexpr,
                  INT64: tl.constexpr, CHECKED: tl.constexpr):
    """Return the tile's scores in base 2, f(c·tanh(scale·q·k / c)) + bias − slope·distance, the tanh, and f's argument.

    The latter is in natural units, as the user's function has it. What is added is multiplied by name in one
    instruction: a compiler that may choose which of two products to round makes one choice in the forward pass and
    another in the backward pass, and the P of the two differ by what rounding does to scores of 1000.
    """
    scores = products * scale_log2
    tanh = scores
    if modifiers.softcap is not None:
        cap = modifiers.softcap * LOG2E
        tanh = hyperbolic_tangent(scores * (1.0 / cap), EXACT or modifiers.near_0 is not None)
        scores = tanh * cap
    capped = scores
    if modifiers.score_function.call is not None:
        capped = scores * LN2
        sequence, member, q_idx, k_idx = function_arguments(block, offs_q, offs_k, INT64, CHECKED)
        scores = modifiers.score_function.call(capped, sequence, member, q_idx, k_idx,
                                               *modifiers.score_function.tensors)
        scores = scores.to(tl.float32) * LOG2E
    if modifiers.bias.ptr is not None:
        if bias is None:
            bias = load_operand(modifiers.bias, block, offs_q, offs_k, INT64, CHECKED)
        scores = tl.fma(bias.to(tl.float32), LOG2E, scores)
    if modifiers.alibi.ptr is not None:
        slope = tl.load(modifiers.alibi.ptr + operand_offset(block.sequence, modifiers.alibi.stride_b, True)
                        + operand_offset(block.head, modifiers.alibi.stride_h, True))
        scores = tl.fma(distance(offs_q, offs_k, modifiers, band), slope * -LOG2E, scores)
    return scores, tanh, capped


@triton.jit
def function_arguments(block, offs_q, offs_k, INT64: tl.constexpr, CHECKED: tl.constexpr):
    """Return batch, head and positions as a user's function takes them, which may read its tensors there.

    The last position stands for those that are outside; as in :func:`load_operand`, only queries may be where not
    CHECKED. Batch and head are 64 bits, which as scalars cost next to nothing; positions are where the host found that
    their products may pass 2^31 (INT64): a tile of 64 bits costs registers.
    """
    offs_q = tl.maximum(tl.minimum(offs_q, block.stop_q - 1), 0)
    if CHECKED:
        offs_k = tl.maximum(tl.minimum(offs_k, block.stop_k - 1), 0)
    if INT64:
        offs_q = offs_q.to(tl.int64)
        offs_k = offs_k.to(tl.int64)
    return block.sequence.to(tl.int64), block.head.to(tl.int64), offs_q, offs_k


@triton.jit
def score_positions(block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Return the query and key positions of a block of scores, which broadcast to it."""
    offs_m = block.first_query + tl.arange(0, BLOCK_M)
    offs_n = block.first_key + tl.arange(0, BLOCK_N)
    offs_q = offs_m[None, :] if KEYS_FIRST else offs_m[:, None]
    offs_k = offs_n[:, None] if KEYS_FIRST else offs_n[None, :]
    return offs_q, offs_k


@triton.jit
def dropout_keeps(dropout, block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Which pairs dropout keeps (maths.md, eq. 19): [BLOCK_M, BLOCK_N], or [BLOCK_N, BLOCK_M] where KEYS_FIRST.

    A property of the pair alone, whatever block it is in; the block's first query and key are multiples of SPAN. Every
    pair needs the words of its counter, and a thread computes once those that its pairs have in common: counters are
    repeated, not computed from positions, so that the compiler sees which are equal. On NVIDIA's tensor cores bit 3 of
    a query and of a key tell registers of a thread apart, and so does bit 0 of the key (of the query where KEYS_FIRST).
    So eight pairs share a call there (four where KEYS_FIRST), and nothing moves between threads.
    """
    query = tl.arange(0, BLOCK_M // 2).reshape(BLOCK_M // SPAN, 1, 8)
    query = block.first_query // 2 + tl.broadcast_to(query, (BLOCK_M // SPAN, 2, 8)).reshape(BLOCK_M)
    key = tl.arange(0, BLOCK_N // 4).reshape(BLOCK_N // SPAN, 1, 4, 1)
    key = block.first_key // 4 + tl.broadcast_to(key, (BLOCK_N // SPAN, 2, 4, 2)).reshape(BLOCK_N)
    if dropout.origin_q is not None:
        query += tl.full([], dropout.origin_q, tl.float32).to(tl.int32)
    if dropout.origin_k is not None:
        key += tl.full([], dropout.origin_k, tl.float32).to(tl.int32)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if KEYS_FIRST:
        query, key = tl.broadcast(query[None, :], key[:, None])
        m, n = tl.broadcast(m[None, :], n[:, None])
    else:
        query, key = tl.broadcast(query[:, None], key[None, :])
        m, n = tl.broadcast(m[:, None], n[None, :])
    w0, w1, w2, w3 = philox(tl.load(dropout.ptr), key, query, block.row)
    is_odd = n & 1 != 0
    words = tl.where(m & 8 != 0, tl.where(is_odd, w3, w1), tl.where(is_odd, w2, w0))
    draws = tl.where(n & 8 != 0, words, words << 16)  # in the upper half; the lower one then decides nothing
    return draws >= tl.full([], dropout.threshold, tl.float32).to(tl.uint32) << 16


@triton.jit
def philox(seed, c0, c1, c2):
    """Return the four words of Philox4x32 for the counter (c0, c1, c2, 0), c2 a scalar.

    As tl.philox, but for its products: one of 64 bits is one instruction, its two halves are two (sm_90, d 128: 541
    instructions a step of forward, not 590).
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1, c2 = c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32)
    c3 = tl.full([], 0, tl.uint32)
    for _ in tl.static_range(ROUNDS):
        from_a, from_c = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (from_c >> 32).to(tl.uint32) ^ c1 ^ k0, from_c.to(tl.uint32)
        c2, c3 = (from_a >> 32).to(tl.uint32) ^ c3 ^ k1, from_a.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def modify_tile(scores, visible, block, modifiers, band, scale_log2, EXACT: tl.constexpr, KEYS_FIRST: tl.constexpr,
                MASKED: tl.constexpr, C: tl.constexpr, bias=None):
    """Apply all that acts on a block of scores, [BLOCK_M, BLOCK_N], transposed where KEYS_FIRST.

    ``visible`` counts where MASKED: elsewhere the band and the lengths hide nothing, and the boolean mask alone may.
    Returns the scores (in base 2 where CHANGED, else as they came), who is visible, the tanh of the softcap, what the
    user's function was given, and which pairs dropout keeps; the last three stand for nothing where the call has no
    softcap, function or dropout. Where several heads or batch entries share a tile of the bias, the caller
    has loaded it, once for all, as ``bias``.
    """
    tanh = scores
    capped = scores
    kept = visible
    offs_q, offs_k = score_positions(block, C.BLOCK_M, C.BLOCK_N, KEYS_FIRST)
    if C.CHANGED:
        scores, tanh, capped = modify_scores(scores, block, offs_q, offs_k, modifiers, band, scale_log2, bias, EXACT,
                                             C.INT64, MASKED)
    if modifiers.mask.ptr is not None and (MASKED or modifiers.tiles.q is None):  # whole tiles of a list need none
        allowed = load_operand(modifiers.mask, block, offs_q, offs_k, C.INT64, MASKED).to(tl.int1)
        visible = visible & allowed if MASKED else allowed
    if modifiers.mask_function.call is not None:
        sequence, member, q_idx, k_idx = function_arguments(block, offs_q, offs_k, C.INT64, MASKED)
        allowed = modifiers.mask_function.call(sequence, member, q_idx, k_idx, *modifiers.mask_function.tensors)
        KNOWN: tl.constexpr = MASKED or (modifiers.mask.ptr is not None and modifiers.tiles.q is None)
        visible = (visible if KNOWN else tl.full(scores.shape, True, tl.int1)) & allowed
    if modifiers.dropout.ptr is not None:
        kept = dropout_keeps(modifiers.dropout, block, C.BLOCK_M, C.BLOCK_N, KEYS_FIRST)
    return scores, visible, tanh, capped, kept


@triton.jit
def apply_dropout(values, kept, modifiers):
    """Set the values of dropped pairs to 0; the division by 1 − p is left to the caller."""
    if modifiers.dropout.ptr is not None:
        # A zero that the compiler does not know: a known one it moves behind the rounding to 16 bits, and then takes
        # pairs apart and puts them together again (sm_90, d 128: 652 instructions a step of forward, not 541).
        values = tl.where(kept, values, modifiers.dropout.gain * 0.0)
    return values


@triton.jit
def subtract_delta(dprobs, delta, kept, modifiers, SEEDED: tl.constexpr):
    """R∘(dO·Vᵀ) − delta (maths.md, eq. 20) of dO·Vᵀ, or of what has delta already taken off where SEEDED."""
    if modifiers.dropout.ptr is not None:
        dprobs = tl.where(kept, dprobs * modifiers.dropout.gain - delta, -delta)
    elif not SEEDED:
        dprobs -= delta
    return dprobs


@triton.jit
def divide_by_keep_prob(values, modifiers):
    """Divide by 1 − p where there is dropout."""
    if modifiers.dropout.ptr is not None:
        values *= modifiers.dropout.gain
    return values


@triton.jit
def score_grad_of_function(dscores, capped, visible, block, modifiers, KEYS_FIRST: tl.constexpr, MASKED: tl.constexpr,
                           HIDES: tl.constexpr, C: tl.constexpr):
    """Pass a gradient back through the user's function by its derivative (maths.md, eq. 21), and 0 where hidden."""
    if modifiers.score_function.derivative is not None:
        offs_q, offs_k = score_positions(block, C.BLOCK_M, C.BLOCK_N, KEYS_FIRST)
        sequence, member, q_idx, k_idx = function_arguments(block, offs_q, offs_k, C.INT64, MASKED)
        dscores = modifiers.score_function.derivative(dscores, capped, sequence, member, q_idx, k_idx,
                                                      *modifiers.score_function.tensors).to(tl.float32)
        if HIDES:  # once more: of what is hidden, the function may make NaN
            dscores = tl.where(visible, dscores, 0.0)
    return dscores


@triton.jit
def score_grad_of_softcap(dscores, tanh, visible, modifiers, HIDES: tl.constexpr):
    """Pass a gradient back through c·tanh(x / c): times 1 − tanh² (maths.md, eq. 21), and 0 where hidden."""
    if modifiers.softcap is not None:
        dscores *= 1.0 - tanh * tanh
        if HIDES:  # once more: the tanh of what is hidden may be NaN
            dscores = tl.where(visible, dscores, 0.0)
    return dscores


@triton.jit
def add_sink(row_max, row_sum, acc, sink):
    """Let a logit (base 2) without a value enter the softmax (the step of eq. 4 for one more key, with v = 0)."""
    new_max = tl.maximum(row_max, sink)
    # A sink of −inf is none: a row that sees no key stays empty, as in online_softmax_weights.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(row_max - shift)
    return new_max, row_sum * decay + tl.exp2(sink - shift), acc * decay[:, None]
