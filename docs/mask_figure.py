"""Draw the figure of masks.md with ``mask.plot``: a window with sink tokens, and what its pairs look like up close.

Usage: ``python docs/mask_figure.py`` writes ``docs/figures/mask-plot.svg``.
"""

from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import tilewise as tw

FIGURE = Path(__file__).with_name("figures") / "mask-plot.svg"
GREY = "#767676"  # read on white and on black alike
STYLE = {"svg.hashsalt": "tilewise", "svg.fonttype": "path", "font.size": 9, "axes.titlesize": 9, "text.color": GREY,
         "axes.labelcolor": GREY, "axes.edgecolor": GREY, "axes.titlecolor": GREY, "xtick.color": GREY,
         "ytick.color": GREY}


def main(path: Path = FIGURE) -> None:
    """Write the figure."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6), layout="compressed")
        FigureCanvasAgg(figure)
        tiles, pairs = figure.subplots(1, 2)
        (tw.causal() & tw.window(255, 0) & tw.sink_tokens(4)).plot(1024, ax=tiles)
        (tw.causal() & tw.window(11, 0) & tw.sink_tokens(2)).plot(32, block=(4, 4), ax=pairs)
        figure.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
