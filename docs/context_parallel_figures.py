"""Draw the figures of docs/context-parallel.md; usage: ``python docs/context_parallel_figures.py``.

Who computes and sends what is asked of the package's plans. Nothing in them is measured: widths are not times.
"""

import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

sys.path.insert(0, str(Path(__file__).resolve().parent))
from figures import BLUE, BROWN, GREEN, GREY, INK, RED, SETTINGS, TEAL, WIDTH

from tilewise import causal
from tilewise.distributed.layouts import named_layout
from tilewise.distributed.plan import Problem, all_gather_plan, ring_plan
from tilewise.masks import Mask

FOLDER = Path(__file__).resolve().parent / "figures/context-parallel"
RANKS, TOKENS = 4, 32
COLOURS = (BLUE, RED, GREEN, BROWN)


def bare(axes: Axes, title: str, limits: tuple[float, float, float, float]) -> None:
    """Take off the frame, and set the title and the limits: left, right, bottom, top."""
    axes.set_title(title, size=9, color=INK)
    axes.set(xlim=limits[:2], ylim=limits[2:], xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def problem_of(layout: str, mask: Mask) -> Problem:
    """Return a problem of so many tokens on so many ranks."""
    own = named_layout(layout, TOKENS, RANKS)
    return Problem(own, own, mask, merges=False, kv_heads=2)


def pairs(axes: Axes, layout: str, mask: Mask) -> None:
    """Colour each visible pair by the rank that computes it."""
    problem = problem_of(layout, mask)
    visible = mask.visible(TOKENS, TOKENS)
    counts = []
    for rank, colour in enumerate(COLOURS):
        rows = [row for piece in problem.queries.pieces[rank] for row in range(piece.start, piece.stop)]
        for row in rows:
            keys = visible[row].nonzero().flatten().tolist()
            for key in keys:
                axes.add_patch(Rectangle((key, TOKENS - 1 - row), 1, 1, facecolor=colour, edgecolor="none"))
        counts.append(int(visible[rows].sum()))
    bare(axes, f"{layout}: the largest share is {max(counts) * RANKS / sum(counts):.2f} of an even one",
         (0, TOKENS, 0, TOKENS))
    axes.set(xlabel="key", ylabel="query", aspect="equal")


def layouts() -> Figure:
    """Draw which rank computes which pairs of a causal mask."""
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    for axes, layout in zip(figure.subplots(1, 2), ("contiguous", "zigzag"), strict=True):
        pairs(axes, layout, causal("top_left"))
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour) for colour in COLOURS]
    figure.legend(handles, [f"rank {rank}" for rank in range(RANKS)], loc="outside lower center", ncols=RANKS,
                  frameon=False)
    return figure


def stage(axes: Axes, at: tuple[float, float], width: float, text: str, colour: str) -> None:
    """Draw a stage of a lane."""
    left, lane = at
    axes.add_patch(Rectangle((left + 0.02, -lane - 0.4), width - 0.04, 0.8, facecolor=colour, edgecolor="none"))
    axes.text(left + width / 2, -lane, text, color="white", ha="center", va="center", size=7.5)


def ring() -> Figure:
    """Draw the steps of each rank: what it computes, and the keys that travel meanwhile."""
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    problem = problem_of("zigzag", causal("top_left"))
    for rank in range(RANKS):
        axes.text(-0.1, -2 * rank, f"rank {rank}: kernels", ha="right", va="center", size=7.5)
        axes.text(-0.1, -2 * rank - 0.85, "messages", ha="right", va="center", size=7.5)
        steps = ring_plan(problem, rank)
        for number in range(RANKS):
            source = (rank - number) % RANKS
            stage(axes, (number, 2 * rank), 1, f"keys of rank {source}", COLOURS[source])
            if number + 1 < len(steps):
                coming = steps[number + 1].received(rank)
                (sender,) = coming
                stage(axes, (number, 2 * rank + 0.85), 0.7,
                      f"{sum(len(part.rows) for part in coming[sender])} of rank {sender}", GREY)
    bare(axes, "ring: in step t a rank attends to the keys of the rank t places before it", (-1.2, RANKS, -7.4, 0.6))
    return figure


def all_gather() -> Figure:
    """Draw the groups of heads of one rank."""
    figure = Figure(figsize=(WIDTH, 1.7), layout="constrained")
    axes = figure.subplots()
    steps = all_gather_plan(problem_of("zigzag", causal("top_left")), 1, lambda _: 2).steps
    axes.text(-0.1, 0, "kernels", ha="right", va="center", size=7.5)
    axes.text(-0.1, -1, "messages", ha="right", va="center", size=7.5)
    for number, step in enumerate(steps):
        keys = sum(len(part.rows) for parts in step.received(1).values() for part in parts)
        stage(axes, (number, 1), 0.9, f"head {step.heads.start}: {keys} keys of {len(step.received(1))} ranks", GREY)
        for place, block in enumerate(step.blocks):
            text = f"{len(block.queries)} queries,\n{len(block.keys)} keys"
            width = 1 / len(step.blocks)
            stage(axes, (number + 1 + place * width, 0), width, text, (BLUE, TEAL)[number])
        axes.text(number + 1.5, 0.5, f"head {step.heads.start}", ha="center", size=7.5)
    bare(axes, "all_gather on rank 1: the keys of the next heads travel while these are computed", (-0.8, 3, -1.6, 0.9))
    return figure


def ulysses() -> Figure:
    """Draw who holds which heads of which tokens, before and after the exchange."""
    figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    for row in range(RANKS):
        for column in range(RANKS):
            for left, holder in ((0, column), (6, row)):
                axes.add_patch(Rectangle((left + column, -row), 0.94, 0.94, facecolor=COLOURS[holder],
                                         edgecolor="none"))
                axes.text(left + column + 0.47, 0.47 - row, f"rank {holder}", color="white", ha="center", va="center",
                          size=7)
    axes.add_patch(FancyArrowPatch((4.2, -0.9), (5.5, -0.9), arrowstyle="-|>", mutation_scale=12, color=INK))
    axes.add_patch(FancyArrowPatch((5.5, -1.5), (4.2, -1.5), arrowstyle="-|>", mutation_scale=12, color=INK))
    axes.text(4.85, -0.75, "q, k, v", ha="center", size=8)
    axes.text(4.85, -2.0, "out, lse", ha="center", size=8)
    for left in (0, 6):
        axes.text(left + 2, 1.15, "tokens", ha="center", size=8)
        axes.text(left - 0.15, -1, "heads", ha="right", va="center", rotation=90, size=8)
    bare(axes, "ulysses: a part of the tokens with all heads, for all tokens with some heads", (-0.6, 10, -3.1, 1.6))
    return figure


FIGURES = {"layouts": layouts, "ring": ring, "all-gather": all_gather, "ulysses": ulysses}


def draw(folder: Path) -> None:
    """Write every figure into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        for name, made in FIGURES.items():
            made().savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
