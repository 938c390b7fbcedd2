"""Run the tests on this machine's GPU with the Triton that is installed, and append a row of what came of them.

    PYTHONPATH=src python benchmarks/gpu_suite.py --out gpu-suite.csv -- -n 14 tests

What follows ``--`` goes to pytest. The exit code is pytest's. ``benchmarks/triton_versions.py`` times the kernels of
each version; these rows say that they are right.
"""

import argparse
import csv
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


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-suite.csv"))
    parser.add_argument("--commit")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    given = parser.parse_args()
    row, code = run(given.arguments, given.commit)
    append(row, given.out)
    print(row)
    sys.exit(code)


if __name__ == "__main__":
    main()
