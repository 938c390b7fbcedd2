"""Draw the figures of the pages that explain the kernels; usage: ``python docs/figures.py``.

Boxes, stages of a pipeline and rows of an example are tables in this file. Which tile comes when, and which tiles a
mask skips, is asked of the package. No figure has a measured time. Equal tables give equal bytes. The colours are dark
enough for white text on them, and bright enough to stand on a dark page; the ink outside of boxes reads on both.
"""

import math
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

ROOT = Path(__file__).resolve().parents[1]
INK = "#7a7a7a"  # 4.3:1 on white and on the dark theme
BLUE, RED, GREEN, PURPLE, BROWN, TEAL, GREY = (
    "#2f6fb5", "#b8453f", "#2e7d4f", "#7d5ba6", "#9a5f16", "#1f7a7a", "#6b7280")
WIDTH = 7.0  # inches: 700 px in a page
SETTINGS: Any = {"svg.hashsalt": "tilewise", "svg.fonttype": "path", "font.size": 8.5, "font.family": "DejaVu Sans",
                 "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK,
                 "ytick.color": INK}

# name: (left, bottom, width, height, text, colour), in hundredths of the figure's width
DATAFLOW_BOXES = {
    "q": (2.5, 47, 10, 7, "Q", GREY), "k": (2.5, 34, 10, 7, "K", GREY), "v": (2.5, 23, 10, 7, "V", GREY),
    "out": (2.5, 4, 10, 7, "out, lse", GREY),
    "q_stage": (26, 47, 22, 7, "Q, 64 rows of each\nwarpgroup", TEAL),
    "k_stage": (26, 34, 22, 7, "stage: K of block j", TEAL),
    "v_stage": (26, 23, 22, 7, "stage: V of block j − 1", TEAL),
    "staged": (26, 4, 22, 7, "out, staged", TEAL),
    "s": (58, 42, 18, 9, "S = Q Kᵀ\nfloat32", BLUE), "softmax": (80, 42, 18, 9, "mask, row max,\nexp2, row sum", RED),
    "p": (80, 23, 18, 9, "P, packed\n2 × 16 bits", PURPLE), "o": (58, 23, 18, 9, "O += P V\nfloat32", BLUE),
    "divide": (58, 3, 18, 9, "O / row sum", BROWN)}
# from, its side, to, its side, text
DATAFLOW_ARROWS = (
    ("q", "e", "q_stage", "w", "TMA load"), ("k", "e", "k_stage", "w", "TMA load"),
    ("v", "e", "v_stage", "w", "TMA load"),
    ("q_stage", "e", "s", "w", ""), ("k_stage", "e", "s", "w", ""), ("v_stage", "e", "o", "w", ""),
    ("s", "e", "softmax", "w", ""), ("softmax", "s", "p", "n", ""), ("p", "w", "o", "e", ""),
    ("o", "s", "divide", "n", "after the last block"), ("divide", "w", "staged", "e", ""),
    ("staged", "w", "out", "e", "TMA store"))

PRODUCER, MMA, SOFTMAX, EPILOGUE, SUM, STORE = GREY, BLUE, RED, BROWN, TEAL, PURPLE
# One warpgroup's stages, its lane 0 for MMAs and 1 for the rest: (lane, begin, end, text, colour). No unit of time.
FORWARD_WARPGROUP = (
    (0, 0, 1, "S2", MMA), (1, 1, 4, "softmax 2", SOFTMAX),
    (0, 4, 5, "S1", MMA), (0, 5, 6, "PV2", MMA), (1, 5, 8, "softmax 1", SOFTMAX),
    (0, 8, 9, "S0", MMA), (0, 9, 10, "PV1", MMA), (1, 9, 12, "softmax 0", SOFTMAX),
    (0, 12, 13, "PV0", MMA), (0, 13, 14, "S1′", MMA), (1, 13, 14.2, "out", EPILOGUE),
    (1, 14.2, 16.6, "softmax 1′", SOFTMAX))
FORWARD_LOADS = ((0, -3, -1.9, "Q", PRODUCER), (0, -1.8, 0, "K2 –", PRODUCER), (0, 0.1, 2.5, "K1 V2", PRODUCER),
                 (0, 3.2, 6, "K0 V1", PRODUCER), (0, 7.4, 8.4, "Q′", PRODUCER), (0, 8.5, 11, "K1′ V0", PRODUCER),
                 (0, 12.2, 15.2, "K0′ V1′", PRODUCER))
BACKWARD_D128_WARPGROUP = (
    (0, 0, 1, "S", MMA), (0, 1, 2, "dP", MMA), (1, 1, 2.2, "P", SOFTMAX), (1, 2.2, 3.2, "dS", SOFTMAX),
    (0, 3.2, 4.2, "dV", MMA), (0, 4.2, 5.2, "dQ", MMA), (0, 5.2, 6.2, "dK", MMA), (1, 5.2, 6.2, "stage dQ", EPILOGUE))
BACKWARD_D64_WARPGROUP = (
    (1, 0, 1, "dS t−1", SOFTMAX), (0, 1, 2, "dV t−1", MMA), (0, 2, 3, "S t", MMA), (0, 3, 4, "dK t−1", MMA),
    (0, 4, 5, "dP t", MMA), (1, 3, 5, "P t", SOFTMAX))

HEADS, TILES, HEADS_PER_SWIZZLE = 10, 8, 4  # of the figure of the tiles' order
SCORES = (1.0, 3.0, 0.5, 2.0, 5.0, 1.5, 4.0, 4.5, 2.5, 7.0, 3.5, 0.0)  # of the row in the figure of the online softmax
KEYS_A_TILE = 4
QUERIES, BLOCK = 96, 8  # of the figure of masks


def axes_of(height: float) -> tuple[Figure, Axes]:
    """Return a figure of this height in inches, and axes without a frame that fill it."""
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0.005, 0.005, 0.99, 0.99))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, at: tuple[float, float, float, float], text: str, colour: str, size: float = 8.5) -> None:
    """Draw a filled box with white text: left, bottom, width, height."""
    left, bottom, width, height = at
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.8",
                                  facecolor=colour, edgecolor="none"))
    axes.text(left + width / 2, bottom + height / 2, text, color="white", ha="center", va="center", size=size)


def dataflow() -> Figure:
    """Draw what a tile's Q, K and V pass through in the forward kernel."""
    figure, axes = axes_of(4.3)
    axes.set(xlim=(0, 100), ylim=(0, 61.5))
    for left, width, title in ((0.2, 14.6, "global memory"), (24, 26, "shared memory"),
                               (57, 42.8, "registers of a consumer warpgroup")):
        axes.add_patch(FancyBboxPatch((left, 0.8), width, 55.5, boxstyle="round,pad=0,rounding_size=1.2",
                                      facecolor="none", edgecolor=INK, linewidth=0.8, linestyle=(0, (4, 3))))
        axes.text(left + width / 2, 58, title, ha="center", va="bottom", weight="bold")
    for *at, text, colour in DATAFLOW_BOXES.values():
        box(axes, tuple(at), text, colour)
    sides = {"e": (1.0, 0.5), "w": (0.0, 0.5), "n": (0.5, 1.0), "s": (0.5, 0.0)}
    for start, leaves, end, enters, text in DATAFLOW_ARROWS:
        ends = [(left + width * sides[side][0], bottom + height * sides[side][1])
                for (left, bottom, width, height, *_), side in ((DATAFLOW_BOXES[start], leaves),
                                                                (DATAFLOW_BOXES[end], enters))]
        axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=9, color=INK, shrinkA=1, shrinkB=1))
        middle = [(first + second) / 2 for first, second in zip(*ends, strict=True)]
        if leaves == "s":
            axes.text(middle[0] + 1.5, middle[1], text, ha="left", va="center", size=7.5)
        else:
            axes.text(middle[0], middle[1] + 1, text, ha="center", va="bottom", size=7.5)
    axes.text(37, 42.6, "KV pipe: ring of 2 or 4 stages", ha="center", va="bottom", size=7.5)
    axes.text(53.5, 38.5, "WGMMA\nreads", ha="center", va="center", size=7.5)
    return figure


def lanes(axes: Axes, names: tuple[str, ...], stages: list[tuple[float, float, float, str, str]],
          limits: tuple[float, float]) -> None:
    """Draw stages of a pipeline: (lane, begin, end, text, colour), lane 0 at the top; names at the left."""
    begin, end = limits
    unit = (end - begin) / 100
    for lane, name in enumerate(names):
        axes.text(begin - unit, -lane, name, ha="right", va="center", size=8)
        axes.plot((begin, end), (-lane - 0.5, -lane - 0.5), color=INK, linewidth=0.3)
    for lane, start, stop, text, colour in stages:
        axes.add_patch(Rectangle((start + 0.1 * unit, -lane - 0.4), stop - start - 0.2 * unit, 0.8, facecolor=colour,
                                 edgecolor="none"))
        axes.text((start + stop) / 2, -lane, text, color="white", ha="center", va="center", size=7.5)
    axes.annotate("", (end, 0.85), (begin, 0.85), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 0.8})
    axes.text(begin, 0.95, "time (not to scale)", ha="left", va="bottom", size=7.5)
    axes.set(xlim=(begin - 22 * unit, end), ylim=(-len(names) + 0.4, 1.7))


def shifted(stages: Any, lane: float, by: float, texts: tuple[str, str] = ("", "")) -> list[Any]:
    """Return stages in other lanes, and later."""
    return [(lane + of, begin + by, end + by, text.replace(*texts) if texts[0] else text, colour)
            for of, begin, end, text, colour in stages]


def forward_pipeline() -> Figure:
    """Draw the forward kernel's warps over two tiles."""
    figure, axes = axes_of(2.9)
    names = ("producer warp", "warpgroup 0: MMA", "softmax", "warpgroup 1: MMA", "softmax")
    stages = [*FORWARD_LOADS, *shifted(FORWARD_WARPGROUP, 1, 0), *shifted(FORWARD_WARPGROUP, 3, 2)]
    lanes(axes, names, stages, (-3, 18.8))
    for first, at in ((1, 12.5), (3, 14.5)):
        axes.plot((at + 0.5, at + 0.5), (-first + 0.48, -first - 1.48), color=INK, linewidth=1, linestyle=(0, (2, 2)))
    axes.text(11, 0.95, "tile A, then tile B: the next tile's first S is issued behind the last PV", ha="center",
              va="bottom", size=7.5)
    return figure


def backward_pipelines() -> Figure:
    """Draw the backward kernels' warps over an iteration or two: d128.py above, d64.py below."""
    figure = Figure(figsize=(WIDTH, 5.9))
    upper, lower = figure.add_axes((0.005, 0.55, 0.99, 0.41)), figure.add_axes((0.005, 0.005, 0.99, 0.455))
    for axes, title in ((upper, "Head dims of 65 to 128 (backward/d128.py): two warpgroups meet once an iteration"),
                        (lower, "Head dims up to 64 (backward/d64.py): a third warpgroup has dQ")):
        axes.axis("off")
        axes.set_title(title, size=9, weight="bold", loc="left", color=INK)
    stages: list[Any] = [(0, -1.5, 0, "Q, dO t", PRODUCER), (0, 1, 2.6, "Q t+1", PRODUCER),
                         (0, 4.4, 6, "dO t+1", PRODUCER), (0, 7.4, 9, "Q t+2", PRODUCER)]
    for lane, late in ((1, 0.0), (3, 0.15)):
        stages += shifted(BACKWARD_D128_WARPGROUP, lane, late) + shifted(BACKWARD_D128_WARPGROUP[:4], lane, 6.2 + late)
    stages += [(5, 0, 1.45, "add dQ t−1", STORE), (5, 6.3, 7.75, "add dQ t", STORE)]
    names = ("producer warp", "warpgroup 0: MMA", "P, dS, dQ", "warpgroup 1: MMA", "P, dS, dQ", "TMA")
    lanes(upper, names, stages, (-1.5, 9.8))
    upper.plot((4.26, 4.26), (-0.55, -4.45), color=INK, linewidth=1.4)
    upper.text(4.33, -5, "named barrier", ha="left", va="center", size=7.5)
    stages = [(0, -0.4, 1.6, "Q, dO t+1", PRODUCER), (0, 5, 7, "Q, dO t+2", PRODUCER)]
    later = ("t−1", "T"), ("t", "t+1"), ("T", "t")
    for lane, late in ((1, 0.0), (3, 0.6)):
        following = shifted(BACKWARD_D64_WARPGROUP, lane, 5 + late)
        for one in later:
            following = shifted(following, 0, 0, one)
        stages += shifted(BACKWARD_D64_WARPGROUP, lane, late) + following
    for t, at in (("t−1", 1.8), ("t", 6.8)):
        stages += [(5, at, at + 1.4, f"dQ {t}", MMA), (6, at + 1.4, at + 2.2, "stage", EPILOGUE),
                   (7, at + 2.2, at + 3.9, f"add dQ {t}", STORE)]
    names = ("producer warp", "warpgroup 0: MMA", "P, dS", "warpgroup 1: MMA", "P, dS", "warpgroup 2: MMA", "dQ", "TMA")
    lanes(lower, names, stages, (-0.4, 10.7))
    return figure


def order_of_tiles() -> list[list[int]]:
    """Ask the tile scheduler for the number of each tile of a causal call: by head, then by tile of queries."""
    from tilewise.kernels.hopper.arguments import TileGrid
    from tilewise.kernels.hopper.tile_scheduler import _swizzled

    numbers = [[0] * TILES for _ in range(HEADS)]
    for number in range(HEADS * TILES):
        rank, head = _swizzled.fn(number, TileGrid(TILES, HEADS, 1, HEADS_PER_SWIZZLE), True)
        numbers[head][TILES - 1 - rank] = number
    return numbers


def tile_order() -> Figure:
    """Draw in which order the tiles of a causal call are scheduled."""
    figure, axes = axes_of(3.6)
    numbers = order_of_tiles()
    remainder = (HEADS - 1) % HEADS_PER_SWIZZLE + 1
    colours = (PURPLE, BLUE, GREEN)
    for head, row in enumerate(numbers):
        section = 0 if head < remainder else 1 + (head - remainder) // HEADS_PER_SWIZZLE
        for tile, number in enumerate(row):
            axes.add_patch(Rectangle((tile + 0.03, -head - 0.97), 0.94, 0.94, facecolor=colours[section],
                                     edgecolor="none"))
            axes.text(tile + 0.5, -head - 0.5, str(number), color="white", ha="center", va="center", size=8)
        axes.text(-0.15, -head - 0.5, f"head {head}", ha="right", va="center", size=8)
    for tile in range(TILES):
        axes.text(tile + 0.5, 0.12, f"tile {tile}", ha="center", va="bottom", size=8)
    axes.text(TILES / 2, 0.9, "tiles of queries; the last sees the most keys", ha="center", va="bottom", weight="bold")
    begin = 0
    for section, colour in enumerate(colours):
        width = remainder if section == 0 else HEADS_PER_SWIZZLE
        text = ("the remainder of the heads\ncomes first", "a section whose K and V\nfit L2 together",
                "the next section")[section]
        axes.text(TILES + 0.25, -begin - width / 2, text, ha="left", va="center", color=INK)
        axes.plot((TILES + 0.12,) * 2, (-begin - 0.05, -begin - width + 0.05), color=colour, linewidth=3)
        begin += width
    axes.set(xlim=(-1.2, TILES + 3.6), ylim=(-HEADS - 0.1, 1.6))
    return figure


def tile_sweep() -> Figure:
    """Draw a tile of queries that stays, and tiles of keys and values that stream past it."""
    figure, axes = axes_of(2.2)
    axes.set(xlim=(0, 100), ylim=(0, 31.4))
    box(axes, (1, 12, 13, 8), "Q, tile 1\nstays", TEAL)
    for column in range(4):
        left = 20 + 15 * column
        box(axes, (left, 22, 12, 6), f"K, tile {column}", GREY)
        box(axes, (left, 12, 12, 8), f"S, P\n1 × {column}", BLUE)
        box(axes, (left, 4, 12, 6), f"V, tile {column}", GREY)
        axes.add_patch(FancyArrowPatch((left - (6 if column == 0 else 3), 16), (left, 16), arrowstyle="-|>", color=INK,
                                       mutation_scale=8, shrinkA=0, shrinkB=0))
    axes.add_patch(FancyArrowPatch((77, 16), (82, 16), arrowstyle="-|>", color=INK, mutation_scale=8, shrinkA=0,
                                   shrinkB=0))
    box(axes, (82, 12, 17, 8), "out, lse of tile 1\nwritten once", BROWN)
    axes.text(48.5, 29, "keys and values: streamed, tile by tile", ha="center", va="bottom", size=8)
    axes.text(48.5, 1.8, "m, ℓ and a stay on the chip, and are updated at each tile", ha="center", va="center", size=8)
    return figure


def online_softmax() -> Figure:
    """Draw one row that meets its keys tile by tile: scores, running maximum, and the factor for what came before."""
    figure = Figure(figsize=(WIDTH, 3.0))
    axes = figure.add_axes((0.07, 0.16, 0.91, 0.66))
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    row_max, row_sum = -math.inf, 0.0
    for start in range(0, len(SCORES), KEYS_A_TILE):
        tile = SCORES[start:start + KEYS_A_TILE]
        new_max = max(row_max, *tile)
        factor = math.exp(row_max - new_max)
        row_sum = row_sum * factor + sum(math.exp(score - new_max) for score in tile)
        number = start // KEYS_A_TILE
        axes.bar(range(start, start + len(tile)), tile, color=(BLUE, GREEN, PURPLE)[number], width=0.8)
        axes.plot((start - 0.5, start + len(tile) - 0.5), (new_max, new_max), color=RED, linewidth=2)
        text = f"tile {number}: m′ = {new_max:g}\nfactor {factor:.4g}, ℓ′ = {row_sum:.4f}"
        axes.text(start + len(tile) / 2 - 0.5, 8.1, text, ha="center", va="bottom", size=8)
        if start:
            axes.plot((start - 0.5,) * 2, (0, 8), color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
        row_max = new_max
    axes.text(len(SCORES) - 0.45, row_max + 0.15, "running maximum", ha="right", va="bottom", size=8)
    axes.set(xlim=(-0.5, len(SCORES) - 0.5), ylim=(0, 8), xticks=range(len(SCORES)), yticks=range(0, 9, 2))
    axes.set_xlabel("key", size=8.5)
    axes.set_ylabel("score", size=8.5)
    return figure


def mask_tiles() -> Figure:
    """Draw which tiles three masks skip, compute without a comparison, and compute with one."""
    import tilewise as tw
    from tilewise.masks import Span

    masks = (("causal()", tw.causal()), ("causal() & window(31, 0)", tw.causal() & tw.window(31, 0)),
             ("window(20, 12)", tw.window(20, 12)))
    figure, axes = axes_of(2.75)
    tiles, gap = QUERIES // BLOCK, 2.0
    for at, (title, mask) in enumerate(masks):
        left, band = at * (tiles + gap), mask.band(QUERIES, QUERIES)
        axes.text(left + tiles / 2, 0.5, title, ha="center", va="bottom", weight="bold")
        for row in range(tiles):
            span = Span(row * BLOCK, (row + 1) * BLOCK)
            some, shared = band.keys_of(span, QUERIES), band.shared_keys_of(span, QUERIES)
            for column in range(tiles):
                first, stop = column * BLOCK, (column + 1) * BLOCK
                seen = some.start < stop and first < some.stop
                full = seen and shared.start <= first and stop <= shared.stop
                axes.add_patch(Rectangle((left + column + 0.05, -row - 0.95), 0.9, 0.9, linewidth=0.6,
                                         facecolor=BLUE if full else RED if seen else "none",
                                         edgecolor="none" if seen else INK))
    end = 3 * tiles + 2 * gap
    for place, (colour, text) in enumerate(((BLUE, "computed, no comparison"), (RED, "an edge: compared pair by pair"),
                                            ("none", "skipped: neither read nor computed"))):
        axes.add_patch(Rectangle((place * 13 + 0.3, -tiles - 1.6), 0.9, 0.9, facecolor=colour, linewidth=0.6,
                                 edgecolor=INK if colour == "none" else "none"))
        axes.text(place * 13 + 1.5, -tiles - 1.15, text, ha="left", va="center", size=8)
    axes.set(xlim=(-0.2, end + 0.2), ylim=(-tiles - 1.9, 2.0), aspect="equal")
    return figure


FIGURES = {"forward-dataflow": dataflow, "forward-pipeline": forward_pipeline, "backward-pipeline": backward_pipelines,
           "tile-order": tile_order, "tile-sweep": tile_sweep, "online-softmax": online_softmax,
           "mask-tiles": mask_tiles}


def main(folder: Path = ROOT / "docs/figures") -> None:
    """Write every figure into the folder."""
    with matplotlib.rc_context(SETTINGS):
        for name, draw in FIGURES.items():
            draw().savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/figures")
