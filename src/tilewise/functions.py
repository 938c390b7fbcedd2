"""Score and mask functions of the user's own: written for Triton, which inlines them, and in torch for the reference.

A call's functions travel through an operator's schema by name (:func:`code_of` finds them again), their tensors as
tensors. What stands behind a name is kept as long as somebody uses it.
"""

import copy
import dis
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar, cast
from weakref import WeakValueDictionary

import torch as _torch  # of the two classes, torch is an attribute

from tilewise.masks import Mask, TensorMask
from tilewise.masks.operators import JoinsTensors
from tilewise.support.generated import jit_function
from tilewise.validate.functions import (
    check_count,
    check_is_kept,
    check_joined,
    check_parts,
    check_picture,
    check_score_function,
    check_tensors,
    check_without_gradient,
    tensors_of_joined,
)


class MaskKind(NamedTuple):
    """What a mask function of the library's own is (mask_functions.py).

    Attributes:
        name: of what makes it.
        numbers: what it is made with, besides tensors.
    """

    name: str
    numbers: tuple[int | None, ...] = ()

    def text(self, table: Sequence[int]) -> str:
        """Say what a mask is, by the shape of its first tensor."""
        return {"tree": "tree of {table[2]} tokens", "intervals": "intervals of {table[2]} keys",
                "blocks": "blocks of {numbers[0]} x {numbers[1]}",
                "prefixes": "prefixes of {table[0]} batch entries"}[self.name].format(table=table, numbers=self.numbers)


@dataclass(frozen=True, eq=False)
class FunctionCode:
    """A score or mask function of the user's without its tensors; the same functions have one code.

    Attributes:
        name: what an operator is told, and a message shows; no two codes of a process share it.
        triton, torch, derivative: as in :class:`ScoreFunction`.
        tensors: how many it reads.
        reads_batch, reads_head: whether the Triton function does anything with that argument.
        kind: of a mask function of the library's own, else None: its first tensor is (b|1, h|1, …), and its
            tensors are never written.
        owns_tensors: whether the library alone writes its tensors, and never does while they are read.
        joined: of mask functions joined by ``&``: the codes of these, whose tensors follow one another; else none.
    """

    name: str
    triton: Any
    torch: Callable[..., _torch.Tensor] | None
    derivative: Any
    tensors: int
    reads_batch: bool = True
    reads_head: bool = True
    kind: MaskKind | None = None
    owns_tensors: bool = False
    joined: tuple["FunctionCode", ...] = ()

    @property
    def parts(self) -> tuple["FunctionCode", ...]:
        """The codes that it is joined of; itself, if of none."""
        return self.joined or (self,)


Tensors = tuple[_torch.Tensor, ...]
_Own = TypeVar("_Own", bound="ScoreFunction | MaskFunction")
PAIR = ("batch", "head", "q_idx", "k_idx")
_BY_FUNCTIONS: WeakValueDictionary[tuple[Any, ...], FunctionCode] = WeakValueDictionary()
_BY_NAME: WeakValueDictionary[str, FunctionCode] = WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class ScoreFunction:
    """What becomes of a score, after scale and softcap, before bias, ALiBi and masks.

    ``triton(score, batch, head, q_idx, k_idx, *tensors)`` returns the new score. ``score`` is a float32 tile in natural
    units; q_idx and k_idx are positions inside the sequence that broadcast to it (its rows may be queries or keys),
    batch and head int64 scalars, tensors pointers. Positions are int32, and int64 where sq·sk or the elements of a
    tensor are more than 2³¹, so that ``(head * sq + q_idx) * sk + k_idx`` never wraps. Tensors may be read at the
    positions without a mask. The result must be finite wherever a pair takes part; of other pairs it does not matter.

    ``torch`` is the same of tensors: score (b, hq, queries, keys), float32 or float64, int64 indices that broadcast to
    it, the tensors themselves. It is differentiated by torch.

    Make it once and keep it: each new one is compiled anew. :meth:`with_tensors` changes its tensors alone.

    Attributes:
        triton: a ``@triton.jit`` function; None = the triton and gluon backends refuse.
        torch: None = the reference backend refuses.
        derivative: of the Triton function: ``derivative(dscore, score, batch, head, q_idx, k_idx, *tensors)``, a
            ``@triton.jit`` function, returns the gradient of ``score`` from that of the result: a factor times dscore,
            without a threshold on it or a clipping. None = dscore itself: right for what adds a term.
        tensors: contiguous, on the call's device; without a gradient.

    Raises:
        InvalidInput: an attribute is not what it has to be; at the call: of a tensor.

    >>> import torch
    >>> def relative(score, batch, head, q_idx, k_idx, table):
    ...     return score + table[head, q_idx - k_idx]
    >>> relative_bias = ScoreFunction(torch=relative, tensors=(torch.zeros(8, 1024),))
    """

    triton: Callable[..., Any] | None = None
    torch: Callable[..., Any] | None = None
    derivative: Callable[..., Any] | None = None
    tensors: Tensors = ()
    code: FunctionCode = field(init=False, repr=False)

    def __post_init__(self) -> None:
        complete(self, "ScoreFunction", self.derivative, ("score", *PAIR))

    def __reduce__(self) -> tuple[Any, ...]:
        return ScoreFunction, (self.triton, self.torch, self.derivative, self.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScoreFunction":
        return self.with_tensors(*copy.deepcopy(self.tensors, memo))  # of the same functions, hence the same code

    def with_tensors(self, *tensors: _torch.Tensor) -> "ScoreFunction":
        """Return the same function with other tensors, as many as it has; also inside a compiled function."""
        return _with_tensors(self, tensors)


@dataclass(frozen=True, eq=False)
class MaskFunction(JoinsTensors):
    """Which pairs take part, beside what other masks say: joined to them by ``&``, or a mask by itself.

    ``triton(batch, head, q_idx, k_idx, *tensors)`` returns True where the pair takes part, bool; its arguments, the
    twin ``torch`` and ``tensors`` are those of :class:`ScoreFunction`. Tiles are skipped by the masks that it is joined
    to, as in ``causal() & MaskFunction(...)``; the gluon backend finds out by itself which ones the function hides, for
    each batch entry and each head unless the Triton function does not name that argument.

    >>> even = MaskFunction(torch=lambda batch, head, q_idx, k_idx: (q_idx - k_idx) % 2 == 0)
    >>> print(even.show(3, 3))
    ■ · ■
    · ■ ·
    ■ · ■
    """

    triton: Callable[..., Any] | None = None
    torch: Callable[..., Any] | None = None
    tensors: Tensors = ()
    code: FunctionCode = field(init=False, repr=False)

    def __post_init__(self) -> None:
        complete(self, "MaskFunction", None, PAIR)

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskFunction, (self.triton, self.torch, self.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MaskFunction":
        return self.with_tensors(*copy.deepcopy(self.tensors, memo))  # of the same functions, hence the same code

    def with_tensors(self, *tensors: _torch.Tensor) -> "MaskFunction":
        """Return the same function with other tensors, as many as it has; also inside a compiled function."""
        return _with_tensors(self, tensors)

    def __and__(self, other: "Mask | TensorMask | _torch.Tensor | MaskFunction") -> TensorMask:
        alone = TensorMask(Mask(), function=self)
        if isinstance(other, MaskFunction):
            return TensorMask(Mask(), function=self.joined_with(other))
        if not isinstance(other, (Mask, TensorMask, _torch.Tensor)):
            return NotImplemented
        return alone & other

    def __rand__(self, other: "Mask | TensorMask | _torch.Tensor") -> TensorMask:
        if isinstance(other, TensorMask):
            return other & TensorMask(Mask(), function=self)  # functions are joined in the order in which they stand
        return self & other

    def joined_with(self, other: "MaskFunction") -> "MaskFunction":
        """Return one function that asks both."""
        return JoinedMask(parts=(*_parts_of(self), *_parts_of(other)))

    @property
    def has_function(self) -> bool:
        """Whether a function decides, of which :meth:`visible` asks the first batch entry and head alone: it does."""
        return True

    def visible(self, query_length: int, key_length: int, device: _torch.device | None = None) -> _torch.Tensor:
        """Return what the torch function says of the first batch entry and head: (query_length, key_length), bool.

        Raises:
            InvalidInput: there is none.
        """
        return self._visible_rows(0, query_length, (query_length, key_length), device)

    def _visible_rows(self, first: int, stop: int, lengths: tuple[int, int],
                      device: _torch.device | None = None) -> _torch.Tensor:
        check_picture(self)
        if device is None and self.tensors:
            device = self.tensors[0].device
        sizes = (1, 1, stop - first, lengths[1])
        says: _torch.Tensor = cast(Any, self.torch)(*pair_indices(sizes, device, (0, first, 0)), *self.tensors)
        return says.expand(sizes)[0, 0]

    def show(self, query_length: int, key_length: int) -> str:
        """Draw the mask of the first batch entry and head as :meth:`tilewise.Mask.show` does."""
        return TensorMask(Mask(), function=self).show(query_length, key_length)

    def __str__(self) -> str:
        return f"function {self.code.name}"


@dataclass(frozen=True, eq=False)
class JoinedMask(MaskFunction):
    """Mask functions joined by ``&``, in one.

    Attributes:
        parts: these, none of them joined itself.
    """

    parts: tuple[MaskFunction, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        code = _joined_code(self.parts)
        for name, value in {"triton": code.triton, "torch": code.torch, "code": code,
                            "tensors": tuple([tensor for part in self.parts for tensor in part.tensors])}.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rejoined, self.parts

    def __deepcopy__(self, memo: dict[int, Any]) -> "JoinedMask":
        return JoinedMask(parts=tuple([copy.deepcopy(part, memo) for part in self.parts]))

    def with_tensors(self, *tensors: _torch.Tensor) -> NoReturn:
        """Refuse: give one of the parts others, and join it again.

        Raises:
            InvalidInput: always.
        """
        raise tensors_of_joined(self)

    def _visible_rows(self, first: int, stop: int, lengths: tuple[int, int],
                      device: _torch.device | None = None) -> _torch.Tensor:
        device = device or next((tensor.device for tensor in self.tensors), None)
        rows = [part._visible_rows(first, stop, lengths, device) for part in self.parts]
        return _torch.stack(rows).all(0)

    def __str__(self) -> str:
        return " & ".join(map(str, self.parts))


class CallFunctions(NamedTuple):
    """The functions of one call as an operator takes them: by name, with their tensors."""

    score: str | None = None
    mask: str | None = None
    score_tensors: Tensors = ()
    mask_tensors: Tensors = ()


NO_FUNCTIONS = CallFunctions()


def call_functions(score: object, mask: MaskFunction | None) -> CallFunctions:
    """Put a call's functions together.

    Raises:
        InvalidInput: ``score`` is no :class:`ScoreFunction`, or a tensor would need a gradient.
    """
    check_score_function(score, is_function=isinstance(score, ScoreFunction))
    score = cast("ScoreFunction | None", score)
    for function, said in ((score, "score_function"), (mask, "mask function")):
        if function is not None:
            check_without_gradient(said, function.tensors)
    return CallFunctions(None if score is None else score.code.name, None if mask is None else mask.code.name,
                         () if score is None else score.tensors, () if mask is None else mask.tensors)


def code_of(name: str | None) -> FunctionCode | None:
    """Find a function by the name that :func:`call_functions` gave.

    Raises:
        InvalidInput: nobody keeps it any more.
    """
    if name is None:
        return None
    code = _BY_NAME.get(name)
    check_is_kept(name, code)
    return code


def pair_indices(sizes: tuple[int, int, int, int], device: _torch.device | None,
                 first: tuple[int, int, int] = (0, 0, 0)) -> Tensors:
    """Return batch, head, q_idx and k_idx of (b, hq, queries, keys), int64, as a torch function takes them.

    ``first``: the first batch entry, query and key.
    """
    batch, *positions = first
    starts = (batch, 0, *positions)
    return tuple(_torch.arange(start, start + size, device=device).view([-1 if dim == along else 1 for dim in range(4)])
                 for along, (start, size) in enumerate(zip(starts, sizes, strict=True)))


def complete(function: ScoreFunction | MaskFunction, said: str, derivative: Callable[..., Any] | None,
             arguments: tuple[str, ...], kind: MaskKind | None = None, *, owns_tensors: bool = False) -> None:
    """Check a new function's parts, and give it its code: one for the same parts."""
    tensors = tuple(function.tensors)
    check_parts(said, function, derivative, arguments, tensors)
    parts = (function.triton, function.torch, derivative)
    # By the ids of living objects: the code, as long as it is here, keeps them.
    key = (*map(id, parts), len(tensors), kind, owns_tensors)
    code = _BY_FUNCTIONS.get(key)
    if code is None:
        named: Any = function.torch if function.triton is None else function.triton
        reads_batch, reads_head = (_reads(function.triton, arguments.index(own)) for own in ("batch", "head"))
        code = FunctionCode(f"{getattr(named, '__name__', said)}#{next(_numbers)}", *parts, len(tensors),
                            reads_batch, reads_head, kind, owns_tensors)
        _BY_FUNCTIONS[key] = _BY_NAME[code.name] = code
    object.__setattr__(function, "tensors", tensors)
    object.__setattr__(function, "code", code)


def _parts_of(mask: MaskFunction) -> tuple[MaskFunction, ...]:
    return mask.parts if isinstance(mask, JoinedMask) else (mask,)


def _rejoined(*parts: MaskFunction) -> JoinedMask:
    return JoinedMask(parts=parts)


def _joined_code(parts: tuple[MaskFunction, ...]) -> FunctionCode:
    """Return the code of joined mask functions: one for the same ones in the same order."""
    codes = tuple([part.code for part in parts])
    in_triton, in_torch = (all(getattr(code, name) is not None for code in codes) for name in ("triton", "torch"))
    check_joined(parts, is_any=in_triton or in_torch)
    key = codes  # of living objects: the code, as long as it is here, keeps them
    code = _BY_FUNCTIONS.get(key)
    if code is None:
        code = FunctionCode(" & ".join([own.name for own in codes]), _joined_triton(codes) if in_triton else None,
                            _joined_torch(codes) if in_torch else None, None, sum(own.tensors for own in codes),
                            any(own.reads_batch for own in codes), any(own.reads_head for own in codes), joined=codes)
        _BY_FUNCTIONS[key] = _BY_NAME[code.name] = code
    return code


def _joined_triton(codes: tuple[FunctionCode, ...]) -> Any:
    numbers = itertools.count()
    tensors = [[f"tensor_{next(numbers)}" for _ in range(code.tensors)] for code in codes]
    asked = [f"part_{i}({', '.join((*PAIR, *own))})" for i, own in enumerate(tensors)]
    arguments = ", ".join((*PAIR, *itertools.chain(*tensors)))
    return jit_function("joined", f"def joined({arguments}):\n    return {' & '.join(asked)}\n",
                        {f"part_{i}": code.triton for i, code in enumerate(codes)})


def _joined_torch(codes: tuple[FunctionCode, ...]) -> Callable[..., _torch.Tensor]:
    def joined(batch: _torch.Tensor, head: _torch.Tensor, q_idx: _torch.Tensor, k_idx: _torch.Tensor,
               *tensors: _torch.Tensor) -> _torch.Tensor:
        visible = None
        for code in codes:
            says = cast(Any, code.torch)(batch, head, q_idx, k_idx, *tensors[:code.tensors])
            visible, tensors = says if visible is None else visible & says, tensors[code.tensors:]
        return cast(_torch.Tensor, visible)

    return joined


def _reads(function: Any, place: int) -> bool:
    """Whether a Triton function's code names its argument number ``place``; of one that it does not name, surely."""
    if function is None:
        return True
    code = function.fn.__code__
    if place >= code.co_argcount:
        return True
    named = [step.argval for step in dis.get_instructions(code)]  # two at once are a tuple
    return any(code.co_varnames[place] in (own if isinstance(own, tuple) else (own,)) for own in named)


def _with_tensors(function: _Own, tensors: Tensors) -> _Own:
    """Copy without going through the registry, in which torch.compile cannot follow."""
    said = type(function).__name__
    check_tensors(said, tensors)
    check_count(said, tensors, function.code.tensors)
    made: _Own = object.__new__(type(function))
    for name in function.__dataclass_fields__:
        object.__setattr__(made, name, tensors if name == "tensors" else getattr(function, name))
    return made
