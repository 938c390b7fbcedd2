"""With two GPUs a call computes where its tensors are, and what was made for one device serves no other."""

import pytest
import torch

from conformance.calls import forward_and_backward
from tilewise import attention_decode
from tilewise.testing.cases import case_named
from tilewise.testing.inputs import make_inputs
from tilewise.testing.oracle import Results

NAMES = ["gqa_causal_odd_lengths", "everything", "padded_everything", "packed_everything"]


@pytest.fixture
def turns(device):
    """Devices whose turn it is, the second first: in the first test nothing was kept when it comes."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, torch sees {torch.cuda.device_count()}")
    return [torch.device("cuda", index) for index in (1, 0, 1, 0)]


@pytest.mark.gpu
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_tensors_decide_where_a_call_computes(backend, name, current, turns, main_dtype):
    case = case_named(name)
    found = []
    for place in turns:
        inputs = make_inputs(case, main_dtype, place)
        with torch.cuda.device(current):
            results = forward_and_backward(backend, case, inputs, "out", deterministic=True)
        assert {tensor.device for tensor in results if tensor is not None} == {place}
        found.append([None if tensor is None else tensor.cpu() for tensor in results])
    for others in found[1:]:
        differing = [field for field, one, other in zip(Results._fields, found[0], others, strict=True)
                     if not (one is other is None or torch.equal(one, other))]
        assert not differing


@pytest.mark.gpu
@pytest.mark.parametrize("current", [0, 1])
def test_decoding_where_the_cache_is(current, turns):
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 64, generator=numbers).half() for heads, length in
               ((8, 1), (2, 3000), (2, 3000)))
    with torch.cuda.device(current):
        found = [attention_decode(q.to(place), k.to(place), v.to(place)) for place in turns]
    assert [tensor.device for tensor in found] == turns
    assert all(torch.equal(found[0].cpu(), other.cpu()) for other in found[1:])
