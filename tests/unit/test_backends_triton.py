"""The plans that calls of the Triton backend share, and those that they must not share."""

from dataclasses import replace

import pytest
import torch

from tilewise import attention
from tilewise.backends.base import Needs
from tilewise.problem import AttentionProblem
from tilewise.tuning.device import DeviceSpec

triton = pytest.importorskip("tilewise.backends.triton", reason="Triton is not installed")


def plan_of(needs):
    q = torch.zeros(1, 1, 8, 16)
    problem = AttentionProblem.from_tensors(q, q, q).backward(lse_grad=False)
    return triton._backward_plan(problem, (q.stride(), q.stride(), None), (True,) * 6, "ieee", needs)


def test_calls_that_need_other_gradients_do_not_share_a_plan():
    """A launch keeps the kernel of its first call, where a result that was not wanted is no argument at all.

    Launched with that result, the kernel read its arguments one place off: an illegal memory access.
    """
    assert plan_of(Needs()) is plan_of(Needs())
    assert plan_of(Needs()) is not plan_of(Needs(dbias=True))


def problem_of(d, dv, dtype=torch.float32):
    return AttentionProblem.from_tensors(*(torch.zeros(1, 1, 4, dim, dtype=dtype) for dim in (d, d, dv)))


@pytest.mark.parametrize(("d", "dv"), [(577, 8), (8, 513), (640, 640)])
def test_heads_wider_than_the_tiles_are_refused_in_words_and_taken_by_the_reference(d, dv):
    problem = problem_of(d, dv)
    for side in (problem, problem.backward(lse_grad=False)):
        assert triton.backend.why_not(side) == (f"takes head dims up to 576 for q and k and up to 512 for v, got {d} "
                                                f"and {dv}; backend='reference' takes them")
    assert triton.backend.why_not(problem_of(576, 512)) is None
    q, v = torch.ones(1, 1, 2, d), torch.ones(1, 1, 2, dv)
    assert torch.equal(attention(q, q, v, backend="reference"), v)


@pytest.mark.parametrize(("queries", "keys"), [(2**25, 5), (5, 2**25)])
def test_more_rows_of_all_heads_than_32_bits_number_are_refused_in_words(queries, keys):
    """Where a batch entry's row of lse lies was a product of 32 bits: it would have been written elsewhere."""
    def of_heads(hq):
        q, k = (torch.zeros(1, 1, 1, 1).expand(2, hq, length, 1) for length in (queries, keys))
        return AttentionProblem.from_tensors(q, k, k)

    assert triton.backend.why_not(of_heads(64)) == (
        f"takes up to {2**31 - 1} queries, or keys, of all heads of a batch entry, got {2**31}; backend='reference' "
        "takes them")
    assert triton.backend.why_not(of_heads(63)) is None


@pytest.mark.parametrize(("arch", "d", "dtype", "forward", "backward"), [
    ("sm_90", 576, torch.bfloat16, None, None), ("sm_90", 576, torch.float32, None, None),
    ("gfx942", 576, torch.bfloat16, None, None), ("sm_75", 512, torch.bfloat16, None, None),
    ("sm_75", 576, torch.bfloat16, None, 69632), ("sm_86", 512, torch.float32, None, 131072),
    ("sm_75", 512, torch.float32, 98304, 131072), ("sm_75", 256, torch.float32, None, None),
])
def test_a_device_too_small_for_wide_heads_is_refused_with_its_numbers(monkeypatch, arch, d, dtype, forward, backward):
    spec = DeviceSpec.of_arch(arch)
    monkeypatch.setattr(triton, "device_spec", lambda device: spec)
    problem = replace(problem_of(d, min(d, 512), dtype), device=torch.device("cuda", 0))
    for side, needed in ((problem, forward), (problem.backward(lse_grad=False), backward)):
        assert triton.backend.why_not(side) == (needed and (
            f"needs {needed} bytes of shared memory for head dims {d} and {min(d, 512)} in {dtype}, and {arch} has "
            f"{spec.shared_memory}; backend='reference' takes them"))
