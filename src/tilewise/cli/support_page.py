"""A page of which backend serves which call, in one HTML file that needs no other."""

from collections.abc import Iterable, Sequence
from html import escape

from tilewise.bench.support import LENGTH, Support
from tilewise.support.names import BACKENDS, DTYPES

_PASSES = ("forward", "backward")
# Of Okabe and Ito's palette where it lasts, told apart on light and on dark grounds; none serves: no colour.
_COLORS = {"gluon": "#d55e00", "triton": "#0072b2", "cuda": "#009e73", "cuda_ieee": "#7a9a2e", "torch": "#b8860b",
           "cudnn": "#8a5fa8", "reference": "#767676"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2125; --ground: #ffffff; --line: #d5d9de; --quiet: #5c646d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --ground: #15181b; --line: #3a4048; --quiet: #a3abb3; }
}
body { color: var(--ink); background: var(--ground); font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto;
       max-width: 70rem; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
th, td { border: 1px solid var(--line); padding: 0.2rem 0.5rem; text-align: center; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.no, p.quiet { color: var(--quiet); }
.serves { color: #ffffff; border-radius: 3px; padding: 0.05rem 0.4rem; }
li { margin: 0.15rem 0; }
"""


def support_page(where: str, found: Sequence[Support]) -> str:
    """Return the page: what serves each head dim and dtype, then each call of a dtype with every backend's answer.

    Args:
        where: the device, and under which conditions it was asked.
        found: as :func:`tilewise.bench.support.supported` returns it.
    """
    sentences: dict[str, int] = {}
    parts = [_head_dims([one for one in found if one.group == "head dims"])]
    parts += [_calls(dtype, [one for one in found if one.group == dtype], sentences) for dtype in DTYPES]
    refusals = "".join(f'<li id="r{number}">{escape(text)}</li>' for text, number in sentences.items())
    legend = " ".join(_tag(name) for name in BACKENDS)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>tilewise: which backend serves which call</title>
<style>{_STYLE}{_colors()}</style>
</head>
<body>
<h1>Which backend serves which call</h1>
<p>{escape(where)}</p>
<p>{legend}</p>
<p class="quiet">Calls have batch 2, 8 heads, {LENGTH} positions and head dim 64, but for what their row says; of short
ones, a GPU may choose otherwise. A name is the backend that serves the call without <code>backend=</code>; "yes", that
it would serve if it were named; a number, that it refuses, with its sentence below the tables.</p>
{"".join(parts)}
<h2>Refusals</h2>
<ol>{refusals}</ol>
</body>
</html>
"""


def _colors() -> str:
    return "".join(f".{name} {{ background: {color}; }}\n" for name, color in _COLORS.items())


def _tag(name: str | None) -> str:
    return "none" if name is None else f'<span class="serves {name}">{name}</span>'


def _head_dims(found: Sequence[Support]) -> str:
    """Return the table of head dims: a column a dtype and pass."""
    by_cell = {(one.name, one.dtype): one.answer for one in found}
    lines = []
    for name in dict.fromkeys(one.name for one in found):
        answers = [by_cell[name, dtype] for dtype in DTYPES]
        lines.append(_row(name, (_cell(_tag(served)) for answer in answers
                                 for served in (answer.forward, answer.backward))))
    return _table("By head dim", DTYPES, lines)


def _calls(dtype: str, found: Sequence[Support], sentences: dict[str, int]) -> str:
    """Return the table of a dtype's calls: a column a backend and pass; new refusals join the sentences."""
    lines = []
    for one in found:
        chosen = {"forward": one.answer.forward, "backward": one.answer.backward}
        cells = []
        for name in BACKENDS:
            for direction in _PASSES:
                reason = one.answer.reasons[direction, name]
                if reason is not None:
                    number = sentences.setdefault(reason, len(sentences) + 1)
                    link = f'<a href="#r{number}">{number}</a>'
                    cells.append(f'<td class="no" title="{escape(reason)}">{link}</td>')
                else:
                    cells.append(_cell(_tag(name) if chosen[direction] == name else "yes"))
        lines.append(_row(one.name, cells))
    return _table(f"Masks and options, {dtype}", BACKENDS, lines)


def _cell(text: str) -> str:
    return f"<td>{text}</td>"


def _row(name: str, cells: Iterable[str]) -> str:
    return f"<tr><td>{escape(name)}</td>{''.join(cells)}</tr>\n"


def _table(title: str, columns: Sequence[str], lines: Sequence[str]) -> str:
    heads = "".join(f'<th colspan="2">{column}</th>' for column in columns)
    passes = "".join(f"<th>{direction}</th>" for _ in columns for direction in _PASSES)
    return (f'<h2>{escape(title)}</h2>\n<div class="wide"><table>\n<thead><tr><th rowspan="2">call</th>{heads}</tr>\n'
            f"<tr>{passes}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody></table></div>\n")
