"""What a campaign's pictures share: size, header, legends, axes, and how bars and curves look. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from ..printable import one_line
from .records import Row
from .values import Side, counted

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 8.0  # inches, as all that follow
_MARGIN, _TITLE, _SUBTITLE, _LEGEND = 0.12, 0.29, 0.18, 0.22

INK, GREY, PALE = "#20262d", "#59636e", "#dfe3e8"
BOUND: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.3}
"""How a bound's line looks."""

STYLE: dict[Any, Any] = {
    "text.usetex": False,  # whatever the user's matplotlibrc says
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": PALE,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "swarmkv",
}
"""matplotlib's settings, for a picture of ours and none but it."""

Legend = list[tuple[str, "list[Artist]"]]
"""What a legend explains, line by line, each after a word of what it is about, if any."""


def blank(height: float) -> Figure:
    """A picture without anything."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(made)  # one that can measure text
    return made


def add_header(made: Figure, title: str, subtitles: Sequence[str], legend: Legend) -> None:
    """Title, lines that say what was measured, and legend, above the axes."""
    height = made.get_figheight()
    left, top = _MARGIN / WIDTH, _MARGIN
    made.text(left, 1 - top / height, title, va="top", fontsize=13, weight="bold")
    top += _TITLE
    for line in subtitles:
        text = made.text(left, 1 - top / height, line, va="top", fontsize=8, color=GREY, parse_math=False)
        wide = text.get_window_extent().width / made.dpi
        text.set_fontsize(8 * min(1.0, (WIDTH - 2 * _MARGIN) / wide))
        top += _SUBTITLE
    top += 0.05
    for about, handles in legend:
        top += _add_legend(made, about, handles, top)
    engine: Any = made.get_layout_engine()
    rect = (0, 0, 1, 1 - (top + 0.08) / height)
    engine.set(rect=rect, w_pad=0.09, h_pad=0.09, wspace=0.03, hspace=0.03)


def _add_legend(made: Figure, about: str, handles: list[Artist], top: float) -> float:
    """In as few lines as fit. Returns the inches it takes."""
    left, height = _MARGIN, made.get_figheight()
    if about:
        text = made.text(left / WIDTH, 1 - top / height, about, va="top", fontsize=8.5)
        left += text.get_window_extent().width / made.dpi + 0.15
    for columns in range(len(handles), 0, -1):
        legend = made.legend(
            handles=handles,
            ncols=columns,
            loc="upper left",
            bbox_to_anchor=(left / WIDTH, 1 - top / height),
            borderpad=0,
            borderaxespad=0,
            frameon=False,
            handlelength=1.6,
            columnspacing=1.4,
            fontsize=8.5,
        )
        if columns == 1 or left + legend.get_window_extent().width / made.dpi <= WIDTH - _MARGIN:
            return _LEGEND * math.ceil(len(handles) / columns)
        legend.remove()
    return 0.0


def where(summary: Mapping[str, Any]) -> str:
    """Model and machine, short enough for a line."""
    machine, settings, model = (summary.get(key) or {} for key in ("machine", "settings", "model"))
    name = one_line(model.get("name") or "a model without a name", 44)
    cpu = one_line(machine.get("cpu") or "an unknown processor", 40)
    n_threads = settings.get("n_threads")
    return f"{name} on {cpu}" + (f", {counted(n_threads, 'thread')}" if isinstance(n_threads, int) else "")


def measured(rows: Sequence[Row], *more: str, dots: bool = True) -> str:
    """What rows are of: tokens, trials."""
    documents = sorted({row.n_document for row in rows if row.n_document})
    n_trials = {n: len({row.trial for row in rows if row.n_document == n}) for n in documents}
    n = max(n_trials.values(), default=1)
    if len(documents) > 1:
        said = f"Documents of {documents[0]:,} to {documents[-1]:,} tokens"
    else:
        said = f"A document of {documents[0]:,} tokens" if documents else "A document"
    trials = "one trial" if n == 1 else f"median of {n} trials" + ", each of them a dot" * dots
    if len(set(n_trials.values())) > 1:
        trials += f", at {', '.join(f'{d:,}' for d in documents if n_trials[d] == n)}; one trial elsewhere"
    return "; ".join([said, trials, *more])


# ── legends ──────────────────────────────────────────────────────────────────────────────────────────


def trial_handle() -> Artist:
    """A legend's dot."""
    from matplotlib.lines import Line2D

    return Line2D(
        [], [], linestyle="none", marker="o", markersize=4, color=INK, markeredgecolor="white", label="a trial"
    )


def median_handle() -> Artist:
    """A legend's large dot."""
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none", marker="o", markersize=8, color="#9aa3ad", label="median")


def bound_handle(label: str) -> Artist:
    """A legend's dashed line."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **BOUND)


# ── axes ─────────────────────────────────────────────────────────────────────────────────────────────


def plain_axes(ax: Axes, grid: str) -> None:
    """Nothing but a grid."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, color=PALE, linewidth=0.7)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    ax.tick_params(which="both", length=0)


def name_rows(ax: Axes, names: Sequence[str]) -> None:
    """Rows from top to bottom."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.spines["left"].set_visible(False)


def say(ax: Axes, x: float, y: float, text: str, apart: float = 6) -> None:
    """A row's figures, `apart` points to the right of `x`."""
    clear = {"facecolor": "white", "linewidth": 0, "pad": 1.2}
    at, shift = (x, y), (apart, 0)
    ax.annotate(text, at, shift, textcoords="offset points", va="center", fontsize=8.5, bbox=clear, zorder=2.5)


def beyond(text: str, wide: float) -> float:
    """The share of axes of `wide` inches that `say` needs to the right of its point."""
    return (0.2 + 0.075 * len(text)) / wide


def dots(ax: Axes, values: Sequence[float], y: float, spread: float = 0.18) -> None:
    """A row's trials, the first one highest; nothing where there is only one."""
    n = len(values)
    if n > 1:
        ys = [y + (2 * i / (n - 1) - 1) * spread for i in range(n)]
        ax.plot(values, ys, "o", markersize=4, color=INK, markeredgecolor="white", markeredgewidth=0.6, zorder=4)


def log_axis(ax: Axes, axis: str, values: Iterable[float], high: float = 0.0) -> None:
    """A logarithmic axis around values, and up to `high`, with numbers to read: 1, 10, 100; in between too if short."""
    from matplotlib.ticker import FixedLocator, NullLocator

    found = [value for value in values if value > 0] or [1.0]
    low, high = min(found) / 1.4, max(high, max(found) * 1.4)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for between in ((1,), (1, 3), (1, 2, 5), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)):
        ticks = [k * 10.0**d for d in decades for k in between if low <= k * 10.0**d <= high]
        if len(ticks) >= 3:
            break
    ticks = ticks[:: math.ceil(len(ticks) / 7)]
    (ax.set_xscale if axis == "x" else ax.set_yscale)("log")
    (ax.set_xlim if axis == "x" else ax.set_ylim)(low, high)
    which = ax.xaxis if axis == "x" else ax.yaxis
    which.set_major_locator(FixedLocator(ticks))
    which.set_minor_locator(NullLocator())
    which.set_major_formatter(lambda value, _: f"{value:,.10g}")


def doubling_axis(ax: Axes, counts: Sequence[int], label: str) -> None:
    """Numbers that grow by about a factor from one to the next, as they are."""
    from matplotlib.ticker import FixedLocator, NullLocator

    ax.set_xscale("log", base=2)
    ax.set_xlim(min(counts) / 1.25, max(counts) * 1.25)
    room = (max(counts) / min(counts)) ** (1 / 9)  # for a label, as a factor
    shown: list[int] = []
    for n in sorted(counts, reverse=True):
        if not shown or shown[-1] >= n * room:
            shown.append(n)
    ax.xaxis.set_major_locator(FixedLocator(shown))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set_xlabel(label)


_MARKERS = {
    "re-prefill": "s",
    "snapshot, fresh context": "v",
    "snapshot, fork + restore": "^",
    "snapshot, still held": "D",
    "snapshot": "^",
    "shared cells": "o",
    "prefill": "s",
    "export": ">",
    "fork": "<",
}


Points = Mapping[int, Sequence[float]]
"""Values of all trials, by a number of tokens or branches."""


def curve(ax: Axes, points: Points, side: Side, label: str = "", scale: float = 1.0) -> Artist:
    """Medians as a line in a side's colour, and its trials as pale dots."""
    xs = sorted(points)
    marker = _MARKERS.get(side.name, "P")
    ys = [scale * median(points[x]) for x in xs]
    label = label or side.name
    (line,) = ax.plot(xs, ys, color=side.colour, marker=marker, markersize=5, linewidth=1.6, label=label)
    several = [(x, scale * value) for x in xs for value in points[x] if len(points[x]) > 1]
    if several:
        ax.plot(*zip(*several, strict=True), "o", color=side.colour, markersize=3, alpha=0.45, linewidth=0)
    return line


def bound_curve(ax: Axes, points: Points, scale: float = 1.0) -> None:
    """A bound that differs from one number to the next."""
    xs = sorted(points)
    ax.plot(xs, [scale * median(points[x]) for x in xs], zorder=3, **BOUND)


def series(rows: Sequence[Row], column: str) -> dict[int, list[float]]:
    """Values of all trials, by the number in a column; without those of no size."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if (at := getattr(row, column)) and row.value > 0:
            found.setdefault(at, []).append(row.value)
    return found
