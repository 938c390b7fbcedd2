"""The documentation builds without a warning, and its generated parts are what the code says."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT,
                          env=clean | {"PYTHONPATH": str(ROOT / "src")} | environment)


def test_documentation_builds_without_a_warning(tmp_path):
    done = run("-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "doctrees"), "docs",
               str(tmp_path / "html"))
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "html/maths.html").read_text("utf-8")
    assert page.count(r"\tag{") == 26
    assert "tilewise.attention" in (tmp_path / "html/api.html").read_text("utf-8")


def test_support_table_is_what_the_backends_answer():
    if find_spec("triton") is None:
        pytest.skip("the table shows an installed Triton, and here there is none")
    code = "import sys; sys.path.insert(0, 'docs'); import support_table; sys.stdout.write(support_table.render())"
    done = run("-c", code, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/backends.md").read_text("utf-8")
    assert done.stdout in page, "run: python docs/support_table.py"


def test_list_of_torture_checks_is_what_the_suite_has():
    code = "import sys; sys.path.insert(0, 'docs'); import torture_checks; sys.stdout.write(torture_checks.render())"
    done = run("-c", code, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    assert "`one_query`" in done.stdout
    assert done.stdout in (ROOT / "docs/torture.md").read_text("utf-8"), "run: python docs/torture_checks.py"


def test_tables_of_committed_rows_are_what_their_scripts_make():
    code = ("import sys; sys.path.insert(0, 'docs'); import tables; found = tables.pages(); "
            "assert len(found) > 2, found; "
            "print(*[page for page in found if tables.rendered(page.read_text('utf-8')) != page.read_text('utf-8')])")
    done = run("-c", code, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], "run: python docs/tables.py"
