"""Put off what needs torch until torch is here, so that what needs it not answers without the seconds of its import.

The command line is what gains: its help, and what it says to a misspelt option. Whoever imports the package and
torch, in whatever order, must notice nothing: a program of ``torch.export`` names operators that a package registers,
and asks nobody for them.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def call_once_torch_is_here(function: Callable[[], None], package: str) -> None:
    """Call a function now if torch is imported, else right after the import that brings it.

    That is torch's own, or that of the package's module by way of which torch comes: not before this module is
    complete, since the function may import it too.
    """
    if sys.modules.get("torch") is not None:
        function()
    else:
        sys.meta_path.insert(0, _Watch(function, package))


class _Watch(MetaPathFinder):
    """Finds no module that others would not find; it is told when one has been imported."""

    def __init__(self, function: Callable[[], None], package: str) -> None:
        self._function, self._package = function, package
        self._stands_aside = False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None,
                  /) -> ModuleSpec | None:
        """Find torch and the package's modules as the others do, to be told if the import follows.

        What these import is none of its concern: they are not complete before.
        """
        if self._stands_aside or (fullname != "torch" and not fullname.startswith(f"{self._package}.")):
            return None
        with self.aside():
            spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Told(spec.loader, self)
        return spec

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Let the others find everything inside a ``with`` block."""
        self._stands_aside = True
        try:
            yield
        finally:
            self._stands_aside = False

    def look(self) -> None:
        """Call the function if torch has come, and watch no more."""
        if self in sys.meta_path and sys.modules.get("torch") is not None:
            sys.meta_path.remove(self)
            self._function()


class _Told(Loader):
    """Loads as another loader does, which the module then names as its own, and tells when the module is complete."""

    def __init__(self, loader: Loader, watch: _Watch) -> None:
        self._loader, self._watch = loader, watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See :class:`importlib.abc.Loader`."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See :class:`importlib.abc.Loader`."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with self._watch.aside():
            self._loader.exec_module(module)
        self._watch.look()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # of who finds a module without importing it, as runpy does
