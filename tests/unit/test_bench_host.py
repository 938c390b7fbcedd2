"""The host's cost of a call: what is inside the timing, and what is not."""

from contextlib import contextmanager

import pytest
import torch

from tilewise.bench.host import host_cell, run_host
from tilewise.bench.plan import Plan
from tilewise.bench.provenance import provenance
from tilewise.bench.providers import DenseProvider
from tilewise.bench.timing import Regime

CPU = torch.device("cpu")


class InContext(DenseProvider):
    """Dense attention that has to be called in a context of its own, as torch's operators do."""

    def __init__(self):
        self.is_held, self.entered, self.outside = False, 0, 0

    @contextmanager
    def context(self):
        self.entered, self.is_held = self.entered + 1, True
        try:
            yield
        finally:
            self.is_held = False

    def bind(self, cell, operands, device):
        dense = super().bind(cell, operands, device)

        def attend(q, k, v):
            self.outside += not self.is_held
            return dense(q, k, v)

        return attend


@pytest.mark.parametrize("calls", [3, 11])
def test_a_context_is_entered_once_for_all_timed_calls_of_a_turn(monkeypatch, calls):
    monkeypatch.setattr("tilewise.bench.host._CALLS", calls)
    monkeypatch.setattr("tilewise.bench.host._TURNS", 2)
    provider = InContext()
    rows = list(run_host(host_cell(CPU), Plan(CPU, [provider], Regime("host", 1, 1.0), provenance(CPU, ""))))
    assert [(row.direction, row.samples) for row in rows] == [
        (direction, 2 * calls) for direction in ("forward_no_grad", "forward", "forward_backward")]
    assert provider.outside == 0
    assert provider.entered == 2 + 2 * 3  # two checks, three timings a turn


def test_providers_take_turns(monkeypatch):
    monkeypatch.setattr("tilewise.bench.host._CALLS", 1)
    monkeypatch.setattr("tilewise.bench.host._WARMUPS", 0)
    monkeypatch.setattr("tilewise.bench.host._TURNS", 2)
    order = []
    monkeypatch.setattr("tilewise.bench.host.host_samples",
                        lambda call, *_: order.append(call.__self__.provider.name) or [1.0])
    first, second = InContext(), InContext()
    first.name, second.name = "first", "second"
    rows = list(run_host(host_cell(CPU), Plan(CPU, [first, second], Regime("host", 1, 1.0), provenance(CPU, ""))))
    assert order == 2 * (3 * ["first"] + 3 * ["second"])
    assert {(row.provider, row.samples) for row in rows} == {("first", 2), ("second", 2)}
