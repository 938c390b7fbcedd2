"""A torture suite for attention functions: hand it a callable, and it tells what fails and by how much.

docs/torture.md shows how.
"""

from tilewise.testing.torture.checks import Check, Group
from tilewise.testing.torture.implementation import Alignment, Call, Implementation, Takes
from tilewise.testing.torture.suite import CHECKS, Result, failures, torture

__all__ = ["CHECKS", "Alignment", "Call", "Check", "Group", "Implementation", "Result", "Takes", "failures", "torture"]
