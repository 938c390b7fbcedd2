"""Memory for results, past torch's front end, which costs a small call's host as much as the look-up of its plan."""

from collections.abc import Callable
from functools import cache, partial

import torch

from tilewise.problem import AttentionProblem, Sizes

Form = tuple[Sizes, Sizes, torch.dtype]  # sizes, strides, dtype
Allocate = Callable[[Sizes, Sizes, torch.dtype], torch.Tensor]


@cache
def allocator(device: torch.device) -> Allocate:
    """Return what makes a tensor on a device, which is the current one of its kind; its memory holds anything.

    It is what the code calls that torch's own compiler writes: 1 µs, where ``torch.empty_strided`` takes 2 and
    ``torch.empty`` 3 (beside an H200). A torch without it has the former.
    """
    short: Allocate | None = getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{device.type}", None)
    return short or _general(device)


def _general(device: torch.device) -> Allocate:
    make = partial(torch.empty_strided, device=device)
    return lambda sizes, strides, dtype: make(sizes, strides, dtype=dtype)


def forms_of_results(problem: AttentionProblem) -> tuple[Form, Form]:
    """Return the forms of out, and of lse and what else has a number a row."""
    rows = (problem.b, problem.hq, problem.sq)
    return (((*rows, problem.dv), problem.out_strides, problem.out_dtype),
            (rows, (problem.hq * problem.sq, problem.sq, 1), torch.float32))


def forms_of_gradients(problem: AttentionProblem, strides: tuple[Sizes, Sizes, Sizes]) -> tuple[Form, Form, Form]:
    """Return the forms of dq, dk and dv, which have these strides."""
    (of_q, of_k, of_v), dtype = strides, problem.out_dtype
    keys = (problem.b, problem.hk, problem.sk)
    return (((problem.b, problem.hq, problem.sq, problem.d), of_q, dtype), ((*keys, problem.d), of_k, dtype),
            ((*keys, problem.dv), of_v, dtype))
