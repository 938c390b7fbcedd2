"""Data flows in one direction: the contract of pyproject.toml holds, and would notice if it did not."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECK = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def lint_imports(folder):
    """Run import-linter on the package in ``folder``/src, with the contract in ``folder``."""
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "COLUMNS": "200"}
    return subprocess.run([sys.executable, "-c", CHECK], cwd=folder, env=environment, capture_output=True, text=True,
                          check=False)


def test_import_contracts_are_kept():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_upward_import_breaks_the_contract(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "src/tilewise/masks.py").open("a") as masks:
        masks.write("\nfrom tilewise import dispatch\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "tilewise.masks -> tilewise.dispatch" in done.stdout


def test_old_homes_are_open_to_kernels_alone():
    """tilewise.scores and tilewise.decode_problem hand on what the kernels import until these name tilewise.problem."""
    found = {path.relative_to(ROOT).as_posix() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")
             if re.search(r"^\s*from tilewise\.(scores|decode_problem) import", path.read_text("utf-8"), re.MULTILINE)}
    kernels = tuple(f"src/tilewise/kernels/{family}/" for family in ("cuda", "gluon", "triton"))
    assert [name for name in sorted(found) if not name.startswith(kernels)] == []
