"""Arguments of the Hopper kernels: named tuples of what belongs together, which the host makes and kernels take apart.

Triton specialises a kernel for each integer in a tuple, and for each address: for 1, and for multiples of 16. That is
wanted of strides, and of addresses but for those of lengths. From the lengths on, or the numbers of a kernel that takes
no lengths as an argument of their own, it is compiled for any (:func:`tilewise.kernels.enqueue.unspecialized`).
"""

from typing import Any, NamedTuple


class TileGrid(NamedTuple):
    """The tiles of a launch: so many a head, and in what order heads come."""

    tiles: Any
    heads: Any
    batches: Any
    heads_per_swizzle: Any  # heads whose tiles run side by side, since what they read fits L2 together


class MaskBounds(NamedTuple):
    """Query i sees key j if lower <= j - i <= upper, as far as the kernel's config has these bounds."""

    sq: Any
    sk: Any
    lower: Any
    upper: Any


class Lengths(NamedTuple):
    """Lengths that are data, each a pointer or None: cu_seqlens and seqlens of queries and keys."""

    cu_q: Any
    cu_k: Any
    q: Any
    k: Any


class Scaling(NamedTuple):
    """What scores are multiplied by in the forward pass.

    scale_log2: scale * log2(e), or with a softcap 2 softcap * log2(e). squash: what the products are multiplied by
    first, None without a softcap (``softmax.squashed``). exact_scale: the least power of two that is no less than
    scale_log2, which takes its place in rows of huge scores (``softmax.shift_for``). to_natural: where something is
    added to scores, or a function changes them, the scale, or twice the softcap; scale_log2 is log2(e) then. Else None.
    """

    scale_log2: Any
    squash: Any
    exact_scale: Any
    to_natural: Any = None


class KVSplits(NamedTuple):
    """How a launch's tiles are split: the first ``whole`` of them are not, each of the others in ``num_splits``.

    first_row: the first row of lse that has partial results. All are None without C.SPLIT_KV.
    """

    whole: Any = None
    num_splits: Any = None
    first_row: Any = None


class PlanNumbers(NamedTuple):
    """How a mask plan's lists and bits lie in memory, in int32s: of a batch entry, a head, and a tile or 64 rows.

    0 for what all batch entries or heads share.
    """

    list_batch: Any
    list_head: Any
    list_tile: Any
    bits_batch: Any
    bits_head: Any
    bits_group: Any


class ScoreFunction(NamedTuple):
    """A score function of the user's, inlined in a kernel, and pointers to its tensors; without one None's.

    derivative: in the backward pass; None where the gradient passes unchanged.
    """

    call: Any = None
    derivative: Any = None
    tensors: tuple[Any, ...] | None = None


class FirstPair(NamedTuple):
    """With a score function, the positions of the first query and key that a kernel is given, else None's."""

    query: Any = None
    key: Any = None


class ForwardPointers(NamedTuple):
    """What only some calls of the forward kernel read or write, each None in the others.

    out: of packed sequences, past whose last row copies by TMA would write. partial: with C.SPLIT_KV, float32. sinks:
    not with C.SPLIT_KV, where they enter when partial results are combined. seed: with C.HAS_DROPOUT. lists, bits:
    with C.MASK_PLAN (mask_plan.py). max_logit: float32, as lse; without C.FROZEN_MAX and C.SPLIT_KV. function: a
    ScoreFunction.
    """

    out: Any
    partial: Any
    sinks: Any
    seed: Any = None
    lists: Any = None
    bits: Any = None
    max_logit: Any = None
    function: Any = ScoreFunction()


class ScoreOperands(NamedTuple):
    """What is added to scores, each a pointer or None: a bias (b, hq, sq, sk), and ALiBi's slopes (b, hq).

    Their strides, in elements: 0 along a dim that is shared, None of 1.
    """

    bias: Any = None
    slopes: Any = None
    bias_b: Any = None
    bias_h: Any = None
    bias_q: Any = None
    bias_k: Any = None
    slopes_b: Any = None
    slopes_h: Any = None


class DropoutNumbers(NamedTuple):
    """What a launch says of dropout beside the seed; without C.HAS_DROPOUT all are None.

    threshold: the first of 2^16 random numbers that keeps a score. delta_scale, dv_scale: what delta and dV are
    multiplied by, and out by the latter; the dQ accumulator is delta_scale times as large, too, and Scales.gradient
    makes up for it in dK. origin_q, origin_k: the positions of the first query and key.
    """

    threshold: Any = None
    delta_scale: Any = None
    dv_scale: Any = None
    origin_q: Any = None
    origin_k: Any = None


class ForwardNumbers(NamedTuple):
    """The numbers of a forward launch.

    group: query heads per kv head. num_sequences: how many there are where their lengths are on the device,
    else None. sinks_stride: None of 1, and without sinks. plan: with C.MASK_PLAN a PlanNumbers. diagonal: with ALiBi,
    where lengths are not on the device, the key that query 0 is at no distance from, counted from the first one that is
    seen. first_pair: a FirstPair. bias: a BiasPlace, where TMA brings it.
    """

    grid: Any
    bounds: Any
    group: Any
    num_sequences: Any
    scaling: Any
    splits: Any
    sinks_stride: Any
    plan: Any = None
    diagonal: Any = None
    dropout: Any = DropoutNumbers()
    first_pair: Any = FirstPair()
    bias: Any = None


class Scales(NamedTuple):
    """What dK and dQ are multiplied by, and what scores are, to base 2. squash: as in ``softmax.squashed``.

    to_natural: with a score function what products, or tanh, are multiplied by for it, else None.
    """

    gradient: Any
    scale_log2: Any
    squash: Any = None
    to_natural: Any = None


class BackwardPointers(NamedTuple):
    """What only some calls of the backward kernel read or write, each None in the others.

    dk, dv: of packed sequences, past whose last row copies by TMA would write. seed: with C.HAS_DROPOUT. lists, bits:
    with C.MASK_PLAN (mask_plan.py). slopes: with C.HAS_ALIBI. delta: with a bias, without C.AUGMENTED_K; the bias, a
    descriptor, then stands in its own place. function: a ScoreFunction. dq: with C.WRITES_DQ, a StridedRows.
    """

    dk: Any
    dv: Any
    seed: Any
    lists: Any = None
    bits: Any = None
    slopes: Any = None
    delta: Any = None
    function: Any = ScoreFunction()
    dq: Any = None


class BackwardOperands(NamedTuple):
    """The tensors of a backward pass beside q, k, v, dout, lse and delta; what a call has not is None.

    lengths: cu_seqlens and seqlens, each a tensor or None. seed: of dropout. lists, bits: of a mask plan. slopes:
    ALiBi's. bias: begins at a multiple of 16 bytes. score_tensors: what a score function reads. dq_lists, dq_bits: of
    the mask plan that dQ's own kernel reads, above 128 columns.
    """

    lengths: Any = Lengths(None, None, None, None)
    seed: Any = None
    lists: Any = None
    bits: Any = None
    slopes: Any = None
    bias: Any = None
    score_tensors: tuple[Any, ...] = ()
    dq_lists: Any = None
    dq_bits: Any = None


NO_BACKWARD_OPERANDS = BackwardOperands()


class BiasPlace(NamedTuple):
    """Which part of a bias a kernel reads by TMA.

    own_batch, own_head: 1 where each batch entry or head has its own, 0 where all share one. first_key: the first key
    that is seen; in the backward pass queries begin with the first one that sees a key.
    """

    own_batch: Any
    own_head: Any
    first_key: Any


class BackwardNumbers(NamedTuple):
    """The numbers of a backward launch. group, num_sequences, plan, diagonal, first_pair: as in ForwardNumbers.

    slopes_b, slopes_h: strides of ALiBi's slopes, in elements, 0 along a dim that is shared. Without ALiBi these and
    diagonal are None. bias: a BiasPlace, or None. group_splits: where a group's query heads are split among tiles, how
    many heads of dk and dv each head of k has, which grid and group then count, else None.
    """

    grid: Any
    bounds: Any
    group: Any
    scales: Any
    num_sequences: Any = None
    dropout: Any = DropoutNumbers()
    plan: Any = None
    slopes_b: Any = None
    slopes_h: Any = None
    diagonal: Any = None
    bias: Any = None
    group_splits: Any = None
    first_pair: Any = FirstPair()


class WideHeadPointers(NamedTuple):
    """Pointers of the kernels of heads above 128 columns: to lse and delta, dense, and others, or None's.

    seed: with C.HAS_DROPOUT. first, second: of packed sequences, past whose last row copies by TMA would write, the
    gradients that the kernel writes, dk and dv or dq. lists, bits: with C.MASK_PLAN. lengths: where one does not begin
    at a multiple of 16, a kernel is compiled for that.
    """

    lse: Any
    delta: Any
    seed: Any
    first: Any
    second: Any
    lists: Any
    bits: Any
    lengths: Lengths


class StridedRows(NamedTuple):
    """A tensor (b, h, s, d) whose last stride is 1: its pointer, and its other strides in elements; or None's."""

    ptr: Any
    stride_b: Any = None
    stride_h: Any = None
    stride_s: Any = None


class BiasStrides(NamedTuple):
    """The strides of a bias (batches, heads, queries, keys)."""

    b: Any
    h: Any
    q: Any
    k: Any


class BiasGrid(NamedTuple):
    """The tiles of a launch: so many along the queries and along the keys of a bias head, and so many bias heads."""

    m_blocks: Any
    n_blocks: Any
    bias_heads: Any


class Sharing(NamedTuple):
    """Which batch entries and heads share a bias head, its members: ``members`` in all.

    own_heads: heads of the bias. shared_heads: members in a batch entry. group: query heads per kv head.
    """

    own_heads: Any
    shared_heads: Any
    members: Any
    group: Any
