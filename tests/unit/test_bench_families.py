"""The families of calls in which another library was ahead: their cells, and the table of how tilewise stands."""

import runpy
from pathlib import Path

import pytest
import torch

from tilewise.bench.families import FAMILIES, family_of
from tilewise.bench.grids import filtered, grid_cells
from tilewise.bench.rows import write_rows
from tilewise.bench.support import as_if_on
from tilewise.dispatch import choose
from tilewise.masks import Mask, causal, window
from unit.bench_rows import row

ROOT = Path(__file__).resolve().parents[2]
CELLS = grid_cells(["families"])


def cells_of(family):
    return [cell for cell in CELLS if cell.family == family]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_three_cells_or_more_in_either_dtype_of_several_lengths_and_heads(name):
    for dtype in (torch.bfloat16, torch.float16):
        cases = [cell.case for cell in cells_of(name) if cell.dtype == dtype]
        assert len(cases) >= 3
        assert len({case.sq for case in cases}) >= 2
        assert len({(case.hq, case.hk) for case in cases}) >= 2


def test_the_grid_is_the_families_and_each_cell_is_timed_in_the_passes_of_its_own():
    assert {cell.family for cell in CELLS} == set(FAMILIES)
    assert {(cell.family, cell.directions, cell.on_host) for cell in CELLS} == {
        (name, family.directions, family.on_host) for name, family in FAMILIES.items()}
    assert sum(len(cell.directions) for cell in CELLS) <= 130  # so that a run beside others takes minutes


@pytest.mark.parametrize(("name", "options", "learned"), [
    ("softcap-d128", {"softcap": 50.0}, ()), ("softcap-d256", {"softcap": 50.0}, ()),
    ("short-window", {"sinks": True}, ()), ("bias", {"bias": "1hqk"}, ()), ("tiny", {"bias": "", "sinks": False}, ())])
def test_a_family_has_its_options_and_no_gradient_of_them(name, options, learned):
    for cell in cells_of(name):
        assert {field: getattr(cell.case, field) for field in options} == options
        assert cell.learned == learned


def test_shapes_are_those_that_the_families_are_named_by():
    cases = {name: [cell.case for cell in cells_of(name)] for name in FAMILIES}
    assert {case.mask for case in cases["short-window"]} == {causal() & window(127, 0)}
    assert {case.mask for case in cases["softcap-d256"]} == {causal(), causal() & window(4095, 0)}
    assert {case.d for case in cases["head-dims"]} == {72, 80, 96, 112}
    assert {(case.d, case.dv) for case in cases["d192-dv128"]} == {(192, 128)}
    assert {case.sk for case in cases["few-keys"]} == {77, 256}
    assert {case.mask for case in cases["small-batch"] + cases["odd-lengths"]} == {Mask()}
    assert all(case.sq % 64 for case in cases["odd-lengths"])
    assert all(case.hq > case.hk for case in cases["grouped-heads"])
    assert all(case.packed == "tight" and case.sq <= 512 for case in cases["short-packed"])


@pytest.fixture(scope="module")
def hopper():
    pytest.importorskip("triton", reason="backends of GPUs cannot be asked without it")
    with as_if_on("sm_90"):
        yield torch.device("cuda", 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_tilewise_takes_every_cell_of_a_family_on_hopper(name, hopper):
    for cell in cells_of(name)[:len(cells_of(name)) // 2]:
        problem = cell.problem(hopper)
        choose(problem)
        choose(problem.backward(lse_grad=False))


def test_the_filter_keeps_listed_families_and_all_cells_of_other_grids():
    kept = filtered(grid_cells(["gqa", "families"]), families=["bias", "tiny"])
    assert {cell.family for cell in kept} == {"", "bias", "tiny"}
    assert [cell for cell in kept if not cell.family] == grid_cells(["gqa"])


def test_the_filter_keeps_cells_that_are_timed_in_a_direction():
    assert {cell.family for cell in filtered(CELLS, directions=("forward",))} == {
        name for name, family in FAMILIES.items() if "forward" in family.directions}


def rows_of(family, s, direction="forward", regime="duty", **ms):
    """The rows of one cell, by milliseconds; None has no time."""
    own = [row(name, s, direction, ms_p50=time, regime=regime, grid="families", status="ok" if time else "failed")
           for name, time in ms.items()]
    return [type(one)(**{**vars(one), "case": f"{family}/{one.case}"}) for one in own]


def table_of(rows, tmp_path):
    write_rows(tmp_path / "families.csv", rows)
    return runpy.run_path(str(ROOT / "benchmarks/families.py"))["table"](tmp_path / "families.csv").splitlines()


def line_of(family, direction, lines):
    return next(line for line in lines if line.startswith(f"| {family} | {direction} |"))


def test_a_family_is_held_against_the_fastest_other_library_of_each_cell(tmp_path):
    lines = table_of(rows_of("bias", 512, "backward", tilewise=2.0, sdpa_cudnn=1.0, sdpa_flash=9.0)
                     + rows_of("bias", 1024, "backward", tilewise=2.0, sdpa_cudnn=9.0, sdpa_flash=4.0)
                     + rows_of("few-keys", 1024, "backward", tilewise=2.0, sdpa_flash=1.0), tmp_path)
    assert lines[0] == "## By family"
    assert line_of("bias", "backward", lines) == (
        "| bias | backward | 2 | 1.000 | 0.500 | b1 h8 s512 d64 float32 causal | cuDNN (torch SDPA) |")
    assert line_of("few-keys", "backward", lines).startswith("| few-keys | backward | 1 | 0.500 | 0.500 |")


def test_the_section_names_the_libraries_that_have_a_time(tmp_path):
    lines = table_of(rows_of("bias", 512, "backward", tilewise=2.0, sdpa_cudnn=1.0, sdpa_flash=None, flash_attn4=3.0),
                     tmp_path)
    assert lines[2].endswith("Timed beside tilewise: cuDNN (torch SDPA), FlashAttention-4.")


def test_a_cell_without_a_time_of_both_is_told_and_a_family_without_rows_too(tmp_path):
    lines = table_of(rows_of("softcap-d256", 512, tilewise=2.0, flash_attn4=3.0)
                     + rows_of("softcap-d256", 1024, tilewise=2.0, flash_attn4=None)
                     + rows_of("bias", 512, "backward", tilewise=None, sdpa_cudnn=1.0), tmp_path)
    assert line_of("softcap-d256", "forward", lines).startswith("| softcap-d256 | forward | 1 of 2 | 1.500 | 1.500 |")
    assert line_of("softcap-d256", "backward", lines) == "| softcap-d256 | backward | – | – | – | – | – |"
    assert line_of("bias", "backward", lines) == "| bias | backward | 0 of 1 | – | – | – | – |"


def test_a_tiny_call_is_judged_by_the_hosts_time_of_forward_and_backward(tmp_path):
    lines = table_of(rows_of("tiny", 64, "forward_backward", "host", tilewise=2.0, sdpa_cudnn=3.0)
                     + rows_of("tiny", 64, "forward", "host", tilewise=2.0, sdpa_cudnn=1.0), tmp_path)
    (line,) = [line for line in lines if line.startswith("| tiny |")]
    assert line.startswith("| tiny | forward backward | 1 | 1.500 | 1.500 |")


def test_without_rows_the_section_is_left_out_of_its_page(monkeypatch):
    tables = runpy.run_path(str(ROOT / "docs/tables.py"))
    page = "before\n\n<!-- table: families no-device/families.csv -->\n\nold\n\n<!-- /table -->\n\nafter\n"
    made = tables["rendered"](page)
    assert made == "before\n\n<!-- table: families no-device/families.csv -->\n<!-- /table -->\n\nafter\n"
    assert tables["rendered"](made) == made


def test_no_other_case_is_of_a_family():
    assert family_of("b4_h8_s512_d64_causal") == ""
    assert {cell.family for cell in grid_cells(["gqa", "packed", "decode"])} == {""}
