"""Every environment variable and scoped override of tilewise, in one place.

========================  =========  ==============================================================
variable                  default    meaning
========================  =========  ==============================================================
``TILEWISE_BACKEND``      unset      backend used where a call passes ``backend=None``; an unknown
                                     name raises at the first call, as ``backend=`` would
``TILEWISE_CACHE``        unset      folder for compiled CUDA kernels; unset: ``tilewise`` in
                                     ``$XDG_CACHE_HOME``, or in ``~/.cache``
========================  =========  ==============================================================

An argument of the call outranks :func:`use_backend`, which outranks the environment.
"""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

_backend: ContextVar[str | None] = ContextVar("tilewise_backend", default=None)


def default_backend() -> str | None:
    """Return the backend name in force where a call names none, or None to let dispatch choose."""
    return _backend.get() or os.environ.get("TILEWISE_BACKEND") or None


def scoped_backend() -> str | None:
    """Return the backend name of the :func:`use_backend` block that the call stands in, if it stands in one."""
    return _backend.get()


def cache_folder() -> Path:
    """Return the folder for compiled CUDA kernels, which need not exist yet."""
    if named := os.environ.get("TILEWISE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewise"


@contextlib.contextmanager
def backend_scope(name: str) -> Iterator[None]:
    """Make ``name`` the default backend inside a ``with`` block; see :func:`use_backend`."""
    token = _backend.set(name)
    try:
        yield
    finally:
        _backend.reset(token)
