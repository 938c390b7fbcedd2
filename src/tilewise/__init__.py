"""tilewise: exact attention, tile by tile."""

from tilewise.api import attention, attention_varlen, explain
from tilewise.decode import attention_decode
from tilewise.dispatch import use_backend
from tilewise.errors import InvalidInput, TilewiseError, UnsupportedProblem
from tilewise.masks import Mask, causal, chunk, documents, prefix, sink_tokens, window
from tilewise.merge import merge

__version__ = "0.1.0"
__all__ = [
    "InvalidInput", "Mask", "TilewiseError", "UnsupportedProblem",
    "attention", "attention_decode", "attention_varlen", "causal", "chunk", "documents", "explain", "merge", "prefix",
    "sink_tokens", "use_backend", "window",
]
