"""What PyTorch wraps around a call: torch.compile, CUDA graphs, streams that must not stall."""

import contextlib
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from conformance.calls import (
    assert_forward_within_budget,
    assert_gradients_within_budget,
    forward_and_backward,
    problem_of,
    skip_if_refused,
)
from tilewise import attention
from tilewise.testing.cases import Case, case_named
from tilewise.testing.inputs import make_inputs
from tilewise.testing.oracle import Results


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Dynamo itself instantiates autograd Functions while it traces them.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# torch 2.11's compiler scripts a function of its own with a decorator that it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_whole_and_once_for_all_lengths(backend, device, main_dtype):
    compiler = CompileCounterWithBackend("aot_eager")
    mask = case_named("causal_bottom_right_more_keys").mask

    @torch.compile(fullgraph=True, dynamic=True, backend=compiler)
    def step(q, k, v):
        return attention(q * 1.0, k, v, mask=mask, return_aux=("lse",), backend=backend.name)

    for length in (34, 51, 66):
        case = Case("compiled", b=2, hq=4, hk=2, sq=length, sk=length + 5, d=32, dv=32, mask=mask)
        inputs = make_inputs(case, main_dtype, device)
        skip_if_refused(backend, problem_of(case, inputs).backward(lse_grad=True))
        leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
        out, lse = step(*leaves)
        got = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
        assert_forward_within_budget(case, inputs, (out, lse))
        assert_gradients_within_budget(case, inputs, got, "out_and_lse")
    assert compiler.frame_count == 1


@pytest.mark.gpu
def test_captured_in_a_cuda_graph_it_replays_on_new_values(backend, device):
    case = case_named("gqa_causal_odd_lengths")
    inputs = make_inputs(case, torch.bfloat16, device)
    problem = problem_of(case, inputs)
    skip_if_refused(backend, problem.backward(lse_grad=True))
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # kernels are compiled and loaded before the capture
        for _ in range(3):
            forward_and_backward(backend, case, inputs, "out_and_lse")
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = forward_and_backward(backend, case, inputs, "out_and_lse")
    fresh = make_inputs(case, torch.bfloat16, device, seed=1)
    for static, values in zip(inputs, fresh, strict=True):
        static.copy_(values)
    graph.replay()
    assert isinstance(results, Results)
    assert_forward_within_budget(case, fresh, results[:2])
    assert_gradients_within_budget(case, fresh, results[2:], "out_and_lse")


@contextlib.contextmanager
def raising_where_the_host_waits():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_wait_would_be_seen(device):
    with raising_where_the_host_waits(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones((), device=device).item()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gqa_causal_odd_lengths", "causal_bottom_right_more_queries", "packed_qkv_gqa"])
def test_host_never_waits_for_the_device(backend, name, device):
    case = case_named(name)
    inputs = make_inputs(case, torch.bfloat16, device)
    forward_and_backward(backend, case, inputs, "out_and_lse")  # compiling and loading a kernel may wait
    with raising_where_the_host_waits():
        results = forward_and_backward(backend, case, inputs, "out_and_lse")
    assert_gradients_within_budget(case, inputs, results[2:], "out_and_lse")
