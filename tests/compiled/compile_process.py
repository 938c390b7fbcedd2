"""Start the processes that compile: one for each Triton version, which goes on from test to test."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_ahead.py")
ROOT = SCRIPT.parents[2]
INSTALLED = "installed"
ENDS = OLDEST, NEWEST = "3.6.0", "3.9.0"  # of the supported range
BETWEEN = "3.8.0"  # renamed the functions of the TMA; the Gluon kernels alone are compiled with it
VERSIONS = (INSTALLED, *ENDS)
_shared = {}  # version -> the process that tests share


def compile_all(version, wanted, script=SCRIPT, **settings):
    """Compile in another process: with that Triton first on the path, and not as an interpreter.

    To import torch and Triton takes as long as to compile a kernel, so tests share a process, which does not compile
    again what it has compiled.

    ``script``: what runs there. ``settings``: environment variables that it runs with.
    """
    if version in _shared and _shared[version].runs != (script, settings):  # one for each version is memory enough
        _shared.pop(version).close()
    if version not in _shared:
        _shared[version] = Compiler(version, script, settings)
    try:
        return _shared[version].compile(wanted)
    except BaseException:
        _shared.pop(version).close()
        raise


@atexit.register
def _close_shared():
    for compiler in _shared.values():
        compiler.close()


class Compiler:
    """A process that reads a request a line and answers each with a row."""

    def __init__(self, version, script, settings):
        paths = [str(ROOT / "src"), str(ROOT / "tests")]
        if version != INSTALLED:
            folder = ROOT / ".triton" / version
            if not folder.is_dir():
                pytest.fail(f"Triton {version} is not at {folder}: run 'make triton-versions'")
            paths.insert(0, str(folder))
        self.runs = script, settings
        environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths), **settings}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors, text=True, env=environment)

    def compile(self, wanted):
        return [self.answer(request) for request in wanted]

    def answer(self, request):
        with contextlib.suppress(BrokenPipeError):  # where it has ended, it has said why
            print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            pytest.fail(f"The compiler ended: {self.errors.read()[-4000:]}")
        return json.loads(line)

    def close(self):
        self.process.kill()  # it has answered all there was, or will not be listened to
        self.process.communicate()
        self.errors.close()
