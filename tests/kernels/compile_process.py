"""Start the processes that compile: one for each Triton version."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_ahead.py")
ROOT = SCRIPT.parents[2]
INSTALLED = "installed"
VERSIONS = (INSTALLED, "3.6.0", "3.9.0")


def compile_all(version, wanted, script=SCRIPT, **settings):
    """Compile in a process of its own: with that Triton first on the path, and not as an interpreter.

    ``script``: what runs there. ``settings``: environment variables of that process.
    """
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    if version != INSTALLED:
        folder = ROOT / ".triton" / version
        if not folder.is_dir():
            pytest.fail(f"Triton {version} is not at {folder}: run 'make triton-versions'")
        paths.insert(0, str(folder))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths), **settings}
    done = subprocess.run([sys.executable, str(script)], input=json.dumps(wanted), capture_output=True, text=True,
                          env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
