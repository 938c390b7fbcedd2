"""From macros to a kernel that can be launched: NVRTC, a cache on disk, the driver.

Needs the package cuda-bindings and the library NVRTC, which CUDA builds of torch bring; no toolkit, no headers. Nothing
here but :func:`load` needs a GPU.
"""

import contextlib
import ctypes
import hashlib
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

from tilewise import settings
from tilewise.errors import BackendUnavailable
from tilewise.kernels.cuda.call import Call
from tilewise.kernels.cuda.config import CudaConfig
from tilewise.kernels.cuda.source import MAIN, source_files
from tilewise.kernels.hooks import take_of_kernels
from tilewise.support.disk_cache import keep

# Kernel -> its name in the source, and the macros that ask for it.
_KERNELS = {
    "split": ("attention_split_kernel", ("TW_SPLIT_ROWS",)),
    "forward": ("attention_forward_kernel", ("TW_FORWARD",)),
    "delta": ("attention_backward_delta_kernel", ("TW_DELTA",)),
    "dqkv": ("attention_backward_dkdv_kernel", ("TW_DK", "TW_DV_SUM", "TW_DQ_SUM")),
    "dkdv": ("attention_backward_dkdv_kernel", ("TW_DK", "TW_DV_SUM")),
    "dk": ("attention_backward_dkdv_kernel", ("TW_DK",)),
    "dv": ("attention_backward_dkdv_kernel", ("TW_DV_SUM",)),
    "dq": ("attention_backward_dq_kernel", ("TW_DQ",)),
}


_thread = threading.local()  # has_context: whether this thread is known to have one


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel with its macros, not yet compiled.

    Attributes:
        kernel: "split", "forward", "delta", "dqkv" (all gradients), "dkdv", "dk", "dv" or "dq".
        config: shape of the program.
        d, dv: padded head dims.
        vectors: whether every row that it reads can be copied 16 bytes at a time.
    """

    kernel: str
    config: CudaConfig
    d: int
    dv: int
    vectors: bool

    @property
    def name(self) -> str:
        """The kernel's name in the source."""
        return _KERNELS[self.kernel][0]

    @property
    def macros(self) -> tuple[str, ...]:
        """Compiler options that define the source's macros."""
        config = self.config
        values = {"TW_D": self.d, "TW_DV": self.dv, "TW_PRODUCTS": config.products, "TW_BLOCKS": config.blocks,
                  "TW_WARPS": config.warps, "TW_OTHERS": config.others, "TW_RESIDENT": config.resident,
                  "TW_CHUNK": config.chunk, "TW_VECTORS": int(self.vectors), "TW_SPLIT": int(config.split)}
        values |= dict.fromkeys(_KERNELS[self.kernel][1], 1)
        return tuple(f"-D{name}={value}" for name, value in values.items())


def compile_program(program: Program, arch: str, *options: str) -> tuple[bytes, str]:
    """Compile for an architecture such as "sm_90"; returns the machine code and the compiler's log.

    Raises:
        BackendUnavailable: NVRTC is not there, or refuses the source; the message holds its words.
    """
    nvrtc = _nvrtc()

    def checked(result: tuple[Any, ...]) -> Any:
        error, *values = result
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BackendUnavailable(f"NVRTC: {nvrtc.nvrtcGetErrorString(error)[1].decode()}")
        return values[0] if values else None

    headers = source_files()
    main = headers.pop(MAIN)
    names = [name.encode() for name in headers]
    made = checked(nvrtc.nvrtcCreateProgram(main, MAIN.encode(), len(names), list(headers.values()), names))
    arguments = [option.encode() for option in (f"--gpu-architecture={arch}", "--std=c++17", *program.macros, *options)]
    (outcome,) = nvrtc.nvrtcCompileProgram(made, len(arguments), arguments)
    log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(made)))
    checked(nvrtc.nvrtcGetProgramLog(made, log))
    text = log.rstrip(b"\0").decode()
    if outcome != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        checked(nvrtc.nvrtcDestroyProgram(made))
        raise BackendUnavailable(f"NVRTC cannot compile {MAIN} for {arch}: {text or outcome}")
    code = bytearray(checked(nvrtc.nvrtcGetCUBINSize(made)))
    checked(nvrtc.nvrtcGetCUBIN(made, code))
    checked(nvrtc.nvrtcDestroyProgram(made))
    return bytes(code), text


def machine_code(program: Program, arch: str, *, anew: bool = False) -> bytes:
    """Return the compiled program, from the cache on disk where it is there, unless ``anew``.

    Without a folder that can be written it is compiled for this process alone, with a warning.
    """
    name = file_name(program, arch)
    if not anew:
        with contextlib.suppress(OSError, RuntimeError):  # not there, or told below; RuntimeError: there is no home
            return (settings.cache_folder() / name).read_bytes()
    code, _log = compile_program(program, arch)
    try:
        keep(code, settings.cache_folder() / name)
    except OSError as error:
        _tell_once(f"{settings.cache_folder()}: {error.strerror}")
    except RuntimeError as error:
        _tell_once(str(error).rstrip("."))
    return code


def file_name(program: Program, arch: str) -> str:
    """Return the name of a compiled program's file in the cache on disk."""
    version = ".".join(map(str, _nvrtc().nvrtcVersion()[1:]))
    key = "\n".join((version, arch, *program.macros)).encode() + b"".join(source_files().values())
    return f"{program.kernel}-{arch}-{hashlib.sha256(key).hexdigest()[:24]}.cubin"


@cache
def _tell_once(reason: str) -> None:
    warnings.warn("compiled CUDA kernels cannot be kept on disk, so that every process compiles them anew, in a second "
                  f"a kernel: {reason}. Set TILEWISE_CACHE to a folder that can be written.", RuntimeWarning,
                  stacklevel=2)


def load(program: Program, arch: str, device: int, shared_bytes: int) -> Callable[[Call, int], None]:
    """Return what launches a program on the device, which must be current: call it with a Call and a grid's size.

    ``device``: its index; a kernel belongs to one.
    """
    take = take_of_kernels()
    if take is None:
        return _loaded(program, arch, device, shared_bytes)
    take(program.name, partial(machine_code, program, arch), settings.cache_folder() / file_name(program, arch))
    return lambda call, programs: None


@lru_cache(maxsize=1024)
def _loaded(program: Program, arch: str, device: int, shared_bytes: int) -> Callable[[Call, int], None]:
    import torch
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        error, *values = result
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{program.name}: {driver.cuGetErrorString(error)[1].decode()}")
        return values[0] if values else None

    def enter() -> None:
        """Make the device's context current where there is none: in a thread that has not called the runtime yet.

        Autograd's threads are such. The context is held once for each of them; it is torch's, and lasts as long.
        """
        if not int(checked(driver.cuCtxGetCurrent())):
            checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))
        _thread.has_context = True

    enter()
    error, module = driver.cuModuleLoadData(machine_code(program, arch))
    if error != driver.CUresult.CUDA_SUCCESS:  # a file that a crash has left without its content, say
        module = checked(driver.cuModuleLoadData(machine_code(program, arch, anew=True)))
    function = checked(driver.cuModuleGetFunction(module, program.name.encode()))
    attribute = driver.CUfunction_attribute
    checked(driver.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                      shared_bytes))
    # Tiles pass the first-level cache by: all of its memory may be shared memory.
    checked(driver.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100))
    enqueue, threads = driver.cuLaunchKernel, 32 * program.config.warps

    def launch(call: Call, programs: int) -> None:
        if not getattr(_thread, "has_context", False):
            enter()
        # The driver copies the argument before it returns.
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(call))
        stream = torch.cuda.current_stream(device).cuda_stream
        checked(enqueue(function, programs, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.addressof(arguments), 0))

    return launch


@cache
def lacking() -> str | None:
    """Return what the compiler needs and has not, as one sentence, or None; asked first, it loads the library."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        return ("needs the package cuda-bindings and the library NVRTC, which CUDA builds of torch bring; others need "
                f"tilewise[cuda]: {str(error).partition(chr(10))[0]}")
    return None


def _nvrtc() -> Any:
    reason = lacking()
    if reason is not None:
        raise BackendUnavailable(f"backend 'cuda' {reason}")
    from cuda.bindings import nvrtc

    return nvrtc
