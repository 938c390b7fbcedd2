"""Memory for results: what is asked for, whichever way torch has to it."""

from dataclasses import replace

import pytest
import torch

from tilewise.backends._support import memory
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem

CPU = torch.device("cpu")


@pytest.fixture(params=["short", "general"])
def allocate(request, monkeypatch):
    if request.param == "general":
        monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    memory.allocator.cache_clear()
    yield memory.allocator(CPU)
    memory.allocator.cache_clear()


def test_the_short_way_is_taken_where_torch_has_it():
    assert memory.allocator(CPU) is torch._C._dynamo.guards._empty_strided_cpu


@pytest.mark.parametrize(("sizes", "strides", "dtype"), [
    ((2, 3, 5, 8), (120, 8, 24, 1), torch.bfloat16), ((2, 3, 5), (15, 5, 1), torch.float32),
    ((0, 3, 5), (15, 5, 1), torch.float16)])
def test_a_tensor_has_the_form_that_was_asked_for(allocate, sizes, strides, dtype):
    made = allocate(sizes, strides, dtype)
    assert (tuple(made.shape), made.stride(), made.dtype, made.device) == (sizes, strides, dtype, CPU)
    assert made.untyped_storage().nbytes() == (made.numel() and 1 + sum(
        (size - 1) * stride for size, stride in zip(sizes, strides, strict=True))) * dtype.itemsize
    made.fill_(1.0)
    assert made.sum() == made.numel()


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_tensor_belongs_to_the_scope_that_it_is_made_in(allocate, scope):
    with scope():
        made, usual = allocate((2, 3), (3, 1), torch.float32), torch.empty(2, 3)
    assert (made.is_inference(), made.requires_grad) == (usual.is_inference(), usual.requires_grad)


def test_the_forms_of_results_and_gradients_are_those_of_the_problem():
    q, k, v = torch.empty(2, 5, 4, 8).transpose(1, 2), torch.empty(2, 2, 7, 8), torch.empty(2, 2, 7, 6)
    problem = AttentionProblem.from_tensors(q, k, v, mask=Mask())
    out, rows = memory.forms_of_results(problem)
    assert out == ((2, 4, 5, 6), problem.out_strides, torch.float32)
    assert rows == ((2, 4, 5), (20, 5, 1), torch.float32)
    strides = q.stride(), k.stride(), v.stride()
    assert memory.forms_of_gradients(problem, strides) == tuple(
        (tuple(tensor.shape), tensor.stride(), torch.float32) for tensor in (q, k, v))
    narrow = replace(problem, dtype=torch.float16)
    for wanted, dtype in ((False, torch.float16), (True, torch.float32)):
        asked = replace(narrow, float32_results=wanted)
        forms = memory.forms_of_results(asked)[0], *memory.forms_of_gradients(asked, strides)
        assert {form[2] for form in forms} == {dtype}
