"""The data of the Hopper kernel for a bias's gradient: its config, its arguments, its shared memory, and its tiles."""

from typing import Any, NamedTuple


class Config(NamedTuple):
    """What is fixed when the kernel is compiled: HopperDbiasConfig's fields, and which bounds the mask has.

    WIDTH: columns of a head inside the tiles. BIAS_VECTOR, DBIAS_VECTOR: numbers of the bias and of its gradient at
    neighbouring keys that are read or written as one, of at most 16 bytes; 1 where their alignment is not known.
    """

    WIDTH: int
    Q_STAGES: int
    KV_STAGES: int
    BIAS_VECTOR: int
    DBIAS_VECTOR: int
    HAS_LOWER: bool
    HAS_UPPER: bool


class Inputs(NamedTuple):
    """What is read beside the bias: q, k, v and dout as TMA descriptors, lse and delta by pointers."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any


class Bias(NamedTuple):
    """The bias, by its strides."""

    ptr: Any
    strides: Any


class Args(NamedTuple):
    """What the launch gives to every warp. heads: query heads."""

    inputs: Any
    bias: Any
    dbias_ptr: Any
    grid: Any
    bounds: Any
    heads: Any
    sharing: Any
    scale_log2: Any


class QPipe(NamedTuple):
    """Stages of Q and dO of a member, 64 queries a consumer, with their barriers."""

    q_tiles: Any
    dout_tiles: Any
    q_full: Any
    dout_full: Any
    empty: Any


class KVPipe(NamedTuple):
    """Stages of K and V of a block of keys, with their barriers."""

    k_tiles: Any
    v_tiles: Any
    full: Any
    empty: Any


class Smem(NamedTuple):
    """The CTA's shared memory. bias_tiles: of both consumers' blocks; dbias is written through it."""

    q: Any
    kv: Any
    queue: Any
    bias_tiles: Any


class TileView(NamedTuple):
    """A tile as a consumer sees it: its bias head, the consumer's first query, the tile's first key.

    begin, end: the tile's visible blocks of keys.
    """

    bias_head: Any
    first_query: Any
    first_key: Any
    begin: Any
    end: Any


class MemberRows(NamedTuple):
    """A member's 64 queries: Q, dO, their stage and its phase, lse to base 2 and delta."""

    q: Any
    dout: Any
    stage: Any
    phase: Any
    lse: Any
    delta: Any
