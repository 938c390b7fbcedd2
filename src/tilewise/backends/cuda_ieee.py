"""Launches the CUDA float32 kernels with products on FMA pipes."""

from tilewise.backends._support.float32 import Float32Backend


class CudaIeeeBackend(Float32Backend):
    """Each product and sum rounded once, as IEEE 754 has it, whatever torch's settings allow."""

    name = "cuda_ieee"
    tensor_cores = False


backend = CudaIeeeBackend()
