"""Bind a provider to a cell's tensors, and hold its results against float64 before anything is timed."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property

import torch

from tilewise.bench.accuracy import References, check_plan
from tilewise.bench.grids import Cell
from tilewise.bench.options import Tensors, make_tensors
from tilewise.bench.providers import Attend, Dims, Provider
from tilewise.bench.roofline import Direction
from tilewise.bench.rows import Row
from tilewise.errors import UnsupportedProblem
from tilewise.testing.tolerance import ErrorReport

_REASON_LENGTH = 300


class Prepared:
    """A provider bound to a cell and its tensors, in the provider's own order of dims.

    Each call enters the provider's context, unless ``in_context``: then the caller holds it.
    """

    def __init__(self, provider: Provider, cell: Cell, tensors: Tensors, device: torch.device, *,
                 in_context: bool = False) -> None:
        self.provider, self._case, self._dims = provider, cell.case, provider.dims(cell.case)
        inputs, operands = tensors
        stored = provider.stored(*(native(tensor.detach(), self._dims) for tensor in inputs[:3]))
        self._stored = tuple(tensor.detach().requires_grad_(not cell.cached) for tensor in stored)
        learned = {name: getattr(operands, name).detach().requires_grad_() for name in cell.learned}
        bound = provider.bind(cell, operands._replace(**learned), device)
        self.attend = bound if in_context else _in_context(provider, bound)
        self._learned = learned
        self.leaves = (*self._stored, *learned.values())
        self.dout = native(inputs.dout, self._dims)

    def forward(self) -> torch.Tensor:
        """Run the training forward: what the backward needs is kept."""
        return self.attend(*self._stored)

    def forward_without_grad(self) -> torch.Tensor:
        """Run the forward of inference."""
        with torch.no_grad():
            return self.forward()

    def training_step(self) -> tuple[torch.Tensor, ...]:
        """Run forward and backward, keeping nothing between calls."""
        return torch.autograd.grad(self.forward(), self.leaves, self.dout)

    def call(self, direction: Direction) -> Callable[[], object]:
        """Return one direction alone as a call; for the backward, the forward runs once, here."""
        return self.forward if direction == "forward" else self._backward_call()

    def results(self, direction: Direction) -> dict[str, torch.Tensor]:
        """Return what a direction computes, by name; dims (b, h, s, d), and an operand's own for its gradient."""
        if direction == "forward":
            return {"out": standard(self.forward().detach(), self._dims)}
        found, count = self._backward_call()(), len(self._stored)
        inputs = zip(("dq", "dk", "dv"), self.provider.gradients_of(found[:count], self._case), strict=True)
        return ({name: standard(tensor, self._dims) for name, tensor in inputs}
                | {f"d{name}": tensor for name, tensor in zip(self._learned, found[count:], strict=True)})

    def _backward_call(self) -> Callable[[], tuple[torch.Tensor, ...]]:
        out = self.forward()
        return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)


class Checker:
    """The float64 results of one cell, computed once for all providers."""

    def __init__(self, cell: Cell, tensors: Tensors, device: torch.device) -> None:
        self._cell, self._whole, self._device = cell, tensors, device
        self._plan = check_plan(cell, device)
        self._tensors = tensors if self._plan.cell == cell else make_tensors(self._plan.cell, device)
        self._references = References.of(self._plan, *self._tensors, lse_grad=False)

    def checked(self, row: Row, provider: Provider, direction: Direction) -> Row:
        """Return the row with its errors, its status, and the reason if that is not ok.

        A provider whose dropout draws another mask than ours is checked with a dropout_p of 0; the row says so.
        """
        reason = provider.reason_against(self._cell, direction, self._device)
        if reason is not None:
            return replace(row, status="refused", reason=reason)
        if self._cell.case.dropout_p and not provider.draws_alike:
            row = self._without_dropout.checked(row, provider, direction)
            return replace(row, checked=f"{row.checked}, at dropout_p 0") if row.checked else row
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # torch explains in warnings why it has no kernel
            try:
                got = Prepared(provider, self._plan.cell, self._tensors, self._device).results(direction)
            except UnsupportedProblem as error:
                return replace(row, status="refused", reason=one_line(error))
            except Exception as error:  # other packages refuse by any exception; the row keeps its words
                notes = " | ".join(str(warning.message) for warning in caught)
                return replace(row, status="failed", reason=one_line(error, notes))
        return _with_errors(replace(row, checked=self._plan.text), self._references.reports(got))

    @cached_property
    def _without_dropout(self) -> "Checker":
        cell = replace(self._cell, case=replace(self._cell.case, dropout_p=0.0))
        inputs, operands = self._whole
        return Checker(cell, Tensors(inputs, operands._replace(seed=None)), self._device)


def _in_context(provider: Provider, attend: Attend) -> Attend:
    """Return the function with the provider's context around each call."""
    if provider.context() is None:
        return attend

    def attend_in_context(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with provider.context() or nullcontext():
            return attend(q, k, v)

    return attend_in_context


def native(tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
    """Turn (b, h, s, d) dims into another order, as a view."""
    if dims == "shd":
        return tensor.squeeze(0).transpose(0, 1)
    return tensor.transpose(1, 2) if dims == "bshd" else tensor


def standard(tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
    """Turn dims in that order back into (b, h, s, d), as a view."""
    return tensor.transpose(0, 1)[None] if dims == "shd" else native(tensor, dims)


def one_line(error: Exception, notes: str = "") -> str:
    """Write an exception as the reason of a row."""
    text = " ".join(f"{type(error).__name__}: {error} {notes}".split())
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 1] + "…"


def _with_errors(row: Row, reports: list[ErrorReport]) -> Row:
    row = replace(row, max_error=max(report.max_error for report in reports),
                  mean_error=max(report.mean_error for report in reports))
    over = [report for report in reports if not report.ok]
    return replace(row, status="wrong", reason="; ".join(map(str, over))) if over else row
