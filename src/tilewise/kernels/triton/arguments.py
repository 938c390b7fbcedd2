"""Arguments of the Triton kernels: named tuples of what belongs together, a tensor with its strides for one."""

from typing import Any, NamedTuple


class StridedTensor(NamedTuple):
    """A tensor (b, h, s, d) or (b, h, s): its pointer, and its strides in elements.

    As an argument of a kernel its strides are specialised as single arguments are: 1 is a constant, multiples of 16 are
    known to be such. Where tiles come through a tensor descriptor, that stands in the place of this tuple.
    """

    ptr: Any
    stride_b: int
    stride_h: int
    stride_s: int
    stride_d: int = 1


class Bounds(NamedTuple):
    """The six numbers of the mask's band (tilewise.masks.Band); None for what the mask does not have."""

    lower: int | None
    upper: int | None
    prefix: int | None
    sink_tokens: int | None
    chunk: int | None
    offset: int | None


class ProblemNumbers(NamedTuple):
    """The numbers of a problem, for which a kernel is not specialised.

    count: how many sequences there are whose lengths are on the device, else None. tiles: of the grid, for each head.
    """

    scale: float
    scale_log2: float
    bounds: Bounds
    count: int | None
    sq: int
    sk: int
    hq: int
    hk: int
    group: int
    tiles: int


class Constants(NamedTuple):
    """What is fixed when a kernel is compiled.

    D, DV: head dims of a tile that are there, BLOCK_D, BLOCK_DV: columns of a tile; q and k have D + TAIL head dims.
    CHANGED: modifiers change the scores. SHIFTED: the lengths of each sequence move the diagonal. NEED_DK, NEED_DV:
    which gradients a launch of the dK/dV kernel computes. ENTRIES: batch entries for which a CTA of the dQ kernel adds
    up dS.
    """

    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    PRECISION: str
    INT64: bool
    DESCRIPTORS: bool
    CHANGED: bool
    TAIL: int
    SHIFTED: bool
    BLOCK_M: int
    BLOCK_N: int
    NEED_DK: bool = True
    NEED_DV: bool = True
    ENTRIES: int = 1


# Triton 3.6 loses an integer 1 inside a nested tuple, and cannot compare a tuple that holds None with None. So in
# Modifiers a unit stride is None, what is absent has None for a pointer, and other numbers are floats, which are never
# made constants.


class Pairs(NamedTuple):
    """An operand (b, hq, sq, sk): a tensor with the strides of its broadcast, 0 along a dim that it has once."""

    ptr: Any = None
    stride_b: int | None = None
    stride_h: int | None = None
    stride_q: int | None = None
    stride_k: int | None = None


class Slopes(NamedTuple):
    """ALiBi's slopes (b, hq), and where the diagonal runs."""

    ptr: Any = None
    stride_b: int | None = None
    stride_h: int | None = None
    offset: float | None = None


class Sinks(NamedTuple):
    """The sinks (hq,)."""

    ptr: Any = None
    stride_h: int | None = None


class Dropout(NamedTuple):
    """The seed, the first of 2^16 draws that keeps a pair, and what a kept value is multiplied by.

    ``unaligned``: 1.0 where a tile's first query or key may lie inside of a block of draws, else None. ``origin_q``,
    ``origin_k``: the counters of the draws that the first query and key have, None for 0.
    """

    ptr: Any = None
    threshold: float | None = None
    gain: float | None = None
    unaligned: float | None = None
    origin_q: float | None = None
    origin_k: float | None = None


class Lengths(NamedTuple):
    """Lengths that are data: cu_seqlens and seqlens of queries and keys."""

    cu_q: Any = None
    cu_k: Any = None
    q: Any = None
    k: Any = None


class DocumentNumbers(NamedTuple):
    """The documents of queries and keys, each (b|1, 4, s), dense; ``batched``, unless None: a set a batch entry."""

    q: Any = None
    k: Any = None
    batched: float | None = None


class Function(NamedTuple):
    """A function of the user's, inlined in the kernel, with its derivative and its tensors' pointers."""

    call: Any = None
    derivative: Any = None
    tensors: tuple[Any, ...] | None = None


class Tiles(NamedTuple):
    """The tile lists of queries and of keys, dense; per_batch, per_head, unless None: each has lists of its own."""

    q: Any = None
    k: Any = None
    per_batch: float | None = None
    per_head: float | None = None


class Modifiers(NamedTuple):
    """What a kernel reads beside q, k and v; what a call does not use is None, which costs nothing there.

    ``near_0``: 1.0 where tanh needs its relative error near 0 in 16 bits too, else None.
    """

    softcap: float | None = None
    bias: Pairs = Pairs()
    alibi: Slopes = Slopes()
    mask: Pairs = Pairs()
    sinks: Sinks = Sinks()
    dropout: Dropout = Dropout()
    lengths: Lengths = Lengths()
    documents: DocumentNumbers = DocumentNumbers()
    tiles: Tiles = Tiles()
    score_function: Function = Function()
    mask_function: Function = Function()
    near_0: float | None = None


NO_MODIFIERS = Modifiers()
