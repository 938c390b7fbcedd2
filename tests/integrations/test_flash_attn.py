"""flash-attn's functions: its conventions, written out densely in float64, forward and gradients."""

import pytest
import torch

from integrations.calls import CU_K, CU_Q, SLOPES, handed, signature, tensors
from integrations.dense import alibi, bottom_right, close, dense
from tilewise import InvalidInput, UnsupportedProblem, use_backend
from tilewise.integrations import flash_attn as face
from tilewise.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

INF = float("inf")
_SAME = ("dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
         "deterministic=False, return_attn_probs=False")
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
# As flash-attn 2.8 has them.
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {_SAME}",
    "flash_attn_kvpacked_func": f"q, kv, {_SAME}",
    "flash_attn_qkvpacked_func": f"qkv, {_SAME}",
    "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, {_SAME}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_LENGTHS}, {_SAME}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_SAME}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_flash_attns(name):
    assert signature(getattr(face, name)) == SIGNATURES[name]


def heads_first(*given):
    return [tensor.transpose(1, 2) for tensor in given]


# flash-attn's options; what they mean: the window with -1 as no bound, and the other terms.
OPTIONS = {
    "none": ({}, (-1, -1), {}),
    "causal": ({"causal": True}, (-1, 0), {}),
    "window": ({"window_size": (2, 1)}, (2, 1), {}),
    "window_of_one_side": ({"window_size": (3, -1)}, (3, -1), {}),
    "window_of_zero": ({"window_size": (0, 0)}, (0, 0), {}),
    "causal_window_whose_right_side_counts_not": ({"causal": True, "window_size": (2, 5)}, (2, 0), {}),
    "scale": ({"softmax_scale": 0.7}, (-1, -1), {"scale": 0.7}),
    "softcap": ({"softcap": 1.5, "causal": True}, (-1, 0), {"softcap": 1.5}),
    "alibi": ({"alibi_slopes": SLOPES[0]}, (-1, -1), {"slopes": SLOPES[0]}),
    "alibi_of_a_batch": ({"alibi_slopes": SLOPES, "causal": True}, (-1, 0), {"slopes": SLOPES}),
}


def expected(q, k, v, bounds, terms):
    """Compute the dense result of heads-first tensors."""
    sq, sk = q.shape[-2], k.shape[-2]
    terms = dict(terms)
    slopes = terms.pop("slopes", None)
    bias = None if slopes is None else alibi(slopes, sq, sk)
    return dense(q, k, v, bottom_right(sq, sk, *bounds), bias=bias, **terms)


@pytest.mark.parametrize(("sq", "sk"), [(5, 5), (4, 9), (9, 4)], ids=["square", "more_keys", "more_queries"])
@pytest.mark.parametrize("name", OPTIONS)
def test_out_lse_and_gradients_are_those_of_the_formula(name, sq, sk):
    options, bounds, terms = OPTIONS[name]
    q, k, v, dout = tensors(sq, sk)
    out, lse, _ = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    wanted, wanted_lse = expected(*heads_first(q, k, v), bounds, terms)
    close(out, wanted.transpose(1, 2))
    close(lse, wanted_lse.masked_fill(wanted_lse == -INF, INF))
    seen, weights = wanted_lse > -INF, torch.linspace(-1, 1, sq)
    found = torch.autograd.grad((out * dout).sum() + (lse * weights)[seen].sum(), (q, k, v))
    right = torch.autograd.grad((wanted.transpose(1, 2) * dout).sum() + (wanted_lse * weights)[seen].sum(), (q, k, v))
    for one, other in zip(found, right, strict=True):
        close(one, other.double())
    close(flash_attn_func(q, k, v, **options), wanted.transpose(1, 2))


def test_a_query_without_keys_gives_zero_plus_infinity_and_no_gradient():
    q, k, v, _ = tensors(6, 2)
    out, lse, probs = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert lse.shape == (2, 4, 6)
    assert lse.dtype is torch.float32
    assert (lse[..., :4] == INF).all()
    assert lse[..., 4:].isfinite().all()
    assert (out[:, :4] == 0).all()
    assert (torch.autograd.grad(out.sum(), q)[0][:, :4] == 0).all()
    assert probs.numel() == 0


def test_no_keys_at_all_give_zero_and_plus_infinity():
    q, k, v, _ = tensors(3, 0)
    out, lse, probs = flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    assert (out == 0).all()
    assert (lse == INF).all()
    assert (probs == 0).all()


def test_slopes_have_a_gradient():
    q, k, v, dout = tensors(5, 7)
    slopes = SLOPES.clone().requires_grad_()
    out = flash_attn_func(q, k, v, alibi_slopes=slopes)
    wanted, _ = expected(*heads_first(q, k, v), (-1, -1), {"slopes": slopes})
    close(torch.autograd.grad(out, slopes, dout)[0],
          torch.autograd.grad(wanted.transpose(1, 2), slopes, dout.double())[0].double())


@pytest.mark.parametrize("causal", [False, True])
def test_packed_tensors_give_what_their_parts_give(causal):
    q, k, v, dout = tensors(5, 5, hk=4)
    out = flash_attn_func(q, k, v, causal=causal)
    wanted = torch.autograd.grad(out, (q, k, v), dout)
    qkv, kv = (torch.stack(parts, 2).detach().requires_grad_() for parts in ((q, k, v), (k, v)))
    of_qkv, of_kv = flash_attn_qkvpacked_func(qkv, causal=causal), flash_attn_kvpacked_func(q, kv, causal=causal)
    close(of_qkv, out.double())
    close(of_kv, out.double())
    close(torch.autograd.grad(of_qkv, qkv, dout)[0], torch.stack(wanted, 2).double())
    close(torch.autograd.grad(of_kv, kv, dout)[0], torch.stack(wanted[1:], 2).double())


def test_packed_tensors_are_not_copied():
    qkv, kv, q = torch.randn(2, 5, 3, 4, 8), torch.randn(2, 5, 2, 4, 8), torch.randn(2, 5, 4, 8)
    parts = [tensor.data_ptr() for tensor in qkv.unbind(2)]
    assert [t.data_ptr() for t in handed(lambda: flash_attn_qkvpacked_func(qkv))] == parts
    parts = [tensor.data_ptr() for tensor in (q, *kv.unbind(2))]
    assert [t.data_ptr() for t in handed(lambda: flash_attn_kvpacked_func(q, kv))] == parts
    lengths = torch.tensor([0, 2, 5])
    parts = [tensor.data_ptr() for tensor in qkv[0].unbind(1)]
    assert [t.data_ptr() for t in handed(lambda: flash_attn_varlen_qkvpacked_func(qkv[0], lengths, 3))] == parts
    parts = [tensor.data_ptr() for tensor in (q[0], *kv[0].unbind(1))]
    assert [t.data_ptr() for t in handed(lambda: flash_attn_varlen_kvpacked_func(
        q[0], kv[0], lengths, lengths, 3, 3))] == parts


def of_each_sequence(q, k, v, bounds, terms):
    """Compute the dense result of (total, h, d) tensors, sequence by sequence: out (total, h, d), lse (h, total)."""
    outs, lses = [], []
    for n, (a, b, c, d) in enumerate(zip(CU_Q[:-1], CU_Q[1:], CU_K[:-1], CU_K[1:], strict=True)):
        slopes = terms.get("slopes")
        own = terms if slopes is None or slopes.dim() == 1 else {"slopes": slopes[n]}
        out, lse = expected(*(t.transpose(0, 1) for t in (q[a:b], k[c:d], v[c:d])), bounds, own)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, -1)


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences_are_attended_each_by_itself(name):
    options, bounds, terms = OPTIONS[name]
    if terms.get("slopes") is SLOPES:
        slopes = torch.cat([SLOPES, SLOPES[:1]])
        options, terms = options | {"alibi_slopes": slopes}, {"slopes": slopes}
    q, k, v, dout = (tensor[0].detach().requires_grad_() for tensor in tensors(9, 8))
    out, lse, probs = flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 6, 5, **options, return_attn_probs=True)
    wanted, wanted_lse = of_each_sequence(q, k, v, bounds, terms)
    close(out, wanted)
    assert lse.shape == (4, 9)
    close(lse, wanted_lse.masked_fill(wanted_lse == -INF, INF))
    assert probs.numel() == 0
    for one, other in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(
            wanted, (q, k, v), dout.double()), strict=True):
        close(one, other.double())
    close(flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 6, 5, **options), wanted)


def test_packed_sequences_of_packed_tensors():
    q, k, v, _ = (tensor[0].detach() for tensor in tensors(9, 9, hk=4))
    wanted = flash_attn_varlen_func(q, k, v, CU_Q, CU_Q, 6, 6, causal=True)
    close(flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 1), CU_Q, 6, causal=True), wanted.double())
    close(flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), CU_Q, CU_Q, 6, 6, causal=True), wanted.double())


def test_dropout_is_repeated_by_torchs_seed():
    q, k, v, _ = tensors(40, 40)

    def drop(seed, **more):
        torch.manual_seed(seed)
        return flash_attn_func(q, k, v, 0.25, **more)

    assert torch.equal(drop(1), drop(1))
    assert not torch.equal(drop(1), drop(2))
    assert torch.equal(drop(1), drop(1, return_attn_probs=True)[0])


def factors(probs):
    """Read dropout's factors off signed probabilities; what is 0 there takes part in nothing."""
    return (probs > 0) / 0.75


def test_signed_probabilities_tell_what_was_dropped():
    q, k, v, dout = tensors(33, 40)
    out, _, probs = flash_attn_func(q, k, v, 0.25, causal=True, return_attn_probs=True)
    assert probs.shape == (2, 4, 128, 128)
    assert probs.dtype is q.dtype
    probs, outside = probs[:, :, :33, :40], (probs[:, :, 33:], probs[:, :, :, 40:])
    assert not any(part.any() for part in outside)
    firsts = heads_first(q, k, v)
    visible = bottom_right(33, 40, -1, 0)
    # With unit vectors as values, out is the probabilities.
    units = torch.eye(40).expand(2, 2, 40, 40)
    close(probs.abs(), dense(*firsts[:2], units, visible)[0])
    assert not probs.requires_grad
    dropped = (probs < 0)[visible.expand_as(probs)].double().mean()
    assert 0.2 < dropped < 0.3  # of 8112 pairs: within ten standard deviations
    wanted = dense(*firsts, visible, keep=factors(probs))[0].transpose(1, 2)
    close(out, wanted)
    for one, other in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(
            wanted, (q, k, v), dout.double()), strict=True):
        close(one, other.double())


def test_signed_probabilities_of_packed_sequences():
    q, k, v, _ = (tensor[0].detach() for tensor in tensors(10, 8))  # the tenth query is behind the last sequence
    out, _, probs = flash_attn_varlen_func(q, k, v, CU_Q, CU_K, torch.tensor(6), torch.tensor(5), 0.25,
                                           return_attn_probs=True)
    assert probs.shape == (3, 4, 128, 128)
    assert (out[9:] == 0).all()
    for own, a, b, c, d in zip(probs, CU_Q[:-1], CU_Q[1:], CU_K[:-1], CU_K[1:], strict=True):
        assert not own[:, b - a:].any()
        assert not own[:, :, d - c:].any()
        firsts = [t.transpose(0, 1) for t in (q[a:b], k[c:d], v[c:d])]
        close(out[a:b].transpose(0, 1), dense(*firsts, keep=factors(own[:, :b - a, :d - c]))[0])


def test_deterministic_is_demanded_by_the_call_or_by_torch():
    q, k, v, _ = tensors(5, 5)
    with use_backend("torch"):  # which refuses it
        flash_attn_func(q, k, v)
        with pytest.raises(UnsupportedProblem, match="a deterministic result was asked for"):
            flash_attn_func(q, k, v, deterministic=True)
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(UnsupportedProblem, match="a deterministic result was asked for"):
                flash_attn_func(q, k, v)
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("function", "given", "message"), [
    (flash_attn_qkvpacked_func, [torch.zeros(1, 5, 2, 4, 8)],
     "qkv has shape (1, 5, 2, 4, 8); allowed is (b, s, 3, h, d)."),
    (flash_attn_kvpacked_func, [torch.zeros(1, 5, 4, 8), torch.zeros(1, 5, 4, 8)],
     "kv has shape (1, 5, 4, 8); allowed is (b, sk, 2, hk, d)."),
    (flash_attn_varlen_qkvpacked_func, [torch.zeros(9, 3, 8), CU_Q, 6],
     "qkv has shape (9, 3, 8); allowed is (total, 3, h, d)."),
    (flash_attn_varlen_kvpacked_func, [torch.zeros(9, 4, 8), torch.zeros(8, 3, 2, 8), CU_Q, CU_K, 6, 5],
     "kv has shape (8, 3, 2, 8); allowed is (total_k, 2, hk, d)."),
])
def test_packed_projections_of_another_shape_are_refused_by_name(function, given, message):
    """Python said of an assignment that it got too many or too few."""
    with pytest.raises(InvalidInput) as caught:
        function(*given)
    assert str(caught.value) == message


def test_unknown_arguments_raise():
    q, k, v, _ = tensors(5, 5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'page_table'"):
        flash_attn_func(q, k, v, page_table=None)


def test_a_block_table_raises():
    q, k, v, _ = (tensor[0].detach() for tensor in tensors(9, 8))
    with pytest.raises(UnsupportedProblem) as caught:
        flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 6, 5, block_table=torch.zeros(3, 1))
    assert str(caught.value) == ("block_table is given; allowed is None: of packed queries, caches in pages or padded "
                                 "on the left are not there yet. Pass keys and values packed, with cu_seqlens_k, or a "
                                 "batch of queries to flash_attn_with_kvcache.")


# Dynamo itself instantiates autograd Functions while it traces them.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# torch 2.11's compiler scripts a function of its own with a decorator that it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_calls_compile_into_one_graph():
    torch._dynamo.reset()
    q, k, v, _ = tensors(5, 7)
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    close(compiled(q, k, v, causal=True, window_size=(2, -1)),
          flash_attn_func(q, k, v, causal=True, window_size=(2, -1)).double())
