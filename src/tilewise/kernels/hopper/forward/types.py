"""The Hopper forward kernel's data: its compile-time config, its arguments, its shared memory, and a tile's state."""

from typing import Any, NamedTuple


class Config(NamedTuple):
    """What is fixed when the kernel is compiled: fields of its config and schedule, and which bounds the mask has.

    PACK_GQA: rows of a tile that are heads of one group at one query, a power of two; 1: rows are queries of one head.
    D, DV: the columns of q and k, and of v and out, in one or two chunks: the sides of a tile are powers of two, and a
    head is as wide as their sum. Each chunk has its own shared memory, descriptors and MMAs.
    OUT, OUT_SLOTS: columns of out that one TMA store writes, and the staging buffers for them that a warpgroup has.
    TILES_FROM_END: tiles are counted from the last query back, as those of three warpgroups under an upper bound
    alone, where lengths are not data and rows are queries (tile_scheduler.tile_at).
    SKIP_PADDING: a warpgroup looks whether a tile has a query for it, and leaves the tensor cores to the others if not.
    PARTS: 2: the wait for O += P·V lies between the exponentials of a block's first half and those of its second; 1:
    behind all of them.
    FROZEN_MAX: blocks without a mask, behind a tile's first one, keep the row maximum as it is. A tile in which that
    overflows is computed again with online softmax throughout (producer.py).
    SINK_BLOCK_FIRST: the block of the first keys follows the masked ones, and updates the maximum: attention sinks lie
    there, far above other keys for a maximum that is frozen in float16.
    SPLIT_KV: 1: every tile's keys are split, 2: some tiles are whole; another kernel combines the partial results. Then
    the work tile is read again behind its blocks, and takes no registers in them.
    MASK_PLAN: lists name the blocks of each tile, and bits the pairs of partial ones (mask_plan.py).
    HAS_DROPOUT: whether there is dropout (dropout.py).
    HAS_FUNCTION: a function of the user's changes scores, whose positions are 64 bits where INT64 (score_functions.py).
    BIAS_STAGES: blocks of the bias that TMA brings, for each warpgroup; 0: threads load it, or there is none.
    HAS_BIAS, HAS_ALIBI: what is added to scores (scores.py). SEES_AHEAD: some query may see a key ahead of its place.
    VARLEN, HAS_CU_SEQLENS, BOTTOM_RIGHT: lengths are data on the device; sequences are packed, one behind the other in
    one batch element; the diagonal runs through the last query and key of each.
    """

    PACK_GQA: int
    D: tuple[int, ...]
    DV: tuple[int, ...]
    OUT: int
    OUT_SLOTS: int
    BLOCK_N: int
    CONSUMERS: int
    KV_STAGES: int
    Q_STAGES: int
    PING_PONG: bool
    HAS_LOWER: bool
    HAS_UPPER: bool
    TILES_FROM_END: bool
    SKIP_PADDING: bool
    PARTS: int
    FROZEN_MAX: bool
    SINK_BLOCK_FIRST: bool
    SPLIT_KV: int
    MASK_PLAN: bool
    HAS_FUNCTION: bool
    INT64: bool
    HAS_BIAS: bool
    BIAS_STAGES: int
    HAS_ALIBI: bool
    SEES_AHEAD: bool
    HAS_DROPOUT: bool
    VARLEN: bool
    HAS_CU_SEQLENS: bool
    BOTTOM_RIGHT: bool


class Descriptors(NamedTuple):
    """TMA descriptors: of q, k and v one or two, a chunk of the head dim each; that of the bias, or None."""

    q: Any
    k: Any
    v: Any
    bias: Any


class Args(NamedTuple):
    """What the launch gives to every warp.

    group: query heads per kv head. plan: a mask_plan.MaskPlan. operands, diagonal, function_tensors, first_pair: of
    scores.score_mod_of_tile. seed, dropout: of dropout.draws_of. bias_place: with C.BIAS_STAGES an arguments.BiasPlace.
    """

    descs: Any
    grid: Any
    bounds: Any
    group: Any
    scaling: Any
    lengths: Any
    splits: Any
    plan: Any
    operands: Any
    diagonal: Any
    function_tensors: Any
    first_pair: Any
    seed: Any
    dropout: Any
    bias_place: Any
    outputs: Any


class Ring(NamedTuple):
    """Tiles of each warpgroup with their barriers: of Q, a stage a tile, or of a bias, a stage an iteration."""

    tiles: Any
    full: Any
    empty: Any


class KVPipe(NamedTuple):
    """Stages of (K of a block, V of the block before it), with their barriers."""

    k_tiles: Any
    v_tiles: Any
    full: Any
    empty: Any


class OverflowRing(NamedTuple):
    """Of the last tiles, with FROZEN_MAX: a flag for each row that overflowed, and the work tile's number.

    drained: the barrier on which the consumers arrive when all published tiles are done.
    """

    flags: Any
    numbers: Any
    drained: Any


class Smem(NamedTuple):
    """The CTA's shared memory. bias: a Ring, or ()."""

    q: Any
    kv: Any
    queue: Any
    overflow: Any
    out_tiles: Any
    bias: Any


class Q(NamedTuple):
    """A warpgroup's queries: the Q tiles, and the stage of its own."""

    tiles: Any
    stage: Any


class State(NamedTuple):
    """Online softmax of 64 rows between two blocks.

    probs: P of the last block, rounded and packed: its P·V is not yet added to acc. shift: what exponents are shifted
    by, the scaled row maximum or a frozen one. peak: of blocks with a frozen maximum the largest P, as bits.
    """

    probs: Any
    acc: Any
    shift: Any
    row_sum: Any
    peak: Any


class TileView(NamedTuple):
    """A work tile as a warpgroup sees it: its own first row, the tile's blocks of keys, and the mask's bounds.

    bits: with C.MASK_PLAN, a pointer to those of its rows. score_mod: a scores.ScoreMod; operands: what it is made of.
    draws: a dropout.Draws.
    """

    row: Any
    blocks: Any
    bounds: Any
    bits: Any
    score_mod: Any
    operands: Any
    draws: Any
