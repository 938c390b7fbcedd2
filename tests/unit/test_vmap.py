"""torch.func.vmap of a call, and batched gradients: every option, each entry to the last bit, no warning of torch's."""

from itertools import permutations

import pytest
import torch
from torch._vmap_internals import _vmap

from tilewise import (
    InvalidInput,
    UnsupportedProblem,
    attention,
    attention_decode,
    attention_varlen,
    causal,
    chunk,
    documents,
    explain,
    prefix,
    sink_tokens,
)

ENTRIES = 3
GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(ENTRIES, 2, 2, 6, 4, generator=GENERATOR) for _ in range(3))
BIAS, SINKS = torch.randn(ENTRIES, 6, 6, generator=GENERATOR), 5 * torch.randn(ENTRIES, 2, generator=GENERATOR)
VISIBLE = torch.rand(ENTRIES, 6, 6, generator=GENERATOR) > 0.3
ALIKE = K[0], V[0]  # keys and values that are no entries: all share them


LENGTHS, IDS = torch.tensor([[6, 2], [1, 5], [0, 6]]), torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6, [0, 1, 2, 3, 4, 5]])
BORDERS = torch.tensor([[0, 2, 6], [0, 0, 6], [0, 5, 6]])


def packed(*tensors, cu_seqlens_q=BORDERS[0], **options):
    rows = (tensor[0].transpose(0, 1) for tensor in tensors)
    return attention_varlen(*rows, cu_seqlens_q=cu_seqlens_q, **options)


# What is mapped, and the call.
CALLS = {
    "plain": ((Q, K, V), attention),
    "one_query_tensor_for_all": ((K, V), lambda k, v: attention(Q[0], k, v)),
    "causal": ((Q, K, V), lambda *qkv: attention(*qkv, mask=causal())),
    "bias": ((Q, BIAS), lambda q, bias: attention(q, *ALIKE, bias=bias)),
    "softcap": ((Q, K, V), lambda *qkv: attention(*qkv, softcap=0.5)),
    "sinks": ((Q, SINKS), lambda q, sinks: attention(q, *ALIKE, sinks=sinks)),
    "sinks_for_all": ((Q, K, V), lambda *qkv: attention(*qkv, sinks=SINKS[0])),
    "mask": ((Q, VISIBLE), lambda q, visible: attention(q, *ALIKE, mask=causal() & visible)),
    "documents": ((Q, K, V), lambda *qkv: attention(*qkv, mask=documents(torch.tensor([0, 0, 1, 1, 1, 2])))),
    "slopes": ((Q, K, V), lambda *qkv: attention(*qkv, mask=causal(), alibi_slopes=torch.tensor([1.0, 0.5]))),
    "lse": ((Q, K, V), lambda *qkv: attention(*qkv, softcap=0.5, return_aux=("lse",)).lse),
    "max_logit": ((Q, K, V), lambda *qkv: attention(*qkv, return_aux=("max_logit",)).max_logit),
    "packed": ((Q, K, V), lambda *qkv: packed(*qkv, softcap=0.5)),
    "slopes_of_each": ((Q, SINKS), lambda q, slopes: attention(q, *ALIKE, alibi_slopes=slopes)),
    "documents_of_each": ((Q, IDS), lambda q, ids: attention(q, *ALIKE, mask=documents(ids))),
    "exceptions": ((Q, K, V), lambda *qkv: attention(*qkv, mask=causal() & prefix(2) & sink_tokens(1) & chunk(3))),
    "dropout": ((Q, K, V), lambda *qkv: attention(*qkv, dropout_p=0.4, dropout_seed=7)),
    "dropout_seeds": ((Q, IDS[:, :1]), lambda q, seed: attention(q, *ALIKE, dropout_p=0.4, dropout_seed=seed)),
    "lengths": ((Q, K, V), lambda *qkv: attention(*qkv, seqlens_k=LENGTHS[0])),
    "lengths_of_each": ((Q, LENGTHS), lambda q, lengths: attention(q, *ALIKE, seqlens_k=lengths)),
    "borders_of_each": ((Q, BORDERS), lambda q, borders: packed(q, *ALIKE, cu_seqlens_q=borders)),
    "everything": ((Q, K, V), lambda *qkv: attention(
        *qkv, bias=BIAS[0], sinks=SINKS[0], softcap=2.0, dropout_p=0.2, dropout_seed=1, seqlens_k=LENGTHS[1],
        mask=causal("top_left") & VISIBLE[0], alibi_slopes=SINKS[1])),
}
OPTIONS = {
    "plain": {}, "causal": {"mask": causal()}, "softcap": {"softcap": 0.5}, "bias": {"bias": BIAS[0]},
    "sinks": {"sinks": SINKS[0]}, "mask": {"mask": VISIBLE[0] | torch.eye(6).bool()},
    "documents": {"mask": documents(IDS[0])}, "slopes": {"alibi_slopes": SINKS[0]},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 7}, "lengths": {"seqlens_k": LENGTHS[0]},
}


@pytest.mark.parametrize("name", CALLS)
def test_entries_have_the_results_of_calls_without_it(name, capfd):
    """With an option torch had no rule; without, it asked people to file an issue, on the process's own stderr."""
    mapped, call = CALLS[name]
    found = torch.func.vmap(call)(*mapped)
    assert "performance drop" not in capfd.readouterr().err
    wanted = torch.stack([call(*entries) for entries in zip(*mapped, strict=True)])
    assert torch.equal(found, wanted)
    if name != "plain":
        assert not torch.equal(found[0], found[1])


def test_dims_other_than_the_first_and_two_levels():
    def call(q, k, v):
        return attention(q, k, v, softcap=0.5)
    found = torch.func.vmap(call, in_dims=(3, 1, 0), out_dims=2)(Q.movedim(0, 3), K.movedim(0, 1), V)
    assert torch.equal(found.movedim(2, 0), torch.func.vmap(call)(Q, K, V))
    both = torch.func.vmap(torch.func.vmap(call), in_dims=(0, None, None))(torch.stack((Q, 2 * Q)), K, V)
    assert torch.equal(both[1, 2], call(2 * Q[2], K[2], V[2]))


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_an_entrys_result_has_the_memory_order_of_its_queries(order):
    order = (*order, 3)
    stored = torch.randn(3, 2, *[(2, 2, 6, 4)[dim] for dim in order], generator=GENERATOR)
    q = stored.permute(0, 1, *[2 + order.index(dim) for dim in range(4)])
    found = torch.func.vmap(torch.func.vmap(lambda q: attention(q, *ALIKE, softcap=0.5)))(q)
    assert torch.equal(found[2, 1], attention(q[2, 1], *ALIKE, softcap=0.5))
    assert found[2, 1].permute(order).is_contiguous()


@pytest.mark.parametrize("options", [{}, {"softcap": 0.5}, {"bias": BIAS[0]}], ids=["plain", "softcap", "bias"])
def test_the_gradients_of_several_outputs_are_mapped(options, capfd):
    q = Q[0].clone().requires_grad_()
    out = attention(q, *ALIKE, **options)

    def gradient(dout):
        return torch.autograd.grad(out, q, dout, retain_graph=True)[0]
    found = torch.func.vmap(gradient)(V)
    assert "performance drop" not in capfd.readouterr().err
    assert torch.equal(found, torch.stack([gradient(dout) for dout in V]))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_with_every_option_an_entry_that_needs_a_gradient_is_refused(options):
    """A gradient around the map was one of zeros: an entry does not say that it needs one."""
    def mapped(q, **more):
        return torch.func.vmap(lambda q: attention(q, *ALIKE, **options, **more))(q)
    refusal = pytest.raises(UnsupportedProblem, match=r"or vmap of a call with a gradient\).*Pass double_backward=True")
    with refusal:
        mapped(Q.clone().requires_grad_())
    for transform in (lambda f: torch.func.grad(lambda q: f(q).sum()), torch.func.jacrev,
                      lambda f: torch.func.vmap(torch.func.grad(lambda q: attention(q, *ALIKE, **options).sum()))):
        with refusal:
            transform(mapped)(Q)
    with refusal:
        torch.func.grad(lambda q: torch.func.vmap(mapped)(torch.stack([q, q])).sum())(Q)
    q = Q.clone().requires_grad_()
    mapped(q, double_backward=True).square().sum().backward()
    once = Q.clone().requires_grad_()
    torch.stack([attention(q, *ALIKE, **options) for q in once]).square().sum().backward()
    torch.testing.assert_close(q.grad, once.grad)
    assert q.grad.abs().max() > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_a_tangent_around_the_map_is_refused():
    """It was torch's own error, of a batching rule that one of its operators lacks."""
    def mapped(q, **more):
        return torch.func.vmap(lambda q: attention(q, *ALIKE, softcap=0.5, **more))(q)
    with pytest.raises(UnsupportedProblem, match=r"forward mode .* asks for a tangent.*Pass double_backward=True"):
        torch.func.jvp(mapped, (Q,), (Q,))
    _, tangent = torch.func.jvp(lambda q: mapped(q, double_backward=True), (Q,), (Q,))
    wanted = [torch.func.jvp(lambda q: attention(q, *ALIKE, softcap=0.5, double_backward=True), (q,), (q,))[1]
              for q in Q]
    torch.testing.assert_close(tangent, torch.stack(wanted))


@pytest.mark.parametrize("borders", torch.tensor([[1, 2, 6], [0, 4, 2], [0, 2, 7]]).unbind(), ids=str)
def test_wrong_borders_raise_in_a_map_too(borders):
    """They were looked at outside of transforms alone, and gave results that mean nothing."""
    entries = torch.stack([BORDERS[0], borders])
    with pytest.raises(InvalidInput, match=r"cu_seqlens_q (begins with 1|has 4 at|ends sequence 1 at 7)"):
        torch.func.vmap(lambda borders: packed(Q[0], *ALIKE, cu_seqlens_q=borders))(entries)
    with pytest.raises(InvalidInput, match="cu_seqlens_q"):
        torch.func.vmap(torch.func.vmap(lambda q, borders: packed(q, *ALIKE, cu_seqlens_q=borders), (0, None)),
                        (None, 0))(Q, entries)


def test_lengths_of_each_entry_are_refused_where_the_host_reads_them():
    for call in (lambda q, lengths: attention(q, *ALIKE, seqlens_k=lengths, double_backward=True),
                 torch.func.grad(lambda q, lengths: attention(q, *ALIKE, seqlens_k=lengths,
                                                              double_backward=True).sum())):
        with pytest.raises(UnsupportedProblem, match=r"torch.func.vmap maps the lengths of sequences, and with "
                                                     "double_backward=True they are read"):
            torch.func.vmap(call)(Q, LENGTHS)


def test_a_call_is_explained_in_a_map_too():
    told = []
    torch.func.vmap(lambda q: told.append(explain(q, *ALIKE, softcap=0.5).forward) or q)(Q)
    assert told == [explain(Q[0], *ALIKE, softcap=0.5).forward]


def test_each_entry_drops_pairs_of_its_own_where_that_is_asked_for():
    same = torch.stack([Q[0]] * 2)
    for randomness, equal in (("different", False), ("same", True)):
        made = torch.func.vmap(lambda q: attention(q, *ALIKE, dropout_p=0.5), randomness=randomness)(same)
        assert torch.equal(made[0], made[1]) is equal


def test_no_entries_are_refused():
    with pytest.raises(InvalidInput) as caught:
        torch.func.vmap(lambda q: attention(q, *ALIKE))(Q[:0])
    assert str(caught.value) == ("torch.func.vmap maps attention over 0 entries; allowed is one or more: skip the "
                                 "call.")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_map_gives_the_same():
    def mapped(q):
        return torch.func.vmap(lambda q: attention(q, *ALIKE, softcap=0.5))(q)
    assert torch.equal(torch.compile(mapped, backend="aot_eager")(Q), mapped(Q))


@pytest.mark.parametrize("through", ["out", "lse", "both"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_batched_gradients_are_those_of_calls_one_by_one(options, through, capfd):
    """torch.autograd.grad(..., is_grads_batched=True), by an older vmap, in which torch's rules end at ours."""
    leaves = [tensor[0].clone().requires_grad_() for tensor in (Q, K, V)]
    trained = {name: value.clone().requires_grad_() for name, value in options.items()
               if name in ("bias", "sinks", "alibi_slopes")}
    leaves += trained.values()
    results = attention(*leaves[:3], **options | trained, return_aux=("lse",))
    chosen = {"out": [results.out], "lse": [results.lse], "both": list(results)}[through]
    incoming = [torch.randn(ENTRIES, *result.shape, generator=GENERATOR) for result in chosen]
    if "seqlens_k" in options:
        incoming = [gradient * result.isfinite() for gradient, result in zip(incoming, chosen, strict=True)]

    def gradients(incoming, **how):
        return torch.autograd.grad(chosen, leaves, incoming, retain_graph=True, allow_unused=True, **how)
    found = gradients(incoming, is_grads_batched=True)
    assert "performance drop" not in capfd.readouterr().err
    one_by_one = zip(*[gradients(own) for own in zip(*incoming, strict=True)], strict=True)
    for of_all, own in zip(found, one_by_one, strict=True):
        assert torch.equal(of_all, torch.stack(own))
    assert not torch.equal(found[0][0], found[0][1])


def test_batched_gradients_of_packed_sequences_and_jacobians():
    rows = Q[0, 0].transpose(0, 1).clone().requires_grad_()
    out = attention_varlen(rows, rows, rows, cu_seqlens_q=BORDERS[0])
    incoming = torch.randn(2, *out.shape, generator=GENERATOR)
    found = torch.autograd.grad(out, rows, incoming, is_grads_batched=True, retain_graph=True)[0]
    assert torch.equal(found, torch.stack([torch.autograd.grad(out, rows, one, retain_graph=True)[0]
                                           for one in incoming]))
    jacobians = [torch.autograd.functional.jacobian(lambda q: attention(q, *ALIKE).sum((0, 1)), Q[0], vectorize=one)
                 for one in (True, False)]
    assert torch.equal(*jacobians)


def test_a_second_derivative_through_mapped_gradients_is_refused():
    """With is_grads_batched its part of a sum was left out; torch.func.vmap spoke of a staticmethod of ours."""
    q = Q[0].clone().requires_grad_()
    out = attention(q, *ALIKE)
    first = torch.autograd.grad(out, q, V, is_grads_batched=True, create_graph=True)[0]
    with pytest.raises(UnsupportedProblem, match=r"second derivative of attention was asked for.*double_backward=True"):
        torch.autograd.grad(first.sum() + q.sum(), q)
    with pytest.raises(UnsupportedProblem, match=r"create_graph=True inside a transform of torch.func .*"
                                                 "Pass double_backward=True"):
        torch.func.vmap(lambda dout: torch.autograd.grad(out, q, dout, create_graph=True)[0])(V)


def test_batched_gradients_inside_of_others_are_refused():
    q = Q[0].clone().requires_grad_()
    out = attention(q, *ALIKE)

    def batched(dout):
        return torch.autograd.grad(out, q, dout, is_grads_batched=True, retain_graph=True)[0]
    with pytest.raises(UnsupportedProblem, match="is_grads_batched=True inside of another one"):
        _vmap(lambda scale: batched(V * scale))(torch.ones(2))


CACHES = torch.randn(2, ENTRIES, 2, 1, 8, 4, generator=GENERATOR)
NEW = torch.randn(ENTRIES, 2, 1, 1, 4, generator=GENERATOR)
FILLED = torch.tensor([[3, 5], [0, 7], [2, 2]])


@pytest.mark.parametrize("options", [
    {}, {"softcap": 2.0}, {"mask": causal()}, {"cache_seqlens": 4}, {"sinks": SINKS[0]}, {"alibi_slopes": SINKS[0]},
    {"return_aux": ("lse",)}, {"cache_batch_idx": torch.tensor([1, 0])}], ids=str)
def test_decoding_is_mapped_entry_by_entry(options, capfd):
    def call(q, k_cache, v_cache):
        made = attention_decode(q, k_cache, v_cache, **options)
        return made if "return_aux" in options else (made,)
    for caches, dims in ((CACHES, (0, 0, 0)), (CACHES[:, 0], (0, None, None))):
        found = torch.func.vmap(call, dims)(Q[:, :, :, :1], *caches)
        assert "performance drop" not in capfd.readouterr().err
        wanted = [call(Q[i, :, :, :1], *(caches[:, i] if dims[1] == 0 else caches)) for i in range(ENTRIES)]
        for mapped, own in zip(found, zip(*wanted, strict=True), strict=True):
            assert torch.equal(mapped, torch.stack(own))


def test_decoding_appends_to_each_entrys_own_caches():
    caches, wanted = CACHES.clone(), CACHES.clone()

    def call(q, k_cache, v_cache, new, filled):
        return attention_decode(q, k_cache, v_cache, k=new, v=new, cache_seqlens=filled)
    found = torch.func.vmap(call)(Q[:, :, :, :1], *caches, NEW, FILLED)
    own = [call(Q[i, :, :, :1], *wanted[:, i], NEW[i], FILLED[i]) for i in range(ENTRIES)]
    assert torch.equal(found, torch.stack(own))
    assert torch.equal(caches, wanted)
    assert not torch.equal(caches, CACHES)


@pytest.mark.parametrize("expanded", [False, True])
def test_entries_that_would_append_to_one_cache_are_refused(expanded):
    caches = CACHES[:, 0].clone()
    given = caches[:, None].expand(-1, ENTRIES, -1, -1, -1, -1) if expanded else caches
    with pytest.raises(InvalidInput) as caught:
        torch.func.vmap(lambda q, k_cache, v_cache, new: attention_decode(q, k_cache, v_cache, k=new, v=new,
                                                                          cache_seqlens=2),
                        (0, *[0 if expanded else None] * 2, 0))(Q[:, :, :, :1], *given, NEW)
    assert str(caught.value) == (
        "k_cache is one for all entries of torch.func.vmap, each of which would append to it; allowed is one for each "
        "entry: map k_cache too, in memory of its own, or append before.")
    assert torch.equal(caches, CACHES[:, 0])


def test_decoding_in_a_map_refuses_what_it_does_without():
    def call(q, **options):
        return torch.func.vmap(lambda q: attention_decode(q, *CACHES[:, 0], **options))(q)
    q = Q[:, :, :, :1]
    with pytest.raises(InvalidInput, match="q requires a gradient, and decoding has no backward pass"):
        call(q.clone().requires_grad_())
    with pytest.raises(InvalidInput, match="q requires a gradient, and decoding has no backward pass"):
        torch.func.grad(lambda q: call(q).sum())(q)
    with pytest.raises(UnsupportedProblem, match=r"forward mode .* Decoding has no derivative"):
        torch.func.jvp(call, (q,), (q,))
    with pytest.raises(InvalidInput, match=r"cache_seqlens has 9 at \[1\]"):
        call(q, cache_seqlens=torch.tensor([1, 9]))
