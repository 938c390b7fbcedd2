"""Errors of tilewise's calls in the terms of the library whose function was called: its names, its order of dims.

What is wrong is said once, where it is checked; here the sentence is put into the caller's words.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from tilewise.errors import InvalidInput

_FOUR_DIMS = re.compile(r"\(([^(),]+), ([^(),]+), ([^(),]+), ([^(),]+)\)")


def in_terms(call: Callable[..., Any], words: Mapping[str, str], *, heads_third: bool = False) -> Callable[..., Any]:
    """Return the same call of tilewise's, whose :class:`InvalidInput` is said in words of another library.

    Args:
        call: a function of tilewise's.
        words: what its errors say, whole words, and what takes their place.
        heads_third: whether the caller's tensors of four dims are (b, s, h, d), which tilewise sees as (b, h, s, d).
    """
    known = re.compile(r"\b(?:" + "|".join(map(re.escape, sorted(words, key=len, reverse=True))) + r")\b")

    @functools.wraps(call)
    def said_anew(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except InvalidInput as error:
            said = known.sub(lambda found: words[found[0]], str(error))
            raise InvalidInput(_FOUR_DIMS.sub(r"(\1, \3, \2, \4)", said) if heads_third else said) from None

    return said_anew
