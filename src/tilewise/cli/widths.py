"""Tables that fit their console: columns as wide as their words allow, and fewer of them where that is too wide."""

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_AROUND = 3  # of a column: a border and a space at both sides; the table has one border more


def print_fitted(console: Console, table: Table, left_out: Sequence[str] = ()) -> None:
    """Print a table without breaking a word, and say below which columns there is no room for.

    Args:
        left_out: headers, the one that a reader misses least first.
    """
    missing: list[str] = []
    for header in left_out:
        if _least(table.columns) <= console.width:
            break
        table.columns = [column for column in table.columns if column.header != header]
        missing.append(header)
    _set_widths(table, console.width)
    console.print(table)
    if missing:
        console.print(f"left out, as {console.width} columns have no room for it: {', '.join(missing)}; --json has all",
                      markup=False, style="dim")


def print_split(console: Console, table: Table) -> None:
    """Print a table as several that fit, each with the first column and some of the others."""
    first, rest = table.columns[0], list(table.columns[1:])
    while rest:
        count = next((count for count in range(len(rest), 1, -1) if _least([first, *rest[:count]]) <= console.width), 1)
        table.columns, rest = [first, *rest[:count]], rest[count:]
        _set_widths(table, console.width)
        console.print(table)
        table.title = None


def _least(columns: Sequence[Column]) -> int:
    return sum(_longest_word(column) + _AROUND for column in columns) + 1


def _set_widths(table: Table, width: int) -> None:
    """Give each column its longest word, and what room is left to those whose lines are longer, line by line."""
    wanted = [max(map(cell_len, _lines(column)), default=0) for column in table.columns]
    widths = [_longest_word(column) for column in table.columns]
    room = width - _AROUND * len(widths) - 1 - sum(widths)
    while room > 0 and widths != wanted:
        narrowest = min((have, i) for i, (have, want) in enumerate(zip(widths, wanted, strict=True)) if have < want)[1]
        widths[narrowest] += 1
        room -= 1
    for column, own in zip(table.columns, widths, strict=True):
        column.width = own


def _longest_word(column: Column) -> int:
    """Return the width of the longest word; what a line is indented by belongs to its first one."""
    words = [word for line in _lines(column) for word in re.findall(r"^\s*\S+|\S+", line)]
    return max(map(cell_len, words), default=0)


def _lines(column: Column) -> list[str]:
    texts = [column.header, *column.cells]
    return [line for text in texts for line in Text.from_markup(str(text)).plain.split("\n")]
