"""What the Hopper kernels make of scores under a softcap, on the GPU that its assembly is for."""

import math

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.hopper.softmax import squashed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
SQUASH = 2.0 * math.log2(math.e)  # of x = s


@gluon.jit
def squash_kernel(scores_ptr, out_ptr, squash, shares: gl.constexpr, count: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, count, 16])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    keys = gl.arange(0, count, layout=gl.SliceLayout(0, layout))
    places = rows[:, None] * count + keys[None, :]
    gl.store(out_ptr + places, squashed(gl.load(scores_ptr + places), squash, shares))


def squash(scores, shares_reciprocal):
    out = torch.empty_like(scores)
    squash_kernel[(1,)](scores, out, SQUASH, shares_reciprocal, scores.shape[1])
    return out


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("shares_reciprocal", [True, False])
def test_it_errs_by_a_few_roundings_of_float32(shares_reciprocal, keys, device):
    small = torch.linspace(-1, 1, 32 * keys, device=device)
    scores = torch.cat([small, torch.linspace(-30, 30, 32 * keys, device=device)]).reshape(64, keys)
    exact = (scores.double().tanh() - 1) / 2
    assert (squash(scores, shares_reciprocal) - exact).abs().max() <= 2**-22


@pytest.mark.parametrize("shares_reciprocal", [True, False])
def test_infinite_scores_are_at_the_ends(shares_reciprocal, device):
    scores = torch.zeros(64, 128, device=device)
    scores[3, 5], scores[3, 6] = torch.inf, -torch.inf
    out = squash(scores, shares_reciprocal)
    assert out[3, 5].abs() <= 2**-30
    assert out[3, 6] == -1
    assert ((out.flatten().sort().values[1:-1] + 0.5).abs() <= 2**-22).all()


def test_nan_stays_where_it_is_where_each_score_has_a_reciprocal(device):
    scores = torch.zeros(64, 128, device=device)
    scores[3, 5] = torch.nan
    assert squash(scores, False).isnan().nonzero().tolist() == [[3, 5]]


def test_nan_stays_in_its_row_where_four_share_one(device):
    scores = torch.zeros(64, 128, device=device)
    scores[3, 5] = torch.nan
    found = squash(scores, True).isnan()
    assert found[3, 5]
    assert not found[torch.arange(64, device=device) != 3].any()
