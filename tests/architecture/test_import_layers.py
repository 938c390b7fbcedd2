"""Data flows in one direction: the contract of pyproject.toml holds, and would notice if it did not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("module", "imported"), [
    ("masks.mask", "dispatch"), ("kernels.triton.config", "tuning.device"), ("tuning.kinds", "kernels.triton.launch"),
    ("kernels.hopper.forward.config", "kernels.hopper.forward.launch")])
def test_an_import_that_no_contract_allows_breaks_one(module, imported, tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "src/tilewise" / f"{module.replace('.', '/')}.py").open("a") as file:
        file.write(f"\nimport tilewise.{imported}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert f"tilewise.{module} -> tilewise.{imported}" in done.stdout
