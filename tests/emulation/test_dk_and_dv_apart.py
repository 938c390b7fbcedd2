"""dK and dV in a launch each, as wide heads have them on a GPU, are the dK and dV of one launch."""

from dataclasses import replace

import torch

from tilewise.backends.triton import backend
from tilewise.kernels.triton.backward import dkdv_launch
from tilewise.kernels.triton.config import DkdvConfig
from tilewise.kernels.triton.launch import modifiers_of
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands
from tilewise.testing.cases import Case
from tilewise.testing.inputs import make_inputs


def test_two_launches_make_the_gradients_and_column_sums_of_one(device):
    """The launch for dV makes no dS; it once wrote zeros over the sums that the launch for dK had made."""
    case = Case("split", b=2, hq=4, hk=2, sq=40, sk=53, d=32, dv=24)
    q, k, v, dout, _ = make_inputs(case, torch.float32, device)
    operands = Operands(bias=torch.linspace(-1, 1, 53, device=device)[None, None, None])
    problem = AttentionProblem.from_tensors(q, k, v, operands)
    out, lse, _ = backend.forward(problem, q, k, v, operands)
    delta = (out * dout).sum(-1)
    problem = replace(problem, direction="backward")
    results = []
    for launches in (((True, True),), ((True, False), (False, True))):
        dk, dv, columns = torch.empty_like(k), torch.empty_like(v), lse.new_empty(2, 4, 53)
        for needs in launches:
            dkdv_launch(problem, DkdvConfig(32, 16, 4, 1), "ieee", dout.stride(), (dk.stride(), dv.stride()), needs)(
                q, k, v, dout, lse, delta, dk, dv, columns, None, None, modifiers_of(problem, operands))
        results.append((dk, dv, columns))
    for together, apart in zip(*results, strict=True):
        assert together.isfinite().all()
        assert together.any()
        assert torch.equal(together, apart)
