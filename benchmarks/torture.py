"""Print as Markdown what `tilewise check --torture --csv FILE` wrote; docs/torture.md has such tables.

Usage: ``python benchmarks/torture.py FILE``.
"""

import argparse
import csv
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tilewise.bench.torture_rows import COLUMNS, TortureRow
from tilewise.errors import InvalidInput
from tilewise.testing.torture.issues import short

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
SHOWN = {"pass": "pass", "fail": "**FAIL**", "n/a": "–"}


def table(path: Path) -> str:
    """Return rows as Markdown: who passes what, the failures with their numbers, and where the rows come from."""
    rows = read_torture_rows(path)
    columns = list(dict.fromkeys((row.implementation, row.dtype) for row in rows))
    found = {(row.check, row.implementation, row.dtype): row.status for row in rows}
    dtypes = {dtype for _, dtype in columns}
    titles = [name if len(dtypes) == 1 else f"{name}, {dtype}" for name, dtype in columns]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (1 + len(columns)) + "|"]
    for group in dict.fromkeys(row.group for row in rows):
        lines.append(f"| **{group}** |" + " |" * len(columns))
        lines += [f"| `{check}` | {' | '.join(SHOWN[found[check, *column]] for column in columns)} |"
                  for check in dict.fromkeys(row.check for row in rows if row.group == group)]
    lines.append(f"| **failed, of those that apply** | {' | '.join(score(rows, *column) for column in columns)} |")
    return "\n".join([*lines, "", *failures(rows), caption(rows)])


def read_torture_rows(path: Path) -> list[TortureRow]:
    """Read what `tilewise check --torture --csv` wrote.

    Raises:
        InvalidInput: the file is missing, or is not such a file.
    """
    if not path.is_file():
        raise InvalidInput(f"{path} is no file; allowed is a CSV that `tilewise check --torture --csv` wrote.")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if unlike := set(reader.fieldnames or ()) ^ set(COLUMNS):
            raise InvalidInput(f"{path} is no table of `tilewise check --torture`: missing or unknown columns "
                               f"{', '.join(sorted(unlike))}.")
        return [TortureRow(**record) for record in reader]


def score(rows: Sequence[TortureRow], implementation: str, dtype: str) -> str:
    """Return how many checks an implementation failed, of how many."""
    own = Counter(row.status for row in rows if (row.implementation, row.dtype) == (implementation, dtype))
    return f"{own['fail']} of {own['fail'] + own['pass']}"


def failures(rows: Sequence[TortureRow]) -> list[str]:
    """Return a line for each failure, and an empty one behind them."""
    lines = [f"- {row.implementation}, `{row.check}`{cited(row.issue)}: `{quoted(row.sentence)}`"
             for row in rows if row.status == "fail"]
    return [*lines, ""] if lines else []


def quoted(sentence: str) -> str:
    """Return a sentence as it may stand between backquotes; those of compilers may have a terminal's colours."""
    return COLOUR.sub("", sentence).replace("`", "'")


def cited(issue: str) -> str:
    """Return the link to a public report, in brackets."""
    return f" ([{short(issue)}]({issue}))" if issue else ""


def caption(rows: Sequence[TortureRow]) -> str:
    """Return where, when and with what the rows came to be."""
    first = rows[0]
    versions = dict.fromkeys(f"{row.implementation} {row.version}" for row in rows if row.version)
    commits = ", ".join(dict.fromkeys(row.commit for row in rows if row.commit))
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    parts = [first.device_name, f"driver {first.driver}" if first.driver else "", dtypes,
             f"torch {first.torch}", f"Triton {first.triton}" if first.triton else "", *versions,
             f"commit {commits}" if commits else "", max(row.date for row in rows).partition("T")[0]]
    return "; ".join(part for part in parts if part) + "."


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    print(table(parser.parse_args().path))
