"""One registry of the caches that hold what calls led to: problems, choices of a backend, launch plans.

An entry that depends on more than its key (what a backend answers, a patched function) becomes stale when that changes;
:func:`clear_caches` drops every entry of every cache, so that nobody has to know which caches there are. Compiled
kernels, cuDNN's graphs, tables and what is known of a device or a package stay: they do not change within a process.
"""

from collections.abc import Callable
from typing import Any, TypeVar

_Cache = TypeVar("_Cache")
_registered: list[Any] = []
_clears: list[Callable[[], None]] = []


def registered(cache: _Cache) -> _Cache:
    """Register a cache and return it: a dict, or what :func:`functools.lru_cache` made (as a decorator above it)."""
    clear: Any = getattr(cache, "cache_clear", None) or cache.clear  # type: ignore[attr-defined]
    _registered.append(cache)
    _clears.append(clear)
    return cache


def is_registered(cache: object) -> bool:
    """Return whether it is this very cache that :func:`clear_caches` empties."""
    return any(cache is known for known in _registered)


def clear_caches() -> None:
    """Empty every registered cache: the next call of each kind is checked, chosen and planned anew."""
    for clear in _clears:
        clear()
