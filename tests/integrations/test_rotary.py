"""flash-attn's ``layers.rotary``: against the formula in float64, by multiplication of complex numbers."""

import inspect

import pytest
import torch

from integrations.calls import signature
from tilewise import InvalidInput
from tilewise.integrations import rotary
from tilewise.integrations.flash_attn import flash_attn_with_kvcache

B, S, H, D, POSITIONS = 2, 7, 3, 16, 24
CU = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
# As flash-attn 2.8 has them.
SIGNATURES = {
    "apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
                        "max_seqlen=None",
    "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
    "apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
                             "num_heads_q=None",
    "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    "rotate_half": "x, interleaved=False",
    "RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
}


def drawn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tables(rotary_dim=12, dtype=torch.float64, seed=3):
    """Angles at random, so that a row that is mistaken for another one shows."""
    angles = 6 * drawn(POSITIONS, rotary_dim // 2, seed=seed)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x, cos, sin, positions, interleaved):
    """Rotate x, (..., rows, h, d), in float64; positions: (..., rows)."""
    x, half = x.double(), cos.shape[-1]
    first, second = (x[..., :2 * half:2], x[..., 1:2 * half:2]) if interleaved else (x[..., :half],
                                                                                     x[..., half:2 * half])
    factor = torch.complex(cos.double(), sin.double())[positions].unsqueeze(-2)
    product = torch.complex(first, second) * factor
    result = x.clone()
    if interleaved:
        result[..., :2 * half:2], result[..., 1:2 * half:2] = product.real, product.imag
    else:
        result[..., :half], result[..., half:2 * half] = product.real, product.imag
    return result


def exactly(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_their_order_and_their_defaults_are_flash_attns(name):
    assert signature(getattr(rotary, name)) == SIGNATURES[name]
    assert rotary.apply_rotary_emb_func is rotary.apply_rotary_emb


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 5, torch.tensor([4, 9]), torch.tensor([17, 0], dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 12, 16])
def test_result_and_gradient_are_those_of_the_formula(rotary_dim, interleaved, offsets, inplace):
    x, dout = drawn(B, S, H, D).requires_grad_(), drawn(B, S, H, D, seed=1)
    cos, sin = tables(rotary_dim)
    positions = (offsets[:, None] if isinstance(offsets, torch.Tensor) else offsets) + torch.arange(S)
    given = x * 1
    found = rotary.apply_rotary_emb(given, cos, sin, interleaved, inplace, offsets)
    wanted = turned(x, cos, sin, positions.expand(B, S), interleaved)
    exactly(found, wanted)
    exactly(*torch.autograd.grad(found, x, dout), *torch.autograd.grad(wanted, x, dout))
    assert (found is given) == inplace
    assert torch.equal(given, x) != inplace


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 5, torch.tensor([4, 2, 9])], ids=str)
def test_packed_rows_turn_by_their_place_in_their_sequence(offsets, inplace):
    x, dout = drawn(11, H, D).requires_grad_(), drawn(11, H, D, seed=1)
    cos, sin = tables()
    begins = [4, 2, 9] if isinstance(offsets, torch.Tensor) else [offsets] * 3
    positions = torch.tensor([begins[0] + row for row in range(3)] + [begins[2] + row for row in range(6)])
    found = rotary.apply_rotary_emb(x * 1, cos, sin, inplace=inplace, seqlen_offsets=offsets, cu_seqlens=CU,
                                    max_seqlen=6)
    # Two rows lie behind the last sequence: they stay.
    wanted = torch.cat((turned(x[:9], cos, sin, positions, False), x[9:]))
    exactly(found, wanted)
    exactly(*torch.autograd.grad(found, x, dout), *torch.autograd.grad(wanted, x, dout))


def test_tables_have_a_gradient():
    x, (cos, sin), dout = drawn(B, S, H, D), tables(), drawn(B, S, H, D, seed=1)
    cos.requires_grad_(), sin.requires_grad_()
    for offsets in (3, torch.tensor([3, 3])):
        found = rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
        wanted = turned(x, cos, sin, 3 + torch.arange(S).expand(B, S), False)
        for one, other in zip(torch.autograd.grad(found, (cos, sin), dout),
                              torch.autograd.grad(wanted, (cos, sin), dout), strict=True):
            exactly(one, other)


def test_what_autograd_would_not_see_in_place_is_refused_by_torch():
    x, (cos, sin) = drawn(B, S, 3, H, D).requires_grad_(), tables()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        rotary.apply_rotary_emb_qkv_(x, cos, sin)
    with pytest.raises(RuntimeError, match="function that returns multiple views"):
        rotary.apply_rotary_emb((x * 1).unbind(2)[0], cos, sin, inplace=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_is_computed_in_float32_and_rounded_once(dtype):
    x, (cos, sin) = drawn(B, S, H, D, dtype=dtype), tables(dtype=dtype)
    found = rotary.apply_rotary_emb(x, cos, sin)
    assert found.dtype is dtype
    wanted = turned(x, cos, sin, torch.arange(S).expand(B, S), False)
    # Half a unit in the last place, and what float32 errs in a sum of two products.
    allowed = (0.5 + 2**-8) * torch.finfo(dtype).eps * wanted.abs() + 2**-22 if dtype != torch.float32 else 1e-6
    assert ((found.double() - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("tables_of_keys", [False, True])
@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (6, 0)], ids=str)
def test_queries_and_keys_of_a_packed_projection_turn_in_place(heads, tables_of_keys):
    (hq, hk), of_queries, of_keys = heads, tables(), tables(seed=4) if tables_of_keys else tables()
    x = drawn(B, S, hq + 2 * hk, D).requires_grad_()
    positions = 2 + torch.arange(S).expand(B, S)
    wanted = torch.cat((turned(x[:, :, :hq], *of_queries, positions, True),
                        turned(x[:, :, hq:hq + hk], *of_keys, positions, True), x[:, :, hq + hk:]), 2)
    layouts = [(x * 1, hq)] + ([((x * 1).unflatten(2, (3, hq)), None)] if hq == hk else [])
    for given, num_heads_q in layouts:
        found = rotary.apply_rotary_emb_qkv_(given, *of_queries, *(of_keys if tables_of_keys else ()),
                                             interleaved=True, seqlen_offsets=2, num_heads_q=num_heads_q)
        assert found is given
        exactly(found.reshape(wanted.shape), wanted)
        exactly(*torch.autograd.grad(found.square().sum(), x, retain_graph=True),
                *torch.autograd.grad(wanted.square().sum(), x, retain_graph=True))


def test_keys_turn_in_place_and_values_stay():
    x, (cos, sin) = drawn(B, S, 2, H, D).requires_grad_(), tables()
    given = x * 1
    assert rotary.apply_rotary_emb_kv_(given, cos, sin, seqlen_offsets=torch.tensor([1, 8])) is given
    positions = torch.tensor([[1], [8]]) + torch.arange(S)
    wanted = torch.stack((turned(x[:, :, 0], cos, sin, positions, False), x[:, :, 1]), 2)
    exactly(given, wanted)
    exactly(*torch.autograd.grad(given.square().sum(), x), *torch.autograd.grad(wanted.square().sum(), x))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_function_on_tables_of_its_rows_is_the_formula(interleaved):
    x, (cos, sin) = drawn(B, S, H, D), tables()
    wanted = turned(x, cos, sin, torch.arange(S).expand(B, S), interleaved)
    exactly(rotary.apply_rotary_emb_torch(x, cos[:S], sin[:S], interleaved), wanted)
    exactly(rotary.apply_rotary_emb_torch(x, cos[:S].expand(B, S, -1), sin[:S].expand(B, S, -1), interleaved), wanted)
    # rotate_half is the rotation by a right angle.
    right_angle = torch.zeros(S, D // 2, dtype=x.dtype), torch.ones(S, D // 2, dtype=x.dtype)
    exactly(rotary.rotate_half(x, interleaved), rotary.apply_rotary_emb_torch(x, *right_angle, interleaved))


def angles(dim, base, positions):
    return positions[..., None] * base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_module_turns_by_the_frequencies_of_its_base(interleaved):
    module = rotary.RotaryEmbedding(12, base=500.0, interleaved=interleaved)
    assert list(module.state_dict()) == []
    for length, offset in ((S, 0), (S, 30), (3, 0)):  # the tables grow, and are cut
        qkv = drawn(B, length, 3, H, D)
        theta = angles(12, 500.0, torch.arange(40.0, dtype=torch.float64))
        wanted = turned(qkv[:, :, :2].flatten(2, 3), theta.cos(), theta.sin(),
                        offset + torch.arange(length).expand(B, length), interleaved)
        assert module(qkv, seqlen_offset=offset) is qkv
        torch.testing.assert_close(qkv[:, :, :2].flatten(2, 3), wanted, rtol=1e-5, atol=1e-5)


def test_the_module_turns_queries_and_keys_apart_by_positions_that_are_data():
    module, (q, kv) = rotary.RotaryEmbedding(D), (drawn(B, 1, H, D), drawn(B, 1, 2, H, D))
    theta = angles(D, 1e4, torch.arange(20.0))
    wanted = [turned(x, theta.cos(), theta.sin(), torch.tensor([[3], [19]]), False) for x in (q, kv[:, :, 0])]
    values = kv[:, :, 1].clone()
    turned_q, turned_kv = module(q, kv, torch.tensor([3, 19]), max_seqlen=20)
    assert turned_q is q
    assert turned_kv is kv
    for one, other in zip((q, kv[:, :, 0]), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert torch.equal(kv[:, :, 1], values)


def test_xpos_scales_queries_and_keys_inversely():
    """A product of query and key decays with their distance: by the scales' ratio to the power of distance / base."""
    module, base = rotary.RotaryEmbedding(4, scale_base=8.0), 8.0
    q = torch.tensor([1.0, 0.5, -2.0, 3.0], dtype=torch.float64).expand(1, 20, 1, 4).clone()
    kv = torch.stack((q.flip(-1), q), 2)
    key = kv[0, 0, 0, 0].clone()
    theta = angles(4, 1e4, torch.arange(20.0))
    plain = turned(q[:, :1], theta.cos(), theta.sin(), torch.tensor([[12]]), False)[0, 0, 0]
    q, kv = module(q, kv)
    ratios = (torch.arange(0, 4, 2, dtype=torch.float64) + 0.4 * 4) / (1.4 * 4)
    scaled = (plain * key).view(2, 2).sum(0) * ratios ** (12 / base)
    torch.testing.assert_close((q[0, 15, 0] * kv[0, 3, 0, 0]).sum(), scaled.sum(), rtol=1e-4, atol=1e-4)


def test_tables_are_exact_in_a_module_that_was_cast():
    module = rotary.RotaryEmbedding(D).bfloat16()
    module._update_cos_sin_cache(3000, dtype=torch.float32)
    theta = angles(D, 1e4, torch.arange(3000.0, dtype=torch.float64))
    torch.testing.assert_close(module._cos_cached.double(), theta.cos(), rtol=0, atol=1e-3)
    assert module.inv_freq.dtype is torch.bfloat16


def test_tables_of_inference_can_be_trained_with():
    module, qkv = rotary.RotaryEmbedding(D), drawn(B, S, 3, H, D, dtype=torch.float32)
    with torch.inference_mode():
        module(qkv.clone())
    x = qkv.clone().requires_grad_()
    module(x * 1).sum().backward()
    assert x.grad.isfinite().all()


def test_tables_serve_the_cache_that_turns_keys_itself():
    module, (q, k, v) = rotary.RotaryEmbedding(8), (drawn(B, 1, H, 8, dtype=torch.float32, seed=s) for s in range(3))
    caches = [drawn(B, 6, H, 8, dtype=torch.float32, seed=s) for s in (4, 5)]
    module._update_cos_sin_cache(6, q.device, q.dtype)
    lengths = torch.tensor([4, 2], dtype=torch.int32)
    found = flash_attn_with_kvcache(q, *(cache.clone() for cache in caches), k, v, module._cos_cached,
                                    module._sin_cached, cache_seqlens=lengths, causal=True, rotary_interleaved=False)
    kv = torch.stack((k, v), 2)
    module(q, kv, lengths, max_seqlen=6)
    wanted = flash_attn_with_kvcache(q, *caches, kv[:, :, 0], kv[:, :, 1], cache_seqlens=lengths, causal=True)
    torch.testing.assert_close(found, wanted)


def test_it_compiles_in_one_graph():
    module, qkv = rotary.RotaryEmbedding(D), drawn(B, S, 3, H, D, dtype=torch.float32)
    compiled = torch.compile(lambda x: module(x * 1, seqlen_offset=2), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(qkv), module(qkv * 1, seqlen_offset=2))


COS, SIN = tables()
OFFSETS = torch.tensor([1, 2, 3])
REFUSED = {
    "rows_without_lengths": (lambda: rotary.apply_rotary_emb(drawn(S, H, D), COS, SIN), (
        "x has shape (7, 3, 16) and cu_seqlens is None; allowed is (b, s, h, d) without it, and (total, h, d) with "
        "it.")),
    "a_batch_with_lengths": (lambda: rotary.apply_rotary_emb(drawn(B, S, H, D), COS, SIN, cu_seqlens=CU), (
        "x has shape (2, 7, 3, 16) and cu_seqlens is given; allowed is (b, s, h, d) without it, and (total, h, d) with "
        "it.")),
    "tables_of_a_batch": (lambda: rotary.apply_rotary_emb(drawn(B, S, H, D), COS[None], SIN[None]), (
        "cos has shape (1, 24, 6); allowed is (positions, rotary_dim / 2).")),
    "tables_that_are_too_wide": (lambda: rotary.apply_rotary_emb(drawn(B, S, H, 8), COS, SIN), (
        "cos has shape (24, 6), sin (24, 6) and x (2, 7, 3, 8); allowed are equal shapes of cos and sin, whose last "
        "dim is at most half of x's.")),
    "tables_that_are_too_short": (lambda: rotary.apply_rotary_emb(drawn(B, S, H, D), COS, SIN, seqlen_offsets=18), (
        "seqlen_offsets is 18, x has 7 positions and cos 24 rows; allowed is an offset >= 0, and a row for each "
        "position from it on. Make longer tables.")),
    "packed_tables_too_short": (lambda: rotary.apply_rotary_emb(drawn(S, H, D), COS, SIN, cu_seqlens=CU, max_seqlen=25),
                                "seqlen_offsets is 0, max_seqlen has 25 positions and cos 24 rows; allowed is an "
                                "offset >= 0, and a row for each position from it on. Make longer tables."),
    "offsets_of_another_batch": (lambda: rotary.apply_rotary_emb(drawn(B, S, H, D), COS, SIN, seqlen_offsets=OFFSETS), (
        "seqlen_offsets has shape (3,) and dtype torch.int64; allowed is an integer, or (2,), one of each sequence, "
        "int32 or int64.")),
    "a_projection_without_heads": (lambda: rotary.apply_rotary_emb_qkv_(drawn(B, S, H, D), COS, SIN), (
        "qkv has shape (2, 7, 3, 16) and num_heads_q is None; allowed is (b, s, 3, h, d), or (b, s, hq + 2 hk, d) with "
        "num_heads_q.")),
    "heads_that_leave_no_pair": (lambda: rotary.apply_rotary_emb_qkv_(drawn(B, S, H, D), COS, SIN, num_heads_q=2), (
        "qkv has shape (2, 7, 3, 16) and num_heads_q is 2; allowed is (b, s, 3, h, d), or (b, s, hq + 2 hk, d) with "
        "num_heads_q.")),
    "keys_without_values": (lambda: rotary.apply_rotary_emb_kv_(drawn(B, S, H, D), COS, SIN), (
        "kv has shape (2, 7, 3, 16); allowed is (b, s, 2, h, d).")),
    "tables_of_other_rows": (lambda: rotary.apply_rotary_emb_torch(drawn(B, S, H, D), COS, SIN), (
        "cos has shape (24, 6) and x (2, 7, 3, 16); allowed is a row for each position, (s, rotary_dim / 2) or "
        "(b, s, rotary_dim / 2).")),
    "an_odd_dim": (lambda: rotary.RotaryEmbedding(7), "dim is 7; allowed is an even number of dims, 2 or more."),
    "positions_nobody_knows": (lambda: rotary.RotaryEmbedding(D)(drawn(B, S, 3, H, D), seqlen_offset=OFFSETS[:2]), (
        "seqlen_offset is a tensor and max_seqlen is None: how long the tables must be is not known without waiting "
        "for the device. Pass max_seqlen, more than the largest position.")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_a_sentence(name):
    call, message = REFUSED[name]
    with pytest.raises(InvalidInput) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("offsets", [torch.tensor([0, 18]), torch.tensor([-1, 0])], ids=str)
def test_positions_that_no_row_has_are_an_error_of_the_look_up(offsets):
    with pytest.raises(IndexError):
        rotary.apply_rotary_emb(drawn(B, S, H, D), COS, SIN, seqlen_offsets=offsets)


def test_every_function_says_what_it_does():
    assert [name for name in rotary.__all__ if not inspect.getdoc(getattr(rotary, name))] == []
