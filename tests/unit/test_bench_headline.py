"""The README's lines on where tilewise stands, and the list of cells in which another library is faster."""

import runpy
from pathlib import Path

import pytest

from tilewise.bench.rows import write_rows
from unit.bench_rows import row

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def device(tmp_path):
    """Rows of every grid that the lines count: ours takes 2 ms, in one backward cell 6."""
    for grid in ("paper", "gqa", "seeds", "decode"):
        rows = [row(name, s, direction=direction, ms_p50=ms) for s in (512, 1024)
                for direction in (("forward",) if grid == "decode" else ("forward", "backward"))
                for name, ms in (("tilewise", 6.0 if (grid, s, direction) == ("gqa", 512, "backward") else 2.0),
                                 ("sdpa_cudnn", 3.0), ("flash_attn4", 4.0), ("tilewise:deterministic", 1.0),
                                 ("copy", 0.5))]
        write_rows(tmp_path / f"{grid}.csv", rows)
    (tmp_path / "of-another-kind.csv").write_text("call,host_us\nplain,3\n", "utf-8")
    return tmp_path


def test_a_line_counts_the_cells_beside_the_fastest_other_library(device):
    _, _, *lines = runpy.run_path(str(BENCHMARKS / "headline.py"))["table"](device).splitlines()
    peers = "cuDNN (torch SDPA), FlashAttention-4 |"
    assert lines == [f"| training, forward | 6 | 6 | **1.50×** | 1.50× | {peers}",
                     f"| training, backward | 6 | 5 | **1.25×** | 0.50× | {peers}",
                     f"| decoding | 2 | 2 | **1.50×** | 1.50× | {peers}"]


def test_a_cell_that_is_behind_is_listed_with_who_is_faster(device):
    _, _, *lines = runpy.run_path(str(BENCHMARKS / "behind.py"))["table"](device).splitlines()
    (line,) = lines
    assert line.startswith("| gqa | ")
    assert "s512" in line
    assert line.endswith("| backward | cuDNN (torch SDPA) | 0.500× as fast |")
