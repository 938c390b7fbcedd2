"""A CUDA driver that loads nothing and keeps what it is handed; its enumerations and structures are cuda-bindings' own.

A kernel's machine code is, here, the sizes of its parameters as JSON.
"""

import ctypes
import json
from types import SimpleNamespace

from cuda.bindings import driver as real

_ALIGNMENTS = {128: 64, 8: 8, 4: 4, 2: 2, 1: 1}


def cubin_of(sizes):
    """The machine code of a kernel whose parameters, scratch pointers included, take so many bytes each."""
    return json.dumps([*sizes, 8, 8]).encode()


def offsets_of(sizes):
    """Where parameters of these sizes lie, each at a multiple of its alignment."""
    offsets, end = [], 0
    for size in sizes:
        begin = -(-end // _ALIGNMENTS[size]) * _ALIGNMENTS[size]
        offsets.append(begin)
        end = begin + size
    return offsets


class DriverDouble:
    """Stands for cuda.bindings.driver.

    Attributes:
        launches: of each launch, its kernel, grid, block, shared bytes, stream, attributes, and parameters as bytes.
        encoded: the arguments of each tensor map.
        loaded, attributes: what was loaded, and set of a kernel.
        context: the one that is current; without one a launch on stream 0 fails, and what a kernel's parameters are.
    """

    def __init__(self):
        self.launches, self.encoded, self.loaded, self.attributes = [], [], [], []
        self.context, self.entered, self.status = 1, [], real.CUresult.CUDA_SUCCESS
        self._maps, self._kernels = [], {}

    def __getattr__(self, name):
        return getattr(real, name)  # an enumeration, a structure; no function but those below is called

    def cuLibraryLoadData(self, code, *_):
        self.loaded.append(code)
        return real.CUresult.CUDA_SUCCESS, len(self.loaded)

    def cuLibraryUnload(self, library):
        self.loaded[library - 1] = None
        return (real.CUresult.CUDA_SUCCESS,)

    def cuLibraryGetKernel(self, library, name):
        handle = 1000 + library
        sizes = json.loads(self.loaded[library - 1])
        self._kernels[handle] = name.decode(), sizes, offsets_of(sizes)
        return real.CUresult.CUDA_SUCCESS, handle

    def cuKernelGetParamInfo(self, kernel, index):
        _, sizes, offsets = self._kernels[kernel]
        if not self.context:
            return real.CUresult.CUDA_ERROR_INVALID_CONTEXT, 0, 0
        if index >= len(sizes):
            return real.CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0
        return real.CUresult.CUDA_SUCCESS, offsets[index], sizes[index]

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        self.attributes.append((attribute, value, kernel, device))
        return (real.CUresult.CUDA_SUCCESS,)

    def cuTensorMapEncodeTiled(self, dtype, rank, address, sizes, strides, block, steps, interleave, swizzle, promotion,
                               fill):
        self.encoded.append((dtype, rank, address, [int(size) for size in sizes], [int(stride) for stride in strides],
                             [int(size) for size in block], [int(step) for step in steps], interleave, swizzle,
                             promotion, fill))
        self._maps.append(ctypes.create_string_buffer(f"map {len(self.encoded) - 1}".encode(), 128))
        where = ctypes.addressof(self._maps[-1])
        return real.CUresult.CUDA_SUCCESS, SimpleNamespace(getPtr=lambda: where)

    def map_in(self, parameters, offset):
        """The arguments of the tensor map that lies at an offset of a launch's parameters."""
        word, number = parameters[offset:offset + 128].rstrip(b"\0").split()
        assert word == b"map"
        return self.encoded[int(number)]

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        assert parameters == 0
        stream = int(config.hStream)
        if not self.context and not stream:
            return (real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if self.status != real.CUresult.CUDA_SUCCESS:
            return (self.status,)
        if 0 in (config.gridDimX, config.gridDimY, config.gridDimZ):
            return (real.CUresult.CUDA_ERROR_INVALID_VALUE,)
        words = (ctypes.c_void_p * 5).from_address(extra)
        assert (words[0], words[2], words[4]) == (1, 2, None)  # a buffer's address, a size's address, the end
        size = ctypes.c_size_t.from_address(words[3]).value
        name, sizes, offsets = self._kernels[int(function)]
        assert size == offsets[-1] + sizes[-1]
        self.launches.append(SimpleNamespace(
            name=name, grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
            block=(config.blockDimX, config.blockDimY, config.blockDimZ), shared=config.sharedMemBytes, stream=stream,
            attributes=[attribute.id for attribute in config.attrs] if config.numAttrs else [], offsets=offsets,
            parameters=ctypes.string_at(words[1], size)))
        return (real.CUresult.CUDA_SUCCESS,)

    def cuCtxGetCurrent(self):
        return real.CUresult.CUDA_SUCCESS, self.context

    def cuDevicePrimaryCtxRetain(self, device):
        return real.CUresult.CUDA_SUCCESS, 100 + device

    def cuCtxSetCurrent(self, context):
        self.context = context
        self.entered.append(context)
        return (real.CUresult.CUDA_SUCCESS,)

    def cuGetErrorString(self, error):
        return real.CUresult.CUDA_SUCCESS, b"words of the driver"
