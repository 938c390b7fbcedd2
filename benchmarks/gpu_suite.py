"""Run the tests on this machine's GPU with the Triton that is installed, and append a row of what came of them.

    PYTHONPATH=src python benchmarks/gpu_suite.py run --out gpu-suite.csv -- -n 14 tests
    python benchmarks/gpu_suite.py table gpu-suite.csv

What follows ``--`` goes to pytest. The exit code is pytest's. A run that is cut short leaves no row. ``table`` prints
rows as Markdown. ``benchmarks/triton_versions.py`` times the kernels of each version; these rows say that they are
right.
"""

import argparse
import csv
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch


@dataclass(frozen=True)
class Row:
    """A run of pytest."""

    triton: str
    passed: int
    failed: int
    skipped: int
    seconds: int
    arguments: str
    device_name: str
    driver: str
    torch: str
    commit: str
    date: str


def run(arguments: list[str], commit: str | None) -> tuple[Row, int]:
    """Run pytest; return the row and pytest's exit code."""
    import triton

    from tilewise.bench.provenance import provenance

    origin = provenance(torch.device("cuda", 0), "", commit)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ended = subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments], check=False)
        passed, failed, skipped, seconds = counts(report.read_text())
    return Row(triton.__version__, passed, failed, skipped, round(seconds), " ".join(arguments), origin.device_name,
               origin.driver, origin.torch, origin.commit, origin.date), ended.returncode


def counts(report: str) -> tuple[int, int, int, float]:
    """Return passed, failed (errors too) and skipped tests, and the seconds they took, of a report in JUnit's XML."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    tests, errors, failures, skipped = (sum(int(suite.get(name, "0")) for suite in suites)
                                        for name in ("tests", "errors", "failures", "skipped"))
    failed = errors + failures
    return tests - failed - skipped, failed, skipped, sum(float(suite.get("time", "0")) for suite in suites)


def append(row: Row, path: Path) -> None:
    """Append a row, and the names of the columns where the file is new."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        if is_new:
            writer.writeheader()
        writer.writerow(asdict(row))


def table(path: Path) -> str:
    """Return rows as Markdown: of which tests how many passed with each version of Triton, when they last ran."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    latest = {}
    for row in rows:
        tests = re.search(r"tests/.*", row["arguments"])
        latest[tests[0] if tests else "tests", row["triton"]] = row
    lines = ["| tests | Triton | passed | failed | skipped | commit | date |", "|---|---|---:|---:|---:|---|---|"]
    lines += [f"| `{tests}` | {triton} | {row['passed']} | {row['failed']} | {row['skipped']} | {row['commit']} | "
              f"{row['date'][:10]} |" for (tests, triton), row in sorted(latest.items())]
    made_by = dict.fromkeys((row["device_name"], row["torch"]) for row in latest.values())
    return "\n".join([*lines, "", "; ".join(f"{device}, torch {torch}" for device, torch in made_by) + "."])


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=Path("gpu-suite.csv"))
    running.add_argument("--commit")
    running.add_argument("arguments", nargs="*", help="for pytest, after --")
    commands.add_parser("table").add_argument("path", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        print(table(given.path))
        return
    row, code = run(given.arguments, given.commit)
    append(row, given.out)
    print(row)
    sys.exit(code)


if __name__ == "__main__":
    main()
