"""Pictures of masks: which tiles are computed whole, which need the mask pair by pair, and which are skipped."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tilewise.validate.values import check_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A state's number, its name, and its colour: of Okabe and Ito's palette, told apart on light and on dark grounds.
STATES = (("skipped", "#7F7F7F40"), ("partial", "#E69F00"), ("full", "#3B8BC4"))
_PAIRS_SHOWN = 512  # queries and keys up to which each visible pair is marked
_LINES_SHOWN = 64  # tiles of a side up to which they are parted by a line
_SIDE = 4.5  # inches


def plot_mask(title: str, visible_rows: Callable[[int, int], torch.Tensor], lengths: tuple[int, int],
              block: tuple[int, int], ax: "Axes | None") -> "Axes":
    """Draw a mask's tiles, and its visible pairs where they are few.

    Args:
        title: of the picture.
        visible_rows: of two numbers, the first query and one past the last: (queries, keys), bool.
        lengths, block: of queries and keys.
        ax: where to draw; None = on a new figure of pyplot's.

    Raises:
        InvalidInput: a length or a side of the block is no positive integer.
        ImportError: matplotlib is not installed.
    """
    check_plot(lengths, block)
    try:
        from matplotlib import colors, patches, pyplot
    except ImportError as error:
        raise ImportError("a mask is drawn by matplotlib, which is not installed; pip install matplotlib brings it. "
                          "show() draws with characters and needs nothing.") from error
    states = tile_states(visible_rows, lengths, block)
    if ax is None:
        _, ax = pyplot.subplots(figsize=(_SIDE + 2.0, _SIDE), layout="compressed")
    edges = [sorted({*range(0, length, side), length}) for length, side in zip(lengths, block, strict=True)]
    is_coarse = max(states.shape) <= _LINES_SHOWN
    lines: dict[str, Any] = {"edgecolors": "#7F7F7F", "linewidth": 0.4} if is_coarse else {}
    shades = colors.ListedColormap([color for _, color in STATES])
    ax.pcolormesh(edges[1], edges[0], states.numpy(), cmap=shades, vmin=-0.5, vmax=len(STATES) - 0.5, **lines)
    if max(lengths) <= _PAIRS_SHOWN:
        ink: Any = colors.ListedColormap(["#00000000", "#00000059"])
        visible = visible_rows(0, lengths[0]).cpu().numpy()
        ax.imshow(visible, cmap=ink, vmin=0, vmax=1, interpolation="nearest", zorder=2,
                  extent=(0, lengths[1], lengths[0], 0))
    ax.set(title=title, xlabel="key", ylabel="query", xlim=(0, lengths[1]), ylim=(lengths[0], 0), aspect="equal")
    counts = [int((states == number).sum()) for number in range(len(STATES))]
    ax.legend(handles=[patches.Patch(facecolor=color, edgecolor="#7F7F7F", linewidth=0.4, label=f"{name}: {count}")
                       for (name, color), count in list(zip(STATES, counts, strict=True))[::-1]],
              title=f"{states.numel()} tiles of {block[0]} x {block[1]}", frameon=False, loc="upper left",
              bbox_to_anchor=(1.0, 1.0))
    return ax


def tile_states(visible_rows: Callable[[int, int], torch.Tensor], lengths: tuple[int, int],
                block: tuple[int, int]) -> torch.Tensor:
    """Return the number in ``STATES`` of each tile, (tiles of queries, tiles of keys), on the CPU.

    A tile that reaches past the last query or key counts by the pairs that there are. O(block x keys) memory.
    """
    rows = []
    for first in range(0, lengths[0], block[0]):
        visible = visible_rows(first, min(first + block[0], lengths[0])).cpu()
        rows.append([0 if not tile.any() else 2 if tile.all() else 1 for tile in torch.split(visible, block[1], 1)])
    return torch.tensor(rows)
