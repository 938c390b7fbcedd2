"""A backend that binds its launches and notes which path each pass took, for the tests of the fast path."""

import torch

from tilewise import dispatch
from tilewise.backends.reference import ReferenceBackend
from tilewise.support.caches import clear_caches


class Bound(ReferenceBackend):
    """The reference, with launches that are bound; notes which path each pass took."""

    def __init__(self):
        self.paths, self.binds = [], 0

    def forward(self, *given, **named):
        self.paths.append("operator")
        return super().forward(*given, **named)

    def backward(self, *given, **named):
        self.paths.append("operator backward")
        return super().backward(*given, **named)

    def bind_forward(self, problem):
        self.binds += 1

        def attend(tensors, addresses, operands):
            q, k, v = tensors()
            assert addresses == (q.data_ptr(), k.data_ptr(), v.data_ptr())
            self.paths.append("fast")
            made = super(Bound, self).forward(problem, q, k, v, operands)
            return tuple(result for result in made if result is not None)

        return attend

    def bind_backward(self, problem, saved, dout, dlse, needs):
        self.binds += 1
        facts = [tensor.stride() for tensor in (*saved[:5], dout)]

        def differentiate(tensors, addresses):
            assert [tensor.stride() for tensor in tensors[:6]] == facts
            assert addresses == tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)
            assert (tensors[6] is None) == (dlse is None)
            self.paths.append("fast backward")
            return super(Bound, self).backward(problem, saved._make((*tensors[:5], saved.operands)), *tensors[5:],
                                               needs)[:3]

        return differentiate


def binding(monkeypatch):
    """Let every name be that of the one backend which binds, as long as a fixture lasts."""
    made, real = Bound(), dispatch.get_backend
    monkeypatch.delenv("TILEWISE_FAST_PATH", raising=False)
    monkeypatch.delenv("TILEWISE_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "get_backend", lambda name: real(name) and made)
    clear_caches()
    yield made
    clear_caches()


def tensors_of(dtype=torch.float32, *, requires_grad=False, sq=8, hk=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(requires_grad)
            for shape in ((1, 4, sq, 16), (1, hk, 8, 16), (1, hk, 8, 16))]


def by_operators(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setenv("TILEWISE_FAST_PATH", "0")
        return call()


def paths_of(bound, call):
    bound.paths.clear()
    result = call()
    return bound.paths, result
