"""A run: check first, then time."""

from dataclasses import replace

import pytest
import torch

from tilewise.bench.grids import GRIDS, Cell, grid_cells
from tilewise.bench.packed import DocumentsProvider
from tilewise.bench.plan import Plan, available_providers, takers
from tilewise.bench.provenance import provenance
from tilewise.bench.providers import DenseProvider, Provider, TilewiseProvider
from tilewise.bench.roofline import flops
from tilewise.bench.runner import is_short, run, work
from tilewise.bench.shapes import FULL, packed_case, shape_case
from tilewise.bench.timing import Regime
from tilewise.errors import InvalidInput
from tilewise.masks import causal

CPU = torch.device("cpu")
CELL = Cell("flags", shape_case(1, (2, 1), (33, 33), (16, 16), FULL), torch.float32)


class Scaled(Provider):
    """Dense attention times a factor: wrong unless that is 1."""

    def __init__(self, name, factor, refusal=None):
        self.name, self.factor, self.refusal, self.calls = name, factor, refusal, 0

    def why_not(self, cell, direction, device):
        return self.refusal if direction == "backward" else None

    def bind(self, cell, operands, device):
        dense = DenseProvider().bind(cell, operands, device)

        def attend(q, k, v):
            self.calls += 1
            return dense(q, k, v) * self.factor

        return attend


class Broken(Provider):
    name = "broken"

    def bind(self, cell, operands, device):
        def attend(q, k, v):
            raise ValueError("no kernel for this")

        return attend


def plan(*providers, **options):
    regime = Regime("test", turns=2, burst=0.1, least_warmups=0, least_calls=1)
    return Plan(CPU, providers, regime, provenance(CPU, "a command"), **options)


def rows_of(*providers, **options):
    ((_, rows),) = run([CELL], plan(*providers, **options))
    return {(row.provider, row.direction): row for row in rows}


def test_a_right_provider_gets_time_memory_error_and_provenance():
    rows = rows_of(Scaled("right", 1.0))
    for direction in ("forward", "backward"):
        row = rows["right", direction]
        assert row.status == "ok"
        assert 0 < row.ms_p20 <= row.ms_p50 <= row.ms_p80
        assert row.tflops == pytest.approx(flops(CELL.case, direction) / row.ms_p50 / 1e9)
        assert row.peak_mib is not None
        assert row.max_error < 1e-5
        assert (row.checked, row.command, row.torch) == ("full", "a command", torch.__version__)


def test_a_wrong_result_is_written_with_its_reason_and_never_timed():
    provider = Scaled("wrong", 1.01)
    rows = rows_of(provider)
    for direction, name in (("forward", "out"), ("backward", "dq")):
        row = rows["wrong", direction]
        assert row.status == "wrong"
        assert f"{name} OVER BUDGET" in row.reason
        assert row.ms_p50 is None
        assert row.peak_mib is None
    assert provider.calls == 2  # once a direction, in the check


def test_a_provider_that_raises_leaves_its_words_and_the_others_go_on():
    rows = rows_of(Broken(), Scaled("right", 1.0))
    assert rows["broken", "forward"].status == "failed"
    assert rows["broken", "forward"].reason == "ValueError: no kernel for this"
    assert rows["right", "forward"].status == "ok"


def test_a_refusal_of_one_direction_leaves_the_other():
    rows = rows_of(Scaled("half", 1.0, refusal="has no backward"))
    assert rows["half", "forward"].status == "ok"
    assert (rows["half", "backward"].status, rows["half", "backward"].reason) == ("refused", "has no backward")


def test_only_the_directions_asked_for_are_run():
    assert set(rows_of(Scaled("right", 1.0), directions=("backward",))) == {("right", "backward")}


def test_a_cell_is_timed_in_its_own_directions_alone():
    provider = Scaled("half", 1.0, refusal="has no backward")
    cell = replace(CELL, directions=("backward",))
    ((_, rows),) = run([cell], plan(provider))
    assert [(row.direction, row.status) for row in rows] == [("backward", "refused")]
    assert takers([provider], [cell], CPU) == ([], {"half": "has no backward"})


def test_a_cell_of_the_hosts_time_has_the_rows_of_the_host_mode(monkeypatch):
    monkeypatch.setattr("tilewise.bench.host._CALLS", 2)
    monkeypatch.setattr("tilewise.bench.host._TURNS", 1)
    ((_, rows),) = run([replace(CELL, directions=("backward",), on_host=True)], plan(Scaled("right", 1.0)))
    assert [(row.direction, row.regime, row.grid) for row in rows] == [
        (direction, "host", "flags") for direction in ("forward_no_grad", "forward", "forward_backward")]
    assert all(row.host_us > 0 for row in rows)


def test_a_spent_budget_stops_before_the_next_cell():
    cells = [CELL, replace(CELL, grid="second")]
    assert [cell.grid for cell, _ in run(cells, plan(Scaled("right", 1.0), budget=1e-6))] == ["flags"]
    assert [cell.grid for cell, _ in run(cells, plan(Scaled("right", 1.0), budget=600.0))] == ["flags", "second"]


def test_calls_are_short_by_their_length_or_by_their_work():
    def is_replayed(b, s, d, mask=FULL):
        return is_short(Cell("flags", shape_case(b, (16, 16), (s, s), (d, d), mask), torch.bfloat16))

    assert is_replayed(64, 1024, 128)  # 275 GFLOP
    assert is_replayed(1, 2048, 128)  # 34
    assert not is_replayed(2, 2048, 128)  # 69
    assert is_replayed(2, 2048, 128, causal())  # 34
    assert not is_replayed(1, 4096, 64)  # 69


def test_providers_that_need_a_gpu_are_absent_with_a_sentence():
    present, absent = available_providers(["naive", "flash_attn3", "sdpa_cudnn"], CPU)
    assert [provider.name for provider in present] == ["naive"]
    assert "GPU" in absent["flash_attn3"]
    assert "GPU" in absent["sdpa_cudnn"]


def test_a_provider_that_takes_no_cell_at_all_is_absent_with_its_reason():
    packed = Cell("packed", packed_case((2, 1), (9, 5), 16, FULL), torch.float32)
    never, backward = (Scaled(name, 1.0, refusal="has no backward") for name in ("never", "backward"))
    never.reason_against = lambda cell, direction, device: f"takes no {cell.grid}"
    assert takers([never, backward, DocumentsProvider("reference")], [CELL], CPU) == (
        [backward], {"never": "takes no flags", "tilewise:reference:documents": "takes packed sequences alone"})
    documents = DocumentsProvider("reference")
    assert takers([documents], [CELL, packed, CELL], CPU) == ([documents], {})


@pytest.mark.parametrize("provider", [TilewiseProvider("reference"), DocumentsProvider("reference")])
def test_packed_sequences_are_timed_and_their_memory_measured(provider):
    packed = Cell("packed", packed_case((2, 1), (40, 0, 300), 16, causal("top_left")), torch.float32)
    ((_, rows),) = run([packed], plan(provider))
    for row in rows:
        assert (row.status, row.b, row.sq) == ("ok", 3, 300)
        assert row.tflops == pytest.approx(flops(packed.case, row.direction) / row.ms_p50 / 1e9)
        assert row.peak_mib is not None


def test_a_packed_cell_takes_the_time_of_its_own_pairs():
    packed = Cell("packed", packed_case((2, 1), (400, 300), 16, FULL), torch.float32)
    assert work(packed) - work(CELL) == 2 * 16 * (400**2 + 300**2 - 33**2)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("backend", ["cudnn", "cuda", "cuda_ieee", "gluon", "triton"])
def test_every_backend_can_be_said_for_every_grid_and_answers_in_a_sentence(backend, grid):
    cuda = torch.device("cuda")
    (provider,), absent = available_providers([f"tilewise:{backend}"], cuda)
    assert absent == {}
    cell = grid_cells([grid])[0]
    reason = provider.reason_against(cell, "forward", torch.device("cpu"))
    assert reason is None or " " in reason


def test_an_unknown_provider_raises_and_lists_the_known():
    with pytest.raises(InvalidInput, match=r"'nave'.*naive"):
        available_providers(["nave"], CPU)
