"""Ways that are known from calls before: which tensors they are for, and which not."""

import pytest
import torch

from tilewise import attention
from tilewise.autograd import fast_path, guards
from unit.binding_double import binding, by_operators, tensors_of


@pytest.fixture(autouse=True)
def bound(monkeypatch):
    yield from binding(monkeypatch)


def test_like_tensors_are_told_by_one_question(bound, monkeypatch):
    """Once a path is known, no fact is looked up; a backward pass whose dout comes anew has a path of its own."""
    tensors = tensors_of(requires_grad=True)
    dout = torch.ones(1, 4, 8, 16)
    first = attention(*tensors)
    first.backward(dout)
    for name in ("_plan_for", "_backward_for"):
        monkeypatch.setattr(fast_path, name, lambda *_: pytest.fail("each fact is looked up anew"))
    again = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    second = attention(*again)
    second.backward(dout.clone())
    assert torch.equal(first, second)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(tensors, again, strict=True))
    assert bound.paths == ["fast", "fast backward"] * 2


@pytest.mark.parametrize("change", [
    lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), lambda q: q.as_strided(q.shape, (7, *q.stride()[1:])),
    torch._neg_view, lambda q: q.clone().requires_grad_(), torch.nn.Parameter, lambda q: q.bfloat16().float() + 1.0],
    ids=["order", "stride of one entry", "negative", "gradient", "subclass", "numbers"])
def test_tensors_unlike_those_that_were_known_are_looked_at(bound, monkeypatch, change):
    q, k, v = tensors_of()
    attention(q, k, v)
    for place in range(3):
        tensors = [change(tensor) if i == place else tensor for i, tensor in enumerate((q, k, v))]
        expected = by_operators(monkeypatch, lambda tensors=tensors: attention(*tensors))
        made = attention(*tensors)
        assert torch.equal(made, expected)
        assert made.requires_grad is expected.requires_grad
        assert made.stride() == expected.stride()


def test_a_known_way_is_not_for_another_dtype_of_autocast(bound):
    tensors = tensors_of(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            assert attention(*tensors).dtype is dtype
    assert attention(*tensors).dtype is torch.bfloat16


def test_a_known_way_of_float32_is_not_for_another_precision(bound, monkeypatch):
    tensors, asked = tensors_of(), []
    way_of = fast_path._plan_of
    monkeypatch.setattr(fast_path, "_plan_of",
                        lambda *given: asked.append(fast_path.allows_tf32(torch.float32)) or way_of(*given))
    for allowed in (False, True, False, True):
        monkeypatch.setattr(fast_path, "allows_tf32", lambda dtype, allowed=allowed: allowed)
        attention(*tensors)
    assert asked == [False, True]


@pytest.mark.parametrize("order", [("out", "both"), ("both", "out")])
def test_a_known_backward_pass_is_not_for_one_through_lse_too(bound, monkeypatch, order):
    for through in order * 2:
        tensors = tensors_of(requires_grad=True)

        def grads(tensors=tensors, through=through):
            out, lse = attention(*tensors, return_aux=("lse",))
            return torch.autograd.grad(out.sum() + (lse.sum() if through == "both" else 0.0), tensors)

        expected = by_operators(monkeypatch, grads)
        assert all(torch.equal(a, b) for a, b in zip(grads(), expected, strict=True))


def test_a_known_way_is_not_for_a_device_that_is_no_longer_current(bound, monkeypatch):
    tensors = tensors_of()
    attention(*tensors)
    monkeypatch.setattr(fast_path, "is_current", lambda device: False)
    attention(*tensors)
    assert bound.paths == ["fast", "operator"]


def test_a_tensor_that_comes_twice_is_looked_at_each_time(bound):
    q, k, _ = tensors_of()
    assert all(torch.equal(attention(q, k, k), attention(q, k, k.clone())) for _ in range(2))
    assert [len(kinds) for kinds in fast_path._recent.values()] == [1]
    assert bound.paths == ["fast"] * 4


def test_few_kinds_of_tensors_are_known_for_an_option(bound):
    q = tensors_of()[0]
    for sk in (*range(1, 9), 1):
        k = q[:, :2, :1].expand(1, 2, sk, 16).contiguous()
        attention(q, k, k.clone())
        (kinds,) = fast_path._recent.values()
        assert len(kinds) <= 4
    assert bound.paths == ["fast"] * 9


class AllAlike:
    """Guards that tell nothing apart."""

    def __init__(self, *_, **__):
        pass

    def check(self, *_):
        return True


class OfOthers:
    """Guards that are made of other arguments."""


@pytest.mark.parametrize("made", [None, AllAlike, OfOthers])
def test_without_guards_every_fact_is_looked_at(bound, monkeypatch, made):
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", made)
    if made is None:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    guards._is_as_known.cache_clear()
    try:
        tensors = tensors_of(requires_grad=True)
        for _ in range(2):
            attention(*tensors).sum().backward()
        assert attention(*tensors_of(sq=5)).shape == (1, 4, 5, 16)
    finally:
        guards._is_as_known.cache_clear()
    assert bound.paths == ["fast", "fast backward"] * 2 + ["fast"]
    assert not fast_path._recent
