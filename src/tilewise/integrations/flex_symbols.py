"""Symbols that stand for a number of one pair and note what a function of FlexAttention's does to it.

What may be done to them stands in ``OPERATIONS``, with its text in Triton, its twin in torch and its derivative. What
is not there is refused by its name.
"""

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from tilewise.support.caches import registered

INPUTS = ("score", "batch", "head", "q_idx", "k_idx")
DTYPES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
           torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
           torch.bool: "int1"}


class Operation(NamedTuple):
    """What may be done to symbols.

    Attributes:
        triton: the text, of its arguments {0}, {1}, …
        torch: the same of tensors.
        slopes: the derivative by each argument, of these and of the result {y}; none of what has integers or truths.
        result: "common" = the dtype that torch promotes the arguments to; "float" = that, float32 of integers; "bool".
        natural: the text where no argument is less than 0, if it is another.
    """

    triton: str
    torch: Callable[..., Any]
    slopes: tuple[str, ...] = ()
    result: str = "common"
    natural: str = ""


def _smaller(first: str, second: str) -> str:
    return f"tl.where({first} < {second}, 1.0, tl.where({first} == {second}, 0.5, 0.0))"


_FLOORED = "({0} // {1} - (({0} % {1} != 0) & (({0} < 0) != ({1} < 0))).to(tl.int32))"
OPERATIONS = {
    "add": Operation("{0} + {1}", torch.add, ("1.0", "1.0")),
    "sub": Operation("{0} - {1}", torch.sub, ("1.0", "-1.0")),
    "mul": Operation("{0} * {1}", torch.mul, ("{1}", "{0}")),
    "truediv": Operation("{0} / {1}", torch.true_divide, ("1.0 / {1}", "-{y} / {1}"), "float"),
    "floordiv": Operation(_FLOORED, torch.floor_divide, natural="{0} // {1}"),
    "mod": Operation("{0} - {1} * " + _FLOORED, torch.remainder, natural="{0} % {1}"),
    "neg": Operation("-{0}", torch.neg, ("-1.0",)),
    "abs": Operation("tl.abs({0})", torch.abs, ("tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",)),
    "maximum": Operation("tl.maximum({0}, {1})", torch.maximum, (_smaller("{1}", "{0}"), _smaller("{0}", "{1}"))),
    "minimum": Operation("tl.minimum({0}, {1})", torch.minimum, (_smaller("{0}", "{1}"), _smaller("{1}", "{0}"))),
    "exp": Operation("tl.exp({0})", torch.exp, ("{y}",), "float"),
    "log": Operation("tl.log({0})", torch.log, ("1.0 / {0}",), "float"),
    "sqrt": Operation("tl.sqrt({0})", torch.sqrt, ("0.5 / {y}",), "float"),
    "sin": Operation("tl.sin({0})", torch.sin, ("tl.cos({0})",), "float"),
    "cos": Operation("tl.cos({0})", torch.cos, ("-tl.sin({0})",), "float"),
    "tanh": Operation("hyperbolic_tangent({0}, True)", torch.tanh, ("1.0 - {y} * {y}",), "float"),
    "sigmoid": Operation("1.0 / (1.0 + tl.exp(-{0}))", torch.sigmoid, ("{y} * (1.0 - {y})",), "float"),
    "relu": Operation("tl.maximum({0}, 0)", torch.relu, ("tl.where({0} > 0, 1.0, 0.0)",)),
    "square": Operation("{0} * {0}", torch.square, ("2.0 * {0}",)),
    "where": Operation("tl.where({0}, {1}, {2})", torch.where),
    "not_": Operation("{0} == 0", torch.logical_not, (), "bool"),
    **{name: Operation(f"{{0}} {sign} {{1}}", getattr(torch, name), (), "bool") for name, sign in (
        ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!="))},
    **{f"{name}_": Operation(f"{{0}} {sign} {{1}}", getattr(torch, f"bitwise_{name}")) for name, sign in (
        ("and", "&"), ("or", "|"), ("xor", "^"))},
}
_TORCH_NAMES = {  # a function or a method of torch's -> an operation
    **{name: name for name in OPERATIONS if not name.endswith("_")},
    **{f"{kind}_{name}": f"{name}_" for kind in ("bitwise", "logical") for name in ("and", "or", "xor", "not")},
    "invert": "not_", "subtract": "sub", "multiply": "mul", "div": "truediv", "true_divide": "truediv",
    "divide": "truediv", "floor_divide": "floordiv", "remainder": "mod", "negative": "neg", "absolute": "abs",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne"}
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
          "int": torch.int32, "long": torch.int64, "bool": torch.bool}
_FILLED = {"new_zeros": 0, "new_ones": 1, "zeros_like": 0, "ones_like": 1}
_METHODS = {*_TORCH_NAMES, *_CASTS, "to", "type", "clamp", "clip", "pow", "new_zeros", "new_ones"}
# What is asked of tensors and depends on their shapes, dtypes and device alone.
_DESCRIBING = {torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.__len__,
               *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "is_meta"))}


class Untraceable(Exception):
    """Something that a function does has no text in Triton."""


@dataclass(frozen=True, eq=False)
class Symbol:
    """A number of a pair, which notes what is done to it.

    Attributes:
        does: an operation, "cast", "load", or the name of an input.
        arguments: symbols and numbers; of "load" the number of the tensor, then the indices.
        dtype: as torch has it.
    """

    does: str
    arguments: tuple[Any, ...]
    dtype: torch.dtype

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        return _tracing().called(function, arguments, named or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "device" and _tracing().device is not None:
            return _tracing().device
        if name not in _METHODS:
            raise Untraceable(f".{name}")
        return lambda *arguments, **named: _tracing().by_name(name, (self, *arguments), named)

    def _refused(self, *_: object) -> NoReturn:
        raise Untraceable("a decision by a value (if, and, or, not, int, float, range); use torch.where, &, | and ~")

    __bool__ = __int__ = __float__ = __index__ = __iter__ = _refused
    __hash__ = object.__hash__


def _binary(name: str, *, swapped: bool = False) -> Callable[..., Any]:
    def noted(self: Symbol, other: Any) -> Any:
        return _tracing().by_name(name, (other, self) if swapped else (self, other), {})

    return noted


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor_"):
    _plain = _name.rstrip("_")
    setattr(Symbol, f"__{_plain}__", _binary(_name))
    setattr(Symbol, f"__r{_plain}__", _binary(_name, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "pow"):
    setattr(Symbol, f"__{_name}__", _binary(_name))
for _name, _operation in (("neg", "neg"), ("abs", "abs"), ("invert", "not_")):
    setattr(Symbol, f"__{_name}__", lambda self, own=_operation: _tracing().by_name(own, (self,), {}))


class _Tracing(TorchFunctionMode):
    """Notes the functions of torch's that are called with symbols; the tensors that they read are kept in order.

    Attributes:
        device: what symbols say that they are on; None = they do not say.
        tensors: what is read.
        computes: whether something was asked of tensors alone, which a later call may answer otherwise.
    """

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.device = device
        self.tensors: list[torch.Tensor] = []
        self.computes = False

    def __torch_function__(self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        if _has((arguments, named), (Symbol, _Rows)):
            return self.called(function, arguments, named or {})
        self.computes |= function not in _DESCRIBING and _has((arguments, named), torch.Tensor)
        return function(*arguments, **(named or {}))

    def called(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Note a function of torch's."""
        name = getattr(function, "__name__", str(function))
        if name == "__getitem__":
            return self.load(*arguments)
        plain = name.strip("_")
        if name.startswith("__r") and f"__{plain[1:]}__" in dir(operator):
            return self.by_name(plain[1:], arguments[::-1], named)
        return self.by_name({"and": "and_", "or": "or_", "xor": "xor_"}.get(plain, plain), arguments, named)

    def by_name(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Note an operation, a cast, or what is made of several operations."""
        if name in ("to", "type") and len(arguments) == 2 and isinstance(arguments[1], torch.dtype) and not named:
            return self.cast(arguments[0], arguments[1])
        if name in _CASTS and len(arguments) == 1 and not named:
            return self.cast(arguments[0], _CASTS[name])
        if name in ("clamp", "clip"):
            return self.clamped(*arguments, **named)
        if name in _FILLED:
            return self.filled(name, *arguments, **named)
        exponent = arguments[1] if name == "pow" and len(arguments) == 2 else None
        if isinstance(exponent, (int, float)) and exponent in (2, 0.5):
            return self.by_name("square" if exponent == 2 else "sqrt", arguments[:1], named)
        is_of_truths = name.startswith("logical") or name in ("invert", "bitwise_not", "not_")
        if is_of_truths and any(getattr(own, "dtype", None) is not torch.bool for own in arguments):
            raise Untraceable(f"{name} of what is no comparison")
        name = _TORCH_NAMES.get(name, name)
        if name not in OPERATIONS or named or len(arguments) != 1 + max(
                i for i in range(3) if f"{{{i}}}" in OPERATIONS[name].triton):
            raise Untraceable(f"{name}({', '.join([type(own).__name__ for own in arguments] + list(named))})")
        return self.noted(name, tuple(map(self.loaded, arguments)))

    def noted(self, name: str, arguments: tuple[Any, ...]) -> Symbol:
        """Note one operation."""
        operation = OPERATIONS[name]
        dtype = common(arguments[1:] if name == "where" else arguments)
        if name == "where" and getattr(arguments[0], "dtype", None) is not torch.bool:
            raise Untraceable("where of a condition that is no comparison")
        if ((name in ("floordiv", "mod", "and_", "or_", "xor_") and dtype.is_floating_point)
                or (dtype is torch.bool and name not in ("and_", "or_", "xor_", "not_", "where", "eq", "ne"))):
            raise Untraceable(f"{name} of {dtype}")
        if operation.result == "float" and not dtype.is_floating_point:
            dtype = torch.float32
        elif operation.result == "bool":
            dtype = torch.bool
        return Symbol(name, arguments, dtype)

    def cast(self, value: Any, dtype: torch.dtype) -> Symbol:
        """Note a conversion."""
        if dtype not in DTYPES:
            raise Untraceable(f"to({dtype})")
        return Symbol("cast", (self.loaded(value),), dtype)

    def clamped(self, value: Any, min: Any = None, max: Any = None) -> Any:
        """Note bounds, inside of which the derivative is 1, the bounds included, as torch has it."""
        for bound, name in ((min, "lt"), (max, "gt")):
            if bound is not None:
                value = self.by_name("where", (self.by_name(name, (value, bound), {}), bound, value), {})
        return value

    def filled(self, name: str, like: Any, size: Any = (), *, dtype: torch.dtype | None = None,
               device: torch.device | None = None) -> Symbol:
        """Note a zero or a one; ``device``: that of the symbols, wherever that is."""
        if tuple(size) or not isinstance(like, Symbol):
            raise Untraceable(f"{name} of a size")
        return self.cast(_FILLED[name], dtype or like.dtype)

    def load(self, tensor: Any, index: Any) -> Any:
        """Note that a tensor is read at symbols and integers, one for each dim, be it by several brackets."""
        indices = index if isinstance(index, tuple) else (index,)
        read = tensor if isinstance(tensor, _Rows) else _Rows(tensor, ())
        whole = (*read.indices, *indices)
        for own in indices:
            is_index = isinstance(own, int) and not isinstance(own, bool)
            if not is_index and not (isinstance(own, Symbol) and own.dtype in (torch.int32, torch.int64)):
                raise Untraceable(f"an index {own if not isinstance(own, Symbol) else own.dtype}")
        if len(whole) > read.tensor.dim() or any(isinstance(own, int) and not -size <= own < size for own, size in zip(
                whole, read.tensor.shape, strict=False)):
            raise IndexError(f"indices {whole} of a tensor of shape {tuple(read.tensor.shape)}")
        rows = _Rows(read.tensor, whole)
        return rows if len(whole) < read.tensor.dim() else self.loaded(rows)

    def loaded(self, value: Any) -> Any:
        """Return a symbol or a number; of a tensor whose dims are all read, what is read."""
        value = _Rows(value, ()) if isinstance(value, torch.Tensor) else value
        if not isinstance(value, _Rows):
            if not isinstance(value, (Symbol, int, float)):
                raise Untraceable(f"a {type(value).__name__}")
            return value
        tensor = value.tensor
        if len(value.indices) != tensor.dim() or tensor.dtype not in DTYPES or not tensor.numel():
            raise Untraceable(f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}, read by "
                              f"{len(value.indices)} indices")
        number = next((i for i, own in enumerate(self.tensors) if own is tensor), len(self.tensors))
        self.tensors += [tensor] if number == len(self.tensors) else []
        return Symbol("load", (number, tuple(tensor.shape), *value.indices), tensor.dtype)


class _Rows(NamedTuple):
    """A tensor that is read at its first dims."""

    tensor: torch.Tensor
    indices: tuple[Any, ...]

    def __getitem__(self, index: Any) -> Any:
        return _tracing().load(self, index)


class _Active(threading.local):
    """What a thread traces at the moment."""

    tracing: _Tracing | None = None


_active = _Active()


def _tracing() -> _Tracing:
    if _active.tracing is None:
        raise Untraceable("a symbol that was kept beyond its call")
    return _active.tracing


class Traced(NamedTuple):
    """What a function does.

    Attributes:
        result: a symbol or a number.
        tensors: those that it reads.
        is_of_tensors: whether it did nothing else with tensors than read them at symbols, so that others of the same
            shapes and dtypes in their places lead to the same symbols.
    """

    result: Any
    tensors: list[torch.Tensor]
    is_of_tensors: bool


def traced(function: Callable[..., Any], inputs: Mapping[str, torch.dtype],
           device: torch.device | None = None) -> Traced:
    """Call a function with a symbol for each of ``inputs``, some of ``INPUTS``.

    Raises:
        Untraceable: it does what no symbol can note.
    """
    with _Tracing(device) as tracing:
        _active.tracing = tracing
        try:
            made = function(*(Symbol(name, (), dtype) for name, dtype in inputs.items()))
            return Traced(tracing.loaded(made), tracing.tensors, not tracing.computes)
        finally:
            _active.tracing = None


def _has(value: Any, kinds: Any) -> bool:
    """Whether there is one of these kinds among a function's arguments; a tensor for types alone is none."""
    if isinstance(value, (tuple, list)) and not isinstance(value, _Rows):
        return any(_has(own, kinds) for own in value)
    if isinstance(value, dict):
        return any(_has(own, kinds) for own in value.values())
    return isinstance(value, kinds) and not (isinstance(value, torch.Tensor) and value.is_meta)


def common(arguments: Sequence[Any]) -> torch.dtype:
    """Return the dtype that torch promotes numbers of these dtypes to; Python's count for less than a tensor's."""
    kinds: list[Any] = [own.dtype if isinstance(own, Symbol) else type(own) for own in arguments]
    return _promoted(kinds[0], kinds[-1])


@registered
@lru_cache(maxsize=256)
def _promoted(first: Any, last: Any) -> torch.dtype:
    values = [torch.empty((), dtype=own, device="meta") if isinstance(own, torch.dtype) else own(0)
              for own in (first, last)]
    return torch.result_type(*values)
