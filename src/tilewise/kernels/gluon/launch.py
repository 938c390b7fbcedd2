"""Launching a Hopper kernel: its arguments from a problem, and the counter that hands out its tiles."""

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from tilewise.kernels.driver import raw_stream
from tilewise.kernels.enqueue import Enqueue
from tilewise.masks import Span
from tilewise.problem import AttentionProblem, legal_strides
from tilewise.problem.options import NO_OPERANDS, Operands

# What keys and values of one section of heads may take of L2 (50 MiB on an H200), by the columns of a head. At 64 and
# 256 columns 24 MiB made 0.98 to 1.00 of 32, at 128 1.002 to 1.007 (docs/hopper.md, Order of the tiles).
_SECTION_BYTES = {64: 32 * 2**20, 128: 24 * 2**20, 256: 32 * 2**20}
# Columns of q that registers hold; by the pieces of q and of v, keys a step and warpgroups. Elsewhere none.
_HELD = {(((256,), (256,)), 64, 2): 64}
_LEAST_STEADY = 512  # keys from which steps leave a row's maximum alone
NO_LENGTHS = (None,) * 4  # cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k
# Counters that are kept for captured graphs, of a device those that are left: each is given out once.
_SPARES = 4096
_SPARE: dict[torch.device, Iterator[torch.Tensor]] = {}
_STREAM_OF_THREAD = 2  # cudaStreamPerThread: one handle, by which each thread of the host means a stream of its own
_NOTHING = (None,) * 3 + NO_LENGTHS  # sinks, their stride, out's address
_PLACES = (0, 0, 1, 1, 2, 2, 3)  # which of q, k, v and out the kernel's descriptors show: two pieces of all but out
# A warpgroup is four warps. Contracting a·b + c into one rounding is what the softmax's cost counts on; Triton 3.10
# changes the default, and 3.9 warns of it.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


class HopperShape(Protocol):
    """What the kernel reads of its config (tilewise.tuning.configs)."""

    @property
    def keys(self) -> int:
        """Keys a step."""

    @property
    def consumers(self) -> int:
        """Warpgroups that attend."""

    @property
    def stages(self) -> int:
        """Pairs of K and V in flight."""

    @property
    def query_stages(self) -> int:
        """Tiles of queries in flight."""

    @property
    def ping_pong(self) -> bool:
        """Whether the warpgroups take turns."""

    def pieces(self, problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Columns of q and k inside the tiles, and of v and out, in one or two pieces."""

    def out_buffers(self, problem: AttentionProblem) -> tuple[int, int]:
        """Columns of out in each buffer of a warpgroup, and how many there are."""


class HopperForward:
    """The forward kernel bound to a problem.

    ``multiprocessors``: of the device; one program runs on each. ``pack``, ``cut``: as
    :func:`tilewise.tuning.waves.layout_of` gives them. Unless ``cut`` is None it says how many tiles stay whole (the
    first ones, and without a bound alone: the lines of the others are the last ones), in how many parts the keys of the
    others come, and how many times as long as each other the first one is: what becomes of these is written to
    ``parts``, float32, of :attr:`parts_shape`, and their sinks are for who combines them.
    """

    def __init__(self, problem: AttentionProblem, config: HopperShape, multiprocessors: int, pack: int = 1,
                 cut: tuple[int, int, int] | None = None) -> None:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from tilewise.kernels.gluon.epilogue import floats_per_partial
        from tilewise.kernels.gluon.hopper_forward import hopper_forward_kernel

        self.kernel, self.describe = hopper_forward_kernel, TensorDescriptor
        self.device, self.keys = problem.device, problem.seen_keys
        self.dtype = gl.bfloat16 if problem.dtype is torch.bfloat16 else gl.float16
        pieces, columns = config.pieces(problem), config.out_buffers(problem)[0]
        self.packed = problem.sequences.packed is not None
        lower, upper, count, _is_shifted = bounds_of(problem)
        scaling = scaling_of(problem)
        heads = problem.hq if pack == 1 else problem.hk
        tiles = problem.sequences.slots(problem.sq * pack, 64 * config.consumers)
        total = tiles * heads * problem.b
        whole, parts, lead = cut or (total, 1, 1)
        self.grid = (min(whole + (total - whole) * parts, multiprocessors),)
        # The first line of lse whose parts are to be combined; tiles of rows that are packed are cut all or none.
        first_line = whole // tiles * problem.sq + whole % tiles * 64 * config.consumers
        self.lines = range(first_line, problem.b * problem.hq * problem.sq)
        self.parts_shape = len(self.lines), parts, floats_per_partial.fn(pieces[1])
        self.scalars = (
            tiles, heads, problem.b, section_of(problem) * heads // problem.hq, problem.sq, len(self.keys),
            lower or 0, upper or 0, problem.group, count, *scaling, exact_scale_of(scaling[0]),
            *((None,) * 4 if cut is None else (whole, parts, lead, first_line)),
            _kernel_config(problem, config, pack, None if cut is None else whole > 0))
        self.enqueue = Enqueue(self.kernel, self.grid, self.scalars, OPTIONS)
        # Of each tensor's one or two pieces; of out its buffers.
        rows = [64] if pack == 1 else [64 // pack, pack]
        blocks = [None if i >= len(widths) else [1, 1, *sizes, widths[i]]
                  for sizes, widths in zip((rows, [config.keys], [config.keys]), (pieces[0], *pieces), strict=True)
                  for i in range(2)] + [[1, 1, *rows, columns]]
        self.group = None if pack == 1 else problem.group
        self.forms = [block and (block, gl.NVMMASharedLayout.get_default_for(block, self.dtype)) for block in blocks]
        self.places = operator.itemgetter(*[i if form else 4 for form, i in zip(self.forms, _PLACES, strict=True)])
        # Of the first row that is read, in bytes.
        self.offsets = tuple(self.keys.start * strides[2] * problem.dtype.itemsize
                             for strides in (problem.k_strides, problem.v_strides))
        sinks = problem.scores.sinks
        self.sinks_stride = None if sinks is None or sinks.strides[0] == 1 else sinks.strides[0]

    def __call__(self, tensors: Callable[[], tuple[torch.Tensor, ...]], addresses: tuple[int, int, int],
                 out: torch.Tensor, lse: torch.Tensor, operands: Operands = NO_OPERANDS,
                 parts: torch.Tensor | None = None, aligned: bool = False) -> None:
        """Enqueue the kernel on the current stream of the current device.

        Args:
            tensors: returns q, k and v, which lie at the addresses.
            addresses: theirs.
            out, lse: are written.
            operands: sinks and lengths; what else there may be is not read. With ``parts``, their combination has them.
            parts: see the class.
            aligned: whether each operand is known to begin at a multiple of 16 bytes.
        """
        counter = counter_of(self.device)
        (at_q, at_k, at_v), (offset_k, offset_v), at_out = addresses, self.offsets, out.data_ptr()
        described = self.places((at_q, at_k + offset_k, at_v + offset_v, at_out, None))
        rest = _NOTHING if operands is NO_OPERANDS else (
            address_of(operands.sinks), self.sinks_stride, at_out if self.packed else None,
            address_of(operands.cu_seqlens_q), address_of(operands.cu_seqlens_k), address_of(operands.seqlens_q),
            address_of(operands.seqlens_k))
        # What torch allocates is aligned, as the backend wants q, k and v to be; so are the rows that are read.
        self.enqueue((*described, lse.data_ptr(), counter.data_ptr(), *rest, address_of(parts)),
                     lambda: self.arguments((*tensors(), out, lse), counter, operands, parts),
                     alike=aligned or operands is NO_OPERANDS)

    def arguments(self, tensors: tuple[torch.Tensor, ...], counter: torch.Tensor, operands: Operands = NO_OPERANDS,
                  parts: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Descriptors of the pieces of q, k, v and out, then what the kernel reads and writes by its address."""
        q, k, v, out, lse = tensors
        out_ptr = out if self.packed else None
        k, v = _rows(k, self.keys), _rows(v, self.keys)
        q, out = _grouped(q, self.group), _grouped(out, self.group)
        described = [form and self.describe(tensor, list(tensor.shape), legal_strides(tensor), *form)
                     for tensor, form in zip([(q, k, v, out)[i] for i in _PLACES], self.forms, strict=True)]
        sinks = operands.sinks
        return (*described, lse, counter, sinks, None if sinks is None else self.sinks_stride, out_ptr,
                operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqlens_q, operands.seqlens_k, parts)


def _kernel_config(problem: AttentionProblem, config: HopperShape, pack: int, has_whole_tiles: bool | None) -> Any:
    """Return what is fixed when the kernel is compiled. has_whole_tiles: None without split-KV."""
    from tilewise.kernels.gluon.compat import COPIES_LEFT_OPERANDS
    from tilewise.kernels.gluon.hopper_forward_types import Config

    (d_chunks, dv_chunks), (columns, out_slots) = config.pieces(problem), config.out_buffers(problem)
    lower, upper, count, is_shifted = bounds_of(problem)
    is_split, has_only_upper = has_whole_tiles is not None, lower is None and upper is not None
    frozen = _is_steady(problem, config, lower)
    three = config.consumers == 3  # their 192 queries divide few lengths
    # A tile's first query is then negative by multiples of 64: of packed rows it could be -1, pipeline.NO_TILE.
    from_end = three and pack == 1 and has_only_upper and count is None
    return Config(
        PACK_GQA=pack, D=d_chunks, DV=dv_chunks, OUT=columns, OUT_SLOTS=out_slots, BLOCK_N=config.keys,
        CONSUMERS=config.consumers, KV_STAGES=config.stages, Q_STAGES=config.query_stages, PING_PONG=config.ping_pong,
        HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, TILES_FROM_END=from_end,
        SKIP_PADDING=not from_end and (three or (count is not None and config.consumers > 1)),
        SKIP_MASKED=64 // pack * config.consumers > config.keys and has_only_upper,
        PARTS=_parts(problem, config, frozen),
        HALF_DIAGONAL=not is_split and pack == 1 and count is None and _on_diagonal(problem, config, lower, upper),
        HELD=0 if COPIES_LEFT_OPERANDS.value else _held(problem, config, lower, pack), FROZEN_MAX=frozen,
        SINK_BLOCK_FIRST=frozen and problem.dtype is torch.float16,
        MAX_CHAINS=_chains(problem, config, from_end and not is_split),
        SPLIT_KV=0 if not is_split else 2 if has_whole_tiles else 1, VARLEN=count is not None,
        HAS_CU_SEQLENS=problem.sequences.packed is not None, BOTTOM_RIGHT=is_shifted)


def bounds_of(problem: AttentionProblem) -> tuple[int | None, int | None, int | None, bool]:
    """The band's lower and upper number, the count of sequences whose lengths are data, None for what is not there.

    Keys count from the first one that is seen: those before it are not read. Of lengths that are data the diagonal runs
    through a sequence's first query and key, and the last number says whether the kernel moves it to the last ones.
    """
    mask, sequences, first = problem.mask, problem.sequences, problem.seen_keys.start
    if sequences.are_data:
        return (None if mask.left is None else -mask.left, mask.right, problem.pairs[0],
                mask.is_bounded and mask.alignment == "bottom_right")
    band = problem.band
    return (None if band.lower is None else band.lower - first, None if band.upper is None else band.upper - first,
            None, False)


def scaling_of(problem: AttentionProblem) -> tuple[float, float | None]:
    """What the softmax multiplies its scores by, to base 2, and under a softcap what tanh's formula wants before it."""
    log2e, softcap = math.log2(math.e), problem.scores.softcap
    if softcap is None:
        return problem.scale * log2e, None
    return softcap * log2e, 2.0 * log2e * problem.scale / softcap


def exact_scale_of(scale_log2: float) -> float:
    """The least power of two that is no less than a positive number, or the largest one that float32 has."""
    fraction, exponent = math.frexp(scale_log2)
    return math.ldexp(1.0, min(exponent - (fraction == 0.5), 127))


def _grouped(tensor: torch.Tensor, group: int | None) -> torch.Tensor:
    """(b, hq, s, d) as (b, hk, s, group, d), or as it is."""
    return tensor if group is None else tensor.unflatten(1, (-1, group)).transpose(2, 3)


def _parts(problem: AttentionProblem, config: HopperShape, steady: bool) -> int:
    """In how many parts the softmax of a step comes.

    Where shifts follow the maximum wider heads were not timed in two. With steady ones 256 columns are 1 to 1.4 %
    faster so, and 192 0.2 %; there, too, v of another width was not timed.
    """
    if max(problem.d, problem.dv) <= 128 and config.keys == 128:
        return 2
    return 2 if steady and operator.eq(*config.pieces(problem)) else 1


def _on_diagonal(problem: AttentionProblem, config: HopperShape, lower: int | None, upper: int | None) -> bool:
    """Whether each tile's first step has the diagonal from its first query and key on; not asked of wide heads."""
    return (lower is None and upper is not None and upper >= 0 and upper % config.keys == 0
            and config.consumers == 2 and config.keys == 128 and problem.sq + upper <= len(problem.seen_keys)
            and max(problem.d, problem.dv) <= 128)


def _held(problem: AttentionProblem, config: HopperShape, lower: int | None, pack: int) -> int:
    """Columns of q that a warpgroup holds in registers: where that was timed, and faster.

    128 of 128 were not, under a steady shift (0.985 to 1.004).
    """
    scores = problem.scores
    is_plain = lower is None and pack == 1 and not problem.sequences.are_data
    if not is_plain or scores.softcap is not None or scores.sinks is not None:
        return 0
    return _HELD.get((config.pieces(problem), config.keys, config.consumers), 0)


def _chains(problem: AttentionProblem, config: HopperShape, from_end: bool) -> int:
    """In how many chains a thread finds a row's maximum, timed where every step does (a steady shift has few that do).

    More than one where warpgroups take turns: elsewhere they gained nothing. Where tiles of three warpgroups are
    counted from the end four are 0.2 to 0.4 % faster than two, and without a mask 0.2 to 0.5 % slower; nothing else was
    timed.
    """
    if not config.ping_pong:
        return 1
    if max(problem.d, problem.dv) <= 96:
        return 4 if from_end and problem.scores.softcap is None else 2
    return 1 if problem.mask.is_bounded else 4


def _is_steady(problem: AttentionProblem, config: HopperShape, lower: int | None) -> bool:
    """Whether steps that need no mask take a row's maximum as it is.

    Timed at 64, 128 and 256 columns from 512 keys on: 1.00 to 1.13 times as fast, the more the longer and the narrower.
    """
    return (lower is None and problem.scores.softcap is None and not problem.sequences.are_data
            and config.consumers > 1 and len(problem.seen_keys) >= _LEAST_STEADY)


def section_of(problem: AttentionProblem) -> int:
    """Heads of q whose keys and values are worked on together."""
    bytes_of_head = len(problem.seen_keys) * (problem.d + problem.dv) * problem.dtype.itemsize
    columns = max(problem.d, problem.dv)
    section = next(section for width, section in _SECTION_BYTES.items() if columns <= width)
    return max(1, section // bytes_of_head) * problem.group


def _rows(tensor: torch.Tensor, rows: Span) -> torch.Tensor:
    return tensor if len(rows) == tensor.shape[2] else tensor[:, :, rows.start:rows.stop]


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Return where a tensor that may not be there lies."""
    return None if tensor is None else tensor.data_ptr()


def counter_of(device: torch.device) -> torch.Tensor:
    """A zero that the kernel counts up from and leaves as it was.

    Launches of one stream come one after another and share it; a handle that stands for several streams has none to
    share. Those of a captured graph may run beside anything, and get one of their own: one that was cleared before,
    since what clears it in the graph is a launch in every replay. Replays of a graph come one after another, if it was
    instantiated once, as torch does.
    """
    if not torch.cuda.is_current_stream_capturing():
        stream = raw_stream()(device.index)
        if stream != _STREAM_OF_THREAD:
            return _counter_of_stream(device, stream)
        return torch.zeros(1, dtype=torch.int32, device=device)
    spare = next(_SPARE.get(device, iter(())), None)
    return torch.zeros(1, dtype=torch.int32, device=device) if spare is None else spare


@functools.cache
def _counter_of_stream(device: torch.device, stream: int) -> torch.Tensor:
    """Make a stream's counter; with a device's first one, those for graphs, which may be replayed on any stream."""
    del stream
    if device not in _SPARE:
        cleared = torch.zeros(_SPARES, 4, dtype=torch.int32, device=device)  # 16 bytes each, as is what torch allocates
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # once, beside which the kernel is compiled
        _SPARE[device] = map(cleared[:, :1].__getitem__, range(_SPARES))
    return torch.zeros(1, dtype=torch.int32, device=device)
