"""Run the CUDA kernels on a CPU: the source compiled by the C++ compiler, each thread a coroutine (cuda_on_cpu.h)."""

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tilewise.kernels.cuda.source import FOLDER, source_files

HERE = Path(__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++")
# A product and a sum become one instruction where NVRTC makes them one: elsewhere than on x86 compilers do unasked.
FUSED = ("-ffp-contract=fast", *(("-march=native",) if platform.machine() == "x86_64" else ()))
# -Og: more takes longer to compile than it saves, for most programs run for less than a second.
OPTIONS = ("-std=c++17", "-Og", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas", *FUSED)


@cache
def library(program):
    """Compile one program, unless that was done before, and load it."""
    key = hashlib.sha256("\n".join((*OPTIONS, *program.macros)).encode())
    for text in (*source_files().values(), *((HERE / f"cuda_on_cpu.{end}").read_bytes() for end in ("h", "cpp"))):
        key.update(text)
    made = Path(tempfile.gettempdir()) / "tilewise-cuda-on-cpu" / f"{key.hexdigest()[:24]}.so"
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=made.parent) as file:
            subprocess.run([COMPILER, *OPTIONS, *program.macros, f"-I{HERE}", f"-I{FOLDER}",
                            str(HERE / "cuda_on_cpu.cpp"), "-o", file.name + ".so"], check=True)
            Path(file.name + ".so").replace(made)
    return ctypes.CDLL(str(made))


def load(program, arch, device, shared_bytes):
    """Stand in for tilewise.kernels.cuda.program.load."""
    run = library(program).run

    def launch(call, programs):
        assert programs > 0, "CUDA launches no empty grid"
        run(ctypes.byref(call), programs, shared_bytes)

    return launch
