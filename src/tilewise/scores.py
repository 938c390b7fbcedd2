"""The old home of what kernels import from :mod:`tilewise.problem.options`; nothing else may."""

from tilewise.problem.options import (
    DRAW_SPAN,
    DRAWS,
    NO_OPERANDS,
    FunctionFacts,
    OperandFacts,
    Operands,
    Sizes,
    is_large_softcap,
)

__all__ = ["DRAW_SPAN", "DRAWS", "NO_OPERANDS", "FunctionFacts", "OperandFacts", "Operands", "Sizes",
           "is_large_softcap"]
