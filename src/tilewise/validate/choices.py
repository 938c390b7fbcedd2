"""Checks of a name that is one out of a list; they need no torch, and so the command line can ask them first."""

import re
from collections.abc import Collection

from tilewise.errors import InvalidInput


def check_choice(said: str, value: object, allowed: Collection[str], more: str = "") -> None:
    """Raise :class:`InvalidInput` for a value that is none of the allowed ones; ``more`` ends the list of them."""
    if value not in allowed:
        raise InvalidInput(f"{said} is {value!r}; allowed are {', '.join(allowed)}{more}.")


def check_backend(name: str, known: tuple[str, ...]) -> None:
    """Raise :class:`InvalidInput` for a name that no backend has."""
    if name not in known:
        raise InvalidInput(f"backend is {name!r}; allowed are {', '.join(map(repr, known))}, or None to choose.")


def check_implementation(name: str, known: Collection[str]) -> None:
    """Raise :class:`InvalidInput` for a name of the torture suite that is neither known nor MODULE:NAME."""
    if path_of_implementation(name) is None:
        check_choice("implementation", name, known,
                     ", all, or MODULE:NAME of a tilewise.testing.torture.Implementation of your own")


def path_of_implementation(name: str) -> tuple[str, str] | None:
    """Split MODULE:NAME; None for what is no such thing, and for names of this package's backends."""
    module, _, attribute = name.partition(":")
    is_path = module != "tilewise" and all(re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", part) is not None
                                           for part in (module, attribute))
    return (module, attribute) if is_path else None
