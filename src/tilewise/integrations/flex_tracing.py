"""FlexAttention's Python functions in Triton: a mod is called once with symbols, which note what it does.

Each thing that it does becomes a line of a Triton function, another of its torch twin, and by the rules of
differentiation one of a ``score_mod``'s derivative. Two calls that do the same give the same text, for which kernels
are compiled once; the tensors that are read go along as tensors.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from tilewise.errors import UnsupportedProblem
from tilewise.functions import PAIR, ScoreFunction
from tilewise.integrations.flex_remembered import remembered
from tilewise.integrations.flex_symbols import DTYPES, INPUTS, OPERATIONS, Symbol, Untraceable, common, traced
from tilewise.support.caches import registered
from tilewise.support.generated import jit_function


class Formula(NamedTuple):
    """What a function does, without the tensors that it reads: a Triton function and its torch twin."""

    triton: Any
    torch: Callable[..., torch.Tensor]


def traced_score(score_mod: Callable[..., Any]) -> ScoreFunction:
    """Return a score_mod of FlexAttention's as a function that kernels take.

    Positions are int32, as FlexAttention has them. Tensors that it reads are read in each call as they are then; an
    index past the ends of its dim, which torch would refuse, reads the last or first element. Numbers that are no
    tensors are part of the kernels' text: each other one has kernels of its own.

    Args:
        score_mod: (score, b, h, q_idx, kv_idx) -> score, of elementwise operations and tensors read at positions.

    Raises:
        UnsupportedProblem: it does something else; names it.
    """
    try:
        function, tensors = remembered(score_mod, _score_function)
    except Untraceable as reason:
        raise not_in_triton("score_mod", score_mod, reason, "ScoreFunction") from None
    return function.with_tensors(*tensors)


def mask_formula(visible: Callable[..., Any], device: torch.device) -> tuple[Formula, tuple[torch.Tensor, ...], bool]:
    """Trace (b, h, q_idx, kv_idx) -> bool; return the formula, what it reads, and :attr:`Traced.is_of_tensors`.

    Before the tensors its functions take a tensor of all their sizes, one behind the other: another length has the same
    functions.

    Raises:
        Untraceable: it does what has no text in Triton.
    """
    result, tensors, is_of_tensors = traced(visible, dict.fromkeys(PAIR, torch.int32), device)
    if not isinstance(result, Symbol) or result.dtype is not torch.bool:
        raise Untraceable(f"a result {result if not isinstance(result, Symbol) else result.dtype}")
    text = _Text([0, *itertools.accumulate(tensor.dim() for tensor in tensors)])
    last, head = f"return {text.add(result)}", _head((*PAIR, "sizes"), len(tensors))
    triton, twin = (_function("traced", head, [*lines, last]) for lines in (text.triton, text.twin))
    return Formula(*_compiled(triton, twin, None)[:2]), tuple(tensors), is_of_tensors


def not_in_triton(said: str, function: object, reason: object, other: str) -> UnsupportedProblem:
    """Make the error for a function of FlexAttention's that has what no Triton is made of."""
    name = getattr(function, "__name__", type(function).__name__)
    return UnsupportedProblem(f"{said} {name} has what no Triton is made of: {reason}. Allowed are arithmetic, "
                              "comparisons, torch.where, functions of one number, and tensors read at positions; a "
                              f"tilewise.functions.{other} has any formula.", {})


class _Text:
    """Lines of a Triton function, of its torch twin and of its derivative, of a result and all that leads to it.

    Args:
        first_sizes: of each tensor that is read, the place of its first size among those that a tensor ``sizes`` holds;
            None = sizes are part of the text.
    """

    def __init__(self, first_sizes: Sequence[int] | None = None) -> None:
        self.first_sizes = first_sizes
        self.sizes: set[int] = set()
        self.triton: list[str] = []
        self.twin: list[str] = []
        self.slopes: list[str] = []
        self.names: dict[Symbol, str] = {}
        self.naturals: set[Symbol] = set()  # integers that are surely not less than 0
        self.tangents: dict[Symbol, str | None] = {}  # by the score; None = 0

    def add(self, symbol: Symbol) -> str:
        """Write a symbol's lines behind those of its arguments; return its name."""
        if symbol in self.names:
            return self.names[symbol]
        for own in symbol.arguments:
            if isinstance(own, Symbol):
                self.add(own)
        name = self.names[symbol] = f"v{len(self.names)}"
        if self._makes_natural(symbol):
            self.naturals.add(symbol)
        if symbol.does in INPUTS:
            is_score = symbol.does == "score"
            self.triton.append(f"{name} = {symbol.does}" + ("" if is_score else ".to(tl.int32)"))
            self.twin.append(f"{name} = {symbol.does}" + ("" if is_score else ".int()"))
            self.tangents[symbol] = "1.0" if is_score else None
        elif symbol.does == "load":
            self._load(name, *symbol.arguments)
            self.tangents[symbol] = None
        elif symbol.does == "cast":
            (own,) = symbol.arguments
            self.triton.append(f"{name} = {self._as(own, symbol.dtype)}")
            self.twin.append(f"{name} = {self._plain(own, True)}.to({symbol.dtype})")
            self.tangents[symbol] = self.tangents.get(own) if symbol.dtype.is_floating_point else None
        else:
            self._operate(name, symbol)
        return name

    def _is_natural(self, own: Any) -> bool:
        return own in self.naturals if isinstance(own, Symbol) else isinstance(own, int) and own >= 0

    def _makes_natural(self, symbol: Symbol) -> bool:
        does, arguments = symbol.does, symbol.arguments
        if symbol.dtype.is_floating_point:
            return False
        if does in PAIR or symbol.dtype is torch.uint8:
            return True
        if does == "mod":  # which has the divisor's sign
            return self._is_natural(arguments[1])
        if does == "cast" and symbol.dtype != torch.int64:  # a narrower one may wrap
            return False
        return does in ("floordiv", "cast") and all(map(self._is_natural, arguments))  # sums and products may wrap

    def _operate(self, name: str, symbol: Symbol) -> None:
        operation, arguments = OPERATIONS[symbol.does], symbol.arguments
        dtype = symbol.dtype if operation.result != "bool" else common(arguments)
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        values = [self.names[own] if symbol.does == "where" and i == 0 else self._as(own, wide)
                  for i, own in enumerate(arguments)]
        is_natural = all(map(self._is_natural, arguments))
        said = ((is_natural and operation.natural) or operation.triton).format(*values)
        self.triton.append(f"{name} = {said}" if wide is dtype else f"{name} = ({said}).to(tl.{DTYPES[symbol.dtype]})")
        wants_tensors = symbol.does in ("maximum", "minimum")
        self.twin.append(f"{name} = of_torch['{symbol.does}']("
                         + ", ".join(self._plain(own, wants_tensors) for own in arguments) + ")")
        self.tangents[symbol] = self._tangent(name, symbol, values)

    def _tangent(self, name: str, symbol: Symbol, values: list[str]) -> str | None:
        """Return the text of a symbol's derivative by the score, None for 0."""
        tangents = [self.tangents.get(own) if isinstance(own, Symbol) else None for own in symbol.arguments]
        if not any(tangents) or not symbol.dtype.is_floating_point:
            return None
        if symbol.does == "where":
            said = f"tl.where({values[0]}, {tangents[1] or '0.0'}, {tangents[2] or '0.0'})"
        else:
            terms = [tangent if slope == "1.0" else f"({slope.format(*values, y=name)}) * {tangent}"
                     for slope, tangent in zip(OPERATIONS[symbol.does].slopes, tangents, strict=True) if tangent]
            if terms == ["1.0"]:
                return "1.0"
            said = " + ".join(terms)
        self.slopes.append(f"d{name} = {said}")
        return f"d{name}"

    def _load(self, name: str, number: int, shape: tuple[int, ...], *indices: Any) -> None:
        """Read a tensor inside of its ends; an index below 0 counts from the end, as torch has it."""
        offsets, inside = [], []
        wide = ".to(tl.int64)" if math.prod(shape) >= 2**31 else ""
        for dim, own in enumerate(indices):
            in_torch = f"tensor_{number}.shape[{dim}]"
            if isinstance(own, Symbol):
                at, size = self.names[own], self._size(number, shape, dim)
                inner = at if self._is_natural(own) else f"tl.where({at} < 0, {at} + {size}, {at})"
                last = size - 1 if isinstance(size, int) else f"{size} - 1"
                offsets.append(f"tl.maximum(tl.minimum({inner}, {last}), 0){wide} * "
                               f"{self._stride(number, shape, dim, wide)}")
                inside.append(f"torch.where({at} < 0, {at} + {in_torch}, {at}).clamp(0, {in_torch} - 1)")
                continue
            inside.append(str(own))
            if own < 0:
                size = self._size(number, shape, dim)
                own = own + size if isinstance(size, int) else f"({size} + {own})"
            if own:
                stride = self._stride(number, shape, dim, wide)
                is_literal = isinstance(own, int) and isinstance(stride, int)
                offsets.append(str(own * stride) if is_literal else f"{own} * {stride}")
        self.triton.append(f"{name} = tl.load({' + '.join([f'tensor_{number}', *offsets])})")
        self.twin.append(f"{name} = tensor_{number}" + (f"[{', '.join(inside)}]" if inside else ""))

    def _size(self, number: int, shape: tuple[int, ...], dim: int) -> Any:
        """Return the size of a tensor's dim, or the name of what holds it."""
        if self.first_sizes is None:
            return shape[dim]
        place = self.first_sizes[number] + dim
        name = f"size_{place}"
        if place not in self.sizes:
            self.sizes.add(place)
            self.triton.append(f"{name} = tl.load(sizes + {place}).to(tl.int32)")
        return name

    def _stride(self, number: int, shape: tuple[int, ...], dim: int, wide: str) -> Any:
        sizes = [self._size(number, shape, other) for other in range(dim + 1, len(shape))]
        if self.first_sizes is None or not sizes:
            return math.prod(sizes)
        return " * ".join([sizes[0] + wide, *sizes[1:]])

    def _as(self, own: Any, dtype: torch.dtype) -> str:
        if isinstance(own, Symbol):
            return self.names[own] if own.dtype is dtype else f"{self.names[own]}.to(tl.{DTYPES[dtype]})"
        # By what Gluon has, too. Of float64 it would make float32 first.
        call = "tl.full([], {}, {})" if dtype is torch.float64 else "tl.cast({}, {})"
        return call.format(_literal(own), f"tl.{DTYPES[dtype]}")

    def _plain(self, own: Any, as_tensor: bool = False) -> str:
        if isinstance(own, Symbol):
            return self.names[own]
        return f"torch.tensor({_literal(own)})" if as_tensor else _literal(own)


def _literal(value: float) -> str:
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _score_function(score_mod: Callable[..., Any]) -> tuple[ScoreFunction, tuple[torch.Tensor, ...], bool]:
    """Trace a score_mod; return a function without its tensors, these, and :attr:`Traced.is_of_tensors`."""
    dtypes = {name: torch.float32 if name == "score" else torch.int32 for name in INPUTS}
    result, tensors, is_of_tensors = traced(score_mod, dtypes)
    if not isinstance(result, Symbol):
        raise Untraceable(f"a result {result!r} that is the same for all pairs")
    text = _Text()
    name = text.add(result)
    tangent = text.tangents[result]
    # What nothing but batch and head decide is a number, and a tile is wanted.
    triton = [*text.triton, f"return {name}" if tangent else f"return tl.broadcast({name}, score)[0]"]
    twin = [*text.twin, f"return {name}" if tangent else f"return torch.broadcast_to({name}, score.shape)"]
    slopes = [*text.triton, *text.slopes, f"return dscore * {tangent or '0.0'}"]
    head = _head(INPUTS, len(tensors))
    made = _compiled(_function("traced", head, triton), _function("traced", head, twin),
                     None if tangent == "1.0" else _function("slope", f"(dscore, {head[1:]}", slopes))
    return ScoreFunction(*made, (torch.empty(0),) * len(tensors)), tuple(tensors), is_of_tensors


def _head(inputs: Sequence[str], count: int) -> str:
    """Return the parameters of a function of these inputs and so many tensors."""
    return f"({', '.join((*inputs, *(f'tensor_{i}' for i in range(count))))}):"


def _function(name: str, head: str, lines: list[str]) -> str:
    return f"def {name}{head}\n" + "".join(f"    {line}\n" for line in lines)


@registered
@lru_cache(maxsize=256)
def _compiled(triton: str, twin: str, derivative: str | None) -> tuple[Any, Callable[..., torch.Tensor], Any]:
    """Return the functions of these texts; of no Triton where that is not installed."""
    of_torch = {name: operation.torch for name, operation in OPERATIONS.items()}
    names: dict[str, Any] = {"torch": torch, "of_torch": of_torch}
    exec(compile(twin, "<traced>", "exec"), names)
    if find_spec("triton") is None:
        return None, names["traced"], None
    from tilewise.kernels.triton.modifiers import hyperbolic_tangent

    known = {"hyperbolic_tangent": hyperbolic_tangent}
    return (jit_function("traced", triton, known), names["traced"],
            None if derivative is None else jit_function("slope", derivative, known))
