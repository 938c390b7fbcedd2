"""What a call says, declared once: its arguments, the operators' arguments that they become, and what changes a score.

:class:`CallOptions` has every keyword argument of the public calls. :class:`Operands` and :class:`OperatorOptions` are
what the operators take; their schemas are read off the annotations here. In a score the options act in this order:

    x = scale·q·k                    the scaled score
    y = softcap·tanh(x / softcap)    softcap
    y = f(y; b, h, i, j)             the user's score function
    z = y + bias − slope·|distance|  additive bias and ALiBi
    z = −inf where hidden            masks, the user's mask function among them
    p = exp(z − lse),  lse = log(exp(sink) + Σ exp(z))
    out = Σ p·keep/(1 − dropout_p)·v

Any subset of the steps may be there; the order never changes (maths.md, section 11). How a score's derivative passes
each step back is said there too. The distance of query i and key j is i + offset − j, with the mask's alignment.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints

import torch

from tilewise.functions import FunctionCode, MaskFunction, ScoreFunction, code_of
from tilewise.masks import Mask, TensorMask
from tilewise.validate.values import check_dropout_p, checked_softcap

Sizes = tuple[int, ...]
Tensor = torch.Tensor
# Everything that ``mask=`` takes; public as :data:`tilewise.AnyMask`.
AnyMask: TypeAlias = Mask | TensorMask | torch.Tensor | MaskFunction
ATTENTION = ("attention", "attention_varlen", "explain")
PADDED, PACKED = ("attention", "explain"), ("attention_varlen", "explain")
DECODE = ("attention_decode", "explain_decode")


def _argument(default: Any, calls: tuple[str, ...], *becomes: str, gradient: bool = False) -> Any:
    """Declare an argument: its default, who takes it, the operators' arguments that it becomes; has it a gradient?"""
    return field(default=default, metadata={"calls": calls, "becomes": becomes, "gradient": gradient})


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Every keyword argument of the public calls: their signatures, overloads and explain's are held against it.

    To decode, a mask is a band. Sequences are packed where there is a cu_seqlens_q, without which attention_varlen
    cannot be called.
    """

    mask: AnyMask | None = _argument(
        None, ATTENTION + DECODE, "left", "right", "alignment", "prefix", "sink_tokens", "chunk", "offset", "mask",
        "documents_q", "documents_k", "tiles_q", "tiles_k", "mask_function", "mask_tensors")
    scale: float | None = _argument(None, ATTENTION + DECODE, "scale")
    bias: Tensor | None = _argument(None, ATTENTION, "bias", gradient=True)
    alibi_slopes: Tensor | None = _argument(None, ATTENTION + DECODE, "alibi_slopes", gradient=True)
    score_function: ScoreFunction | None = _argument(None, ATTENTION, "score_function", "score_tensors")
    softcap: float | None = _argument(None, ATTENTION + DECODE, "softcap")
    sinks: Tensor | None = _argument(None, ATTENTION + DECODE, "sinks", gradient=True)
    # Their origins are of a part of a longer sequence: tilewise.distributed alone has such calls.
    dropout_p: float = _argument(0, ATTENTION, "dropout_p", "dropout_origin_q", "dropout_origin_k")
    dropout_seed: int | Tensor | None = _argument(None, ATTENTION, "seed")
    seqlens_q: Tensor | None = _argument(None, PADDED, "seqlens_q")
    seqlens_k: Tensor | None = _argument(None, PADDED, "seqlens_k")
    cu_seqlens_q: Tensor | None = _argument(None, PACKED, "cu_seqlens_q")
    cu_seqlens_k: Tensor | None = _argument(None, PACKED, "cu_seqlens_k")
    seqused_q: Tensor | None = _argument(None, PACKED, "seqlens_q")
    seqused_k: Tensor | None = _argument(None, PACKED, "seqlens_k")
    max_seqlen_q: int | Tensor | None = _argument(None, PACKED, "max_seqlen_q")
    max_seqlen_k: int | Tensor | None = _argument(None, PACKED, "max_seqlen_k")
    k: Tensor | None = _argument(None, DECODE, "k")
    v: Tensor | None = _argument(None, DECODE, "v")
    cache_seqlens: int | Tensor | None = _argument(None, DECODE, "cache_seqlens")
    cache_batch_idx: Tensor | None = _argument(None, DECODE, "cache_batch_idx")
    cache_leftpad: Tensor | None = _argument(None, DECODE, "cache_leftpad")
    block_table: Tensor | None = _argument(None, DECODE, "block_table")
    rotary_cos: Tensor | None = _argument(None, DECODE, "rotary_cos")
    rotary_sin: Tensor | None = _argument(None, DECODE, "rotary_sin")
    rotary_interleaved: bool = _argument(True, DECODE, "rotary_interleaved")
    num_splits: int | None = _argument(None, DECODE, "num_splits")
    return_aux: tuple[str, ...] = _argument((), ATTENTION + DECODE, "max_logit")
    deterministic: bool | None = _argument(None, ATTENTION + DECODE, "deterministic")
    backend: str | None = _argument(None, ATTENTION + DECODE, "backend")
    double_backward: bool = _argument(False, ATTENTION)

    @classmethod
    def of(cls, call: str) -> dict[str, Any]:
        """Return the fields that a public call takes, by name."""
        return {one.name: one for one in fields(cls) if call in one.metadata["calls"]}


# The operands that have a gradient, in their order in :class:`tilewise.backends.base.Gradients`.
DIFFERENTIABLE = tuple(one.name for one in fields(CallOptions) if one.metadata["gradient"])
# What tanh errs by near 0 in the short form of 16-bit kernels, 2^-23, times this is what rounding P to 16 bits costs.
LARGE_SOFTCAP = 2.0**12
DRAWS = 2**16  # equally likely values of a pair's random draw
DRAW_SPAN = 16  # positions, of queries and of keys, after which the order of the draws repeats (maths.md, eq. 19)


class Operands(NamedTuple):
    """The tensors of a call beside q, k and v; None where the call has none.

    Attributes:
        bias: (b|1, hq|1, sq|1, sk|1), the inputs' dtype or float32 (of float64 inputs float64 alone); added to the
            scores.
        alibi_slopes: (b|1, hq), float32 (float64 of float64 inputs).
        mask: (b|1, hq|1, sq|1, sk|1), bool; True = take part.
        sinks: (hq,), in a dtype that bias may have: a logit a head that enters the softmax's denominator alone.
        seed: (1,), int64: seed of the dropout.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,), int32 or int64: where each packed sequence starts, and the last
            one ends; both or none.
        seqlens_q, seqlens_k: (b,), int32 or int64: how many positions of a sequence, the first ones, take part.
        documents_q: (b|1, 4, sq), int32, and documents_k: (b|1, 4, sk), as :class:`tilewise.masks.Documents` has them.
        tiles_q, tiles_k: int32, as :class:`tilewise.masks.tile_lists.TileLists` has them.
        score_tensors, mask_tensors: what the user's functions read, contiguous.
    """

    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqlens_q: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None
    documents_q: torch.Tensor | None = None
    documents_k: torch.Tensor | None = None
    tiles_q: torch.Tensor | None = None
    tiles_k: torch.Tensor | None = None
    score_tensors: tuple[torch.Tensor, ...] = ()
    mask_tensors: tuple[torch.Tensor, ...] = ()

    @property
    def alone(self) -> tuple[torch.Tensor | None, ...]:
        """The operands that are one tensor, or None."""
        return self[:-2]

    @property
    def lengths(self) -> tuple[torch.Tensor | None, ...]:
        """The operands that say how long sequences are: borders of queries and keys, then lengths of both."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.seqlens_q, self.seqlens_k

    @property
    def present(self) -> list[torch.Tensor]:
        """Every tensor that is there."""
        return [*(tensor for tensor in self.alone if tensor is not None), *self.score_tensors, *self.mask_tensors]


NO_OPERANDS = Operands()
_TraceableSize = Annotated[int, "SymInt"]


class OperatorOptions(NamedTuple):
    """Everything of a call but its tensors, as the operators take it.

    Those without a default, deterministic and backend are all that the operators of plain calls take; an option that
    is new goes between them. ``offset`` is a mask's alignment where that is an integer.
    ``dropout_origin_q`` and ``dropout_origin_k`` are the positions of the first query and key among dropout's draws,
    of a call that is a part of another; None = 0. ``float32_results``: whether a pass of 16-bit inputs writes out, or
    dq, dk and dv, in float32, as for a call whose results are parts of a sum. The backward pass is given out and the
    gradients of the results in the dtypes that they have without it.
    """

    scale: float | None
    left: int | None
    right: int | None
    alignment: str | None
    prefix: int | None = None
    sink_tokens: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    max_logit: bool = False
    score_function: str | None = None
    mask_function: str | None = None
    max_seqlen_q: _TraceableSize | None = None
    max_seqlen_k: _TraceableSize | None = None
    offset: int | None = None
    dropout_origin_q: int | None = None
    dropout_origin_k: int | None = None
    float32_results: bool = False
    deterministic: bool = False
    backend: str | None = None

    @classmethod
    def of_plain(cls, plain: tuple[Any, ...]) -> "OperatorOptions":
        """Put a plain operator's options among the others."""
        return cls(*plain[:_LEADING], *RARE, *plain[_LEADING:])

    @property
    def mask(self) -> Mask:
        """The mask, put together again."""
        alignment: Any = self.alignment if self.offset is None else self.offset
        return Mask(self.left, self.right, alignment, self.prefix, self.sink_tokens, self.chunk)

    @classmethod
    def of_mask(cls, scale: float | None, mask: Mask, **others: Any) -> "OperatorOptions":
        """Flatten a mask; ``others``: fields that do not have their defaults."""
        corner, offset = (None, mask.alignment) if isinstance(mask.alignment, int) else (mask.alignment, None)
        return cls(scale, mask.left, mask.right, corner, mask.prefix, mask.sink_tokens, mask.chunk, offset=offset,
                   **others)

    @property
    def settings(self) -> "ScoreSettings":
        """The numbers and functions that change scores, and what is written beside."""
        return ScoreSettings(self.softcap, self.dropout_p, self.max_logit, (self.max_seqlen_q, self.max_seqlen_k),
                             code_of(self.score_function), code_of(self.mask_function), self.dropout_origin_q,
                             self.dropout_origin_k, self.float32_results)


_LEADING = len(OperatorOptions._fields) - len(OperatorOptions._field_defaults)
# Where the rarer options lie, and what they are in a plain call.
RARE_PLACES: Any = slice(_LEADING, -2)
RARE: Any = tuple(OperatorOptions._field_defaults.values())[:-2]
PLAIN_FIELDS = (*OperatorOptions._fields[:_LEADING], *OperatorOptions._fields[-2:])
_SCHEMA_TYPES: dict[Any, str] = {
    torch.Tensor | None: "Tensor?", tuple[torch.Tensor, ...]: "Tensor[]", bool: "bool", float: "float",
    float | None: "float?", int | None: "int?", str | None: "str?", _TraceableSize | None: "SymInt?"}


def schema_of(described: type[Any], names: Iterable[str] | None = None) -> str:
    """Return the part of an operator's schema that a named tuple's fields are, in its order; ``names``: of these."""
    types = get_type_hints(described, include_extras=True)
    return ", ".join(f"{_SCHEMA_TYPES[types[name]]} {name}" for name in names or described._fields)



class FunctionSpec(NamedTuple):
    """A function, with what is known of its tensors.

    Attributes:
        code: the function.
        dtypes: of its tensors.
        is_large: whether one of them has over 2^31 elements.
        tables: of each mask function that it is joined of, the batch entries and heads of its table if it is one of
            the library's own, else None; () = all None.
    """

    code: FunctionCode
    dtypes: tuple[torch.dtype, ...]
    is_large: bool = False
    tables: tuple[tuple[int, int] | None, ...] = ()

    @property
    def may_change(self) -> bool:
        """Whether it reads tensors of the caller's, which may hold something else in the next call."""
        return any(table is None and part.tensors and not part.owns_tensors for part, table in self._parts)

    def distinct_masks(self, b: int, hq: int) -> tuple[int, int]:
        """How many of so many batch entries and heads have a mask of their own: 1 where all share one."""
        sizes = [table or (b if part.reads_batch else 1, hq if part.reads_head else 1) for part, table in self._parts]
        return max(size[0] for size in sizes), max(size[1] for size in sizes)

    @property
    def _parts(self) -> list[tuple[FunctionCode, tuple[int, int] | None]]:
        parts = self.code.parts
        return list(zip(parts, self.tables or (None,) * len(parts), strict=True))


class ScoreSettings(NamedTuple):
    """What is not a tensor of a call and changes its scores; the default changes nothing.

    Attributes:
        softcap, dropout_p, max_logit: as in :class:`ScoreOptions`.
        longest: of packed sequences: the sizes of an operand's query and key dims; None where no operand has that dim.
        score_function, mask_function: the user's own, or None.
        dropout_origin_q, dropout_origin_k, float32_results: as in :class:`OperatorOptions`.
    """

    softcap: float | None = None
    dropout_p: float = 0.0
    max_logit: bool = False
    longest: tuple[int | None, int | None] = (None, None)
    score_function: FunctionCode | None = None
    mask_function: FunctionCode | None = None
    dropout_origin_q: int | None = None
    dropout_origin_k: int | None = None
    float32_results: bool = False

    def checked_numbers(self) -> dict[str, Any]:
        """Return the numbers among the fields of :class:`ScoreOptions`, checked and as a problem has them.

        Raises:
            InvalidInput: one is out of range.
        """
        return {"dropout_p": checked_dropout_p(self.dropout_p), "softcap": checked_softcap(self.softcap),
                "max_logit": self.max_logit, "dropout_origin_q": self.dropout_origin_q or 0,
                "dropout_origin_k": self.dropout_origin_k or 0}


NO_SETTINGS = ScoreSettings()


class OperandSpec(NamedTuple):
    """Shape, strides and dtype of one operand: what a backend needs to know of it before it sees it."""

    shape: Sizes
    strides: Sizes
    dtype: torch.dtype

    def expanded(self, shape: Sizes) -> Sizes:
        """Strides of the operand broadcast to ``shape``: 0 along each dim that it has once."""
        return tuple(0 if own != size else stride
                     for own, size, stride in zip(self.shape, shape, self.strides, strict=True))

    @property
    def vector(self) -> int:
        """How many numbers, one after another along the last dim, fill 16 bytes that a tensor at one may be cut into.

        1 where rows begin or end elsewhere.
        """
        each = 16 // self.dtype.itemsize
        steps = [stride for size, stride in zip(self.shape[:-1], self.strides[:-1], strict=True) if size > 1]
        is_cut = self.strides[-1] == 1 and not any(length % each for length in (self.shape[-1], *steps))
        return each if is_cut else 1


class ScoreOptions(NamedTuple):
    """Everything of a problem that changes its scores, without tensors; the default changes nothing.

    Attributes:
        softcap: bound of the scores before bias and mask, > 0; None = unbounded.
        dropout_p: probability to drop a pair, 0 <= dropout_p < 1, a multiple of 2^-16.
        max_logit: whether the largest visible score of each row is wanted beside lse.
        bias, alibi_slopes, mask, sinks, documents_q, documents_k, tiles_q, tiles_k: spec of the operand, or None.
        score_function, mask_function: spec of the user's own, or None.
        dropout_origin_q, dropout_origin_k: positions of the first query and key among dropout's draws.
    """

    softcap: float | None = None
    dropout_p: float = 0.0
    max_logit: bool = False
    bias: OperandSpec | None = None
    alibi_slopes: OperandSpec | None = None
    mask: OperandSpec | None = None
    sinks: OperandSpec | None = None
    documents_q: OperandSpec | None = None
    documents_k: OperandSpec | None = None
    tiles_q: OperandSpec | None = None
    tiles_k: OperandSpec | None = None
    score_function: FunctionSpec | None = None
    mask_function: FunctionSpec | None = None
    dropout_origin_q: int = 0
    dropout_origin_k: int = 0

    @property
    def functions(self) -> tuple[FunctionSpec, ...]:
        """The user's own that are there."""
        return tuple([spec for spec in (self.score_function, self.mask_function) if spec is not None])

    @property
    def changes_scores(self) -> bool:
        """Whether a score is more than scale·q·k."""
        return self.softcap is not None or self.adds_to_scores or self.score_function is not None

    @property
    def adds_to_scores(self) -> bool:
        """Whether a bias or ALiBi is added to them."""
        return self.bias is not None or self.alibi_slopes is not None

    @property
    def reads_positions(self) -> bool:
        """Whether what becomes of a score depends on its query's and key's place beside the mask."""
        return self.adds_to_scores or self.score_function is not None or self.dropout_p > 0.0

    def __str__(self) -> str:
        parts = []
        if self.softcap is not None:
            parts.append(f"softcap {self.softcap:g}")
        for name in ("bias", "mask"):
            spec = getattr(self, name)
            if spec is not None:
                parts.append(f"{name} {'x'.join(map(str, spec.shape))}")
        if self.alibi_slopes is not None:
            parts.append("alibi")
        if self.sinks is not None:
            parts.append("sinks")
        if self.documents_q is not None:
            parts.append("documents")
        if self.tiles_q is not None:
            parts.append("tile lists")
        if self.dropout_p:
            origin = self.dropout_origin_q, self.dropout_origin_k
            parts.append(f"dropout {self.dropout_p:.4g}" + (f" from {origin[0]}, {origin[1]}" if any(origin) else ""))
        for name, function in (("score", self.score_function), ("mask", self.mask_function)):
            if function is not None:
                parts.append(f"{name} function {function.code.name}")
        return ", ".join(parts)


NO_OPTIONS = ScoreOptions()


def is_large_softcap(softcap: float | None) -> bool:
    """Whether scores are so near 0 beside the softcap that a tanh with an absolute error gives them too few bits."""
    return softcap is not None and softcap > LARGE_SOFTCAP


def checked_dropout_p(dropout_p: Any) -> float:
    """Return the probability as a multiple of 2^-16, what the 16 bits of a pair's draw can tell apart.

    Raises:
        InvalidInput: not 0 <= dropout_p < 1.
    """
    check_dropout_p(dropout_p)
    return min(round(float(dropout_p) * DRAWS), DRAWS - 1) / DRAWS
