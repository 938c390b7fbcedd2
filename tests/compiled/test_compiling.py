"""Compiling a kernel under a key that does not depend on what was compiled before it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from compiled.compile_process import INSTALLED, OLDEST

ROOT = Path(__file__).resolve().parents[2]

# A process that forks while a thread makes the hash of a kernel. The child lacks that thread, and makes its own.
FORKED = """
import os, signal, threading
from tilewise.kernels import compiling
from tilewise.kernels.triton.backward import attention_delta_kernel
held, let_go = threading.Event(), threading.Event()
def hold():
    with compiling._hashing:
        held.set()
        assert let_go.wait(30)
thread = threading.Thread(target=hold)
thread.start()
assert held.wait(30)
child = os.fork()
if child == 0:
    signal.alarm(30)
    compiling.hash_callees_first(attention_delta_kernel)
    os._exit(0 if attention_delta_kernel.hash else 1)
status = os.waitpid(child, 0)[1]
let_go.set()
thread.join()
assert os.waitstatus_to_exitcode(status) == 0, status
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_lacks():
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED], check=True, timeout=120,
                   env=environment(INSTALLED))


def environment(version):
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    if version != INSTALLED:
        paths.insert(0, str(ROOT / ".triton" / version))
    return os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}


# Under which keys processes look up the kernels of a call, one after another in the orders that arguments name. Each is
# forked when no kernel has been looked up.
KEYS = """
import json, os, sys, torch
from tilewise.compile_ahead.calls import CallShape
from tilewise.compile_ahead.gpu import GPUS, Settings, on_fake_gpu, prepare
from tilewise.compile_ahead.worker import _look_up_only, _LookedUp
from tilewise.masks import causal

def keys_of(kernels):
    keys = {}
    for name, compile_kernel in kernels:
        try:
            with _look_up_only():
                compile_kernel()
        except _LookedUp as answer:
            keys[name] = answer.place.name
    return keys

prepare(GPUS["h200"], Settings.here())
kernels = []
with on_fake_gpu(lambda name, compile_kernel, file=None: kernels.append((name, compile_kernel))):
    CallShape(4096, d=128, mask=causal())()
orders, pipes = {"in order": kernels, "reversed": kernels[::-1], "last": kernels[-2:-1]}, []
for order in sys.argv[1:]:
    pipes.append(os.pipe())
    if os.fork() == 0:
        os.write(pipes[-1][1], json.dumps(keys_of(orders[order])).encode())
        os._exit(0)
    assert os.wait()[1] == 0, order
print(json.dumps([json.loads(os.read(read, 4000)) for read, _ in pipes]))
"""


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("version", [INSTALLED, OLDEST])
def test_a_kernels_key_does_not_depend_on_what_was_compiled_before(version, tmp_path):
    """Triton 3.6 and 3.7 hash a function by those that it calls as far as they were hashed before.

    What ``tilewise compile`` had left on disk from several processes was then not found by the job.
    """
    done = subprocess.run([sys.executable, "-c", KEYS, "in order", "reversed", "last"], check=True, capture_output=True,
                          text=True, env=environment(version) | {"TRITON_CACHE_DIR": str(tmp_path)})
    in_order, backwards, alone = json.loads(done.stdout)
    assert len(in_order) == 4
    assert backwards == in_order
    assert alone == {"hopper_backward_kernel": in_order["hopper_backward_kernel"]}
