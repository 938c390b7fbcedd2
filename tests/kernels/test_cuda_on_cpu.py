"""The CUDA kernels compute attention: the whole source, run by a CPU, against the oracle."""

import pytest
import torch

from conformance.calls import (
    assert_forward_within_budget,
    assert_gradients_within_budget,
    operands_of,
    problem_of,
)
from kernels import cuda_on_cpu
from tilewise.backends import cuda, cuda_ieee, float32
from tilewise.backends.base import Gradients, Needs, Results, Saved
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.tuning.device import DeviceSpec

pytestmark = pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="there is no C++ compiler to run the kernels with")
BACKENDS = {"cuda": cuda.backend, "cuda_ieee": cuda_ieee.backend}


def is_taken(case):
    return float32._wrong_problem(problem_of(case, make_inputs(case, torch.float32, "cpu"))) is None


TAKEN = [case for case in CASES if is_taken(case)]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(float32, "load", cuda_on_cpu.load)
    monkeypatch.setattr(float32, "device_spec", lambda device: DeviceSpec.of_arch("sm_90"))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_results_stay_within_error_budget(backend, case):
    inputs = make_inputs(case, torch.float32, "cpu")
    q, k, v, dout, dlse = inputs
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands)
    result = backend.forward(problem, q, k, v, operands)
    assert_forward_within_budget(case, inputs, Results(result.out, result.lse))
    got = backend.backward(problem.backward(lse_grad=True), Saved(q, k, v, *result[:2], operands), dout, dlse, Needs())
    assert_gradients_within_budget(case, inputs, Gradients(*got), "out_and_lse")
