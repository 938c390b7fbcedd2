"""Bind a provider to a cell's tensors, and hold its results against float64 before anything is timed."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from tilewise.bench.accuracy import References, check_plan
from tilewise.bench.grids import Cell
from tilewise.bench.providers import Provider
from tilewise.bench.roofline import Direction
from tilewise.bench.rows import Row
from tilewise.errors import UnsupportedProblem
from tilewise.testing.inputs import Inputs, make_inputs
from tilewise.testing.tolerance import ErrorReport

_REASON_LENGTH = 300


class Prepared:
    """A provider bound to a cell and its inputs, in the provider's own order of dims."""

    def __init__(self, provider: Provider, cell: Cell, inputs: Inputs, device: torch.device) -> None:
        self.provider = provider
        self.attend = provider.bind(cell, device)
        self.leaves = [provider.native(tensor.detach()).requires_grad_() for tensor in inputs[:3]]
        self.dout = provider.native(inputs.dout)

    def forward(self) -> torch.Tensor:
        """Run the training forward: what the backward needs is kept."""
        return self.attend(*self.leaves)

    def forward_without_grad(self) -> torch.Tensor:
        """Run the forward of inference."""
        with torch.no_grad():
            return self.attend(*self.leaves)

    def training_step(self) -> tuple[torch.Tensor, ...]:
        """Run forward and backward, keeping nothing between calls."""
        return torch.autograd.grad(self.forward(), self.leaves, self.dout)

    def call(self, direction: Direction) -> Callable[[], object]:
        """Return one direction alone as a call; for the backward, the forward runs once, here."""
        return self.forward if direction == "forward" else self._backward_call()

    def results(self, direction: Direction) -> dict[str, torch.Tensor]:
        """Return what a direction computes, by name, dims (b, h, s, d)."""
        named = ({"out": self.forward()} if direction == "forward" else
                 dict(zip(("dq", "dk", "dv"), self._backward_call()(), strict=True)))
        return {name: self.provider.native(tensor.detach()) for name, tensor in named.items()}

    def _backward_call(self) -> Callable[[], tuple[torch.Tensor, ...]]:
        out = self.forward()
        return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)


class Checker:
    """The float64 results of one cell, computed once for all providers."""

    def __init__(self, cell: Cell, inputs: Inputs, device: torch.device) -> None:
        self._cell, self._device = cell, device
        self._plan = check_plan(cell, device)
        self._inputs = inputs if self._plan.is_full_shape else make_inputs(self._plan.cell.case, cell.dtype, device)
        self._references = References.of(self._plan, self._inputs, lse_grad=False)

    def checked(self, row: Row, provider: Provider, direction: Direction) -> Row:
        """Return the row with its errors, its status, and the reason if that is not ok."""
        reason = provider.why_not(self._cell, direction, self._device)
        if reason is not None:
            return replace(row, status="refused", reason=reason)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # torch explains in warnings why it has no kernel
            try:
                got = Prepared(provider, self._plan.cell, self._inputs, self._device).results(direction)
            except UnsupportedProblem as error:
                return replace(row, status="refused", reason=one_line(error))
            except Exception as error:  # other packages refuse by any exception; the row keeps its words
                notes = " | ".join(str(warning.message) for warning in caught)
                return replace(row, status="failed", reason=one_line(error, notes))
        return _with_errors(replace(row, checked=self._plan.text), self._references.reports(got))


def one_line(error: Exception, notes: str = "") -> str:
    """Write an exception as the reason of a row."""
    text = " ".join(f"{type(error).__name__}: {error} {notes}".split())
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 1] + "…"


def _with_errors(row: Row, reports: list[ErrorReport]) -> Row:
    row = replace(row, max_error=max(report.max_error for report in reports),
                  mean_error=max(report.mean_error for report in reports))
    over = [report for report in reports if not report.ok]
    return replace(row, status="wrong", reason="; ".join(map(str, over))) if over else row
