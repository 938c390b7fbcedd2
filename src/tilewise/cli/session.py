"""A benchmark run from the command line: progress on standard error, files as they come."""

import contextlib
import importlib.util
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from rich import progress as bars
from rich.console import Console

from tilewise.bench.backend_checks import BackendCheck, check_backends, check_configuration
from tilewise.bench.compile_ahead import Task
from tilewise.bench.grids import Cell, dtype_name
from tilewise.bench.host import host_cell, run_host
from tilewise.bench.plan import Plan
from tilewise.bench.plots import draw_figures, draw_standing
from tilewise.bench.provenance import Provenance
from tilewise.bench.report import has_prices, markdown
from tilewise.bench.rows import Row, write_rows
from tilewise.bench.runner import run, work
from tilewise.bench.support import Support, supported
from tilewise.bench.timing import COLD, HOST
from tilewise.bench.torture_rows import TortureRow, row_of, write_torture_rows
from tilewise.bench.torture_runs import torture_apart
from tilewise.bench.tuning_runs import TuningPlan, rows_of, table_provenance, tune
from tilewise.compile_ahead import CallShape, Kernel, Report, compile_ahead
from tilewise.testing.configurations import Configuration
from tilewise.testing.torture import Result
from tilewise.tuning.device import device_spec
from tilewise.tuning.table import Row as TableRow
from tilewise.tuning.table import table_file, write_table

_SHAPELESS_OPTIONS = ("--out", "--commit", "--csv")
_BETWEEN_LINES = 10.0  # seconds


@dataclass
class Outcome:
    """What a run left.

    Attributes:
        left: cells that the time budget did not reach.
        files: what was written.
        notes: sentences for the reader.
    """

    rows: list[Row] = field(default_factory=list)
    left: list[Cell] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class TuningOutcome:
    """What a search left: by table file, the table's rows and those of the tiles that could not be used.

    Attributes:
        left: tasks that the time budget did not reach.
        files: the tables.
    """

    rows: dict[str, list[TableRow]] = field(default_factory=dict)
    faults: dict[str, list[TableRow]] = field(default_factory=dict)
    left: list[Task] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """One backend on one random configuration."""

    configuration: Configuration
    check: BackendCheck
    device: torch.device

    @property
    def reproducer(self) -> str:
        """The command that checks this again, alone."""
        drawn, backend = self.configuration, self.check.backend
        varied = f"--variation {drawn.variation} " if drawn.variation else ""
        interpreted = "TRITON_INTERPRET=1 " if backend == "triton" and self.device.type == "cpu" else ""
        return (f"{interpreted}tilewise fuzz --seed {drawn.seed} --count 1 {varied}--size {drawn.size} "
                f"--backend {backend} --device {self.device}")


class Progress(Protocol):
    """What a run tells while it goes."""

    def describe(self, text: str) -> None:
        """Say what happens next."""

    def advance(self, amount: float = 1.0) -> None:
        """Move on by a part of the total."""


class Bar:
    """A progress bar with a sentence beside it, on a terminal."""

    def __init__(self, bar: bars.Progress, total: float) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)

    def describe(self, text: str) -> None:
        """See :class:`Progress`."""
        self._bar.update(self._task, description=text)

    def advance(self, amount: float = 1.0) -> None:
        """See :class:`Progress`."""
        self._bar.advance(self._task, amount)


class Lines:
    """The same as a line on standard error every ten seconds, where that is no terminal."""

    def __init__(self, total: float) -> None:
        self._total, self._done, self._text = total, 0.0, ""
        self._start, self._ended = time.monotonic(), threading.Event()

    def describe(self, text: str) -> None:
        """See :class:`Progress`."""
        self._text = text

    def advance(self, amount: float = 1.0) -> None:
        """See :class:`Progress`."""
        self._done += amount

    def __enter__(self) -> "Lines":
        threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _tell(self) -> None:
        # By a thread of its own: a step may take minutes.
        while not self._ended.wait(_BETWEEN_LINES):
            share = self._done / self._total if self._total else 1.0
            passed = time.monotonic() - self._start
            print(f"tilewise: {share:.0%} after {passed:.0f} s, now {self._text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(total: float) -> Iterator[Progress]:
    """Show a bar on standard error while the block runs, then take it away; lines where that is no terminal.

    Standard output is left alone where it is a file: rich would write what is printed there above the bar instead.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        with Lines(total) as lines:
            yield lines
        return
    columns = (bars.BarColumn(bar_width=30), bars.TextColumn("{task.percentage:>3.0f} %"), bars.TimeElapsedColumn(),
               bars.TextColumn("left"), bars.TimeRemainingColumn(),
               bars.TextColumn("{task.description}", markup=False))
    with bars.Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        yield Bar(bar, total)


def command_line() -> str:
    """Return the command that was typed, without the options that do not shape the numbers."""
    kept, words = ["tilewise"], iter(sys.argv[1:])
    for word in words:
        name, has_value, _ = word.partition("=")
        if name not in _SHAPELESS_OPTIONS:
            kept.append(word)
        elif not has_value:
            next(words, None)  # the value is a word of its own
    return shlex.join(kept)


def support_session(device: str) -> list[Support]:
    """Ask the backends about calls of every kind."""
    with progress(1) as bar:
        return supported(device, bar.describe)


def check_session(cells: Sequence[Cell], backends: Sequence[str], device: torch.device,
                  seed: int) -> list[BackendCheck]:
    """Check the backends on every cell."""
    results: list[BackendCheck] = []
    with progress(len(cells)) as bar:
        for cell in cells:
            bar.describe(str(cell))
            results += check_backends(cell, backends, device, seed)
            bar.advance()
    return results


def fuzz_session(configurations: Sequence[Configuration], backends: Sequence[str], device: torch.device,
                 on_failure: Callable[[Finding], None]) -> list[Finding]:
    """Check the backends on every configuration; ``on_failure`` is called at once, as the rest may not end well."""
    findings: list[Finding] = []
    total, failed = len(configurations), 0
    with progress(total) as bar:
        for done, configuration in enumerate(configurations, 1):
            bar.describe(f"{configuration.case.name}, {done} of {total}, {failed} failed")
            for check in check_configuration(configuration, backends, device):
                findings.append(Finding(configuration, check, device))
                if not check.ok:
                    failed += 1
                    on_failure(findings[-1])
            bar.advance()
    return findings


def torture_session(names: Sequence[str], device: torch.device, dtypes: Sequence[torch.dtype], origin: Provenance,
                    path: Path | None, checks: Sequence[str]) -> list[TortureRow]:
    """Run checks of the torture suite on each; rows are written anew after each check, so a stopped run keeps them."""
    rows: list[TortureRow] = []
    with progress(len(names) * len(dtypes) * len(checks)) as bar:
        for name, dtype in ((name, dtype) for name in names for dtype in dtypes):
            def tell(result: Result, dtype: str = dtype_name(dtype)) -> None:
                bar.describe(f"{result.implementation}, {result.check}: {result.status}")
                bar.advance()
                rows.append(row_of(result, dtype, origin))
                if path is not None:
                    write_torture_rows(path, rows)

            bar.describe(f"{name}, {dtype_name(dtype)}")
            torture_apart(name, device, dtype, tell, checks=checks)
    return rows


def bench_session(cells: Sequence[Cell], plan: Plan, folder: Path) -> Outcome:
    """Run the cells; each grid's CSV is written anew after every cell, so that a stopped run keeps its rows."""
    outcome = Outcome()
    by_grid: dict[str, list[Row]] = {}
    done = 0
    with progress(sum(work(cell) for cell in cells)) as bar:
        for cell, rows in run(cells, replace(plan, on_step=bar.describe)):
            bar.advance(work(cell))
            done += 1
            outcome.rows += rows
            by_grid.setdefault(cell.grid, []).extend(rows)
            write_rows(folder / f"{cell.grid}.csv", by_grid[cell.grid])
    outcome.left = list(cells[done:])
    for grid, rows in by_grid.items():
        table = folder / f"{grid}.md"
        views = ("speed", "memory", "price") if has_prices(rows) else ("speed", "memory")
        table.write_text("\n\n".join(markdown(rows, view) for view in views) + "\n", encoding="utf-8")
        outcome.files += [folder / f"{grid}.csv", table]
    return outcome


def host_session(plan: Plan, folder: Path) -> Outcome:
    """Measure the host's cost of a call, and write its rows."""
    outcome = Outcome()
    with progress(len(plan.providers)) as bar:
        for row in run_host(host_cell(plan.device), replace(plan, on_step=bar.describe)):
            outcome.rows.append(row)
            if row.direction == "forward_backward":  # a provider's last row
                bar.advance()
    path = folder / "host.csv"
    write_rows(path, outcome.rows)
    outcome.files.append(path)
    return outcome


def tune_session(plan: TuningPlan, folder: Path, origin: Provenance) -> TuningOutcome:
    """Search every task; a kernel's table is written anew after each, so that a stopped run keeps its rows."""
    outcome = TuningOutcome()
    tables = folder / device_spec(plan.device).name
    done = 0
    with progress(len(plan.tasks)) as bar:
        for task, finding in tune(replace(plan, on_step=bar.describe)):
            bar.advance()
            done += 1
            rows, faults = rows_of(task, finding, plan.device)
            file = table_file(task.kernel, task.cell.dtype.itemsize)
            outcome.rows.setdefault(file, []).extend(rows)
            outcome.faults.setdefault(file, []).extend(faults)
            write_table(tables / file, table_provenance(origin, plan.device), outcome.rows[file],
                        outcome.faults[file])
    outcome.left = list(plan.tasks[done:])
    outcome.files = [tables / file for file in outcome.rows]
    return outcome


def compile_session(calls: Sequence[CallShape], device: str | None, workers: int | None) -> Report:
    """Compile what the calls launch; a line on standard error tells what is being waited for."""
    with progress(1) as bar:
        bar.describe(f"listing the kernels of {len(calls)} calls")

        def tell(kernel: Kernel, done: int, total: int) -> None:
            bar.describe(f"{kernel.name}, {done} of {total}")
            bar.advance(1 / total)

        return compile_ahead(calls, device=device, workers=workers, on_kernel=tell)


def draw(outcome: Outcome, folder: Path) -> None:
    """Draw the figures of every grid that has a time, or note why there are none."""
    if importlib.util.find_spec("matplotlib") is None:
        outcome.notes.append("no figures: matplotlib is not installed; pip install 'tilewise[bench]' brings it")
        return
    drawn = [row for row in outcome.rows if row.regime not in (COLD.name, HOST)]  # no length to draw along
    for grid in dict.fromkeys(row.grid for row in drawn if row.ms_p50 is not None):
        outcome.files += draw_figures([row for row in drawn if row.grid == grid], folder, grid)
    path = folder / "standing.svg"
    if draw_standing(outcome.rows, path):
        outcome.files.append(path)
