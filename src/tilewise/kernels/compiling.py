"""Compiling a kernel under a key that does not depend on what was compiled before it."""

import os
import threading
from typing import Any

from tilewise.support.packages import package_version

# Those in which a function's hash depends on which of the functions that it calls were hashed before it. Triton finds
# a kernel on disk by its hash, so a process that has compiled other kernels would not find it, and compile it again.
_HASHES_CALLERS_FIRST = frozenset({(3, 6), (3, 7)})

_hashing = threading.Lock()


def _forget_threads() -> None:
    """Let go of the lock where a thread holds it that a forked process does not have."""
    global _hashing
    _hashing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def hash_callees_first(kernel: Any) -> None:
    """Have Triton make the hash of a kernel, as Triton 3.8 does: of each function after those that it calls."""
    from triton.runtime import jit

    if not isinstance(kernel, jit.JITCallable):  # interpreted
        return
    with _hashing:
        if package_version("triton", "triton") not in _HASHES_CALLERS_FIRST:
            _ = kernel.cache_key
            return
        finder = jit.DependenciesFinder
        merge = finder._update_hash

        def callees_first(self: Any, function: Any) -> None:
            _ = function.cache_key
            merge(self, function)

        finder._update_hash = callees_first
        try:
            _ = kernel.cache_key
        finally:
            finder._update_hash = merge
