"""What PyTorch wraps around a call: torch.compile, CUDA graphs, streams that must not stall."""

import contextlib
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from conformance.calls import (
    TRAINABLE,
    assert_forward_within_budget,
    assert_gradients_within_budget,
    forward_and_backward,
    operands_of,
    problem_of,
    skip_if_refused,
    trainable,
)
from tilewise import attention
from tilewise.testing.cases import Case, case_named
from tilewise.testing.inputs import call_options, make_inputs, make_operands
from tilewise.testing.oracle import Results

EVERY_OPTION = {"bias": "1hqk", "mask_tensor": "b1qk", "alibi": "h", "sinks": True, "softcap": 4.0, "dropout_p": 0.2}


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
@pytest.mark.parametrize("options", [{}, EVERY_OPTION], ids=["plain", "every_option"])
def test_compiles_whole_and_once_for_all_lengths(backend, options, device, main_dtype):
    compiler = CompileCounterWithBackend("aot_eager")
    mask = case_named("causal_bottom_right_more_keys").mask

    @torch.compile(fullgraph=True, dynamic=True, backend=compiler)
    def step(q, k, v, **rest):
        return attention(q * 1.0, k, v, return_aux=("lse",), backend=backend.name, **rest)

    counts = []
    for length in (34, 51, 66):
        case = Case("compiled", b=2, hq=4, hk=2, sq=length, sk=length + 5, d=32, dv=32, mask=mask, **options)
        inputs = make_inputs(case, main_dtype, device)
        operands = operands_of(case, inputs)
        skip_if_refused(backend, problem_of(case, inputs, operands).backward(lse_grad=True))
        leaves, given = [tensor.requires_grad_() for tensor in inputs[:3]], trainable(operands)
        out, lse = step(*leaves, **call_options(case, operands._replace(**given)))
        got = torch.autograd.grad((out, lse), [*leaves, *given.values()], (inputs.dout, inputs.dlse))
        assert_forward_within_budget(case, inputs, (out, lse))
        assert_gradients_within_budget(case, inputs, got, "out_and_lse")
        counts.append(compiler.frame_count)
    # The first may count twice: dynamo starts over where a number, here dropout_p, turns out to be a constant.
    assert counts == [counts[0]] * 3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "shbd", "hbsd", "hsbd"])
def test_compiled_results_have_the_memory_order_of_their_tensors(backend, layout, dynamic, device, main_dtype):
    """What a compiler is told of a result's strides, by which it places what follows, is what comes."""
    case = Case("compiled", b=2, hq=4, hk=2, sq=19, sk=35, d=16, dv=16, layout=layout)
    inputs = make_inputs(case, main_dtype, device)
    skip_if_refused(backend, problem_of(case, inputs).backward(lse_grad=False))
    leaves = [tensor.requires_grad_() for tensor in inputs[:3]]

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def step(q, k, v):
        out = attention(q, k, v, backend=backend.name)
        return out, out.stride()

    out, told = step(*leaves)
    results = (out, *torch.autograd.grad(out, leaves, inputs.dout))
    for result in results:
        assert result.permute(["bhsd".index(dim) for dim in layout]).is_contiguous()
    assert tuple(told) == out.stride() == attention(*leaves, backend=backend.name).stride()
    assert_gradients_within_budget(case, inputs, results[1:])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("options", [{}, {"bias": "1hqk"}, {"sinks": True}], ids=["plain", "bias", "sinks"])
def test_compiled_without_lse_it_needs_no_gradient_through_lse(backend, options, device, main_dtype):
    """A backend that has none would refuse the backward pass of a compiler that makes one of zeros."""
    case = Case("compiled", b=2, hq=4, hk=2, sq=40, sk=40, d=32, dv=32, **options)
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    skip_if_refused(backend, problem_of(case, inputs, operands).backward(lse_grad=False))
    leaves, given = [tensor.requires_grad_() for tensor in inputs[:3]], trainable(operands)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, **rest):
        return attention(q, k, v, backend=backend.name, **rest) * 1.0

    out = step(*leaves, **call_options(case, operands._replace(**given)))
    got = torch.autograd.grad(out, [*leaves, *given.values()], inputs.dout)
    of_operands = dict(zip(given, got[3:], strict=True))
    assert_gradients_within_budget(case, inputs, (*got[:3], *map(of_operands.get, TRAINABLE)))


def _skip_if_lengths_are_read(backend, case):
    if case.has_lengths and backend.name == "reference":
        pytest.skip("backend 'reference' reads lengths that are data on the host")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gqa_causal_odd_lengths", "everything", "padded_everything", "packed_everything"])
def test_captured_in_a_cuda_graph_it_replays_on_new_values(backend, name, device, main_dtype):
    case = case_named(name)
    _skip_if_lengths_are_read(backend, case)
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands)
    skip_if_refused(backend, problem.backward(lse_grad=True))
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # kernels are compiled and loaded before the capture
        for _ in range(3):
            forward_and_backward(backend, case, inputs, "out_and_lse", operands)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = forward_and_backward(backend, case, inputs, "out_and_lse", operands)
    fresh, fresh_operands = (make(case, main_dtype, device, seed=1) for make in (make_inputs, make_operands))
    for static, values in zip((*inputs, *operands.alone), (*fresh, *fresh_operands.alone), strict=True):
        if values is not None:
            static.copy_(values)
    graph.replay()
    assert isinstance(results, Results)
    assert_forward_within_budget(case, fresh, results[:2], fresh_operands)
    assert_gradients_within_budget(case, fresh, results.gradients, "out_and_lse", fresh_operands)


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
@pytest.mark.parametrize("name", ["gqa_causal_odd_lengths", "causal_bottom_right_more_queries", "packed_qkv_gqa",
                                  "everything", "padded_everything", "packed_everything"])
def test_host_never_waits_for_the_device(backend, name, device, main_dtype):
    case = case_named(name)
    _skip_if_lengths_are_read(backend, case)
    inputs = make_inputs(case, main_dtype, device)
    operands = operands_of(case, inputs)
    forward_and_backward(backend, case, inputs, "out_and_lse", operands)  # compiling and loading a kernel may wait
    with raising_where_the_host_waits():
        results = forward_and_backward(backend, case, inputs, "out_and_lse", operands)
    assert_gradients_within_budget(case, inputs, results.gradients, "out_and_lse")


@pytest.mark.gpu
def test_a_thread_that_has_not_used_the_device_may_call(backend, device, main_dtype):
    """Such is autograd's thread in a backward pass that comes first: it has no context until something makes one."""
    case = case_named("gqa_causal_odd_lengths")
    inputs = make_inputs(case, main_dtype, device)
    skip_if_refused(backend, problem_of(case, inputs))
    forward_and_backward(backend, case, inputs, "out")  # memory and kernels are there: nothing else makes a context
    with ThreadPoolExecutor(1) as thread:
        results = thread.submit(forward_and_backward, backend, case, inputs, "out").result()
    assert_gradients_within_budget(case, inputs, results.gradients)
