"""What the tests of several faces call with, and how they look at a call."""

import contextlib
import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import UnsupportedProblem, use_backend

SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.0], [1.0, 0.0, 0.3, 0.7]])
# Where packed sequences begin and end: of 9 queries, and of 8 keys.
CU_Q, CU_K = torch.tensor([0, 3, 3, 9], dtype=torch.int32), torch.tensor([0, 5, 6, 8], dtype=torch.int32)


def signature(function):
    """Arguments with their defaults, without types."""
    return ", ".join(name if given.default is given.empty else f"{name}={given.default!r}"
                     for name, given in inspect.signature(function).parameters.items())


def tensors(sq, sk, hk=2, seed=0):
    """q (2, sq, 4, 8), k and v (2, sk, hk, 8), with gradients; and one for out."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, sq, 4, 8), (2, sk, hk, 8), (2, sk, hk, 8), (2, sq, 4, 8)
    *leaves, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    return *(leaf.requires_grad_() for leaf in leaves), dout


class Handed(TorchDispatchMode):
    """Keeps the q, k and v that reach tilewise's operator."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "attention_forward" in str(function):
            self.tensors = args[:3]
        return function(*args, **(kwargs or {}))


def handed(call):
    with Handed() as mode:
        call()
    return mode.tensors


@contextlib.contextmanager
def refusing_skips(backend):
    """Compute by this backend; the test is skipped with the reasons of a refusal."""
    with use_backend(backend.name):
        try:
            yield
        except UnsupportedProblem as refusal:
            pytest.skip(str(refusal))
