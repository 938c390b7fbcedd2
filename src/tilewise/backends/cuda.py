"""Launches the CUDA float32 kernels with products on tensor cores: three TF32 products for one of float32."""

from tilewise.backends.float32 import Float32Backend

backend = Float32Backend("cuda", tensor_cores=True)
