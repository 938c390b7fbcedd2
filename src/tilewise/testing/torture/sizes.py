"""Sizes past what 16 and 32 bits count."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilewise.masks import Mask, causal
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs
from tilewise.testing.placement import far_apart
from tilewise.testing.torture import issues
from tilewise.testing.torture.checks import Check, Run
from tilewise.testing.torture.trial import Got, Trial, demand_finite, demand_zero

_GPU_ONLY = "its size needs a GPU"
_PAST_16_BITS = 2**16 + 8


def _check(name: str, about: str, run: Run, elements: int, *, issue: str | None = None, **fields: Any) -> Check:
    return Check(name, "sizes", about, Case(name, **fields), run, issue, gpu_only=_GPU_ONLY, elements=elements)


def drawn(trial: Trial, case: Case) -> Inputs:
    """Draw the tensors on the device itself: numbers drawn on the CPU would take minutes."""
    generator = torch.Generator(trial.device).manual_seed(0)

    def draw(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.randn((case.b, heads, length, dim), generator=generator, device=trial.device, dtype=trial.dtype)

    dout = draw(case.hq, case.sq, case.dv)
    return Inputs(draw(case.hq, case.sq, case.d), draw(case.hk, case.sk, case.d), draw(case.hk, case.sk, case.dv),
                  dout, dout[..., 0].float())


def some_of(dim: int, trial: Trial, case: Case) -> None:
    """Run the whole, hold the entries of a dim at both ends and between against float64; all others are finite.

    Args:
        dim: 0 of batch entries, 1 of heads.
    """
    inputs = drawn(trial, case)
    got = trial.results(case, inputs)
    size = inputs.q.shape[dim]
    entries = sorted({*range(min(4, size)), *range(max(0, size - 16), size), *range(0, size, max(1, size // 13))})
    chosen = torch.tensor(entries, device=trial.device)
    part = replace(case, b=len(entries)) if dim == 0 else replace(case, hq=len(entries), hk=len(entries))
    demand_finite(got.items())
    trial.judge(part, Inputs(*(tensor.index_select(dim, chosen) for tensor in inputs)),
                Got(**{name: tensor.index_select(dim, chosen) for name, tensor in got.items()}))


def offsets_along(dim: int, trial: Trial, case: Case) -> None:
    """Run with tensors whose last index of a dim is 2³¹ elements and more away from the first."""
    inputs = trial.inputs(case)
    q, k, v, dout = far_apart(tuple(inputs[:4]), dim)
    trial.judge(case, inputs, trial.results(case, inputs._replace(q=q, k=k, v=v, dout=dout)))


def some_rows(trial: Trial, case: Case) -> None:
    """Let a gradient arrive at some rows alone: those rows then have all gradients, and the others a dq of 0."""
    inputs = drawn(trial, case)
    step = max(1, case.sq // 61)
    rows = torch.tensor(sorted({*range(0, case.sq, step), case.sq - 1}), device=trial.device)
    others = torch.ones(case.sq, dtype=torch.bool, device=trial.device)
    others[rows] = False
    inputs = inputs._replace(dout=inputs.dout.masked_fill(others[:, None], 0.0))
    got = trial.results(case, inputs)
    if got.dq is not None:
        demand_zero([("dq", got.dq[:, :, others])], "in a row at which no gradient arrives")
        got = got._replace(dq=got.dq[:, :, rows])
    part = replace(case, sq=len(rows), mask=Mask())
    seen = None
    if case.mask.is_bounded:
        seen = (torch.arange(case.sk, device=trial.device) <= rows[:, None])[None, None]
    lse = None if got.lse is None else got.lse[:, :, rows]
    trial.judge(part, inputs._replace(q=inputs.q[:, :, rows], dout=inputs.dout[:, :, rows]),
                got._replace(out=got.out[:, :, rows], lse=lse), mask=seen)


def _offsets(name: str, what: str, dim: int, issue: str | None) -> Check:
    run: Callable[[Trial, Case], None] = partial(offsets_along, dim)
    # The storage of all four tensors, and each result of such strides.
    return _check(name, f"{what} of q, k, v and dout are 2³¹ elements and more apart", run, 6 * 2**31, issue=issue, b=2,
                  sq=192, sk=192, mask=causal())


CHECKS: tuple[Check, ...] = (
    _check("batch_of_65544", "65544 batch entries of 16 tokens: more than a launch grid's second dim has",
           partial(some_of, 0), 16 * _PAST_16_BITS * 1024, b=_PAST_16_BITS, hq=1, hk=1, sq=16, sk=16,
           issue=issues.BATCH_OF_65536),
    _check("heads_65544", "65544 heads of 16 tokens", partial(some_of, 1), 16 * _PAST_16_BITS * 1024, hq=_PAST_16_BITS,
           hk=_PAST_16_BITS, sq=16, sk=16, issue=issues.HEADS_OF_65536),
    _check("elements_past_2_31", "4104 batch entries of 16 heads and 512 tokens: each tensor has more than 2³¹ "
           "elements", partial(some_of, 0), 13 * 2**31, b=4104, hq=16, hk=16, sq=512, sk=512, mask=causal()),
    _offsets("rows_past_2_31", "rows", 2, issues.OFFSETS_OF_ROWS),
    _offsets("heads_past_2_31", "heads", 1, issues.OFFSETS_OF_HEADS),
    _offsets("entries_past_2_31", "batch entries", 0, issues.OFFSETS_OF_HEADS),
    _check("length_of_65600", "one head of 65600 tokens: more than 2³¹ scores", some_rows, 2**28, hq=1, hk=1, sq=65600,
           sk=65600, issue=issues.LENGTH_OF_65536),
    _check("length_of_65600_causal", "the same, causal", some_rows, 2**28, hq=1, hk=1, sq=65600, sk=65600,
           mask=causal(), issue=issues.LENGTH_OF_65536),
)
