"""Launches the CUDA float32 kernels with products on FMA pipes, each product and sum rounded once."""

from tilewise.backends.float32 import Float32Backend

backend = Float32Backend("cuda_ieee", tensor_cores=False)
