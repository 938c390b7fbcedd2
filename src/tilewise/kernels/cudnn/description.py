"""What a cuDNN graph is to say of one problem: a value, so that equal graphs are built once and none needs a device.

cuDNN's conventions differ from tilewise's, and are translated here and nowhere else: a scale that is not given is 1,
the left bound counts the query's own key, and the diagonal of a dense call runs where the queries and keys that are
handed over say. As these are the *core* of a call, the queries that see a key and the keys that are seen, the diagonal
of a core lies at or right of its top left corner.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from tilewise.masks import Span
from tilewise.problem import AttentionProblem, Direction, Sizes, dense_strides
from tilewise.support.caches import registered

BORDERS_DTYPE = torch.int32
_STEP = 8  # elements of 16 bit in the 16 bytes that are moved at once


class Port(NamedTuple):
    """One tensor of a graph.

    Attributes:
        name: what the graph calls it; its number in the graph is its place among the ports, from 1 on.
        sizes, strides: of its four dims.
        dtype: of its elements.
        side: of packed sequences: whose borders lie in it, "q" or "k"; "" = batch entries are sequences.
    """

    name: str
    sizes: Sizes
    strides: Sizes
    dtype: torch.dtype
    side: Literal["", "q", "k"] = ""


class Borders(NamedTuple):
    """The input that says at which element of a tensor each packed sequence begins: its row times the row's stride."""

    side: Literal["", "q", "k"]
    stride: int


class Description(NamedTuple):
    """A whole graph; two calls with equal descriptions run the same one.

    Attributes:
        direction: which pass.
        inputs, outputs: the tensors, named as the operands, results and gradients of a call.
        lengths: how many sequences say how many of their queries and keys take part; 0 = none is asked.
        borders: what packed sequences need beside: an input for each side and row stride.
        scale: factor of the scores.
        bottom_right: whether the diagonal runs through the last query and key of a sequence, not the first.
        left_bound: keys kept up to the diagonal, the one on it counted; None = all.
        right_bound: keys kept right of the diagonal; None = all.
        totals: rows of the packed queries and keys; None where batch entries are sequences.
    """

    direction: Direction
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    lengths: int
    borders: tuple[Borders, ...]
    scale: float
    bottom_right: bool
    left_bound: int | None
    right_bound: int | None
    totals: tuple[int, int] | None


class Core(NamedTuple):
    """The queries that see a key and the keys that are seen; all of them where lengths are data."""

    queries: Span
    keys: Span


@registered
@lru_cache(maxsize=4096)
def core_of(problem: AttentionProblem) -> Core:
    """Return the part of a call that is handed to cuDNN."""
    return Core(problem.seeing_queries, problem.seen_keys)


class _Diagonal(NamedTuple):
    bottom_right: bool
    left_bound: int | None
    right_bound: int | None


def describe(problem: AttentionProblem, *, dbias: bool = False) -> Description:
    """Describe the graph of a problem; ``dbias``: of its backward pass, whether it makes the gradient of the bias."""
    core, packed = core_of(problem), problem.sequences.packed
    diagonal = _diagonal(problem, core)
    inputs, outputs = _ports(problem, core, dbias=dbias)
    sequences = problem.b if packed is None else packed
    padded = problem.sequences.are_data or _wants_lengths(problem, core, diagonal)
    return Description(problem.direction, inputs, outputs, sequences if padded else 0,
                       _borders((*inputs, *outputs)), problem.scale, *diagonal,
                       None if packed is None else (problem.sq, problem.sk))


def _wants_lengths(problem: AttentionProblem, core: Core, diagonal: _Diagonal) -> bool:
    """Whether a dense call has to hand over its full lengths as if they were data.

    A window over fewer keys than queries is taken in this way alone. In the backward pass cuDNN scores what lies past
    the last key 0, not −∞, with some key lengths that are no multiples of 128 (pytorch#196678; the front end did the
    same as here, up to cuDNN 9.15), and gives NaN for one query (cudnn-frontend#1072): where lse is far below 0,
    exp(0 − lse) overflows. Lengths keep it from that. Measured with cuDNN 9.19 on an H200, lse −115: without them dq is
    NaN for 192 queries and keys, with a bias and without, and so are dk and dv for one query and 128 keys; for 256
    queries and 200 keys all is finite. With them all is, everywhere.
    """
    queries, keys = len(core.queries), len(core.keys)
    if diagonal.left_bound is not None and queries > keys:
        return True
    return problem.direction == "backward" and (keys % 128 != 0 or queries == 1)


def _diagonal(problem: AttentionProblem, core: Core) -> _Diagonal:
    if problem.sequences.are_data:
        mask = problem.mask
        return _Diagonal(mask.alignment == "bottom_right" and mask.is_bounded,
                         None if mask.left is None else mask.left + 1, mask.right)
    band, (queries, keys) = problem.band, core
    moved = queries.start - keys.start
    lower = None if band.lower is None or band.lower + moved <= 1 - len(queries) else band.lower + moved
    upper = None if band.upper is None or band.upper + moved >= len(keys) - 1 else band.upper + moved
    # The plain causal mask of fewer queries than keys is said in cuDNN's own way, which takes no bias.
    offset = len(keys) - len(queries)
    bottom_right = upper is not None and upper == offset and offset > 0 and problem.scores.bias is None
    start = offset if bottom_right else 0
    return _Diagonal(bottom_right, None if lower is None else start + 1 - lower,
                     None if upper is None else upper - start)


def _ports(problem: AttentionProblem, core: Core, *, dbias: bool) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Return inputs and outputs, without what says where sequences begin and end."""
    packed, dtype = problem.sequences.packed, problem.dtype
    entries = problem.b if packed is None else packed
    rows_q, rows_k = (entries, problem.hq, len(core.queries)), (entries, problem.hk, len(core.keys))

    def port(name: str, side: Literal["q", "k"], rows: Sizes, width: int, strides: Sizes) -> Port:
        sizes = (*rows, width)
        return Port(name, sizes, plain_strides(sizes, strides), dtype, "" if packed is None else side)

    q = port("q", "q", rows_q, problem.d, problem.q_strides)
    k = port("k", "k", rows_k, problem.d, problem.k_strides)
    v = port("v", "k", rows_k, problem.dv, problem.v_strides)
    out = port("out", "q", rows_q, problem.dv, problem.out_strides)
    lse = Port("lse", (*rows_q, 1), dense((*rows_q, 1)), torch.float32)
    if packed is not None:
        lse = lse._replace(strides=(problem.hq * problem.sq, 1, problem.hq, 1), side="q")
    facts = problem.scores.bias
    bias = []
    if facts is not None:
        # A batch or head dim that the bias has once stays so: cuDNN broadcasts it, and sums its gradient.
        sizes = (*facts.shape[:2], len(core.queries), len(core.keys))
        bias = [Port("bias", sizes, plain_strides(sizes, facts.strides), facts.dtype)]
    if problem.direction == "forward":
        sinks = [] if problem.scores.sinks is None else [
            Port("sinks", (1, problem.hq, 1, 1), (problem.hq, 1, 1, 1), torch.float32)]
        return (q, k, v, *bias, *sinks), (out, lse)
    gradients = [like._replace(name=f"d{like.name}", strides=plain_strides(like.sizes, strides))
                 for like, strides in zip((q, k, v), gradient_strides(problem), strict=True)]
    made = [Port("dbias", sizes, dense(sizes, step=_STEP), facts.dtype)] if dbias and facts is not None else []
    return (q, k, v, out, out._replace(name="dout"), lse, *bias), (*gradients, *made)


def _borders(ports: tuple[Port, ...]) -> tuple[Borders, ...]:
    """Return one input for each side and row stride."""
    return tuple(dict.fromkeys(Borders(port.side, port.strides[2]) for port in ports if port.side))


def gradient_strides(problem: AttentionProblem) -> tuple[Sizes, Sizes, Sizes]:
    """Of dq, dk and dv: dense, with b, h and s in the memory order of their inputs."""
    shapes = ((problem.b, problem.hq, problem.sq, problem.d), (problem.b, problem.hk, problem.sk, problem.d),
              (problem.b, problem.hk, problem.sk, problem.dv))
    strides = (problem.q_strides, problem.k_strides, problem.v_strides)
    q, k, v = (dense_strides(shape, own) for shape, own in zip(shapes, strides, strict=True))
    return q, k, v


def plain_strides(sizes: Sizes, strides: Sizes) -> Sizes:
    """Strides with those along dims of size 1, which torch leaves as they come, set to the width of a row."""
    return (*(sizes[3] if size == 1 else stride for size, stride in zip(sizes[:3], strides[:3], strict=True)),
            1 if sizes[3] == 1 else strides[3])


def lse_layout(problem: AttentionProblem) -> tuple[Sizes, Sizes]:
    """Shape and strides of the core's lse in a graph: contiguous, of packed sequences with the heads innermost.

    Before 9.26 cuDNN writes and reads the first of a batch entry alone, and packed sequences go by their rows.
    """
    b, h, length = problem.b, problem.hq, len(core_of(problem).queries)
    return (b, h, length), (h * length, length, 1) if problem.sequences.packed is None else (h * length, 1, h)


def dense(sizes: Sizes, step: int = 1) -> Sizes:
    """Strides of a tensor without gaps, but for those that begin each row at a multiple of ``step`` elements."""
    _, h, s, t = sizes
    row = -(-t // step) * step
    return (h * s * row, s * row, row, 1)
