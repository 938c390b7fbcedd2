"""FlexAttention's Python functions in Triton: a ``score_mod`` is called once with symbols, which note what it does.

Each thing that it does becomes a line of a Triton function, another of its torch twin, and by the rules of
differentiation one of its derivative. Two calls that do the same give the same text, for which kernels are compiled
once; the tensors that are read go along as tensors.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from tilewise.errors import UnsupportedProblem
from tilewise.functions import ScoreFunction
from tilewise.integrations.flex_symbols import DTYPES, INPUTS, OPERATIONS, Symbol, Untraceable, common, traced
from tilewise.support.caches import registered
from tilewise.support.generated import jit_function


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
        result, tensors = traced(score_mod, (torch.float32, *(torch.int32,) * 4))
        text = _text(result, len(tensors))
    except Untraceable as reason:
        name = getattr(score_mod, "__name__", type(score_mod).__name__)
        raise UnsupportedProblem(f"score_mod {name} has what no Triton is made of: {reason}. Allowed are arithmetic, "
                                 "comparisons, torch.where, functions of one number, and tensors read at positions; a "
                                 "tilewise.functions.ScoreFunction has any formula.", {}) from None
    triton, twin, derivative = _compiled(*text)
    return ScoreFunction(triton, twin, derivative, tuple(tensors))


class _Text:
    """Lines of a Triton function, of its torch twin and of its derivative, of a result and all that leads to it."""

    def __init__(self) -> None:
        self.triton: list[str] = []
        self.twin: list[str] = []
        self.slopes: list[str] = []
        self.names: dict[Symbol, str] = {}
        self.tangents: dict[Symbol, str | None] = {}  # by the score; None = 0

    def add(self, symbol: Symbol) -> str:
        """Write a symbol's lines behind those of its arguments; return its name."""
        if symbol in self.names:
            return self.names[symbol]
        for own in symbol.arguments:
            if isinstance(own, Symbol):
                self.add(own)
        name = self.names[symbol] = f"v{len(self.names)}"
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
            self.twin.append(f"{name} = {self._plain(own)}.to({symbol.dtype})")
            self.tangents[symbol] = self.tangents.get(own) if symbol.dtype.is_floating_point else None
        else:
            self._operate(name, symbol)
        return name

    def _operate(self, name: str, symbol: Symbol) -> None:
        operation, arguments = OPERATIONS[symbol.does], symbol.arguments
        dtype = symbol.dtype if operation.result != "bool" else common(arguments)
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        values = [self.names[own] if symbol.does == "where" and i == 0 else self._as(own, wide)
                  for i, own in enumerate(arguments)]
        said = operation.triton.format(*values)
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
        for dim, (own, size) in enumerate(zip(indices, shape, strict=True)):
            stride = math.prod(shape[dim + 1:])
            if isinstance(own, Symbol):
                at = self.names[own]
                inner = f"tl.where({at} < 0, {at} + {size}, {at})"
                offsets.append(f"tl.maximum(tl.minimum({inner}, {size - 1}), 0){wide} * {stride}")
                inside.append(f"torch.where({at} < 0, {at} + {size}, {at}).clamp(0, {size - 1})")
            else:
                offsets.append(str((own + size if own < 0 else own) * stride))
                inside.append(str(own))
        self.triton.append(f"{name} = tl.load({' + '.join([f'tensor_{number}', *offsets])})")
        self.twin.append(f"{name} = tensor_{number}" + (f"[{', '.join(inside)}]" if inside else ""))

    def _as(self, own: Any, dtype: torch.dtype) -> str:
        if isinstance(own, Symbol):
            return self.names[own] if own.dtype is dtype else f"{self.names[own]}.to(tl.{DTYPES[dtype]})"
        return f"tl.full([], {_literal(own)}, tl.{DTYPES[dtype]})"

    def _plain(self, own: Any, as_tensor: bool = False) -> str:
        if isinstance(own, Symbol):
            return self.names[own]
        return f"torch.tensor({_literal(own)})" if as_tensor else _literal(own)


def _literal(value: float) -> str:
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _text(result: Any, count: int) -> tuple[str, str, str | None]:
    """Return the bodies of the Triton function, of its twin, and of its derivative, None where that is 1."""
    if not isinstance(result, Symbol):
        raise Untraceable(f"a result {result!r} that is the same for all pairs")
    text = _Text()
    name = text.add(result)
    tangent = text.tangents[result]
    # What nothing but batch and head decide is a number, and a tile is wanted.
    triton = [*text.triton, f"return {name}" if tangent else f"return tl.broadcast_to({name}, score.shape)"]
    twin = [*text.twin, f"return {name}" if tangent else f"return torch.broadcast_to({name}, score.shape)"]
    slopes = [*text.triton, *text.slopes, f"return dscore * {tangent or '0.0'}"]
    tensors = [f"tensor_{i}" for i in range(count)]
    head = f"({', '.join((*INPUTS, *tensors))}):"
    return (_function("traced", head, triton), _function("traced", head, twin),
            None if tangent == "1.0" else _function("slope", f"(dscore, {head[1:]}", slopes))


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
