"""tilewise: exact attention, tile by tile."""

from tilewise.api import AttentionOutput, attention, explain
from tilewise.dispatch import use_backend
from tilewise.errors import BackendUnavailable, InvalidInput, TilewiseError, UnsupportedProblem
from tilewise.masks import Mask, causal, window
from tilewise.merge import merge

__version__ = "0.1.0"
__all__ = [
    "AttentionOutput", "BackendUnavailable", "InvalidInput", "Mask", "TilewiseError", "UnsupportedProblem",
    "attention", "causal", "explain", "merge", "use_backend", "window",
]
