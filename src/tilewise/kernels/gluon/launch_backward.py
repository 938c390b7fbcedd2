"""Launching the Hopper backward kernels: their arguments from a problem, and the sums that dQ is made from."""

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tilewise.errors import InvalidInput
from tilewise.kernels.enqueue import Enqueue
from tilewise.kernels.gluon.launch import NO_LENGTHS, OPTIONS, address_of, bounds_of, counter_of, scaling_of
from tilewise.masks import Span
from tilewise.problem import AttentionProblem, Sizes, dense_strides, legal_strides, padded_dim
from tilewise.problem.options import DRAWS

_NO_DATA = (*NO_LENGTHS, None)  # and dropout's seed
# What q, dout and the sums for dq of one section of heads may take of L2 (50 MiB on an H200).
_SECTION_BYTES = 32 * 2**20
# Where dQ is summed in order a tile of keys is a step or two behind the one before. With heads enough in a section
# those that start together are few of each head: of 132 multiprocessors' tiles, 8. Without a bound above all tiles are
# as long, stay as far apart as they have come, and L2 is worth more (docs/hopper.md).
_LEAST_ORDERED = 16
# Instructions that never run in front of each warpgroup's code, where heads of 65 to 128 columns draw tiles: without a
# bound below it was timed, 1.4 % faster, under an upper one 0.7 % (docs/hopper.md, Where code lies).
_SPACES = (3, 0)


# As in backends/memory.py, which kernels do not know.
Allocate = Callable[[Sizes, Sizes, torch.dtype], torch.Tensor]  # of sizes, strides and dtype, its memory anything


class HopperBackwardShape(Protocol):
    """What the backward kernel reads of its config (tilewise.tuning.configs)."""

    @property
    def stages(self) -> int:
        """Tiles of q in flight."""

    @property
    def out_stages(self) -> int:
        """Tiles of dout in flight."""

    @property
    def ahead(self) -> bool:
        """Whether a step computes the next one's scores."""

    @property
    def direct(self) -> bool:
        """Whether dQ is added from registers."""

    @property
    def ordered(self) -> bool:
        """Whether warps of their own add dQ, in a fixed order."""

    @property
    def tails(self) -> bool:
        """Whether the tensor cores take lse and delta off."""

    @property
    def alone(self) -> bool:
        """Whether a program goes over all keys of a head after another, so that nobody else adds to their dQ."""

    @property
    def programs(self) -> int:
        """Programs that share a head's tiles of keys, with ``alone``."""

    @property
    def stays(self) -> bool:
        """Whether a program draws one tile of keys after another; with ``alone`` it has those of its heads."""

    @property
    def wide(self) -> bool:
        """Whether dQ is made apart; two warpgroups share the keys, of which one sums dV and the other dK."""

    @property
    def keys(self) -> int:
        """Keys of a tile."""

    def narrow(self, problem: AttentionProblem) -> bool:
        """Whether a third warpgroup makes dQ."""

    def columns(self, problem: AttentionProblem) -> tuple[Sizes, Sizes]:
        """Columns of q and k inside the tiles, and of v and dout, in one or two pieces."""


class HopperBackward:
    """The backward kernels bound to a problem; call it with (q, k, v, dout, lse, delta, dq, dk, dv).

    Where lengths are data or pairs are dropped, cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k and the seed follow,
    each a tensor or None.
    ``dq_strides``: those of dq. ``multiprocessors``: of the device; one program runs on each at a time. ``incoming``:
    the strides of out and dout, the last 1, where delta holds no gradient of lse and nobody else wants it; out comes in
    its place then if ``takes_out`` says so. ``allocate``: makes memory on the device. lse and delta are contiguous,
    delta as the Triton backend's kernel computes it; dout and the gradients have a last stride of 1 and others that are
    legal for a descriptor. Queries that see no key, and keys that none sees, are not read: their gradients are left as
    they are.
    """

    def __init__(self, problem: AttentionProblem, config: HopperBackwardShape, dq_strides: Sizes,
                 multiprocessors: int, incoming: tuple[Sizes, Sizes] | None = None,
                 allocate: Allocate | None = None) -> None:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from tilewise.kernels.gluon.hopper_dq import hopper_dq_kernel
        from tilewise.kernels.gluon.hopper_tails import TAIL, hopper_tails_kernel
        from tilewise.kernels.gluon.tiles import QUERIES

        self.kernel, scales = _kernel_of(problem, config)
        self.describe = TensorDescriptor
        self.config = config
        self.allocate = allocate or _allocator(problem.device)
        self.queries, self.keys = problem.seeing_queries, problem.seen_keys
        self.reads_all = len(self.queries) == problem.sq and len(self.keys) == problem.sk
        pieces, sq, step = config.columns(problem), len(self.queries), int(QUERIES)
        width, sequences, lines = sum(pieces[0]), problem.sequences, problem.b * problem.hk
        tiles = sequences.slots(len(self.keys), config.keys)
        self.narrow, self.in_pieces = config.narrow(problem), len(pieces[0]) > 1
        self.packed, self.bare = sequences.packed is not None, self.in_pieces or self.narrow
        # Queries, too, count from the first one that is read.
        lower, upper = (0 if bound is None else bound + self.queries.start for bound in bounds_of(problem)[:2])
        least = _LEAST_ORDERED if config.ordered and problem.mask.right is not None else 1
        programs = lines if config.alone else tiles * lines
        section = 1 if config.alone else query_section(problem, width, 4, least)
        most = _at_once(config, multiprocessors)
        self.grid = (config.programs * min(programs, most) if config.alone or config.stays else programs,)
        self.scalars = (
            tiles, problem.hk, problem.b, section, sq, len(self.keys), lower, upper, problem.group, *scales)
        self.forms = self._forms(pieces, gl.bfloat16 if problem.dtype is torch.bfloat16 else gl.float16)
        self.places = operator.itemgetter(*[i if form else len(self.forms) for i, forms in enumerate(self.forms)
                                            for form in forms or [True]])
        columns = min(width // 2, *pieces[0])  # of a part of dQ: what a warpgroup sums, or half of it
        parts = width // columns * sequences.slots(sq, step)
        own = config.alone and config.programs == 1
        steps = (self.grid[0] * problem.group if own else problem.b * problem.hq) * sequences.slots(sq, step)
        self.sums_rows = steps * width // 4
        self.counted = config.ordered and not own
        # Counters of tiles that have added to a step stand behind the sums.
        self.sums_shape = (self.sums_rows + (math.ceil(steps / 256) if self.counted else 0), 256)
        # What of this the kernel gets beside the sums' descriptor: the counters, or where it reads the sums these, or
        # nothing; where programs stay it gets the counter that hands out tiles.
        self.beside = (0, torch.float32) if config.alone else (self.sums_rows, torch.int32) if self.counted else None
        self.sums_block = [(width if self.narrow else columns) // 4, 256]
        self.sums_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        self.enqueue = Enqueue(self.kernel, self.grid, self.scalars, OPTIONS)
        self.tails_shape = (problem.b, problem.hq, sq, int(TAIL))
        self.tails_strides = dense_strides(self.tails_shape, (4, 3, 2, 1))
        slots = sequences.slots(sq, step)
        self.takes_out = config.tails and incoming is not None and self.reads_all
        strides = [strides[:3] for strides in incoming] if incoming and self.takes_out else [(None,) * 3] * 2
        self.enqueue_tails = Enqueue(hopper_tails_kernel, (problem.b * problem.hq * slots,),
                                     (*strides[0], *strides[1], sq, problem.hq, slots, problem.scale, problem.dv,
                                      padded_dim(problem.dv), 1 if self.counted else 0 if config.alone else 64 * width),
                                     OPTIONS)
        self.enqueue_dq = Enqueue(hopper_dq_kernel, (parts * problem.b * problem.hq,),
                                  (*dq_strides[:3], sq, problem.hq, parts, sequences.packed, _gradient_scale(problem),
                                   problem.d, columns, width // columns), OPTIONS)

    def _forms(self, pieces: tuple[Sizes, Sizes], dtype: Any) -> list[list[Any]]:
        """Blocks and layouts of what the kernel takes: a form a piece, None for a second piece like the first."""
        from triton.experimental.gluon import language as gl

        from tilewise.kernels.gluon.hopper_tails import TAIL

        forms = [[None if i and columns == widths[0] else _form([1, 1, 64, columns], dtype)
                  for i, columns in enumerate(widths)] for widths in (pieces[of_v] for of_v in (0, 0, 1, 1, 0, 1))]
        of_tails = [_form([1, 1, 64, int(TAIL)], gl.bfloat16)] if self.config.tails else []
        if self.in_pieces:
            return [*forms[:4], of_tails, [], *forms[4:]]
        of_dq = _form([1, 1, 64, pieces[0][0] // (1 if self.narrow else 2)], dtype) if self.config.alone else None
        return [*forms[:4], of_tails, *([] if self.narrow else [[]]), *forms[4:], [of_dq]]

    def taken(self, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what the kernel takes of (q, k, v, dout, lse, delta, dq, dk, dv), with lse or the tails given.

        Beside tails it reads no delta, and gets what is there in any case, in the same type.
        """
        q, k, v, dout, lines, delta, dq, dk, dv = tensors
        of_queries = (lse,) if self.narrow else (lse, lines if self.config.tails else delta)
        return (q, k, v, dout, *of_queries, dk, dv, *(() if self.in_pieces else (dq,)))

    def __call__(self, *tensors: Any) -> None:
        """Enqueue the kernels on the current stream of the current device."""
        read = self._read(tensors[:9])
        dq, dk, dv = read[6:]
        data = tensors[9:] or _NO_DATA
        plain = data is _NO_DATA  # then alignments belong to the problem: of rows of lse and delta, that of the first
        sums, lse = self._begin(*read[3:6])
        mine = self.taken(read, lse)
        at_sums = sums.data_ptr()
        counter = counter_of(sums.device) if self.config.stays and not self.config.alone else None
        beside = address_of(counter) if self.beside is None else at_sums + self.beside[0] * 1024
        self.enqueue((*self.places((*[tensor.data_ptr() for tensor in mine], None)), at_sums,
                      *(() if self.in_pieces else (beside,)),
                      *[address_of(tensor) for tensor in self._plain(dk, dv, data)]),
                     lambda: self.arguments(mine, sums, data, counter), alike=plain)
        if not self.config.alone:
            self.enqueue_dq((at_sums, dq.data_ptr(), address_of(data[0])), lambda: (sums, dq, data[0]), alike=plain)

    def _begin(self, dout: torch.Tensor, lse: torch.Tensor,
               delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the sums for dq, and what the kernel reads of queries in place of lse: their tails, or lse.

        Sums that are added to in no order are zero; those that are first set hold anything, but their counters zero.
        """
        sums = self.allocate(self.sums_shape, (self.sums_shape[1], 1), torch.float32)
        cleared = sums[self.sums_rows:] if self.counted else sums
        if not self.config.tails:
            cleared.zero_()
            return sums, lse
        tails = self.allocate(self.tails_shape, self.tails_strides, torch.bfloat16)
        read = (delta, dout, lse, None) if self.takes_out else (None, None, lse, delta)
        made = *read, tails, cleared
        self.enqueue_tails(tuple([address_of(tensor) for tensor in made]), lambda: made, alike=True)
        return sums, tails

    def arguments(self, tensors: tuple[torch.Tensor, ...], sums: torch.Tensor,
                  data: tuple[torch.Tensor | None, ...] = _NO_DATA,
                  counter: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Return the tensors in order, all but lse (no tails) and delta as descriptors, the sums and what is beside.

        The sums, too, are described, but where dQ is added from registers; of heads in pieces nothing is beside. dk and
        dv follow as they are where sequences are packed, else None, then the lengths and the seed.
        """
        described = self._in_forms(tensors, lambda tensor, form: tensor if form is None else self.describe(
            tensor, list(tensor.shape), legal_strides(tensor), *form))
        target = sums if self.config.direct else self.describe(sums, [self.sums_rows, 256], list(sums.stride()),
                                                               self.sums_block, self.sums_layout)
        beside = counter if self.config.stays else None
        if self.beside is not None:
            beside = sums[self.beside[0]:].view(self.beside[1])
        return (*described, target, *(() if self.in_pieces else (beside,)),
                *self._plain(tensors[6], tensors[7], data))

    def _in_forms(self, tensors: tuple[torch.Tensor, ...], make: Callable[[torch.Tensor, Any], Any]) -> list[Any]:
        """Make an argument of each tensor in each of its forms; lse and delta may have none, and a form may be None."""
        made: list[Any] = []
        for tensor, forms in zip(tensors, self.forms, strict=True):
            made += [form and make(tensor, form) for form in forms] if forms else [make(tensor, None)]
        return made

    def _plain(self, dk: torch.Tensor, dv: torch.Tensor,
               data: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """What else the kernel takes: dk and dv where sequences are packed, lengths, the seed; none of wide heads."""
        if self.bare:
            return ()
        return (dk, dv, *data) if self.packed else (None, None, *data)

    def _read(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Leave out the rows that are not read."""
        return tensors if self.reads_all else rows_of(tensors, self.queries, self.keys)


def _at_once(config: HopperBackwardShape, multiprocessors: int) -> int:
    """Heads that programs share at a time; all programs of a head have to run."""
    if config.programs > multiprocessors:
        raise InvalidInput(f"programs={config.programs} for {multiprocessors} multiprocessors; allowed are as many.")
    return multiprocessors // config.programs


def _allocator(device: torch.device) -> Allocate:
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _form(block: list[int], dtype: Any) -> tuple[list[int], Any]:
    from triton.experimental.gluon import language as gl

    return block, gl.NVMMASharedLayout.get_default_for(block, dtype)


def _kernel_of(problem: AttentionProblem, config: HopperBackwardShape) -> tuple[Any, tuple[Any, ...]]:
    """The kernel, and its last arguments: what scales scores, and what is fixed when it is compiled."""
    *bounds, count, is_shifted = bounds_of(problem)
    bounded = [bound is not None for bound in bounds]
    scale_log2, squash = scaling_of(problem)
    columns = config.columns(problem)
    if len(columns[0]) > 1:
        from tilewise.kernels.gluon.hopper_backward_pieces import hopper_backward_pieces_kernel
        from tilewise.kernels.gluon.hopper_backward_wide import Shape as ShapeInPieces

        return hopper_backward_pieces_kernel, (problem.scale, scale_log2, ShapeInPieces(
            *columns, config.keys // 64, config.stages, config.out_stages, *bounded))
    if config.narrow(problem):
        from tilewise.kernels.gluon.hopper_backward_narrow import Shape as NarrowShape
        from tilewise.kernels.gluon.hopper_backward_narrow import hopper_backward_narrow_kernel

        return hopper_backward_narrow_kernel, (problem.scale, scale_log2, NarrowShape(
            columns[0][0], config.stages, config.out_stages, config.ordered, config.alone, config.programs,
            2 if config.alone or config.stays else 1, config.stays, *bounded))
    from tilewise.kernels.gluon.hopper_backward import Shape, hopper_backward_kernel

    return hopper_backward_kernel, (_gradient_scale(problem), scale_log2, squash, count, *_draws_of(problem), Shape(
        columns[0][0], config.keys // 64, config.stages, config.out_stages, config.ahead, config.direct,
        config.ordered, config.tails, config.stays, config.alone, *bounded, count is not None,
        problem.sequences.packed is not None, is_shifted, problem.scores.dropout_p > 0.0,
        _SPACES if config.stays and not config.alone and not bounded[0] else (0, 0)))


def _gradient_scale(problem: AttentionProblem) -> float:
    """What dK and dQ are multiplied by: the scale. Where pairs are dropped, dS comes times 2 (1 - p)."""
    dropout_p = problem.scores.dropout_p
    return problem.scale * 0.5 / (1.0 - dropout_p) if dropout_p else problem.scale


def _draws_of(problem: AttentionProblem) -> tuple[int | float | None, ...]:
    """What the kernel knows of dropout: the threshold, factors of delta and dV, first positions; of none, nothing."""
    dropout_p = problem.scores.dropout_p
    if not dropout_p:
        return (None,) * 5
    return (int(dropout_p * DRAWS), 2.0 * (1.0 - dropout_p), 1.0 / (1.0 - dropout_p), problem.seeing_queries.start,
            problem.seen_keys.start)


def rows_of(tensors: tuple[torch.Tensor, ...], queries: Span, keys: Span) -> tuple[torch.Tensor, ...]:
    """Return (q, k, v, dout, lse, delta, dq, dk, dv) of some queries and keys."""
    q, k, v, dout, lse, delta, dq, dk, dv = tensors
    q, dout, lse, delta, dq = (tensor[:, :, queries.start:queries.stop] for tensor in (q, dout, lse, delta, dq))
    k, v, dk, dv = (tensor[:, :, keys.start:keys.stop] for tensor in (k, v, dk, dv))
    return q, k, v, dout, lse.contiguous(), delta.contiguous(), dq, dk, dv


def query_section(problem: AttentionProblem, width: int, sum_bytes: int, least: int = 1) -> int:
    """Heads of k whose query heads' q, dout and sums for dq are worked on together; those of a group come in turn.

    A power of two: sections alike end together. (By simulation of 132 multiprocessors, causal, 32/8 heads, 4096 tokens,
    batch 2: one head a section keeps them 0.79 of the time busy, 6 heads 0.94, 4 or 8 heads 1.00.)
    """
    bytes_of_head = problem.sq * (2 * problem.dtype.itemsize + sum_bytes) * width
    fitting = max(1, _SECTION_BYTES // bytes_of_head)
    return max(least, 1 << fitting.bit_length() - 1)
