"""The checks of graphs and streams find what is wrong with either; they need a GPU."""

import pytest
import torch

from tilewise.testing.torture import CHECKS, torture
from unit import broken_attention as broken

pytestmark = pytest.mark.gpu
BY_NAME = {check.name: check for check in CHECKS}


def result_of(attention, name):
    (result,) = torture(broken.implementation(attention), "cuda", torch.bfloat16, checks=[BY_NAME[name]])
    return result


def on_the_default_stream(q, k, v, **options):
    """Launch where the caller is not, and do not wait for the caller's stream."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        return broken.dense(q.detach().clone() + 0.0 * q, k, v, **options)


def keeps_its_first_inputs(kept):
    def attention(q, k, v, **options):
        """Compute of the tensors that it was first called with, as a graph over a copied pointer does."""
        first = kept.setdefault(q.shape, q.detach().clone())
        return broken.dense(first + 0.0 * q, k, v, **options)

    return attention


def waits_for_the_host(q, k, v, **options):
    q.sum().item()
    return broken.dense(q, k, v, **options)


def with_shared_scratch(scratch):
    def attention(q, k, v, **options):
        """Keep the output in a buffer that all calls of a shape share, and read it a while later."""
        out = broken.dense(q, k, v, **options)
        held = scratch.setdefault(out.shape, torch.empty_like(out))
        held.copy_(out.detach())
        torch.cuda._sleep(50_000_000)  # 25 ms, longer than a busy host takes from stream to stream
        return out + (held.clone() - out).detach()  # the gradients are right

    return attention


@pytest.mark.parametrize("name", ["side_stream", "handed_over", "streams_at_once", "graph_of_forward",
                                  "graph_of_few_queries", "graph_of_training"])
def test_a_right_function_passes(name):
    result = result_of(broken.dense, name)
    assert (result.status, result.sentence) == ("pass", "")


@pytest.mark.parametrize("name", ["side_stream", "handed_over", "streams_at_once"])
def test_what_is_launched_on_the_default_stream_reads_nan(name):
    result = result_of(on_the_default_stream, name)
    assert result.status == "fail"
    assert "nan" in result.sentence


@pytest.mark.parametrize("name", ["graph_of_forward", "graph_of_training"])
def test_a_graph_of_copied_inputs_is_found(name):
    result = result_of(keeps_its_first_inputs({}), name)
    assert result.status == "fail"
    assert "out: error" in result.sentence


def test_a_call_that_waits_for_the_host_is_not_captured():
    result = result_of(waits_for_the_host, "graph_of_forward")
    assert result.status == "fail"
    assert result.sentence.startswith("raised ")
    assert not result.lost


def test_scratch_that_streams_share_is_found():
    assert "out: " in result_of(with_shared_scratch({}), "streams_at_once").sentence


def test_no_memory_is_left_allocated():
    before = torch.cuda.memory_allocated()
    for name in ("ordinary", "graph_of_training", "streams_at_once", "rows_past_2_31"):
        result_of(broken.dense, name)
        torch._C._cuda_clearCublasWorkspaces()  # of which each stream has one, of 32 MiB on Hopper GPUs
        assert torch.cuda.memory_allocated() - before <= 32 * 2**20, name
