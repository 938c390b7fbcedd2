"""Write outcomes for people (rich tables) and for machines (one JSON value)."""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tilewise.bench.backend_checks import BackendCheck
from tilewise.bench.grids import dtype_name
from tilewise.bench.providers import is_ours
from tilewise.bench.report import Comparison, comparisons, counts_in_tflops, describe
from tilewise.bench.rows import Row
from tilewise.bench.standing import closing_sentence
from tilewise.bench.torture_rows import TortureRow
from tilewise.cli.session import Finding, Outcome, TuningOutcome
from tilewise.cli.widths import print_fitted, print_split
from tilewise.compile_ahead import Report
from tilewise.dispatch import Explanation
from tilewise.tuning.kinds import HOPPER_KINDS
from tilewise.tuning.table import Row as TableRow
from tilewise.tuning.table import backward_config_of, fields_of, forward_config_of

_NOTHING = "–"
_WIDE = 160
_LEAST_OF_CHECKS = ("there", "by")
_BASELINE = "naive"
_SPEEDUP = f"faster than {_BASELINE}"
_MOST_REASONS = 10  # a refusal may name sizes, and random ones are all different


def as_json(value: object) -> None:
    """Print one JSON value; numbers that JSON lacks (nan, inf) become strings."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def environment(facts: dict[str, Any]) -> None:
    """Print versions and devices, and each backend's answer for a plain call."""
    console = _console()
    for title in ("versions", "settings"):
        if facts[title]:
            console.print(f"[bold]{title}[/]  " + "  ".join(f"{k} {v}" for k, v in facts[title].items() if v))
    lacking = [name for name, present in facts["packages"].items() if not present]
    if lacking:
        console.print(f"[bold]not installed[/]  {', '.join(lacking)}")
    for device in facts["devices"]:
        free = "" if device["free_mib"] is None else f", {device['free_mib'] / 1024:.1f} GiB free"
        table = Table("backend", "takes", "refuses", title=f"{device['device']}: {device['name']}{free}",
                      title_justify="left")
        for name, answers in device["backends"].items():
            takes = [dtype for dtype, reason in answers.items() if reason is None]
            refusals = dict.fromkeys(reason for reason in answers.values() if reason is not None)
            table.add_row(name, ", ".join(takes) or _NOTHING, "\n".join(refusals) or _NOTHING)
        print_fitted(console, table)
        _print_absent(console, device["absent_providers"])


def explanation(answer: Explanation) -> None:
    """Print which backend serves each pass, and the others' reasons."""
    console = _console()
    table = Table("pass", "backend", "answer", title=str(answer.problem).removeprefix("forward "),
                  title_justify="left")
    chosen = {"forward": answer.forward, "backward": answer.backward}
    for (direction, name), reason in answer.reasons.items():
        verdict = "could serve" if reason is None else reason
        table.add_row(direction, name, "[bold green]chosen[/]" if chosen[direction] == name else verdict)
    print_fitted(console, table)


def explanation_facts(answer: Explanation) -> dict[str, Any]:
    """Return an explanation as plain values."""
    reasons: dict[str, dict[str, str | None]] = {"forward": {}, "backward": {}}
    for (direction, name), reason in answer.reasons.items():
        reasons[direction][name] = reason
    return {"problem": str(answer.problem).removeprefix("forward "), "forward": answer.forward,
            "backward": answer.backward, "reasons": reasons}


def check_facts(result: BackendCheck) -> dict[str, Any]:
    """Return one check as plain values."""
    return {
        "case": str(result.cell.case), "dtype": dtype_name(result.cell.dtype), "backend": result.backend,
        "ok": result.ok, "checked": result.checked, "refusal": result.refusal,
        "backward_refusal": result.backward_refusal, "failure": result.failure,
        "results": [asdict(report) | {"ok": report.ok} for report in result.reports],
    }


def checks(results: Sequence[BackendCheck], *, verbose: bool) -> None:
    """Print a summary a backend and dtype, every failure in full, and with ``verbose`` a line a check."""
    console = _console()
    if verbose:
        print_fitted(console, _check_lines(results), ("worst at", "mean budget", "mean error", "max budget"))
    print_fitted(console, _check_summary(results), _LEAST_OF_CHECKS)
    for reason in dict.fromkeys(f"{r.backend}: {r.refusal or r.backward_refusal}" for r in results
                                if r.refusal or r.backward_refusal):
        console.print(f"refused by {reason}", markup=False)
    for result in results:
        if not result.ok:
            console.print(_failure(result), style="red", markup=False)


def torture(rows: Sequence[TortureRow], absent: Mapping[str, str]) -> None:
    """Print who passes what, then each failure with its sentence and the public report of it."""
    console = _console()
    columns = list(dict.fromkeys((row.implementation, row.dtype) for row in rows))
    table = Table("check", *("\n".join(column) for column in columns),
                  title=f"torture suite on {rows[0].device_name}, torch {rows[0].torch}", title_justify="left")
    found = {(row.check, row.implementation, row.dtype): row.status for row in rows}
    shown = {"pass": "pass", "fail": "[red]FAIL[/]", "n/a": "[dim]n/a[/]"}
    for group in dict.fromkeys(row.group for row in rows):
        table.add_section()
        table.add_row(f"[bold]{group}[/]")
        for check in dict.fromkeys(row.check for row in rows if row.group == group):
            table.add_row(check, *(shown[found[(check, *column)]] for column in columns))
    table.add_section()
    table.add_row("failed, of those that apply", *(_score(rows, *column) for column in columns))
    print_split(console, table)
    for row in rows:
        if row.status == "fail":
            told = f" (issue: {row.issue})" if row.issue else ""
            console.print(f"FAILED {row.implementation}, {row.dtype}, {row.check}: {row.sentence}{told}", style="red",
                          markup=False, soft_wrap=True)
    for reason, count in Counter((row.implementation, row.sentence) for row in rows if row.status == "n/a").items():
        checks = "1 check" if count == 1 else f"{count} checks"
        console.print(f"not applicable to {reason[0]}, {checks}: {reason[1]}", markup=False, soft_wrap=True,
                      style="dim")
    for name, why in absent.items():
        console.print(f"not here: {name}: {why}", markup=False, style="dim")


def _score(rows: Sequence[TortureRow], implementation: str, dtype: str) -> str:
    own = Counter(row.status for row in rows if (row.implementation, row.dtype) == (implementation, dtype))
    return f"{own['fail']} of {own['fail'] + own['pass']}"


def fuzz_facts(finding: Finding) -> dict[str, Any]:
    """Return the check of one random configuration as plain values."""
    return check_facts(finding.check) | {"seed": finding.configuration.seed,
                                         "variation": finding.configuration.variation,
                                         "configuration": str(finding.configuration),
                                         "reproduce": finding.reproducer}


def fuzz(findings: Sequence[Finding]) -> None:
    """Print a summary a backend and dtype, and how often each sentence refused; failures were told when found."""
    console = _console()
    print_fitted(console, _check_summary([finding.check for finding in findings]), _LEAST_OF_CHECKS)
    reasons = Counter(f"refused by {check.backend}: {reason}" for finding in findings
                      if (reason := (check := finding.check).refusal or check.backward_refusal))
    for sentence, count in reasons.most_common(_MOST_REASONS):
        console.print(f"{count} × {sentence}", markup=False)
    if len(reasons) > _MOST_REASONS:
        console.print(f"and {len(reasons) - _MOST_REASONS} sentences more; --json has them all")


def fuzz_failure(finding: Finding, *, as_json: bool) -> None:
    """Print a failure and how to see it again, at once; on standard error where the output is to be one JSON value."""
    console = _console(stderr=as_json)
    console.print(_failure(finding.check), style="red", markup=False)
    console.print(f"  {finding.configuration}\n  {finding.reproducer}", markup=False, soft_wrap=True)


def bench(outcome: Outcome, absent: dict[str, str]) -> None:
    """Print the times, one block a case, and say where everything is."""
    console = _console()
    timed = [row for row in outcome.rows if row.regime != "host"]
    if timed:
        idle = () if any(row.provider == _BASELINE for row in timed) else (_SPEEDUP,)
        print_fitted(console, _bench_table(timed), (*idle, "mean error", "20–80 %", "max error", "peak MiB"))
    if len(timed) < len(outcome.rows):
        print_fitted(console, _host_table([row for row in outcome.rows if row.regime == "host"]))
    for sentence in dict.fromkeys(f"{row.status}: {row.provider}, {describe(row)}, {row.direction}: {row.reason}"
                                  for row in outcome.rows if row.status != "ok"):
        console.print(sentence, markup=False)
    _print_absent(console, absent)
    if outcome.left:
        console.print(f"left out to keep to the time budget: {', '.join(map(str, outcome.left))}", markup=False)
    for note in outcome.notes:
        console.print(note, markup=False)
    for file in outcome.files:
        console.print(f"wrote {file}", markup=False, soft_wrap=True)
    if timed:
        console.print(closing_sentence(timed), markup=False, highlight=False, style="bold")


def bench_json(outcome: Outcome, absent: dict[str, str]) -> None:
    """Print rows, what was absent, what was left and what was written."""
    as_json({"rows": [asdict(row) for row in outcome.rows], "absent": absent,
             "left": [str(cell) for cell in outcome.left], "files": [str(file) for file in outcome.files],
             "notes": outcome.notes, "standing": closing_sentence(outcome.rows)})


def compilation(report: Report) -> None:
    """Print a line a kernel, the caches, and the calls that have no kernel to compile."""
    console = _console()
    gpu = report.gpu
    table = Table("kernel", "calls", "s", "", title=f"compiled for {gpu.name}, {gpu.arch}, {gpu.multiprocessors} "
                                                    "multiprocessors", title_justify="left")
    for kernel in report.kernels:
        verdict = "was there" if kernel.cached else "compiled" if kernel.failure is None else "[red]failed[/]"
        table.add_row(kernel.name, "\n".join(kernel.calls), _number(kernel.seconds, ".1f"), verdict)
    print_fitted(console, table)
    for kernel in report.kernels:
        if kernel.failure is not None:
            console.print(f"FAILED {kernel.name}, of {', '.join(kernel.calls)}: {kernel.failure}", style="red",
                          markup=False)
    for call in report.idle:
        console.print(f"nothing to compile: {call}", markup=False)
    for folder in report.folders:
        console.print(f"cache {folder}", markup=False, soft_wrap=True)


def compilation_facts(report: Report) -> dict[str, Any]:
    """Return what was compiled as plain values."""
    kernels = [asdict(kernel) | {"place": str(kernel.place)} for kernel in report.kernels]
    return {"gpu": asdict(report.gpu), "ok": report.ok, "kernels": kernels, "idle": report.idle,
            "folders": [str(folder) for folder in report.folders]}


def tuning(outcome: TuningOutcome) -> None:
    """Print a line a row, the tiles that could not be used, what is left and what was written."""
    console = _console()
    table = Table("kernel", "head dim", "bytes", "mask", "length", "queries x keys", "warps", "stages", "descriptors",
                  "ms", "heuristic's ms", "of tiles", title="fastest tiles", title_justify="left")
    for name, rows in outcome.rows.items():
        for row in rows:
            kernel = name.partition(".")[0]
            table.add_row(kernel, str(row["width"]), str(row["itemsize"]), "yes" if row["masked"] else "no",
                          str(row["length"]), *_tile(row, kernel), _number(row["ms"], ".4g"),
                          _number(row["heuristic_ms"], ".4g"), str(row["candidates"]))
    print_fitted(console, table, ("of tiles", "descriptors", "heuristic's ms", "stages", "warps", "bytes"))
    for name, faults in outcome.faults.items():
        for reason, count in Counter(fault["reason"] for fault in faults).items():
            console.print(f"{name}: {count} not used: {reason}", markup=False)
    if outcome.left:
        console.print(f"left out to keep to the time budget: {', '.join(map(str, outcome.left))}", markup=False)
    for file in outcome.files:
        console.print(f"wrote {file}", markup=False, soft_wrap=True)


def _tile(row: TableRow, kernel: str) -> tuple[str, ...]:
    """Four cells: sides, warps, stages and descriptors; of a Gluon kernel's tile, all that it has in the first."""
    if kernel in HOPPER_KINDS:
        config = forward_config_of(row) if kernel == "hopper_forward" else backward_config_of(row)
        return ", ".join(f"{name} {value}" for name, value in fields_of(config).items()), "", "", "yes"
    return (f"{row['block_m']} x {row['block_n']}", str(row["num_warps"]), str(row["num_stages"]),
            "yes" if row["descriptors"] else "no")


def tuning_json(outcome: TuningOutcome) -> None:
    """Print rows and faults by table file, what was left and what was written."""
    as_json({"rows": outcome.rows, "faults": outcome.faults, "left": [str(task) for task in outcome.left],
             "files": [str(file) for file in outcome.files]})


def _bench_table(rows: Sequence[Row]) -> Table:
    unit, factor = ("TFLOP/s", 1.0) if counts_in_tflops(rows) else ("GFLOP/s", 1e3)
    table = Table("provider", "pass", *(
        "ms", "20–80 %", unit, "peak MiB", "max error", "mean error", _SPEEDUP),
        title=f"{rows[0].device_name}, torch {rows[0].torch}: median times; peak memory above the inputs (backward: "
              "with its forward); error against float64", title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    case = ""
    for side in comparisons(rows):
        if describe(side.first) != case:
            case = describe(side.first)
            table.add_section()
            table.add_row(f"[bold]{case}[/]")
        for row in sorted(side.rows.values(), key=lambda row: not is_ours(row.provider)):
            table.add_row(*_bench_cells(side, row, factor), style="bold" if is_ours(row.provider) else "")
    return table


def _bench_cells(side: Comparison, row: Row, factor: float) -> list[str]:
    name = f"  {row.provider}"
    if row.status != "ok":
        return [name, row.direction, row.status]
    baseline = side.rows.get(_BASELINE)
    speedup = baseline.ms_p50 / row.ms_p50 if baseline and baseline.ms_p50 and row.ms_p50 else None
    spread = _NOTHING if row.ms_p20 is None else f"{row.ms_p20:.2f}–{_number(row.ms_p80, '.2f')}"
    rate = None if row.tflops is None else row.tflops * factor
    return [name, row.direction, _number(row.ms_p50, ".2f"), spread, _number(rate, ".3g"),
            _number(row.peak_mib, ".0f"), _number(row.max_error, ".1e"), _number(row.mean_error, ".1e"),
            _number(speedup, ".1f") + ("" if speedup is None else " ×")]


def _host_table(rows: Sequence[Row]) -> Table:
    table = Table("provider", "call", "host µs", "20–80 %", title="time of the host for one call, median",
                  title_justify="left")
    for row in rows:
        if row.host_us is not None and row.ms_p20 is not None and row.ms_p80 is not None:
            table.add_row(row.provider, row.direction.replace("_", " "), f"{row.host_us:.1f}",
                          f"{row.ms_p20 * 1e3:.1f}–{row.ms_p80 * 1e3:.1f}")
    return table


def _check_summary(results: Sequence[BackendCheck]) -> Table:
    summary = Table("backend", "dtype", "passed", "failed", "refused", "most of a budget used", "by", "there",
                    title="against dense float64 attention", title_justify="left")
    groups: dict[tuple[str, str], list[BackendCheck]] = {}
    for result in results:
        groups.setdefault((result.backend, dtype_name(result.cell.dtype)), []).append(result)
    for (backend, dtype), members in groups.items():
        compared = [member for member in members if member.worst is not None]
        failed = sum(not member.ok for member in members)
        refused = sum(member.refusal is not None for member in members)
        cells = [backend, dtype, str(len(members) - failed - refused),
                 f"[red]{failed}[/]" if failed else "0", str(refused)]
        hardest = max(compared, key=lambda member: member.worst.share if member.worst else 0.0, default=None)
        if hardest is not None and hardest.worst is not None:
            worst = hardest.worst
            cells += [f"{worst.share:.0%}", f"{hardest.cell.case}, {worst.name}",
                      f"max {worst.max_error:.2e} of {worst.max_budget:.2e}, mean {worst.mean_error:.2e} of "
                      f"{worst.mean_budget:.2e}, at {worst.worst}"]
        summary.add_row(*cells)
    return summary


def _failure(result: BackendCheck) -> str:
    lines = [str(report) for report in result.reports if not report.ok] or [str(result.failure)]
    return f"FAILED {result.backend}, {result.cell}: " + "; ".join(lines)


def _check_lines(results: Sequence[BackendCheck]) -> Table:
    table = Table("backend", "case", "dtype", "result", "max error", "max budget", "mean error",
                  "mean budget", "worst at", "")
    for result in results:
        start = (result.backend, str(result.cell.case), dtype_name(result.cell.dtype))
        if not result.reports:
            table.add_row(*start, "refused" if result.refusal else "[red]failed[/]")
        for report in result.reports:
            table.add_row(*start, report.name, f"{report.max_error:.2e}", f"{report.max_budget:.2e}",
                          f"{report.mean_error:.2e}", f"{report.mean_budget:.2e}", str(report.worst),
                          "ok" if report.ok else "[red]over[/]")
    return table


def _print_absent(console: Console, absent: dict[str, str]) -> None:
    for name, reason in absent.items():
        console.print(f"not timed here: {name}: {reason}", markup=False, style="dim")


def _number(value: float | None, spec: str) -> str:
    return _NOTHING if value is None else f"{value:{spec}}"


def _console(*, stderr: bool = False) -> Console:
    # Piped into a file there is no width to fit, unless COLUMNS asks for one.
    console = Console(stderr=stderr)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE, stderr=stderr)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
