"""Derivatives that fused kernels have none of are refused, where torch would make zeros of them."""

import pytest
import torch
from torch.autograd import forward_ad

from tilewise import UnsupportedProblem, attention, attention_decode, attention_varlen, causal
from tilewise.autograd.op import forward_op, forward_plain_op
from tilewise.problem.options import OperatorOptions

TANGENT = r"forward mode \(torch.func.jvp, jacfwd, make_dual\) asks for a tangent.*Pass double_backward=True"
FUNCTIONAL = r"torch.func \(grad, vjp, jacrev, or vmap of a call with a gradient\).*Pass double_backward=True"


def tensors_of(b=1):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(b, 2, 6, 4, generator=generator) for _ in range(3))


def packed(q, k, v):
    rows = (t[0].transpose(0, 1) for t in (q, k, v))
    return attention_varlen(*rows, cu_seqlens_q=torch.tensor([0, 2, 6]))


CALLS = {
    "plain": attention, "causal": lambda *qkv: attention(*qkv, mask=causal()), "packed": packed,
    "lse": lambda *qkv: attention(*qkv, return_aux=("lse",)).lse,
    "bias": lambda *qkv: attention(*qkv, bias=torch.zeros(6, 6)),
    "reference": lambda *qkv: attention(*qkv, backend="reference"),
}


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_tangent_is_refused_in_torch_func_and_outside(call, place):
    qkv = tensors_of()

    def of_one(x):
        return call(*qkv[:place], x, *qkv[place + 1:])
    for transform in (lambda: torch.func.jvp(of_one, (qkv[place],), (qkv[0],)),
                      lambda: torch.func.jacfwd(of_one)(qkv[place])):
        with pytest.raises(UnsupportedProblem, match=TANGENT):
            transform()
    with forward_ad.dual_level():
        of_one(qkv[place])  # no tensor has a tangent
        with pytest.raises(UnsupportedProblem, match=TANGENT):
            of_one(forward_ad.make_dual(qkv[place], qkv[0]))


def test_a_tangent_of_an_operand_is_refused():
    q, k, v = tensors_of()
    with pytest.raises(UnsupportedProblem, match=TANGENT):
        torch.func.jvp(lambda bias: attention(q, k, v, bias=bias), (torch.zeros(6, 6),), (torch.ones(6, 6),))


def test_a_tangent_in_decoding_is_refused():
    q, k, v = tensors_of()
    with pytest.raises(UnsupportedProblem, match=r"forward mode .* Decoding has no derivative"):
        torch.func.jvp(lambda q: attention_decode(q[:, :, :1], k, v), (q,), (q,))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_gradient_in_torch_func_is_refused(call):
    q, k, v = tensors_of()
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(UnsupportedProblem, match=FUNCTIONAL):
            transform(lambda q: call(q, k, v).sum())(q)


def test_entries_are_mapped_and_refused_where_one_needs_a_gradient():
    """Who needs one is seen outside of torch.func.vmap alone: the operator would be called as if nobody did."""
    _, k, v = tensors_of()
    entries = torch.stack([tensors_of()[0], 2 * tensors_of()[0]])
    mapped = torch.func.vmap(lambda q: attention(q, k, v))
    torch.testing.assert_close(mapped(entries), torch.stack([attention(q, k, v) for q in entries]))
    with pytest.raises(UnsupportedProblem, match=FUNCTIONAL):
        mapped(entries.requires_grad_())
    with torch.no_grad():
        mapped(entries)


def test_an_operator_by_its_own_name_is_refused_where_a_gradient_would_be_lost():
    q, k, v = tensors_of()
    plain = (None, None, None, None, False, None)
    whole = (*[None] * 13, [], [], *OperatorOptions(*[None] * 4))
    for op, options in ((forward_plain_op, plain), (forward_op, whole)):
        op(q, k, v, *options)
        with pytest.raises(UnsupportedProblem, match="and an operator by its own name"):
            op(q.clone().requires_grad_(), k, v, *options)


def test_a_compiled_transform_is_refused_too():
    """Traced, a tensor inside torch.func.grad does not say that it needs a gradient, and got one of zeros."""
    q, k, v = tensors_of()
    compiled = torch.compile(lambda q: torch.func.grad(lambda q: attention(q, k, v).sum())(q), backend="eager")
    with pytest.raises(UnsupportedProblem, match=FUNCTIONAL):
        compiled(q)
    compiled = torch.compile(lambda q: torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,)), backend="eager")
    with pytest.raises(UnsupportedProblem, match=TANGENT):
        compiled(q)
