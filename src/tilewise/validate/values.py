"""Checks of what is no tensor: numbers, switches and names."""

import math
import numbers
from collections.abc import Collection
from typing import Any, Literal, cast

import torch

from tilewise.errors import InvalidInput, UnsupportedProblem

AUX_OUTPUTS = ("lse", "max_logit")
ALIGNMENTS: tuple[Literal["top_left", "bottom_right"], ...] = ("top_left", "bottom_right")
FARTHEST = 2**30  # no tensor is as long; kernels reckon in 32 bits, where this and a position add up


def is_integer(value: object) -> bool:
    """Whether it is a whole number and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_factor(value: Any) -> bool:
    """Whether a number can multiply scores in float32, its product with log2(e) too: as 0 or infinity it cannot."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and bool(2.0**-126 <= value <= 2.0**127)


def checked_scale(scale: float | None, d: int) -> float:
    """Return the scale, 1/sqrt(d) for None. Raises :class:`InvalidInput` unless it is None or a factor in float32."""
    if scale is None:
        return 1.0 / math.sqrt(d)
    if is_factor(scale):
        return float(scale)
    raise InvalidInput(f"scale is {scale!r}; allowed is a number from 2^-126 to 2^127, or None for 1/sqrt(d).")


def checked_softcap(softcap: Any) -> float | None:
    """Return the softcap as a float. Raises :class:`InvalidInput` unless it is None or a factor in float32."""
    if softcap is None:
        return None
    if is_factor(softcap):
        return float(softcap)
    raise InvalidInput(f"softcap is {softcap!r}; allowed is a number from 2^-126 to 2^127, or None for none.")


def check_dropout_p(dropout_p: Any) -> None:
    """Raise :class:`InvalidInput` for what is no probability below 1."""
    is_number = isinstance(dropout_p, numbers.Real) and not isinstance(dropout_p, bool)
    if not (is_number and 0.0 <= dropout_p < 1.0):
        raise InvalidInput(f"dropout_p is {dropout_p!r}; allowed is a probability, 0 <= dropout_p < 1.")


def check_dropout_seed(seed: Any) -> None:
    """Raise :class:`InvalidInput` for a seed that is neither a tensor nor an integer of 64 bits."""
    if not isinstance(seed, torch.Tensor) and not (is_integer(seed) and -2**63 <= int(seed) < 2**63):
        raise InvalidInput(f"dropout_seed is {seed!r}; allowed is an integer of 64 bits, an int64 tensor of "
                           "shape (1,), or None.")


def check_return_aux(return_aux: object) -> None:
    """Raise :class:`InvalidInput` for outputs that there are not."""
    named = isinstance(return_aux, Collection) and not isinstance(return_aux, str)
    if not named or any(name not in AUX_OUTPUTS for name in cast("Collection[object]", return_aux)):
        raise InvalidInput(f"return_aux is {return_aux!r}; allowed is a tuple of names out of {AUX_OUTPUTS}.")


def check_numbers(softcap: Any, dropout_p: Any, return_aux: object) -> None:
    """Raise :class:`InvalidInput` for numbers out of range, and for outputs that there are not.

    An operator's schema would take some of them: it turns True into 1.0.
    """
    if softcap is not None or dropout_p != 0:
        checked_softcap(softcap)
        check_dropout_p(dropout_p)
    if return_aux != ():
        check_return_aux(return_aux)


def wants_lse(return_aux: Any) -> bool:
    """Return whether a decoding call asks for lse; raises :class:`InvalidInput` if for anything else."""
    named = tuple(return_aux) if isinstance(return_aux, Collection) else None
    if isinstance(return_aux, str) or named not in ((), ("lse",)):
        raise InvalidInput(f"return_aux is {return_aux!r}; allowed are () and ('lse',).")
    return bool(named)


def check_choices(scale: Any, deterministic: Any, backend: Any) -> None:
    """Raise :class:`InvalidInput` for a factor, a switch or a name of another type; what else is wrong comes later."""
    if scale is not None:
        checked_scale(scale, 1)
    if deterministic is not None:
        check_switch("deterministic", deterministic, ", or None to follow torch.use_deterministic_algorithms")
    if not (backend is None or (isinstance(backend, str) and backend)):  # to a graph, '' is a name of its own
        raise InvalidInput(f"backend is {backend!r}; allowed is the name of a backend, or None to choose.")


def check_switch(name: str, value: Any, otherwise: str = "") -> None:
    """Raise :class:`InvalidInput` for what is neither True nor False."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise InvalidInput(f"{name} is {value!r}; allowed are True and False{otherwise}.")


def check_longest(side: str, size: Any) -> None:
    """Raise :class:`InvalidInput` for what is no size of the longest sequence."""
    is_count = (is_integer(size) or isinstance(size, torch.SymInt)) and size >= 0
    if not (size is None or is_count or (isinstance(size, torch.Tensor) and size.numel() == 1)):
        raise InvalidInput(f"max_seqlen_{side} is {size!r}; allowed is an integer >= 0, a tensor of one element, "
                           "or None.")


def check_cache_seqlens(lengths: Any) -> None:
    """Raise :class:`InvalidInput` for what is neither a tensor nor a length for all sequences."""
    if not (lengths is None or isinstance(lengths, torch.Tensor)
            or (is_integer(lengths) and 0 <= int(lengths) < 2**31)):
        raise InvalidInput(f"cache_seqlens is {lengths!r}; allowed is a tensor of shape (b,), an "
                           "integer from 0 up, or None.")


def checked_splits(splits: Any) -> int | None:
    """Return the number of splits; raises :class:`InvalidInput` for what is none."""
    if splits is not None and (not is_integer(splits) or splits < 1):
        raise InvalidInput(f"num_splits is {splits!r}; allowed is an integer >= 1, or None to choose.")
    return None if splits is None else int(splits)


def checked_side(name: str, value: Any) -> int | None:
    """Return the bound of a window's side, None for one that no tensor reaches; raises :class:`InvalidInput`."""
    if is_integer(value) and int(value) >= 0:
        return int(value) if int(value) < FARTHEST else None
    raise InvalidInput(f"window: {name} is {value!r}; allowed is an integer >= 0, or None for no bound on that side.")


def checked_count(name: str, least: int, value: Any) -> int:
    """Return a count of keys or the length of a chunk, cut to what no tensor reaches; raises :class:`InvalidInput`."""
    if is_integer(value) and int(value) >= least:
        return min(int(value), FARTHEST)
    raise InvalidInput(f"{name} is {value!r}; allowed is an integer >= {least}.")


def checked_alignment(alignment: Any) -> Any:
    """Return an alignment, "top_left" for 0; raises :class:`InvalidInput` for neither a corner nor an offset."""
    if isinstance(alignment, str) and alignment in ALIGNMENTS:
        return alignment
    if is_integer(alignment) and -FARTHEST < int(alignment) < FARTHEST:
        return int(alignment) or "top_left"
    raise InvalidInput(f"alignment is {alignment!r}; allowed are 'top_left', 'bottom_right' and an integer, the key "
                       "that query 0 stands on.")


def check_lengths_to_show(mask: object, query_length: int | None, key_length: int | None) -> None:
    """Raise :class:`InvalidInput` where a picture has no size."""
    if query_length is None or key_length is None:
        raise InvalidInput(f"show: {mask} does not tell how many queries and keys there are; pass query_length "
                           "and key_length.")


def check_plot(lengths: tuple[Any, Any], block: Any) -> None:
    """Raise :class:`InvalidInput` for a picture or tiles without a size."""
    sides = block if isinstance(block, tuple) and len(block) == 2 else (block, 0)
    for name, value in zip(("sq", "sk"), lengths, strict=True):
        if not is_integer(value) or value < 1:
            raise InvalidInput(f"{name} is {value!r}; allowed to plot is an integer of 1 and more.")
    if not all(is_integer(side) and side >= 1 for side in sides):
        raise InvalidInput(f"block is {block!r}; allowed is a pair of integers of 1 and more, queries and keys of a "
                           "tile.")


def not_a_mask(mask: object) -> InvalidInput:
    """Make the error for what is no mask of a call."""
    return InvalidInput(f"mask is a {type(mask).__name__}; allowed is None, causal(), window(left, right), a boolean "
                        "tensor, a MaskFunction, or these joined by '&'.")


def check_mask_to_decode(mask: Any, *, is_mask: bool) -> None:
    """Check that a mask is a band whose diagonal ends at the last query and key; ``is_mask``: a tilewise.Mask."""
    if not is_mask:
        hint = " Padding is told by cache_seqlens and cache_leftpad." if isinstance(mask, torch.Tensor) else ""
        raise InvalidInput(f"mask is a {type(mask).__name__}; allowed is None, causal() or window(left, right).{hint}")
    if mask.alignment not in (None, "bottom_right"):
        raise InvalidInput(f"mask is {mask}; allowed is alignment='bottom_right', or none: the last query stands on "
                           "the last key of the cache.")
    if mask.has_exceptions:
        raise UnsupportedProblem(f"mask is {mask}; decoding takes causal() and window(left, right).", {})
