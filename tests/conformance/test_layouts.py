"""Strides that training code really produces: views of packed projections, gradients of sums, far-apart rows."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.calls import (
    assert_forward_within_budget,
    assert_gradients_within_budget,
    forward,
    forward_and_backward,
    operands_of,
    problem_of,
    skip_if_refused,
)
from tilewise.backends.base import Saved
from tilewise.testing.cases import Case, case_named
from tilewise.testing.inputs import Inputs, lay_out, make_inputs
from tilewise.testing.oracle import gradients, yardsticks
from tilewise.testing.tolerance import GRADIENT_FACTOR, assert_within_budget

ORDERS = ["bhsd", "bshd", "sbhd", "shbd", "hbsd", "hsbd"]
FAR = 2**30 + 256  # two steps of this many elements pass 2^31


def _assert_lies_as(layout, *tensors):
    for tensor in tensors:
        assert tensor.permute(["bhsd".index(dim) for dim in layout]).is_contiguous(), (layout, tensor.stride())


@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "sinks": True}], ids=["plain", "options"])
def test_results_have_the_memory_order_of_their_tensors(backend, options, layout, device, main_dtype):
    """As torch's operators give it: out has the query's, whatever those of keys and values, which dk and dv have."""
    case = Case("order", b=2, hq=4, hk=2, sq=19, sk=35, d=16, dv=16, layout=layout, **options)
    inputs = make_inputs(case, main_dtype, device)
    results = forward_and_backward(backend, case, inputs)
    _assert_lies_as(layout, results.out, *results.gradients[:3])
    mixed = inputs._replace(k=lay_out(inputs.k, "hbsd"), v=lay_out(inputs.v, "sbhd"))
    results = forward_and_backward(backend, case, mixed)
    _assert_lies_as(layout, results.out, results.dq)
    _assert_lies_as("hbsd", results.dk)
    _assert_lies_as("sbhd", results.dv)
    assert_forward_within_budget(case, inputs, results[:2])
    assert_gradients_within_budget(case, inputs, results.gradients)


@pytest.mark.parametrize("layout", ORDERS)
def test_slices_and_expanded_queries_have_a_dense_result_in_their_order(backend, layout, device, main_dtype):
    case = Case("order", b=3, hq=4, hk=2, sq=19, sk=35, d=16, dv=16)
    inputs = make_inputs(case, main_dtype, device)
    sliced = lay_out(torch.cat([inputs.q, inputs.q], -1), layout)[..., :16]
    expanded = lay_out(inputs.q, layout)[:1].expand_as(inputs.q)
    for q in (sliced, expanded):
        result = forward(backend, case, (q, *inputs[1:3]))
        assert result.out.stride() == torch.empty_like(q).stride(), "torch's own rule"
        assert_forward_within_budget(case, inputs._replace(q=q), result)


@pytest.mark.parametrize("layout", ["bshd", "bhds", "moat"])
def test_dout_may_lie_differently_from_out(backend, layout, device, main_dtype):
    case = case_named("gqa")
    inputs = make_inputs(case, main_dtype, device)
    inputs = inputs._replace(dout=lay_out(inputs.dout, layout), dlse=lay_out(inputs.dlse, "moat"))
    results = forward_and_backward(backend, case, inputs, "out_and_lse")
    assert_gradients_within_budget(case, inputs, results.gradients, "out_and_lse")


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
def test_dout_may_have_stride_zero(backend, dims, device, main_dtype):
    case = Case("stride_zero", b=2, hq=4, hk=2, sq=35, sk=70, d=32, dv=32)
    inputs = make_inputs(case, main_dtype, device)
    one = inputs.dout[tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(4))]
    inputs = inputs._replace(dout=one.expand(inputs.dout.shape))
    assert all(inputs.dout.stride(dim) == 0 for dim in dims)
    results = forward_and_backward(backend, case, inputs)
    assert_gradients_within_budget(case, inputs, results.gradients)


def test_sum_can_be_backpropagated(backend, device, main_dtype):
    """The gradient of a sum is one element expanded over every dim."""
    case = case_named("gqa_causal_odd_lengths")
    inputs = make_inputs(case, main_dtype, device)
    skip_if_refused(backend, problem_of(case, inputs).backward(lse_grad=False))
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    forward(backend, case, leaves).out.sum().backward()
    inputs = inputs._replace(dout=torch.ones_like(inputs.dout))
    assert_gradients_within_budget(case, inputs, [leaf.grad for leaf in leaves])


@pytest.mark.parametrize("name", ["packed_qkv_causal", "packed_qkv_gqa"])
def test_gradient_of_a_packed_projection_arrives_in_its_three_slices(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    skip_if_refused(backend, problem_of(case, inputs).backward(lse_grad=False))
    packed = torch.cat([tensor.transpose(1, 2) for tensor in inputs[:3]], dim=2).requires_grad_()
    heads = [case.hq, case.hk, case.hk]
    forward(backend, case, [part.transpose(1, 2) for part in packed.split(heads, dim=2)]).out.backward(inputs.dout)
    got = [part.transpose(1, 2) for part in packed.grad.split(heads, dim=2)]
    assert_gradients_within_budget(case, inputs, got)


def test_expanded_input_receives_the_sum_of_its_copies_gradients(backend, device, main_dtype):
    case = case_named("expanded_heads_and_batch")
    inputs = make_inputs(case, main_dtype, device)
    skip_if_refused(backend, problem_of(case, inputs).backward(lse_grad=False))
    one_head = inputs.k[:, :1].detach().requires_grad_()
    forward(backend, case, [inputs.q, one_head.expand_as(inputs.k), inputs.v]).out.backward(inputs.dout)
    exact = gradients(*inputs[:4], None, case.mask, case.scale)[1].sum(1, keepdim=True)
    samples = [sample.dk.sum(1, keepdim=True)
               for sample in yardsticks(*inputs[:4], None, case.mask, case.scale)]
    assert_within_budget("dk of one head", one_head.grad, exact, samples, GRADIENT_FACTOR)


@pytest.fixture
def far_storage(tmp_path, device):
    """2 · FAR + 2048 half-precision elements (4 GiB) of which next to nothing is ever touched."""
    size = 2 * FAR + 2048
    if device.type == "cpu":
        # A sparse file: the pages that are not written take neither memory nor disk.
        yield torch.from_file(str(tmp_path / "storage"), shared=True, size=size, dtype=torch.float16)
        (tmp_path / "storage").unlink()
    else:
        yield torch.zeros(size, dtype=torch.float16, device=device)


@pytest.mark.parametrize("dim", range(4), ids=["batch", "heads", "positions", "head_dim"])
def test_offsets_past_two_to_the_31_elements(backend, dim, far_storage, device):
    sizes = {"b": 3, "hq": 1, "hk": 1, "sq": 3, "sk": 3, "d": 3, "dv": 3}
    if dim == 1:
        sizes |= {"b": 1, "hq": 3, "hk": 3}
    case = Case("far", **sizes)
    near = make_inputs(case, torch.float16, device)
    strides = [81, 27, 9, 3]
    strides[dim] = FAR
    far = Inputs(*(far_storage.as_strided(tensor.shape, strides, 256 * lane).copy_(tensor)
                   for lane, tensor in enumerate(near[:4])), near.dlse)
    results = forward_and_backward(backend, case, far)
    assert_forward_within_budget(case, near, results[:2])
    assert_gradients_within_budget(case, near, results.gradients)


@pytest.mark.parametrize("dim", range(4), ids=["batch", "heads", "queries", "keys"])
def test_offsets_of_a_bias_past_two_to_the_31_elements(backend, dim, far_storage, device):
    case = Case("far_bias", b=3, hq=3, hk=3, sq=3, sk=3, d=16, dv=16, bias="bhqk", mask_tensor="bhqk")
    inputs = make_inputs(case, torch.float16, device)
    near = operands_of(case, inputs)
    strides = [27, 9, 3, 1]
    strides[dim] = FAR
    bias = far_storage.as_strided(near.bias.shape, strides).copy_(near.bias)
    mask = far_storage.view(torch.bool).as_strided(near.mask.shape, strides, 1024).copy_(near.mask)
    results = forward_and_backward(backend, case, inputs, "out", near._replace(bias=bias, mask=mask))
    assert_forward_within_budget(case, inputs, results[:2], near)
    assert_gradients_within_budget(case, inputs, results.gradients, "out", near)


class _Copies(TorchDispatchMode):
    """Collects the operators that make or fill a tensor as large as one of the inputs."""

    def __init__(self, least):
        super().__init__()
        self.least = least
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        copies = func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy,
                                         torch.ops.aten.cat, torch.ops.aten.index_select)
        if copies and result.numel() >= self.least:
            self.seen.append(str(func))
        return result


@pytest.mark.gpu  # interpreted, every argument is copied to the interpreter and back
@pytest.mark.parametrize("backend", ["triton"], indirect=True)  # the others make copies, or promise nothing
@pytest.mark.parametrize("name", ["packed_qkv_causal", "packed_qkv_gqa", "packed_kv", "storage_bhds"])
def test_strided_inputs_are_not_copied(backend, name, device, main_dtype):
    case = case_named(name)
    inputs = make_inputs(case, main_dtype, device)
    problem = problem_of(case, inputs)
    skip_if_refused(backend, problem)
    with _Copies(min(tensor.numel() for tensor in inputs[:4])) as copies:
        out, lse, _ = backend.forward(problem, *inputs[:3])
        backend.backward(problem.backward(lse_grad=False), Saved(*inputs[:3], out, lse), inputs.dout, None)
    assert copies.seen == []


def test_a_copy_would_be_seen(device):
    tensor = torch.zeros(4, 4, device=device)
    with _Copies(16) as copies:
        tensor.mT.contiguous()
    assert copies.seen == ["aten.clone.default"]
