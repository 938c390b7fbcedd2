"""Draw the figures of masks.md with ``mask.plot``: a window with sink tokens, far and near, and a tree beside blocks.

Usage: ``python docs/mask_figure.py`` writes ``docs/figures/mask-plot.svg`` and ``docs/figures/mask-tables.svg``.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import tilewise as tw

FIGURE = Path(__file__).with_name("figures") / "mask-plot.svg"
TABLES = FIGURE.with_name("mask-tables.svg")
GREY = "#767676"  # read on white and on black alike
STYLE = {"svg.hashsalt": "tilewise", "svg.fonttype": "path", "font.size": 9, "axes.titlesize": 9, "text.color": GREY,
         "axes.labelcolor": GREY, "axes.edgecolor": GREY, "axes.titlecolor": GREY, "xtick.color": GREY,
         "ytick.color": GREY}


def main(path: Path = FIGURE, tables: Path = TABLES) -> None:
    """Write the figures."""
    window, near = (tw.causal() & tw.window(reach, 0) & tw.sink_tokens(sinks) for reach, sinks in ((255, 4), (11, 2)))
    write(path, lambda ax: window.plot(1024, ax=ax), lambda ax: near.plot(32, block=(4, 4), ax=ax))
    lengths = torch.tensor([25, 17, 14, 11, 15, 10, 18, 18])
    tree = tw.tree(torch.arange(8).repeat_interleave(lengths), [-1, 0, 0, 0, 1, 1, 2, 2])
    seen = torch.rand(8, 8, generator=torch.Generator().manual_seed(4)) < 0.4
    blocks = tw.causal() & tw.blocks(seen | torch.eye(8, dtype=torch.bool), 128)
    write(tables, lambda ax: tree.plot(128, block=(16, 16), ax=ax), lambda ax: blocks.plot(1024, ax=ax))


def write(path: Path, left: Callable[[Axes], Axes], right: Callable[[Axes], Axes]) -> None:
    """Write a figure of two masks."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6), layout="compressed")
        FigureCanvasAgg(figure)
        for draw, ax in zip((left, right), figure.subplots(1, 2), strict=True):
            draw(ax)
        figure.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
