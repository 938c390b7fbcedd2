"""The plans that calls of the Triton backend share, and those that they must not share."""

import pytest
import torch

from tilewise.backends.base import Needs
from tilewise.problem import AttentionProblem

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
