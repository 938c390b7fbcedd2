"""The entry point: missing extras, usage errors, exit status."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import tilewise
from tilewise.cli import main

# A process that cannot import typer, as on an installation without the extra.
WITHOUT_TYPER = """
import sys
sys.modules["typer"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "typer" else found(name, *rest)
from tilewise.cli import main
main(["info"])
"""


def python(*arguments):
    path = os.pathsep.join([str(Path(tilewise.__file__).parents[1]), sysconfig.get_paths()["purelib"]])
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": path}, timeout=120)


def test_without_typer_it_says_which_extra_to_install():
    done = python("-c", WITHOUT_TYPER)
    assert done.returncode == 2
    assert "needs typer" in done.stderr
    assert "pip install 'tilewise[bench]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_both_missing_packages_are_named(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *rest: None if name in ("typer", "rich") else found(name, *rest))
    with pytest.raises(SystemExit, match="2"):
        main(["info"])
    assert "needs typer and rich, which are not installed" in capsys.readouterr().err


def test_importing_the_package_imports_nothing_of_the_command_line():
    optional = "{'typer', 'rich', 'matplotlib'}"
    done = python("-c", f"import sys, tilewise; print(sorted({optional} & set(sys.modules)))")
    assert done.stdout.strip() == "[]"


def test_the_module_runs_as_a_program():
    done = python("-m", "tilewise", "explain", "--json")
    assert done.returncode == 0
    assert '"problem"' in done.stdout


def test_help_lists_every_command(run):
    finished = run("--help")
    assert finished.status == 0
    for command in ("info", "explain", "check", "bench", "plot", "report", "fuzz", "tune"):
        assert command in finished.output


@pytest.mark.parametrize("arguments", [("explain", "--dtype", "half"), ("explain", "--mask", "diagonal"),
                                       ("explain", "--hq", "3", "--hk", "2"), ("explain", "--device", "abacus"),
                                       ("check", "--case", "nope"), ("check", "--backend", "nope"),
                                       ("bench", "--grid", "nope"), ("bench", "--providers", "nope"),
                                       ("bench", "--regime", "nope"), ("bench", "--seqs", "many"),
                                       ("bench", "--seqs", "7"), ("bench", "--sq", "64", "--grid", "cpu"),
                                       ("plot", "nope.csv"), ("report",)])
def test_bad_input_exits_with_2_and_a_sentence(run, arguments):
    finished = run(*arguments)
    assert finished.status == 2
    assert finished.errors.startswith("tilewise: ")
    assert "allowed" in finished.errors or "multiple" in finished.errors or "left by" in finished.errors


def test_bad_usage_exits_with_2(run):
    assert run("explain", "--nope").status == 2
    assert run("bench", "--direction", "sideways").status == 2
