"""The wheel, installed alone: what a user has who takes tilewise from the package index."""

import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from distribution.clean_venv import ROOT, CleanVenv, build, link_packages

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def venv_with(folder, wheel, *requirements, without=()):
    """Return an environment that has these packages, and tilewise from the wheel."""
    environment = CleanVenv(folder / "venv", link_packages(folder / "links", *requirements, without=without))
    environment.pip("install", "--no-index", "--no-deps", "--no-compile", str(wheel))
    return environment


def test_the_installation_keeps_what_is_there_and_adds_tilewise_alone(wheel, tmp_path):
    environment = CleanVenv(tmp_path / "venv", link_packages(tmp_path / "links", "torch"))
    before = environment.versions()
    assert before["torch"] == version("torch")
    environment.pip("install", "--no-index", "--no-compile", str(wheel))
    assert environment.versions() == before | {"tilewise": wheel.name.split("-")[1]}


def test_it_works_beside_torch_alone(wheel, tmp_path):
    environment = venv_with(tmp_path, wheel, "torch", without=("triton",))
    done = environment.run(environment.python, HERE / "smoke_without_triton.py")
    assert done.returncode == 0, done.stdout + done.stderr
    done = environment.run(environment.commands / "tilewise", "--help")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "pip install 'tilewise[bench]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_its_kernels_run_beside_triton(wheel, tmp_path):
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed here, so there is none to link")
    environment = venv_with(tmp_path, wheel, "torch", "triton", "numpy")  # the interpreter computes in numpy
    done = environment.run(environment.python, HERE / "smoke_with_triton.py", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_command_runs_with_the_extra(wheel, tmp_path):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    environment = venv_with(tmp_path, wheel, "torch", *extras["bench"], without=("triton",))
    done = environment.run(environment.commands / "tilewise", "explain", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reference" in done.stdout
    done = environment.run(environment.commands / "tilewise", "--help")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bench" in done.stdout
