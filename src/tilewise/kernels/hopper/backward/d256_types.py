"""The data of the Hopper backward kernels for head dims above 128: their compile-time configs and what warps share."""

from typing import Any, NamedTuple


class Config(NamedTuple):
    """What is fixed when d256.py's or d192.py's kernel is compiled.

    HopperBackwardConfig's fields, and which bounds the mask has. D, DV: columns of q and k, and of v, in one or two
    chunks. CONSUMERS: how many times 64 keys a CTA has. VARLEN, HAS_CU_SEQLENS, BOTTOM_RIGHT: as in types.Config; with
    HAS_DROPOUT and MASK_PLAN, of d256.py alone. The last ones are what tile_scheduler.py and varlen.py read, always the
    same.
    """

    D: tuple[int, ...]
    DV: tuple[int, ...]
    CONSUMERS: int
    Q_STAGES: int
    DOUT_STAGES: int
    HAS_LOWER: bool
    HAS_UPPER: bool
    VARLEN: bool = False
    HAS_CU_SEQLENS: bool = False
    BOTTOM_RIGHT: bool = False
    HAS_DROPOUT: bool = False
    MASK_PLAN: bool = False
    DETERMINISTIC: bool = False
    HEAD_PERSISTENT: bool = False
    HAS_ALIBI: bool = False
    HAS_FUNCTION: bool = False


class DQConfig(NamedTuple):
    """What is fixed when dq_d256.py's kernel is compiled; the fields are those of Config.

    The last ones are what tile_scheduler.py, mask_ranges.py, softmax.py and epilogue.py read, always the same.
    """

    HAS_LOWER: bool
    HAS_UPPER: bool
    VARLEN: bool = False
    HAS_CU_SEQLENS: bool = False
    BOTTOM_RIGHT: bool = False
    HAS_DROPOUT: bool = False
    MASK_PLAN: bool = False
    BLOCK_N: int = 64
    CONSUMERS: int = 2
    PACK_GQA: int = 1
    TILES_FROM_END: bool = False
    SINK_BLOCK_FIRST: bool = False


class Inputs(NamedTuple):
    """What is loaded: of q, k, v and dout a TMA descriptor for each chunk of columns, of the others pointers.

    seed: of dropout, or None. group_splits: as in BackwardNumbers.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any
    seed: Any = None
    group_splits: Any = None


class Outputs(NamedTuple):
    """Descriptors of dk and dv, one for each chunk of columns; of packed sequences pointers to them, too, else None."""

    dk: Any
    dv: Any
    dk_ptr: Any = None
    dv_ptr: Any = None


class Args(NamedTuple):
    """What the launch gives to every warp of the kernels that own keys. group: query heads per kv head.

    tile: the CTA's tile of keys. accum_ptr: the dQ accumulator, of d192.py. dropout, plan: a DropoutNumbers and a
    MaskPlan, of d256.py.
    """

    inputs: Any
    outputs: Any
    tile: Any
    heads: Any
    bounds: Any
    group: Any
    scales: Any
    accum_ptr: Any
    dropout: Any = None
    plan: Any = None


class DQArgs(NamedTuple):
    """What the launch gives to every warp of dq_d256.py. group: query heads per kv head.

    tile: a QTile; dq: descriptors, one for each chunk of columns; dq_ptr: of packed sequences a pointer to it, else
    None. dropout: a DropoutNumbers. plan: a MaskPlan.
    """

    inputs: Any
    dq: Any
    dq_ptr: Any
    tile: Any
    heads: Any
    bounds: Any
    group: Any
    scales: Any
    dropout: Any
    plan: Any


class KVTiles(NamedTuple):
    """K and V of a CTA's tile of keys, in chunks of columns; K of 64 keys and V of them have a barrier each."""

    k_tiles: Any
    v_tiles: Any
    full: Any


class Smem(NamedTuple):
    """The CTA's shared memory. row_stats: lse and delta of each Q stage's queries, alternating.

    probs: a Pipe of P, of d256.py. dscores: two stages of each consumer's dS, of d192.py. metadata: of the tile, where
    lengths are data (varlen.py).
    """

    kv: Any
    q: Any
    dout: Any
    row_stats: Any
    probs: Any
    dscores: Any
    metadata: Any = None


class Accumulators(NamedTuple):
    """What a warpgroup of d192.py accumulates of its 64 keys: dK in two chunks of columns, and dV."""

    dk: Any
    dk_rest: Any
    dv: Any


class TileView(NamedTuple):
    """A tile of keys as a warpgroup sees it: its first key, the tile's blocks of queries.

    bits: with C.MASK_PLAN, pointers to those of its keys.
    """

    key: Any
    blocks: Any
    bounds: Any
    bits: Any = None


class QTiles(NamedTuple):
    """Q and dO of a CTA's tile of queries, in chunks of columns; of 64 queries each has a barrier, dO's behind Q's."""

    q_tiles: Any
    dout_tiles: Any
    full: Any


class DQSmem(NamedTuple):
    """The shared memory of dq_d256.py's CTA: its queries, a Pipe of K, one of V, the tile's metadata (q_tile.py)."""

    q: Any
    k: Any
    v: Any
    metadata: Any


class QView(NamedTuple):
    """64 queries as their warpgroup of dq_d256.py sees them: the first one, their lse to base 2, and delta.

    blocks: of keys, of the CTA's tile. draws: a Draws (dropout.py). bits: with C.MASK_PLAN, pointers to those of these
    queries.
    """

    row: Any
    lse: Any
    delta: Any
    blocks: Any
    bounds: Any
    draws: Any
    bits: Any
