"""Diffusers' dispatch function: torch's results in its layout, and under a model of Diffusers' own."""

import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from integrations.calls import handed, signature
from integrations.dense import close
from tilewise import TilewiseError, UnsupportedProblem
from tilewise.integrations import diffusers as face
from tilewise.integrations.diffusers import dispatch_attention_fn


def inputs(sq=9, sk=12, hk=4):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, sq, 4, 8), (2, sk, hk, 8), (2, sk, hk, 6)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


KEYS = torch.arange(12) < torch.tensor([[12], [7]])
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask_of_keys": {"attn_mask": KEYS},
    "float_mask_of_keys": {"attn_mask": torch.zeros(2, 12, dtype=torch.float64).masked_fill(~KEYS, float("-inf"))},
    "mask_of_pairs": {"attn_mask": KEYS[:, None, None].expand(-1, 4, 9, -1)},
}


def test_arguments_are_diffusers():
    assert signature(dispatch_attention_fn) == (
        "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, "
        "attention_kwargs=None, backend=None, parallel_config=None")


@pytest.mark.parametrize("name", CALLS)
def test_results_are_torchs_in_another_layout(name):
    q, k, v = inputs()
    options = dict(CALLS[name])
    found = dispatch_attention_fn(q, k, v, **options)
    if "mask_of_keys" in name:
        options["attn_mask"] = options["attn_mask"][:, None, None]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), **options)
    close(found, wanted.transpose(1, 2), 1e-10)


def test_tensors_are_not_copied():
    q = torch.randn(2, 9, 4, 8)
    assert [t.data_ptr() for t in handed(lambda: dispatch_attention_fn(q, q, q))] == 3 * [q.data_ptr()]


@pytest.mark.parametrize("name", ["attention_kwargs", "backend", "parallel_config"])
def test_what_is_meant_for_another_implementation_raises(name):
    with pytest.raises(UnsupportedProblem, match=f"{name} is {{'a': 1}}; allowed is None: it is meant for"):
        dispatch_attention_fn(*inputs(), **{name: {"a": 1}})
    dispatch_attention_fn(*inputs(), attention_kwargs={})


def test_without_diffusers_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.setitem(sys.modules, "diffusers.models", None)
    with pytest.raises(TilewiseError, match="Diffusers is not installed, or its models do not call"):
        face.install()


# Diffusers' imports of torch's and of other packages' modules warn.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_model_of_diffusers_gives_the_same(monkeypatch):
    diffusers = pytest.importorskip("diffusers", reason="Diffusers is not installed: there is no model to ask")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8]).eval()
    given = {"hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 7, 32),
             "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]), "img_ids": torch.zeros(16, 3),
             "txt_ids": torch.zeros(7, 3)}
    wanted = model(**given).sample
    original = diffusers.models.attention_dispatch.dispatch_attention_fn
    holders = [module for name, module in sys.modules.items()
               if name.startswith("diffusers.") and vars(module).get("dispatch_attention_fn") is original]
    assert len(holders) >= 2
    calls = []
    ours = face.scaled_dot_product_attention
    monkeypatch.setattr(face, "scaled_dot_product_attention", lambda *given: calls.append(1) or ours(*given))
    face.install()
    try:
        assert all(module.dispatch_attention_fn is dispatch_attention_fn for module in holders)
        torch.testing.assert_close(model(**given).sample, wanted)
    finally:
        for module in holders:
            module.dispatch_attention_fn = original
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_another_backend_that_diffusers_has_in_force_raises(monkeypatch):
    """The context manager's backend was dropped without a word, where a model's own raised."""
    pytest.importorskip("diffusers", reason="Diffusers is not installed: it has no backend in force")
    from diffusers.models import attention_dispatch as dispatch

    q, k, v = inputs()
    with dispatch.attention_backend("_native_math"):
        dispatch_attention_fn(q, k, v)  # by its own name, in the place of nothing
        monkeypatch.setattr(dispatch, "dispatch_attention_fn", dispatch_attention_fn)  # as install() does
        with pytest.raises(UnsupportedProblem) as caught:
            dispatch_attention_fn(q, k, v)
        assert str(caught.value).startswith(
            "Diffusers' backend in force is '_native_math'; allowed is 'native', its default, which tilewise stands in "
            "for: leave attention_backend(...), or enter attention_backend('native').")
        with dispatch.attention_backend("native"):
            dispatch_attention_fn(q, k, v)
        monkeypatch.delattr(dispatch, "_AttentionBackendRegistry")  # Diffusers' own name, which may go
        dispatch_attention_fn(q, k, v)
        monkeypatch.undo()
    assert dispatch_attention_fn(q, k, v).shape == (2, 9, 4, 6)
