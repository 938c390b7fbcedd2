"""Which backend serves a compiled call that names none, in either pass."""

import pytest
import torch

from tilewise import UnsupportedProblem, attention, use_backend

# torch.compile instantiates autograd.Function inside, and warns of that; see torch/_dynamo/side_effects.py.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    monkeypatch.delenv("TILEWISE_BACKEND", raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _tensors():
    return [torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_scope_that_its_backward_pass_would_not_know_of_is_refused(compiler):
    """The forward pass was the scope's, and the backward pass of whichever backend came first."""
    step = torch.compile(lambda *t: attention(*t).sum(), fullgraph=True, backend=compiler)
    tensors = _tensors()
    with use_backend("reference"), pytest.raises(UnsupportedProblem) as caught:
        step(*tensors)
    assert str(caught.value).startswith(  # a graph adds where it stood
        "use_backend('reference') stands around a compiled call that has a gradient, and its backward pass, which "
        "runs elsewhere, would not know of it. Pass backend='reference' to the call, or set TILEWISE_BACKEND.")
    step(*tensors).backward()
    with use_backend("reference"), torch.no_grad():
        step(*tensors)
    named = torch.compile(lambda *t: attention(*t, backend="reference").sum(), fullgraph=True, backend=compiler)
    with use_backend("torch"):
        named(*tensors).backward()


def test_the_environment_names_both_passes_of_a_compiled_call(monkeypatch):
    step = torch.compile(lambda *t: attention(*t).sum(), fullgraph=True, backend="aot_eager")
    monkeypatch.setenv("TILEWISE_BACKEND", "cudnn")
    with pytest.raises(UnsupportedProblem, match="backend 'cudnn' refuses this problem: forward"):
        step(*_tensors())
    monkeypatch.setenv("TILEWISE_BACKEND", "reference")
    loss = step(*_tensors())
    monkeypatch.setenv("TILEWISE_BACKEND", "cudnn")
    with pytest.raises(UnsupportedProblem, match="backend 'cudnn' refuses this problem: backward"):
        loss.backward()
