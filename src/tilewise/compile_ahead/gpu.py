"""GPUs that need not be here: what tilewise asks of one, and a process that answers as if it were here.

A kernel that is compiled depends on the name of the GPU (by its tuning tables), its architecture and its number of
multiprocessors. A process that was prepared by :func:`prepare` runs tilewise's own host code, from the public call to
the launch, on tensors without memory that say that they lie on such a GPU. So the kernels that are compiled ahead are
those that a call launches, by the same code.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.autograd import decode_op, op
from tilewise.compile_ahead.pool import CompileOnlyDriver
from tilewise.errors import InvalidInput
from tilewise.kernels.hooks import Take, compile_only

_META, _CUDA = torch.device("meta"), torch.device("cuda", 0)
_LEAST_CAPABILITY = (7, 5)
# Where tensors without memory pretend to begin: a multiple of 16, as of what torch allocates.
_ADDRESS = 1 << 34


@dataclass(frozen=True)
class Gpu:
    """What a compiled kernel depends on of a GPU.

    Attributes:
        name: as ``torch.cuda.get_device_name()`` gives it, by which tuning tables are found.
        capability: compute capability, (9, 0) for sm_90.
        multiprocessors: how many; on a slice of a GPU (MIG), those of the slice.

    >>> Gpu("NVIDIA H200", (9, 0), 132).arch
    'sm_90'
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int

    def __post_init__(self) -> None:
        if self.capability < _LEAST_CAPABILITY:
            raise InvalidInput(f"capability is {self.capability}; allowed are compute capabilities from 7.5 on.")
        if self.multiprocessors < 1:
            raise InvalidInput(f"multiprocessors is {self.multiprocessors}; allowed are 1 and more.")

    @property
    def arch(self) -> str:
        """Its architecture, "sm_90"."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


# As torch.cuda.get_device_properties describes them.
GPUS = {
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108),
    "a100-80gb": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", (9, 0), 114),
    "h200": Gpu("NVIDIA H200", (9, 0), 132),
    "gh200": Gpu("NVIDIA GH200 480GB", (9, 0), 132),
    "b200": Gpu("NVIDIA B200", (10, 0), 148),
}
_DESCRIBED = re.compile(r"sm_(\d+)(\d):(\d+)(?::(.+))?")
_FORMS = (f"{', '.join(GPUS)}, cuda (the GPU that is here), cuda:INDEX, or ARCH:MULTIPROCESSORS:NAME as in "
          "'sm_90:132:NVIDIA H200'")


def gpu_of(device: "Gpu | torch.device | str | None") -> Gpu:
    """Return the GPU that a caller names; None is the one that is here.

    Raises:
        InvalidInput: the name is unknown, or no GPU of NVIDIA is here.
    """
    if isinstance(device, Gpu):
        return device
    if isinstance(device, str):
        if device.lower() in GPUS:
            return GPUS[device.lower()]
        if described := _DESCRIBED.fullmatch(device):
            major, minor, count, name = described.groups()
            return Gpu(name or f"sm_{major}{minor}", (int(major), int(minor)), int(count))
    try:
        where = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError):
        where = _META
    if where.type != "cuda":
        raise InvalidInput(f"device is {device!r}; allowed are {_FORMS}.")
    if torch.version.hip is not None or (where.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"device is {device!r}, and torch sees no such GPU of NVIDIA here; allowed beside it are "
                           f"{_FORMS}.")
    properties = torch.cuda.get_device_properties(where)
    return Gpu(properties.name, (properties.major, properties.minor), properties.multi_processor_count)


@dataclass(frozen=True)
class Settings:
    """What torch is set to in a process, and kernels depend on."""

    tf32: str
    deterministic: bool

    @classmethod
    def here(cls) -> "Settings":
        """Read this process's own."""
        return cls(torch.backends.cuda.matmul.fp32_precision, torch.are_deterministic_algorithms_enabled())

    def apply(self) -> None:
        """Set this process to them."""
        torch.backends.cuda.matmul.fp32_precision = self.tf32
        torch.use_deterministic_algorithms(self.deterministic)


def prepare(gpu: Gpu, settings: Settings) -> None:
    """Make torch and Triton answer in this process as if the GPU were here, for good; a real one is not touched."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    settings.apply()
    properties = SimpleNamespace(name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1],
                                 multi_processor_count=gpu.multiprocessors)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_name": lambda device=None: gpu.name,
        "device_count": lambda: 1, "current_device": lambda: 0, "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: stream,
        "is_available": lambda: False,  # whoever asks wants to run something
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # These two go past torch's Python.
    setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)  # noqa: B010 - a build for the CPU lacks it
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype,
                                                                                   device=_META)
    major, minor = gpu.capability
    driver.set_active(CompileOnlyDriver(GPUTarget("cuda", 10 * major + minor, 32)))


@contextlib.contextmanager
def on_fake_gpu(take: Take) -> Iterator[None]:
    """Hand to ``take`` each kernel that calls inside a ``with`` block would launch, in a process that is prepared.

    Tensors are made on "cuda" there, and have no memory.
    """
    facts = _Facts()
    with compile_only(take), facts, _HostCode(facts):
        yield


def _address(tensor: torch.Tensor) -> int:
    return _ADDRESS + int(tensor.storage_offset()) * tensor.element_size()


class _Facts(TorchFunctionMode):
    """Tensors of the device "meta" say that they lie on the GPU, at addresses as its allocator gives them."""

    _ANSWERS: dict[Any, Callable[[torch.Tensor], Any]] = {  # noqa: RUF012 - a constant
        getattr(torch.Tensor.device, "__get__"): lambda tensor: _CUDA,  # noqa: B009 - typed as what it gets
        getattr(torch.Tensor.is_cuda, "__get__"): lambda tensor: True,  # noqa: B009
        torch.Tensor.get_device: lambda tensor: 0, torch.Tensor.data_ptr: _address,
    }

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        """Answer what a tensor is asked, and make on "meta" what is to be made on the GPU."""
        answer = self._ANSWERS.get(func)
        if answer is not None and args[0].is_meta:
            return answer(args[0])
        if func is torch.Tensor.cuda:
            return args[0].to(_META)
        return func(*map(_on_meta, args), **{name: _on_meta(value) for name, value in (kwargs or {}).items()})


def _on_meta(value: Any) -> Any:
    named = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value) is not None)
    return _META if named else value


class _HostCode(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Runs the code behind tilewise's operators where torch would ask for the shapes of their results alone."""

    _CODE: dict[str, Callable[..., Any]] = {  # noqa: RUF012 - a constant
        "attention_forward": op._forward, "attention_forward_plain": op._forward_plain,
        "attention_backward": op.differentiate, "attention_backward_plain": op.differentiate,
        "attention_decode": decode_op._decode,
    }

    def __init__(self, facts: _Facts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._facts = facts

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operator."""
        if func.namespace != op.forward_op.namespace:
            return func(*args, **(kwargs or {}))
        with self._facts:  # left where autograd calls, and where a function of torch's Python does
            return self._CODE[func._opname](*args, **(kwargs or {}))
