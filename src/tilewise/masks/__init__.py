"""Masks: which pairs of a query and a key take part (mask.py), and their ranges of tiles for the kernels (bands.py)."""

from tilewise.masks.bands import Band, Span
from tilewise.masks.mask import (
    ALIGNMENTS,
    Alignment,
    Mask,
    TensorMask,
    causal,
    chunk,
    documents,
    prefix,
    sink_tokens,
    window,
)

__all__ = ["ALIGNMENTS", "Alignment", "Band", "Mask", "Span", "TensorMask", "causal", "chunk", "documents", "prefix",
           "sink_tokens", "window"]
