"""The softcap's tanh is as near as float32 allows: what it errs by, times the cap, is a score's error."""

import pytest
import torch
import triton
import triton.language as tl

from tilewise.kernels.triton.modifiers import hyperbolic_tangent


@triton.jit
def tanh_kernel(x_ptr, out_ptr, exact: tl.constexpr, count: tl.constexpr):
    offs = tl.arange(0, count)
    tl.store(out_ptr + offs, hyperbolic_tangent(tl.load(x_ptr + offs), exact))


def tanh(x, exact):
    out = torch.empty_like(x)
    tanh_kernel[(1,)](x, out, exact, x.numel())
    return out.double()


@pytest.mark.parametrize("exact", [False, True])
def test_far_from_0_it_errs_by_rounding_alone(exact, device):
    """From tanh(1) on, numbers below 1 are 2⁻²⁴ apart; a quotient near 1 would err by its own rounding too."""
    x = torch.linspace(1, 12, 1024, device=device)
    for values in (x, -x):
        assert (tanh(values, exact) - values.double().tanh()).abs().max() <= 2**-24


def test_near_0_its_relative_error_is_float32s(device):
    x = torch.logspace(-30, 0, 1024, base=2, device=device)
    exact = x.double().tanh()
    assert ((tanh(x, True) - exact).abs() / exact).max() <= 2**-20


def test_its_ends(device):
    x = torch.tensor([0.0, 100.0, -100.0, 1000.0], device=device)
    assert tanh(x, True).tolist() == [0.0, 1.0, -1.0, 1.0]
