"""Write the tables in the docs that scripts in benchmarks/ make of committed rows.

Usage: ``python docs/tables.py`` rewrites what stands between the markers, each of which names the script and the rows:
``<!-- table: SCRIPT FOLDER/ROWS.csv -->``, or a device's folder, and ``<!-- /table -->``.
"""

import re
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- table: (\w+) (\S+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return the pages of the documents, and of the journal, that have such a table; the README is one."""
    folders = [ROOT / "docs", ROOT / "benchmarks/journal"]
    written = [ROOT / "README.md", *(page for folder in folders for page in sorted(folder.glob("*.md")))]
    return [page for page in written if BLOCK.search(page.read_text("utf-8"))]


def rendered(text: str) -> str:
    """Return a page's text with its tables made anew."""
    return BLOCK.sub(made_anew, text)


def made_anew(found: re.Match[str]) -> str:
    """Return a marked table made anew; of rows that are not there yet a script may make nothing."""
    made = table(found[2], found[3])
    return f"{found[1]}\n{made}\n\n{found[5]}" if made else f"{found[1]}{found[5]}"


def table(script: str, rows: str) -> str:
    """Return a table as the script makes it of these rows."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        made: str = import_module(script).table(ROOT / "benchmarks/results" / rows)
    finally:
        sys.path.pop(0)
    return made


if __name__ == "__main__":
    for page in pages():
        page.write_text(rendered(page.read_text("utf-8")), "utf-8")
