"""Every environment variable and scoped override of tilewise, in one place.

========================  =========  ==============================================================
variable                  default    meaning
========================  =========  ==============================================================
``TILEWISE_BACKEND``      unset      backend used where a call passes ``backend=None``; an unknown
                                     name raises at the first call, as ``backend=`` would
========================  =========  ==============================================================

An argument of the call outranks :func:`use_backend`, which outranks the environment.
"""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

_backend: ContextVar[str | None] = ContextVar("tilewise_backend", default=None)


def default_backend() -> str | None:
    """Return the backend name in force where a call names none, or None to let dispatch choose."""
    return _backend.get() or os.environ.get("TILEWISE_BACKEND") or None


@contextlib.contextmanager
def backend_scope(name: str) -> Iterator[None]:
    """Make ``name`` the default backend inside a ``with`` block; see :func:`use_backend`."""
    token = _backend.set(name)
    try:
        yield
    finally:
        _backend.reset(token)
