"""torch's own calls: compared with torch's SDPA in float64, and sequence by sequence with the dense formula."""

import inspect

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.varlen import AuxRequest

from integrations.calls import CU_K, CU_Q, handed, refusing_skips, signature, tensors
from integrations.dense import bottom_right, close, dense
from tilewise import InvalidInput, UnsupportedProblem, attention
from tilewise.integrations import torch_sdpa
from tilewise.integrations.torch_sdpa import scaled_dot_product_attention, varlen_attn

INF = float("inf")


def test_arguments_are_torchs():
    assert signature(scaled_dot_product_attention) == (
        "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False")
    assert signature(varlen_attn) == (
        "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=None, scale=None, window_size=(-1, -1), "
        "enable_gqa=False, seqused_k=None, block_table=None, num_splits=None")
    by_name = [name for name, given in inspect.signature(varlen_attn).parameters.items()
               if given.kind is given.KEYWORD_ONLY]
    assert by_name[0] == "return_aux"


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def boolean(*shape):
    return random(*shape, seed=5) > 0


def additive(*shape):
    """A mask that is added, with its gradient; it hides some pairs by -inf, and all of the second query."""
    mask = random(*shape, seed=6)
    return mask.masked_fill(mask < -0.5, -INF)


def hiding_a_query(mask):
    hidden = mask.clone()
    hidden[..., 1, :] = False if mask.dtype is torch.bool else -INF
    return hidden


Q, K, V = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)
GQA_K, GQA_V = (2, 2, 7, 8), (2, 2, 7, 6)
CALLS = {
    "plain": (Q, K, V, {}),
    "scale": (Q, K, V, {"scale": 0.3}),
    "causal": (Q, Q, Q, {"is_causal": True}),
    "causal_more_keys": (Q, K, V, {"is_causal": True}),
    "causal_more_queries": (K, Q, Q, {"is_causal": True}),
    "gqa": (Q, GQA_K, GQA_V, {"enable_gqa": True}),
    "gqa_causal": (Q, GQA_K, GQA_V, {"enable_gqa": True, "is_causal": True}),
    "gqa_of_one_batch": (Q, (1, *GQA_K[1:]), (1, *GQA_V[1:]), {"enable_gqa": True}),
    "gqa_without_batch": (Q[1:], GQA_K[1:], GQA_V[1:], {"enable_gqa": True}),
    "boolean_2d": (Q, K, V, {"attn_mask": boolean(5, 7)}),
    "boolean_of_keys": (Q, K, V, {"attn_mask": boolean(2, 1, 1, 7)}),
    "boolean_4d": (Q, K, V, {"attn_mask": boolean(2, 4, 5, 7)}),
    "boolean_hides_a_query": (Q, K, V, {"attn_mask": hiding_a_query(boolean(5, 7))}),
    "additive_2d": (Q, K, V, {"attn_mask": additive(5, 7)}),
    "additive_of_heads": (Q, K, V, {"attn_mask": additive(4, 1, 7)}),
    "additive_4d": (Q, K, V, {"attn_mask": additive(2, 4, 5, 7)}),
    "additive_of_keys_alone": (Q, K, V, {"attn_mask": additive(7)}),
    "additive_hides_a_query": (Q, K, V, {"attn_mask": hiding_a_query(additive(5, 7))}),
    "two_dims": (Q[2:], K[2:], V[2:], {"is_causal": True}),
    "three_dims": (Q[1:], K[1:], V[1:], {"attn_mask": boolean(4, 5, 7)}),
    "five_dims": ((3, *Q), (3, *K), (3, *V), {"attn_mask": additive(5, 7)}),
    "five_dims_mask_of_all": ((3, *Q), (3, *K), (3, *V), {"attn_mask": additive(3, 2, 4, 5, 7)}),
    "five_dims_mask_of_some": ((3, *Q), (3, *K), (3, *V), {"attn_mask": boolean(2, 1, 5, 7)}),
    "keys_of_one_batch": (Q, (1, *K[1:]), (1, *V[1:]), {}),
    "keys_of_one_head": (Q, (2, 1, 7, 8), (2, 1, 7, 6), {}),
    "keys_without_heads": (Q, K[2:], V[2:], {}),
    "queries_of_one_head": ((5, 8), K, V, {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_torchs(name):
    *shapes, options = CALLS[name]
    leaves = [random(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        leaves.append(mask.clone().requires_grad_())
        options = options | {"attn_mask": leaves[-1]}
    with sdpa_kernel(SDPBackend.MATH):
        wanted = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], **options)
    found = scaled_dot_product_attention(*leaves[:3], **options)
    assert found.shape == wanted.shape
    close(found, wanted, 1e-10)
    dout = random(*wanted.shape, seed=9)
    for one, other in zip(torch.autograd.grad(found, leaves, dout), torch.autograd.grad(wanted, leaves, dout),
                          strict=True):
        close(one, other, 1e-10)


def test_a_mask_and_is_causal_both_hold():
    q, k, v = random(*Q), random(*K, seed=1), random(*V, seed=2)
    causal = torch.ones(5, 7, dtype=torch.bool).tril()
    close(scaled_dot_product_attention(q, k, v, boolean(5, 7), is_causal=True),
          dense(q, k, v, boolean(5, 7) & causal)[0], 1e-10)
    bias = random(5, 7, seed=3)
    close(scaled_dot_product_attention(q, k, v, bias, is_causal=True), dense(q, k, v, causal, bias=bias)[0], 1e-10)


@pytest.mark.parametrize(("make", "lengths"), [(causal_upper_left, (6, 6)), (causal_lower_right, (6, 6)),
                                               (causal_upper_left, (5, 8)), (causal_lower_right, (5, 8))])
def test_a_causal_bias_names_the_corner_of_its_diagonal(make, lengths):
    q, k, v = random(2, 4, lengths[0], 16), random(2, 4, lengths[1], 16, seed=1), random(2, 4, lengths[1], 16, seed=2)
    bias = make(*lengths)
    visible = torch.ones(lengths, dtype=torch.bool).tril(lengths[1] - lengths[0] if make is causal_lower_right else 0)
    close(scaled_dot_product_attention(q, k, v, bias),
          torch.nn.functional.scaled_dot_product_attention(q, k, v, visible))


def test_a_causal_bias_that_does_not_fit_is_refused():
    q = random(1, 2, 6, 16)
    with pytest.raises(InvalidInput, match="attn_mask is a CausalBias and is_causal is True; allowed is one of them"):
        scaled_dot_product_attention(q, q, q, causal_upper_left(6, 6), is_causal=True)
    with pytest.raises(InvalidInput, match=r"attn_mask is a CausalBias of lengths \(6, 8\); allowed are \(6, 6\)"):
        scaled_dot_product_attention(q, q, q, causal_upper_left(6, 8))
    own = q[0, 0]
    close(scaled_dot_product_attention(own, own, own, causal_upper_left(6, 6)),
          scaled_dot_product_attention(own, own, own, is_causal=True))


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_a_causal_bias_is_no_operand(name):
    q = random(1, 2, 6, 16)
    with pytest.raises(InvalidInput, match=rf"{name} is a CausalBias, a tensor without values; allowed is mask=causal"):
        attention(q, q, q, **{name: causal_upper_left(6, 6)})


def test_a_query_that_a_mask_hides_gives_zero():
    q = torch.randn(1, 2, 4, 8)
    for mask in (torch.ones(4, 4, dtype=torch.bool), torch.zeros(4, 4)):
        out = scaled_dot_product_attention(q, q, q, hiding_a_query(mask))
        assert (out[:, :, 1] == 0).all()
        assert out[:, :, 0].all()


# Where all is -inf, numpy remarks that -inf − (-inf) is NaN, before the pair is dropped.
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
@pytest.mark.parametrize("hidden", [slice(0, 300), slice(None)], ids=["first_tiles", "all_keys"])
def test_minus_infinity_in_a_mask_hides_on_every_backend(backend, device, hidden):
    """A bias of -inf over whole tiles, which no mask hid, gave NaN in the Triton kernels: in out, and in gradients."""
    q, k, v = (torch.randn(1, 2, length, 16, device=device, requires_grad=True) for length in (3, 400, 400))
    mask = torch.randn(3, 400, device=device)
    mask[1, hidden] = -INF
    mask.requires_grad_()
    with refusing_skips(backend):
        out = scaled_dot_product_attention(q, k, v, mask)
        found = torch.autograd.grad(out.square().sum(), (q, k, v, mask))
    wanted, _ = dense(q, k, v, bias=mask.double())
    close(out, wanted)
    for one, other in zip(found, torch.autograd.grad(wanted.square().sum(), (q, k, v, mask)), strict=True):
        close(one, other.double())


def test_dropout_is_repeated_by_torchs_seed_and_keeps_the_mean():
    q, k = random(1, 2, 60, 8), random(1, 2, 60, 8, seed=1)
    units = torch.eye(60, dtype=torch.float64).expand(1, 2, -1, -1)  # as values: out is the probabilities

    def drop(seed):
        torch.manual_seed(seed)
        return scaled_dot_product_attention(q, k, units, dropout_p=0.25)

    kept = drop(1)
    assert torch.equal(kept, drop(1))
    assert not torch.equal(kept, drop(2))
    probs = dense(q, k, units)[0]
    close(kept, torch.where(kept == 0, 0.0, probs / 0.75), 1e-10)
    assert 0.73 < (kept > 0).double().mean() < 0.77  # of 7200 pairs: four standard deviations


def test_heads_that_differ_need_the_flag():
    with pytest.raises(InvalidInput) as caught:
        scaled_dot_product_attention(random(*Q), random(*GQA_K), random(*GQA_V))
    assert str(caught.value) == ("key has 2 heads and query has 4, and enable_gqa is False: pass enable_gqa=True, or "
                                 "as many heads of keys as of queries.")
    q, k, v, _ = (tensor[0].detach() for tensor in tensors(9, 8))
    with pytest.raises(InvalidInput, match="key has 2 heads and query has 4, and enable_gqa is False"):
        varlen_attn(q, k, v, CU_Q, CU_K, 6, 5)


def test_dims_that_cannot_be_broadcast_are_named():
    with pytest.raises(InvalidInput, match="key has batch size 3 and query has 2: they must be equal"):
        scaled_dot_product_attention(random(*Q), random(3, *K[1:]), random(3, *V[1:]))


@pytest.mark.parametrize("of_mask", [(2, 1, 4, 5, 7), (1, 2, 4, 5, 7)])
def test_a_mask_of_more_dims_than_the_result_is_refused(of_mask):
    """Its first dims were taken for the batch, where torch, which broadcasts them, raises."""
    q, k, v = random(*Q), random(*K), random(*V)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, random(*of_mask))
    for mask in (random(*of_mask), boolean(*of_mask)):
        with pytest.raises(InvalidInput) as caught:
            scaled_dot_product_attention(q, k, v, mask)
        assert str(caught.value) == (f"attn_mask has shape {of_mask}; allowed are 4 dims at most, as many as query, "
                                     "key and value have.")


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_tensor_without_positions_is_refused_by_name(name):
    given = {"query": random(*Q), "key": random(*K), "value": random(*V)} | {name: random(8)}
    with pytest.raises(InvalidInput) as caught:
        scaled_dot_product_attention(**given)
    assert str(caught.value) == f"{name} has shape (8,); allowed are two dims (positions, head dim) or more."


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_mask_of_integers_is_refused_by_name(dtype):
    """What a tokenizer returns was refused as a bias, with no word of the booleans that it should be."""
    with pytest.raises(InvalidInput) as caught:
        scaled_dot_product_attention(random(*Q), random(*K), random(*V), boolean(5, 7).to(dtype))
    assert str(caught.value) == (f"attn_mask has dtype {dtype}; allowed are torch.bool, True = take part, and "
                                 "floating-point dtypes, which are added to the scores.")


def test_tensors_of_four_dims_are_not_copied():
    q = torch.randn(2, 5, 4, 8).transpose(1, 2)
    assert [t.data_ptr() for t in handed(lambda: scaled_dot_product_attention(q, q, q))] == 3 * [q.data_ptr()]


# Dynamo itself instantiates autograd Functions while it traces them.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# torch 2.11's compiler scripts a function of its own with a decorator that it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_calls_compile_into_one_graph():
    torch._dynamo.reset()
    q, k, v = (random(*shape, seed=n).requires_grad_() for n, shape in enumerate((Q, K, V)))
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    close(compiled(q, k, v, boolean(5, 7), is_causal=True),
          scaled_dot_product_attention(q, k, v, boolean(5, 7), is_causal=True), 1e-10)


def of_each_sequence(q, k, v, bounds, used=(5, 1, 2), **terms):
    """Compute the dense result of (total, h, d) tensors, sequence by sequence: out (total, h, d), lse (h, total)."""
    outs, lses = [], []
    for a, b, c, keys in zip(CU_Q[:-1], CU_Q[1:], CU_K[:-1], used, strict=True):
        firsts = [t.transpose(0, 1) for t in (q[a:b], k[c:c + keys], v[c:c + keys])]
        out, lse = dense(*firsts, bottom_right(b - a, keys, *bounds), **terms)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, -1)


@pytest.mark.parametrize(("options", "bounds"), [
    ({}, (-1, -1)), ({"window_size": (-1, 0)}, (-1, 0)), ({"window_size": (2, 0)}, (2, 0)),
    ({"window_size": (1, 1)}, (1, 1)), ({"scale": 0.7}, (-1, -1)),
    ({"seqused_k": torch.tensor([3, 0, 2], dtype=torch.int32), "window_size": (-1, 0)}, (-1, 0)),
], ids=["full", "causal", "causal_window", "window", "scale", "seqused_k"])
def test_packed_sequences_are_attended_each_by_itself(options, bounds):
    q, k, v, dout = (tensor[0].detach().requires_grad_() for tensor in tensors(9, 8))
    terms = {"scale": options["scale"]} if "scale" in options else {}
    if "seqused_k" in options:
        terms["used"] = options["seqused_k"].tolist()
    wanted, wanted_lse = of_each_sequence(q, k, v, bounds, **terms)
    out, lse = varlen_attn(q, k, v, CU_Q, CU_K, 6, 5, enable_gqa=True, return_aux=AuxRequest(lse=True), **options)
    close(out, wanted)
    assert lse.shape == (4, 9)
    close(lse, wanted_lse)
    for one, other in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(
            wanted, (q, k, v), dout.double()), strict=True):
        close(one, other.double())
    alone = varlen_attn(q, k, v, CU_Q, CU_K, 6, 5, enable_gqa=True, return_aux=AuxRequest(), **options)
    assert torch.equal(alone, out)


def test_a_window_that_is_no_pair_is_refused_by_name():
    q, k, v, _ = (tensor[0].detach() for tensor in tensors(9, 8))
    with pytest.raises(InvalidInput, match=r"^window_size is None; allowed are two integers \(left, right\), -1 for"):
        varlen_attn(q, k, v, CU_Q, CU_K, 6, 5, enable_gqa=True, window_size=None)


def test_lengths_of_keys_left_out_are_those_of_queries():
    q, k, v, _ = (tensor[0].detach() for tensor in tensors(9, 9, hk=4))
    assert torch.equal(varlen_attn(q, k, v, CU_Q, None, 6, 6), varlen_attn(q, k, v, CU_Q, CU_Q, 6, 6))


def test_one_split_demands_the_same_result_in_every_batch(monkeypatch):
    demanded, real = [], torch_sdpa._attend_packed

    def noting(*tensors, **options):
        demanded.append(options["deterministic"])
        return real(*tensors, **options)

    monkeypatch.setattr(torch_sdpa, "_attend_packed", noting)
    q, k, v, _ = (tensor[0].detach() for tensor in tensors(9, 8, hk=4))
    for num_splits in (1, None, 4):
        varlen_attn(q, k, v, CU_Q, CU_K, 6, 5, num_splits=num_splits)
    assert demanded == [True, None, None]


@pytest.mark.parametrize("aux", [None, AuxRequest(lse=False), AuxRequest(lse=True)])
def test_lse_is_made_where_it_is_wanted_alone(monkeypatch, aux):
    """In a compiled graph it had a gradient of zeros, which some backends have not."""
    asked, real = [], torch_sdpa._attend_packed
    monkeypatch.setattr(torch_sdpa, "_attend_packed", lambda *given, return_aux, **options: (
        asked.append(return_aux), real(*given, return_aux=return_aux, **options))[1])
    q, k, v, _ = (tensor[0].detach() for tensor in tensors(9, 8, hk=4))
    found = varlen_attn(q, k, v, CU_Q, CU_K, 6, 5, return_aux=aux)
    with_lse = aux is not None and aux.lse
    assert asked == [("lse",) if with_lse else ()]
    assert isinstance(found, tuple) is with_lse


def test_a_block_table_raises():
    q, k, v, _ = (tensor[0].detach() for tensor in tensors(9, 8))
    with pytest.raises(UnsupportedProblem) as caught:
        varlen_attn(q, k, v, CU_Q, CU_K, 6, 5, enable_gqa=True, block_table=torch.zeros(3, 1))
    assert str(caught.value) == ("block_table is given; allowed is None: paged caches are not there yet. Pass keys and "
                                 "values packed, with cu_seq_k.")
