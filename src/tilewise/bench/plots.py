"""Figures from rows alone: speed and memory against sequence length, one panel a case."""

import hashlib
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.bench.providers import AUTOMATIC, is_ours
from tilewise.bench.report import counts_in_tflops, describe
from tilewise.bench.rows import Row, latest
from tilewise.bench.standing import closing_sentence, standings
from tilewise.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png", "pdf")
# Okabe and Ito's palette, told apart under every common colour blindness; a marker each for print.
_STYLES = {
    "tilewise": ("#D55E00", "o"), "tilewise:triton": ("#D55E00", "s"), "tilewise:torch": ("#E69F00", "D"),
    "tilewise:deterministic": ("#A02C00", "X"), "tilewise:triton:documents": ("#E69F00", "s"),
    "varlen_attn": ("#0072B2", "v"),
    "tilewise:reference": ("#CC79A7", "^"), "naive": ("#000000", "x"), "sdpa_math": ("#7F7F7F", "+"),
    "sdpa_flash": ("#0072B2", "v"), "sdpa_efficient": ("#56B4E9", "<"), "sdpa_cudnn": ("#009E73", ">"),
    "flex": ("#B8A500", "P"), "flash_attn2": ("#0072B2", "p"), "flash_attn3": ("#332288", "h"),
    "flash_attn4": ("#882255", "*"), "flash_attn3_fwd": ("#332288", "H"), "tilewise:gluon": ("#A02C00", "*"),
    "tilewise:cuda": ("#117733", "d"), "tilewise:cuda_ieee": ("#999933", "d"),
}
_LABELS = {
    "naive": "naive (dense)", "sdpa_math": "torch SDPA math", "sdpa_flash": "torch SDPA flash",
    "sdpa_efficient": "torch SDPA efficient", "sdpa_cudnn": "cuDNN (torch SDPA)", "flex": "FlexAttention",
    "flash_attn2": "FlashAttention-2", "flash_attn3": "FlashAttention-3", "flash_attn4": "FlashAttention-4",
    "tilewise:triton:documents": "tilewise documents", "varlen_attn": "torch varlen_attn",
    "flash_attn3_fwd": "FlashAttention-3 (fwd)", "tilewise:gluon": "tilewise gluon",
    "tilewise:deterministic": "tilewise deterministic", "tilewise:cudnn": "cuDNN (backend cudnn)",
    "sdpa_cudnn_folded": "cuDNN (heads folded)", "sdpa_flash_folded": "torch SDPA flash (heads folded)",
    "tilewise:triton": "tilewise triton", "tilewise:torch": "tilewise torch",
    "tilewise:reference": "tilewise reference", "tilewise:cuda": "tilewise cuda",
    "tilewise:cuda_ieee": "tilewise cuda, IEEE",
}
_COLUMNS = 3
_PANEL = (4.6, 3.0)  # inches
_LABEL_GAP = 0.068  # of a panel's height, between the baselines of two labels
_SETTINGS: Any = {"svg.hashsalt": "tilewise", "svg.fonttype": "path", "font.size": 9, "axes.spines.top": False,
             "axes.spines.right": False, "axes.titlesize": 10, "axes.titlelocation": "left"}

_Measure = Callable[[Row], tuple[float, float, float] | None]


def draw_figures(rows: Sequence[Row], folder: Path, stem: str, file_format: str = "svg") -> list[Path]:
    """Draw ``STEM-speed`` and ``STEM-memory``; return the files written.

    Equal rows give equal bytes, and an SVG names the rows it was drawn from (:func:`origin_of`): whether a figure is in
    step with them can be told without drawing it again.

    Raises:
        InvalidInput: no row holds a time, or the format is unknown.
    """
    if file_format not in FORMATS:
        raise InvalidInput(f"format is {file_format!r}; allowed are {', '.join(FORMATS)}.")
    timed = [row for row in latest(rows) if row.ms_p50 is not None and row.tflops is not None]
    if not timed:
        raise InvalidInput("no row holds a time, so there is nothing to draw.")
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    unit, factor = ("TFLOP/s", 1.0) if counts_in_tflops(timed) else ("GFLOP/s", 1e3)
    training = [row for row in timed if row.direction == "backward"] or timed
    what = "forward + backward" if training[0].direction == "backward" else "forward"
    plots = {
        "speed": (f"Attention speed, {unit} (higher is better)", timed, _speed(factor), False),
        "memory": (f"Peak memory above the inputs in {what}, MiB (lower is better)",
                   [row for row in training if row.peak_mib], _memory, True),
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with mpl.rc_context(_SETTINGS):
        for kind, (title, chosen, measure, logarithmic) in plots.items():
            if not chosen:
                continue
            figure = _figure(chosen, title, measure, logarithmic=logarithmic)
            FigureCanvasAgg(figure)
            path = folder / f"{stem}-{kind}.{file_format}"
            # A date in the file would make equal rows give unequal bytes.
            facts = {"Date": None, "Description": origin_of(rows)} if file_format == "svg" else None
            figure.savefig(path, metadata=facts, dpi=150)
            files.append(path)
    return files


def draw_standing(rows: Sequence[Row], path: Path) -> bool:
    """Draw how many times ours is as fast as the fastest other implementation, a line a case; False if none is timed.

    The sentence that says the same is the title.
    """
    found = standings(rows)
    if not found:
        return False
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(describe(one.ours) for one in found))[::-1]
    passes = list(dict.fromkeys(one.ours.direction for one in found))
    low, high = (limit([one.ratio for one in found]) for limit in (min, max))
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(3.0 + 3.5 * len(passes), 1.6 + 0.2 * len(cases)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]
        for axis, direction in zip(axes, passes, strict=True):
            own = [one for one in found if one.ours.direction == direction]
            ratios, heights = [one.ratio for one in own], [cases.index(describe(one.ours)) for one in own]
            axis.scatter(ratios, heights, color=_STYLES[AUTOMATIC][0], s=22, zorder=3)
            for one, height in zip(own, heights, strict=True):
                axis.annotate(label(one.peer.provider), (one.ratio, height), xytext=(6, 0),
                              textcoords="offset points", fontsize=6.5, va="center")
            axis.axvline(1.0, color="#444444", linewidth=1.0)
            axis.grid(axis="x", color="#E5E5E5", linewidth=0.7)
            axis.set_axisbelow(True)
            axis.set_xlim(min(0.9, 0.95 * low), max(1.0, high) + 0.4 * (max(1.0, high) - min(0.9, 0.95 * low)))
            axis.set_title(direction.replace("_", " "))
            axis.set_xlabel("times as fast as the one named")
        axes[0].set_yticks(range(len(cases)), cases)
        axes[0].set_ylim(-0.6, len(cases) - 0.4)
        title = textwrap.fill(closing_sentence(rows), 30 + 38 * len(passes))
        figure.suptitle(title, fontsize=9, x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Description": origin_of(rows)})
    return True


def label(provider: str) -> str:
    """Return a provider's name in a reader's words."""
    return _LABELS.get(provider, provider)


def origin_of(rows: Sequence[Row]) -> str:
    """Name the newest rows of a figure by their digest."""
    return f"rows {hashlib.sha256(repr(latest(rows)).encode()).hexdigest()}"


def _figure(rows: Sequence[Row], title: str, measure: _Measure, *, logarithmic: bool) -> "Figure":
    from matplotlib.figure import Figure

    panels = _panels(rows)
    # Where it fits, each pass gets lines of its own.
    columns = min(_COLUMNS, sum(members[0].direction == rows[0].direction for members in panels.values()))
    lines = math.ceil(len(panels) / columns)
    width, height = columns * _PANEL[0], lines * _PANEL[1] + 0.75
    figure = Figure(figsize=(width, height))
    left, right, top, bottom = 0.6 / width, 1 - 1.45 / width, 1 - 0.85 / height, 0.75 / height
    axes = figure.subplots(lines, columns, squeeze=False,
                           gridspec_kw={"left": left, "right": right, "top": top, "bottom": bottom,
                                        "wspace": 0.72, "hspace": 0.5}).ravel()
    for axis, (name, members) in zip(axes, panels.items(), strict=False):
        axis.set_title(name.partition(", ")[2] if logarithmic else name)  # the figure's title names the pass then
        _panel(axis, members, measure, logarithmic=logarithmic)
    for axis in axes[len(panels):]:
        axis.set_visible(False)
    for axis in axes[max(0, len(panels) - columns): len(panels)]:
        axis.set_xlabel("sequence length")
    figure.text(left, 1 - 0.28 / height, title, fontsize=13, fontweight="bold", ha="left", va="center")
    figure.text(left, 0.18 / height, _footnote(rows), fontsize=7.5, color="#555555", ha="left", va="center")
    return figure


def _panel(axis: "Axes", rows: Sequence[Row], measure: _Measure, *, logarithmic: bool) -> None:
    lengths = sorted({row.sq for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log" if logarithmic else "linear")
    axis.set_xticks(lengths, [_length(length) for length in lengths])
    axis.minorticks_off()
    if logarithmic:
        axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(axis="y", color="#E5E5E5", linewidth=0.7)
    axis.set_axisbelow(True)
    ends: dict[str, tuple[float, float]] = {}
    lead = _lead(rows)
    for provider in dict.fromkeys(row.provider for row in rows):
        points = sorted((row.sq, values) for row in rows if row.provider == provider and (values := measure(row)))
        if not points:
            continue
        color, marker = _STYLES.get(provider, ("#444444", "."))
        x = [length for length, _ in points]
        low, middle, high = zip(*(values for _, values in points), strict=True)
        ours = provider == lead
        axis.plot(x, middle, color=color, marker=marker, markersize=4.5, linewidth=2.4 if ours else 1.3,
                  zorder=4 if ours else 3 if is_ours(provider) else 2)
        axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        ends[provider] = (float(x[-1]), float(middle[-1]))
    if not logarithmic:
        axis.set_ylim(bottom=0)
    axis.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
    _label_lines(axis, ends, lead)


def _label_lines(axis: "Axes", ends: dict[str, tuple[float, float]], lead: str | None) -> None:
    """Write each name beside its line's end, pushed apart where two would overlap."""
    to_axes = axis.transData + axis.transAxes.inverted()
    heights = {name: float(to_axes.transform(end)[1]) for name, end in ends.items()}
    for name, height in _spread(heights, _LABEL_GAP).items():
        color = _STYLES.get(name, ("#444444", "."))[0]
        axis.annotate(label(name), xy=ends[name], xycoords="data", xytext=(1.03, height),
                      textcoords="axes fraction", color=color, fontsize=7.5, va="center", annotation_clip=False,
                      fontweight="bold" if name == lead else "normal",
                      arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0,
                                  "shrinkB": 2, "relpos": (0, 0.5)})


def _lead(rows: Sequence[Row]) -> str | None:
    """Return the provider that the figure is about: the automatic choice, else our first backend."""
    own = [row.provider for row in rows if is_ours(row.provider)]
    return AUTOMATIC if AUTOMATIC in own else next(iter(own), None)


def _spread(heights: dict[str, float], gap: float) -> dict[str, float]:
    """Move values apart to at least ``gap``, in their order, each crowd about its own middle."""
    crowds: list[list[str]] = []
    for name in sorted(heights, key=lambda name: heights[name]):
        crowds.append([name])
        while len(crowds) > 1 and _top(crowds[-2], heights, gap) + gap > _bottom(crowds[-1], heights, gap):
            crowds[-2:] = [crowds[-2] + crowds[-1]]
    return {name: _bottom(crowd, heights, gap) + place * gap for crowd in crowds for place, name in enumerate(crowd)}


def _bottom(crowd: list[str], heights: dict[str, float], gap: float) -> float:
    middle = sum(heights[name] for name in crowd) / len(crowd)
    return middle - (len(crowd) - 1) * gap / 2


def _top(crowd: list[str], heights: dict[str, float], gap: float) -> float:
    return _bottom(crowd, heights, gap) + (len(crowd) - 1) * gap


def _panels(rows: Iterable[Row]) -> dict[str, list[Row]]:
    panels: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.direction != "forward", row.mask != "none")):
        heads = "" if row.hq == row.hk else f", heads {row.hq}/{row.hk}"
        dims = f"{row.d}" if row.d == row.dv else f"{row.d}/{row.dv}"
        mask = "full" if row.mask == "none" else row.mask
        options = f", {row.options}" if row.options else ""
        panels.setdefault(f"{row.direction}, {mask}, {row.dtype}, d {dims}{heads}{options}", []).append(row)
    return panels


def _speed(factor: float) -> _Measure:
    def measure(row: Row) -> tuple[float, float, float] | None:
        if row.tflops is None or row.ms_p50 is None or row.ms_p20 is None or row.ms_p80 is None:
            return None
        work = row.tflops * row.ms_p50 * factor
        return work / row.ms_p80, work / row.ms_p50, work / row.ms_p20

    return measure


def _memory(row: Row) -> tuple[float, float, float] | None:
    return (row.peak_mib, row.peak_mib, row.peak_mib) if row.peak_mib else None


def _length(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _footnote(rows: Sequence[Row]) -> str:
    newest: Any = max(rows, key=lambda row: row.date)
    shown = [newest.device_name, f"torch {newest.torch}", f"tilewise {newest.tilewise}",
             f"regime {', '.join(dict.fromkeys(row.regime for row in rows))}", "medians; bands: 20 to 80 %",
             newest.date.partition("T")[0]]
    return "  ·  ".join(text for text in shown if text)
