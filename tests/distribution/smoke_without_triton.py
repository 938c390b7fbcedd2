"""tilewise beside torch and nothing else: what a user has after ``pip install tilewise`` on a CPU."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch

import tilewise as tw
from tilewise.integrations import transformers
from tilewise.kernels.cuda.source import source_files
from tilewise.tuning.table import load_rows, table_file

assert Path(tw.__file__).is_relative_to(sys.prefix), tw.__file__
assert tw.__version__ == importlib.metadata.version("tilewise")
for name in ("triton", "typer", "rich", "matplotlib", "numpy", "transformers"):
    assert importlib.util.find_spec(name) is None, name

generator = torch.Generator().manual_seed(0)
inputs = [torch.randn(1, heads, 70, 16, generator=generator, dtype=torch.float64, requires_grad=True)
          for heads in (4, 2, 2)]
for backend in (None, "reference"):
    out = tw.attention(*inputs, mask=tw.causal(), backend=backend)
    wanted = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, wanted)
    dout = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(wanted, inputs, dout))


def refusal(call):
    """Return the sentence of the error that a call raises."""
    try:
        call()
    except tw.TilewiseError as error:
        return str(error)
    raise AssertionError("the call raised nothing")


sentence = refusal(lambda: tw.attention(*inputs, backend="triton"))
assert "Triton is not installed" in sentence, sentence
assert "tilewise[triton]" in sentence, sentence
sentence = refusal(transformers.register)
assert "tilewise[transformers]" in sentence, sentence

assert load_rows("nvidia-h200", table_file("hopper_forward", 2), "hopper_forward")
assert {"attention_fp32.cu", "forward.cuh"} <= set(source_files())
