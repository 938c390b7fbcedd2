"""The entry point: missing extras, usage errors, exit status."""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise.cli import inputs, main

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


# What is answered without torch, whose import takes seconds: usage, and names that are none of a list.
HELP = [("--help",), *((command, "--help") for command in ("info", "explain", "check", "fuzz", "bench", "tune",
                                                          "compile"))]
MISTYPED = [("xplain",), ("--hlep",), ("explain", "--hed-dim", "64"), ("explain", "--dtype", "half"),
            ("explain", "--backend", "tritn"), ("explain", "--device", "abacus"), ("check", "--dtype", "float32,half"),
            ("check", "--backend", "tritn"), ("check", "--torture", "--implementation", "fa9"),
            ("fuzz", "--size", "huge"), ("bench", "--grid", "paper,nope"), ("bench", "--providers", "naive,nope"),
            ("bench", "--regime", "slow"), ("bench", "--direction", "sideways"), ("tune", "--backend", "cuda"),
            ("tune", "--dtypes", "half"), ("compile", "--sq", "64", "--dtype", "half"),
            ("compile", "--sq", "64", "--backend", "tritn"), ("compile", "--sq", "64", "--layout", "sbhd")]
IN_TURN = """
import contextlib, io, json, sys
from tilewise.cli import main
answers = []
for arguments in json.loads(sys.argv[1]):
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main(arguments)
        except SystemExit as status:
            answers.append((status.code or 0, out.getvalue(), errors.getvalue(), "torch" in sys.modules))
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="module")
def without_torch():
    """What a process that starts with nothing imported says to each of these, one after another."""
    done = python("-c", IN_TURN, json.dumps(HELP + MISTYPED))
    assert done.returncode == 0, done.stderr
    return dict(zip(HELP + MISTYPED, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help_is_answered_without_torch(without_torch, arguments):
    status, output, errors, has_torch = without_torch[arguments]
    assert (status, errors, has_torch) == (0, "", False)
    assert "Usage" in output


@pytest.mark.parametrize("arguments", MISTYPED, ids=" ".join)
def test_what_is_mistyped_is_answered_without_torch(without_torch, arguments):
    status, output, errors, has_torch = without_torch[arguments]
    assert (status, output, has_torch) == (2, "", False)
    assert "allowed are " in errors or "No such" in errors or "is not one of" in errors


def test_info_imports_torch_once_and_starts_no_other_python():
    done = python("-X", "importtime", "-c", """
import subprocess, sys
started = subprocess.Popen.__init__
def start(self, command, *more, **options):
    assert "python" not in str(command), command
    started(self, command, *more, **options)
subprocess.Popen.__init__ = start
from tilewise.cli import main
main(["info", "--json"])
""")
    assert done.returncode == 0, done.stderr
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert imported.count("torch") == 1


def test_help_lists_every_command(run):
    finished = run("--help")
    assert finished.status == 0
    for command in ("info", "explain", "check", "bench", "compile", "fuzz", "tune"):
        assert command in finished.output


@pytest.mark.parametrize("arguments", [("explain", "--dtype", "half"), ("explain", "--mask", "diagonal"),
                                       ("explain", "--hq", "3", "--hk", "2"), ("explain", "--device", "abacus"),
                                       ("check", "--case", "nope"), ("check", "--backend", "nope"),
                                       ("bench", "--grid", "nope"), ("bench", "--providers", "nope"),
                                       ("bench", "--regime", "nope"), ("bench", "--seqs", "many"),
                                       ("bench", "--seqs", "7"), ("bench", "--sq", "64", "--grid", "cpu")])
def test_bad_input_exits_with_2_and_a_sentence(run, arguments):
    finished = run(*arguments)
    assert finished.status == 2
    assert finished.errors.startswith("tilewise: ")
    assert "allowed" in finished.errors or "multiple" in finished.errors or "left by" in finished.errors


def refuse(*_, **__):
    raise AssertionError("nothing may run")


@pytest.mark.parametrize(("arguments", "message"), [
    *[(("bench", flag, value), f"{flag} is given without --sq, which makes a shape of its own in place of a grid; "
                               "allowed are both, or neither.")
      for flag, value in (("--b", 2), ("--hq", 4), ("--hk", 4), ("--sk", 32), ("--d", 64), ("--dv", 64),
                          ("--mask", "none"), ("--dtype", "float32"))],
    (("bench", "--mask", "causal", "--d", 32, "--grid", "cpu"),
     "--d and --mask are given without --sq, which makes a shape of its own in place of a grid; allowed are both, or "
     "neither."),
    *[(("check", flag, value), f"{flag} is given without --sq, which makes a shape of its own in place of the named "
                               "cases; allowed are both, or neither.")
      for flag, value in (("--b", 1), ("--hq", 4), ("--hk", 4), ("--sk", 32), ("--d", 64), ("--dv", 64),
                          ("--mask", "causal"))],
    *[(("bench", "--sq", 16, flag, 16), f"{flag} is given beside --sq, which is one shape and no grid to choose from; "
                                        "allowed is one of them.") for flag in ("--seqs", "--dims")],
    *[(("bench", "--host", flag, value), f"{flag} is given beside --host, which times every call of one tiny shape; "
                                         "allowed is one of them.")
      for flag, value in (("--sq", 16), ("--mask", "causal"), ("--dtype", "float32"), ("--grid", "cpu"), ("--seqs", 16),
                          ("--dims", 16), ("--direction", "forward"), ("--regime", "turns"), ("--budget", 1))],
    (("bench", "--graph", "--device", "cpu"), "--graph is given on cpu; allowed is a GPU, which has graphs."),
    *[((command, *more, "--dtype", name), f"dtype is {name!r}; allowed are float16, bfloat16, float32, float64.")
      for name in ("int8", "float8_e4m3fn", "bool", "complex64")
      for command, *more in (("bench",), ("bench", "--sq", 16), ("check",), ("check", "--sq", 16), ("explain",),
                             ("compile", "--sq", 16))],
    (("check", "--dtype", "float32,int8"), "dtype is 'int8'; allowed are float16, bfloat16, float32, float64."),
    (("check", "--dtype", ","), "dtype is ','; allowed are float16, bfloat16, float32, float64, with commas between "
                                "them."),
], ids=lambda value: "_".join(map(str, value)) if isinstance(value, tuple) else "")
def test_flags_that_would_be_ignored_or_mean_nothing_exit_with_2_before_anything_runs(run, monkeypatch, arguments,
                                                                                      message):
    for session in ("bench_session", "host_session", "check_session", "compile_session"):
        monkeypatch.setattr(f"tilewise.cli.session.{session}", refuse)
    finished = run(*arguments)
    assert (finished.status, finished.errors) == (2, f"tilewise: {message}\n")


def test_bad_usage_exits_with_2(run):
    assert run("explain", "--nope").status == 2
    assert run("bench", "--direction", "sideways").status == 2


@pytest.mark.parametrize("name", [None, "cuda"])
def test_the_current_gpu_has_the_name_that_its_tensors_have(monkeypatch, name):
    for function, answer in (("is_available", True), ("device_count", 2), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, function, lambda answer=answer: answer)
    assert inputs.usable_device(name) == torch.device("cuda", 1)
    assert inputs.usable_device("cuda:0") == torch.device("cuda", 0)
