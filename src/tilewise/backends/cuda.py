"""Launches the CUDA float32 kernels with products on tensor cores."""

from tilewise.backends.float32 import Float32Backend


class CudaBackend(Float32Backend):
    """Three TF32 products for one of float32, or one where torch may multiply in TF32."""

    name = "cuda"
    tensor_cores = True


backend = CudaBackend()
