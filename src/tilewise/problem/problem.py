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

from tilewise.caches import registered
from tilewise.errors import InvalidInput
from tilewise.masks import Band, Mask, Span
from tilewise.problem.options import (
    NO_OPERANDS,
    NO_OPTIONS,
    NO_SETTINGS,
    FunctionFacts,
    OperandFacts,
    Operands,
    OperatorOptions,
    ScoreOptions,
    ScoreSettings,
    check_layout,
    check_operand,
    checked_dropout_p,
    checked_softcap,
    is_factor,
)
from tilewise.problem.sequences import DENSE, Sequences
from tilewise.shape_hints import layout_hint
from tilewise.tile_lists import TILE

Direction = Literal["forward", "backward"]
Sizes = tuple[int, ...]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
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
        dtype: of q, k, v, out and their gradients. lse is float32 (float64 for float64 inputs).
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
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        sizes = (self.b, self.hq, self.hk, self.sq, self.sk, self.d, self.dv,
                 *self.q_strides, *self.k_strides, *self.v_strides)
        operands = [facts for facts in (*self.scores, *self.sequences) if isinstance(facts, OperandFacts)]
        if is_symbolic(sizes) or any(is_symbolic((*facts.shape, *facts.strides)) for facts in operands):
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
        facts = facts_of("q", q), facts_of("k", k), facts_of("v", v)
        more = facts_of_operands(operands)
        # Symbolic sizes of a traced call cannot be hashed; there the checks alone matter.
        sizes = [size for _, shape, strides, _, _ in (*facts, *more) for size in (*shape, *strides)]
        sizes += [size for size in settings.longest if size is not None]
        build = problem_from_facts if torch.compiler.is_compiling() or is_symbolic(sizes) else _cached
        return build(facts, more, mask, scale, settings, deterministic)

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
        dtype = str(self.dtype).removeprefix("torch.")
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


# name, shape, strides, dtype, device: what the validator reads of one tensor, as a hashable tuple.
Facts = tuple[str, Sizes, Sizes, torch.dtype, torch.device]


def facts_of(name: str, tensor: torch.Tensor) -> Facts:
    """Read one tensor; raises :class:`InvalidInput` for anything else."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(f"{name} is a {type(tensor).__name__}; allowed is a torch.Tensor of shape (b, h, s, d).")
    check_layout(name, tensor)
    return name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def facts_of_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Facts, Facts, Facts]:
    """Read what an operator was handed: its schema has seen to it that these are tensors."""
    return (("q", q.shape, q.stride(), q.dtype, q.device), ("k", k.shape, k.stride(), k.dtype, k.device),
            ("v", v.shape, v.stride(), v.dtype, v.device))


def are_aligned(*tensors: torch.Tensor) -> bool:
    """Whether all of them begin at multiples of 16 bytes, as Hopper's copy engine demands; fake ones count as if."""
    return all(isinstance(tensor, FakeTensor) or tensor.data_ptr() & 15 == 0 for tensor in tensors)


def alignment_of(addresses: list[int]) -> tuple[bool, ...]:
    """Which addresses are multiples of 16 bytes, each by itself: what a compiled kernel and a descriptor count on."""
    return tuple([address & 15 == 0 for address in addresses])


def facts_of_operands(operands: Operands) -> tuple[Facts, ...]:
    """Read the operands that are there."""
    if operands is NO_OPERANDS:
        return ()
    return tuple([facts_of(name, tensor) for name, tensor in zip(Operands._fields, operands.alone, strict=False)
                  if tensor is not None]
                 + [facts_of(name, tensor) for name in _FUNCTIONS for tensor in getattr(operands, name)])


def is_symbolic(sizes: Iterable[int]) -> bool:
    """Whether a traced call left a size open."""
    return any(isinstance(size, torch.SymInt) for size in sizes)


def problem_from_facts(tensors: tuple[Facts, Facts, Facts], operands: tuple[Facts, ...], mask: Mask,
                       scale: float | None, settings: ScoreSettings, deterministic: bool,
                       aligned: bool = True) -> AttentionProblem:
    """Check the facts against one another; see :meth:`AttentionProblem.from_tensors`."""
    q, k, v = tensors
    check_each(q, k, v)
    (b, hq, sq, d), (_, hk, sk, _), dv = q[1], k[1], v[1][3]
    packed = any(facts[0] == "cu_seqlens_q" for facts in operands)
    _check_together(q, k, v, packed)
    scores, sequences = NO_OPTIONS, DENSE
    if operands:
        sequences = _sequences(operands, settings, q, mask)
    if not sequences.are_data:
        _check_alignment(mask, q, k, v)
    if operands or settings != NO_SETTINGS:
        scores = _score_options(operands, settings, sequences, (b, hq, sq, sk), q)
        if scores.alibi_slopes is not None and mask.alignment is None and (sq != sk or sequences.are_data):
            raise InvalidInput(f"alibi_slopes are given with {_lengths_text(sq, sk, sequences)} and no alignment: the "
                               "distance of a query and a key is ambiguous. Pass mask=window(None, None, alignment) or "
                               "another mask with alignment='top_left' or 'bottom_right'.")
    return AttentionProblem(
        b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv, dtype=q[3], device=q[4], scale=checked_scale(scale, d),
        mask=mask, deterministic=deterministic, scores=scores, sequences=sequences, q_strides=q[2], k_strides=k[2],
        v_strides=v[2], aligned=aligned,
    )


_cached = registered(lru_cache(maxsize=4096)(problem_from_facts))


def check_each(*tensors: Facts) -> None:
    """Check what concerns each tensor, and that all have one dtype and device; raises :class:`InvalidInput`."""
    for name, shape, _, dtype, device in tensors:
        if len(shape) != 4:
            raise InvalidInput(f"{name} has shape {_text(shape)}; allowed are 4 dims (b, h, s, d).")
        if dtype not in DTYPES:
            raise InvalidInput(f"{name} has dtype {dtype}; allowed are {', '.join(map(str, DTYPES))}.")
        if shape[3] < 1:
            raise InvalidInput(f"{name} has head dim {shape[3]}; allowed are 1 and more.")
        first, _, _, first_dtype, first_device = tensors[0]
        if dtype != first_dtype:
            raise InvalidInput(f"{name} has dtype {dtype} and {first} has {first_dtype}: cast them to one dtype.")
        if device != first_device:
            raise InvalidInput(f"{name} is on {device} and {first} is on {first_device}: move them to one device.")


def _check_together(q: Facts, k: Facts, v: Facts, packed: bool) -> None:
    for name, facts in (("k", k), ("v", v)):
        if facts[1][0] != q[1][0]:
            raise InvalidInput(f"{name} has batch size {facts[1][0]} and q has {q[1][0]}: they must be equal.")
    if k[1][3] != q[1][3]:
        raise InvalidInput(f"k has head dim {k[1][3]} and q has {q[1][3]}: they must be equal (v's may differ).")
    for dim, what in ((1, "heads"), (2, "positions")):
        if v[1][dim] != k[1][dim]:
            raise InvalidInput(f"v has {v[1][dim]} {what} and k has {k[1][dim]}: they must be equal."
                               + layout_hint("qkv", q[1], k[1], v[1], packed=packed))
    hq, hk = q[1][1], k[1][1]
    if hk == 0 or hq % hk:
        hint = layout_hint("qkv", q[1], k[1], v[1], packed=packed) or " Did you transpose (b, h, s, d)?"
        raise InvalidInput(f"k has {hk} heads and q has {hq}: q heads must be a multiple of k heads.{hint}")


def _check_alignment(mask: Mask, q: Facts, k: Facts, v: Facts) -> None:
    """Raise where lengths differ and the mask names no alignment."""
    try:
        mask.band(q[1][2], k[1][2])
    except InvalidInput as error:
        hint = layout_hint("qkv", q[1], k[1], v[1])
        raise InvalidInput(f"{str(error).rstrip()}\n{hint.strip()}" if hint else str(error)) from None


def _sequences(operands: tuple[Facts, ...], settings: ScoreSettings, q: Facts, mask: Mask) -> Sequences:
    """Check the operands that hold lengths, and describe them."""
    given = {facts[0]: facts for facts in operands if facts[0] in _LENGTHS}
    if not given:
        return DENSE
    found = {}
    packed = ("cu_seqlens_q" in given, "cu_seqlens_k" in given)
    if packed[0] != packed[1]:
        raise InvalidInput(f"cu_seqlens_q is {'given' if packed[0] else 'missing'} and cu_seqlens_k is "
                           f"{'given' if packed[1] else 'missing'}: packed sequences need both.")
    count = math.prod(given["cu_seqlens_q"][1]) - 1 if packed[0] else q[1][0]
    for name, shape, strides, dtype, device in given.values():
        wanted = (count + 1 if name.startswith("cu") else count,)
        said = name if name.startswith("cu") or not packed[0] else name.replace("seqlens", "seqused")
        check_operand(said, (shape, dtype, device), wanted, (torch.int32, torch.int64), q[4])
        if shape[0] > 1 and strides[0] != 1:
            raise InvalidInput(f"{said} has stride {strides[0]}; allowed is 1: call contiguous() on it.")
        found[name] = OperandFacts(tuple(shape), tuple(strides), dtype)
    if packed[0] and (count < 0 or q[1][0] != 1):
        raise InvalidInput(f"cu_seqlens_q has shape {tuple(given['cu_seqlens_q'][1])} and q a batch size of {q[1][0]}; "
                           "allowed are (sequences + 1,) and 1: packed sequences have no other batch dim.")
    if mask.is_bounded and mask.alignment is None:
        raise InvalidInput(f"mask is {mask} and names no alignment, but lengths are data ({', '.join(given)}): whether "
                           "those of queries and keys are equal, the device alone knows. Pass alignment='top_left' or "
                           "'bottom_right'.")
    sizes = settings.longest if packed[0] else (None, None)
    return Sequences(count if packed[0] else None, **found, max_seqlen_q=sizes[0], max_seqlen_k=sizes[1])


def _score_options(operands: tuple[Facts, ...], settings: ScoreSettings, sequences: Sequences, sizes: Sizes,
                   q: Facts) -> ScoreOptions:
    """Check the operands against the sizes (b, hq, sq, sk), and describe them."""
    dtype, device = q[3], q[4]
    # Where the inputs are float64, finite differences want the operands to be that too.
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    b, _, sq, sk = sizes
    full = _pairs(sequences, *sizes)
    allowed: dict[str, tuple[Sizes, tuple[torch.dtype, ...]]] = {
        "bias": (full, (dtype, wide)), "mask": (full, (torch.bool,)), "alibi_slopes": (full[:2], (wide,)),
        "sinks": (full[1:2], (dtype, wide)), "seed": ((1,), (torch.int64,)),
        "documents_q": ((b, 4, sq), (torch.int32,)), "documents_k": ((b, 4, sk), (torch.int32,)),
        "tiles_q": ((*full[:2], -(-sq // TILE), 2 + -(-sk // TILE)), (torch.int32,)),
        "tiles_k": ((*full[:2], -(-sk // TILE), 2 + -(-sq // TILE)), (torch.int32,)),
    }
    found: dict[str, Any] = {}
    for name, shape, strides, own_dtype, own_device in operands:
        if name in _LENGTHS or name in _FUNCTIONS:
            continue
        wanted, dtypes = allowed[name]
        if name in ("bias", "mask") and sequences.packed is not None:
            _check_longest(name, shape, sequences)
        check_operand(name, (shape, own_dtype, own_device), wanted, dtypes, device,
                      q[1] if sequences.packed is None else None)
        found[name] = OperandFacts(tuple(shape), tuple(strides), own_dtype)
    if ("documents_q" in found) != ("documents_k" in found):
        raise InvalidInput("documents_q and documents_k: one is given without the other; allowed are both, or none.")
    if "tiles_q" in found and sequences.are_data:
        raise InvalidInput("mask is tiled() for lengths of its own, but lengths are data; pass it untiled.")
    dropout_p = checked_dropout_p(settings.dropout_p)
    if (found.pop("seed", None) is None) != (settings.dropout_p == 0.0):
        raise InvalidInput(f"dropout_p is {settings.dropout_p} and a seed is "
                           f"{'given' if settings.dropout_p == 0.0 else 'missing'}: dropout needs both.")
    score_function, mask_function = (_function(name, operands, settings, device) for name in _FUNCTIONS)
    return ScoreOptions(checked_softcap(settings.softcap), dropout_p, settings.max_logit, **found,
                        score_function=score_function, mask_function=mask_function)


def _function(name: str, operands: tuple[Facts, ...], settings: ScoreSettings,
              device: torch.device) -> FunctionFacts | None:
    """Check the tensors of a function of the user's, and describe it."""
    said, tensors = _FUNCTIONS[name], [facts for facts in operands if facts[0] == name]
    for i, (_, shape, strides, _, own_device) in enumerate(tensors):
        if own_device != device:
            raise InvalidInput(f"{said}: tensors[{i}] is on {own_device} and q is on {device}: move them to one "
                               "device.")
        dense = [math.prod(shape[dim + 1:]) for dim in range(len(shape))]
        if any(size > 1 and own != wanted for size, own, wanted in zip(shape, strides, dense, strict=True)):
            raise InvalidInput(f"{said}: tensors[{i}] has strides {_text(strides)}; allowed are those of a contiguous "
                               "tensor, which a kernel reads by its pointer: call contiguous() on it.")
    code = getattr(settings, said)
    return None if code is None else FunctionFacts(code, tuple(facts[3] for facts in tensors),
                                                   any(math.prod(facts[1]) > 2**31 for facts in tensors))


def _check_longest(name: str, shape: Sizes, sequences: Sequences) -> None:
    """Packed sequences: a dim of queries or keys says how long the longest may be, and so must the caller."""
    for dim, side, longest in ((2, "q", sequences.max_seqlen_q), (3, "k", sequences.max_seqlen_k)):
        if shape[dim] != 1 and longest is None:
            raise InvalidInput(f"{name} has shape {_text(shape)} and sequences are packed: pass max_seqlen_{side} as "
                               f"an integer, the size of its dim {dim}.")


def _pairs(sequences: Sequences, b: int, hq: int, sq: int, sk: int) -> Sizes:
    if sequences.packed is None:
        return b, hq, sq, sk
    longest = ((sq if sequences.max_seqlen_q is None else sequences.max_seqlen_q),
               (sk if sequences.max_seqlen_k is None else sequences.max_seqlen_k))
    return sequences.packed, hq, *longest


def _lengths_text(sq: int, sk: int, sequences: Sequences) -> str:
    return "lengths that are data" if sequences.are_data else f"{sq} queries and {sk} keys"


def checked_scale(scale: float | None, d: int) -> float:
    """Return the scale, 1/sqrt(d) for None. Raises :class:`InvalidInput` unless it is None or a factor in float32."""
    if scale is None:
        return 1.0 / math.sqrt(d)
    if is_factor(scale):
        return float(scale)
    raise InvalidInput(f"scale is {scale!r}; allowed is a number from 2^-126 to 2^127, or None for 1/sqrt(d).")


def _text(shape: Iterable[int]) -> str:
    return "(" + ", ".join(str(size) for size in shape) + ")"


@registered
@lru_cache(maxsize=4096)
def _backward_of(problem: AttentionProblem, lse_grad: bool) -> AttentionProblem:
    return replace(problem, direction="backward", lse_grad=lse_grad)
