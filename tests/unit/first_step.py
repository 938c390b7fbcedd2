"""First calls in a process as if a GPU were here: which kernels this thread compiles, and which others do, as JSON.

Launches do nothing. ``exit`` behind the backend's name: the process ends when a forward pass has returned.
"""

import json
import sys
import threading

import torch
from triton import knobs

from tilewise import attention, causal
from tilewise.compile_ahead.gpu import GPUS, Settings, _Facts, _HostCode, prepare
from tilewise.kernels import driver

MASK = causal()
compiled = []


def note(*, src, metadata, metadata_group, times, cache_hit):
    compiled.append((src.name, threading.current_thread() is threading.main_thread()))


def compiled_by(call):
    """Make a call, wait for all threads; return what this one compiled and what others did, and the result."""
    compiled.clear()
    result = call()
    while threads := others():  # and those that these have begun
        for thread in threads:
            thread.join()
    return [[name for name, is_here in compiled if is_here is own] for own in (True, False)], result


def others():
    return [thread for thread in threading.enumerate() if thread.name == "tilewise-precompile"]


def main(backend, ends):
    prepare(GPUS["h200"], Settings.here())
    driver.bind = lambda *given: lambda addresses: None
    knobs.compilation.listener = note
    facts, seen = _Facts(), {}

    def call(dtype, sq, *, mask=MASK, needs_gradient=True):
        q, k, v = (torch.empty(1, 2, sq, 64, dtype=dtype, device="cuda", requires_grad=needs_gradient)
                   for _ in range(3))
        return attention(q, k, v, mask=mask, backend=backend)

    with facts, _HostCode(facts):
        if ends:
            call(torch.bfloat16, 1024)
            print(json.dumps({"left": bool(others())}))
            return
        seen["no gradient"], _ = compiled_by(lambda: call(torch.float16, 1024, needs_gradient=False))
        with torch.no_grad():
            seen["no gradient is recorded"], _ = compiled_by(lambda: call(torch.float16, 1024, mask=None))
        seen["forward"], out = compiled_by(lambda: call(torch.bfloat16, 1024))
        seen["backward"], _ = compiled_by(lambda: torch.autograd.backward(out, torch.empty_like(out)))
        seen["another length"], _ = compiled_by(lambda: call(torch.bfloat16, 1008))
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], "exit" in sys.argv[2:])
