"""llm.c's layer as a provider: what is timed is its call, and its one gradient is told apart again."""

from dataclasses import replace

import pytest
import torch

from tilewise.bench.checking import Checker, Prepared
from tilewise.bench.grids import Cell, grid_cells
from tilewise.bench.llmc import LlmcProvider, llmc_providers
from tilewise.bench.options import make_tensors
from tilewise.bench.plan import available_providers, blank_row
from tilewise.bench.provenance import provenance
from tilewise.bench.shapes import CAUSAL, FULL, shape_case
from tilewise.masks import window

CPU = torch.device("cpu")
CELL = Cell("fp32", shape_case(2, (3, 3), (17, 17), (8, 8), CAUSAL, "bshd"), torch.float32)


@pytest.mark.parametrize("mask", [CAUSAL, FULL])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_it_is_right(direction, scale, mask):
    cell, provider = replace(CELL, case=replace(CELL.case, mask=mask, scale=scale)), LlmcProvider("reference")
    row = Checker(cell, make_tensors(cell, CPU), CPU).checked(
        blank_row(cell, provider.name, direction, "turns", provenance(CPU, "")), provider, direction)
    assert (row.provider, row.status, row.reason) == ("tilewise:reference:llmc", "ok", "")


def test_what_is_timed_is_one_packed_tensor_and_its_gradient(monkeypatch):
    called = []

    def packed_attention(packed, heads, **options):
        called.append((packed.shape, heads, options))
        return packed[..., :24] * 2

    monkeypatch.setattr("tilewise.bench.llmc.packed_attention", packed_attention)
    entry = Prepared(LlmcProvider("cuda"), CELL, make_tensors(CELL, CPU), CPU)
    (gradient,) = entry.training_step()
    assert gradient.shape == (2, 17, 72)
    assert called == [((2, 17, 72), 3, {"is_causal": True, "scale": None, "backend": "cuda"})]


@pytest.mark.parametrize("cell", [
    replace(CELL, cached=True),
    *(replace(CELL, case=shape_case(*shape, "bshd")) for shape in (
        (1, (4, 2), (9, 9), (8, 8), CAUSAL), (1, (2, 2), (9, 12), (8, 8), FULL), (1, (2, 2), (9, 9), (8, 4), FULL),
        (1, (2, 2), (9, 9), (8, 8), window(3, 0))))])
def test_what_the_layer_cannot_say_is_refused(cell):
    reason = LlmcProvider(None).reason_against(cell, "forward", CPU)
    assert reason.startswith("takes queries, keys and values of one shape, full or causal, got ")
    assert reason.endswith(str(cell.case))


def test_it_is_timed_where_it_is_named():
    unnamed, absent = available_providers([], CPU)
    assert not any("llmc" in name for name in (*absent, *(provider.name for provider in unnamed)))
    assert [provider.name for provider in available_providers(["tilewise:llmc"], CPU)[0]] == ["tilewise:llmc"]


def test_a_backends_refusal_is_its_own():
    assert "CUDA" in LlmcProvider("cuda").reason_against(CELL, "forward", CPU)


def test_the_fp32_grid_is_llm_cs_and_the_providers_take_it():
    cells = grid_cells(["fp32"])
    assert [(cell.case.b, cell.case.sq, cell.case.hq, cell.case.d) for cell in cells] == [
        (b, s, 12, d) for d in (64, 128) for b, s in ((8, 1024), (6, 4096), (1, 8192))]
    assert {(cell.case.mask, cell.dtype) for cell in cells} == {(CAUSAL, torch.float32)}
    assert [provider.name for provider in llmc_providers()] == ["tilewise:llmc", "tilewise:cuda:llmc",
                                                                "tilewise:cuda_ieee:llmc"]
    assert all(llmc_providers()[0].reason_against(cell, "backward", CPU) is None for cell in cells)
