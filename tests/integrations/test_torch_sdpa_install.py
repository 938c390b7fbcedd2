"""``install()``: unmodified calls of torch's SDPA, and models that make them, computed here; what is refused, by torch.

Every warning is an error in these tests, so a call that went to torch's function unseen would fail.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - by this name models call it
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torchs

from integrations.dense import close
from tilewise import TilewiseError, UnsupportedProblem, use_backend
from tilewise.integrations import torch_sdpa

INF, LEAST = float("inf"), torch.finfo(torch.float32).min


@pytest.fixture
def calls(monkeypatch):
    """Count what tilewise computes; torch's function is back behind the test."""
    counted, ours = [], torch_sdpa._attend
    monkeypatch.setattr(torch_sdpa, "_attend",
                        lambda *given, **options: (counted.append(1), ours(*given, **options))[1])
    yield counted
    torch_sdpa.uninstall()


def test_uninstall_restores_the_very_function():
    assert F.scaled_dot_product_attention is torchs
    torch_sdpa.uninstall()  # where nothing is installed, nothing happens
    torch_sdpa.install()
    installed = F.scaled_dot_product_attention
    assert installed is not torchs
    torch_sdpa.install()
    assert F.scaled_dot_product_attention is installed
    torch_sdpa.uninstall()
    assert F.scaled_dot_product_attention is torchs
    torch_sdpa.uninstall()
    assert F.scaled_dot_product_attention is torchs


def test_a_function_of_another_library_stays(monkeypatch):
    def sageattn(*given):
        """Stand for another library's."""

    monkeypatch.setattr(F, "scaled_dot_product_attention", sageattn)
    for change in (torch_sdpa.install, torch_sdpa.uninstall):
        with pytest.raises(TilewiseError) as caught:
            change()
        assert str(caught.value) == (
            f"torch.nn.functional.scaled_dot_product_attention is {__name__}.{sageattn.__qualname__}; allowed are "
            "torch's own function and tilewise's in its place: remove first what has replaced it.")
        assert F.scaled_dot_product_attention is sageattn


def test_a_name_that_was_imported_before_keeps_torchs(calls):
    torch_sdpa.install()
    q = torch.randn(1, 2, 4, 8)
    torchs(q, q, q)
    assert not calls
    F.scaled_dot_product_attention(q, q, q)
    assert len(calls) == 1


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def boolean(*shape):
    return random(*shape, seed=5) > 0


def additive(*shape, hidden=-INF):
    mask = random(*shape, seed=6)
    return mask.masked_fill(mask < -0.5, hidden)


def without_keys(mask, hidden):
    """Hide every key from the second query."""
    mask = mask.clone()
    mask[..., 1, :] = hidden
    return mask


Q, K, V = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)
CALLS = {
    "plain": (Q, K, K, {}),
    "another_head_dim_of_values": (Q, K, V, {}),
    "scale": (Q, K, V, {"scale": 0.3}),
    "causal": (Q, K, V, {"is_causal": True}),
    "gqa": (Q, (2, 2, 7, 8), (2, 2, 7, 6), {"enable_gqa": True}),
    "mask_of_keys": (Q, K, V, {"attn_mask": boolean(2, 1, 1, 7)}),
    "mask_of_pairs": (Q, K, V, {"attn_mask": boolean(5, 7)}),
    "mask_of_each_entry": (Q, K, V, {"attn_mask": boolean(2, 1, 5, 7)}),
    "mask_and_causal": (Q, K, V, {"attn_mask": boolean(2, 1, 1, 7), "is_causal": True}),
    "row_without_keys": (Q, K, V, {"attn_mask": without_keys(boolean(2, 1, 5, 7), hidden=False)}),
    "added": (Q, K, V, {"attn_mask": additive(2, 4, 5, 7)}),
    "added_to_keys": (Q, K, V, {"attn_mask": additive(2, 1, 1, 7)}),
    "added_to_pairs": (Q, K, V, {"attn_mask": additive(5, 7)}),
    "added_least_number": (Q, K, V, {"attn_mask": additive(2, 1, 5, 7, hidden=LEAST)}),
    "added_row_without_keys": (Q, K, V, {"attn_mask": without_keys(additive(2, 1, 5, 7), hidden=-INF)}),
    "three_dims": (Q[1:], K[1:], V[1:], {"attn_mask": boolean(4, 5, 7)}),
    "two_dims": (Q[2:], K[2:], V[2:], {}),
    "five_dims": ((3, *Q), (3, *K), (3, *V), {"attn_mask": boolean(5, 7)}),
    "no_queries": ((2, 4, 0, 8), K, V, {}),
    "no_keys": (Q, (2, 4, 0, 8), (2, 4, 0, 6), {}),
    "no_batch": ((0, *Q[1:]), (0, *K[1:]), (0, *V[1:]), {}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_torchs(calls, name, dtype):
    *shapes, options = CALLS[name]
    leaves = [random(*shape, seed=n, dtype=dtype).requires_grad_() for n, shape in enumerate(shapes)]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        # The least number of float32 is none of float16's.
        leaves.append(mask.clamp(min=torch.finfo(dtype).min).where(mask.isfinite(), mask).to(dtype).requires_grad_())
        options = options | {"attn_mask": leaves[-1]}
    wanted_by = [leaf.detach().double().requires_grad_() for leaf in leaves]
    in_double = options | ({"attn_mask": wanted_by[3]} if len(leaves) == 4 else {})
    if name == "mask_and_causal":  # not all of torch's backends take both
        in_double = {"attn_mask": mask & torch.ones(5, 7, dtype=torch.bool).tril()}
    with sdpa_kernel(SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(*wanted_by[:3], **in_double)
    torch_sdpa.install()
    found = F.scaled_dot_product_attention(*leaves[:3], **options)
    assert len(calls) == 1
    assert found.shape == wanted.shape
    assert found.dtype is dtype
    bound = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    close(found, wanted, bound)
    dout = random(*wanted.shape, seed=9, dtype=dtype)
    for one, other in zip(torch.autograd.grad(found, leaves, dout),
                          torch.autograd.grad(wanted, wanted_by, dout.double()), strict=True):
        close(one, other, bound)


@pytest.mark.parametrize(("backend", "is_row_alike"), [(SDPBackend.FLASH_ATTENTION, True), (SDPBackend.MATH, False)])
def test_a_row_of_least_numbers_is_an_average_with_the_gradients_of_torchs_fused_operator(calls, backend, is_row_alike):
    """Beside the least number lse has no bits for the number of keys, here and in torch's fused operator."""
    leaves = [random(*shape, seed=n, dtype=torch.float32).requires_grad_() for n, shape in enumerate((Q, K, K))]
    mask = without_keys(torch.zeros(5, 7), hidden=LEAST)
    with sdpa_kernel(backend):
        wanted = F.scaled_dot_product_attention(*leaves, mask)
    torch_sdpa.install()
    found = F.scaled_dot_product_attention(*leaves, mask)
    assert len(calls) == 1
    close(found, wanted.double())
    close(found[:, :, 1], leaves[2].mean(2).double())
    dout = random(*wanted.shape, seed=9, dtype=torch.float32)

    def are_alike():
        pairs = zip(*(torch.autograd.grad(out, leaves, dout, retain_graph=True) for out in (found, wanted)),
                    strict=True)
        return all(torch.allclose(*pair, atol=1e-5) for pair in pairs)

    assert are_alike() is is_row_alike
    dout[:, :, 1] = 0.0
    assert are_alike()


@pytest.mark.parametrize("hidden", [-INF, LEAST])
def test_rows_that_see_no_key_are_torchs_under_autocast_too(calls, hidden):
    """There torch rounds the least number of float32 to -inf, and out is 0; an average was returned."""
    q, mask = random(1, 2, 4, 8, dtype=torch.float32), torch.zeros(4, 4)
    mask[1] = hidden
    found = {}
    for name in ("torch", "tilewise"):
        with torch.autocast("cpu", torch.bfloat16):
            found[name] = F.scaled_dot_product_attention(q, q, q, mask)
        torch_sdpa.install()
    assert len(calls) == 1
    assert (found["tilewise"][:, :, 1] == 0).all()
    close(found["tilewise"], found["torch"].double(), 4e-2)


def test_a_mask_in_float32_of_queries_in_16_bits_is_taken(calls):
    q = random(1, 2, 4, 8, dtype=torch.bfloat16)
    mask = additive(4, 4).float()
    wanted = F.scaled_dot_product_attention(q, q, q, mask)
    torch_sdpa.install()
    close(F.scaled_dot_product_attention(q, q, q, mask), wanted.double(), 4e-2)
    assert len(calls) == 1


def test_dropout_keeps_the_mean_and_repeats_with_torchs_seed(calls):
    torch_sdpa.install()
    q, units = torch.zeros(1, 2, 60, 8), torch.eye(60).expand(1, 2, -1, -1)
    torch.manual_seed(1)
    kept = F.scaled_dot_product_attention(q, q, units, dropout_p=0.25)
    torch.manual_seed(1)
    assert torch.equal(kept, F.scaled_dot_product_attention(q, q, units, dropout_p=0.25))
    assert 0.73 < (kept > 0).double().mean() < 0.77  # of 7200 pairs: four standard deviations


def nested(layout):
    if layout is torch.jagged:
        return torch.nested.nested_tensor([random(3, 4, 8), random(5, 4, 8)], layout=layout).transpose(1, 2)
    return torch.nested.nested_tensor([random(4, 3, 8), random(4, 5, 8)])


def two_tensor():
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(random(*Q), random(*Q))


class Logging(torch.Tensor):
    """A tensor that answers for torch's functions itself."""

    seen: list = []  # noqa: RUF012 - of the class

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


# Calls that tilewise refuses: tensors, options, and how the reason begins that the warning gives.
REFUSED = {
    "negative_scale": (lambda: (random(*Q),) * 3, {"scale": -1.0}, r"scale is -1.0; allowed is a number from 2\^-126"),
    "scale_of_0": (lambda: (random(*Q),) * 3, {"scale": 0.0}, "scale is 0.0; allowed is a number from"),
    "all_dropped": (lambda: (random(*Q),) * 3, {"dropout_p": 1.0}, "dropout_p is 1.0; allowed is a probability"),
    "no_heads": (lambda: (random(2, 0, 5, 8),) * 3, {}, "key has 0 heads and query has 0: query heads must be"),
    "no_head_dim": (lambda: (random(2, 4, 5, 0), random(2, 4, 5, 0), random(*Q)), {}, "query has head dim 0; allowed"),
    "keys_and_values_of_other_heads": (lambda: (random(*Q), random(2, 2, 5, 8), random(*Q)), {"enable_gqa": True},
                                       "value has 4 heads and key has 2: they must be equal"),
    "nested_jagged": (lambda: (nested(torch.jagged),) * 3, {}, "query is a nested tensor, which has rules of its"),
    "nested_strided": (lambda: (nested(torch.strided),) * 3, {}, "query is a nested tensor, which has rules of its"),
    "wrapper": (lambda: (two_tensor(),) * 3, {}, "query is a TwoTensor, which has rules of its own for the call"),
    "own_rules": (lambda: (random(*Q), random(*Q), random(*Q).as_subclass(Logging)), {}, "value is a Logging, which"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_goes_to_torch_and_the_reason_is_told_once(calls, name):
    make, options, reason = REFUSED[name]
    given = make()
    wanted = torchs(*given, **options)
    torch_sdpa.install()
    with pytest.warns(RuntimeWarning, match="torch's own scaled_dot_product_attention computes this call, and others "
                                            f"that tilewise refuses for the same reason: {reason}") as told:
        found = F.scaled_dot_product_attention(*given, **options)
    assert [one.filename for one in told if one.category is RuntimeWarning] == [__file__]
    assert type(found) is type(wanted)
    if not found.is_nested:
        assert torch.equal(found, wanted)
    F.scaled_dot_product_attention(*given, **options)  # a second warning would be an error


def test_a_reason_is_told_once_whatever_its_numbers_and_anew_after_the_next_install(calls):
    q = random(*Q)
    for _ in range(2):
        torch_sdpa.install()
        with pytest.warns(RuntimeWarning, match=r"scale is -2\.0"):
            F.scaled_dot_product_attention(q, q, q, scale=-2.0)
        F.scaled_dot_product_attention(q, q, q, scale=-3.25)
        with pytest.warns(RuntimeWarning, match=r"dropout_p is 1\.0"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=1.0)
        torch_sdpa.uninstall()


def test_a_warning_that_is_an_error_is_one_each_time(calls):
    torch_sdpa.install()
    q = random(*Q)
    for _ in range(2):
        with pytest.raises(RuntimeWarning, match=r"scale is -1\.0"):
            F.scaled_dot_product_attention(q, q, q, scale=-1.0)


@pytest.mark.parametrize(("given", "options", "error", "message"), [
    ((None, random(*Q), random(*Q)), {}, TypeError, "argument 'query' .* must be Tensor, not NoneType"),
    ((random(*Q), random(2, 2, 5, 8), random(*Q)), {}, RuntimeError, "must match the size of tensor"),
    ((random(*Q), random(*Q), random(*Q)), {"attn_mask": torch.ones(5, 5, dtype=torch.int64)}, RuntimeError,
     "Expected attn_mask dtype to be bool or float"),
    ((random(*Q), random(*Q), random(*Q)), {"is_causal": 1}, TypeError, "argument 'is_causal' .*must be bool"),
], ids=["no_tensor", "heads", "integers", "switch"])
def test_what_both_refuse_raises_torchs_error(calls, given, options, error, message):
    torch_sdpa.install()
    with pytest.raises(error, match=message):
        F.scaled_dot_product_attention(*given, **options)


def test_transforms_of_torch_func_with_a_gradient_go_to_torch(calls):
    q, k = random(*Q), random(*Q, seed=1)

    def total(x):
        return F.scaled_dot_product_attention(x, k, k).square().sum()

    wanted = torch.func.grad(total)(q)
    torch_sdpa.install()
    with pytest.warns(RuntimeWarning, match=r"for the same reason: torch\.func \(grad, vjp, jacrev"):
        found = torch.func.grad(total)(q)
    close(found, wanted, 1e-10)
    # Of a mapped call too; the reason is known by now.
    close(torch.vmap(F.scaled_dot_product_attention)(q.requires_grad_(), k, k), torchs(q, k, k), 1e-10)


def test_forward_mode_goes_to_torch(calls):
    k = random(*Q, seed=1)
    # MATH, which alone has a tangent on CPUs; installed here, so that it asks for no other backend than were there.
    with sdpa_kernel(SDPBackend.MATH), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(random(*Q), random(*Q, seed=2))
        wanted = torch.autograd.forward_ad.unpack_dual(F.scaled_dot_product_attention(dual, k, k))
        torch_sdpa.install()
        with pytest.warns(RuntimeWarning, match="forward mode"):
            found = F.scaled_dot_product_attention(dual, k, k)
        for one, other in zip(torch.autograd.forward_ad.unpack_dual(found), wanted, strict=True):
            close(one, other, 1e-10)


def test_a_mapped_call_without_a_gradient_is_taken(calls):
    torch_sdpa.install()
    q = random(*Q)
    close(torch.vmap(F.scaled_dot_product_attention)(q, q, q), torchs(q, q, q), 1e-10)
    assert calls


def test_second_derivatives_are_those_of_torchs_backend_where_it_is_named(calls):
    q = random(*Q).requires_grad_()

    def twice():
        once, = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).square().sum(), q, create_graph=True)
        return torch.autograd.grad(once.square().sum(), q)[0]

    torch_sdpa.install()
    with pytest.raises(UnsupportedProblem, match="a second derivative of attention was asked for"):
        twice()
    with sdpa_kernel(SDPBackend.MATH), pytest.warns(RuntimeWarning, match="sdpa_kernel"):
        assert twice().isfinite().all()


def test_tensors_without_values_are_taken(calls):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    torch_sdpa.install()
    q = torch.empty(*Q, device="meta")
    assert F.scaled_dot_product_attention(q, q, q).shape == Q
    with FakeTensorMode():
        q = torch.empty(*Q)
        assert isinstance(F.scaled_dot_product_attention(q, q, q), FakeTensor)
    assert len(calls) == 2


DISABLED = (r"sdpa_kernel\(\.\.\.\) of torch\.nn\.attention, or a switch of torch\.backends\.cuda, disables backends "
            r"of torch's, here {}: it asks for another of them\. Allowed are all that were enabled at install\(\)")


def test_backends_that_sdpa_kernel_names_are_torchs(calls):
    torch_sdpa.install()
    q = random(*Q)
    with sdpa_kernel(SDPBackend.MATH), pytest.warns(
            RuntimeWarning, match=DISABLED.format("cuDNN, flash, memory-efficient")):
        F.scaled_dot_product_attention(q, q, q)
    assert not calls
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q)
    assert not calls
    F.scaled_dot_product_attention(q, q, q)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                      SDPBackend.CUDNN_ATTENTION]):
        F.scaled_dot_product_attention(q, q, q)
    assert len(calls) == 2


def test_a_backend_that_was_disabled_before_install_asks_for_nothing(calls):
    q = random(*Q)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        torch_sdpa.install()
        F.scaled_dot_product_attention(q, q, q)
        with sdpa_kernel(SDPBackend.MATH), pytest.warns(RuntimeWarning, match=DISABLED.format("flash")):
            F.scaled_dot_product_attention(q, q, q)
    F.scaled_dot_product_attention(q, q, q)
    assert len(calls) == 2


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_is_taken_and_where_it_is_refused_torchs(calls, make):
    """Its own rule asks whether the function is the one in torch.nn.functional, which torch's own is no longer."""
    q, k = random(2, 4, 5, 16), random(2, 4, 7, 16, seed=1)
    wanted = F.scaled_dot_product_attention(q, k, k, make(5, 7))
    torch_sdpa.install()
    close(F.scaled_dot_product_attention(q, k, k, make(5, 7)), wanted, 1e-10)
    assert len(calls) == 1
    with sdpa_kernel(SDPBackend.MATH), pytest.warns(RuntimeWarning, match="sdpa_kernel"):
        close(F.scaled_dot_product_attention(q, k, k, make(5, 7)), wanted, 1e-10)
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        F.scaled_dot_product_attention(q, k, k, make(5, 7), is_causal=True)
    assert len(calls) == 1


def test_where_a_backend_is_named_no_other_function_steps_in(calls):
    torch_sdpa.install()
    q = random(*Q)
    with use_backend("reference"):
        F.scaled_dot_product_attention(q, q, q)
        with pytest.raises(ValueError, match=r"scale is -1\.0; allowed is"):
            F.scaled_dot_product_attention(q, q, q, scale=-1.0)
        with sdpa_kernel(SDPBackend.MATH), pytest.raises(UnsupportedProblem, match="sdpa_kernel"):
            F.scaled_dot_product_attention(q, q, q)
    with use_backend("cuda"), pytest.raises(UnsupportedProblem, match="backend 'cuda' refuses this problem"):
        F.scaled_dot_product_attention(q, q, q)


# Dynamo itself instantiates autograd Functions while it traces them.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# torch 2.11's compiler scripts a function of its own with a decorator that it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("options", "reason"), [
    ({"is_causal": True}, None), ({"attn_mask": boolean(5, 5)}, None), ({"scale": -1.0}, r"scale is -1\.0"),
], ids=["causal", "mask", "refused"])
def test_calls_compile_into_one_graph(calls, options, reason):
    torch._dynamo.reset()

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **options)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    given = [random(*Q, seed=n).requires_grad_() for n in range(3)]
    wanted = compiled(*given)  # of torch, in a graph of its own
    torch_sdpa.install()
    if reason is None:
        found = compiled(*given)
        assert calls  # while it was traced
    else:
        with pytest.warns(RuntimeWarning, match=reason):
            found = compiled(*given)
    close(found, wanted, 1e-10)
    dout = random(*Q, seed=9)
    for one, other in zip(torch.autograd.grad(found, given, dout), torch.autograd.grad(wanted, given, dout),
                          strict=True):
        close(one, other, 1e-10)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_a_context_inside_of_compiled_code_is_torchs(calls):
    torch._dynamo.reset()

    def call(q):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, q, q)

    torch_sdpa.install()
    with pytest.warns(RuntimeWarning, match="sdpa_kernel"):
        found = torch.compile(call, backend="aot_eager", fullgraph=True)(random(*Q))
    close(found, call(random(*Q)), 1e-10)
    assert not calls


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_scripting_needs_torchs_own_function(calls):
    def call(q):
        return F.scaled_dot_product_attention(q, q, q)

    torch_sdpa.install()
    with pytest.raises(torch.jit.frontend.NotSupportedError, match="try blocks aren't supported"):
        torch.jit.script(call)
    torch_sdpa.uninstall()
    q = random(*Q)
    close(torch.jit.script(call)(q), call(q), 1e-10)


class NanoGPT(nn.Module):
    """Attend as nanoGPT's CausalSelfAttention."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj, self.dropout = nn.Linear(16, 48), nn.Linear(16, 16), 0.0

    def forward(self, x):
        q, k, v = (t.view(*t.shape[:2], 4, 4).transpose(1, 2) for t in self.c_attn(x).split(16, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0,
                                           is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(x.shape))


class ViT(nn.Module):
    """Attend as timm's Attention, and with a table of positions as its RelPosAttention and BEiT do."""

    def __init__(self, positions):
        super().__init__()
        self.qkv, self.proj, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(4)
        self.table = nn.Parameter(torch.randn(1, 4, 6, 6)) if positions else None

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, attn_mask=self.table, dropout_p=0.0)
        return self.proj(y.transpose(1, 2).reshape(b, n, c))


class Grouped(nn.Module):
    """Attend as torchtune and x-transformers: groups of heads, and a mask of packed sequences or of padding."""

    def __init__(self, mask):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("mask", mask)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, dropout_p=0.0, is_causal=self.mask is None,
                                           enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class CLIP(nn.Module):
    """Attend as open_clip's text tower: nn.MultiheadAttention with a causal mask that is added."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, batch_first=True)
        self.register_buffer("attn_mask", torch.full((6, 6), -INF).triu(1))

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False, attn_mask=self.attn_mask.to(x.dtype))[0]


class Padded(nn.Module):
    """Call nn.MultiheadAttention with a mask and padding, on keys of another length and width."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, kdim=12, vdim=10, batch_first=True, add_bias_kv=True)

    def forward(self, x):
        keys, padding = random(2, 7, 12, seed=3), torch.arange(7) >= torch.tensor([[7], [4]])
        return self.attn(x, keys, keys[..., :10], key_padding_mask=padding, need_weights=False,
                         attn_mask=torch.ones(6, 7, dtype=torch.bool).triu(3))[0]


class Encoder(nn.Module):
    def __init__(self, padding):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.padding = padding

    def forward(self, x):
        return self.layer(x, src_key_padding_mask=self.padding)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=x.dtype)
        return self.layer(x, random(2, 9, 16, seed=4), tgt_mask=mask, tgt_is_causal=True)


TOKENS = torch.arange(6) < torch.tensor([[6], [4]])
PACKED = (torch.tensor([0, 0, 0, 1, 1, 1])[:, None] == torch.tensor([0, 0, 0, 1, 1, 1])).tril().expand(2, 1, 6, 6)
MODELS = {
    "nanogpt": (NanoGPT, 1),
    "timm": (lambda: ViT(positions=False), 1),
    "timm_positions": (lambda: ViT(positions=True), 1),
    "torchtune_packed": (lambda: Grouped(PACKED), 1),
    "torchtune_causal": (lambda: Grouped(None), 1),
    "x_transformers_padding": (lambda: Grouped(TOKENS[:, None, None]), 1),
    "open_clip": (CLIP, 1),
    "multihead_attention": (Padded, 1),
    "encoder_layer": (lambda: Encoder(None), 1),
    "encoder_layer_padding": (lambda: Encoder(~TOKENS), 1),
    "decoder_layer": (Decoder, 2),
}


def results_of(model, run):
    """Return the result of a run, and the gradients of all parameters."""
    model.zero_grad()
    out = run(model)
    out.square().mean().backward()
    return [out, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_same_results_and_gradients(calls, name):
    make, expected = MODELS[name]
    torch.manual_seed(0)
    model = make().double().train()
    x = random(2, 6, 16, seed=1)
    wanted = results_of(copy.deepcopy(model), lambda one: one(x))
    torch_sdpa.install()
    found = results_of(model, lambda one: one(x))
    assert len(calls) == expected
    assert len(found) == len(wanted) > 3
    for one, other in zip(found, wanted, strict=True):
        close(one, other, 1e-9)


def test_calls_that_torch_does_not_make_do_not_come_here(calls):
    torch_sdpa.install()
    attn, x = nn.MultiheadAttention(16, 4, batch_first=True).double(), random(2, 6, 16)
    attn(x, x, x, need_weights=True)
    with torch.no_grad():
        attn.eval()(x, x, x, need_weights=False)
    assert not calls
    attn(x, x, x, need_weights=False)
    assert len(calls) == 1


def unet():
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=12, attention_head_dim=4)
    given = {"sample": random(2, 4, 8, 8), "timestep": torch.tensor(3), "encoder_hidden_states": random(2, 7, 12),
             "encoder_attention_mask": torch.arange(7) < torch.tensor([[7], [4]])}
    return model, given


def flux():
    import diffusers

    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8])
    given = {"hidden_states": random(1, 16, 4), "encoder_hidden_states": random(1, 7, 32),
             "pooled_projections": random(1, 32), "timestep": torch.tensor([1.0]).double(),
             "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3)}
    return model, given


def pixart():
    import diffusers

    model = diffusers.PixArtTransformer2DModel(
        sample_size=4, num_layers=1, patch_size=2, attention_head_dim=8, num_attention_heads=2, in_channels=4,
        cross_attention_dim=16, caption_channels=12, out_channels=8, norm_num_groups=1, use_additional_conditions=False)
    given = {"hidden_states": random(2, 4, 4, 4), "timestep": torch.tensor([3, 5]),
             "encoder_hidden_states": random(2, 7, 12), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
             "encoder_attention_mask": torch.arange(7) < torch.tensor([[7], [4]])}
    return model, given


# Diffusers' imports of torch's and of other packages' modules warn.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("make", "expected"), [(unet, 8), (flux, 2), (pixart, 2)])
def test_a_model_of_diffusers_gives_the_same_results_and_gradients(calls, make, expected):
    pytest.importorskip("diffusers", reason="Diffusers is not installed: there is no model to ask")
    torch.manual_seed(0)
    model, given = make()
    model = model.double()
    wanted = results_of(model, lambda one: one(**given).sample)
    wanted = [tensor.clone() for tensor in wanted]
    torch_sdpa.install()
    found = results_of(model, lambda one: one(**given).sample)
    assert len(calls) == expected
    for one, other in zip(found, wanted, strict=True):
        assert math.isfinite(one.sum())
        close(one, other, 1e-8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_backend_of_diffusers_that_is_one_of_torchs_stays_torchs(calls):
    pytest.importorskip("diffusers", reason="Diffusers is not installed: it has no backend in force")
    from diffusers.models import attention_dispatch as dispatch

    torch_sdpa.install()
    q = random(2, 5, 4, 8)
    dispatch.dispatch_attention_fn(q, q, q)
    assert len(calls) == 1
    with dispatch.attention_backend("_native_math"), pytest.warns(RuntimeWarning, match="sdpa_kernel"):
        dispatch.dispatch_attention_fn(q, q, q)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_sdpa_comes_here_with_padding(calls):
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed: there is no model to ask")
    config = transformers.LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").double()
    ids, padding = torch.randint(1, 31, (2, 6)), torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])

    def run(one):
        return one(ids, attention_mask=padding).logits * padding[..., None]

    wanted = [tensor.clone() for tensor in results_of(model, run)]
    torch_sdpa.install()
    found = results_of(model, run)
    assert len(calls) == 2
    for one, other in zip(found, wanted, strict=True):
        close(one, other, 1e-9)
