"""What compilers made of the kernels, recorded: a kernel that is on record is not compiled again.

To compile all that the tests ask for takes most of an hour. But a compiler is a function of what goes into it, of which
Triton makes a hash for its cache: source, arguments, options, target, and its own files. So the facts that the tests
look at stand under that hash in records/, a file for each version of Triton. Whatever changes a kernel changes the
hash: it is compiled then, until ``make compiled`` records it. One kernel in SAMPLE is compiled though it is on record,
and has to become what the record says: that is also what holds those who read the facts to it (sass.py and its like).

Imported where kernels are compiled (compile_ahead.py, decode_ahead.py): a process of its own.
"""

import base64
import contextlib
import io
import json
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITCallable

FOLDER = Path(__file__).with_name("records")
ANEW = "TILEWISE_TESTS_COMPILE_ANEW"  # set: compile what is on record too, and append to the record
SAMPLE = 32


class Prepared(NamedTuple):
    """A kernel ready to be compiled: facts of the launch, what compiles it, and what reads the facts of the result."""

    facts: dict[str, Any]
    compile: Callable[[], Any]
    read: Callable[[Any, str], dict[str, Any]]  # of the compiled kernel and what was printed meanwhile


class OnRecordError(Exception):
    """The kernel of this key need not be compiled."""

    def __init__(self, key):
        super().__init__(key)
        self.key = key


class Record:
    """Facts of compiled kernels by their key. ``anew``: none are known, and those that come are appended."""

    def __init__(self, path, *, anew=False):
        self.path, self.anew = path, anew
        self.rows, self.checked = {}, set()
        if path.exists() and not anew:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            self.rows = {row.pop("key"): row for row in rows}

    def manager(self):
        """Return a cache that Triton asks before it compiles: it raises where the kernel is on record."""
        record = self

        class Asking(FileCacheManager):
            def __init__(self, name, override=False, dump=False):
                super().__init__(name, override, dump)
                key = key_of(base64.b32decode(name + "=" * (-len(name) % 8)).hex())
                if key in record.rows and key not in record.checked and zlib.crc32(key.encode()) % SAMPLE:
                    raise OnRecordError(key)

        return Asking

    def facts_of(self, prepared):
        """Return all facts of a kernel, which is compiled where it has to be."""
        try:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                compiled = prepared.compile()
        except OnRecordError as known:
            key = known.key
        else:
            key = key_of(compiled.hash)
            if key not in self.checked:  # else this process has compiled it before, and nothing was printed
                self._check(key, json.loads(json.dumps(prepared.read(compiled, printed.getvalue()))))
        return prepared.facts | self.rows[key] | {"key": key}

    def _check(self, key, made):
        known = self.rows.setdefault(key, made)
        if known != made:
            raise ValueError(f"{self.path.name} says of kernel {key}: {known}; it became {made}. Run make compiled.")
        self.checked.add(key)
        if self.anew:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key} | made) + "\n")


def serve(prepare):
    """Answer each request, in JSON a line of standard input, with it and the kernel's facts, in JSON a line."""
    record = Record(FOLDER / f"triton-{triton.__version__}.jsonl", anew=ANEW in os.environ)
    knobs.cache.manager_class = record.manager()
    for wanted in map(json.loads, sys.stdin):
        prepared = prepare(wanted)
        forget_hashes()
        print(json.dumps(wanted | record.facts_of(prepared)), flush=True)


def forget_hashes():
    """Have Triton hash each function of a kernel anew.

    A function's hash is made of the constants of those that it calls, but of those alone that were hashed before it. So
    a kernel's key would depend on what its process has compiled so far.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(("tilewise.", "triton.")):
            for function in list(vars(module).values()):
                if isinstance(function, JITCallable):
                    function.hash, function.used_global_vals = None, {}


def key_of(kernel_hash):
    """Return the key of a kernel of which Triton has this hash, of 64 hexadecimal figures: half of them."""
    return kernel_hash[:32]
