"""One call as a value: what the user said (options.py), and what it means for these tensors (problem.py, decode.py)."""

from tilewise.problem.problem import (
    TAIL_WIDTH,
    WIDEST,
    AttentionProblem,
    Direction,
    Sizes,
    alignment_of,
    are_aligned,
    dense_strides,
    has_legal_bias_strides,
    has_legal_strides,
    legal_strides,
    memory_order,
    padded_dim,
)

__all__ = ["TAIL_WIDTH", "WIDEST", "AttentionProblem", "Direction", "Sizes", "alignment_of", "are_aligned",
           "dense_strides", "has_legal_bias_strides", "has_legal_strides", "legal_strides", "memory_order",
           "padded_dim"]
