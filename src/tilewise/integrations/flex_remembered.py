"""What was traced before: a Python function like one that was traced needs no tracing.

Two functions are alike where they have the same code, and all that it finds outside of itself (closure, defaults,
globals) is alike: numbers and strings are equal, functions are alike in turn, and tensors have the same shapes, dtypes
and devices, and are one and the same in the same places. What tensors hold does not count, since kernels read it. So
nothing here keeps a tensor, and those of a new function take the places of the old one's. A function that finds
anything else (an object with attributes, a list, a module that it imports) may do something else in the next call, and
is traced in each. What torch itself is set to, such as whether gradients are recorded, is not looked at.
"""

import dis
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from tilewise.support.caches import registered

MOST = 256  # functions that are remembered
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
_MODULES = ("torch", "math", "operator", "builtins")  # what these hold does not change
_READERS = {"eval", "exec", "globals", "locals", "vars", "__import__"}  # of names that no code shows
_Formula = TypeVar("_Formula")
_Tensors = tuple[torch.Tensor, ...]


class _Known(NamedTuple):
    """What was traced, and the places of the tensors that it reads among those that its function finds."""

    formula: Any
    places: tuple[int, ...]


_known: dict[Hashable, _Known] = registered({})


def remembered(function: Callable[..., Any], trace: Callable[[Callable[..., Any]], tuple[_Formula, _Tensors, bool]],
               *more: Hashable) -> tuple[_Formula, _Tensors]:
    """Return what a function does and the tensors that it reads, traced now or before.

    Args:
        function: of FlexAttention's.
        trace: returns both, and whether the former depends on no more of the tensors than their shapes and the like.
        more: what ``trace`` depends on beside the function.
    """
    found = _Surroundings()
    try:
        found.add(function)
    except _Unknown:
        return trace(function)[:2]
    key = (*more, *found.parts)
    known = _known.get(key)
    if known is not None:
        return known.formula, tuple([found.tensors[place] for place in known.places])
    formula, tensors, is_of_tensors = trace(function)
    places = [next((i for i, own in enumerate(found.tensors) if own is tensor), None) for tensor in tensors]
    if is_of_tensors and None not in places:
        if len(_known) >= MOST:
            _known.clear()
        _known[key] = _Known(formula, tuple([place for place in places if place is not None]))
    return formula, tensors


class _Unknown(Exception):
    """A function finds something that may change from call to call."""


class _Surroundings:
    """What a function is and finds, in an order that its code fixes; tensors by what a trace depends on."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.functions: list[types.FunctionType] = []

    def add(self, value: Any) -> None:
        """Add a value that a function finds."""
        kind = type(value)
        if kind in _PLAIN:
            self.parts += [kind, repr(value)]  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif kind is types.FunctionType:
            self._add_function(value)
        elif kind is tuple:
            self.parts += [tuple, len(value)]
            for own in value:
                self.add(own)
        elif kind is functools.partial:
            self.parts.append(kind)
            self.add((value.func, value.args, *value.keywords.items()))
        elif _is_fixed(value):
            self.parts.append(value)
        else:
            raise _Unknown

    def _add_tensor(self, value: torch.Tensor) -> None:
        if value.__dict__ or type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise _Unknown
        place = next((i for i, own in enumerate(self.tensors) if own is value), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(value)
        self.parts += [torch.Tensor, place, tuple(value.shape), value.dtype, value.device]

    def _add_function(self, value: types.FunctionType) -> None:
        place = next((i for i, own in enumerate(self.functions) if own is value), len(self.functions))
        self.parts += [types.FunctionType, place]
        if place < len(self.functions):
            return
        is_fixed = _root(value.__globals__.get("__name__") or "") in _MODULES
        if not is_fixed and (value.__dict__ or _looks_elsewhere(value.__code__)):
            raise _Unknown
        self.functions.append(value)
        self.parts.append(value.__code__)
        self.add(value.__defaults__)
        self.add(tuple((value.__kwdefaults__ or {}).items()))
        try:
            self.add(tuple([cell.cell_contents for cell in value.__closure__ or ()]))
        except ValueError:  # a cell that has no value yet
            raise _Unknown from None
        if is_fixed:
            return
        for name in _names(value.__code__):
            if name in value.__globals__:
                self.parts.append(name)
                self.add(value.__globals__[name])


def _is_fixed(value: Any) -> bool:
    """Whether it is a module that does not change, or a function of C's that belongs to a module or class."""
    if isinstance(value, types.ModuleType):
        return _root(value.__name__) in _MODULES
    return isinstance(value, types.BuiltinFunctionType) and isinstance(
        value.__self__, (types.ModuleType, type, type(None)))


@registered
@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Return what a code may ask its module for, that of the functions inside of it included."""
    inner = [own for own in code.co_consts if isinstance(own, types.CodeType)]
    return (*code.co_names, *(name for own in inner for name in _names(own)))


@registered
@functools.lru_cache(maxsize=1024)
def _looks_elsewhere(code: types.CodeType) -> bool:
    """Whether a code, or a function inside of it, imports a module that may change, or reads names that it makes."""
    imported = (step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")
    return (any(_root(name) not in _MODULES for name in imported) or not _READERS.isdisjoint(code.co_names)
            or any(_looks_elsewhere(own) for own in code.co_consts if isinstance(own, types.CodeType)))


def _root(module: str) -> str:
    return module.partition(".")[0]
