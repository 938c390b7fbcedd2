"""Run every model type of the installed Transformers with tilewise and with eager attention, and compare.

    python benchmarks/transformers_sweep.py run --out benchmarks/results/cpu/transformers.csv

makes tiny models with random weights, one of each kind of configuration of each type, and compares outputs, gradients
of the parameters, both with padding on either side, and generated tokens, in float32 on the CPU. A row is a check of a
model. Types run in processes of their own, several in turn: one that ends early costs the check it was at, and the next
process goes on behind it. ``--types llama t5`` runs some, and leaves the file's rows of others as they are; ``table
FILE`` prints the Markdown table. Two types import SciPy.
"""

import argparse
import csv
import json
import platform
import select
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
CHECK_SECONDS = 120  # that a check may take, eager and tilewise together
SEARCH_SECONDS = 40  # that may go by with one kind of configuration until a call of a model runs
GRACE_SECONDS = 60  # that a process may be silent beyond it: it imports a module, or does not hear its alarm
BATCH_OF_TYPES = 60  # that share an import of Transformers, which takes as long as thirty of them

# Why a type is refused, or fails, and what to do: each has a sentence, which a test demands.
SENTENCES = {
    "git": "its text model has eager attention alone, in a table of classes of its own; its vision tower takes the "
           'name: `{"": "eager", "vision_config": "tilewise"}`',
}

# Outcomes, the worst first; what the table says of each.
OUTCOMES = {
    "differs": "differs from eager in rows that see a key",
    "fails": "raises an error with tilewise, and none with eager",
    "refused": "refused, by tilewise or by Transformers",
    "as_sdpa": "not as eager, but as Transformers' own SDPA",
    "rows_without_keys": "as eager, but for rows that see no key",
    "rounding": "as eager, to what one rounding of the parameters changes",
    "same": "as eager",
    "no_attention": "no attention call in any model that runs",
    "eager_fails": "not run: eager attention does not run here",
}
LISTED = ("differs", "fails", "refused", "as_sdpa", "rows_without_keys", "rounding", "no_attention", "eager_fails")


@dataclass(frozen=True)
class Row:
    """A check of one model, and how it came to be."""

    model_type: str
    model: str
    check: str
    outcome: str
    difference: str
    reason: str
    seconds: str
    device_name: str
    torch: str
    transformers: str
    python: str
    tilewise: str
    commit: str
    date: str


def sweep(types: Sequence[str], out: Path, check_seconds: int) -> None:
    """Run the types in batches, each in a process, and write the rows, anew after each type.

    Rows of other types that the file has stay.
    """
    origin, left = provenance(), list(types)
    rows = [row for row in read_rows(out) if row.model_type not in types] if out.exists() else []
    out.parent.mkdir(parents=True, exist_ok=True)
    while left:
        for found in in_process(left[:BATCH_OF_TYPES], check_seconds):
            rows += [Row(**record, **origin) for record in found]
            write_rows(out, sorted(rows, key=lambda row: row.model_type))
            print(f"{len(types) - len(left) + 1} of {len(types)} types, last {left.pop(0)}", flush=True)


def in_process(types: Sequence[str], check_seconds: int) -> Iterator[list[dict[str, str]]]:
    """Yield the rows of each type that a process runs, to the last or to one at which the process ends early."""
    command = [sys.executable, str(HERE), "worker", "--check-seconds", str(check_seconds), *types]
    rows: list[dict[str, str]] = []
    done, at, is_silent = 0, {"model_type": types[0], "model": "", "check": "import"}, False
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in lines_of(process, check_seconds + GRACE_SECONDS):
            if line is None:
                is_silent = True
                process.kill()
                break
            message = json.loads(line)
            kind = message.pop("is")
            if kind == "row":
                rows.append(message)
            elif kind == "at":
                at = message
            else:
                yield rows
                rows, done = [], done + 1
                at = {"model_type": types[min(done, len(types) - 1)], "model": "", "check": "import"}
    if done < len(types):
        why = (f"silent for {check_seconds + GRACE_SECONDS} s" if is_silent else
               f"the process ended with status {process.returncode}")
        yield [*rows, {**at, "outcome": "fails", "difference": "", "reason": why, "seconds": ""}]


def lines_of(process: Any, seconds: int) -> Iterator[str | None]:
    """Yield the lines that a process prints, and None if it is silent for so long."""
    while True:
        if not select.select([process.stdout], [], [], seconds)[0]:
            yield None
            return
        line = process.stdout.readline()
        if not line:
            return
        yield line


def worker(types: Sequence[str], check_seconds: int) -> None:
    """Run the checks of some types; print a line of JSON before and after each check."""
    import transformers
    import transformers_checks as checks

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    counted = checks.register()

    def tell(kind: str, model_type: str, model: str, check: str, **more: str) -> None:
        print(json.dumps({"is": kind, "model_type": model_type, "model": model, "check": check} | more), flush=True)

    for model_type in types:
        tell("at", model_type, "", "search")
        for subject in checks.subjects(model_type, SEARCH_SECONDS):
            if isinstance(subject, tuple):
                name, reason = subject
                tell("row", model_type, name, "search", outcome="eager_fails", difference="", reason=reason, seconds="")
                continue
            for check in checks.checks_of(subject):
                tell("at", model_type, subject.kind.__name__, check)
                found, seconds = checks.checked(subject, check, counted, check_seconds)
                tell("row", model_type, subject.kind.__name__, check, outcome=found.outcome, reason=found.reason,
                     difference="" if found.difference is None else f"{found.difference:.2g}", seconds=f"{seconds:.1f}")
            tell("at", model_type, "", "search")
        tell("done", model_type, "", "")


def provenance() -> dict[str, str]:
    """Return the columns that say how a row came to be."""
    import torch
    import transformers

    from tilewise.bench import provenance as origin

    return {"device_name": origin.device_name(torch.device("cpu")), "torch": torch.__version__,
            "transformers": transformers.__version__, "python": platform.python_version(),
            "tilewise": origin.tilewise.__version__, "commit": origin.commit(),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}


def write_rows(out: Path, rows: Sequence[Row]) -> None:
    """Write rows."""
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def read_rows(path: Path) -> list[Row]:
    """Read what ``write_rows`` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return [Row(**record) for record in csv.DictReader(file)]


def outcome_of(rows: Sequence[Row]) -> str:
    """Return the outcome of a type: the worst of its checks that ran, or that none did."""
    order = list(OUTCOMES)
    found = {row.outcome for row in rows}
    ran = found - {"eager_fails", "no_attention"}
    return min(ran or found, key=order.index)


def by_type(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each type."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.model_type, []).append(row)
    return found


def table(path: Path) -> str:
    """Return rows as Markdown: how many types have which outcome, and every type that is not as eager, with why."""
    rows = read_rows(path)
    types = by_type(rows)
    counts = Counter(map(outcome_of, types.values()))
    lines = ["| outcome, the worst of a type's checks | types |", "|---|---:|",
             *(f"| {text} | {counts[name]} |" for name, text in OUTCOMES.items()),
             f"| **all** | {len(types)} |", "", *checks_table(rows), "", *parts_not_run(types), caption(rows)]
    for name in LISTED:
        found = {model_type: own for model_type, own in types.items() if outcome_of(own) == name}
        if found:
            lines += ["", f"**{OUTCOMES[name][0].upper()}{OUTCOMES[name][1:]}:**", "",
                      *(f"- `{model_type}`: {why(model_type, own, name)}" for model_type, own in sorted(found.items()))]
    return "\n".join(lines)


def parts_not_run(types: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return a line on the kinds of configuration that eager does not run, of types of which it runs others."""
    parts = {model_type: sum(row.check == "search" for row in own) for model_type, own in types.items()
             if outcome_of(own) != "eager_fails"}
    count = sum(parts.values())
    if not count:
        return []
    several = sum(number > 0 for number in parts.values())
    return [f"Of {several} of the types that ran, {count} kinds of configuration did not: the script makes no "
            "sizes or input that eager attention runs with. Their reasons are in the rows.",
            ""]


def checks_table(rows: Sequence[Row]) -> list[str]:
    """Return how many models ran each check, by outcome, and the largest difference of those that are as eager."""
    checks = [check for check in dict.fromkeys(row.check for row in rows) if check != "search"]
    lines = ["| check | models that ran | as eager | largest difference of these | otherwise |",
             "|---|---:|---:|---:|---|"]
    for check in checks:
        ran = [row for row in rows if row.check == check and row.outcome not in ("eager_fails", "no_attention")]
        same = [row for row in ran if row.outcome == "same"]
        others = Counter(row.outcome for row in ran if row.outcome != "same")
        worst = max((float(row.difference) for row in same), default=0.0)
        lines.append(f"| {check.replace('_', ' ')} | {len(ran)} | {len(same)} | {worst:.1e} | "
                     f"{', '.join(f'{name.replace(chr(95), chr(32))} {count}' for name, count in others.items())} |")
    return lines


def why(model_type: str, rows: Sequence[Row], outcome: str) -> str:
    """Return in a line which checks of a type have this outcome, and why: a sentence, or what the first says."""
    own = [row for row in rows if row.outcome == outcome]
    checks = ", ".join(dict.fromkeys(row.check.replace("_", " ") for row in own if row.check != "search"))
    models = ", ".join(f"`{name}`" for name in dict.fromkeys(row.model for row in own) if name)
    if model_type in SENTENCES:
        return f"{checks}: {SENTENCES[model_type]}."
    reason = own[0].reason.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
    return ": ".join(part for part in (models, checks, reason) if part)


def caption(rows: Sequence[Row]) -> str:
    """Return where, when and with what the rows came to be."""
    first = rows[0]
    commits = ", ".join(dict.fromkeys(row.commit for row in rows if row.commit))
    return (f"{first.device_name}; float32, torch {first.torch}, Transformers {first.transformers}, tilewise "
            f"{first.tilewise}, Python {first.python}; commit {commits}; {max(row.date for row in rows)[:10]}.")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=Path("transformers.csv"))
    running.add_argument("--types", nargs="+")
    working = commands.add_parser("worker")
    working.add_argument("types", nargs="+")
    for command in (running, working):
        command.add_argument("--check-seconds", type=int, default=CHECK_SECONDS)
    commands.add_parser("table").add_argument("path", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        print(table(given.path))
    elif given.command == "worker":
        worker(given.types, given.check_seconds)
    else:
        from tiny_transformers import types

        sweep(given.types or types(), given.out, given.check_seconds)


if __name__ == "__main__":
    main()
