"""The old home of what kernels import from :mod:`tilewise.problem.options`; nothing else may."""

from tilewise.problem.options import (
    DRAW_SPAN,
    DRAWS,
    NO_OPERANDS,
    Operands,
    Sizes,
    is_large_softcap,
)
from tilewise.problem.options import FunctionSpec as FunctionFacts
from tilewise.problem.options import OperandSpec as OperandFacts

__all__ = ["DRAW_SPAN", "DRAWS", "NO_OPERANDS", "FunctionFacts", "OperandFacts", "Operands", "Sizes",
           "is_large_softcap"]
