"""Every environment variable and scoped override of tilewise, in one place.

========================  =========  ==============================================================
variable                  default    meaning
========================  =========  ==============================================================
``TILEWISE_BACKEND``      unset      backend used where a call passes ``backend=None``; an unknown
                                     name raises at the first call, as ``backend=`` would
``TILEWISE_CACHE``        unset      folder for compiled CUDA kernels and results of self-checks; unset:
                                     ``tilewise`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``
``TILEWISE_CHECK``        unset      ``1``: wrong lengths, tables and indices on a GPU, which nobody looks
                                     at otherwise, raise in a later call, without a wait; so do, on every
                                     device, keys that a call would leave out: new ones for which a
                                     cache has no room, and those behind borders that queries share
``TILEWISE_FAST_PATH``    unset      ``0``: every call goes through torch's dispatcher and each check,
                                     as its first one does, which costs the host some ten
                                     microseconds a call; to find a fault of the fast path
========================  =========  ==============================================================

An argument of the call outranks :func:`use_backend`, which outranks the environment.
"""

import contextlib
import os
import warnings
from collections.abc import Callable
from contextvars import ContextVar, Token
from pathlib import Path
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_backend: ContextVar[str | None] = ContextVar("tilewise_backend", default=None)
# What every call asks for is read from the dict inside os.environ: the way around it raises and catches an exception
# for a variable that is not set, 0.5 µs each.
_variables: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
_BACKEND, _CHECK, _FAST_PATH, _ON, _OFF = (
    os.environ.encodekey(text) for text in ("TILEWISE_BACKEND", "TILEWISE_CHECK", "TILEWISE_FAST_PATH", "1", "0"))


def default_backend() -> str | None:
    """Return the backend name in force where a call names none, or None to let dispatch choose."""
    return _backend.get() or (os.environ.get("TILEWISE_BACKEND") if _BACKEND in _variables else None) or None


def takes_fast_path() -> bool:
    """Return whether a call may go past the dispatcher and the checks that an equal call has passed before."""
    return _variables.get(_FAST_PATH) != _OFF


def checks_lengths() -> bool:
    """Return whether lengths on a GPU are looked at, one call late."""
    return _variables.get(_CHECK) == _ON


def scoped_backend() -> str | None:
    """Return the backend name of the :func:`use_backend` block that the call stands in, if it stands in one."""
    return _backend.get()


def cache_folder() -> Path:
    """Return the folder for what outlasts a process, which need not exist yet."""
    if named := os.environ.get("TILEWISE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewise"


class BackendScope(contextlib.AbstractContextManager[None], contextlib.ContextDecorator):
    """Makes ``name`` the default backend inside a ``with`` block; see :func:`use_backend`.

    One that is let go of without a block has changed nothing, which its caller would otherwise never learn.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_used = False
        self._tokens: list[Token[str | None]] = []

    def __enter__(self) -> None:
        self._is_used = True
        self._tokens.append(_backend.set(self._name))

    def __exit__(self, *_: object) -> None:
        _backend.reset(self._tokens.pop())

    def __call__(self, function: _Function) -> _Function:
        """Return the function with a scope around each of its calls."""
        self._is_used = True
        return super().__call__(function)

    def _recreate_cm(self) -> "BackendScope":
        return BackendScope(self._name)  # each call of a decorated function, in whatever thread, has a scope of its own

    def __repr__(self) -> str:
        return f"<use_backend({self._name!r}): in force inside a with block>"

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn(f"use_backend({self._name!r}) was called and its with block never entered, so it changed "
                          f"nothing; write 'with use_backend({self._name!r}):' around the calls, pass "
                          f"backend={self._name!r} to each, or set TILEWISE_BACKEND={self._name} for the process.",
                          RuntimeWarning, stacklevel=2)
