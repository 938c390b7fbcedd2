"""Print as Markdown what `tilewise bench` wrote, or keep a document's tables in step with the rows.

Usage: ``python benchmarks/report.py FILE... --view summary`` prints; ``python benchmarks/report.py --readme DOCUMENT``
makes its marked tables anew, and with ``--check`` writes nothing, and exits with 1 if they are out of step.

A document holds ``<!-- bench:NAME -->`` … ``<!-- /bench:NAME -->``; what stands between is generated. NAME is the path
of a CSV below the results folder without its ending ("nvidia-h200/paper"), or its bare name where that is unique;
":summary", ":memory", ":accuracy" or ":price" behind it asks for another table than the speeds.
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tilewise.bench.report import (
    NOT_MEASURED,
    Comparison,
    caption,
    comparisons,
    held_against,
    markdown,
    origins,
    side_by_side,
    status_cell,
)
from tilewise.bench.rows import Row, read_rows
from tilewise.errors import InvalidInput

RESULTS = Path(__file__).with_name("results")
MARKED = re.compile(r"(<!-- bench:(\S+) -->)(.*?)(<!-- /bench:(\S+) -->)", re.DOTALL)
START = re.compile(r"<!-- bench:\S+ -->")


def table(path: Path, view: str = "speed") -> str:
    """Return the rows of a file as Markdown: as :func:`markdown`, and the views "summary" and "accuracy" too."""
    return markdown(read_rows(path), view, {"summary": summary, "accuracy": accuracy})


def summary(rows: Sequence[Row]) -> str:
    """Write a line a pass, number format, head dims and size of groups: the mean ratio to each peer, and the least."""
    sides = [side for side in comparisons(rows) if side.ours is not None]
    peers = [name for name in dict.fromkeys(row.provider for row in rows)
             if any(held_against(name, side) is not None for side in sides)]
    if not peers:
        raise InvalidInput("view is 'summary', and no row has a peer's time; allowed are rows of several providers.")
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for side in sides:
        groups.setdefault((heads_of(side.first), side.first.direction.replace("_", " ")), []).append(side)
    lines = ["How many times tilewise is as fast, over all lengths and masks: geometric mean (least), and of how many "
             f"cells. {caption(rows, span_of_origins)}", "", f"| heads | pass | {' | '.join(peers)} |",
             "|---|---|" + "---:|" * len(peers)]
    for (heads, direction), members in groups.items():
        cells = (mean_and_least([ratio for side in members if (ratio := held_against(name, side)) is not None])
                 for name in peers)
        lines.append(f"| {heads} | {direction} | {' | '.join(cells)} |")
    return "\n".join(lines)


def heads_of(row: Row) -> str:
    """Name head dims, number format, and how many query heads share a key head."""
    dims = f"d{row.d}" if row.d == row.dv else f"d{row.d}/{row.dv}"
    return f"{dims} {row.dtype}" + ("" if row.hq == row.hk else f", {row.hq // row.hk} query heads share one")


def mean_and_least(ratios: Sequence[float]) -> str:
    """Return the geometric mean, the least, and of how many."""
    if not ratios:
        return NOT_MEASURED
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"**{mean:.2f}×** ({min(ratios):.3f}) of {len(ratios)}"


def span_of_origins(rows: Sequence[Row]) -> list[str]:
    """Say of how many commits the rows are, and from when to when; their table of cells has each."""
    commits = {row.commit for row in rows}
    days = sorted(row.date.partition("T")[0] for row in rows)
    return origins(rows) if len(commits) == 1 else [f"{len(commits)} commits, {days[0]} to {days[-1]}"]


def accuracy(rows: Sequence[Row]) -> str:
    """Write a line a case and pass, and of each provider the errors."""
    return side_by_side(rows, "Error against float64: maximum (mean); backward: the worst of dq, dk, dv", accuracy_cell)


def accuracy_cell(side: Comparison, row: Row) -> str:
    """Return the maximum error and the mean; in bold, ours."""
    if row.max_error is None:
        return status_cell(row)
    text = f"{row.max_error:.1e} ({row.mean_error:.1e})"
    return f"**{text}**" if row is side.ours else text


def updated_readme(text: str, results: Path) -> tuple[str, list[str]]:
    """Make every marked table of a document anew from the CSV files below a folder.

    Returns:
        The new text, and the names that have no rows yet; what stands between their markers is kept.

    Raises:
        InvalidInput: a marker without its end, or a name that fits several files.
    """
    without_rows: list[str] = []

    def made_anew(match: re.Match[str]) -> str:
        start, name, _, end, end_name = match.groups()
        if end_name != name:
            raise InvalidInput(f"the marker bench:{name} is followed by /bench:{end_name}; allowed is its own end.")
        stem, _, view = name.partition(":")
        file = named_file(results, stem)
        if file is None:
            without_rows.append(name)
            return match[0]
        return f"{start}\n{table(file, view or 'speed')}\n{end}"

    new, count = MARKED.subn(made_anew, text)
    if count != len(START.findall(text)):
        raise InvalidInput("a marker <!-- bench:NAME --> has no end; allowed is <!-- /bench:NAME --> behind it.")
    return new, without_rows


def named_file(results: Path, name: str) -> Path | None:
    """Return the file that a marker names, or None if there is none.

    Raises:
        InvalidInput: the name fits several files.
    """
    files = {file.relative_to(results).with_suffix("").as_posix(): file for file in sorted(results.rglob("*.csv"))}
    fitting = [file for path, file in files.items() if name in (path, path.rpartition("/")[2])]
    if len(fitting) > 1:
        raise InvalidInput(f"the marker bench:{name} fits {len(fitting)} files below {results}; "
                           f"allowed is one of {', '.join(files)}.")
    return fitting[0] if fitting else None


def main() -> int:
    """Print tables, or keep a document in step; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("files", nargs="*", default=[], type=Path, help="CSV files to print")
    asked.add_argument("--readme", type=Path, help="document whose marked tables are made anew")
    parser.add_argument("--view", default="speed", help="speed, summary, memory, accuracy or price")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the files that markers name")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if out of step")
    given = parser.parse_args()
    if given.readme is None:
        print("\n\n".join(table(path, given.view) for path in given.files))
        return 0
    old = given.readme.read_text(encoding="utf-8")
    new, without_rows = updated_readme(old, given.results)
    in_step = new == old
    if not in_step and not given.check:
        given.readme.write_text(new, encoding="utf-8")
    print(f"{given.readme}: {'in step' if in_step else 'out of step' if given.check else 'updated'}")
    for name in without_rows:
        print(f"no rows below {given.results} yet for the marker bench:{name}")
    return int(given.check and not in_step)


if __name__ == "__main__":
    sys.exit(main())
