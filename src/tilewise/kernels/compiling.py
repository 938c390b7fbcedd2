"""Compiling a kernel: in one thread at a time, under a key that does not depend on what was compiled before it.

The first kernel that a call has to compile may have others compiled beside it: :data:`pending` holds what begins that.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tilewise.support.packages import package_version

# Those in which a function's hash depends on which of the functions that it calls were hashed before it. Triton finds
# a kernel on disk by its hash, so a process that has compiled other kernels would not find it, and compile it again.
_HASHES_CALLERS_FIRST = frozenset({(3, 6), (3, 7)})

_locks: dict[int, threading.Lock] = {}  # by the id of a kernel, which hashes itself where it is a key
_hashing = threading.Lock()
_kinds: set[Any] = set()  # of kernels that this process has compiled


class _Pending(threading.local):
    """A function and its arguments, to be called before this thread compiles a kernel of a new kind, once; or None."""

    call: tuple[Callable[..., None], *tuple[Any, ...]] | None = None


pending = _Pending()


def _forget_threads() -> None:
    """Let go of locks that threads hold which a forked process does not have."""
    global _hashing
    _locks.clear()
    _hashing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


@contextlib.contextmanager
def compiling(kernel: Any) -> Iterator[None]:
    """Keep other threads from compiling this kernel inside a ``with`` block, before which its hash is made.

    A thread that waits finds the kernel in Triton's cache in memory afterwards, if it wants the same one.
    """
    with _locks.setdefault(id(kernel), threading.Lock()):
        _hash_callees_first(kernel)
        yield


def _hash_callees_first(kernel: Any) -> None:
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


def announce(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Begin what is pending in this thread, if a kernel is about to be compiled that is none of those before.

    Args:
        kernel: a jit function.
        arguments: all of them, in its order.
        options: num_warps and its kin.
    """
    constants = frozenset(getattr(kernel, "constexprs", ()))
    kind = (id(kernel), *options.items(),
            *[repr(own) if place in constants else _kind_of(own) for place, own in enumerate(arguments)])
    if kind in _kinds:
        return
    _kinds.add(kind)
    if pending.call is not None:
        (begin, *given), pending.call = pending.call, None
        begin(*given)


def _kind_of(argument: Any) -> Any:
    """Return what a compiled kernel may depend on of an argument; of kernels that are told apart two may be one."""
    if isinstance(argument, tuple):
        return tuple(map(_kind_of, argument))
    if type(argument) is int:
        return argument == 1, argument % 16 == 0, argument >= 1 << 31
    tensor = getattr(argument, "base", argument)  # a descriptor's
    if isinstance(tensor, torch.Tensor):
        return tensor.dtype, str(getattr(argument, "block_shape", None))
    return argument is None or type(argument).__name__
