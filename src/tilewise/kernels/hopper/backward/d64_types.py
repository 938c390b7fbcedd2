"""The data of the Hopper backward kernel for head dims up to 64: config, shared memory, and what a warpgroup holds."""

from typing import Any, NamedTuple


class Config(NamedTuple):
    """What is fixed when the kernel is compiled: HopperBackwardConfig's fields, and which bounds the mask has.

    DETERMINISTIC: blocks of queries come in one order, and the tiles of a head add to dQ in theirs: by writers, unless
    a CTA has the head to itself. CTAS_PER_HEAD: CTAs that share a head with HEAD_PERSISTENT, which comes with
    DETERMINISTIC. KV_STAGES: tiles of keys in flight. DYNAMIC_TILES: the CTAs are persistent, and the dynamic scheduler
    gives them their tiles; just where dQ has no order, without DETERMINISTIC. MASK_PLAN: as in the forward kernel; with
    DYNAMIC_TILES. HAS_ALIBI: there is ALiBi, and no key that is seen is ahead of its query. BIAS_STAGES: tiles of the
    bias in flight, 0 without a bias. The last ones are what d128.py's functions read, always the same. The rest:
    types.Config.
    """

    WIDTH: int
    Q_STAGES: int
    DOUT_STAGES: int
    DETERMINISTIC: bool
    HEAD_PERSISTENT: bool
    CTAS_PER_HEAD: int
    KV_STAGES: int
    DYNAMIC_TILES: bool
    HAS_LOWER: bool
    HAS_UPPER: bool
    MASK_PLAN: bool = False
    HAS_ALIBI: bool = False
    BIAS_STAGES: int = 0
    CONSUMERS: int = 2
    AUGMENTED_K: bool = True
    DQ_FROM_REGISTERS: bool = False
    VARLEN: bool = False
    HAS_CU_SEQLENS: bool = False


class KVPipe(NamedTuple):
    """Stages of K and V tiles, 64 keys a consumer in each, with their barriers."""

    k_tiles: Any
    v_tiles: Any
    full: Any
    empty: Any


class Smem(NamedTuple):
    """The CTA's shared memory.

    dscores: a Pipe of two stages of both consumers' dS. dq_stage: what dQ is staged in: where it is only added, tiles
    or with C.DETERMINISTIC a Pipe; where CTAs own heads, a DQStage. queue: with C.DYNAMIC_TILES. bias: a Pipe of tiles
    of the bias (bias.py), or ().
    """

    kv: Any
    q: Any
    dout: Any
    row_stats: Any
    dscores: Any
    dq_stage: Any
    queue: Any
    bias: Any = ()


class State(NamedTuple):
    """What a consumer holds between two iterations: P and dP of the block that it has begun, dK and dV.

    left_probs: P as a left operand.
    """

    probs: Any
    left_probs: Any
    dprobs: Any
    dk: Any
    dv: Any


class TileView(NamedTuple):
    """A tile of keys as a consumer sees it: its first key, where its keys lie, blocks of queries, the mask's bounds.

    bits: with C.MASK_PLAN, a pointer to those of its keys. diagonal: with C.HAS_ALIBI, the key that query 0 stands on.
    """

    key: Any
    kv_index: Any
    blocks: Any
    bounds: Any
    bits: Any
    diagonal: Any
