"""Build what is uploaded, and environments that hold the packages they are told to and no others."""

import importlib.metadata
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def build(kind, source, out):
    """Build the "wheel" or the "sdist" of a source tree, as `make package` does, and return its path."""
    pytest.importorskip("hatchling", reason="hatchling, which builds what is uploaded, is not installed: make venv")
    out.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    done = subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)], cwd=source,
                          env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def link_packages(folder, *requirements, without=()):
    """Link the packages of this environment that the requirements need, with all that these need, into a folder.

    A link costs nothing, where an installation of torch copies gigabytes. ``without`` names distributions to leave out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting, linked = [Requirement(requirement) for requirement in requirements], set()
    while waiting:
        requirement = waiting.pop()
        key = (requirement.name.lower().replace("_", "-"), frozenset(requirement.extras))
        if key in linked or key[0] in without:
            continue
        linked.add(key)
        distribution = importlib.metadata.distribution(requirement.name)
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))
        waiting += [needed for needed in map(Requirement, distribution.requires or ())
                    if needed.marker is None or any(needed.marker.evaluate({"extra": extra})
                                                    for extra in ("", *requirement.extras))]
    return folder


class CleanVenv:
    """A virtual environment without any package but those of one folder of links."""

    def __init__(self, folder, links):
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        self.python = folder / "bin/python"
        self.commands = folder / "bin"
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "links.pth").write_text(f"{links}\n", encoding="utf-8")

    def run(self, *command, **environment):
        """Run a command with none of this process's settings of Python, pip, Triton or tilewise."""
        clean = {name: value for name, value in os.environ.items()
                 if not name.startswith(("PYTHON", "PIP_", "TILEWISE_", "TRITON_"))}
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False,
                              cwd=self.commands.parent, timeout=300,
                              env=clean | {"PIP_CONFIG_FILE": os.devnull} | environment)

    def pip(self, *arguments):
        """Run this environment's pip on that one, with no index to fetch anything from."""
        done = self.run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def versions(self):
        """Return the version of each distribution that is there."""
        return {package["name"]: package["version"] for package in json.loads(self.pip("list", "--format", "json"))}
