"""What tilewise raises when it cannot, or must not, do what was asked.

Every message is a sentence in three parts: what was got, what is allowed, what to do.
"""

from collections.abc import Mapping


class TilewiseError(Exception):
    """The base of every error that tilewise raises on purpose."""


class InvalidInput(TilewiseError, ValueError):
    """An argument that has no meaning on any backend; the message names the argument."""


class UnknownArgument(InvalidInput, TypeError):
    """An argument that the call does not have; the message names the one of ours that was meant, where that is known.

    Python's own error for it is a TypeError, and so is this one.
    """


class BackendUnavailable(TilewiseError, RuntimeError):
    """A backend that cannot run here, whatever the problem: something it needs is missing, or refuses."""


class UnsupportedProblem(TilewiseError, NotImplementedError):
    """A meaningful problem that the asked-for backend, or every backend, refuses.

    Attributes:
        reasons: backend name -> the sentence its ``why_not`` gave.
    """

    def __init__(self, summary: str, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        lines = [summary, *(f"  {name}: {reason}" for name, reason in self.reasons.items())]
        super().__init__("\n".join(lines))
