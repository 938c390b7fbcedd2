"""The Hopper backward kernel's data: its compile-time config, its arguments, its shared memory, and a tile's state.

The kernels of other head dims (d64.py, d256.py) share what is here, and add their
own in d64_types.py and d256_types.py.
"""

from typing import Any, NamedTuple


class Config(NamedTuple):
    """What is fixed when the kernel is compiled: HopperBackwardConfig's fields, and which bounds the mask has.

    WIDTH: columns of a head inside the tiles. CONSUMERS: warpgroups with 64 keys each. Q_STAGES, DOUT_STAGES: tiles of
    Q and of dO in flight.
    S_AHEAD: S of the next block is computed while dQ and dK of this one are.
    DQ_FROM_REGISTERS: dQ is added from registers; else it is staged in shared memory, and TMA adds it.
    DETERMINISTIC: warps of their own add the staged dQ in a fixed order.
    AUGMENTED_K: the tensor cores subtract lse and delta, and ALiBi, without SEES_AHEAD (augmented_k.py); in d128.py a
    CTA is persistent then, and dQ is staged.
    HEAD_PERSISTENT: a persistent CTA has all tiles of a head, or CTAs that share one, and no other adds to its dQ.
    VARLEN, HAS_CU_SEQLENS, BOTTOM_RIGHT, HAS_ALIBI, SEES_AHEAD: as in the forward kernel.
    HAS_DROPOUT: whether there is dropout.
    HAS_FUNCTION, INT64: as in the forward kernel; not with AUGMENTED_K.
    MASK_PLAN: as in the forward kernel; not with DETERMINISTIC or HEAD_PERSISTENT.
    BIAS_STAGES: tiles of the bias in flight, 0 without a bias; not with VARLEN.
    WRITES_DQ: a tile that has all keys of a packed sequence writes its dq; with HAS_CU_SEQLENS and DQ_FROM_REGISTERS.
    """

    WIDTH: int
    CONSUMERS: int
    Q_STAGES: int
    DOUT_STAGES: int
    S_AHEAD: bool
    DQ_FROM_REGISTERS: bool
    DETERMINISTIC: bool
    AUGMENTED_K: bool
    HEAD_PERSISTENT: bool
    HAS_LOWER: bool
    HAS_UPPER: bool
    VARLEN: bool
    HAS_CU_SEQLENS: bool
    BOTTOM_RIGHT: bool
    HAS_DROPOUT: bool
    MASK_PLAN: bool = False
    HAS_ALIBI: bool = False
    SEES_AHEAD: bool = False
    BIAS_STAGES: int = 0
    HAS_FUNCTION: bool = False
    INT64: bool = False
    WRITES_DQ: bool = False


class Inputs(NamedTuple):
    """What the producer warp loads: q, k, v and dout as TMA descriptors, lse and delta as pointers.

    With C.AUGMENTED_K, lse: the descriptor of the extra columns, which hold delta too. delta_scale: with dropout what
    delta is multiplied by, else None. bias: a Bias, or () without one. group_splits: as in BackwardNumbers.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any
    delta_scale: Any
    bias: Any = ()
    group_splits: Any = None


class Bias(NamedTuple):
    """A bias (b or 1, hq or 1, queries that see a key, keys), a TMA descriptor; the rest: as in a BiasPlace."""

    desc: Any
    own_batch: Any
    own_head: Any
    first_key: Any


class Outputs(NamedTuple):
    """Where dk and dv go; pointers where copies by TMA would write past a packed sequence, else None."""

    dk_desc: Any
    dv_desc: Any
    dk_ptr: Any
    dv_ptr: Any


class Args(NamedTuple):
    """What the launch gives to every warp. num_sequences: None but for C.VARLEN.

    dq: a DQTarget; grid, bounds, scales: a TileGrid, a MaskBounds and a Scales (arguments.py). grid.heads, and a tile's
    head, are heads of dk and dv: as many as of k, or with inputs.group_splits so many for each (producers.kv_head_of).
    group: query heads of one of them.
    tile: the CTA's tile of keys, where it has one. tile_counter: the dynamic tile scheduler's. plan: a
    mask_plan.MaskPlan. alibi: an Alibi. function_tensors, first_pair: as of a HeadPlace.
    """

    inputs: Any
    outputs: Any
    dq: Any
    grid: Any
    bounds: Any
    group: Any
    scales: Any
    dropout: Any
    num_sequences: Any
    tile: Any
    tile_counter: Any
    plan: Any
    alibi: Any
    function_tensors: Any = None
    first_pair: Any = None


class Alibi(NamedTuple):
    """ALiBi's slopes (b, hq), a pointer or None, with their strides; diagonal: the key that query 0 stands on."""

    slopes: Any
    stride_b: Any
    stride_h: Any
    diagonal: Any


class Pipe(NamedTuple):
    """Stages of a tile between a producer and its consumers, with their barriers.

    Gluon's ``mbarrier.expect`` is an arrival too, PTX's arrive.expect_tx.
    """

    tiles: Any
    full: Any
    empty: Any


class KVTiles(NamedTuple):
    """K and V of a tile, 64 keys a consumer; the empty barriers: with C.AUGMENTED_K."""

    k_tiles: Any
    v_tiles: Any
    full: Any
    k_empty: Any
    v_empty: Any


class Smem(NamedTuple):
    """The CTA's shared memory.

    row_stats: lse and delta of each Q stage's queries, alternating, or an AugmentedK. dscores: two stages of each
    consumer's dS. dq_stage: what dQ is staged in, with C.DETERMINISTIC a Pipe. queue: with C.AUGMENTED_K. metadata: of
    the tile of keys, with C.VARLEN (varlen.py). bias: a Pipe of tiles of the bias (bias.py), or ().
    """

    kv: Any
    q: Any
    dout: Any
    row_stats: Any
    dscores: Any
    dq_stage: Any
    queue: Any
    metadata: Any
    bias: Any = ()


class State(NamedTuple):
    """What a warpgroup holds of its 64 keys between two blocks; with C.S_AHEAD, scores: S of the next block."""

    scores: Any
    dk: Any
    dv: Any


class TileView(NamedTuple):
    """A tile of keys as a warpgroup sees it: its first key, the tile's blocks of queries, and the mask's bounds.

    last_count: with C.AUGMENTED_K, the Q pipe's iteration of the tile's last block. bits: with C.MASK_PLAN, a pointer
    to those of its keys. diagonal: with C.HAS_ALIBI, the key that query 0 stands on. sequence: with C.HAS_FUNCTION its
    batch entry, of packed sequences its sequence. writes_dq: with C.WRITES_DQ, whether this tile does.
    """

    key: Any
    blocks: Any
    bounds: Any
    last_count: Any
    bits: Any
    diagonal: Any
    sequence: Any
    writes_dq: Any = None


class QHead(NamedTuple):
    """A query head of the group.

    member: its number there. first_part: the first of this warpgroup's parts of it in the dQ accumulator. slope_log2:
    with C.HAS_ALIBI, its slope times log2(e).
    """

    batch: Any
    head: Any
    member: Any
    first_part: Any
    slope_log2: Any
