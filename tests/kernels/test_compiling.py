"""Compiling a kernel: in one thread at a time, under a key that does not depend on others; what is begun beside it."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernels.compile_process import INSTALLED, OLDEST
from tilewise.kernels import compiling as module
from tilewise.kernels.compiling import announce, compiling, pending
from tilewise.kernels.enqueue import Enqueue

ROOT = Path(__file__).resolve().parents[2]
LONG = 30  # seconds, that are waited where a test fails alone


class Kernel:
    """A kernel that stays in the compiler until it is let go, and notes how many threads are in there at once."""

    __name__ = "kernel"
    constexprs = (2,)

    def __init__(self):
        self.entered, self.released = threading.Event(), threading.Event()
        self.inside, self.most, self.calls = 0, 0, 0

    def warmup(self, *arguments, grid, **options):
        self.inside += 1
        self.most, self.calls = max(self.most, self.inside), self.calls + 1
        self.entered.set()
        assert self.released.wait(LONG)
        self.inside -= 1


@pytest.fixture(autouse=True)
def no_kinds(monkeypatch):
    monkeypatch.setattr(module, "_kinds", set())
    yield
    assert pending.call is None


def in_thread(kernel):
    thread = threading.Thread(target=Enqueue(kernel, (1,), (), {}).compile, args=((),))
    thread.start()
    return thread


def test_threads_compile_a_kernel_one_after_another():
    kernel = Kernel()
    threads = [in_thread(kernel) for _ in range(2)]
    assert kernel.entered.wait(LONG)
    for thread in threads:
        thread.join(0.2)
    assert [thread.is_alive() for thread in threads] == [True, True]
    assert (kernel.calls, kernel.inside) == (1, 1)
    kernel.released.set()
    for thread in threads:
        thread.join(LONG)
    assert (kernel.calls, kernel.most) == (2, 1)


def test_threads_compile_two_kernels_at_once():
    kernels = Kernel(), Kernel()
    threads = [in_thread(kernel) for kernel in kernels]
    assert all(kernel.entered.wait(LONG) for kernel in kernels)
    for kernel, thread in zip(kernels, threads, strict=True):
        kernel.released.set()
        thread.join(LONG)


def test_a_kernel_that_failed_can_be_compiled_again():
    kernel = Kernel()
    kernel.released.set()
    with pytest.raises(RuntimeError, match="refused"), compiling(kernel):
        raise RuntimeError("refused")
    Enqueue(kernel, (1,), (), {}).compile(())
    assert kernel.calls == 1


class Described:
    def __init__(self, base, block_shape):
        self.base, self.block_shape = base, block_shape


def begun_by(*arguments, kernel, options=None):
    """Whether a kernel with these arguments is announced as one of a new kind."""
    made = []
    pending.call = made.append, "begun"
    announce(kernel, arguments, options or {"num_warps": 4})
    is_new = pending.call is None
    pending.call = None
    assert made == ["begun"] * is_new
    return is_new


def test_what_is_pending_begins_ahead_of_a_kernel_of_a_new_kind_alone():
    kernel, half = Kernel(), torch.zeros(1, dtype=torch.float16)
    usual = (half, 48, 64, 0.5, (None, half, 3))
    assert begun_by(*usual, kernel=kernel)
    # What a kernel is compiled for is whether a number is 1 and whether it is a multiple of 16; of a constant, itself.
    assert not begun_by(half.clone(), 96, 64, 0.25, (None, half, 5), kernel=kernel)
    assert begun_by(*usual, kernel=Kernel())
    assert begun_by(*usual, kernel=kernel, options={"num_warps": 8})
    for place, other in enumerate((half.float(), 49, 128, 1, (half, half, 3))):
        assert begun_by(*usual[:place], other, *usual[place + 1:], kernel=kernel), place
    assert begun_by(half, 1, 64, 0.5, (None, half, 3), kernel=kernel)
    assert begun_by(Described(half, [8, 64]), *usual[1:], kernel=kernel)
    assert begun_by(Described(half, [16, 64]), *usual[1:], kernel=kernel)
    assert not begun_by(Described(half, [16, 64]), *usual[1:], kernel=kernel)


def test_a_kernel_that_was_compiled_where_nothing_was_pending_is_known():
    kernel = Kernel()
    announce(kernel, (3,), {})
    pending.call = pytest.fail, "it was compiled before"
    announce(kernel, (5,), {})
    assert pending.call is not None
    pending.call = None


def test_what_is_pending_in_a_thread_is_not_in_another():
    pending.call = pytest.fail, "of another thread's call"
    thread = threading.Thread(target=announce, args=(Kernel(), (), {}))
    thread.start()
    thread.join()
    assert pending.call is not None
    pending.call = None


# A process that forks while a thread has a kernel in the compiler. The child lacks that thread, and compiles it itself.
FORKED = """
import os, signal, threading
from kernels.test_compiling import Kernel, in_thread
kernel = Kernel()
thread = in_thread(kernel)
assert kernel.entered.wait(30)
child = os.fork()
if child == 0:
    signal.alarm(30)
    kernel.released.set()
    in_thread(kernel).join()
    os._exit(kernel.calls)
status = os.waitpid(child, 0)[1]
kernel.released.set()
thread.join()
assert os.waitstatus_to_exitcode(status) == 2, status
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


# Under which keys a process looks up the kernels of a call, one after another in an order.
KEYS = """
import json, sys, torch
from tilewise.compile_ahead.calls import CallShape
from tilewise.compile_ahead.gpu import GPUS, Settings, on_fake_gpu, prepare
from tilewise.compile_ahead.worker import _look_up_only, _LookedUp
from tilewise.masks import causal

prepare(GPUS["h200"], Settings.here())
kernels, keys = [], {}
with on_fake_gpu(lambda name, compile_kernel, file=None: kernels.append((name, compile_kernel))):
    CallShape(4096, d=128, mask=causal())()
for name, compile_kernel in {"in order": kernels, "reversed": kernels[::-1], "last": kernels[-2:-1]}[sys.argv[1]]:
    try:
        with _look_up_only():
            compile_kernel()
    except _LookedUp as answer:
        keys[name] = answer.place.name
print(json.dumps(keys))
"""


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("version", [INSTALLED, OLDEST])
def test_a_kernels_key_does_not_depend_on_what_was_compiled_before(version, tmp_path):
    """Triton 3.6 and 3.7 hash a function by those that it calls as far as they were hashed before.

    What ``tilewise compile`` had left on disk from several processes was then not found by the job.
    """
    def keys(order):
        done = subprocess.run([sys.executable, "-c", KEYS, order], check=True, capture_output=True, text=True,
                              env=environment(version) | {"TRITON_CACHE_DIR": str(tmp_path)})
        return json.loads(done.stdout)

    in_order = keys("in order")
    assert len(in_order) == 4
    assert keys("reversed") == in_order
    alone = keys("last")
    assert alone == {"hopper_backward_kernel": in_order["hopper_backward_kernel"]}
