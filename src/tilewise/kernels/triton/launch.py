"""Launching a kernel: its arguments from a problem."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from tilewise.kernels.enqueue import Enqueue, addresses_in
from tilewise.kernels.triton.arguments import (
    NO_MODIFIERS,
    Bounds,
    Constants,
    DocumentNumbers,
    Dropout,
    Function,
    Lengths,
    Modifiers,
    Pairs,
    ProblemNumbers,
    Sinks,
    Slopes,
    StridedTensor,
    Tiles,
)
from tilewise.kernels.triton.config import TileConfig
from tilewise.problem import AttentionProblem, Sizes, has_legal_strides, legal_strides
from tilewise.problem.options import DRAW_SPAN, DRAWS, FunctionSpec, Operands, OperandSpec, is_large_softcap

# Contracting a·b + c into one rounding is what the softmax's cost counts on; Triton 3.10 changes the default.
FIXED_OPTIONS = {"enable_fp_fusion": True}

# For one tensor: the block (1, 1, rows, width) that a descriptor moves, and the position past the last one it may read.
Blocks = tuple[tuple[list[int], int], ...]


def modifiers_of(problem: AttentionProblem, operands: Operands) -> Modifiers:
    """Put the operands of a call into the form that kernels take."""
    options = problem.scores
    pairs = problem.pairs

    def strides(facts: OperandSpec, shape: Sizes) -> tuple[int | None, ...]:
        return tuple(None if stride == 1 else stride for stride in facts.expanded(shape))

    def over_pairs(tensor: Any, facts: OperandSpec | None) -> Pairs:
        return Pairs() if facts is None else Pairs(tensor, *strides(facts, pairs))

    def function(facts: FunctionSpec | None, tensors: tuple[Any, ...]) -> Function:
        return Function() if facts is None else Function(facts.code.triton, facts.code.derivative, tuple(tensors))

    alibi, sinks, dropout, documents = Slopes(), Sinks(), Dropout(), DocumentNumbers()
    if options.alibi_slopes is not None:
        offset = 0 if problem.sequences.are_data else problem.mask.offset(problem.sq, problem.sk)
        alibi = Slopes(operands.alibi_slopes, *strides(options.alibi_slopes, pairs[:2]), float(offset))
    if options.sinks is not None:
        sinks = Sinks(operands.sinks, *strides(options.sinks, pairs[1:2]))
    if options.dropout_p:
        dropout = Dropout(operands.seed, options.dropout_p * DRAWS, 1.0 / (1.0 - options.dropout_p),
                          1.0 if is_unaligned(problem) else None,
                          *(float(origin // positions) or None for origin, positions in (
                              (options.dropout_origin_q, 2), (options.dropout_origin_k, 4))))  # of a counter
    if options.documents_q is not None:
        documents = DocumentNumbers(operands.documents_q, operands.documents_k,
                                    1.0 if options.documents_q.shape[0] > 1 else None)
    lists = Tiles()
    if options.tiles_q is not None:
        per_batch, per_head = (1.0 if size > 1 else None for size in options.tiles_q.shape[:2])
        lists = Tiles(operands.tiles_q, operands.tiles_k, per_batch, per_head)
    return Modifiers(options.softcap, over_pairs(operands.bias, options.bias), alibi,
                     over_pairs(operands.mask, options.mask), sinks, dropout,
                     Lengths(operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqlens_q, operands.seqlens_k),
                     documents, lists, function(options.score_function, operands.score_tensors),
                     function(options.mask_function, operands.mask_tensors),
                     1.0 if is_large_softcap(options.softcap) else None)


def operand_addresses(problem: AttentionProblem) -> Callable[[Operands], tuple[int, ...]]:
    """Return what reads where the operands of a call lie, in the order in which their tensors stand in the modifiers.

    From the second call on a launch wants no more of them, and they cost the host less than the modifiers do.
    """
    order = _places_in(modifiers_of(problem, _places_of(problem)))
    if any(place.index is not None for place in order):
        return lambda operands: tuple([place.tensor(operands).data_ptr() for place in order])
    fields = [Operands._fields.index(place.operand) for place in order]
    return lambda operands: tuple([operands[field].data_ptr() for field in fields])  # type: ignore[union-attr]


def operand_count(problem: AttentionProblem) -> int:
    """How many tensors a call has beside q, k and v."""
    return len(_places_in(_places_of(problem)))


def _places_of(problem: AttentionProblem) -> Any:
    """Operands, with a place where a call of this problem has a tensor."""

    def place(name: str) -> "_Place | None":
        facts = getattr(problem.scores, name, None) or getattr(problem.sequences, name, None)
        return _Place(name) if facts is not None or (name == "seed" and problem.scores.dropout_p) else None

    def places(name: str, function: FunctionSpec | None) -> tuple[Any, ...]:
        return tuple([_Place(name, i) for i in range(0 if function is None else len(function.dtypes))])

    return Operands._make([*map(place, Operands._fields[:-2]), places("score_tensors", problem.scores.score_function),
                           places("mask_tensors", problem.scores.mask_function)])


class _Place(NamedTuple):
    """Stands for one operand, or one of a function's tensors."""

    operand: str
    index: int | None = None

    def tensor(self, operands: Operands) -> Any:
        """The one that it stands for."""
        own = getattr(operands, self.operand)
        return own if self.index is None else own[self.index]


def _places_in(value: tuple[Any, ...]) -> list[_Place]:
    found: list[_Place] = []
    for own in value:
        if isinstance(own, _Place):
            found.append(own)
        elif isinstance(own, tuple):
            found += _places_in(own)
    return found


class Launch:
    """A kernel with its grid, its scalar arguments and its options; call it with the tensors.

    A Launch belongs to one problem with one set of strides and pointer alignments, so the kernel compiled at the first
    call is the right one at every later call (:class:`tilewise.kernels.enqueue.Enqueue`).

    Args:
        kernel: a ``triton.jit`` function whose tensor arguments come first.
        ctas: size of the grid, of one dim or of each.
        scalars: the arguments after the tensors, in the kernel's order: numbers and tuples of numbers, then constexprs.
            The kernel is not specialised for an integer in a tuple of numbers.
        strides: of each leading tensor that goes as a :class:`StridedTensor`; None of one that goes as a pointer.
        optional: how many arguments before the scalars may be left out: the modifiers, which stand last, and then
            results that are not wanted.
        blocks: for each leading tensor that goes as a descriptor, its block and the position it is clipped at.
        options: num_warps, num_stages, and maxnreg where a thread's registers are bounded.
    """

    def __init__(self, kernel: Any, ctas: int | tuple[int, ...], scalars: tuple[Any, ...],
                 strides: tuple[Sizes | None, ...] = (), blocks: Blocks = (), optional: int = 0,
                 **options: int) -> None:
        self.kernel = kernel
        self.leading = len(kernel.arg_names) - len(scalars)
        self.optional = optional
        self.grid = (*((ctas,) if isinstance(ctas, int) else ctas), 1, 1)[:3]
        self.scalars = scalars
        self.strides = strides
        self.blocks = blocks
        self.options = options | FIXED_OPTIONS
        self.enqueue = Enqueue(kernel, self.grid, scalars, self.options, specialized=self.leading)

    def __call__(self, *tensors: Any) -> None:
        """Enqueue the kernel on the current stream of the current device."""
        tensors = self._filled(tensors)
        self.enqueue(tuple(addresses_in(tensors)), lambda: self._described(tensors), alike=True)

    def at(self, addresses: tuple[Any, ...], tensors: Callable[[], tuple[Any, ...]]) -> None:
        """Enqueue it where the addresses are known: of every tensor, one in each place, then those of the modifiers.

        ``tensors``: returns what a call takes, none left out.
        """
        self.enqueue(addresses, lambda: self._described(tensors()), alike=True)

    def arguments(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the kernel's arguments before the scalars: None for what was left out, the others with their strides.

        In the place of a tensor that has a block stands a descriptor.
        """
        return self._described(self._filled(tensors))

    def compile(self, arguments: tuple[Any, ...]) -> Any:
        """Compile the kernel for arguments such as :meth:`arguments` returns; None under Triton's interpreter."""
        return self.enqueue.compile(arguments)

    def _filled(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        missing = self.leading - len(tensors)
        if not 0 <= missing <= self.optional:
            raise TypeError(f"{self.kernel} takes {self.leading - self.optional} to {self.leading} tensors, got "
                            f"{len(tensors)}")
        if missing and isinstance(tensors[-1], Modifiers):
            raise TypeError(f"{self.kernel} takes its modifiers as argument {self.leading}, got them as argument "
                            f"{len(tensors)}")
        return (*tensors, *(None,) * (missing - 1), NO_MODIFIERS) if missing else tensors

    def _described(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        made = [*tensors]
        for i, strides in enumerate(self.strides):
            if strides is not None and tensors[i] is not None:
                made[i] = StridedTensor(tensors[i], *strides)
        if self.blocks:
            from triton.tools.tensor_descriptor import TensorDescriptor

            for i, (block, stop) in enumerate(self.blocks):
                shape = [*tensors[i].shape[:2], stop, tensors[i].shape[3]]
                made[i] = TensorDescriptor(tensors[i], shape, legal_strides(tensors[i]), block)
        return tuple(made)


def numbers(problem: AttentionProblem, tiles: int) -> ProblemNumbers:
    """Return what a kernel with so many tiles for each head reads of the problem."""
    count = problem.pairs[0] if problem.sequences.are_data else None
    return ProblemNumbers(problem.scale, problem.scale * math.log2(math.e), bounds(problem), count, problem.sq,
                          problem.sk, problem.hq, problem.hk, problem.group, tiles)


def bounds(problem: AttentionProblem) -> Bounds:
    """Return the numbers of the mask's band.

    Of sequences whose lengths are on the device the diagonal runs through the first query and key; :func:`is_shifted`
    says where it is moved.
    """
    mask = problem.mask
    if not problem.sequences.are_data:
        band = problem.band
        return Bounds(band.lower, band.upper, band.prefix, band.sink_tokens, band.chunk,
                      None if band.chunk is None else band.offset)
    return Bounds(None if mask.left is None else -mask.left, mask.right, mask.prefix, mask.sink_tokens, mask.chunk,
                  None if mask.chunk is None else 0)


def is_shifted(problem: AttentionProblem) -> bool:
    """Whether the kernel moves the diagonal to the last query and key of each sequence."""
    return problem.sequences.are_data and problem.mask.alignment == "bottom_right"


def is_unaligned(problem: AttentionProblem) -> bool:
    """Whether what a tile sees may start inside of a block of draws: the loops then start before it."""
    band = bounds(problem)
    return (problem.scores.documents_q is not None or is_shifted(problem)
            or any(own is not None and own % DRAW_SPAN != 0
                   for own in (band.lower, band.upper, band.chunk, band.offset)))


def constants(problem: AttentionProblem, config: TileConfig, precision: str, int64: bool, **others: Any) -> Constants:
    """Return the constants of a tile kernel; ``others``: those that do not have their defaults."""
    return Constants(problem.d - problem.tail, problem.dv, problem.width, problem.width, precision, int64,
                     config.descriptors, problem.scores.changes_scores, problem.tail, is_shifted(problem),
                     config.block_m, config.block_n, **others)


def needs_int64(problem: AttentionProblem, *strides: Sizes) -> bool:
    """Whether an offset inside one head passes 2^31; offsets of heads and batches are 64-bit in any case."""
    length, width = max(problem.sq, problem.sk), problem.width + problem.tail_width
    pairs = problem.pairs
    if problem.positions_are_int64:
        return True
    for facts in (problem.scores.bias, problem.scores.mask):
        if facts is not None:
            _, _, along_q, along_k = facts.expanded(pairs)
            if (pairs[2] + 256) * abs(along_q) + (pairs[3] + 256) * abs(along_k) >= 2**31:
                return True
    # A tile may reach past the last row before its mask applies: by 256 rows, the largest tile.
    return any((length + 256) * abs(tensor[2]) + width * abs(tensor[3]) >= 2**31 for tensor in strides)


def tile_count(length: int, block: int) -> int:
    """Tiles that cover a length."""
    return -(-length // block)


def tile_slots(problem: AttentionProblem, length: int, block: int) -> int:
    """Return how many tiles of a head and batch entry cover a length, wherever in it sequences begin."""
    return problem.sequences.slots(length, block)


def tile_blocks(problem: AttentionProblem, config: TileConfig) -> Blocks:
    """Blocks of q, k, v and (backward) dout; none where the kernel reads through pointers."""
    if not config.descriptors:
        return ()
    queries, keys = problem.seeing_queries.stop, problem.seen_keys.stop
    of_queries, of_keys = ([1, 1, rows, problem.width] for rows in (config.block_m, config.block_n))
    blocks = ((of_queries, queries), (of_keys, keys), (of_keys, keys), (of_queries, queries))
    return blocks if problem.direction == "backward" else blocks[:3]


def takes_descriptors(problem: AttentionProblem, *strides: Sizes) -> bool:
    """Whether TMA can read tensors of these strides, whatever their sizes: a dim of size 1 is no exception."""
    return all(has_legal_strides((2, 2, 2, 2), tensor, problem.dtype.itemsize) for tensor in strides)
