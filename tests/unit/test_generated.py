"""Triton functions whose text is made at run time."""

import gc
import inspect
import linecache

import pytest

from tilewise.support.generated import jit_function

pytest.importorskip("triton", reason="Triton is not installed")
TEXT = "def twice(x):\n    return add(x, x)\n"


def test_the_text_of_a_function_is_found_as_long_as_it_lives():
    """Triton asks for it when it compiles, which may be long after the function was made."""
    function = jit_function("twice", TEXT, {"add": lambda a, b: a + b})
    file = inspect.getsourcefile(function.fn)
    linecache.checkcache()
    assert inspect.getsource(function.fn) == TEXT
    assert function.fn(3) == 6
    del function
    gc.collect()
    assert file not in linecache.cache


def test_functions_of_one_name_have_texts_of_their_own():
    one, other = (jit_function("f", f"def f(x):\n    return x + {i}\n", {}) for i in range(2))
    assert inspect.getsource(one.fn) != inspect.getsource(other.fn)
