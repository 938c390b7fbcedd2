"""Launches the CUDA float32 kernels with products on tensor cores."""

from tilewise.backends._support.float32 import Float32Backend


class CudaBackend(Float32Backend):
    """Three products of scaled halves for one of float32, or one of TF32 where torch may multiply so."""

    name = "cuda"
    tensor_cores = True


backend = CudaBackend()
