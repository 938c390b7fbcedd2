"""The operator of decoding: what a compiled graph sees of it."""

import pytest
import torch

from tilewise import attention_decode, causal
from tilewise.problem.decode import CacheOperands

CALL = {"mask": causal(), "cache_seqlens": torch.tensor([3, 5]), "return_aux": ("lse",)}


def tensors():
    """q, two caches, and new keys and values."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 1, 8), (2, 2, 10, 8), (2, 2, 10, 8), (2, 2, 1, 8), (2, 2, 1, 8)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def decode(q, k_cache, v_cache, k, v, **more):
    return attention_decode(q, k_cache, v_cache, k=k, v=v, **CALL, **more)


# Schemas and fakes as torch's own checks have them; what they find is an error of theirs.
@pytest.mark.parametrize("check", ["test_schema", "test_faketensor"])
def test_the_operator_is_what_its_schema_says(check):
    q, k_cache, v_cache, k, v = tensors()
    operands = CacheOperands(k=k, v=v, cache_seqlens=torch.tensor([3, 5]))
    torch.library.opcheck(torch.ops.tilewise.attention_decode.default, (
        q, k_cache, v_cache, *operands, None, 0, None, None, None, True, None, False, None), test_utils=check)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_call_compiles_into_one_graph_that_writes_the_caches(dynamic):
    torch._dynamo.reset()
    wanted_tensors, found_tensors = tensors(), tensors()
    wanted = decode(*wanted_tensors)
    found = torch.compile(decode, backend="aot_eager", fullgraph=True, dynamic=dynamic)(*found_tensors)
    for one, other in zip((*found, *found_tensors), (*wanted, *wanted_tensors), strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(found_tensors[1], tensors()[1])
