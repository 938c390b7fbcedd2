"""The provider of torch's flash attention: its operators, entered for the CPU, compared with the dense formula."""

from dataclasses import replace
from inspect import signature

import pytest
import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from integrations.calls import CU_K, CU_Q, tensors
from integrations.dense import bottom_right, close, dense
from tilewise import UnsupportedProblem, attention, attention_varlen, use_backend
from tilewise.autograd import op
from tilewise.dispatch import choose, get_backend
from tilewise.integrations import sdpa_provider
from tilewise.problem import AttentionProblem

aten = torch.ops.aten
# torch tells once that an operator of its own is replaced, which is what a provider is for; and what a profile holds.
pytestmark = [pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning"),
              pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")]
VARLEN_ARGUMENTS = signature(varlen_attn).parameters
GROUPED = {"enable_gqa": True} if "enable_gqa" in VARLEN_ARGUMENTS else {}  # torch 2.11 takes grouped heads unasked


@pytest.fixture
def active(monkeypatch):
    """Enter the operators where this test computes; torch itself enters them for CUDA devices."""
    provider = sdpa_provider.ActiveProvider("CPU")
    yield
    provider.remove()


def inputs(sq=9, sk=9, hk=2):
    """q (2, 4, sq, 8), k and v (2, hk, sk, 8), with gradients; and one for out."""
    *leaves, dout = (tensor.detach().transpose(1, 2) for tensor in tensors(sq, sk, hk))
    return [leaf.requires_grad_() for leaf in leaves], dout


def same_gradients(out, wanted, leaves, dout):
    close(out, wanted)
    found = torch.autograd.grad(out, leaves, dout)
    for one, other in zip(found, torch.autograd.grad(wanted, leaves, dout.double()), strict=True):
        close(one, other.double())


@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_operator_and_its_gradient(active, is_causal):
    leaves, dout = inputs()
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*leaves, 0.0, is_causal, scale=0.3)
    wanted, wanted_lse = dense(*leaves, bottom_right(9, 9, right=0) if is_causal else None, scale=0.3)
    close(lse, wanted_lse)
    same_gradients(out, wanted, leaves, dout)
    assert out.stride() == torch.empty_like(leaves[0]).stride()


def test_operator_with_a_window_and_its_gradient(active):
    leaves, dout = inputs(sk=12)
    rows = [leaf.transpose(1, 2) for leaf in leaves]
    out, *_ = aten._flash_attention_forward(*rows, None, None, 9, 12, 0.0, False, False, window_size_left=3,
                                            window_size_right=1)
    same_gradients(out.transpose(1, 2), dense(*leaves, bottom_right(9, 12, 3, 1))[0], leaves, dout)


def test_keys_in_use(active):
    leaves, _ = inputs(sk=12)
    rows = [leaf.detach().transpose(1, 2) for leaf in leaves]
    out, *_ = aten._flash_attention_forward(*rows, None, None, 9, 12, 0.0, False, False,
                                            seqused_k=torch.tensor([12, 7]))
    close(out[1].transpose(0, 1), dense(leaves[0][1], leaves[1][1, :, :7], leaves[2][1, :, :7])[0])


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (2, 1)])
def test_torchs_varlen_attn_and_its_gradient(active, window_size):
    q, k, v, dout = (tensor[0].detach() for tensor in tensors(9, 8))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, lse = varlen_attn(*leaves, CU_Q, CU_K, 6, 5, window_size=window_size, **GROUPED,
                           return_aux=AuxRequest(lse=True))
    parts = []
    for n in range(3):
        one, other = slice(CU_Q[n], CU_Q[n + 1]), slice(CU_K[n], CU_K[n + 1])
        see = bottom_right(one.stop - one.start, other.stop - other.start, *window_size)
        own = [t[rows].transpose(0, 1) for t, rows in zip(leaves, (one, other, other), strict=True)]
        parts.append(dense(*own, see))
    close(lse, torch.cat([part[1] for part in parts], -1))
    same_gradients(out, torch.cat([part[0].transpose(0, 1) for part in parts]), leaves, dout)


@pytest.mark.skipif(not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"),
                    reason="torch 2.11 has no operator that writes into an out of the caller's")
def test_out_of_the_callers_is_written(active):
    rows = [leaf.detach().transpose(1, 2) for leaf in inputs()[0]]
    out = torch.empty_like(rows[0])
    lse = aten._flash_attention_forward_no_dropout_inplace(out, *rows, None, None, 9, 9, 0.0, True, False)
    wanted = aten._flash_attention_forward(*rows, None, None, 9, 9, 0.0, True, False)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])


def test_dropout_drops_the_same_in_both_passes(active):
    """Out is linear in v, with the kept probabilities as factors: its gradient by v tells which were kept."""
    (q, k, v), _ = inputs(hk=4)
    torch.manual_seed(3)
    out, _, _, _, _, _, state, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.5, False)
    assert state.dtype is torch.uint64
    grad = torch.autograd.grad(out.sum(), v)[0]
    torch.testing.assert_close((grad * v).sum(), out.sum())
    torch.manual_seed(3)
    assert torch.equal(aten._scaled_dot_product_flash_attention(q, k, v, 0.5, False)[0], out)
    assert not torch.equal(aten._scaled_dot_product_flash_attention(q, k, v, 0.5, False)[0], out)


@pytest.mark.skipif("num_splits" not in VARLEN_ARGUMENTS, reason="this torch's varlen_attn takes no num_splits")
def test_one_split_asks_for_results_that_no_batch_changes(active, monkeypatch):
    asked = []

    def spy(*given, deterministic, **options):
        asked.append(deterministic)
        return attention_varlen(*given, deterministic=deterministic, **options)

    monkeypatch.setattr(sdpa_provider, "attention_varlen", spy)
    q, k, v = (tensor[0].detach() for tensor in tensors(9, 8)[:3])
    for num_splits in (None, 1):
        varlen_attn(q, k, v, CU_Q, CU_K, 6, 5, num_splits=num_splits, **GROUPED)
    assert asked == [None, True]


def test_what_it_does_not_have_raises(active):
    rows = [leaf.detach().transpose(1, 2) for leaf in inputs()[0]]
    with pytest.raises(UnsupportedProblem, match="return_debug_mask is given; allowed is None or False"):
        aten._scaled_dot_product_flash_attention(*(row.transpose(1, 2) for row in rows), 0.5, False, True)
    with pytest.raises(UnsupportedProblem, match="alibi_slopes is given; allowed is None or False"):
        aten._flash_attention_forward(*rows, None, None, 9, 9, 0.0, True, False, alibi_slopes=torch.ones(4))


def test_the_backend_that_calls_torchs_operators_refuses_while_they_are_ours(monkeypatch):
    """With this backend in force they called each other without an end, and named, it was another that computed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    problem = replace(AttentionProblem.from_tensors(q, q, q), device=torch.device("cuda", 0))
    backend = get_backend("torch")
    assert choose(problem, "torch") is backend
    for _ in range(2):
        provider = sdpa_provider.ActiveProvider("CUDA")
        with pytest.raises(UnsupportedProblem, match="whose place tilewise itself has taken; "
                                                     r"torch.nn.attention.restore_flash_attention_impl\(\) puts"):
            choose(problem, "torch")
        provider.remove()
        assert choose(problem, "torch") is backend


def test_calls_choose_anew_when_operators_are_replaced_and_put_back():
    q = torch.zeros(1, 2, 8, 16)
    provider = None
    for step in range(3):
        attention(q, q, q)
        assert op.resolve.cache_info().misses == 1 or step == 0
        if provider is None:
            provider = sdpa_provider.ActiveProvider("CUDA")
        else:
            provider.remove()


@pytest.mark.gpu
def test_named_for_a_call_of_torchs_it_refuses_and_does_not_call_itself(device):
    q = torch.randn(1, 4, 256, 64, device=device, dtype=torch.bfloat16)
    sdpa_provider.register()
    activate_flash_attention_impl("tilewise")
    try:
        with use_backend("torch"), sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(
                UnsupportedProblem, match="whose place tilewise itself has taken"):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
    finally:
        restore_flash_attention_impl()


def test_torch_lists_activates_and_restores_it():
    sdpa_provider.register()
    assert "tilewise" in list_flash_attention_impls()
    assert current_flash_attention_impl() is None
    activate_flash_attention_impl("tilewise")
    try:
        assert current_flash_attention_impl() == "tilewise"
    finally:
        restore_flash_attention_impl()
    assert current_flash_attention_impl() is None


@pytest.mark.gpu
def test_unmodified_calls_reach_it(device):
    from torch.profiler import ProfilerActivity, profile

    q = torch.randn(1, 4, 256, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    sdpa_provider.register()
    activate_flash_attention_impl("tilewise")
    try:
        with profile(activities=[ProfilerActivity.CPU]) as seen, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            out.float().sum().backward()
    finally:
        restore_flash_attention_impl()
    names = {event.key for event in seen.key_averages()}
    assert any(name.startswith("tilewise::attention_forward") for name in names)
    assert any(name.startswith("tilewise::attention_backward") for name in names)
    close(out, dense(q, q, q, bottom_right(256, 256, right=0).to(device))[0], 2e-2)
