"""Which version of an optional package is here."""

import importlib
import importlib.metadata
import importlib.util
import re


def package_version(module: str, distribution: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version; None where the module is not there, (0, 0) where nothing tells it.

    Read from the distribution's metadata, without an import; of a module that came without any, from the module itself.
    """
    if importlib.util.find_spec(module) is None:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", whole_version(module, distribution))
    return (0, 0) if numbers is None else (int(numbers[1]), int(numbers[2]))


def whole_version(module: str, distribution: str) -> str:
    """Return the version to its last figure, as "3.7.1+git5e2c"; empty where nothing tells it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return _told_by(module)


def version_text(version: tuple[int, int] | None) -> str:
    """Say a version as a refusal has it behind "got"."""
    if version is None:
        return "none"
    return ".".join(map(str, version)) if any(version) else "one that tells no version"


def _told_by(module: str) -> str:
    try:
        return str(getattr(importlib.import_module(module), "__version__", ""))
    except ImportError:
        return ""
