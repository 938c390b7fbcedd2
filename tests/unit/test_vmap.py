"""torch.func.vmap of a call: every option, each entry's result to the last bit, and no warning of torch's."""

from itertools import permutations

import pytest
import torch

from tilewise import InvalidInput, UnsupportedProblem, attention, attention_varlen, causal, documents

ENTRIES = 3
GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(ENTRIES, 2, 2, 6, 4, generator=GENERATOR) for _ in range(3))
BIAS, SINKS = torch.randn(ENTRIES, 6, 6, generator=GENERATOR), 5 * torch.randn(ENTRIES, 2, generator=GENERATOR)
VISIBLE = torch.rand(ENTRIES, 6, 6, generator=GENERATOR) > 0.3
ALIKE = K[0], V[0]  # keys and values that are no entries: all share them


def packed(*tensors, **options):
    rows = (tensor[0].transpose(0, 1) for tensor in tensors)
    return attention_varlen(*rows, cu_seqlens_q=torch.tensor([0, 2, 6]), **options)


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


@pytest.mark.parametrize("options", [{"softcap": 0.5}, {"bias": BIAS[0]}, {"sinks": SINKS[0]}],
                         ids=["softcap", "bias", "sinks"])
def test_with_an_option_too_an_entry_that_needs_a_gradient_is_refused(options):
    mapped = torch.func.vmap(lambda q: attention(q, *ALIKE, **options))
    with pytest.raises(UnsupportedProblem, match=r"or vmap of a call with a gradient\).*Pass double_backward=True"):
        mapped(Q.clone().requires_grad_())
    twice = torch.func.vmap(lambda q: attention(q, *ALIKE, **options, double_backward=True))
    q = Q.clone().requires_grad_()
    twice(q).sum().backward()
    assert q.grad.abs().max() > 0


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
