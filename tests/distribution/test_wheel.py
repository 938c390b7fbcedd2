"""The wheel and the source distribution: what they hold, what they say, and that a second build has the same bytes."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from distribution.clean_venv import ROOT, build

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Metadata.from_email(archive.read(name), validate=True)


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = {f"{wheel.name.split('-py3')[0]}.dist-info/{name}"
                   for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    package = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/tilewise").rglob("*")
               if path.is_file() and "__pycache__" not in path.parts}
    assert names == package | information
    assert {Path(name).suffix for name in package} == {".py", ".cu", ".cuh", ".json", ".typed"}
    assert {"tilewise/py.typed", "tilewise/kernels/cuda/attention_fp32.cu", "tilewise/kernels/cuda/forward.cuh",
            "tilewise/tuning/tables/nvidia-h200/forward.16bit.json"} <= package


def test_the_source_distribution_holds_the_repository(sdist):
    if not (ROOT / ".git").exists():
        pytest.skip("the files of the repository are known to git, and this is no checkout")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True,
                             check=True).stdout.split("\0")[:-1]
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in tracked if (ROOT / name).exists()} - held == set()
    tops = {name.partition("/")[0] for name in tracked} | {"PKG-INFO"}
    assert {name.partition("/")[0] for name in held} - tops == set()


def test_a_second_build_from_the_source_distribution_has_the_same_bytes(wheel, sdist, tmp_path):
    """Another folder, other dates and other permissions, as another user's checkout has them."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for path in source.rglob("*"):
        path.chmod(0o700 if path.is_dir() or os.access(path, os.X_OK) else 0o600)
        os.utime(path, (1.6e9, 1.6e9))
    for first in (wheel, sdist):
        second = build("wheel" if first is wheel else "sdist", source, tmp_path / "second")
        assert second.name == first.name
        assert second.read_bytes() == first.read_bytes()


def test_twine_finds_nothing_to_mend(wheel, sdist):
    if find_spec("twine") is None:
        pytest.skip("twine, which checks what is uploaded, is not installed: make venv")
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2, done.stdout


def test_torch_is_all_that_is_required(metadata):
    required = [str(requirement) for requirement in metadata.requires_dist if "extra" not in str(requirement.marker)]
    assert required == ["torch>=2.11"]
    assert set(metadata.provides_extra) == set(PROJECT["optional-dependencies"])


def test_the_index_gets_the_short_description_and_the_licence(metadata):
    assert metadata.description == (ROOT / "DESCRIPTION.md").read_text("utf-8")
    assert metadata.description_content_type == "text/markdown"
    assert (metadata.license_expression, metadata.license_files) == ("Apache-2.0", ["LICENSE"])
    assert not any(name.startswith("License") for name in metadata.classifiers)
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(metadata.classifiers)


def test_the_oldest_python_of_the_classifiers_is_the_oldest_that_is_allowed(metadata):
    versions = re.findall(r"Python :: 3\.(\d+)", "\n".join(metadata.classifiers))
    assert f">=3.{min(map(int, versions))}" == str(metadata.requires_python)
