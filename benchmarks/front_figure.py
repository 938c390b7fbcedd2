"""Draw the README's figure: speed of causal training beside other libraries, for pages of a light and a dark ground.

Usage: ``python benchmarks/front_figure.py benchmarks/results/nvidia-h200/paper.csv --out docs/figures``.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewise.bench.plots import origin_of
from tilewise.bench.rows import Row, latest, read_rows

DIMS, PASSES = (64, 128), ("forward", "backward")
# Ours last, so that it lies above the others.
LINES = {"sdpa_flash": ("FlashAttention-2", "#0072B2", "#56B4E9", "v"),
         "flash_attn3_fwd": ("FlashAttention-3", "#6A51A3", "#B6A5F0", "h"),
         "flash_attn4": ("FlashAttention-4", "#A3466C", "#E58BB0", "s"),
         "sdpa_cudnn": ("cuDNN", "#007A5A", "#2FC79B", ">"), "tilewise": ("tilewise", "#C44E00", "#FF8A3D", "o")}
GROUNDS = {"light": (0, "#24292F", "#D9DEE3"), "dark": (1, "#E6EDF3", "#3A424B")}


def shown(rows: Sequence[Row], d: int, direction: str) -> dict[str, list[Row]]:
    """Return the rows of a panel by their provider, shortest sequence first."""
    own = [row for row in latest(rows) if (row.d, row.direction, row.mask) == (d, direction, "causal")
           and row.tflops is not None]
    return {name: found for name in LINES
            if (found := sorted((row for row in own if row.provider == name), key=lambda row: row.sq))}


def draw(rows: Sequence[Row], path: Path, ground: str) -> None:
    """Draw a panel for each head dim and pass."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shade, ink, faint = GROUNDS[ground]
    settings: Any = {"svg.hashsalt": "tilewise", "svg.fonttype": "path", "font.size": 11, "axes.spines.top": False,
                     "axes.spines.right": False, "text.color": ink, "axes.labelcolor": ink, "xtick.color": ink,
                     "ytick.color": ink, "axes.edgecolor": ink}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(9.2, 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(PASSES), len(DIMS), squeeze=False, sharex=True)
        handles: dict[str, Any] = {}
        for axes, direction in zip(grid, PASSES, strict=True):
            for axis, d in zip(axes, DIMS, strict=True):
                for name, found in shown(rows, d, direction).items():
                    _, *colours, marker = LINES[name]
                    (handles[name],) = axis.plot(
                        [row.sq for row in found], [row.tflops for row in found], color=colours[shade], marker=marker,
                        linewidth=2.6 if name == "tilewise" else 1.5, markersize=6)
                axis.set_xscale("log", base=2)
                lengths = sorted({line for own in shown(rows, d, direction).values() for line in (r.sq for r in own)})
                axis.set_xticks(lengths, [f"{s // 1024}k" if s >= 1024 else str(s) for s in lengths])
                axis.minorticks_off()
                axis.set_ylim(bottom=0)
                axis.grid(axis="y", color=faint, linewidth=0.8)
                axis.set_axisbelow(True)
                axis.set_title(f"{direction}, head dim {d}", loc="left", fontsize=11)
            axes[0].set_ylabel("TFLOP/s")
        for axis in grid[-1]:
            axis.set_xlabel("tokens in a sequence")
        names = [name for name in reversed(LINES) if name in handles]
        figure.legend([handles[name] for name in names], [LINES[name][0] for name in names], loc="outside upper center",
                      ncols=len(names), frameon=False, fontsize=10, columnspacing=1.2, handletextpad=0.5)
        figure.savefig(path, metadata={"Date": None, "Description": origin_of(rows)}, transparent=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder of the figures")
    given = parser.parse_args()
    for ground in GROUNDS:
        draw(read_rows(given.file), given.out / f"front-{ground}.svg", ground)
