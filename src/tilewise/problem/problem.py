"""One attention call as a value: validated once, hashable, without tensors.

Shape letters: b batch, hq query heads, hk key/value heads, sq query length, sk key length, d head dim of q and k,
dv head dim of v.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tilewise.functions import FunctionCode
from tilewise.masks import Band, Mask, Span
from tilewise.masks.tile_lists import TILE
from tilewise.problem.options import (
    NO_OPERANDS,
    NO_OPTIONS,
    NO_SETTINGS,
    FunctionSpec,
    Operands,
    OperandSpec,
    OperatorOptions,
    ScoreOptions,
    ScoreSettings,
)
from tilewise.problem.sequences import DENSE, Sequences
from tilewise.support.caches import registered
from tilewise.validate.call import (
    check_alignment,
    check_companions,
    check_distances,
    check_each,
    check_function_tensors,
    check_lengths,
    check_longest_dims,
    check_together,
)
from tilewise.validate.mask_functions import check_known_mask
from tilewise.validate.tensors import SpecKey, TensorSpec, check_operand, spec_of
from tilewise.validate.values import checked_scale

Direction = Literal["forward", "backward"]
Sizes = tuple[int, ...]
WIDEST = 512  # head dims in one tile
TAIL_WIDTH = 64  # head dims of q and k in a second tile beside it
_NO_MASK = Mask()
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k")
_FUNCTIONS = {"score_tensors": "score_function", "mask_tensors": "mask_function"}


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """What a backend needs to know to accept, configure and launch one call.

    Attributes:
        b, hq, hk, sq, sk, d, dv: sizes, see the module's letters; ``hq`` is a multiple of ``hk``.
        dtype: of q, k and v, of out and the gradients of the three unless ``float32_results``, and of the out and its
            gradient that the backward pass is given. lse is float32 (float64 for float64 inputs).
        device: of every tensor.
        scale: factor of the scores before the softmax, > 0.
        mask: the mask; ``Mask()`` when nothing is hidden.
        deterministic: whether the caller demands bit-equal repeats.
        direction: which pass is asked for; a backend may take one and refuse the other.
        lse_grad: backward only: whether a gradient arrives through lse.
        scores: what changes the scores besides scale and mask.
        sequences: whether lengths are data, and how the sequences lie in the tensors; packed ones have b = 1.
        q_strides, k_strides, v_strides: in elements, dims (b, h, s, d).
        aligned: whether q, k and v begin at multiples of 16 bytes; of a traced call, yes.
        float32_results: whether a pass of 16-bit inputs writes out, or dq, dk and dv, in float32.
    """

    b: int
    hq: int
    hk: int
    sq: int
    sk: int
    d: int
    dv: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    mask: Mask = _NO_MASK
    deterministic: bool = False
    direction: Direction = "forward"
    lse_grad: bool = False
    scores: ScoreOptions = NO_OPTIONS
    sequences: Sequences = DENSE
    q_strides: Sizes = ()
    k_strides: Sizes = ()
    v_strides: Sizes = ()
    aligned: bool = True
    float32_results: bool = False
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        sizes = (self.b, self.hq, self.hk, self.sq, self.sk, self.d, self.dv,
                 *self.q_strides, *self.k_strides, *self.v_strides)
        operands = [spec for spec in (*self.scores, *self.sequences) if isinstance(spec, OperandSpec)]
        if is_symbolic(sizes) or any(is_symbolic((*spec.shape, *spec.strides)) for spec in operands):
            return  # a traced call: it has no hash and is never looked up
        # Looked up several times a call: hashed once here instead.
        names = [n for n in self.__slots__ if n != "_hash"]
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, n) for n in names)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def from_tensors(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Operands = NO_OPERANDS, *,
                     mask: Mask = _NO_MASK, scale: float | None = None, settings: ScoreSettings = NO_SETTINGS,
                     deterministic: bool = False) -> "AttentionProblem":
        """Check the tensors against one another and describe them.

        Raises:
            InvalidInput: a shape, dtype or device that no backend could give a meaning; names the argument.
        """
        specs = spec_of("q", q), spec_of("k", k), spec_of("v", v)
        more = specs_of_operands(operands)
        # Symbolic sizes of a traced call cannot be hashed; there the checks alone matter.
        sizes = [size for _, shape, strides, _, _ in (*specs, *more) for size in (*shape, *strides)]
        sizes += [size for size in settings.longest if size is not None]
        build = problem_from_specs if torch.compiler.is_compiling() or is_symbolic(sizes) else _cached
        return build(specs, more, mask, scale, settings, deterministic)

    @classmethod
    def from_call(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Operands,
                  options: OperatorOptions) -> "AttentionProblem":
        """The same of what an operator takes; sizes may be symbolic."""
        return cls.from_tensors(q, k, v, operands, mask=options.mask, scale=options.scale, settings=options.settings,
                                deterministic=options.deterministic)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.hq // self.hk

    @property
    def pairs(self) -> Sizes:
        """What a bias or a boolean mask broadcasts to: (sequences, hq, the longest's queries, the longest's keys).

        Packed sequences whose longest is not known (no operand needs it) have their total there.
        """
        return _pairs(self.sequences, self.b, self.hq, self.sq, self.sk)

    @property
    def band(self) -> Band:
        """The mask with this problem's lengths put in; without a meaning where lengths are data."""
        return self.mask.band(self.sq, self.sk)

    @property
    def sees_ahead(self) -> bool:
        """Whether some query may see a key ahead of its own place on the mask's diagonal."""
        return self.mask.right is None or self.mask.right > 0 or self.mask.has_exceptions

    @property
    def seen_keys(self) -> Span:
        """The first to the last key that a query sees. Those outside are not read: NaN there reaches nothing.

        Where lengths are data, all.
        """
        return Span(0, self.sk) if self.sequences.are_data else self.band.keys_of(Span(0, self.sq), self.sk)

    @property
    def seeing_queries(self) -> Span:
        """The first to the last query that sees a key. Those outside give out 0, lse -inf and zero gradients, unread.

        Where lengths are data, all.
        """
        return Span(0, self.sq) if self.sequences.are_data else self.band.queries_of(Span(0, self.sk), self.sq)

    @property
    def positions_are_int64(self) -> bool:
        """Whether functions get positions of 64 bits: they may number the pairs, or the elements of a tensor."""
        pairs = self.pairs
        return any(function.is_large or pairs[2] * pairs[3] > 2**31 for function in self.scores.functions)

    @property
    def is_banded(self) -> bool:
        """Whether two bounds say who sees whom: no exceptions from them, documents, boolean mask or function."""
        scores = self.scores
        return not (self.mask.has_exceptions or scores.mask is not None or scores.documents_q is not None
                    or scores.tiles_q is not None or scores.mask_function is not None)

    @property
    def distinct_masks(self) -> tuple[int, int]:
        """How many batch entries, and how many heads, have a mask of their own: 1 where all share one."""
        scores, function = self.scores, self.scores.mask_function
        batches = [spec.shape[0] for spec in (scores.mask, scores.documents_q) if spec is not None]
        heads = [] if scores.mask is None else [scores.mask.shape[1]]
        if function is not None:
            own = function.distinct_masks(self.b, self.hq)
            batches, heads = [*batches, own[0]], [*heads, own[1]]
        return max([1, *batches]), max([1, *heads])

    @property
    def width(self) -> int:
        """Width of every head inside tile kernels: the wider of d, up to the widest tile, and dv, padded.

        One width for both: Triton 3.6 miscompiles the pipelined forward loop on sm_90 when k's and v's tiles differ
        in width (d 40, dv 24 gave wrong numbers and out-of-bounds reads on an H200).
        """
        return padded_dim(max(min(self.d, WIDEST), self.dv))

    @property
    def tail(self) -> int:
        """How many head dims of q and k lie past the widest tile; tile kernels hold them in one of TAIL_WIDTH."""
        return max(0, self.d - WIDEST)

    @property
    def tail_width(self) -> int:
        """Width of the tile that holds the tail, 0 without one."""
        return TAIL_WIDTH if self.tail else 0

    @property
    def lse_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def out_dtype(self) -> torch.dtype:
        """What a pass writes out in, or dq, dk and dv."""
        return torch.float32 if self.float32_results else self.dtype

    @property
    def is_empty(self) -> bool:
        """Whether it is known that no pair is visible, or an output has no element."""
        if self.sequences.are_data:
            return not (self.b and self.hq and self.sq)
        return not (self.b and self.hq and len(self.seen_keys) and len(self.seeing_queries))

    @property
    def out_strides(self) -> Sizes:
        """Strides of out: dense, with b, h and s in q's memory order."""
        return dense_strides((self.b, self.hq, self.sq, self.dv), self.q_strides)

    def backward(self, *, lse_grad: bool) -> "AttentionProblem":
        """The same problem seen from its backward pass."""
        return _backward_of(self, lse_grad)

    def __str__(self) -> str:
        heads = f"{self.hq}" if self.hq == self.hk else f"{self.hq}/{self.hk}"
        dims = f"{self.d}" if self.d == self.dv else f"{self.d}/{self.dv}"
        dtype = str(self.dtype).removeprefix("torch.") + (" to float32" if self.float32_results else "")
        changes = ", ".join(part for part in (str(self.mask), str(self.scores), str(self.sequences)) if part)
        return f"{self.direction} b{self.b} h{heads} s{self.sq}x{self.sk} d{dims} {dtype} {changes} on {self.device}"


def padded_dim(d: int) -> int:
    """Width of a head inside tile kernels: the next power of two, at least 16, the least side of a tile product."""
    return max(16, 1 << (d - 1).bit_length())


def dense_strides(shape: Sizes, order_of: Sizes) -> Sizes:
    """Strides of a dense (b, h, s, d) tensor whose b, h and s lie in memory as those with ``order_of`` do; d innermost.

    Keeping the caller's order spares the copy that a following ``transpose(1, 2).reshape(...)`` would make.
    """
    strides, step = [1] * 4, shape[3]
    for dim in reversed(memory_order(order_of)):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def memory_order(strides: Sizes) -> Sizes:
    """Return dims 0 to 2 (b, h and s) from the one with the longest stride to that with the shortest.

    An expanded dim, whose stride of 0 tells nothing, keeps its place among them, and so do dims of one stride: as torch
    orders the dims of ``empty_like``. So, too, where a traced call leaves to the data which stride is the longer one.
    """
    holds: Callable[[Any], bool] = bool
    if is_symbolic(strides):
        from torch.fx.experimental.symbolic_shapes import guard_or_false as holds
    told = [dim for dim in range(3) if not holds(strides[dim] == 0)]
    longest_first: list[int] = []
    for dim in told:
        longer = [other for other in longest_first if not holds(strides[other] < strides[dim])]
        longest_first.insert(len(longer), dim)
    return tuple([longest_first.pop(0) if dim in told else dim for dim in range(3)])


def legal_strides(tensor: torch.Tensor) -> list[int]:
    """Strides for a descriptor: along a dim of size 1, where any would do, one that the hardware accepts."""
    return [16 if size == 1 and dim < 3 else stride
            for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))]


def has_legal_strides(sizes: Sizes, strides: Sizes, itemsize: int) -> bool:
    """Whether TMA can move a tensor with these strides: the last is 1, the others are positive multiples of 16 bytes.

    Along a dim of size 1 it makes no step.
    """
    return strides[3] == 1 and all(size <= 1 or (stride > 0 and stride * itemsize % 16 == 0)
                                   for size, stride in zip(sizes[:3], strides[:3], strict=True))


def has_legal_bias_strides(bias: OperandSpec) -> bool:
    """Whether TMA can move a bias, which batch entries or heads share where their stride is 0."""
    own = tuple(1 if stride == 0 else size for size, stride in zip(bias.shape[:2], bias.strides[:2], strict=True))
    return has_legal_strides((*own, *bias.shape[2:]), bias.strides, bias.dtype.itemsize)


def specs_of_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[SpecKey, SpecKey, SpecKey]:
    """Read what an operator was handed: its schema has seen to it that these are tensors."""
    return (("q", q.shape, q.stride(), q.dtype, q.device), ("k", k.shape, k.stride(), k.dtype, k.device),
            ("v", v.shape, v.stride(), v.dtype, v.device))


def are_aligned(*tensors: torch.Tensor) -> bool:
    """Whether all of them begin at multiples of 16 bytes, as TMA demands; fake ones count as if."""
    return all(isinstance(tensor, FakeTensor) or tensor.data_ptr() & 15 == 0 for tensor in tensors)


def alignment_of(addresses: list[int]) -> tuple[bool, ...]:
    """Which addresses are multiples of 16 bytes, each by itself: what a compiled kernel and a descriptor count on."""
    return tuple([address & 15 == 0 for address in addresses])


def specs_of_operands(operands: Operands) -> tuple[SpecKey, ...]:
    """Read the operands that are there."""
    if operands is NO_OPERANDS:
        return ()
    return tuple([spec_of(name, tensor) for name, tensor in zip(Operands._fields, operands.alone, strict=False)
                  if tensor is not None]
                 + [spec_of(name, tensor) for name in _FUNCTIONS for tensor in getattr(operands, name)])


def is_symbolic(sizes: Iterable[int]) -> bool:
    """Whether a traced call left a size open."""
    return any(isinstance(size, torch.SymInt) for size in sizes)


def problem_from_specs(tensors: tuple[SpecKey, SpecKey, SpecKey], operands: tuple[SpecKey, ...], mask: Mask,
                       scale: float | None, settings: ScoreSettings, deterministic: bool,
                       aligned: bool = True) -> AttentionProblem:
    """Check what was read of the tensors against one another; see :meth:`AttentionProblem.from_tensors`."""
    q, k, v = map(TensorSpec._make, tensors)
    more = [TensorSpec._make(own) for own in operands]
    check_each(q, k, v)
    (b, hq, sq, d), (_, hk, sk, _), dv = q.shape, k.shape, v.shape[3]
    check_together(q, k, v, packed=any(own.name == "cu_seqlens_q" for own in more))
    scores, sequences = NO_OPTIONS, _sequences(more, settings, q, mask)
    if not sequences.are_data:
        check_alignment(mask, q, k, v)
    if more or settings != NO_SETTINGS:
        scores = _score_options(more, settings, sequences, (b, hq, sq, sk), q)
        if scores.alibi_slopes is not None:
            check_distances(mask, sq, sk, are_data=sequences.are_data)
    return AttentionProblem(
        b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv, dtype=q.dtype, device=q.device, scale=checked_scale(scale, d),
        mask=mask, deterministic=deterministic, scores=scores, sequences=sequences, q_strides=q.strides,
        k_strides=k.strides, v_strides=v.strides, aligned=aligned,
        float32_results=settings.float32_results and q.dtype.itemsize == 2,
    )


_cached = registered(lru_cache(maxsize=4096)(problem_from_specs))


def _sequences(operands: list[TensorSpec], settings: ScoreSettings, q: TensorSpec, mask: Mask) -> Sequences:
    """Check the operands that hold lengths, and describe them."""
    given = {own.name: own for own in operands if own.name in _LENGTHS}
    if not given:
        return DENSE
    count, packed = check_lengths(given, q, mask), "cu_seqlens_q" in given
    sizes = settings.longest if packed else (None, None)
    found = {name: _described(own) for name, own in given.items()}
    return Sequences(count if packed else None, **found, max_seqlen_q=sizes[0], max_seqlen_k=sizes[1])


def _score_options(operands: list[TensorSpec], settings: ScoreSettings, sequences: Sequences, sizes: Sizes,
                   q: TensorSpec) -> ScoreOptions:
    """Check the operands against the sizes (b, hq, sq, sk), and describe them."""
    # Where the inputs are float64, finite differences want the operands to be that too.
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    b, _, sq, sk = sizes
    full = _pairs(sequences, *sizes)
    allowed: dict[str, tuple[Sizes, tuple[torch.dtype, ...]]] = {
        "bias": (full, (q.dtype, wide)), "mask": (full, (torch.bool,)), "alibi_slopes": (full[:2], (wide,)),
        "sinks": (full[1:2], (q.dtype, wide)), "seed": ((1,), (torch.int64,)),
        "documents_q": ((b, 4, sq), (torch.int32,)), "documents_k": ((b, 4, sk), (torch.int32,)),
        "tiles_q": ((*full[:2], -(-sq // TILE), 2 + -(-sk // TILE)), (torch.int32,)),
        "tiles_k": ((*full[:2], -(-sk // TILE), 2 + -(-sq // TILE)), (torch.int32,)),
    }
    found: dict[str, Any] = {}
    for own in operands:
        if own.name not in allowed:
            continue
        if own.name in ("bias", "mask") and sequences.packed is not None:
            check_longest_dims(own.name, own.shape, (sequences.max_seqlen_q, sequences.max_seqlen_k))
        check_operand(own, *allowed[own.name], q.device, q.shape if sequences.packed is None else None)
        found[own.name] = _described(own)
    numbers = settings.checked_numbers()
    check_companions(found, settings.dropout_p, are_data=sequences.are_data)
    found.pop("seed", None)
    for name, said in _FUNCTIONS.items():
        read = [own for own in operands if own.name == name]
        check_function_tensors(said, read, q.device)
        found[said] = _function(getattr(settings, said), read, full, sequences)
    return ScoreOptions(**numbers, **found)


def _described(operand: TensorSpec) -> OperandSpec:
    return OperandSpec(tuple(operand.shape), tuple(operand.strides), operand.dtype)


def _function(code: FunctionCode | None, tensors: list[TensorSpec], full: Sizes,
              sequences: Sequences) -> FunctionSpec | None:
    """Describe a function and its tensors; ``full``: (b, hq, sq, sk) of the call."""
    if code is None:
        return None
    tables, first = [], 0
    for part in code.parts:
        if part.kind is not None:
            shape = tensors[first].shape
            check_known_mask(part.kind, shape, full, is_packed=sequences.packed is not None)
        tables.append(None if part.kind is None else (shape[0], shape[1]))
        first += part.tensors
    return FunctionSpec(code, tuple(own.dtype for own in tensors),
                        any(math.prod(own.shape) > 2**31 for own in tensors), tuple(tables))


def _pairs(sequences: Sequences, b: int, hq: int, sq: int, sk: int) -> Sizes:
    if sequences.packed is None:
        return b, hq, sq, sk
    longest = ((sq if sequences.max_seqlen_q is None else sequences.max_seqlen_q),
               (sk if sequences.max_seqlen_k is None else sequences.max_seqlen_k))
    return sequences.packed, hq, *longest


@registered
@lru_cache(maxsize=4096)
def _backward_of(problem: AttentionProblem, lse_grad: bool) -> AttentionProblem:
    return replace(problem, direction="backward", lse_grad=lse_grad)
