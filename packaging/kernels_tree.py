"""Build the folder that Hugging Face's `kernels` loads: the package under a name of its own, for every device.

Usage: ``python packaging/kernels_tree.py SOURCE OUT --commit HASH [--dirty]`` copies the package of SOURCE, a folder
with ``__init__.py``, to OUT/build/torch-universal.

`kernels` imports a folder under the name that its metadata.json tells, so that several versions of a kernel stand
beside one another in a process. A name must be another for each commit, imports within the package relative, and
operators registered as ``torch.ops.<name>``; so imports and the operators' namespace are rewritten.
"""

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

PACKAGE = "tilewise"
VARIANT = "torch-universal"  # of `kernels`: Python alone, for any device
VERSION = 0  # its interface is that of a release before 1.0, which `kernels` calls version 0
LICENSE = "Apache-2.0"
# `kernels` reads the oldest version of its own that may load a folder. With older ones nothing was tried.
OLDEST_KERNELS = "0.17.0"
# What a caller of kernels does not reach: commands, their measurements, and what they test with.
LEFT_OUT = ("__main__.py", "bench", "cli", "testing")


class CannotRewriteError(Exception):
    """A source names the package in a way that would not follow it to another name."""


def build(source: Path, out: Path, commit: str, is_dirty: bool = False) -> Path:
    """Write the variant's folder, and return it; what was there is removed.

    Args:
        source: the package.
        out: the repository that is made, whose ``build`` folder has a folder for each variant.
        commit: of the source, as a hash; its first digits are part of the name.
        is_dirty: whether files differ from that commit.
    """
    if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        raise SystemExit(f"--commit is {commit!r}; allowed are 7 to 40 lower-case hexadecimal digits.")
    if not (source / "__init__.py").is_file():
        raise SystemExit(f"{source} has no __init__.py; allowed is the folder of the package, src/{PACKAGE}.")
    variant, name = out / "build" / VARIANT, f"_{PACKAGE}_{commit[:7]}{'_dirty' * is_dirty}"
    if variant.exists():
        shutil.rmtree(variant)
    for path in sorted(source.rglob("*")):
        within = path.relative_to(source)
        if path.is_dir() or "__pycache__" in path.parts or within.parts[0] in LEFT_OUT:
            continue
        (variant / within).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py":
            text = rewritten(path.read_text("utf-8"), within, name)
            (variant / within).write_text(text, "utf-8")
        else:
            shutil.copyfile(path, variant / within)
    (variant / "metadata.json").write_text(json.dumps(metadata(variant, name, commit, is_dirty), indent=2) + "\n")
    return variant


def metadata(variant: Path, name: str, commit: str, is_dirty: bool) -> dict[str, object]:
    """Return what `kernels` reads of a folder before it imports it."""
    return {
        "id": name, "name": PACKAGE, "version": VERSION, "license": LICENSE, "kernels-minver": OLDEST_KERNELS,
        "python-depends": [],
        # One type must be named; which device a variant is for, its folder's name tells: any.
        "backend": {"type": "cuda"},
        "digest": {"algorithm": "sha256", "files": digests(variant)},
        "build-info": {"kernel": {"sha": commit, "dirty": is_dirty}},
    }


def digests(variant: Path) -> dict[str, str]:
    """Return the SHA-256 of each file but metadata.json, in base64, by its path within the folder."""
    return {path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
            for path in sorted(variant.rglob("*")) if path.is_file() and path != variant / "metadata.json"}


def rewritten(text: str, within: Path, name: str) -> str:
    """Return a module's source with relative imports, and its operators under this name.

    Args:
        text: the source.
        within: the module's path within the package.
        name: by which the package is imported.

    Raises:
        CannotRewriteError: an import, or a string that is a name for importing, would still be of ``tilewise``.

    >>> print(rewritten("from tilewise.masks import Mask", Path("problem/problem.py"), "_tilewise_0123456"))
    from ..masks import Mask
    """
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            lines[node.lineno - 1] = _import(lines[node.lineno - 1], node, within)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_ours(node.module or ""):
            old = f"from {node.module} import"
            if old not in lines[node.lineno - 1]:
                raise CannotRewriteError(f"{within}:{node.lineno}: an import of {node.module} is not of the form "
                                         f"'{old} ...'.")
            target = (node.module or "").partition(".")[2]
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(old, f"from {_dots(within)}{target} import", 1)
    made = "".join(lines).replace(f"{PACKAGE}::", f"{name}::").replace(f"torch.ops.{PACKAGE}", f"torch.ops.{name}")
    _check(made, within)
    return made


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


def _dots(within: Path) -> str:
    """Return the dots that lead from a module to the package: one for a module that lies in it."""
    return "." * len(within.parts)


def _import(line: str, node: ast.Import, within: Path) -> str:
    """Return a line with ``import tilewise.a as b`` as ``from . import a as b``."""
    if not any(_is_ours(alias.name) for alias in node.names):
        return line
    alias = node.names[0]
    path, _, last = alias.name.rpartition(".")
    if len(node.names) > 1 or alias.asname is None or not path:
        raise CannotRewriteError(f"{within}:{node.lineno}: 'import {alias.name}' binds the name {PACKAGE}, which is "
                                 "another where kernels loads it; allowed are 'from ... import ...' and "
                                 f"'import {PACKAGE}.a as b'.")
    parent = path.partition(".")[2]
    return re.sub(r"import .*", f"from {_dots(within)}{parent} import {last} as {alias.asname}", line)


def _check(text: str, within: Path) -> None:
    """Refuse what names a module of the package in a string that is handed to a function."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        for argument in node.args:
            parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
            first = parts[0] if parts else None
            named = isinstance(first, ast.Constant) and isinstance(first.value, str)
            if named and re.match(rf"{PACKAGE}\.[\w.]*$", first.value) and _imports(node):
                raise CannotRewriteError(f"{within}:{node.lineno}: {first.value!r} names a module of {PACKAGE}; "
                                         "allowed is a name made of __package__.")


def _imports(call: ast.Call) -> bool:
    """Whether a call looks a module up by its name."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ("import_module", "find_spec", "files", "__import__")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--dirty", action="store_true")
    given = parser.parse_args()
    print(build(given.source, given.out, given.commit, given.dirty))


if __name__ == "__main__":
    main()
