"""Masks with lists of their visible tiles: the same attention, and hidden tiles are not visited."""

import pytest
import torch

from conformance.calls import skip_if_refused
from tilewise import attention, causal, documents, window
from tilewise.errors import InvalidInput
from tilewise.masks.tile_lists import TILE
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands
from tilewise.testing.cases import Case
from tilewise.testing.inputs import make_inputs

CASE = Case("tiled", b=2, hq=2, hk=1, sq=2 * TILE - 17, sk=2 * TILE + 40, d=16, dv=16)


def blocks(*shape, sq=CASE.sq, sk=CASE.sk):
    """Whole tiles visible, whole tiles hidden, and ragged ones, another pattern for each entry of ``shape``."""
    generator = torch.Generator().manual_seed(3)
    states = torch.randint(0, 3, (*shape, -(-sq // TILE), -(-sk // TILE)), generator=generator)
    per_pair = states.repeat_interleave(TILE, -1).repeat_interleave(TILE, -2)[..., :sq, :sk]
    noise = torch.rand(*shape, sq, sk, generator=generator) > 0.3
    return (per_pair == 2) | ((per_pair == 1) & noise)


MASKS = {
    "of_all": lambda: causal("bottom_right") & blocks(1, 1),
    "of_heads": lambda: window(None, None, "top_left") & blocks(1, CASE.hq),
    "of_batches": lambda: window(150, 60, "top_left") & blocks(CASE.b, 1),
    "of_both": lambda: window(None, None) & blocks(CASE.b, CASE.hq),
    "band_alone": lambda: documents(torch.zeros(CASE.sq).long(), torch.arange(CASE.sk) // 200) & causal("top_left"),
}


def results(backend, inputs, mask, **options):
    q, k, v, dout, dlse = inputs
    got = attention(q, k, v, mask=mask, backend=backend.name, return_aux=("lse",), **options)
    lse = torch.where(torch.isfinite(got.lse), got.lse, 0.0)
    return [*got, *torch.autograd.grad((got.out, lse), (q, k, v), (dout, dlse))]


@pytest.fixture
def inputs(device):
    return make_inputs(CASE, torch.float32, device, requires_grad=True)


@pytest.fixture(autouse=True)
def _taken(backend, device):
    q, k, v, *_ = make_inputs(CASE, torch.float32, device)
    problem = AttentionProblem.from_tensors(q, k, v, Operands(mask=torch.ones(1, 1, 1, CASE.sk, dtype=torch.bool,
                                                                              device=device)))
    skip_if_refused(backend, problem)


@pytest.mark.parametrize("name", MASKS)
def test_tiled_mask_means_the_same_mask(backend, inputs, device, name):
    options = {"dropout_p": 0.3, "dropout_seed": 7} if name == "of_all" else {}
    mask = MASKS[name]()
    mask = type(mask)(mask.band, None if mask.tensor is None else mask.tensor.to(device),
                      None if mask.documents is None else type(mask.documents)(*(t.to(device) for t in mask.documents)))
    tiled = mask.tiled(CASE.sq, CASE.sk)
    for want, got in zip(results(backend, inputs, mask, **options), results(backend, inputs, tiled, **options),
                         strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)  # the others read the boolean tensor, or take none
def test_hidden_tiles_are_not_read(backend, inputs, device):
    """NaN that a boolean mask alone hides reaches every query of a tile that is visited; here it reaches none."""
    visible = torch.ones(CASE.sq, CASE.sk, dtype=torch.bool, device=device)
    visible[:, TILE:2 * TILE] = False
    clean = results(backend, inputs, visible)
    q, k, v, dout, dlse = inputs
    k, v = k.detach().clone(), v.detach().clone()
    k[:, :, TILE:2 * TILE], v[:, :, TILE:2 * TILE] = float("nan"), float("nan")
    spoilt = q, k.requires_grad_(), v.requires_grad_(), dout, dlse
    tiled = (window(None, None) & visible).tiled(CASE.sq, CASE.sk)
    for want, got in zip(clean, results(backend, spoilt, tiled), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert results(backend, spoilt, visible)[0].isnan().any()


def test_a_tiled_mask_is_of_its_lengths_alone(backend, inputs, device):
    q, k, v, *_ = inputs
    tiled = (window(None, None) & blocks(1, 1).to(device)).tiled(CASE.sq, CASE.sk)
    with pytest.raises(InvalidInput, match=r"tiles_q has shape \(1, 1, 2, 5\); allowed is"):
        attention(q[:, :, :100], k, v, mask=type(tiled)(tiled.band, tiled.tensor[..., :100, :], None, tiled.tiles),
                  backend=backend.name)
    with pytest.raises(InvalidInput, match=r"mask is tiled\(\) for lengths of its own, but lengths are data"):
        attention(q, k, v, mask=tiled, seqlens_k=torch.tensor([5, 9], device=device), backend=backend.name)
    with pytest.raises(InvalidInput, match=r"the lists of a tiled mask are of that mask alone"):
        _ = tiled & causal()
