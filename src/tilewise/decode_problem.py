"""The old home of what kernels import from :mod:`tilewise.problem.decode`; nothing else may."""

from tilewise.problem.decode import CacheOperands, DecodeProblem

__all__ = ["CacheOperands", "DecodeProblem"]
