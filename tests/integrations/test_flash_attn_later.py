"""flash-attn 3's and 4's functions: signatures as recorded, results and gradients against the dense formula."""

import sys

import pytest
import torch

from integrations.calls import CU_K, CU_Q, signature, tensors
from integrations.dense import bottom_right, close, dense
from tilewise import InvalidInput, TilewiseError, UnsupportedProblem
from tilewise.integrations import flash_attn, flash_family
from tilewise.integrations import flash_attn_cute as fa4
from tilewise.integrations import flash_attn_interface as fa3

_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
_FA3 = (f"{_DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, sm_margin=0, return_attn_probs=False")
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_FA4 = ("softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
        "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None")
# As flash-attn's main branch has them in November 2026.
SIGNATURES = {
    fa3.flash_attn_func: f"q, k, v, softmax_scale=None, causal=False, qv=None, {_FA3}",
    fa3.flash_attn_varlen_func: (f"q, k, v, {_LENGTHS}, seqused_q=None, seqused_k=None, softmax_scale=None, "
                                 f"causal=False, qv=None, {_FA3}"),
    fa3.flash_attn_qkvpacked_func: (f"qkv, softmax_scale=None, causal=False, {_DESCALES}, window_size=(-1, -1), "
                                    "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, "
                                    "sm_margin=0, return_attn_probs=False"),
    fa3.flash_attn_with_kvcache: (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {_DESCALES}, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
        "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"),
    fa3.flash_attn_combine: "out_partial, lse_partial, out=None, out_dtype=None",
    fa4.flash_attn_func: (f"q, k, v, qv=None, gather_kv_indices=None, {_FA4}, aux_tensors=None, aux_scalars=None, "
                          "block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False"),
    fa4.flash_attn_varlen_func: (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        f"min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, {_FA4}, "
        "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, "
        "seqlen_k_per_split=None, disable_scheduler_metadata=False"),
}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: f"{function.__module__[-9:]}.{function.__name__}")
def test_arguments_are_flash_attns(function):
    assert signature(function) == SIGNATURES[function]


def chunked(sq, sk, size):
    return (torch.arange(sq)[:, None] + sk - sq) // size == torch.arange(sk) // size


# Arguments of version 3, of version 4 (None: it has none of that), and what they mean.
CALLS = {
    "plain": ({}, {}, bottom_right(9, 12), {}),
    "causal": ({"causal": True}, {"causal": True}, bottom_right(9, 12, right=0), {}),
    "window": ({"window_size": (2, 1)}, {"window_size": (2, 1)}, bottom_right(9, 12, 2, 1), {}),
    "window_of_one_side": ({"window_size": (-1, 1)}, {"window_size": (None, 1)}, bottom_right(9, 12, -1, 1), {}),
    "causal_window": ({"causal": True, "window_size": (2, 5)}, {"causal": True, "window_size": (2, 5)},
                      bottom_right(9, 12, 2, 0), {}),
    "softcap_and_scale": ({"softcap": 1.5, "softmax_scale": 0.7}, {"softcap": 1.5, "softmax_scale": 0.7},
                          bottom_right(9, 12), {"softcap": 1.5, "scale": 0.7}),
    "chunks": ({"attention_chunk": 5, "causal": True}, None, bottom_right(9, 12, right=0) & chunked(9, 12, 5), {}),
    "no_window_where_the_sum_is_negative": (None, {"window_size": (-1, -1)}, bottom_right(9, 12), {}),
    "causal_beside_no_window": (None, {"causal": True, "window_size": (-1, -1)}, bottom_right(9, 12, right=0), {}),
}


@pytest.mark.parametrize(("name", "version"), [(name, version) for name, call in CALLS.items() for version in (3, 4)
                                               if call[version - 3] is not None])
def test_results_lse_and_gradients(name, version):
    options, visible, terms = CALLS[name][version - 3], *CALLS[name][2:]
    *leaves, dout = tensors(9, 12)
    asked = {"return_attn_probs": True} if version == 3 else {"return_lse": True}
    out, lse = (fa3 if version == 3 else fa4).flash_attn_func(*leaves, **options, **asked)
    wanted, wanted_lse = dense(*(leaf.transpose(1, 2) for leaf in leaves), visible, **terms)
    close(out, wanted.transpose(1, 2))
    close(lse, wanted_lse)
    found = torch.autograd.grad(out, leaves, dout)
    for one, other in zip(found, torch.autograd.grad(wanted.transpose(1, 2), leaves, dout.double()), strict=True):
        close(one, other.double())


@pytest.mark.parametrize("face", [fa3, fa4])
def test_queries_of_values_are_added_to_the_scores(face):
    q, k, v, qv = tensors(9, 12)
    out = face.flash_attn_func(q, k, v, qv=qv)
    wanted, _ = dense(*(t.transpose(1, 2) for t in (torch.cat((q, qv), -1), torch.cat((k, v), -1), v)), scale=1 / 4)
    close(out if face is fa3 else out[0], wanted.transpose(1, 2))


def test_a_sink_takes_its_share_and_has_a_gradient():
    q, k, v, _ = tensors(9, 12)
    sinks = SINKS.clone().requires_grad_()
    out, lse = fa4.flash_attn_func(q, k, v, learnable_sink=sinks)
    scores = dense(*(t.transpose(1, 2) for t in (q, k, v)))[1]
    close(lse, torch.logaddexp(scores, SINKS[:, None].double()))
    out.sum().backward()
    assert sinks.grad.abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_sink_in_bfloat16_goes_with_every_dtype(dtype):
    """flash-attn 4 takes no other, beside float16 too, where it was refused."""
    q, k, v = (tensor.detach().to(dtype) for tensor in tensors(9, 12)[:3])
    sinks = SINKS.bfloat16().requires_grad_()
    out, lse = fa4.flash_attn_func(q, k, v, learnable_sink=sinks)
    wanted, wanted_lse = fa4.flash_attn_func(q, k, v, learnable_sink=sinks.detach().to(dtype), return_lse=True)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)
    out.sum().backward()
    assert sinks.grad.dtype is torch.bfloat16
    with pytest.raises(InvalidInput, match=r"^learnable_sink has dtype torch\.int32; allowed (is|are) torch"):
        fa4.flash_attn_func(q, k, v, learnable_sink=SINKS.int())


@pytest.mark.parametrize("face", [fa3, fa4])
def test_packed_sequences_of_which_a_part_is_used(face):
    q, k, v = (tensor[0].detach() for tensor in tensors(9, 8)[:3])
    used = torch.tensor([5, 1, 1], dtype=torch.int32)
    lengths = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 6, "max_seqlen_k": 5, "seqused_k": used}
    asked = {"return_attn_probs": True} if face is fa3 else {"return_lse": True}
    out, lse = face.flash_attn_varlen_func(q, k, v, **lengths, causal=True, **asked)
    for n, count in enumerate(used.tolist()):
        rows, keys = slice(CU_Q[n], CU_Q[n + 1]), slice(CU_K[n], CU_K[n] + count)
        wanted, wanted_lse = dense(*(t.transpose(0, 1) for t in (q[rows], k[keys], v[keys])),
                                   bottom_right(rows.stop - rows.start, count, right=0))
        close(out[rows].transpose(0, 1), wanted)
        close(lse[:, rows], wanted_lse)


def test_padded_sequences_go_without_cu_seqlens_in_version_4():
    q, k, v, _ = tensors(9, 12)
    out, _ = fa4.flash_attn_varlen_func(q, k, v, seqused_k=torch.tensor([12, 7]))
    close(out[1].transpose(0, 1), dense(q[1].transpose(0, 1), k[1, :7].transpose(0, 1), v[1, :7].transpose(0, 1))[0])
    with pytest.raises(InvalidInput, match="cu_seqlens_q is given and cu_seqlens_k is None; allowed are both"):
        fa4.flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens_q=CU_Q)


def test_version_4_returns_lse_where_it_is_asked_for_or_a_gradient_is():
    *given, _ = tensors(9, 12)
    assert fa4.flash_attn_func(*given)[1] is not None
    plain = [tensor.detach() for tensor in given]
    assert fa4.flash_attn_func(*plain)[1] is None
    assert fa4.flash_attn_func(*plain, return_lse=True)[1].shape == (2, 4, 9)


def test_version_3_makes_lse_where_it_is_asked_for_alone(monkeypatch):
    """In a compiled graph it had a gradient of zeros, which some backends have not."""
    asked = []
    for name in ("attend_batch", "attend_packed"):
        monkeypatch.setattr(flash_family, name, _noting(getattr(flash_family, name), asked))
    q, k, v, _ = tensors(9, 8)
    packed = (q[0], k[0], v[0], CU_Q, CU_K, 6, 5)
    for function, given in ((fa3.flash_attn_func, (q, k, v)), (fa3.flash_attn_varlen_func, packed)):
        assert torch.equal(function(*given), function(*given, return_attn_probs=True)[0])
    qkv = torch.stack((q, q, q), 2)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv),
                       fa3.flash_attn_qkvpacked_func(qkv, return_attn_probs=True)[0])
    assert asked == 3 * [(), ("lse",)]


def _noting(real, asked):
    def noting(*given, return_aux, **options):
        asked.append(return_aux)
        return real(*given, return_aux=return_aux, **options)
    return noting


def test_packed_projections():
    q, k, v, _ = tensors(9, 9, hk=4)
    wanted = fa3.flash_attn_func(q, k, v)
    close(fa3.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2)), wanted.double())
    few = tensors(9, 9)[:3]
    close(fa3.flash_attn_qkvpacked_func(torch.cat(few, 2), num_heads_q=4), fa3.flash_attn_func(*few).double())
    with pytest.raises(InvalidInput, match="qkv has 4 dims and num_heads_q is None; allowed are 5 dims"):
        fa3.flash_attn_qkvpacked_func(torch.cat(few, 2))


@pytest.mark.parametrize(("shape", "heads", "message"), [
    ((1, 9, 7, 8), 4, "num_heads_q is 4 and qkv has 7 heads; allowed is a number that leaves as many heads for k as "
                      "for v."),
    ((1, 9, 4, 8), 6, "num_heads_q is 6 and qkv has 4 heads; allowed is a number that leaves as many heads for k as "
                      "for v."),
    ((1, 9, 4, 8), -2, "num_heads_q is -2 and qkv has 4 heads; allowed is a number that leaves as many heads for k as "
                       "for v."),
    ((9, 4, 8), 2, "qkv has 3 dims and num_heads_q is 2; allowed are 5 dims (b, s, 3, h, d), or 4 dims (b, s, hq + 2 "
                   "hk, d) with num_heads_q."),
    ((1, 9, 2, 4, 8), None, "qkv has shape (1, 9, 2, 4, 8); allowed is (b, s, 3, h, d)."),
])
def test_packed_projections_that_cannot_be_parted_are_refused_by_name(shape, heads, message):
    """torch said it of its split, and Python of an assignment."""
    with pytest.raises(InvalidInput) as caught:
        fa3.flash_attn_qkvpacked_func(torch.zeros(shape), num_heads_q=heads)
    assert str(caught.value) == message


def test_parts_of_the_keys_are_combined():
    q, k, v = (tensor.detach() for tensor in tensors(9, 12)[:3])
    parts = [fa3.flash_attn_func(q, k[:, keys], v[:, keys], return_attn_probs=True)
             for keys in (slice(0, 3), slice(3, 8), slice(8, 12))]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    out, lse = fa3.flash_attn_combine(outs, lses)
    wanted, wanted_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    close(out, wanted.double())
    close(lse.transpose(1, 2), wanted_lse.double())
    assert fa3.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0].dtype is torch.bfloat16
    kept = torch.empty_like(out)
    assert fa3.flash_attn_combine(outs, lses, kept)[0] is kept
    assert torch.equal(kept, out)


def test_one_part_is_copied_and_none_is_refused():
    outs, lses = torch.randn(1, 2, 3, 4, 8), torch.randn(1, 2, 3, 4)
    out, lse = fa3.flash_attn_combine(outs, lses)
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])
    assert out.data_ptr() != outs.data_ptr()
    assert lse.data_ptr() != lses.data_ptr()
    with pytest.raises(InvalidInput, match=r"^out_partial has no parts; allowed is one or more\.$"):
        fa3.flash_attn_combine(outs[:0], lses[:0])


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_whose_shapes_do_not_belong_together_are_refused_by_name(parts):
    """Python said it of its zip, a single part's lse went unseen, and out was broadcast into."""
    outs, lses = torch.randn(parts, 2, 3, 4, 8), torch.randn(parts, 2, 3, 4)
    for name, given, wanted in (("lse_partial", (outs, lses.repeat(2, 1, 1, 1)), (parts, 2, 3, 4)),
                                ("lse_partial", (outs, lses.transpose(2, 3)), (parts, 2, 3, 4)),
                                ("out", (outs, lses, torch.zeros(5, 2, 3, 4, 8)), (2, 3, 4, 8))):
        with pytest.raises(InvalidInput) as caught:
            fa3.flash_attn_combine(*given)
        assert str(caught.value) == (f"{name} has shape {tuple(given[-1].shape)} and out_partial {tuple(outs.shape)}; "
                                     f"allowed is {wanted}.")


@pytest.mark.parametrize("window_size", [None, 3, (1, 2, 0), (None, None)])
@pytest.mark.parametrize("function", [flash_attn.flash_attn_func, fa3.flash_attn_func])
def test_a_window_that_is_no_pair_of_integers_is_refused_by_name(function, window_size):
    with pytest.raises(InvalidInput) as caught:
        function(*tensors(9, 8)[:3], window_size=window_size)
    assert str(caught.value) == (f"window_size is {window_size!r}; allowed are two integers (left, right), -1 for no "
                                 "bound.")


@pytest.mark.parametrize(("function", "name", "said"), [
    (fa3.flash_attn_func, "q_descale", "8-bit numbers are not there yet"),
    (fa4.flash_attn_func, "mask_mod", "it is written in CuTe"),
    (fa4.flash_attn_func, "gather_kv_indices", "caches in pages and gathered keys are not there yet"),
    (fa4.flash_attn_varlen_func, "page_table", "caches in pages and gathered keys are not there yet"),
])
def test_what_is_not_there_raises(function, name, said):
    with pytest.raises(UnsupportedProblem, match=f"{name} is given; allowed is None: {said}"):
        function(*tensors(9, 12)[:3], **{name: torch.ones(1)})


@pytest.fixture
def unknown(monkeypatch):
    """Whatever of flash-attn this process knows is unknown in the test, and back behind it."""
    before = dict(sys.modules)
    for name in before:
        if name.partition(".")[0] in ("flash_attn", "flash_attn_interface"):
            del sys.modules[name]
    yield
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in ("flash_attn", "flash_attn_interface"):
            del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("unknown")
def test_code_that_imports_them_runs_unchanged():
    for _ in range(2):
        fa3.install()
        fa4.install()
    scope = {}
    exec("from flash_attn_interface import flash_attn_func as three\n"
         "from flash_attn.cute import flash_attn_func as four\n"
         "from flash_attn.cute.interface import flash_attn_varlen_func\n"
         "import flash_attn.cute\nfrom flash_attn import flash_attn_func as two", scope)
    assert scope["three"] is fa3.flash_attn_func
    assert scope["four"] is scope["flash_attn"].cute.flash_attn_func is fa4.flash_attn_func


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize(("face", "name"), [(fa3, "flash_attn_interface"), (fa4, "flash_attn.cute")])
def test_installing_over_the_real_one_raises(face, name):
    sys.modules[name] = object()
    with pytest.raises(TilewiseError, match=f"{name} is imported already: code that holds its functions"):
        face.install()
