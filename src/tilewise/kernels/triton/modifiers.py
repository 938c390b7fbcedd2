"""What changes a score besides scale and band, inside a kernel: one formula a function (maths.md, section 11).

``modifiers`` is a named tuple of the host (launch.py): a field that a call does not use is None, which Triton knows at
compile time, so that what is not used costs nothing. Scores are in base 2 here, as everywhere in the kernels: softcap,
bias and slopes are multiplied by log2 e on their way in.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.primitives import LN2, LOG2E

PER_DRAW = tl.constexpr(8)  # neighbouring keys whose dropout one call of Philox decides
ROUNDS = tl.constexpr(7)  # of Philox4x32; Salmon et al., 2011, table 2: passes BigCrush


@triton.jit
def hyperbolic_tangent(x, EXACT: tl.constexpr):
    """tanh(x) = sign(x)·(1 − e)/(1 + e), e = exp(−2|x|); EXACT keeps float32's relative error near 0 too.

    There 1 − e cancels, and the series to x⁹ takes over (its next term is 1e-8 of x at 1/4).
    """
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    ratio = (1.0 - e) / (1.0 + e)
    tanh = tl.where(x < 0.0, -ratio, ratio)
    if EXACT:
        square = x * x
        series = x + x * square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
        tanh = tl.where(tl.abs(x) < 0.25, series, tanh)
    return tanh


@triton.jit
def along(positions, stride, INT64: tl.constexpr):
    """Offsets along one dim of an operand, whose unit stride is None."""
    if INT64:
        positions = positions.to(tl.int64)
    if stride is not None:
        positions = positions * stride
    return positions


@triton.jit
def load_pairs(operand, batch, head, offs_q, offs_k, stop_q, stop_k, INT64: tl.constexpr, CHECKED: tl.constexpr):
    """Load an operand's elements for the tile's pairs; positions broadcast to the tile, strides may be 0.

    CHECKED: 0 is read outside. Else all keys of the tile are inside and the last query stands for those that are not:
    without a mask along the keys a thread loads 16 bytes at once, with one an element at a time.
    """
    rows = offs_q if CHECKED else tl.minimum(offs_q, stop_q - 1)
    ptrs = operand.ptr + along(batch, operand.stride_b, True) + along(head, operand.stride_h, True)
    ptrs += along(rows, operand.stride_q, INT64) + along(offs_k, operand.stride_k, INT64)
    if CHECKED:
        values = tl.load(ptrs, mask=(offs_q < stop_q) & (offs_k < stop_k), other=0)
    else:
        values = tl.load(ptrs)
    return values


@triton.jit
def distance(offs_q, offs_k, modifiers, band):
    """|i + offset − j|: what an ALiBi slope is multiplied by; float32 holds positions to 2^24 exactly."""
    shift = band[6]
    if shift is None:
        on_key = offs_q + modifiers.alibi.offset
    else:
        on_key = offs_q + shift
    return tl.abs(on_key.to(tl.float32) - offs_k.to(tl.float32))


@triton.jit
def change_scores(products, modifiers, batch, head, band, offs_q, offs_k, stop_q, stop_k, scale_log2,
                  EXACT: tl.constexpr, INT64: tl.constexpr, CHECKED: tl.constexpr):
    """Return the tile's scores in base 2, f(c·tanh(scale·q·k / c)) + bias − slope·distance, the tanh, and f's argument.

    The latter is in natural units, as the user's function has it.
    """
    scores = products * scale_log2
    tanh = scores
    if modifiers.softcap is not None:
        cap = modifiers.softcap * LOG2E
        tanh = hyperbolic_tangent(scores * (1.0 / cap), EXACT)
        scores = tanh * cap
    capped = scores
    if modifiers.score_function.call is not None:
        capped = scores * LN2
        q_idx, k_idx = readable(offs_q, offs_k, stop_q, stop_k, CHECKED)
        scores = modifiers.score_function.call(capped, batch, head, q_idx, k_idx, *modifiers.score_function.tensors)
        scores = scores.to(tl.float32) * LOG2E
    if modifiers.bias.ptr is not None:
        bias = load_pairs(modifiers.bias, batch, head, offs_q, offs_k, stop_q, stop_k, INT64, CHECKED)
        scores += bias.to(tl.float32) * LOG2E
    if modifiers.alibi.ptr is not None:
        slope = tl.load(modifiers.alibi.ptr + along(batch, modifiers.alibi.stride_b, True)
                        + along(head, modifiers.alibi.stride_h, True))
        scores -= (slope * LOG2E) * distance(offs_q, offs_k, modifiers, band)
    return scores, tanh, capped


@triton.jit
def readable(offs_q, offs_k, stop_q, stop_k, CHECKED: tl.constexpr):
    """Positions for a user's function, which may read its tensors there: the last stands for those that are outside.

    As in :func:`load_pairs`, only queries may be outside where not CHECKED.
    """
    offs_q = tl.maximum(tl.minimum(offs_q, stop_q - 1), 0)
    if CHECKED:
        offs_k = tl.maximum(tl.minimum(offs_k, stop_k - 1), 0)
    return offs_q, offs_k


@triton.jit
def pair_positions(offs_m, first_key, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Query and key positions of a tile's pairs, which broadcast to it."""
    offs_n = first_key + tl.arange(0, BLOCK_N)
    offs_q = offs_m[None, :] if KEYS_FIRST else offs_m[:, None]
    offs_k = offs_n[:, None] if KEYS_FIRST else offs_n[None, :]
    return offs_q, offs_k


@triton.jit
def keep_pairs(dropout, row, offs_q, first_k, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Which pairs dropout keeps: [BLOCK_M, BLOCK_N], or [BLOCK_N, BLOCK_M] where KEYS_FIRST.

    Pair (i, j) of row ``row`` = batch·hq + head draws 16 bits: half j mod 2 (0 the low one) of word (j mod 8) div 2 of
    Philox4x32(seed; j div 8, i, row, 0). It is kept when they are not below the threshold: a property of the pair
    alone, whatever tile it is met in. ``first_k`` is a multiple of 8.
    """
    groups = first_k // PER_DRAW + tl.arange(0, BLOCK_N // PER_DRAW)
    if KEYS_FIRST:
        group, query = tl.broadcast(groups[:, None], offs_q[None, :])
    else:
        query, group = tl.broadcast(offs_q[:, None], groups[None, :])
    zeros = tl.zeros_like(group)  # a scalar counter does not broadcast inside Philox in every Triton version
    w0, w1, w2, w3 = tl.philox(tl.load(dropout.ptr), group, query, zeros + row, zeros, ROUNDS)
    threshold = tl.full(group.shape, dropout.threshold, tl.float32).to(tl.uint32)
    # Joined by the highest bit of j mod 8 first: the last dim of a tile varies fastest.
    low = tl.join(tl.join(is_kept(w0, threshold), is_kept(w2, threshold)),
                  tl.join(is_kept(w1, threshold), is_kept(w3, threshold)))
    high = tl.join(tl.join(is_kept(w0 >> 16, threshold), is_kept(w2 >> 16, threshold)),
                   tl.join(is_kept(w1 >> 16, threshold), is_kept(w3 >> 16, threshold)))
    kept = tl.join(low, high)  # [rows, columns, 2, 2, 2]
    if KEYS_FIRST:
        kept = tl.permute(kept, (0, 2, 3, 4, 1)).reshape(BLOCK_N, offs_q.shape[0])
    else:
        kept = kept.reshape(offs_q.shape[0], BLOCK_N)
    return kept != 0


@triton.jit
def is_kept(words, threshold):
    """Compare the low 16 bits; a byte, as single bits cannot be joined."""
    return ((words & 0xFFFF) >= threshold).to(tl.int8)


@triton.jit
def modify_tile(scores, visible, modifiers, row, batch, head, band, offs_m, first_key, stop_q, stop_k,
                scale_log2, EXACT: tl.constexpr, INT64: tl.constexpr, CHANGED: tl.constexpr, BLOCK_N: tl.constexpr,
                KEYS_FIRST: tl.constexpr, MASKED: tl.constexpr):
    """Apply all that acts on a tile's pairs, [BLOCK_M, BLOCK_N] or turned where KEYS_FIRST.

    ``visible`` counts where MASKED: elsewhere the band and the lengths hide nothing, and the boolean mask alone may.
    Returns the scores (in base 2 where CHANGED, else as they came), who is visible, the tanh of the softcap, what the
    user's function was given, and which pairs dropout keeps; the last three stand for nothing where the call has no
    softcap, function or dropout.
    """
    tanh = scores
    capped = scores
    kept = visible
    offs_q, offs_k = pair_positions(offs_m, first_key, BLOCK_N, KEYS_FIRST)
    if CHANGED:
        scores, tanh, capped = change_scores(scores, modifiers, batch, head, band, offs_q, offs_k, stop_q, stop_k,
                                             scale_log2, EXACT, INT64, MASKED)
    if modifiers.mask.ptr is not None and (MASKED or modifiers.tiles.q is None):  # whole tiles of a list need none
        allowed = load_pairs(modifiers.mask, batch, head, offs_q, offs_k, stop_q, stop_k, INT64, MASKED).to(tl.int1)
        visible = visible & allowed if MASKED else allowed
    if modifiers.mask_function.call is not None:
        q_idx, k_idx = readable(offs_q, offs_k, stop_q, stop_k, MASKED)
        allowed = modifiers.mask_function.call(batch, head, q_idx, k_idx, *modifiers.mask_function.tensors)
        KNOWN: tl.constexpr = MASKED or (modifiers.mask.ptr is not None and modifiers.tiles.q is None)
        visible = (visible if KNOWN else tl.full(scores.shape, True, tl.int1)) & allowed
    if modifiers.dropout.ptr is not None:
        kept = keep_pairs(modifiers.dropout, row, offs_m, first_key, BLOCK_N, KEYS_FIRST)
    return scores, visible, tanh, capped, kept


@triton.jit
def drop(values, kept, modifiers):
    """Set the values of dropped pairs to 0; the division by 1 − p is left to the caller."""
    if modifiers.dropout.ptr is not None:
        values = tl.where(kept, values, 0.0)
    return values


@triton.jit
def gained(values, modifiers):
    """Divide by 1 − p where there is dropout."""
    if modifiers.dropout.ptr is not None:
        values *= modifiers.dropout.gain
    return values


@triton.jit
def through_function(dscores, capped, visible, modifiers, batch, head, offs_m, first_key, stop_q, stop_k,
                     BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr, MASKED: tl.constexpr, HIDES: tl.constexpr):
    """Pass a gradient back through the user's function by its derivative (maths.md, eq. 21), and 0 where hidden."""
    if modifiers.score_function.derivative is not None:
        offs_q, offs_k = pair_positions(offs_m, first_key, BLOCK_N, KEYS_FIRST)
        q_idx, k_idx = readable(offs_q, offs_k, stop_q, stop_k, MASKED)
        dscores = modifiers.score_function.derivative(dscores, capped, batch, head, q_idx, k_idx,
                                                      *modifiers.score_function.tensors).to(tl.float32)
        if HIDES:  # once more: of what is hidden, the function may make NaN
            dscores = tl.where(visible, dscores, 0.0)
    return dscores


@triton.jit
def through_softcap(dscores, tanh, visible, modifiers, HIDES: tl.constexpr):
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
    decay = tl.exp2(row_max - new_max)
    return new_max, row_sum * decay + tl.exp2(sink - new_max), acc * decay[:, None]
