"""Every environment variable and scoped override of tilewise, in one place.

========================  =========  ==============================================================
variable                  default    meaning
========================  =========  ==============================================================
``TILEWISE_BACKEND``      unset      backend used where a call passes ``backend=None``; an unknown
                                     name raises at the first call, as ``backend=`` would
``TILEWISE_CACHE``        unset      folder for compiled CUDA kernels and results of self-checks; unset:
                                     ``tilewise`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``
``TILEWISE_SHORT_WAYS``   unset      ``0``: every call goes through torch's dispatcher and each check,
                                     as its first one does, which costs the host some ten
                                     microseconds a call; to tell a fault of a short way by
========================  =========  ==============================================================

An argument of the call outranks :func:`use_backend`, which outranks the environment.
"""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_backend: ContextVar[str | None] = ContextVar("tilewise_backend", default=None)
# What every call asks for is read from the dict inside os.environ: the way around it raises and catches an exception
# for a variable that is not set, 0.5 µs each.
_variables: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
_BACKEND, _SHORT_WAYS, _OFF = (os.environ.encodekey(text) for text in ("TILEWISE_BACKEND", "TILEWISE_SHORT_WAYS", "0"))


def default_backend() -> str | None:
    """Return the backend name in force where a call names none, or None to let dispatch choose."""
    return _backend.get() or (os.environ.get("TILEWISE_BACKEND") if _BACKEND in _variables else None) or None


def short_ways() -> bool:
    """Return whether a call may go past the dispatcher and the checks that an equal call has passed before."""
    return _variables.get(_SHORT_WAYS) != _OFF


def scoped_backend() -> str | None:
    """Return the backend name of the :func:`use_backend` block that the call stands in, if it stands in one."""
    return _backend.get()


def cache_folder() -> Path:
    """Return the folder for what outlasts a process, which need not exist yet."""
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
