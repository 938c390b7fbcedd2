"""Triton functions whose text is made at run time."""

import itertools
import linecache
import weakref
from typing import Any

_numbers = itertools.count()


def jit_function(name: str, source: str, names: dict[str, Any]) -> Any:
    """Return the function of that name in a text of Triton, as ``@triton.jit`` would.

    Triton reads the text of what it compiles, and asks Python for it: it finds it as long as the function lives.

    Args:
        name: of the function.
        source: defines it.
        names: what it may use beside ``tl``, such as other Triton functions.
    """
    import triton
    import triton.language as tl

    file = f"<tilewise {name} {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    defined = {"__name__": __name__, "tl": tl, **names}
    exec(compile(source, file, "exec"), defined)
    function: Any = triton.jit(defined[name])
    weakref.finalize(function, linecache.cache.pop, file, None)
    return function
