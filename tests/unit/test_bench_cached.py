"""Decoding on caches: forms that are timed are right, refusals are sentences, and rates are told beside a copy's."""

from dataclasses import replace

import pytest
import torch

from tilewise.bench import cached
from tilewise.bench.cached import copies_of, copy_gb_per_s, draw_caches
from tilewise.bench.checking import Checker, Prepared
from tilewise.bench.clocks import ClockSampler
from tilewise.bench.decode import decode_providers, page_table
from tilewise.bench.grids import Cell, filtered, grid_cells
from tilewise.bench.plan import Plan, blank_row
from tilewise.bench.provenance import provenance
from tilewise.bench.providers import DenseProvider, own_providers, torch_providers
from tilewise.bench.report import markdown
from tilewise.bench.roofline import least_bytes
from tilewise.bench.runner import run
from tilewise.bench.shapes import FULL, shape_case
from tilewise.bench.timing import REGIMES
from tilewise.problem.decode import DecodeOptions, decode_problem, specs_of_inputs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CELL = Cell("decode", shape_case(3, (4, 2), (1, 512), (16, 16), FULL, "bshd"), torch.float32, cached=True)
PLAIN = replace(CELL, cached=False)
ORIGIN = provenance(CPU, "a command")
KNOWN = {provider.name: provider for provider in (*own_providers(), *torch_providers(), *decode_providers())}
FORMS = ["tilewise", "tilewise:reference", "tilewise:pages256", "tilewise:pages16", "tilewise:deterministic"]


def rows_of(*providers, device=CPU):
    ((_, rows),) = run([CELL], Plan(device, providers, REGIMES["turns"], ORIGIN))
    return {row.provider: row for row in rows}


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setitem(cached._COPIED, "cpu", 2**16)


def test_the_grid_is_of_one_query_and_a_cache_of_8k_and_64k_keys():
    cells = grid_cells(["decode"])
    assert all(cell.cached for cell in cells)
    assert {(cell.case.hq, cell.case.hk, cell.case.sq, cell.case.d, cell.case.layout, cell.dtype)
            for cell in cells} == {(32, 8, 1, 128, "bshd", torch.bfloat16)}
    assert [(cell.case.b, cell.case.sk) for cell in cells] == [
        *((b, 8192) for b in (1, 4, 8, 16, 32, 64)), *((b, 65536) for b in (1, 4, 8, 16))]
    assert [cell.case.b for cell in filtered(cells, lengths=[65536])] == [1, 4, 8, 16]


def test_a_cell_describes_the_call_that_its_tensors_make():
    inputs = draw_caches(CELL, CPU).inputs
    assert CELL.decode_problem(CPU) == decode_problem(specs_of_inputs(*inputs[:3]), (), DecodeOptions())
    assert CELL.decode_problem(CUDA).device == CUDA


@pytest.mark.parametrize("name", [*FORMS, "naive", "sdpa_math", "sdpa_flash", "sdpa_flash_folded"])
def test_every_form_is_right(name):
    row = Checker(CELL, draw_caches(CELL, CPU), CPU).checked(
        blank_row(CELL, name, "forward", "cold", ORIGIN), KNOWN[name], "forward")
    assert (row.status, row.reason, row.checked) == ("ok", "", "full")


def test_our_forms_call_decoding(monkeypatch):
    calls = []
    monkeypatch.setattr("tilewise.bench.providers.attention_decode",
                        lambda q, k, v, **options: calls.append((k.shape, k.stride(), options)) or q)
    for name in FORMS:
        Prepared(KNOWN[name], CELL, draw_caches(CELL, CPU), CPU).forward()
    shapes, strides, options = zip(*calls, strict=True)
    assert shapes == ((3, 2, 512, 16), (3, 2, 512, 16), (6, 2, 256, 16), (96, 2, 16, 16), (3, 2, 512, 16))
    assert {(own[1], own[2], own[3]) for own in strides} == {(16, 32, 1)}  # heads of a position side by side
    assert [one["cache_seqlens"].tolist() for one in options] == [[512] * 3] * 5
    assert [one["backend"] for one in options] == [None, "reference", None, None, None]
    assert [one["deterministic"] for one in options] == [None] * 4 + [True]
    assert [one["block_table"].shape for one in options if "block_table" in one] == [(3, 2), (3, 32)]


def test_pages_lie_anywhere():
    table = page_table(3, 32)
    assert sorted(table.flatten().tolist()) == list(range(96))
    assert not torch.equal(table.flatten(), torch.arange(96))
    assert torch.equal(table, page_table(3, 32))


@pytest.mark.parametrize(("name", "cell", "direction", "words"), [
    ("tilewise", CELL, "backward", "has no backward pass of decoding"),
    ("tilewise:pages16", CELL, "backward", "has no backward pass of decoding"),
    ("tilewise:pages256", PLAIN, "forward", "reads caches alone"),
    ("tilewise:pages16", replace(CELL, case=replace(CELL.case, sk=520)), "forward",
     "takes caches of a multiple of 16 keys, got 520"),
    ("sdpa_flash_folded", PLAIN, "forward", "reads caches alone"),
    ("sdpa_flash_folded", replace(CELL, case=replace(CELL.case, hk=4)), "forward",
     "takes one query of grouped heads, got 1 of 4 heads on 4"),
    *((f"tilewise:{backend}", CELL, "forward", "does not decode; backend='triton' and 'reference' do")
      for backend in ("gluon", "cuda", "cuda_ieee", "cudnn", "torch")),
])
def test_what_a_provider_does_not_take_it_refuses_with_a_sentence(name, cell, direction, words):
    assert KNOWN[name].reason_against(cell, direction, CPU) == words


def test_rows_hold_bytes_a_second_and_one_of_them_is_a_copy(device):
    rows = rows_of(KNOWN["tilewise"], KNOWN["tilewise:pages16"], KNOWN["tilewise:gluon"], KNOWN["naive"],
                   device=device)
    assert list(rows) == ["tilewise", "tilewise:pages16", "tilewise:gluon", "naive", "copy"]
    for name in ("tilewise", "tilewise:pages16", "naive"):
        row = rows[name]
        assert (row.status, row.regime, row.direction, row.sq, row.sk, row.samples) == ("ok", "cold", "forward", 1,
                                                                                         512, 7)
        assert row.gb_per_s == pytest.approx(least_bytes(CELL.case, CELL.dtype, "forward") / row.ms_p50 / 1e6)
        assert row.peak_mib is not None
    assert (rows["tilewise:gluon"].status, rows["tilewise:gluon"].ms_p50) == ("refused", None)
    copy = rows["copy"]
    assert (copy.status, copy.ms_p50) == ("ok", None)
    assert copy.gb_per_s > 0


def test_there_are_no_rows_of_a_backward_pass_alone():
    ((_, rows),) = run([CELL], Plan(CPU, [KNOWN["tilewise"]], REGIMES["turns"], ORIGIN, directions=("backward",)))
    assert rows == []


def test_what_breaks_when_it_is_timed_leaves_its_words(monkeypatch):
    class Tired(DenseProvider):
        calls = 0

        def bind(self, cell, operands, device):
            dense = super().bind(cell, operands, device)

            def attend(q, k, v):
                self.calls += 1
                if self.calls > 1:
                    raise ValueError("no capture")
                return dense(q, k, v)

            return attend

    rows = rows_of(Tired(), KNOWN["tilewise"])
    assert (rows["naive"].status, rows["naive"].reason) == ("failed", "ValueError: no capture")
    assert rows["tilewise"].status == "ok"


def test_a_time_is_that_of_a_turn_over_its_caches(monkeypatch):
    monkeypatch.setattr(cached, "copies_of", lambda tensors, device: 4)
    given = []
    measure = cached.measure

    def measured(calls, regime, device, clocks):
        times = measure(calls, regime, device, clocks)
        given.append(times)
        return times

    monkeypatch.setattr(cached, "measure", measured)
    places = []
    bind = DenseProvider.bind

    def noting(self, cell, operands, device):
        dense = bind(self, cell, operands, device)
        return lambda q, k, v: places.append(k.data_ptr()) or dense(q, k, v)

    monkeypatch.setattr(DenseProvider, "bind", noting)
    rows = rows_of(KNOWN["naive"])
    assert rows["naive"].ms_p50 == given[0]["naive"].p50 / 4
    assert len(set(places[-5:-1])) == 4


def test_caches_are_as_many_as_outlast_l2():
    shape = {1: (1, 8, 8192, 128), 64: (64, 8, 8192, 128)}
    for b, copies in ((1, 9), (64, 1)):
        inputs = draw_caches(replace(CELL, case=shape_case(1, (1, 1), (1, 1), (1, 1), FULL, "bshd")), CPU).inputs
        large = torch.empty(shape[b], dtype=torch.bfloat16, device="meta")
        tensors = draw_caches(CELL, CPU)._replace(inputs=inputs._replace(k=large, v=large))
        assert copies_of(tensors, CUDA) == copies
        assert copies_of(tensors, CPU) == 1
    assert copies_of(draw_caches(CELL, CPU), CUDA) == 10


def test_the_copy_is_measured_once_a_run(monkeypatch):
    count = []
    monkeypatch.setattr(cached, "measure", lambda calls, *others: count.append(1) or {
        "copy": type("Times", (), {"p50": 4.0})})
    with ClockSampler(CPU) as first, ClockSampler(CPU) as second:
        assert copy_gb_per_s(CPU, first) == copy_gb_per_s(CPU, first) == pytest.approx(2 * 2**16 / 1.0 / 1e6)
        copy_gb_per_s(CPU, second)
    assert len(count) == 2


def test_the_table_tells_terabytes_a_second_the_share_of_a_copy_and_how_many_times_as_fast():
    base = blank_row(CELL, "", "forward", "cold", ORIGIN)
    rows = [replace(base, provider=name, ms_p50=ms, gb_per_s=rate) for name, ms, rate in (
        ("tilewise", 0.5, 4000.0), ("tilewise:pages16", 0.6, 3333.0), ("sdpa_cudnn", 1.0, 2000.0),
        ("copy", None, 4200.0))]
    lines = markdown([*rows, replace(base, provider="sdpa_flash", status="refused")]).splitlines()
    assert lines[0].startswith("TB/s, of ours what it is of a copy's, of the others how many times tilewise is as fast")
    assert lines[2].endswith("| tilewise | tilewise:pages16 | sdpa_cudnn | copy | sdpa_flash |")
    assert lines[4] == ("| b3 h4/2 s1/512 d16 float32 full | forward | **4.00** (95%) | 3.33 (79%) | 2.00 (2.00×) | "
                        "4.20 | refused |")
    assert "4.00 (" not in markdown(rows[:1])
