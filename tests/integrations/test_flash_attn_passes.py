"""flash-attn's passes by themselves, which rings and other parallel schedules call: ``_flash_attn_forward`` and kin."""

import pytest
import torch

from integrations.calls import CU_K, CU_Q, SLOPES, refusing_skips, signature, tensors
from integrations.dense import close
from tilewise import UnsupportedProblem, merge, use_backend
from tilewise.integrations import flash_attn as face
from tilewise.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

INF = float("inf")
_OPTIONS = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_DONE = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
# As flash-attn 2.8 has them.
SIGNATURES = {
    "_flash_attn_forward": f"q, k, v, {_OPTIONS}, return_softmax",
    "_flash_attn_backward": f"{_DONE}, {_OPTIONS}, deterministic, rng_state=None",
    "_flash_attn_varlen_forward": (
        f"q, k, v, {_LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, "
        "zero_tensors=False, num_splits=0"),
    "_flash_attn_varlen_backward": f"{_DONE}, {_LENGTHS}, {_OPTIONS}, deterministic, rng_state=None, "
                                   "zero_tensors=False",
}
SLOPES_OF_THREE = torch.cat([SLOPES, SLOPES[:1]])
# dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
OPTIONS = {
    "causal": (0.0, 0.4, True, -1, -1, 0.0),
    "window": (0.0, 0.4, False, 2, 1, 0.0),
    "softcap": (0.0, 0.4, False, -1, -1, 2.0),
    "dropout": (0.25, 0.4, True, 3, -1, 0.0),
}


def public(options, slopes):
    """Return the same options as the public functions take them."""
    dropout_p, scale, causal, left, right, softcap = options
    return {"dropout_p": dropout_p, "softmax_scale": scale, "causal": causal, "window_size": (left, right),
            "softcap": softcap, "alibi_slopes": slopes, "return_attn_probs": True}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_flash_attns(name):
    assert signature(getattr(face, name)) == SIGNATURES[name]


@pytest.mark.parametrize("sq", [5, 9], ids=["more_keys", "more_queries"])
@pytest.mark.parametrize("slopes", [None, SLOPES[0], SLOPES], ids=["", "alibi", "alibi_of_a_batch"])
@pytest.mark.parametrize("name", OPTIONS)
def test_passes_give_what_the_call_gives(name, slopes, sq):
    options = OPTIONS[name]
    q, k, v, dout = tensors(sq, 7)
    torch.manual_seed(3)
    wanted = flash_attn_func(q, k, v, **public(options, slopes))
    torch.manual_seed(3)
    out, lse, probs, state = face._flash_attn_forward(q, k, v, *options, slopes, options[0] > 0)
    assert not out.requires_grad
    for one, other in zip((out, lse, probs), wanted, strict=True):
        assert torch.equal(one, other)
    made = [torch.full_like(tensor, float("nan")) for tensor in (q, k, v)]
    with torch.no_grad():
        face._flash_attn_backward(dout, q, k, v, out, lse, *made, *options, slopes, False, state)
    for one, other in zip(made, torch.autograd.grad(wanted[0], (q, k, v), dout), strict=True):
        close(one, other.double())


@pytest.mark.parametrize("slopes", [None, SLOPES[0], SLOPES_OF_THREE], ids=["", "alibi", "alibi_of_a_batch"])
@pytest.mark.parametrize("name", OPTIONS)
def test_passes_over_packed_sequences_give_what_the_call_gives(name, slopes):
    options = OPTIONS[name]
    q, k, v, dout = (tensor[0].detach().requires_grad_() for tensor in tensors(9, 8))
    lengths = CU_Q, CU_K, 6, 5
    torch.manual_seed(3)
    wanted = flash_attn_varlen_func(q, k, v, *lengths, **public(options, slopes))
    torch.manual_seed(3)
    out, lse, probs, state = face._flash_attn_varlen_forward(q, k, v, *lengths, *options, slopes, options[0] > 0)
    assert not out.requires_grad
    for one, other in zip((out, lse, probs), wanted, strict=True):
        assert torch.equal(one, other)
    made = [torch.full_like(tensor, float("nan")) for tensor in (q, k, v)]
    with torch.no_grad():
        face._flash_attn_varlen_backward(dout, q, k, v, out, lse, *made, *lengths, *options, slopes, True, state)
    for one, other in zip(made, torch.autograd.grad(wanted[0], (q, k, v), dout), strict=True):
        close(one, other.double())


def test_gradients_that_nobody_holds_are_left_out():
    q, k, v, dout = (tensor.detach() for tensor in tensors(5, 7))
    options = (*OPTIONS["causal"], None)
    out, lse, _, _ = face._flash_attn_forward(q, k, v, *options, False)
    dk = torch.zeros_like(k)
    face._flash_attn_backward(dout, q, k, v, out, lse, None, dk, None, *options, False)
    assert dk.any()


def test_parts_of_the_keys_make_the_whole_as_in_a_ring(backend, device):
    """A part's backward pass is given out and lse of the whole, lse with strides of its own, as a ring merges them."""
    q, k, v, dout = (tensor.detach().to(device).requires_grad_() for tensor in tensors(6, 8))
    wanted = flash_attn_func(q, k, v)
    options = (0.0, None, False, -1, -1, 0.0, None)
    places = slice(0, 3), slice(3, 8)
    sums = [torch.zeros_like(tensor) for tensor in (q, k, v)]
    with torch.no_grad(), refusing_skips(backend):
        parts = [(k[:, place], v[:, place]) for place in places]
        results = [face._flash_attn_forward(q, *part, *options, False)[:2] for part in parts]
        out, lse = merge(*(given for own, own_lse in results for given in (own.transpose(1, 2), own_lse)))
        out, lse = out.transpose(1, 2), lse.transpose(1, 2).contiguous().transpose(1, 2)
        for part, place in zip(parts, places, strict=True):
            made = [torch.empty_like(tensor) for tensor in (q, *part)]
            face._flash_attn_backward(dout, q, *part, out, lse, *made, *options, False)
            sums[0] += made[0]
            sums[1][:, place], sums[2][:, place] = made[1], made[2]
    close(out, wanted.double())
    for one, other in zip(sums, torch.autograd.grad(wanted, (q, k, v), dout), strict=True):
        close(one, other.double())


def test_deterministic_is_demanded_by_the_backward_pass_or_by_torch():
    q, k, v, dout = (tensor.detach() for tensor in tensors(5, 7))
    options = (0.0, None, False, -1, -1, 0.0, None)
    with use_backend("torch"):  # which refuses it
        given = (dout, q, k, v, *face._flash_attn_forward(q, k, v, *options, False)[:2], None, None, None, *options)
        face._flash_attn_backward(*given, False)
        with pytest.raises(UnsupportedProblem, match="a deterministic result was asked for"):
            face._flash_attn_backward(*given, True)
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(UnsupportedProblem, match="a deterministic result was asked for"):
                face._flash_attn_backward(*given, False)
        finally:
            torch.use_deterministic_algorithms(False)


def test_keys_beyond_those_used_take_no_part():
    q, k, v, _ = (tensor[0].detach() for tensor in tensors(9, 8))
    used = torch.tensor([2, 1, 0], dtype=torch.int32)
    out, lse, _, _ = face._flash_attn_varlen_forward(q, k, v, CU_Q, CU_K, 6, 5, 0.0, None, False, seqused_k=used)
    wanted = flash_attn_func(q[None, :3], k[None, :2], v[None, :2])[0]
    close(out[:3], wanted.double())
    assert (out[3:] == 0).all()
    assert (lse[:, 3:] == INF).all()


@pytest.mark.parametrize("name", ["block_table", "leftpad_k"])
def test_caches_in_pages_or_padded_on_the_left_raise(name):
    q, k, v, _ = (tensor[0].detach() for tensor in tensors(9, 8))
    with pytest.raises(UnsupportedProblem) as caught:
        face._flash_attn_varlen_forward(q, k, v, CU_Q, CU_K, 6, 5, 0.0, None, False, **{name: torch.zeros(3)})
    assert str(caught.value) == (f"{name} is given; allowed is None: of packed queries, caches in pages or padded on "
                                 "the left are not there yet. Pass keys and values packed, with cu_seqlens_k, or a "
                                 "batch of queries to flash_attn_with_kvcache.")
