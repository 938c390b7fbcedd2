"""Launching compiled kernels through the CUDA driver: whoever compiled them, by documented interfaces alone.

Of Triton it takes what a compiled kernel says of itself: its machine code, the types of its parameters, and the shape
of a block of threads. Triton's own launcher, which differs from version to version, is left out. cuda-bindings, which
CUDA builds of torch require, loads the code, encodes tensor maps and enqueues.

Whatever is not as :func:`image_of` and :func:`load` expect raises :class:`UnknownKernel`, and the caller launches by
Triton's own way: slower on the host, the same kernel.
"""

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

# One value a pointer of a kernel: the address of a tensor, or None; a number that changes from call to call is itself.
Addresses = tuple[Any, ...]
# Sets of arguments that are kept encoded, of a launch: a training step of as many layers finds each layer's again in
# the next step. A set takes some 1 KiB.
KEPT = 128
_STREAMS = 64  # whose launch configurations are kept
# Of the types in a kernel's signature, by struct's letters. A pointer is 8 bytes.
_FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I",
            "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}
_MAP_BYTES = 128  # of a CUtensorMap
# What a compiler appends to a kernel's own parameters: pointers to scratch memory, global and for a profiler.
_SCRATCH = (8, 8)
_LONGEST_MAP = 5  # dims
# Keys of a tensor map's metadata; a truthy value under any other key asks for what is not known here.
_OF_MAP = {"swizzle", "elem_size", "elem_type", "block_size"}
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*


class UnknownKernel(Exception):
    """A compiled kernel, a driver or a package is not as expected; the message says what."""


@dataclass(frozen=True)
class TensorMap:
    """A parameter that is a tensor descriptor: a CUtensorMap, the sizes and the strides.

    Attributes:
        block: elements that a copy moves along each dim.
        swizzle: CUtensorMapSwizzle's number.
    """

    block: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Image:
    """A compiled kernel.

    Attributes:
        name: of the function in the machine code.
        cubin: the machine code.
        types: of its arguments, in order: a type's name, "constexpr" of one that became no parameter, a
            :class:`TensorMap`, or a tuple of these for an argument that is a tuple.
        threads: of a block.
        shared_bytes: of a block.
        overlapped: whether it may start before the kernel in front of it has ended (programmatic dependent launch).
    """

    name: str
    cubin: bytes
    types: tuple[Any, ...]
    threads: int
    shared_bytes: int
    overlapped: bool


def image_of(compiled: Any) -> Image:
    """Read a kernel that Triton compiled.

    Raises:
        UnknownKernel: it is for no NVIDIA GPU, wants scratch memory or a launch of another kind, or this Triton says
            of itself what is not known here.
    """
    try:
        metadata, cubin = compiled.metadata, compiled.asm.get("cubin")
        if not isinstance(cubin, bytes):
            raise UnknownKernel("it has no machine code for an NVIDIA GPU")
        wanted = {"num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False,
                  "instrumentation_mode": ""}
        other = {name: getattr(metadata, name) for name, usual in wanted.items() if getattr(metadata, name) != usual}
        if other:
            raise UnknownKernel(f"it wants {other}")
        maps = iter(metadata.tensordesc_meta or ())
        types = tuple([_type_of(kind, maps) for kind in compiled.src.signature.values()])
        if next(maps, None) is not None:
            raise UnknownKernel("it has more tensor maps than descriptors")
        return Image(metadata.name, cubin, types, 32 * metadata.num_warps, metadata.shared, bool(metadata.launch_pdl))
    except AttributeError as error:
        raise UnknownKernel(f"it lacks what Triton 3.6 to 3.9 have: {error}") from error


def _type_of(kind: Any, maps: Iterator[Any]) -> Any:
    if isinstance(kind, tuple):
        return tuple([_type_of(inner, maps) for inner in kind])
    if kind.startswith("tensordesc"):
        meta = next(maps, None)
        if not isinstance(meta, dict) or not meta.keys() >= _OF_MAP or any(
                value for key, value in meta.items() if key not in _OF_MAP):
            raise UnknownKernel(f"a tensor map is described by {meta}")
        return TensorMap(tuple(meta["block_size"]), meta["swizzle"])
    if kind != "constexpr" and kind[0] != "*" and kind not in _FORMATS:
        raise UnknownKernel(f"a parameter is of type {kind}")
    return kind


@dataclass(frozen=True)
class Function:
    """A loaded kernel: its handle, for every device and context, and where each of its parameters lies."""

    handle: int
    offsets: tuple[int, ...]
    size: int


@cache
def load(image: Image, device: int) -> Function:
    """Load a kernel, of which a device's launches may then take the shared memory that it wants.

    Raises:
        UnknownKernel: the code's parameters are not those of its types; or cuda-bindings is not there, or too old.
        RuntimeError: the driver refuses the code.
    """
    driver = bindings()
    enter(device)  # autograd's thread may have no context yet, without which the driver says nothing of parameters
    library = checked(driver.cuLibraryLoadData(image.cubin, [], [], 0, [], [], 0), image.name)
    kernel = checked(driver.cuLibraryGetKernel(library, image.name.encode()), image.name)
    sizes = [size for kind in image.types for size in _sizes(kind)]
    places: list[tuple[Any, ...]] = []
    while (found := driver.cuKernelGetParamInfo(kernel, len(places)))[0] != driver.CUresult.CUDA_ERROR_INVALID_VALUE:
        places.append(checked(found, image.name))  # behind the last parameter the value is invalid
    told = [int(size) for _, size in places]
    if told != [*sizes, *_SCRATCH]:
        checked(driver.cuLibraryUnload(library), image.name)
        raise UnknownKernel(f"its parameters take {told} bytes, and their types {sizes}")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuKernelSetAttribute(attribute, image.shared_bytes, kernel, device), image.name)
    offsets = tuple([int(offset) for offset, _ in places])
    return Function(int(kernel), offsets, offsets[-1] + told[-1])


def _sizes(kind: Any) -> Iterator[int]:
    """Yield the bytes of each parameter that an argument becomes."""
    if isinstance(kind, tuple):
        for inner in kind:
            yield from _sizes(inner)
    elif isinstance(kind, TensorMap):
        yield _MAP_BYTES
        yield from [4] * len(kind.block) + [8] * len(kind.block)
    elif kind != "constexpr":
        yield struct.calcsize(f"<{_format(kind)}")


def _format(kind: str) -> str:
    return "Q" if kind[0] == "*" else _FORMATS[kind]


class Field:
    """What stands in a launch's parameters, in order: constants, or what is made of one of its addresses."""

    def __init__(self, formats: str, index: int | None, make: Callable[[Any], tuple[Any, ...]]) -> None:
        self.formats, self.index, self.make = formats, index, make


def _constant(kind: str, value: Any) -> Field:
    return Field(_format(kind), None, lambda _: (value,))


def _pointer(index: int) -> Field:
    return Field("Q", index, lambda address: (address or 0,))


def _described(index: int, kind: TensorMap, descriptor: Any) -> Field:
    """A tensor whose sizes and strides are a descriptor's, wherever it lies."""
    rank, dtype = len(kind.block), descriptor.base.dtype
    sizes, strides = tuple(map(int, descriptor.shape)), tuple(map(int, descriptor.strides))
    fill_nan = descriptor.padding == "nan"
    if getattr(descriptor, "round_f32_to_tf32", False):
        raise UnknownKernel("a descriptor rounds to TF32")
    if not len(sizes) == len(strides) == rank <= _LONGEST_MAP or strides[-1] != 1:
        raise UnknownKernel(f"a descriptor of {sizes} with strides {strides} goes in blocks of {kind.block}")

    @lru_cache(KEPT)
    def make(address: int) -> tuple[Any, ...]:
        return encode(address, dtype, sizes, strides, kind, fill_nan), *sizes, *strides

    return Field(f"{_MAP_BYTES}s{'i' * rank}{'q' * rank}", index, make)


def encode(address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], kind: TensorMap,
           fill_nan: bool = False) -> bytes:
    """Encode a tensor map of 128 bytes, as Triton's launcher does; dims come from the outermost to the innermost.

    Args:
        address: of the tensor, a multiple of 16.
        dtype: of its elements.
        sizes, strides: in elements; the last stride is 1, the others are multiples of 16 bytes.
        kind: how it goes to shared memory.
        fill_nan: whether what lies outside is NaN, not 0.
    """
    driver = bindings()
    kinds = driver.CUtensorMapDataType
    of_dtype = {torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                torch.float32: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32}
    if dtype not in of_dtype:
        raise UnknownKernel(f"a descriptor's tensor is of {dtype}")
    in_bytes = [driver.cuuint64_t(stride * dtype.itemsize) for stride in strides[-2::-1]]
    fill = driver.CUtensorMapFloatOOBfill
    made = checked(driver.cuTensorMapEncodeTiled(
        of_dtype[dtype], len(sizes), address, [driver.cuuint64_t(size) for size in sizes[::-1]], in_bytes,
        [driver.cuuint32_t(size) for size in kind.block[::-1]], [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, driver.CUtensorMapSwizzle(kind.swizzle),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA if fill_nan
        else fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE), f"a tensor map of {sizes} with strides {strides}")
    return ctypes.string_at(made.getPtr(), _MAP_BYTES)


def fields_of(types: tuple[Any, ...], arguments: tuple[Any, ...], leading: int) -> list[Field]:
    """Say what each parameter is made of.

    Args:
        types: of the arguments, as an :class:`Image` has them.
        arguments: as Triton's front end takes them.
        leading: how many of them change from call to call; of a tuple among these, the tensors.
    """
    fields: list[Field] = []
    place = 0
    for i, (kind, argument) in enumerate(zip(types, arguments, strict=True)):
        if i >= leading:
            fields += _constants(kind, argument)
        elif isinstance(argument, tuple):
            nested, place = _nested(kind, argument, place)
            fields += nested
        else:
            if isinstance(kind, TensorMap):
                fields.append(_described(place, kind, argument))
            elif kind != "constexpr":
                fields.append(_pointer(place) if kind[0] == "*" else Field(_format(kind), place, lambda own: (own,)))
            place += 1
    return fields


def _constants(kind: Any, value: Any) -> list[Field]:
    if isinstance(kind, tuple):
        return [field for inner, own in zip(kind, value, strict=True) for field in _constants(inner, own)]
    if isinstance(kind, TensorMap) or kind[0] == "*":
        raise UnknownKernel("a tensor stands among the numbers")
    return [] if kind == "constexpr" else [_constant(kind, value)]


def _nested(kind: Any, value: tuple[Any, ...], place: int) -> tuple[list[Field], int]:
    """The fields of a tuple's parameters, and the place behind its last tensor."""
    if kind == "constexpr":
        return [], place + len(tensors_in(value))
    fields: list[Field] = []
    for inner, own in zip(kind, value, strict=True):
        if isinstance(own, tuple):
            more, place = _nested(inner, own, place)
            fields += more
        elif isinstance(own, torch.Tensor):
            if inner != "constexpr":
                fields.append(_pointer(place))
            place += 1
        elif inner != "constexpr":
            fields.append(_constant(inner, own))
    return fields, place


def tensors_in(value: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors in a tuple of tuples, in order."""
    found = []
    for own in value:
        if isinstance(own, tuple):
            found += tensors_in(own)
        elif isinstance(own, torch.Tensor):
            found.append(own)
    return found


def bind(image: Image, grid: tuple[int, ...], fields: list[Field], device: int) -> Callable[[Addresses], None]:
    """Return what enqueues a kernel on the current stream of a device, which is current, given the addresses.

    Threads may share it. It is right in a graph's capture: the driver copies the parameters before it returns. A grid
    without CTAs, which the driver refuses, enqueues nothing, as with Triton's launcher.

    Raises:
        UnknownKernel, RuntimeError: as :func:`load`.
    """
    if 0 in grid:
        return lambda addresses: None
    driver, function = bindings(), load(image, device)
    layout, position = "<", 0
    formats = [letter for field in fields for letter in _letters(field.formats)]
    for letter, offset in zip([*formats, "Q", "Q"], function.offsets, strict=True):
        layout += f"{offset - position}x{letter}"
        position = offset + struct.calcsize(f"<{letter}")
    pack, size = struct.Struct(layout).pack, ctypes.c_size_t(function.size)
    makers = [(field.index, field.make) for field in fields]

    @lru_cache(KEPT)
    def handed(addresses: Addresses) -> tuple[int, Any]:
        """Where the launch's parameters lie, and what keeps them there."""
        values: list[Any] = []
        for index, make in makers:
            values += make(None if index is None else addresses[index])
        buffer = ctypes.create_string_buffer(pack(*values, 0, 0), function.size)
        extra = (ctypes.c_void_p * 5)(_BUFFER_POINTER, ctypes.addressof(buffer), _BUFFER_SIZE, ctypes.addressof(size),
                                      _END)
        return ctypes.addressof(extra), (extra, buffer)

    enqueue, handle, stream_of, success = (driver.cuLaunchKernelEx, driver.CUfunction(function.handle), raw_stream(),
                                           driver.CUresult.CUDA_SUCCESS)
    configurations: dict[int, Any] = {}

    def configuration(stream: int) -> Any:
        if len(configurations) >= _STREAMS:
            configurations.clear()
        made = configurations[stream] = _configuration(image, grid, stream)
        return made

    def launch(addresses: Addresses) -> None:
        stream = stream_of(device)
        where = configurations.get(stream) or configuration(stream)
        parameters = handed(addresses)
        (outcome,) = enqueue(where, handle, 0, parameters[0])
        if outcome is not success:
            if outcome == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a thread that has not called the runtime yet
                enter(device)
                (outcome,) = enqueue(where, handle, 0, parameters[0])
            checked((outcome,), image.name)

    return launch


def _letters(formats: str) -> list[str]:
    """Split a field's format into one a parameter."""
    head, found, tail = formats.partition("s")
    return [f"{head}s", *tail] if found else [*formats]


def _configuration(image: Image, grid: tuple[int, ...], stream: int) -> Any:
    driver = bindings()
    made = driver.CUlaunchConfig()
    made.gridDimX, made.gridDimY, made.gridDimZ = (*grid, 1, 1)[:3]
    made.blockDimX, made.blockDimY, made.blockDimZ = image.threads, 1, 1
    made.sharedMemBytes, made.hStream, made.numAttrs = image.shared_bytes, stream, 0
    if image.overlapped:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        made.attrs, made.numAttrs = [attribute], 1
    return made


def enter(device: int) -> None:
    """Make torch's context of a device current in this thread, where none is: it is held as long as torch holds it."""
    driver = bindings()
    if not int(checked(driver.cuCtxGetCurrent(), "the current context")):
        context = checked(driver.cuDevicePrimaryCtxRetain(device), f"the context of device {device}")
        checked(driver.cuCtxSetCurrent(context), f"the context of device {device}")


def checked(result: tuple[Any, ...], what: str) -> Any:
    """Return what a call of the driver gave beside its status: one value, a tuple of more, or None.

    Raises:
        RuntimeError: the status is an error; the message names ``what`` and holds the driver's words.
    """
    driver = bindings()
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        told, words = driver.cuGetErrorString(error)
        text = words.decode() if told == driver.CUresult.CUDA_SUCCESS else "unknown"
        raise RuntimeError(f"{what}: the CUDA driver says {text} ({error})")
    return tuple(values) if len(values) > 1 else values[0] if values else None


@cache
def bindings() -> Any:
    """Return cuda.bindings.driver.

    Raises:
        UnknownKernel: it is not there, or lacks what is called here.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnknownKernel(f"the package cuda-bindings is not there: {error}") from error
    lacking = [name for name in ("cuLibraryLoadData", "cuKernelGetParamInfo", "cuTensorMapEncodeTiled",
                                 "cuLaunchKernelEx") if not hasattr(driver, name)]
    if lacking:
        raise UnknownKernel(f"the package cuda-bindings lacks {', '.join(lacking)}; 12.9 and later have them")
    return driver


@cache
def raw_stream() -> Callable[[int], int]:
    """Return what tells a device's current stream as a number; torch's documented way makes an object of it, 1 µs."""
    short: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return short or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))
