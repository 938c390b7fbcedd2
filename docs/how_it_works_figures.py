"""Draw the figures of docs/how-it-works.md, each for light and for dark pages.

Usage: ``python docs/how_it_works_figures.py [--out FOLDER]``
"""

import argparse
import pathlib
import sys
from typing import Any, NamedTuple

DOCS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "src"))

import matplotlib  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyBboxPatch, Patch, PathPatch  # noqa: E402
from matplotlib.path import Path  # noqa: E402
from matplotlib.transforms import Affine2D  # noqa: E402

import tilewise as tw  # noqa: E402
from tilewise.dispatch import BACKENDS  # noqa: E402

FOLDER = DOCS / "figures/how-it-works"
WIDTH = 700  # pixels, of 1/100 inch
PALETTES = {
    "light": {"text": "#1a1c1e", "faint": "#5a5c63", "user": "#fbe3d6", "host": "#e3ecf7", "device": "#dcf0e3",
              "edge": "#8a8f98", "full": "#2f6fb3", "partial": "#9cc3ea", "skipped": "#eceef1"},
    "dark": {"text": "#e8e9eb", "faint": "#a3a6ad", "user": "#5a3a26", "host": "#26384d", "device": "#234432",
             "edge": "#7b8089", "full": "#6aa5e3", "partial": "#33557a", "skipped": "#26282c"},
}
SETTINGS: Any = {"svg.hashsalt": "tilewise", "svg.fonttype": "path", "font.family": "DejaVu Sans"}


class Step(NamedTuple):
    """One box: what happens, where in ``src/tilewise``, in which columns (forward, backward or both), and whose it is.

    Boxes of one row stand side by side.
    """

    row: int
    columns: str
    title: str
    text: str
    files: tuple[str, ...]
    kind: str


STEPS = (
    Step(0, "forward", "attention(q, k, v, …)", "the public call", ("api.py",), "user"),
    Step(0, "backward", "out.backward()", "q, k, v, out and lse were kept", ("autograd/function.py",), "user"),
    Step(1, "forward", "attention_forward", "an operator of PyTorch", ("autograd/op.py",), "host"),
    Step(1, "backward", "attention_backward", "an operator of PyTorch", ("autograd/op.py",), "host"),
    Step(2, "both", "AttentionProblem", "the call as a checked, hashable value without tensors",
         ("validate/", "problem/", "masks/"), "host"),
    Step(3, "both", "choose", "the first backend that has no reason against the problem", ("dispatch.py",), "host"),
    Step(4, "both", "backends", "", ("backends/",), "host"),
    Step(5, "both", "tile", "a row of a table that was measured, else a heuristic", ("tuning/select.py",), "host"),
    Step(6, "both", "kernels", "Triton, Gluon or CUDA on the GPU; PyTorch elsewhere", ("kernels/",), "device"),
    Step(7, "forward", "out, lse", "", (), "user"),
    Step(7, "backward", "dq, dk, dv", "and of bias, slopes, sinks", (), "user"),
)
FAST_PATH = "autograd/fast_path.py"
MASKS = {
    "causal()": tw.causal(),
    "window(300, 0)": tw.window(300, 0),
    "prefix(300)": tw.prefix(300),
    "causal() & chunk(400)": tw.causal() & tw.chunk(400),
}
LENGTH, TILE = 1024, 64  # positions, and the side of a tile


def _new_figure(height: int, colours: dict[str, str]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH / 100, height / 100))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def draw_call_path(colours: dict[str, str]) -> Figure:
    """Draw what a call goes through, the forward pass on the left, the backward pass on the right."""
    top, high, gap = 40, 54, 22
    spans = {"forward": (40, 340), "backward": (360, 660), "both": (40, 660)}
    rows = 1 + max(step.row for step in STEPS)
    figure, axes = _new_figure(top + rows * (high + gap), colours)
    for column in ("forward", "backward"):
        middle = sum(spans[column]) / 2
        axes.text(middle, 22, f"{column} pass", ha="center", va="center", size=10, color=colours["faint"])
        for row in range(rows - 1):
            start = top + row * (high + gap) + high
            axes.annotate("", (middle, start + gap - 1), (middle, start + 1),
                          arrowprops={"arrowstyle": "-|>", "color": colours["edge"], "lw": 1.3})
    for step in STEPS:
        left, right = spans[step.columns]
        y = top + step.row * (high + gap)
        _box(axes, (left, y, right - left, high), colours[step.kind], colours)
        if step.title == "backends":
            _draw_backends(axes, (left, y, right - left, high), colours)
            continue
        where = " ".join(step.files)
        axes.text(left + 12, y + (18 if step.text else high / 2), step.title, va="center", size=10.5, weight="bold",
                  color=colours["text"])
        axes.text(right - 12, y + 18, where, ha="right", va="center", size=8.5, family="DejaVu Sans Mono",
                  color=colours["faint"])
        axes.text(left + 12, y + 38, step.text, va="center", size=9.5, color=colours["text"])
    _draw_fast_path(axes, top + high / 2, top + 6 * (high + gap) + high / 2, colours)
    return figure


def _box(axes: Axes, place: tuple[float, float, float, float], colour: str, colours: dict[str, str]) -> None:
    x, y, width, height = place
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=6", facecolor=colour,
                                  edgecolor=colours["edge"], lw=1))


def _draw_backends(axes: Axes, place: tuple[float, float, float, float], colours: dict[str, str]) -> None:
    x, y, width, height = place
    each = (width - 24) / len(BACKENDS)
    for number, name in enumerate(BACKENDS):
        _box(axes, (x + 12 + number * each + 3, y + 12, each - 6, height - 24), colours["device"], colours)
        axes.text(x + 12 + (number + 0.5) * each, y + height / 2, name, ha="center", va="center", size=9,
                  family="DejaVu Sans Mono", color=colours["text"])


def _draw_fast_path(axes: Axes, start: float, end: float, colours: dict[str, str]) -> None:
    for x, edge in ((18, 40), (682, 660)):
        axes.plot((edge, x, x), (start, start, end), color=colours["faint"], lw=1.3, ls=(0, (4, 3)))
        axes.annotate("", (edge, end), (x - (1 if x < edge else -1), end),
                      arrowprops={"arrowstyle": "-|>", "color": colours["faint"], "lw": 1.3})
    axes.text(10, (start + end) / 2, "fast path: a call like an earlier one", rotation=90, ha="center", va="center",
              size=8.5, color=colours["faint"])


def draw_tiles(colours: dict[str, str]) -> Figure:
    """Draw which tiles of scores are computed whole, compared with the mask, or skipped."""
    side, gap, top = 152, 20, 34
    figure, axes = _new_figure(top + side + 44, colours)
    left = (WIDTH - len(MASKS) * side - (len(MASKS) - 1) * gap) / 2
    for number, (name, mask) in enumerate(MASKS.items()):
        x = left + number * (side + gap)
        axes.text(x, top - 14, name, va="center", size=8.5, family="DejaVu Sans Mono", color=colours["text"])
        visible = mask.visible(LENGTH, LENGTH, "cpu").reshape(LENGTH, LENGTH)
        shares = visible.float().reshape(LENGTH // TILE, TILE, LENGTH // TILE, TILE).mean((1, 3)).tolist()
        each = side / len(shares)
        corners: dict[str, list[tuple[float, float]]] = {"full": [], "partial": [], "skipped": []}
        for i, row in enumerate(shares):
            for j, share in enumerate(row):
                kind = "full" if share == 1 else "partial" if share else "skipped"
                corners[kind].append((x + j * each, top + i * each))
        for kind, places in corners.items():  # one path a kind keeps the file small
            squares = [Path.unit_rectangle().transformed(Affine2D().scale(each - 0.8).translate(*place))
                       for place in places]
            axes.add_patch(PathPatch(Path.make_compound_path(*squares), facecolor=colours[kind], lw=0))
    words = {"full": "computed without a look at the mask", "partial": "compared with the mask", "skipped": "skipped"}
    legend = axes.legend(handles=[Patch(facecolor=colours[kind], label=text) for kind, text in words.items()],
                         loc="lower center", ncols=3, frameon=False, fontsize=9, handlelength=1, handleheight=1,
                         labelcolor=colours["text"])
    legend.set_bbox_to_anchor((0.5, 0.0))
    return figure


FIGURES = {"call-path": draw_call_path, "tiles": draw_tiles}


def draw(folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw every figure in every palette; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with matplotlib.rc_context(SETTINGS):
        for name, make in FIGURES.items():
            for shade, colours in PALETTES.items():
                files.append(folder / f"{name}-{shade}.svg")
                make(colours).savefig(files[-1], transparent=True, metadata={"Date": None})
    return files


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER)
    print(*draw(parser.parse_args().out), sep="\n")
