"""What NVRTC made of the CUDA kernels, on the record of compiled kernels (compile_record.py)."""

import hashlib
import inspect
import json
import os
import re
import zlib

from cuda.bindings import nvrtc

from compiled.compile_record import ANEW, FOLDER, SAMPLE, Record
from tilewise.kernels.cuda.program import compile_program
from tilewise.kernels.cuda.source import source_files


class CudaRecord(Record):
    """Facts of compiled CUDA kernels, by all that goes into one."""

    def spills_of(self, program, arch):
        """Return the bytes of a thread's spill stores; the program is compiled where it is not on record."""
        key = _key_of(program, arch)
        if key not in self.checked and (key not in self.rows or zlib.crc32(key.encode()) % SAMPLE == 0):
            self._check(key, _compiled(program, arch))
        return self.rows[key]["spills"]


def cuda_record():
    """Return the record; a variable of compile_record.py says to make it anew."""
    return CudaRecord(FOLDER / "nvrtc.jsonl", anew=ANEW in os.environ)


def _compiled(program, arch):
    code, log = compile_program(program, arch, "--ptxas-options=-v")
    assert code.startswith(b"\x7fELF")
    return {"spills": max(int(count) for count in re.findall(r"(\d+) bytes spill stores", log))}


def _key_of(program, arch):
    """The source, its macros, the architecture, NVRTC's version, and the function that compiles and reads the facts."""
    said = json.dumps([arch, program.macros, nvrtc.nvrtcVersion()[1:]])
    parts = said.encode(), *source_files().values(), inspect.getsource(_compiled).encode()
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]
