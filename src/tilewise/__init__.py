"""tilewise: exact attention, tile by tile."""

import importlib
import importlib.util
import typing

from tilewise.support.late import call_once_torch_is_here as _call_once_torch_is_here

if typing.TYPE_CHECKING:
    from tilewise.api import attention, attention_varlen, explain
    from tilewise.decode import attention_decode
    from tilewise.dispatch import use_backend
    from tilewise.errors import InvalidInput, TilewiseError, UnsupportedProblem
    from tilewise.mask_functions import blocks, intervals, prefixes, tree
    from tilewise.masks import Mask, causal, chunk, documents, prefix, sink_tokens, window
    from tilewise.merging import merge
    from tilewise.problem.options import AnyMask

__version__ = "0.1.0"
__all__ = [
    "AnyMask", "InvalidInput", "Mask", "TilewiseError", "UnsupportedProblem",
    "attention", "attention_decode", "attention_varlen", "blocks", "causal", "chunk", "documents", "explain",
    "intervals", "merge", "prefix", "prefixes", "sink_tokens", "tree", "use_backend", "window",
]
# Where each name is defined: importing one of these modules imports torch, but of the errors'.
_HOMES = {
    "api": ("attention", "attention_varlen", "explain"), "decode": ("attention_decode",),
    "dispatch": ("use_backend",), "errors": ("InvalidInput", "TilewiseError", "UnsupportedProblem"),
    "mask_functions": ("blocks", "intervals", "prefixes", "tree"),
    "masks": ("Mask", "causal", "chunk", "documents", "prefix", "sink_tokens", "window"), "merging": ("merge",),
    "problem.options": ("AnyMask",),
}


def _load() -> None:
    """Import all public names, and with them register the operators ``torch.ops.tilewise``."""
    for home, names in _HOMES.items():
        module = importlib.import_module(f"{__name__}.{home}")
        globals().update({name: getattr(module, name) for name in names})


def _attribute(name: str) -> typing.Any:
    """Import a public name, or a module of the package, when it is first asked for and torch is not here yet."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not typing.TYPE_CHECKING:
    __getattr__ = _attribute  # hidden from type checkers, which would take any name for one of the package's
_call_once_torch_is_here(_load, __name__)
