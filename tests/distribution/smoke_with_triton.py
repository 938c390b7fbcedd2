"""tilewise beside torch and Triton: the kernels of the wheel, in Triton's interpreter."""

import sys
from pathlib import Path

import torch
import triton

import tilewise as tw
from tilewise.kernels.triton import forward

assert Path(forward.__file__).is_relative_to(sys.prefix), forward.__file__
generator = torch.Generator().manual_seed(0)
inputs = [torch.randn(1, heads, 20, 16, generator=generator, requires_grad=True) for heads in (2, 1, 1)]
results = []
for backend in ("triton", "reference"):
    out = tw.attention(*inputs, mask=tw.causal(), backend=backend)
    results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
torch.testing.assert_close(*results)
print(triton.__version__)
