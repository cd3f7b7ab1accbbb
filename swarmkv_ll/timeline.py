"""What each node of a run did, and when: as a picture, and as a trace for Perfetto and chrome://tracing. Needs no engine."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import groupby
from typing import TYPE_CHECKING, Any

from .cache import atomic_file, write_all
from .errors import InvalidArgumentError
from .printable import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

KINDS = ("wait", "prefill", "prompt", "decode", "export", "fork", "restore", "run")
"""What a node can do: wait, compute the document, its own prompt or its answer, move states, or run plain Python."""

ENDINGS = (".png", ".svg", ".pdf")
"""Pictures that can be written."""


@dataclass(frozen=True)
class Span:
    """What a node did for a while.

    Attributes
    ----------
    lane : str
        The node's name.
    kind : str
        One of `KINDS`.
    begin, end : float
        Seconds since the run began.
    n_tokens : int
        Tokens computed or moved.
    """

    lane: str
    kind: str
    begin: float
    end: float
    n_tokens: int = 0


@dataclass(frozen=True)
class Mark:
    """Something that happened to a node at a moment, `at` seconds since the run began: a watermark, a failure."""

    lane: str
    at: float
    text: str


@dataclass(frozen=True)
class Step:
    """One batch that the engine computed: `n_tokens` tokens of `n_parts` sequences."""

    begin: float
    end: float
    n_tokens: int
    n_parts: int


@dataclass(frozen=True)
class Timeline:
    """What happened in a run.

    Attributes
    ----------
    lanes : tuple of str
        Names of the nodes, from top to bottom.
    spans : tuple of Span
    marks : tuple of Mark
    steps : tuple of Step
        All in any order.

    Raises
    ------
    InvalidArgumentError
        Two lanes of one name; a span or mark in a lane that is not there, of a kind that is not known, that ends before
        it begins, or at a time that is not a finite number.
    """

    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...] = ()
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        twice = [lane for lane, n in Counter(self.lanes).items() if n > 1]
        if twice:
            raise InvalidArgumentError(f"two lanes are named {twice[0]!r}")
        lanes = set(self.lanes)
        placed: tuple[Span | Mark, ...] = (*self.spans, *self.marks)
        for item in placed:
            if item.lane not in lanes:
                raise InvalidArgumentError(f"there is no lane {item.lane!r}: {item}")
        for span in self.spans:
            if span.kind not in KINDS:
                raise InvalidArgumentError(f"kind should be one of {', '.join(KINDS)}: {span}")
        lasting: tuple[Span | Step, ...] = (*self.spans, *self.steps)
        for timed in lasting:
            if not -math.inf < timed.begin <= timed.end < math.inf:  # nan too is neither
                raise InvalidArgumentError(f"begin and end should be finite, and in this order: {timed}")
        for mark in self.marks:
            if not math.isfinite(mark.at):
                raise InvalidArgumentError(f"the time should be finite: {mark}")

    def chrome_trace(self) -> dict[str, Any]:
        """The run in Chrome's trace event format: plain data for JSON.

        Each lane is a thread, in order, and the batches are another, with a counter of their tokens. Times are whole
        microseconds. The format wants the spans of a thread to nest; those of a lane that overlap only in part go to
        further threads, named "lane (2)" and so on.
        """
        threads: list[dict[str, Any]] = []
        events: list[dict[str, Any]] = []

        def add(name: str, rows: list[list[dict[str, Any]]], instants: Iterable[dict[str, Any]] = ()) -> None:
            for i, row in enumerate(rows or [[]]):  # a lane in which nothing happened is shown too
                where = {"pid": _PID, "tid": _PID + 1 + len(threads) // 2}
                title = f"{name} ({i + 1})" if i else name
                threads.append({"ph": "M", "name": "thread_name", **where, "args": {"name": title}})
                index = {"sort_index": len(threads) // 2}
                threads.append({"ph": "M", "name": "thread_sort_index", **where, "args": index})
                events.extend({**event, **where} for event in (*row, *(() if i else instants)))

        spans: dict[str, list[dict[str, Any]]] = {lane: [] for lane in self.lanes}
        marks: dict[str, list[dict[str, Any]]] = {lane: [] for lane in self.lanes}
        for span in self.spans:
            spans[span.lane].append(_complete(span.kind, span.kind, span, {"n_tokens": span.n_tokens}))
        for mark in sorted(self.marks, key=lambda mark: mark.at):
            marks[mark.lane].append({"ph": "i", "name": mark.text, "cat": "mark", "s": "t", "ts": _us(mark.at)})
        for lane in self.lanes:
            add(lane, _nested(spans[lane]), marks[lane])
        if self.steps:
            rows = _nested(
                _complete("batch", "batch", step, {"n_tokens": step.n_tokens, "n_parts": step.n_parts})
                for step in self.steps
            )
            add("batches", rows)
            events.extend(_counts(self.steps))
        process = {"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": "swarmkv"}}
        return {"traceEvents": [process, *threads, *events], "displayTimeUnit": "ms"}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `chrome_trace()` as JSON, whole or not at all. Open it in https://ui.perfetto.dev or chrome://tracing.

        Raises
        ------
        OSError
        """
        _write(path, json.dumps(self.chrome_trace(), separators=(",", ":"), allow_nan=False).encode())

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the run, a row for each lane, and write a PNG, SVG or PDF, by the path's ending; whole or not at all.

        Neighbouring spans of one kind that are less than a pixel or two apart are drawn as one, and none thinner than a
        pixel. Texts of marks are left out where there is no room for them.

        Raises
        ------
        ImportError
            `matplotlib` is not installed.
        InvalidArgumentError
            Another kind of picture.
        OSError
        """
        kind = check_picture(path)
        from matplotlib import rc_context

        dateless = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        with rc_context({"svg.hashsalt": "swarmkv"}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # of a name in a script that the font has not
            drawn, image = figure(self), BytesIO()
            drawn.savefig(image, format=kind[1:], dpi=_DPI, metadata=dateless.get(kind))
        _write(path, image.getvalue())


def check_picture(path: str | os.PathLike[str]) -> str:
    """The ending of a picture's path, if such can be drawn; before there is anything to draw.

    Raises
    ------
    ImportError
        `matplotlib` is not installed.
    InvalidArgumentError
        Another kind of picture.
    """
    kind = os.path.splitext(os.fspath(path))[1].lower()
    if kind not in ENDINGS:
        raise InvalidArgumentError(f"a picture should end in {', '.join(ENDINGS)}: {os.fspath(path)}")
    import matplotlib  # noqa: F401 - whether it is there

    return kind


def merge(spans: Iterable[Span], gap: float) -> list[Span]:
    """Spans of one lane and kind that are at most `gap` seconds apart, or overlap, made one; their tokens add up.

    What another kind does between them does not part them. Ordered by lane, kind and begin.
    """
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.lane, KINDS.index(span.kind), span.begin)):
        last = merged[-1] if merged else span
        if merged and (last.lane, last.kind) == (span.lane, span.kind) and span.begin - last.end <= gap:
            merged[-1] = replace(last, end=max(last.end, span.end), n_tokens=last.n_tokens + span.n_tokens)
        else:
            merged.append(span)
    return merged


def _write(path: str | os.PathLike[str], data: bytes) -> None:
    """Whole or not at all."""
    with atomic_file(path, len(data)) as file:
        write_all(file, data)


# ── as a trace ───────────────────────────────────────────────────────────────────────────────────────

_PID = 1
"""Threads count from the next number: one with the number of its process would be taken for the main thread."""


def _us(seconds: float) -> int:
    """Whole microseconds: with fractions, viewers that round begin and length on their own see neighbours overlap."""
    return round(seconds * 1e6)


def _complete(name: str, category: str, timed: Span | Step, args: dict[str, int]) -> dict[str, Any]:
    begin = _us(timed.begin)
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": _us(timed.end) - begin, "args": args}


def _nested(events: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events in as few rows as it takes for those of a row to lie within or beside each other; outer ones first."""
    rows: list[list[dict[str, Any]]] = []
    open_ends: list[list[int]] = []  # of each row: when the events end that the next one may lie in, innermost last
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        for row, ends in zip(rows, open_ends, strict=True):
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            if not ends or end <= ends[-1]:
                row.append(event)
                ends.append(end)
                break
        else:
            rows.append([event])
            open_ends.append([end])
    return rows


def _counts(steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
    """A counter's values: a batch's tokens from its begin on, and none while no batch runs."""
    found = sorted(steps, key=lambda step: (step.begin, step.end))
    for step, following in zip(found, [*found[1:], None], strict=True):
        counter = {"ph": "C", "name": "tokens in the batch", "pid": _PID}
        yield {**counter, "ts": _us(step.begin), "args": {"tokens": step.n_tokens}}
        if following is None or _us(following.begin) > _us(step.end):
            yield {**counter, "ts": _us(step.end), "args": {"tokens": 0}}


# ── as a picture ─────────────────────────────────────────────────────────────────────────────────────

_DPI = 150
_WIDTH, _MAX_HEIGHT = 12.0, 24.0  # inches, as all that follow
_TOP, _BOTTOM, _RIGHT = 0.4, 0.5, 0.3
_STRIP, _BETWEEN = 0.6, 0.15  # the strip of batches, and the gap above it
_PITCH = 0.34
"""From lane to lane, as long as there is room."""

_LEGIBLE = 4.5
"""Points; smaller texts of marks are left out, and of names only some are shown."""

_COLOURS = {
    "wait": "#e4e7eb",
    "run": "#a89c86",
    "prefill": "#2c6fad",
    "prompt": "#74b4e3",
    "decode": "#e79a2b",
    "export": "#b0609b",
    "fork": "#7a5aa6",
    "restore": "#2f9e77",
}
"""In this order above each other: what is short and rare lies on top."""

_INK, _LINE, _PALE, _BATCH = "#30363d", "#d0d5db", "#f6f7f9", "#8793a1"


def figure(timeline: Timeline) -> Figure:
    """What `Timeline.plot` writes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    n_lanes = max(1, len(timeline.lanes))
    below = _BOTTOM + (_STRIP + _BETWEEN if timeline.steps else 0)
    pitch = min(_PITCH, (_MAX_HEIGHT - _TOP - below) / n_lanes)
    height = _TOP + below + pitch * n_lanes
    made = Figure(figsize=(_WIDTH, height))
    FigureCanvasAgg(made)  # one that can measure text

    room, every = 72 * 0.7 * pitch, 1
    if room < _LEGIBLE:
        room, every = _LEGIBLE, math.ceil(_LEGIBLE / room)
    size = min(9.0, room)
    names = [one_line(lane, 32) for lane in timeline.lanes]
    left = max(0.75, 0.2 + max((_width(made, name, size) for name in names[::every]), default=0))
    wide = _WIDTH - left - _RIGHT
    begin, end = _extent(timeline)
    scale = _Scale(begin, end, wide, "s" if end - begin >= 1 else "ms")

    lanes = made.add_axes((left / _WIDTH, below / height, wide / _WIDTH, pitch * n_lanes / height))
    lanes.set_ylim(n_lanes - 0.5, -0.5)
    for at in range(0, len(timeline.lanes), 2):
        lanes.axhspan(at - 0.5, at + 0.5, color=_PALE, linewidth=0, zorder=0)
    top, tall = (-0.14, 0.54) if timeline.marks else (-0.33, 0.66)  # texts of marks stand above the bars
    middles = [at + top + tall / 2 for at in range(len(names))]
    lanes.set_yticks(middles[::every], names[::every], fontsize=size, parse_math=False)
    row = {lane: at for at, lane in enumerate(timeline.lanes)}
    bars = merge(timeline.spans, 2 * scale.pixel)
    for (lane, kind), spans in groupby(bars, key=lambda span: (span.lane, span.kind)):
        pairs = [(scale.at(span.begin), scale.long(span.end - span.begin)) for span in spans]
        drawn = lanes.broken_barh(pairs, (row[lane] + top, tall), facecolors=_COLOURS[kind], linewidth=0)
        drawn.set_zorder(2 + list(_COLOURS).index(kind) / 10)
        drawn.set_snap(True)  # else a thin bar between two pixels is two pale ones
    by_lane = sorted(timeline.marks, key=lambda mark: (row[mark.lane], mark.at))
    for lane, marks in groupby(by_lane, key=lambda mark: mark.lane):
        _draw_marks(lanes, list(marks), row[lane] + top, pitch, scale)

    axes = [lanes]
    if timeline.steps:
        axes.append(made.add_axes((left / _WIDTH, _BOTTOM / height, wide / _WIDTH, _STRIP / height)))
        _draw_steps(axes[1], timeline.steps, scale)
        lanes.tick_params(axis="x", labelbottom=False)
    for ax in axes:
        ax.set_xlim(scale.at(begin), scale.at(end))
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.spines["bottom"].set_color(_LINE)
        ax.grid(axis="x", color=_LINE, linewidth=0.5, alpha=0.7)
        ax.set_axisbelow(True)
        ax.tick_params(which="both", length=0, colors=_INK)
    axes[-1].tick_params(axis="x", labelsize=8)
    axes[-1].xaxis.set_major_formatter("{x:,g}")
    axes[-1].set_xlabel(f"time ({scale.unit})", fontsize=9, color=_INK)

    present = {span.kind for span in timeline.spans}
    patches = [Patch(color=_COLOURS[kind], label=kind) for kind in KINDS if kind in present]
    if patches:
        lanes.legend(
            handles=patches,
            ncols=len(patches),
            loc="lower left",
            bbox_to_anchor=(0, 1),
            borderaxespad=0.4,
            borderpad=0,
            frameon=False,
            handlelength=1.2,
            fontsize=9,
            labelcolor=_INK,
        )
    return made


@dataclass(frozen=True)
class _Scale:
    """The time axis: seconds `begin` to `end` in `wide` inches, in `unit`."""

    begin: float
    end: float
    wide: float
    unit: str

    @property
    def pixel(self) -> float:
        """Seconds."""
        return (self.end - self.begin) / (self.wide * _DPI)

    def at(self, seconds: float) -> float:
        """In the axis's unit."""
        return seconds if self.unit == "s" else seconds * 1e3

    def long(self, seconds: float) -> float:
        """A length in the axis's unit, of a pixel or more."""
        return self.at(max(seconds, self.pixel))

    def inches(self, seconds: float) -> float:
        """From the left."""
        return (seconds - self.begin) / (self.end - self.begin) * self.wide


def _extent(timeline: Timeline) -> tuple[float, float]:
    """Seconds: when the run began, and a little after its last moment."""
    moments = [0.0, *(mark.at for mark in timeline.marks)]
    lasting: tuple[Span | Step, ...] = (*timeline.spans, *timeline.steps)
    for timed in lasting:
        moments += (timed.begin, timed.end)
    begin, end = min(moments), max(moments)
    return begin, (end + 0.005 * (end - begin) if end > begin else begin + 1)


def _draw_marks(ax: Axes, marks: list[Mark], top: float, pitch: float, scale: _Scale) -> None:
    """Triangles on the upper edge of a lane's bar, and above it the texts for which there is room.

    From the right, for the last one tells how it ended.
    """
    text_size, triangle = min(6.5, 72 * 0.3 * pitch), min(4.5, max(2.5, 72 * 0.2 * pitch))
    shown: list[float] = []
    free_tip = free_text = math.inf  # inches, to the right of which there is something
    for mark in reversed(marks):
        x = scale.inches(mark.at)
        if x > free_tip - triangle / 72:
            continue  # a row of triangles, not a smear
        free_tip = x
        shown.append(scale.at(mark.at))
        text = one_line(mark.text, 48)
        if text_size < _LEGIBLE or not text:
            continue
        long = _width(ax.figure, text, text_size)
        begin = max(0.0, min(x - 0.02, scale.wide + _RIGHT - 0.05 - long))
        if begin + long < free_text:
            at = scale.at(scale.begin + begin / scale.wide * (scale.end - scale.begin))
            ax.text(at, top - 0.12, text, fontsize=text_size, color=_INK, parse_math=False, zorder=4)
            free_text = begin - 0.06
    ax.plot(
        shown,
        [top] * len(shown),
        linestyle="none",
        marker="v",
        markersize=triangle,
        color=_INK,
        markeredgecolor="white",
        markeredgewidth=0.4,
        clip_on=False,
        zorder=3.5,
    )


def _draw_steps(ax: Axes, steps: Iterable[Step], scale: _Scale) -> None:
    """Tokens of each batch over time: of a pixel's width, those of its largest."""
    n = round(scale.wide * _DPI)
    heights = tallest(steps, scale.begin, scale.end, n)
    edges = [scale.at(scale.begin + i * (scale.end - scale.begin) / n) for i in range(n + 1)]
    ax.stairs(heights, edges, fill=True, color=_BATCH, linewidth=0)
    most, least = max(1, *heights), min((height for height in heights if height), default=1)
    if most < 8 * least:
        ax.set_ylim(0, most * 1.1)
        ax.set_yticks([0, most])
    else:  # a decode beside a prefill would not be seen
        ax.set_yscale("log", nonpositive="clip")
        ax.set_ylim(0.6, most * 1.3)
        ax.set_yticks([*(10**i for i in range(len(str(most))) if 3 * 10**i < most), most])
        ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.tick_params(axis="y", labelsize=7)
    ax.set_ylabel("tokens\na batch", fontsize=7, color=_INK, rotation=0, ha="right", va="center")


def tallest(steps: Iterable[Step], begin: float, end: float, n: int) -> list[int]:
    """Of each of `n` equal parts of the time from `begin` to `end`: the tokens of the largest batch in it, or 0."""
    found = [0] * n
    for step in steps:
        first, last = ((moment - begin) / (end - begin) * n for moment in (step.begin, step.end))
        for i in range(max(0, int(first)), min(n, max(math.ceil(last), int(first) + 1))):
            found[i] = max(found[i], step.n_tokens)
    return found


def _width(figure: Figure | SubFigure, text: str, size: float) -> float:
    """Inches."""
    drawn = figure.text(0, 0, text, fontsize=size, parse_math=False)
    found = drawn.get_window_extent().width / figure.dpi
    drawn.remove()
    return float(found)
